"""Values in messages: typed, little-endian, bounded. Nothing that is read here is trusted."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import lz4.block
import numpy as np
import numpy.typing as npt

from shmreplay import limits
from shmreplay._native import Buffer
from shmreplay.errors import InvalidArgumentError, ProtocolError
from shmreplay.spec import DTYPE_CODES, DTYPE_OF_CODE, dtype_code, dtype_of

__all__ = ["Reader", "Writer", "checked_dtype", "steps_of_a_run"]

INLINE: Final = 0
PART: Final = 1
LZ4: Final = 2

_TEXT: Final = 15
"""Codes of dtypes from here on are of text: the first byte, and the width in those above it."""

_HEAD: Final = struct.Struct("<BBBB")
_U8: Final = struct.Struct("<B")
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_I64: Final = struct.Struct("<q")
_F64: Final = struct.Struct("<d")
_DIMS: Final = [struct.Struct(f"<{n}Q") for n in range(limits.MAX_SPEC_DIMS + 2)]
# Received arrays of fewer bytes are copied into memory of their own, larger ones stay where they
# are: a small one would keep the whole receive buffer of its connection alive.
_COPY_BYTES: Final = 64 * 2**10


def steps_of_a_run(nbytes: int) -> int:
    """Steps of so many bytes that a writer sends together at most."""
    return min(limits.BRIDGE_RUN_STEPS, limits.BRIDGE_RUN_BYTES // max(nbytes, 1) + 1)


class Writer:
    """Puts values into a meta part, and large arrays into parts of their own."""

    __slots__ = ("compress", "meta", "nbytes", "parts")

    def __init__(self, compress: bool = False) -> None:
        """Begins an empty message.

        Args:
            compress: Compress arrays where that makes them smaller.
        """
        self.meta = bytearray()
        self.parts: list[Any] = []
        self.nbytes = 0
        """Bytes of the parts."""
        self.compress = compress

    def u8(self, value: int) -> None:
        """Appends an unsigned byte."""
        self.meta += _U8.pack(value)

    def u16(self, value: int) -> None:
        """Appends 16 bits without sign."""
        self.meta += _U16.pack(value)

    def u32(self, value: int) -> None:
        """Appends 32 bits without sign."""
        self.meta += _U32.pack(value)

    def u64(self, value: int) -> None:
        """Appends 64 bits without sign."""
        self.meta += _U64.pack(value)

    def i64(self, value: int) -> None:
        """Appends 64 bits with sign."""
        self.meta += _I64.pack(value)

    def f64(self, value: float) -> None:
        """Appends a double."""
        self.meta += _F64.pack(value)

    def timeout(self, seconds: float | None) -> None:
        """Appends a timeout: infinity for none."""
        self.f64(math.inf if seconds is None else seconds)

    def text(self, value: str | bytes) -> None:
        """Appends a text.

        Raises:
            InvalidArgumentError: It is too long.
        """
        data = value.encode() if isinstance(value, str) else value
        if len(data) > limits.BRIDGE_TEXT_BYTES:
            raise InvalidArgumentError(
                f"Got a text of {len(data)} bytes, which does not fit a message; expected at most"
                f" {limits.BRIDGE_TEXT_BYTES}. Give a shorter one."
            )
        self.meta += _U32.pack(len(data))
        self.meta += data

    def array(self, array: npt.NDArray[Any]) -> None:
        """Appends a C-contiguous array of a known dtype. Large ones are not copied."""
        code, shape = DTYPE_CODES.get(array.dtype) or dtype_code(array.dtype), array.shape
        if array.nbytes <= limits.BRIDGE_INLINE_BYTES:
            self.raw(code, shape, array.tobytes())
        else:
            self.raw(code, shape, array.reshape(-1).view(np.uint8).data)

    def raw(self, code: int, shape: Sequence[int], data: Any) -> None:
        """Appends an array by the code of its dtype, its shape, and its bytes."""
        nbytes = len(data)
        if nbytes <= limits.BRIDGE_INLINE_BYTES:
            self.meta += _HEAD.pack(code & 0xFF, INLINE, len(shape), 0)
            if code > _TEXT:
                self.u32(code >> 8)
            self.meta += _DIMS[len(shape)].pack(*shape)
            self.meta += data
            return
        packed = _compressed(memoryview(data)) if self.compress else None
        codec = PART if packed is None else LZ4
        self.meta += _HEAD.pack(code & 0xFF, codec, len(shape), 0)
        if code > _TEXT:
            self.u32(code >> 8)
        self.meta += _DIMS[len(shape)].pack(*shape)
        self.parts.append(data if packed is None else packed)
        self.nbytes += nbytes if packed is None else len(packed)

    def check_size(self, what: str) -> None:
        """Refuses a message that the other side would not take.

        Raises:
            InvalidArgumentError: It is too large.
        """
        if (
            len(self.meta) > limits.BRIDGE_META_BYTES
            or len(self.parts) > limits.BRIDGE_PARTS
            or len(self.meta) + self.nbytes > limits.BRIDGE_MESSAGE_BYTES
        ):
            raise InvalidArgumentError(
                f"{what}: {len(self.meta) + self.nbytes} bytes in {len(self.parts)} arrays do not"
                f" fit one message of at most {limits.BRIDGE_MESSAGE_BYTES} bytes. Make"
                " several calls with less in each."
            )


def _compressed(data: memoryview) -> bytes | None:
    """The data compressed; None where that does not pay."""
    if len(data) < limits.BRIDGE_COMPRESS_BYTES:
        return None
    if len(data) > 2 * limits.BRIDGE_PROBE_BYTES:
        probe = data[: limits.BRIDGE_PROBE_BYTES]
        if len(lz4.block.compress(probe, store_size=False)) > len(probe) * 7 // 8:
            return None
    packed: bytes = lz4.block.compress(data, store_size=False)
    return packed if len(packed) < len(data) * 7 // 8 else None


class Reader:
    """Takes values out of a message. Every length is checked before it is used."""

    __slots__ = ("_budget", "_end", "_next", "_parts", "at", "meta", "unpacked")

    def __init__(self, meta: Any, parts: Sequence[Any] = ()) -> None:
        """Takes a meta part and the parts that follow it: bytes-like objects."""
        self.meta = memoryview(meta)
        self._end = len(self.meta)
        self.at = 0
        """Bytes of the meta part that were read."""
        self._parts = parts
        self._next = 0
        self._budget = limits.BRIDGE_MESSAGE_BYTES
        self.unpacked = 0
        """Bytes that compressed arrays became."""

    @property
    def at_end(self) -> bool:
        """Whether the meta part has been read."""
        return self.at >= self._end

    @property
    def left(self) -> int:
        """Bytes of the meta part that were not read yet."""
        return self._end - self.at

    def take(self, n: int) -> memoryview:
        """The next n bytes of the meta part."""
        at = self.at
        if n > self._end - at:
            raise self._too_short()
        self.at = at + n
        return self.meta[at : at + n]

    def _too_short(self) -> ProtocolError:
        return ProtocolError(f"a message ends after {self._end} bytes, in the middle of a value")

    def peek(self) -> int:
        """The next byte of the meta part, which there is; it stays."""
        return self.meta[self.at]

    def rest(self) -> memoryview:
        """What is left of the meta part."""
        return self.take(self._end - self.at)

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """The next fields of the meta part."""
        at = self.at
        end = at + layout.size
        if end > self._end:
            raise self._too_short()
        self.at = end
        return layout.unpack_from(self.meta, at)

    def u8(self) -> int:
        """An unsigned byte."""
        value: int = self.unpack(_U8)[0]
        return value

    def u16(self) -> int:
        """16 bits without sign."""
        value: int = self.unpack(_U16)[0]
        return value

    def u32(self) -> int:
        """32 bits without sign."""
        value: int = self.unpack(_U32)[0]
        return value

    def u64(self) -> int:
        """64 bits without sign."""
        value: int = self.unpack(_U64)[0]
        return value

    def i64(self) -> int:
        """64 bits with sign."""
        value: int = self.unpack(_I64)[0]
        return value

    def f64(self) -> float:
        """A double."""
        value: float = self.unpack(_F64)[0]
        return value

    def timeout(self) -> float | None:
        """A timeout in seconds; None for ever."""
        seconds = self.f64()
        if math.isnan(seconds):
            raise ProtocolError("a timeout is NaN")
        return None if seconds == math.inf else seconds

    def count(self, most: int, what: str) -> int:
        """A 32-bit number of things that follow."""
        n = self.u32()
        if n > most:
            raise ProtocolError(f"{n} {what} in a message; at most {most}")
        return n

    def blob(self, most: int = limits.BRIDGE_TEXT_BYTES) -> bytes:
        """Bytes with their length before them."""
        return bytes(self.take(self.count(most, "bytes of text")))

    def text(self, most: int = limits.BRIDGE_TEXT_BYTES) -> str:
        """A text."""
        try:
            return self.blob(most).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a text is not UTF-8: {error}") from None

    def array(self) -> npt.NDArray[Any]:
        """An array. It may be read-only, and refer to the memory of the message."""
        code, codec, ndim, zero = self.unpack(_HEAD)
        if ndim >= len(_DIMS) or codec > LZ4 or zero:
            raise ProtocolError(f"an array of dtype {code}, codec {codec}, {ndim} dimensions")
        dtype = DTYPE_OF_CODE.get(code)
        if dtype is None:
            dtype = checked_dtype(self.width(code))
        shape = self.unpack(_DIMS[ndim])
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._budget or max(shape, default=0) > limits.MAX_VALUE_BYTES:
            raise ProtocolError(f"an array of shape {list(shape)} is larger than a message may be")
        self._budget -= nbytes
        if codec == INLINE:
            return _array_of(self.take(nbytes), shape, dtype)
        if self._next >= len(self._parts):
            raise ProtocolError("a message has fewer parts than its meta part says")
        part = self._parts[self._next]
        self._next += 1
        if codec == LZ4:
            self.unpacked += nbytes
            return _array_of(_decompressed(part, nbytes), shape, dtype)
        if len(part) != nbytes:
            raise ProtocolError(f"a part of {len(part)} bytes for an array of {nbytes}")
        return _array_of(part, shape, dtype)

    def width(self, code: int) -> int:
        """The code of a dtype whose first byte this is: that of text is followed by its width."""
        return code if code < _TEXT else code | self.u32() << 8

    def finish(self) -> None:
        """Checks that nothing is left over."""
        if not self.at_end or self._next != len(self._parts):
            raise ProtocolError("a message is longer than what it says")


def checked_dtype(code: int) -> np.dtype[Any]:
    """The dtype of a code that came in a message."""
    dtype = dtype_of(code)
    if dtype is None:
        raise ProtocolError(f"data of an unknown dtype {code & 0xFF}, width {code >> 8}")
    return dtype


def _decompressed(part: Any, nbytes: int) -> bytes:
    try:
        data: bytes = lz4.block.decompress(part, uncompressed_size=nbytes)
    except (lz4.block.LZ4BlockError, ValueError, OverflowError, MemoryError) as error:
        raise ProtocolError(f"a compressed part cannot be read: {error}") from None
    if len(data) != nbytes:
        raise ProtocolError(f"a compressed part has {len(data)} bytes; expected {nbytes}")
    return data


def _array_of(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not all(shape):
        return np.zeros(shape, dtype)
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, data)
    nbytes = array.nbytes
    if nbytes < _COPY_BYTES or not array.flags.aligned:
        memory: Any = Buffer(nbytes)
        copy: npt.NDArray[Any] = np.ndarray(shape, dtype, memory)
        copy[...] = array
        return copy
    return array
