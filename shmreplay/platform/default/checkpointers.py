"""The checkpointers under the module name of Reverb's default platform; see ``checkpointers``."""

from __future__ import annotations

from shmreplay.checkpointers import (
    CheckpointerBase,
    DefaultCheckpointer,
    TempDirCheckpointer,
    default_checkpointer,
)

__all__ = [
    "CheckpointerBase",
    "DefaultCheckpointer",
    "TempDirCheckpointer",
    "default_checkpointer",
]
