"""Where a server's checkpoints should lie: the objects that programs written for Reverb pass.

This version saves and loads no checkpoints. A server takes such an object and says so in the log;
`Client.checkpoint` raises.
"""

from __future__ import annotations

import abc
import os
import tempfile
from typing import NamedTuple

from shmreplay.errors import ArgumentTypeError

__all__ = [
    "CheckpointSettings",
    "CheckpointerBase",
    "DefaultCheckpointer",
    "TempDirCheckpointer",
    "default_checkpointer",
]


class CheckpointSettings(NamedTuple):
    """What a checkpointer comes down to."""

    path: str
    """Directory under which checkpoints lie."""

    group: str = ""
    """Group that should own them; empty: that of the process."""

    fallback_checkpoint_path: str | None = None
    """A checkpoint to load where the directory has none."""


class CheckpointerBase(abc.ABC):
    """What all checkpointers have in common."""

    @abc.abstractmethod
    def internal_checkpointer(self) -> CheckpointSettings:
        """Returns the settings that a server works with."""


class DefaultCheckpointer(CheckpointerBase):
    """Names a directory for checkpoints. It need not be there yet."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        group: str = "",
        fallback_checkpoint_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Makes a checkpointer.

        Args:
            path: Directory under which checkpoints lie.
            group: Group that should own them; empty: that of the process.
            fallback_checkpoint_path: A checkpoint to load where the directory has none.

        Raises:
            ArgumentTypeError: A path is not a path, or the group is not a str.
        """
        self.path = _path("path", path)
        if not isinstance(group, str):
            raise ArgumentTypeError(f"Got group {group!r}; expected the name of a group as a str.")
        self.group = group
        self.fallback_checkpoint_path = (
            None
            if fallback_checkpoint_path is None
            else _path("fallback_checkpoint_path", fallback_checkpoint_path)
        )

    def internal_checkpointer(self) -> CheckpointSettings:
        """Returns the settings that a server works with."""
        return CheckpointSettings(self.path, self.group, self.fallback_checkpoint_path)

    def __repr__(self) -> str:
        """Names the directory."""
        return f"{type(self).__name__}(path={self.path!r})"


class TempDirCheckpointer(DefaultCheckpointer):
    """Names a directory for checkpoints that is made for it where the system keeps such."""

    def __init__(self) -> None:
        """Makes the directory."""
        super().__init__(tempfile.mkdtemp(prefix="shmreplay-"))


def default_checkpointer(group: str | None = None) -> CheckpointerBase:
    """Returns a checkpointer with a directory of its own, as Reverb's servers have by default.

    Args:
        group: Has no effect, as in Reverb.
    """
    return TempDirCheckpointer()


def _path(name: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(
            f"Got {name} {value!r} of type {type(value).__name__}; expected a str or a Path."
        )
    path = os.fspath(value)
    if not isinstance(path, str):
        raise ArgumentTypeError(f"Got {name} {value!r}; expected a path of text, not bytes.")
    return path
