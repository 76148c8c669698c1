"""Protocol buffers in their binary form, as far as signatures and tables are told in it.

Reading alone, without the package of that name: the numbers of fields are those of Reverb's
``schema.proto`` and TensorFlow's ``struct.proto``.
"""

from __future__ import annotations

import collections
import struct
from typing import Any, Final

from shmreplay.errors import InvalidArgumentError
from shmreplay.limits import MAX_NESTING
from shmreplay.spec import TensorSpec

__all__ = ["Message", "signature_of"]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# TensorFlow's DataType, where numpy has the type.
_DTYPES: Final = dict(
    zip(
        (1, 2, 3, 4, 5, 6, 8, 9, 10, 17, 18, 19, 22, 23),
        (
            *("float32", "float64", "int32", "uint8", "int16", "int8", "complex64", "int64"),
            *("bool", "uint16", "complex128", "float16", "uint32", "uint64"),
        ),
        strict=True,
    )
)

# Kinds of tensorflow.StructuredValue.
_NONE, _SPEC, _BOUNDED_SPEC, _LIST, _TUPLE, _DICT, _NAMEDTUPLE = 1, 33, 35, 51, 52, 53, 54


class Message:
    """The fields of a message, by number; those that it lacks read as 0, empty or unset."""

    def __init__(self, data: bytes) -> None:
        """Takes a message apart.

        Raises:
            InvalidArgumentError: It is none.
        """
        self.values: dict[int, list[int | bytes]] = {}
        at = 0
        while at < len(data):
            tag, at = _varint(data, at)
            kind = tag & 7
            value: int | bytes
            if kind == _VARINT:
                value, at = _varint(data, at)
            elif kind in (_FIXED64, _FIXED32, _BYTES):
                size, at = _varint(data, at) if kind == _BYTES else (8 if kind == 1 else 4, at)
                value, at = data[at : at + size], at + size
            else:
                raise _malformed(f"a field of wire type {kind}")
            if at > len(data) or tag >> 3 == 0:
                raise _malformed("a field that ends beyond the message, or has no number")
            self.values.setdefault(tag >> 3, []).append(value)

    def __contains__(self, number: int) -> bool:
        """Whether the message has a field."""
        return number in self.values

    def _last(self, number: int, kind: type, default: Any) -> Any:
        value = self.values.get(number, [default])[-1]
        if not isinstance(value, kind):
            raise _malformed(f"field {number} of another wire type")
        return value

    def integer(self, number: int) -> int:
        """A field of an integer type, of a bool or of an enumeration."""
        value: int = self._last(number, int, 0)
        return value - 2**64 if value >= 2**63 else value

    def double(self, number: int) -> float:
        """A field of type double."""
        value = self._last(number, bytes, bytes(8))
        if len(value) != 8:
            raise _malformed(f"field {number} of {len(value)} bytes")
        return float(struct.unpack("<d", value)[0])

    def text(self, number: int) -> str:
        """A field of type string."""
        try:
            return str(self._last(number, bytes, b"").decode())
        except UnicodeDecodeError as error:
            raise _malformed(f"text in field {number} that is no UTF-8") from error

    def messages(self, number: int) -> list[Message]:
        """The messages of a repeated field."""
        found = []
        for value in self.values.get(number, []):
            if not isinstance(value, bytes):
                raise _malformed(f"field {number} of another wire type")
            found.append(Message(value))
        return found

    def message(self, number: int) -> Message:
        """The message in a field; one without fields where there is none."""
        parts = self.values.get(number, [])
        if any(not isinstance(part, bytes) for part in parts):
            raise _malformed(f"field {number} of another wire type")
        # Several are one that was told in parts.
        return Message(b"".join(part for part in parts if isinstance(part, bytes)))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _malformed("a number that ends beyond the message")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value & (2**64 - 1), at
    raise _malformed("a number of more than ten bytes")


def _malformed(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Got bytes with {what}; expected a protocol buffer in its binary form. Use what "
        "SerializeToString() gives."
    )


def signature_of(value: Message, depth: int = 0) -> Any:
    """The signature in a ``tensorflow.StructuredValue``; None where it is that, or not set.

    Raises:
        InvalidArgumentError: It is none, or has a type that cannot be stored.
    """
    if depth > MAX_NESTING:
        raise _malformed(f"more than {MAX_NESTING} containers within each other")
    if not value.values or _NONE in value:
        return None
    for number in (_SPEC, _BOUNDED_SPEC):
        if number in value:
            return _spec_of(value.message(number))
    for number, container in ((_LIST, list), (_TUPLE, tuple)):
        if number in value:
            inner = value.message(number).messages(1)
            return container(signature_of(each, depth + 1) for each in inner)
    if _DICT in value:
        pairs = value.message(_DICT).messages(1)
        return {each.text(1): signature_of(each.message(2), depth + 1) for each in pairs}
    if _NAMEDTUPLE in value:
        named = value.message(_NAMEDTUPLE)
        pairs = named.messages(2)
        try:
            make: Any = collections.namedtuple
            kind = make(named.text(1), [each.text(1) for each in pairs])
        except ValueError as error:
            raise _malformed(f"a namedtuple that there cannot be ({error})") from error
        return kind(*(signature_of(each.message(2), depth + 1) for each in pairs))
    raise _malformed(f"a signature with field {next(iter(value.values))}")


def _spec_of(spec: Message) -> TensorSpec:
    shape, dtype = spec.message(2), spec.integer(3)
    if dtype not in _DTYPES or shape.integer(3):
        raise InvalidArgumentError(
            f"Got a signature with a tensor {spec.text(1)!r} of TensorFlow's type {dtype}"
            f"{' and of unknown rank' if shape.integer(3) else ''}; expected a numeric type and a "
            "known rank. Leave that column out of the signature."
        )
    sizes = [dim.integer(1) for dim in shape.messages(2)]
    return TensorSpec(
        [None if size < 0 else size for size in sizes], _DTYPES[dtype], spec.text(1) or None
    )
