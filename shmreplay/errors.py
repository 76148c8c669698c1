"""Every exception of the package, under one root.

Each class also derives from the built-in exception that Reverb raises in the same situation, so
that code which catches ``ValueError``, ``RuntimeError`` or ``TypeError`` goes on working. Every
message says what was given, what was expected and what to do; after an error nothing is changed.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ArenaFullError",
    "ArgumentTypeError",
    "AuthenticationError",
    "CheckpointError",
    "DeadlineExceededError",
    "ExpiredReferenceError",
    "ExtensionError",
    "ForkedHandleError",
    "HistoryIndexError",
    "InvalidArgumentError",
    "OutOfMemoryError",
    "PriorityError",
    "ProtocolError",
    "ReverbError",
    "ServerClosedError",
    "SignatureError",
    "StoreExistsError",
    "StoreLimitError",
    "StoreNotFoundError",
    "StorePermissionError",
    "TableCorruptedError",
    "TableNotFoundError",
    "VersionMismatchError",
    "WriterClosedError",
    "WriterStateError",
]


# No user's call makes a wrong message: the end of what is said of each.
_OTHER_PEER: Final = (
    "expected what the protocol allows. Install the same version of shmreplay on both sides, and"
    " let nothing else connect to the port."
)


class ReverbError(Exception):
    """Raised when anything goes wrong in this package: the root of all its exceptions."""


class DeadlineExceededError(ReverbError, TimeoutError):
    """Raised when a call could not finish within the timeout that it was given."""


class ArenaFullError(ReverbError, MemoryError):
    """Raised when the shared memory of a store has no room for what should be written.

    Nothing was stored. Work goes on once items have been removed or more memory was given.
    """


class OutOfMemoryError(ReverbError, MemoryError):
    """Raised when this process has no memory of its own for a copy of what it was given.

    Nothing was stored. It is the process's memory that lacks, not the store's.
    """


class TableNotFoundError(ReverbError, RuntimeError, ValueError):
    """Raised when a table of the given name does not exist in the store.

    It is a ``RuntimeError`` as well as a ``ValueError`` since Reverb raises the one from sampling
    and the other from inserting.
    """


class InvalidArgumentError(ReverbError, ValueError):
    """Raised when an argument has the right type but a value that cannot be accepted."""


class ArgumentTypeError(ReverbError, TypeError):
    """Raised when an argument has a type that cannot be accepted."""


class SignatureError(InvalidArgumentError):
    """Raised when a signature cannot be used, or when data does not match a signature."""


class PriorityError(InvalidArgumentError):
    """Raised when a priority is NaN, or negative or infinite where weights are made of it."""


class StoreExistsError(ReverbError, ValueError):
    """Raised when a store should be created under a name, or on a port, that is taken."""


class StoreNotFoundError(ReverbError, RuntimeError):
    """Raised when there is no store of the given name or address."""


class StoreLimitError(ReverbError, RuntimeError):
    """Raised when a store has no free entry for another process, writer, sampler or structure."""


class StorePermissionError(ReverbError, PermissionError):
    """Raised when a store exists but belongs to another user."""


class ServerClosedError(ReverbError, RuntimeError):
    """Raised when a call needs a server that was stopped, also while the call was waiting."""


class WriterStateError(ReverbError, RuntimeError):
    """Raised when a writer is in a state that the call does not fit, such as a step still open."""


class WriterClosedError(WriterStateError):
    """Raised when a writer is used after it was closed."""


class HistoryIndexError(ReverbError, IndexError):
    """Raised when a writer's history is indexed by a step that it does not have."""


class ExpiredReferenceError(InvalidArgumentError, RuntimeError):
    """Raised when a trajectory column refers to a value that its writer does not keep any more."""


class ExtensionError(ReverbError, RuntimeError):
    """Raised when an extension's method would wait for itself, or uses an item after it is over."""


class ForkedHandleError(ReverbError, RuntimeError):
    """Raised when a process uses a handle that its parent opened before the fork."""


class TableCorruptedError(ReverbError, RuntimeError):
    """Raised when the check of a table failed, by that call and by every later one on the table.

    The data of the table can still be read out for inspection.
    """


class VersionMismatchError(ReverbError, RuntimeError):
    """Raised when a store or a peer has another layout or protocol version than this package."""


class AuthenticationError(ReverbError, RuntimeError):
    """Raised when a remote peer did not prove who it is, or has no right to connect."""


class ProtocolError(ReverbError, RuntimeError):
    """Raised when a remote peer sent something that the protocol does not allow."""

    def __str__(self) -> str:
        """What came, and, as that is all there is to do in any case, what to do."""
        text = super().__str__()
        return text if text.endswith(_OTHER_PEER) else f"{text}; {_OTHER_PEER}"


class CheckpointError(ReverbError, RuntimeError):
    """Raised when a checkpoint cannot be written, or is incomplete or damaged when read."""
