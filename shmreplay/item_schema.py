"""What an item looks like: its structure, and each column's type, shape and squeezing.

Every item carries the number of its schema, so that it comes back in the structure that it was
created with. The text is JSON; it is written once for all items of the same make.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shmreplay import _native, errors, tree
from shmreplay.spec import TensorSpec, dtype_name, dtype_of, shape_matches, shape_text

Leaf = tuple[int, tuple[int, ...], bool]
"""(dtype code, shape of one value, squeezed)."""


class Column(NamedTuple):
    """One column of an item."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    squeezed: bool


class ItemSchema:
    """Structure and columns of an item."""

    def __init__(self, structure: Any, columns: Sequence[Column]) -> None:
        """Takes a structure with anything as leaves, and a column for each leaf in order."""
        self.structure = structure
        self.columns = list(columns)
        self.is_step = all(column.squeezed for column in self.columns)
        self._keys = tree.keys_of_flat_dict(structure)
        self.plan = _native.StackPlan(self.columns)

    def is_like(self, other: Any) -> bool:
        """Is it plainly of the same structure? False may also mean that a closer look is needed."""
        return (
            self._keys is not None
            and type(other) is dict
            and other.keys() == self.structure.keys()
            and not any(map(tree.is_nested, other.values()))
        )

    def flatten_dict(self, data: Any) -> list[Any] | None:
        """The leaves of a flat dict of just these keys; None if it is something else."""
        if self._keys is None or type(data) is not dict or len(data) != len(self._keys):
            return None
        try:
            return [data[key] for key in self._keys]
        except KeyError:
            return None

    def unflatten(self, leaves: list[Any]) -> Any:
        """Puts one value a column into the structure."""
        if self._keys is not None:
            return dict(zip(self._keys, leaves))  # noqa: B905 - as many as columns
        return tree.unflatten_as(self.structure, leaves)


def encode(structure: Any, leaves: Sequence[Leaf]) -> bytes:
    """JSON text of a schema; equal schemas have equal texts."""
    it = iter(leaves)

    def leaf_to_json(_: Any) -> list[Any]:
        code, shape, squeezed = next(it)
        return [code, list(shape), bool(squeezed)]

    described = tree.structure_to_json(structure, leaf_to_json)
    return json.dumps(described, separators=(",", ":")).encode()


def decode(text: bytes) -> ItemSchema:
    """The schema that `encode` wrote.

    Raises:
        TableCorruptedError: It is no such text.
    """
    columns: list[Column] = []

    def leaf_from_json(leaf: Any) -> int:
        match leaf:
            case [int(code), list(shape), bool(squeezed)]:
                dtype = dtype_of(code)
                if dtype is not None:
                    columns.append(Column(dtype, tuple(shape), squeezed))
                    return len(columns) - 1
        raise errors.InvalidArgumentError(
            f"Got the leaf {leaf!r}; expected [code, shape, squeezed]. Something wrote over the "
            "store: start its server anew."
        )

    try:
        structure = tree.structure_from_json(json.loads(text), leaf_from_json)
    except (ValueError, errors.InvalidArgumentError) as e:
        raise errors.TableCorruptedError(
            f"Got an item's structure that cannot be read: {e}. Expected it as it was written: "
            "something wrote over the store. Start its server anew."
        ) from e
    return ItemSchema(structure, columns)


def _spec_text(dtype: Any, shape: Sequence[int | None]) -> str:
    return f"{dtype_name(dtype)} {shape_text(shape)}"


def _describe(specs: Sequence[tuple[Any, Sequence[int | None]]]) -> str:
    return ", ".join(f"{i}: {_spec_text(d, s)}" for i, (d, s) in enumerate(specs))


def _text_hint(got: Any, wanted: np.dtype[Any]) -> str:
    if got is None or got == wanted or got.kind not in "SU" or wanted.kind not in "SU":
        return ""
    return f' Give the first step\'s text as np.array(x, "{wanted.str.lstrip("<>|=")}").'


def make_signature_check(
    table: str, signature: Any
) -> Callable[[Sequence[Leaf]], list[int | None] | None]:
    """Returns the check of a trajectory against a table's signature.

    The check takes leaves (dtype code, shape with the time dimension unless squeezed, squeezed)
    and returns the leading dimensions that the signature demands (None: any), or None where it
    demands none. It raises SignatureError, naming column, got, expected and both signatures.
    """
    specs: list[TensorSpec] = tree.flatten(signature)
    wanted = [(s.dtype, s.shape) for s in specs]

    def refuse(what: str, got: Sequence[tuple[Any, Sequence[int | None]]]) -> errors.SignatureError:
        return errors.SignatureError(
            f"Unable to create item in table '{table}' since the provided trajectory is "
            f"inconsistent with the table signature. {what}\n"
            f"The table signature is:\n\t{_describe(wanted)}\n"
            f"The provided trajectory signature is:\n\t{_describe(got)}\n"
            "Expected is the former: give each column the dtype and shape that it says."
        )

    def check(leaves: Sequence[Leaf]) -> list[int | None] | None:
        got = [(dtype_of(code), shape) for code, shape, _ in leaves]
        if len(got) != len(wanted):
            raise refuse(
                f"The trajectory has {len(got)} columns but the table signature has "
                f"{len(wanted)} columns.",
                got,
            )
        for i, ((dtype, shape), spec) in enumerate(zip(got, specs, strict=True)):
            if dtype != spec.dtype or not shape_matches(spec.shape, shape):
                name = f" ({spec.name})" if spec.name else ""
                raise refuse(
                    f"The table expects column {i}{name} to be a "
                    f"{_spec_text(spec.dtype, spec.shape)} tensor but got a "
                    f"{_spec_text(dtype, shape)} tensor.{_text_hint(dtype, spec.dtype)}",
                    got,
                )
        return [
            None if squeezed or not spec.shape else spec.shape[0]
            for (_, _, squeezed), spec in zip(leaves, specs, strict=True)
        ]

    return check
