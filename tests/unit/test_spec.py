"""Specs and signatures: what is accepted, how it is stored, and what refusals say."""

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmreplay import spec
from shmreplay.errors import ArgumentTypeError, InvalidArgumentError, SignatureError
from shmreplay.limits import (
    MAX_COLUMNS,
    MAX_NESTING,
    MAX_SIGNATURE_JSON_BYTES,
    MAX_SPEC_DIMS,
    MAX_TEXT_WIDTH,
    MAX_VALUE_BYTES,
)
from shmreplay.spec import TensorSpec

F32 = np.dtype(np.float32)


class Pair(NamedTuple):
    """A namedtuple of two specs."""

    x: Any
    y: Any


class FakeTfDType:
    """Stands for tf.DType: numpy cannot convert it, but it names its numpy type."""

    as_numpy_dtype = np.float32


class FakeTensorShape:
    """Stands for tf.TensorShape, which cannot be iterated when its rank is unknown."""

    def __init__(self, sizes: list[int | None] | None) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        if self.sizes is None:
            raise ValueError("Cannot iterate over a shape with unknown rank.")
        return iter(self.sizes)


class Leaf:
    """Anything with a shape and a dtype."""

    def __init__(self, shape: Any, dtype: Any, name: Any = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.name = name


# --- dtypes -------------------------------------------------------------------------------------


def test_dtype_codes_never_change() -> None:
    assert {dtype.name: code for dtype, code in spec.DTYPE_CODES.items()} == {
        "bool": 1,
        "int8": 2,
        "int16": 3,
        "int32": 4,
        "int64": 5,
        "uint8": 6,
        "uint16": 7,
        "uint32": 8,
        "uint64": 9,
        "float16": 10,
        "float32": 11,
        "float64": 12,
        "complex64": 13,
        "complex128": 14,
    }
    for dtype, code in spec.DTYPE_CODES.items():
        assert spec.DTYPE_OF_CODE[code] == dtype
        assert spec.dtype_code(dtype) == code


def test_dtype_code_of_aliases() -> None:
    # 'l' and 'q' are two types of C but one dtype.
    assert spec.dtype_code(np.dtype("q")) == spec.dtype_code(np.dtype("l")) == 5
    assert spec.dtype_code(np.dtype("f4", metadata={"a": 1})) == 11


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [
        (np.dtype(object), "Convert it to numbers"),
        (np.dtype("U0"), "Text takes a width"),
        (np.dtype("S"), "Text takes a width"),
        (np.dtype(("S", MAX_TEXT_WIDTH + 1)), "Text takes a width"),
        (np.dtype("datetime64[s]"), "np.int64"),
        (np.dtype("timedelta64[s]"), "np.int64"),
        (np.dtype(np.longdouble), "np.float64"),
        (np.dtype(np.clongdouble), "np.complex128"),
        (np.dtype("f4,f4"), "a leaf of its own"),
        (np.dtype(("f4", (2,))), "a leaf of its own"),
        (np.dtype("V2"), "np.uint16"),
    ],
)
def test_unsupported_dtypes(dtype: np.dtype[Any], hint: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"at \('a', 0\); expected bool.*{hint}"):
        spec.dtype_code(dtype, ("a", 0))
    with pytest.raises(SignatureError, match=rf"at \('a', 0\); expected bool.*{hint}"):
        spec.as_signature({"a": [Leaf((), dtype)]})
    with pytest.raises(SignatureError, match=hint):
        TensorSpec((), dtype)


def test_codes_of_text_have_kind_and_width() -> None:
    assert spec.dtype_code("S5") == 15 + 5 * 256 and spec.dtype_code("U7") == 16 + 7 * 256
    for text in ("S1", "U1", f"S{2**20}", f"U{2**20}"):
        assert spec.dtype_of(spec.dtype_code(text)) == np.dtype(text)
        assert repr(TensorSpec((), text)) == f"TensorSpec(shape=(), dtype={text})"
    for code in (0, 15, 16, 17 + 256, 15 + 256 * (2**20 + 1), -1, -15, 1 << 70):
        assert spec.dtype_of(code) is None


def test_signatures_of_text_survive_json() -> None:
    signature = {"s": TensorSpec((None, 2), "S16"), "u": TensorSpec((), ">U3", "name")}
    text = spec.signature_to_json(signature)
    assert '"S16"' in text and '"U3"' in text
    assert spec.signature_from_json(text) == signature
    for damaged in ("S0", "S-1", "S", "U1 ", "U\u0661", "S99999999", "bytes128", "V3"):
        with pytest.raises(InvalidArgumentError, match="leaf"):
            spec.signature_from_json(text.replace("S16", damaged))


def test_foreign_byte_order_is_an_error_for_data_and_native_in_a_spec() -> None:
    foreign = np.dtype(np.float32).newbyteorder("S")
    with pytest.raises(ArgumentTypeError, match=r'astype\("float32"\)'):
        spec.dtype_code(foreign)
    assert TensorSpec((), foreign) == TensorSpec((), np.float32)
    with pytest.raises(ArgumentTypeError, match=r'astype\("U3"\)'):
        spec.dtype_code(np.dtype("U3").newbyteorder("S"))
    assert TensorSpec((), foreign).dtype.isnative


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float64, "double"),
        (np.float32, "float"),
        (np.float16, "half"),
        (np.int64, "int64"),
        (np.uint8, "uint8"),
        (np.bool_, "bool"),
        (np.complex64, "complex64"),
        (np.complex128, "complex128"),
        (object, "string"),
        ("S", "string"),
        ("S4", "string<S4>"),
        (">U4", "string<U4>"),
        ("datetime64[s]", "datetime64[s]"),
    ],
)
def test_dtype_name_is_tensorflows(dtype: Any, name: str) -> None:
    assert spec.dtype_name(np.dtype(dtype)) == name


def test_shape_text() -> None:
    assert spec.shape_text(()) == "[]"
    assert spec.shape_text((1, 2)) == "[1,2]"
    assert spec.shape_text((None, 84)) == "[?,84]"


@pytest.mark.parametrize(
    ("expected", "shape", "matches"),
    [
        ((), (), True),
        ((None, 2), (5, 2), True),
        ((3, 2), (None, 2), True),
        ((None, 2), (5, 3), False),
        ((None,), (), False),
        ((1,), (1, 1), False),
    ],
)
def test_shape_matches(
    expected: tuple[int | None, ...], shape: tuple[int | None, ...], matches: bool
) -> None:
    assert spec.shape_matches(expected, shape) is matches


# --- TensorSpec ---------------------------------------------------------------------------------


def test_spec_is_a_value() -> None:
    sizes: Any = [None, np.int64(84)]
    one = TensorSpec(sizes, "float32", name="obs")
    assert one.shape == (None, 84)
    assert all(size is None or type(size) is int for size in one.shape)
    assert one.dtype == F32
    assert one.name == "obs"
    same = TensorSpec((None, 84), np.float32, "obs")
    assert one == same
    assert hash(one) == hash(same)
    assert len({one, same, TensorSpec((None, 84), np.float32)}) == 2
    assert one != TensorSpec((1, 84), np.float32, "obs")
    assert one != TensorSpec((None, 84), np.float64, "obs")
    assert one != (None, 84)
    assert copy.deepcopy(one) == one
    assert repr(one) == "TensorSpec(shape=(None, 84), dtype=float32, name='obs')"
    assert repr(TensorSpec((), bool)) == "TensorSpec(shape=(), dtype=bool)"


def test_spec_cannot_be_changed() -> None:
    one = TensorSpec((1,), np.int8)
    for name in ("shape", "dtype", "name", "other"):
        with pytest.raises(AttributeError):
            setattr(one, name, None)


@pytest.mark.parametrize("shape", [3, "12", None, (-1,), (1.5,), ("a",), FakeTensorShape(None)])
def test_bad_shapes(shape: Any) -> None:
    with pytest.raises(SignatureError, match=r"Got the shape .*expected a sequence of sizes"):
        TensorSpec(shape, np.float32)


def test_bounds_of_shapes() -> None:
    TensorSpec((1,) * MAX_SPEC_DIMS, np.float32)
    with pytest.raises(SignatureError, match=f"at most {MAX_SPEC_DIMS}"):
        TensorSpec((1,) * (MAX_SPEC_DIMS + 1), np.float32)
    TensorSpec((MAX_VALUE_BYTES // 8,), np.float64)
    with pytest.raises(SignatureError, match=f"at most {MAX_VALUE_BYTES}"):
        TensorSpec((MAX_VALUE_BYTES // 8 + 1,), np.float64)
    with pytest.raises(SignatureError, match=f"at most {MAX_VALUE_BYTES}"):
        TensorSpec((2**32, 2**32, None), np.uint8)


@pytest.mark.parametrize("dtype", [None, "no such", 5, FakeTensorShape([1])])
def test_things_that_are_no_dtype(dtype: Any) -> None:
    with pytest.raises(SignatureError, match=r"Got the dtype .*np.float32"):
        TensorSpec((), dtype)


def test_bad_name() -> None:
    with pytest.raises(SignatureError, match="a str or None"):
        TensorSpec((), np.float32, name=3)  # type: ignore[arg-type]


# --- as_spec and as_signature -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (np.zeros((2, 3), np.int16), TensorSpec((2, 3), np.int16)),
        (np.float64(1), TensorSpec((), np.float64)),
        (Leaf(FakeTensorShape([None, 2]), FakeTfDType(), "t"), TensorSpec((None, 2), F32, "t")),
        (Leaf((4,), np.float32, name="spec"), TensorSpec((4,), F32, "spec")),
        (Leaf((4,), "uint8", name=12), TensorSpec((4,), np.uint8)),
        (Leaf([], float), TensorSpec((), np.float64)),
    ],
)
def test_as_spec(leaf: Any, expected: TensorSpec) -> None:
    assert spec.as_spec(leaf) == expected


def test_as_spec_of_a_torch_dtype() -> None:
    # PyTorch is not installed for these tests; only the module of the type and its text count.
    fake = type("dtype", (), {"__module__": "torch", "__str__": lambda _: "torch.float32"})
    assert spec.as_spec(Leaf((2,), fake())) == TensorSpec((2,), F32)


@pytest.mark.parametrize("leaf", [1.0, "text", None, object(), np.float32, Leaf(None, F32)])
def test_leaves_without_shape_or_dtype(leaf: Any) -> None:
    with pytest.raises(SignatureError, match=r"at \('a', 1\) of a signature; expected something"):
        spec.as_signature({"a": [np.zeros(1), leaf]})


def test_as_signature_keeps_the_structure() -> None:
    given = {"b": (np.zeros(2, np.int8), [np.ones((), bool)]), "a": Pair(np.zeros(1), np.zeros(()))}
    signature = spec.as_signature(given)
    assert signature == {
        "b": (TensorSpec((2,), np.int8), [TensorSpec((), bool)]),
        "a": Pair(TensorSpec((1,), np.float64), TensorSpec((), np.float64)),
    }
    assert type(signature["a"]) is Pair
    assert spec.as_signature(signature) == signature
    assert spec.as_signature(np.zeros(3)) == TensorSpec((3,), np.float64)


@pytest.mark.parametrize("empty", [{}, [], {"a": ()}])
def test_signature_without_leaves(empty: Any) -> None:
    with pytest.raises(SignatureError, match="of 0 leaves"):
        spec.as_signature(empty)


def test_signature_of_too_many_leaves() -> None:
    spec.as_signature([np.zeros(())] * MAX_COLUMNS)
    with pytest.raises(SignatureError, match=f"1 to {MAX_COLUMNS}"):
        spec.as_signature([np.zeros(())] * (MAX_COLUMNS + 1))


def test_signature_from_gymnasium_spaces() -> None:
    spaces = pytest.importorskip("gymnasium.spaces")
    space = spaces.Dict(
        {
            "position": spaces.Box(-1, 1, (3,), np.float32),
            "inner": spaces.Tuple(
                [
                    spaces.Discrete(4),
                    spaces.MultiBinary((2, 2)),
                    spaces.Dict(n=spaces.MultiDiscrete([3, 5])),
                ]
            ),
        }
    )
    inner = (
        TensorSpec((), np.int64),
        TensorSpec((2, 2), np.int8),
        {"n": TensorSpec((2,), np.int64)},
    )
    expected = {"position": TensorSpec((3,), np.float32), "inner": inner}
    assert spec.as_signature(space) == expected
    assert spec.as_signature([space, np.zeros(1)])[0] == expected
    assert spec.as_signature(space["inner"]) == inner


def test_a_gymnasium_text_is_as_wide_as_its_longest() -> None:
    spaces = pytest.importorskip("gymnasium.spaces")
    signature = spec.as_signature(spaces.Dict({"a": spaces.Text(5)}))
    assert signature == {"a": TensorSpec((), "U5")}


def test_gymnasium_spaces_without_a_fixed_shape() -> None:
    spaces = pytest.importorskip("gymnasium.spaces")
    for space in (
        spaces.Sequence(spaces.Discrete(2)),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,))]),
    ):
        with pytest.raises(SignatureError, match=r"at \(1, 'a'\) of a signature"):
            spec.as_signature((np.zeros(1), spaces.Dict({"a": space})))


# --- JSON ---------------------------------------------------------------------------------------


def test_signature_json_round_trip() -> None:
    signature = {
        "all": [TensorSpec((None, code), dtype) for dtype, code in spec.DTYPE_CODES.items()],
        "named": Pair(TensorSpec((), bool, "flag"), (TensorSpec((0,), np.int8),)),
        "numbered": {3: TensorSpec((), np.int8), 20: TensorSpec((1,), np.int8)},
    }
    text = spec.signature_to_json(signature)
    result = spec.signature_from_json(text)
    assert result == signature
    assert type(result["named"]) is Pair
    assert spec.signature_to_json(result) == text
    assert text.isascii()


def test_no_signature() -> None:
    assert spec.signature_to_json(None) == "null"
    assert spec.signature_from_json("null") is None


def test_signature_text_is_bounded() -> None:
    long = {"k" * MAX_SIGNATURE_JSON_BYTES: TensorSpec((), np.int8)}
    with pytest.raises(SignatureError, match="shorter keys"):
        spec.signature_to_json(long)
    with pytest.raises(InvalidArgumentError, match="expected at most"):
        spec.signature_from_json(" " * (MAX_SIGNATURE_JSON_BYTES + 1))


LEAF = ["leaf", [[1], "int8", None]]


@pytest.mark.parametrize(
    "value",
    [
        {},
        ["list", []],
        ["leaf", None],
        ["leaf", [[1], "int8"]],
        ["leaf", [[1], "object", None]],
        ["leaf", [[1], "float128", None]],
        ["leaf", [[1], 3, None]],
        ["leaf", [[1], "int8", 3]],
        ["leaf", [[-1], "int8", None]],
        ["leaf", [["x"], "int8", None]],
        ["leaf", [[1.5], "int8", None]],
        ["leaf", [3, "int8", None]],
        ["leaf", [[1] * (MAX_SPEC_DIMS + 1), "int8", None]],
        ["list", [LEAF] * (MAX_COLUMNS + 1)],
        ["dict", [["a", LEAF], [1, LEAF]]],
    ],
)
def test_malformed_signatures(value: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        spec.signature_from_json(json.dumps(value))


@pytest.mark.parametrize("text", ["", "{", "[" * 10_000, "9" * 5_000, "\udc80"])
def test_signatures_that_are_no_json(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="damaged, or written by another version"):
        spec.signature_from_json(text)


def test_signature_json_that_is_too_deep() -> None:
    value: Any = LEAF
    for _ in range(MAX_NESTING + 1):
        value = ["tuple", [value]]
    with pytest.raises(InvalidArgumentError, match=f"at most {MAX_NESTING}"):
        spec.signature_from_json(json.dumps(value))
