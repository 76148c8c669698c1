"""The checkpointers under the module name that Reverb gives them; see ``checkpointers``."""

from __future__ import annotations

from shmreplay.checkpointers import CheckpointerBase, DefaultCheckpointer, TempDirCheckpointer

__all__ = ["CheckpointerBase", "DefaultCheckpointer", "TempDirCheckpointer"]
