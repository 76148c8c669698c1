"""Messages of the bridge: headers, kinds, error codes. PROTOCOL.md says the same byte by byte."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from shmreplay import errors, limits
from shmreplay.bridge.wire import Reader, Writer
from shmreplay.errors import ProtocolError

__all__ = [
    "CHANGE",
    "CHANGE_BODY",
    "FAILED",
    "GONE",
    "HEADER",
    "HELD",
    "INFO",
    "INSERTED",
    "ITEM",
    "LISTED",
    "LISTED_FIELDS",
    "MAGIC",
    "REFERENCE",
    "REPLACE",
    "REQUESTS",
    "SET_LIMITER",
    "SET_MAX_SIZE",
    "SET_MAX_TIMES_SAMPLED",
    "SQUEEZED",
    "STATE",
    "VERSION",
    "WITH_PROCESSES",
    "Header",
    "Kind",
    "Op",
    "check_parts",
    "decode_error",
    "encode",
    "encode_error",
    "read_header",
]

MAGIC: Final = b"SRB\x1a"
VERSION: Final = 4
"""The one version that this package speaks. A peer that speaks none in common is told so."""

HEADER: Final = struct.Struct("<4sHHIIQQQ")
"""Magic, version, kind, flags (0), parts after the meta part, sequence, ack, bytes after it."""


class Kind(enum.IntEnum):
    """What a message is."""

    HELLO = 1
    WELCOME = 2
    PING = 3
    PONG = 4
    BYE = 5
    REFUSED = 6
    RELEASE = 7
    CANCEL = 8
    REDIRECT = 9
    REPLY = 10
    FAILURE = 11
    ROOM = 12
    GO = 13
    INSERT_BATCH = 20
    SAMPLE = 21
    UPDATE = 22
    DELETE = 23
    RESET = 24
    INFO = 25
    STATS = 26
    CHECK = 27
    LIST = 28
    FETCH = 29
    WRITER_OPEN = 30
    WRITE = 31
    FLUSH = 32
    WRITER_CLOSE = 33
    CONFIGURE = 34
    CHECKPOINT = 35


class Op(enum.IntEnum):
    """What a record of a WRITE message is."""

    COLUMN = 1
    ROWS = 2
    SCHEMA = 3
    ITEM = 4
    EPISODE = 5
    CONFIGURE = 6
    REPLACE = 7


ITEM: Final = struct.Struct("<BHIddH")
"""Op.ITEM, table, structure, priority (NaN: None), timeout (NaN: hold back), columns."""

REPLACE: Final = struct.Struct("<BHIQH")
"""Op.REPLACE, table, structure, key, columns."""

CHANGE: Final = struct.Struct("<HBqqdqdd")
"""Table, what changes, max_size, max_times_sampled, samples_per_insert, min_size_to_sample,
min_diff, max_diff."""

CHANGE_BODY: Final = struct.Struct("<Bqqdqdd")
"""The same without the table."""

SET_MAX_SIZE: Final = 1
SET_MAX_TIMES_SAMPLED: Final = 2
SET_LIMITER: Final = 4
SET_MAX_BYTES: Final = 8
"""Flags of what changes. With the last, a number of 64 bits follows the rest."""

WITH_PROCESSES: Final = 1
"""Asks STATS for what `Client.overview` gives."""

LISTED_FIELDS: Final = ("key", "seq", "inserted_ns", "priority", "times_sampled")
"""Arrays of an answer to LIST."""

INFO: Final = struct.Struct("<6q2qdq2dq2dq")
"""Inserts, samples, size, episodes, deleted episodes, unique samples; max_size and what follows it
in CHANGE, as they are now; max_bytes; the largest priority seen; the sum of the sampler's weights;
bytes in the table."""

REFERENCE: Final = struct.Struct("<IHBIqq")
"""A column of an item: writer, column, flags, length, first value, stride."""

STATE: Final = struct.Struct("<BQ")
"""What became of an item, and its key."""

SQUEEZED: Final = 1
LISTED: Final = 2
"""Flags of a reference: without time dimension; its values are listed after it."""

HELD: Final = 0
INSERTED: Final = 1
FAILED: Final = 2
GONE: Final = 3
"""What became of an item: held back; in the table, or replaced; refused; not there any more."""

REQUESTS: Final = frozenset(kind for kind in Kind if kind >= Kind.INSERT_BATCH)
"""Kinds that have a sequence number and get exactly one answer."""


class Header(NamedTuple):
    """The first frame of a message."""

    kind: Kind
    parts: int
    sequence: int
    ack: int
    total: int


def encode(kind: Kind, body: Writer, sequence: int = 0, ack: int = 0) -> list[Any]:
    """The frames of a message."""
    total = len(body.meta) + body.nbytes
    head = HEADER.pack(MAGIC, VERSION, kind, 0, len(body.parts), sequence, ack, total)
    return [head, bytes(body.meta), *body.parts]


def read_header(frame: Any) -> Header:
    """Reads the first frame.

    Raises:
        VersionMismatchError: It is of another version.
        ProtocolError: It is no header, or says that the message is too large.
    """
    if len(frame) != HEADER.size:
        raise ProtocolError(f"a header of {len(frame)} bytes; expected {HEADER.size}")
    magic, version, kind, flags, parts, sequence, ack, total = HEADER.unpack(frame)
    if magic != MAGIC:
        raise ProtocolError(f"the magic word is {magic!r}; expected {MAGIC!r}")
    if version != VERSION:
        raise errors.VersionMismatchError(
            f"the peer speaks version {version} of the protocol; expected {VERSION}, as here."
            " Install the same version of shmreplay on both sides."
        )
    known = _KINDS.get(kind)
    if known is None or flags:
        raise ProtocolError(f"a message of unknown kind {kind} or with flags {flags:#x}")
    if parts > limits.BRIDGE_PARTS or total > limits.BRIDGE_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message of {parts} parts and {total} bytes; at most {limits.BRIDGE_PARTS} and"
            f" {limits.BRIDGE_MESSAGE_BYTES}"
        )
    return Header(known, parts, sequence, ack, total)


_KINDS: Final = {int(kind): kind for kind in Kind}


def check_parts(header: Header, frames: Sequence[Any]) -> None:
    """Checks the frames after the header against what it says.

    Raises:
        ProtocolError: They differ.
    """
    total = sum(map(len, frames))
    if len(frames) != header.parts + 1 or total != header.total:
        raise ProtocolError(
            f"{len(frames)} frames of {total} bytes; the header says {header.parts + 1} of"
            f" {header.total}"
        )
    if len(frames[0]) > limits.BRIDGE_META_BYTES:
        raise ProtocolError(f"a meta part of {len(frames[0])} bytes")


# A class keeps its number for ever; new ones go to the end.
_ERRORS: Final[tuple[type[errors.ReverbError], ...]] = (
    errors.ReverbError,
    errors.DeadlineExceededError,
    errors.ArenaFullError,
    errors.TableNotFoundError,
    errors.InvalidArgumentError,
    errors.ArgumentTypeError,
    errors.SignatureError,
    errors.PriorityError,
    errors.StoreExistsError,
    errors.StoreNotFoundError,
    errors.StoreLimitError,
    errors.StorePermissionError,
    errors.ServerClosedError,
    errors.WriterStateError,
    errors.WriterClosedError,
    errors.HistoryIndexError,
    errors.ExpiredReferenceError,
    errors.ForkedHandleError,
    errors.TableCorruptedError,
    errors.VersionMismatchError,
    errors.AuthenticationError,
    errors.ProtocolError,
    errors.CheckpointError,
    errors.ExtensionError,
    errors.OutOfMemoryError,
)
# Of a message, and notes of one error: what a person reads.
_ERROR_LENGTH: Final = 4096
_NOTES: Final = 16

_CODES: Final = {cls: code for code, cls in enumerate(_ERRORS)}


def error_code(error: BaseException) -> int:
    """The number of an error's class."""
    return next((_CODES[cls] for cls in type(error).__mro__ if cls in _CODES), 0)


def error_of_code(code: int, text: str) -> errors.ReverbError:
    """An error of the class of this number."""
    return (_ERRORS[code] if code < len(_ERRORS) else errors.ReverbError)(text)


def encode_error(body: Writer, error: BaseException) -> None:
    """Appends an error: its class by number, its message, its notes."""
    body.u16(error_code(error))
    body.text(str(error)[:_ERROR_LENGTH])
    notes = getattr(error, "__notes__", [])[:_NOTES]
    body.u32(len(notes))
    for note in notes:
        body.text(str(note)[:_ERROR_LENGTH])


def decode_error(reader: Reader) -> errors.ReverbError:
    """Reads an error that `encode_error` wrote."""
    code = reader.u16()
    error = error_of_code(code, reader.text())
    for _ in range(reader.count(_NOTES, "notes")):
        error.add_note(reader.text())
    return error
