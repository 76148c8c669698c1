"""Where a server's checkpoints lie and when it writes them: the objects that programs pass.

A checkpointer is a description. The server loads the newest checkpoint when it starts and writes
them as it says here; ``Client.checkpoint`` writes one at once.
"""

from __future__ import annotations

import abc
import json
import math
import os
import tempfile
from typing import Any, NamedTuple

from shmreplay.errors import ArgumentTypeError, InvalidArgumentError

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
    """Directory under which checkpoints lie; empty: one is made where the system keeps such."""

    group: str = ""
    """Group that should own them; empty: that of the process."""

    fallback_checkpoint_path: str | None = None
    """A checkpoint to load where the directory has none."""

    keep: int = 1
    """How many of the newest stay."""

    every_seconds: float | None = None
    """Time between two that the server writes by itself."""

    every_inserts: int | None = None
    """Inserts, of all tables together, between two that the server writes by itself."""

    settings: str = "declared"
    """Whose settings tables get that are loaded: ``'declared'`` or ``'saved'``."""

    reset_limiters: bool = False
    """Whether the rate limiters of tables that are loaded count anew."""

    bandwidth: float | None = None
    """Bytes of steps that are written and verified in a second, at most."""

    verify: bool = True
    """Whether what the last checkpoint has is looked at before the next one shares it."""

    def to_json(self) -> bytes:
        """Returns what those who write checkpoints need to know."""
        names = ("path", "group", "keep", "bandwidth", "verify")
        return json.dumps({name: getattr(self, name) for name in names}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> CheckpointSettings:
        """Returns the settings that ``to_json`` wrote.

        Args:
            text: What it returned.
        """
        return cls(**json.loads(text))


class CheckpointerBase(abc.ABC):
    """What all checkpointers have in common."""

    @abc.abstractmethod
    def internal_checkpointer(self) -> CheckpointSettings:
        """Returns the settings that a server works with."""


class DefaultCheckpointer(CheckpointerBase):
    """Keeps checkpoints in a directory. It need not be there yet."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        group: str = "",
        fallback_checkpoint_path: str | os.PathLike[str] | None = None,
        *,
        keep: int = 1,
        every_seconds: float | None = None,
        every_inserts: int | None = None,
        settings: str = "declared",
        reset_limiters: bool = False,
        bandwidth: float | None = None,
        verify: bool = True,
    ) -> None:
        """Makes a checkpointer.

        Args:
            path: Directory under which checkpoints lie. What else is there is never touched.
            group: Has to be empty when a checkpoint is written, as in Reverb.
            fallback_checkpoint_path: A checkpoint to load where the directory has none; if there
                is none at this path either, the server starts empty.
            keep: How many of the newest checkpoints stay; older ones are removed. What two of
                them have in common is on disk once, so a disk that damages it damages both.
            every_seconds: The server writes one by itself each time so many seconds have passed.
            every_inserts: The same each time so many items were inserted, in all tables together.
            settings: Where the settings of a table that is loaded differ from those that the server
                was given: `'declared'` takes those that it was given, `'saved'` those of the
                checkpoint, as Reverb does. Each difference is logged.
            reset_limiters: The rate limiters of tables that are loaded count anew, so that neither
                inserting nor sampling has to wait for what happened before the restart.
            bandwidth: Bytes of steps that are written in a second, at most, where the disk or the
                memory's bandwidth is to be left to others; None for as fast as it goes, with the
                least claim to the processors. It holds for what `verify` reads, too.
            verify: What the next checkpoint shares with the last one is read and compared with its
                checksums first, and what the disk damaged is written anew; the log says so. A
                second or so of one processor for each gigabyte. False leaves damage unnoticed.

        Raises:
            ArgumentTypeError: An argument has the wrong type.
            InvalidArgumentError: An argument is out of its range.
        """
        self.path = _path("path", path)
        if not isinstance(group, str):
            raise ArgumentTypeError(f"Got group {group!r}; expected a str. Give a name.")
        self.group = group
        self.fallback_checkpoint_path = (
            None
            if fallback_checkpoint_path is None
            else _path("fallback_checkpoint_path", fallback_checkpoint_path)
        )
        _check_whole("keep", keep)
        if every_inserts is not None:
            _check_whole("every_inserts", every_inserts)
        self._settings = CheckpointSettings(
            self.path,
            self.group,
            self.fallback_checkpoint_path,
            keep,
            _above_zero("every_seconds", every_seconds, "seconds", "never"),
            every_inserts,
            _declared_or_saved(settings),
            bool(reset_limiters),
            _above_zero("bandwidth", bandwidth, "bytes a second", "no limit"),
            bool(verify),
        )

    def internal_checkpointer(self) -> CheckpointSettings:
        """Returns the settings that a server works with."""
        return self._settings

    def __repr__(self) -> str:
        """Names the directory."""
        return f"{type(self).__name__}(path={self.path!r})"


class TempDirCheckpointer(DefaultCheckpointer):
    """Keeps checkpoints in a directory that is made for it where the system keeps such."""

    def __init__(self) -> None:
        """Makes the directory."""
        super().__init__(tempfile.mkdtemp(prefix="shmreplay-"))


def default_checkpointer(group: str | None = None) -> CheckpointerBase:
    """Returns a checkpointer with a directory of its own, as Reverb's servers have by default.

    Args:
        group: Has no effect, as in Reverb.
    """
    return TempDirCheckpointer()


def _declared_or_saved(settings: Any) -> str:
    if settings not in ("declared", "saved"):
        raise InvalidArgumentError(
            f"Got settings {settings!r} for a checkpointer; expected 'declared' or 'saved'. "
            f"Use one."
        )
    return str(settings)


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"Got {name} {value!r}; expected an int. Give a whole number.")
    if value < 1:
        raise InvalidArgumentError(f"Got {name} {value}; expected at least 1. Give 1 or more.")


def _above_zero(name: str, value: Any, unit: str, none: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"Got {name} {value!r}; expected {unit}. Use None for {none}.")
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgumentError(
            f"Got {name} {value}; expected {unit} above 0. Use None for {none}."
        )
    return float(value)


def _path(name: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(
            f"Got {name} {value!r} of type {type(value).__name__}; expected a str or a Path. Give "
            "it as text."
        )
    path = os.fspath(value)
    if not isinstance(path, str):
        raise ArgumentTypeError(
            f"Got {name} {value!r}; expected a path of text, not bytes. Use os.fsdecode()."
        )
    return path
