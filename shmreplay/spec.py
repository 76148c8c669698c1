"""Signatures: what the leaves of a table's items look like.

A signature is a structure (see ``tree``) of ``TensorSpec``. It is made from anything whose leaves
have a shape and a dtype: numpy arrays, ``tf.TensorSpec``, dm_env specs, ``jax.ShapeDtypeStruct``,
and Gymnasium spaces. None of those packages is imported.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmreplay import tree
from shmreplay.errors import ArgumentTypeError, InvalidArgumentError, SignatureError
from shmreplay.limits import (
    MAX_COLUMNS,
    MAX_SIGNATURE_JSON_BYTES,
    MAX_SPEC_DIMS,
    MAX_TEXT_WIDTH,
    MAX_VALUE_BYTES,
)

__all__ = [
    "DTYPE_CODES",
    "DTYPE_OF_CODE",
    "TensorSpec",
    "as_signature",
    "as_spec",
    "code_of",
    "conversion_hint",
    "dtype_code",
    "dtype_name",
    "dtype_of",
    "fit_text",
    "is_text",
    "shape_matches",
    "shape_text",
    "signature_from_json",
    "signature_to_json",
]

# The codes are part of the layout of shared memory, of the protocol and of checkpoints: a dtype may
# be added at the end, but none may ever change its code.
DTYPE_CODES: Final[dict[np.dtype[Any], int]] = {
    np.dtype(name): code
    for code, name in enumerate(
        (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        ),
        start=1,
    )
}
"""The code of every dtype of numbers (native byte order)."""

DTYPE_OF_CODE: Final[dict[int, np.dtype[Any]]] = {code: dt for dt, code in DTYPE_CODES.items()}
"""The inverse of ``DTYPE_CODES``."""

_DTYPE_OF_NAME: Final = {dt.name: dt for dt in DTYPE_CODES}

# Text of a fixed width has the code of its kind in the lowest byte and the width above it.
_TEXT_CODES: Final = {"S": 15, "U": 16}
_TEXT_KINDS: Final = {code: kind for kind, code in _TEXT_CODES.items()}
_CODE_BITS: Final = 8

# TensorFlow's names where they differ from numpy's: Reverb's messages, which callers match, use it.
_TF_NAMES: Final = {"float16": "half", "float32": "float", "float64": "double"}

_SUPPORTED: Final = (
    "bool, int8-64, uint8-64, float16/32/64, complex64/128 or text of a width such as S16 or U16"
)


def dtype_name(dtype: Any) -> str:
    """Returns TensorFlow's name of a numpy dtype: ``double``, ``float``, ``half``, ``string``...

    Text of a width has that added: ``string<S16>``.
    """
    known: np.dtype[Any] = np.dtype(dtype)
    if known.kind in "SU" and known.itemsize:
        return f"string<{_numpy_name(known)}>"
    if known.kind in "OSUT":
        return "string"
    return _TF_NAMES.get(known.name, known.name)


def _numpy_name(dtype: np.dtype[Any]) -> str:
    """What ``np.dtype`` takes: numpy's own names of text say its bits."""
    return dtype.str.lstrip("<>|=") if dtype.kind in "SU" else dtype.name


def code_of(dtype: np.dtype[Any]) -> int | None:
    """Returns the code of a dtype; None if it is not one that can be stored as it is."""
    code = DTYPE_CODES.get(dtype)
    if code is None and dtype.kind in _TEXT_CODES and dtype.isnative:
        width = _width(dtype)
        if 1 <= width <= MAX_TEXT_WIDTH:
            return width << _CODE_BITS | _TEXT_CODES[dtype.kind]
    return code


@functools.lru_cache(maxsize=256)
def _text_dtype(code: int) -> np.dtype[Any] | None:
    kind, width = _TEXT_KINDS.get(code & (1 << _CODE_BITS) - 1), code >> _CODE_BITS
    if kind is None or not 1 <= width <= MAX_TEXT_WIDTH:
        return None
    return np.dtype(f"{kind}{width}")


def is_text(code: int) -> bool:
    """Returns whether the code is that of text."""
    return code >> _CODE_BITS > 0


def dtype_of(code: int) -> np.dtype[Any] | None:
    """Returns the dtype of a code; None if there is none. The code is not trusted."""
    known = DTYPE_OF_CODE.get(code)
    return _text_dtype(code) if known is None else known


def _dtype_of_name(name: str) -> np.dtype[Any] | None:
    if name[:1] in _TEXT_CODES and name[1:].isascii() and name[1:].isdigit() and len(name) < 10:
        return _text_dtype(int(name[1:]) << _CODE_BITS | _TEXT_CODES[name[0]])
    return _DTYPE_OF_NAME.get(name)


def _width(dtype: np.dtype[Any]) -> int:
    return dtype.itemsize // (4 if dtype.kind == "U" else 1)


def fit_text(array: npt.NDArray[Any], dtype: np.dtype[Any], path: tree.Path) -> npt.NDArray[Any]:
    """Returns text as the dtype of its column, padded as numpy pads it; other arrays as they are.

    Args:
        array: Any array.
        dtype: Of the column that it goes into.
        path: Where it stands in the data, for the message.

    Raises:
        SignatureError: A text is longer than the column is wide.
    """
    if array.dtype == dtype or dtype.kind not in _TEXT_CODES or array.dtype.kind != dtype.kind:
        return array
    fitted = array.astype(dtype)
    if array.dtype.itemsize > dtype.itemsize and (fitted != array).any():
        longest = int(np.char.str_len(array).max())
        raise SignatureError(
            f"Got a text of length {longest}{_where(path)}; expected at most"
            f" {_width(dtype)}, the width of its column ({_numpy_name(dtype)}), which the"
            " table's signature or the first step sets. Give a wider dtype there, for instance"
            f' np.array(x, "{dtype.kind}{longest}").'
        )
    return fitted


def conversion_hint(given: np.dtype[Any], expected: np.dtype[Any]) -> str:
    """What to do with data of one dtype that is to become another, for the end of a message."""
    name = _numpy_name(expected)
    if is_text(dtype_code(expected)):
        kind = "a str" if expected.kind == "U" else "bytes"
        return f'Give {kind}, or np.array(x, "{name}"), or use another name for the new data.'
    if is_text(dtype_code(given)):
        return "Give a number, or use another name for the text."
    return f'Convert it with np.asarray(x, "{name}").'


def shape_text(shape: Iterable[int | None]) -> str:
    """Returns a shape as messages print it: ``[1,2]``, with ``?`` for an unknown dimension."""
    return f"[{','.join('?' if size is None else str(size) for size in shape)}]"


def shape_matches(expected: Sequence[int | None], shape: Sequence[int | None]) -> bool:
    """Returns whether two shapes are compatible: of one rank, and equal where both are known."""
    return len(expected) == len(shape) and all(
        want is None or size is None or want == size
        for want, size in zip(expected, shape, strict=True)
    )


def _hint(dtype: np.dtype[Any]) -> str:
    if dtype.names is not None or dtype.subdtype is not None:
        return "Give each field as a leaf of its own, in a dict."
    match dtype.kind:
        case "O":
            return (
                "Convert it to numbers, for instance with np.asarray(x, dtype=np.float32), or to"
                ' text of one width with np.array(x, "U16"), or "S16" for bytes.'
            )
        case "S" | "U" | "T":
            return (
                f"Text takes a width of 1 to {MAX_TEXT_WIDTH}. Give the longest there can be, for"
                ' instance np.dtype("U16"), or "S16" for bytes.'
            )
        case "M" | "m":
            return "Convert it to integers with .astype(np.int64)."
        case "f":
            return "Convert it to float64 with .astype(np.float64)."
        case "c":
            return "Convert it to complex128 with .astype(np.complex128)."
        case _:
            return "Convert it to float32 or view it as unsigned integers, for instance np.uint16."


def dtype_code(dtype: Any, path: tree.Path | None = None) -> int:
    """Returns the code of the dtype of some data.

    Args:
        dtype: Anything that ``np.dtype`` takes.
        path: Where in the data it stands, for the message.

    Raises:
        ArgumentTypeError: It is not one of the supported dtypes in native byte order.
    """
    known = DTYPE_CODES.get(dtype) if isinstance(dtype, np.dtype) else None
    if known is not None:
        return known
    dtype = np.dtype(dtype)
    code = code_of(dtype)
    if code is not None:
        return code
    native = dtype.newbyteorder("=")
    if code_of(native) is not None:
        hint = (
            f'Convert it to the byte order of this machine with .astype("{_numpy_name(native)}").'
        )
    else:
        hint = _hint(dtype)
    raise ArgumentTypeError(
        f"Got data of dtype {dtype}{_where(path)}; expected {_SUPPORTED}. {hint}"
    )


class TensorSpec:
    """Shape, dtype and name of one leaf; cannot be changed, equal by value, usable as a key."""

    __slots__ = ("_dtype", "_name", "_shape")

    _dtype: np.dtype[Any]
    _name: str | None
    _shape: tuple[int | None, ...]

    def __init__(self, shape: Iterable[int | None], dtype: Any, name: str | None = None) -> None:
        """Makes a spec.

        Args:
            shape: The sizes of the dimensions; None where a size is not known.
            dtype: Anything that ``np.dtype`` takes, or a TensorFlow or PyTorch dtype. It is stored
                in native byte order.
            name: Free text.

        Raises:
            SignatureError: The shape or the dtype cannot be stored.
        """
        self._set(shape, dtype, name, None)

    def _set(self, shape: Any, dtype: Any, name: Any, path: tree.Path | None) -> None:
        if name is not None and not isinstance(name, str):
            raise SignatureError(
                f"Got the name {name!r} for a spec{_where(path)}; expected a str or None."
            )
        self._shape = _checked_shape(shape, path)
        self._dtype = _checked_dtype(dtype, path)
        self._name = name
        count = 1
        for size in self._shape:
            count *= 1 if size is None else size
        if count * self._dtype.itemsize > MAX_VALUE_BYTES:
            raise SignatureError(
                f"Got the shape {shape_text(self._shape)}{_where(path)} with dtype {self._dtype},"
                f" which takes {count * self._dtype.itemsize} bytes; expected at most"
                f" {MAX_VALUE_BYTES}. Check the sizes of its dimensions."
            )

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The sizes of the dimensions, None where a size is not known."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype, in native byte order."""
        return self._dtype

    @property
    def name(self) -> str | None:
        """The name, or None."""
        return self._name

    def __eq__(self, other: object) -> bool:
        """Returns whether shape, dtype and name are equal."""
        if not isinstance(other, TensorSpec):
            return NotImplemented
        return (self._shape, self._dtype, self._name) == (other._shape, other._dtype, other._name)

    def __hash__(self) -> int:
        """Returns a hash of shape, dtype and name."""
        return hash((self._shape, self._dtype, self._name))

    def __reduce__(self) -> tuple[type[TensorSpec], tuple[Any, ...]]:
        """Returns what ``copy`` needs to make this spec again."""
        return (TensorSpec, (self._shape, self._dtype, self._name))

    def __repr__(self) -> str:
        """Returns the call that would make this spec."""
        name = "" if self._name is None else f", name={self._name!r}"
        return f"TensorSpec(shape={self._shape}, dtype={_numpy_name(self._dtype)}{name})"


def _where(path: tree.Path | None) -> str:
    return "" if path is None else f" at {path!r}"


def _checked_shape(shape: Any, path: tree.Path | None) -> tuple[int | None, ...]:
    if isinstance(shape, (str, bytes)):
        raise _bad_shape(shape, path)
    try:
        sizes = tuple(None if size is None else operator.index(size) for size in shape)
    except (TypeError, ValueError) as error:  # ValueError: a tf.TensorShape of unknown rank
        raise _bad_shape(shape, path) from error
    if any(size is not None and size < 0 for size in sizes):
        raise _bad_shape(shape, path)
    if len(sizes) > MAX_SPEC_DIMS:
        raise SignatureError(
            f"Got the shape {shape_text(sizes)} of {len(sizes)} dimensions{_where(path)}; expected"
            f" at most {MAX_SPEC_DIMS}. Merge some of them with reshape."
        )
    return sizes


def _bad_shape(shape: Any, path: tree.Path | None) -> SignatureError:
    return SignatureError(
        f"Got the shape {shape!r}{_where(path)}; expected a sequence of sizes of at least 0, such"
        " as (84, 84). Write () for a scalar and None for a size that is not known."
    )


def _checked_dtype(dtype: Any, path: tree.Path | None) -> np.dtype[Any]:
    given = dtype
    # tf.DType; PyTorch's dtypes have numpy's names behind the name of their module.
    dtype = getattr(dtype, "as_numpy_dtype", dtype)
    if type(dtype).__module__.split(".", 1)[0] == "torch":
        dtype = str(dtype).removeprefix("torch.")
    try:
        if dtype is None:  # numpy would take it for float64
            raise TypeError("None is not a dtype")
        wanted = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise SignatureError(
            f"Got the dtype {given!r}{_where(path)}; expected {_SUPPORTED}. Give one of these, for"
            " instance np.float32."
        ) from error
    native: np.dtype[Any] = wanted.newbyteorder("=")
    if code_of(native) is None:
        raise SignatureError(
            f"Got the dtype {wanted}{_where(path)}; expected {_SUPPORTED}. {_hint(wanted)}"
        )
    return native


def as_spec(leaf: Any, path: tree.Path = ()) -> TensorSpec:
    """Makes a spec of one leaf of a signature.

    Args:
        leaf: Anything with ``shape`` and ``dtype``; its ``name`` is kept if it is a str.
        path: Where in the signature it stands, for the messages.

    Raises:
        SignatureError: It has no shape or dtype, or one that cannot be stored.
    """
    if type(leaf) is TensorSpec:
        return leaf
    width = _width_of_space(leaf)
    shape = () if width is not None else getattr(leaf, "shape", None)
    dtype = getattr(leaf, "dtype", None)
    if shape is None or dtype is None or isinstance(leaf, type):
        raise SignatureError(
            f"Got {_described(leaf)} at {path!r} of a signature; expected something with a fixed"
            " shape and a dtype, such as shmreplay.spec.TensorSpec(shape, dtype), a numpy array,"
            " a tf.TensorSpec, a dm_env spec, or a Gymnasium Box, Discrete, MultiDiscrete,"
            " MultiBinary or Text."
        )
    name = getattr(leaf, "name", None)
    if width is not None:
        dtype = f"U{width}"
    spec = TensorSpec.__new__(TensorSpec)
    spec._set(shape, dtype, name if isinstance(name, str) else None, path)
    return spec


def _described(leaf: Any) -> str:
    text = repr(leaf)
    return f"{text if len(text) <= 80 else text[:77] + '...'} of type {type(leaf).__name__}"


def _width_of_space(leaf: Any) -> int | None:
    """Returns how long texts of a Gymnasium Text space may be; None of anything else."""
    kind = type(leaf)
    if kind.__name__ == "Text" and kind.__module__.split(".", 1)[0] in ("gymnasium", "gym"):
        return int(leaf.max_length)
    return None


def _nested_space(node: Any) -> Any:
    """Returns the parts of a Gymnasium Dict or Tuple space as a dict or tuple, else None.

    By names, since Gymnasium is not imported here: a Tuple space is no tuple, and a OneOf space
    has parts as well but no fixed shape.
    """
    for base in type(node).__mro__:
        if base.__module__.split(".", 1)[0] in ("gymnasium", "gym"):
            if base.__name__ == "Dict":
                return dict(node.spaces)
            if base.__name__ == "Tuple":
                return tuple(node.spaces)
    return None


def as_signature(structure: Any) -> Any:
    """Makes a signature of a structure whose leaves have a shape and a dtype.

    Args:
        structure: Containers of leaves, or one leaf alone, for ``as_spec``; Gymnasium's Dict and
            Tuple spaces become dicts and tuples.

    Returns:
        The same containers with a ``TensorSpec`` for each leaf.

    Raises:
        SignatureError: A leaf cannot be used, or there are no leaves or too many.
    """

    def convert(path: tree.Path, leaf: Any) -> Any:
        parts = _nested_space(leaf)
        if parts is None:
            return as_spec(leaf, path)
        return tree.map_structure_with_path(convert, parts, path)

    signature = tree.map_structure_with_path(convert, structure)
    count = len(tree.flatten(signature))
    if not 1 <= count <= MAX_COLUMNS:
        raise SignatureError(
            f"Got a signature of {count} leaves; expected 1 to {MAX_COLUMNS}. Give a spec for each"
            " column, stack small columns into one, or give None for a table that takes any data."
        )
    return signature


def signature_to_json(signature: Any) -> str:
    """Returns a signature (or None, for a table without) as JSON text.

    Args:
        signature: What ``as_signature`` returned, or None.

    Raises:
        SignatureError: The text would be longer than ``limits.MAX_SIGNATURE_JSON_BYTES``.
        ArgumentTypeError: A dict key is neither str nor int.
    """

    def leaf_to_json(spec: TensorSpec) -> list[Any]:
        return [list(spec.shape), _numpy_name(spec.dtype), spec.name]

    if signature is None:
        return "null"
    text = json.dumps(tree.structure_to_json(signature, leaf_to_json), separators=(",", ":"))
    if len(text) > MAX_SIGNATURE_JSON_BYTES:
        raise SignatureError(
            f"Got a signature that takes {len(text)} bytes as JSON; expected at most"
            f" {MAX_SIGNATURE_JSON_BYTES}. Use fewer columns, or shorter keys and names."
        )
    return text


def signature_from_json(text: str) -> Any:
    """Returns the signature that ``signature_to_json`` wrote; the text is not trusted.

    Raises:
        InvalidArgumentError: It is not such a text.
    """

    def leaf_from_json(leaf: Any) -> TensorSpec:
        match leaf:
            case [list(shape), str(name_of_dtype), (str() | None) as name]:
                dtype = _dtype_of_name(name_of_dtype)
                if dtype is not None:
                    return TensorSpec(shape, dtype, name)
        raise InvalidArgumentError(
            f"Got a signature with the leaf {leaf!r}; expected [shape, dtype, name]. It was"
            " damaged, or written by another version."
        )

    if len(text) > MAX_SIGNATURE_JSON_BYTES:
        raise InvalidArgumentError(
            f"Got a signature of {len(text)} bytes; expected at most {MAX_SIGNATURE_JSON_BYTES}."
            " It was damaged, or written by another version."
        )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"Got a signature that is not JSON ({error}). It was damaged, or written by another"
            " version."
        ) from error
    if value is None:
        return None
    try:
        return as_signature(tree.structure_from_json(value, leaf_from_json))
    except ArgumentTypeError as error:  # keys of several types in one dict
        raise InvalidArgumentError(f"Got a damaged signature. {error}") from error
