"""Reading out what a store holds, without its locks, also where it is damaged or nobody serves it.

A table becomes a dict of arrays, and that a ``.npz`` file. With N items, in the order of their
insertion, of which n have item structure S:

* ``key`` uint64[N], ``priority`` float64[N], ``times_sampled`` int32[N], ``inserted_ns`` int64[N]
  (since the epoch), ``schema`` int32[N]: the number S of each item's structure;
* ``structure/S``: the structure as JSON;
* ``data/S/PATH`` [rows, ...]: the values of the column at PATH, of all n items one after the other.
  PATH is the column's keys with ``/`` between them; what a name in a zip file cannot hold, and what
  would make two columns one, is written as ``%2F`` in a key;
* ``length/S/PATH`` int64[n]: how many of these rows belong to each item;
* ``squeezed/S/PATH``: whether the column is one value an item, without a time axis.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from shmreplay import item_schema, tree
from shmreplay._native import Store, peek_item, peek_items
from shmreplay.errors import TableCorruptedError
from shmreplay.item_schema import ItemSchema

__all__ = ["Dump", "dump_table"]

_NOT_IN_A_KEY: Final = re.compile(r"[%/\0\ud800-\udfff]")
_Item = tuple[int, int, float, int, int, int, list[tuple[int, bool, bytes]] | None]


class Dump(NamedTuple):
    """What was read of a table."""

    arrays: dict[str, npt.NDArray[Any]]
    n_items: int
    n_unreadable: int
    """Items whose data cannot be read: references in them are damaged."""


class _Structure:
    """The items of one structure that were read so far."""

    def __init__(self, native: Store, number: int) -> None:
        text = native.schema_text(number)
        self.text = text.decode()
        self.schema: ItemSchema = item_schema.decode(text)
        flat = tree.flatten_with_path(self.schema.structure)
        self.names = ["/".join(map(_quoted, path)) or "value" for path, _ in flat]
        self.rows: list[list[npt.NDArray[Any]]] = [[] for _ in self.names]

    def arrays_of(
        self, columns: list[tuple[int, bool, bytes]] | None
    ) -> list[npt.NDArray[Any]] | None:
        """One array a column [rows, ...], or None where the bytes do not fit the structure."""
        if columns is None or len(columns) != len(self.schema.columns):
            return None
        arrays = []
        for (length, _, data), column in zip(columns, self.schema.columns, strict=True):
            row_bytes = column.dtype.itemsize * int(np.prod(column.shape, dtype=np.int64))
            if len(data) != length * row_bytes:
                return None
            values = np.frombuffer(data, column.dtype)
            arrays.append(values.reshape((length, *column.shape)))
        return arrays

    def add(self, arrays: list[npt.NDArray[Any]]) -> None:
        """Takes the columns of one more item."""
        for rows, array in zip(self.rows, arrays, strict=True):
            rows.append(array)


def _quoted(key: object) -> str:
    """A key of a structure, as part of a name in a zip file that names no other column as well."""
    return _NOT_IN_A_KEY.sub(
        lambda found: quote(found[0], safe="", errors="surrogatepass"), str(key)
    )


def dump_table(native: Store, number: int, limit: int | None = None) -> Dump:
    """Reads a table.

    Items that go while they are read are left out. All of it is held in memory at once.

    Args:
        native: The store.
        number: Of the table.
        limit: Items to read at most, those first that were inserted first; None: all.
    """
    structures: dict[int, _Structure | None] = {}
    items: list[_Item] = []
    unreadable = 0
    for seq, stripe, slot in sorted(peek_items(native, number)):
        if limit is not None and len(items) + unreadable >= limit:
            break
        item = peek_item(native, number, stripe, slot)
        if item is None or item[0] != seq:  # it has gone, or another took its slot
            continue
        schema, columns = item[5], item[6]
        if schema not in structures:
            structures[schema] = _structure(native, schema)
        structure = structures[schema]
        arrays = None if structure is None else structure.arrays_of(columns)
        if structure is None or arrays is None:
            unreadable += 1
            continue
        structure.add(arrays)
        items.append((*item[:6], None))
    known = {schema: each for schema, each in structures.items() if each is not None}
    return Dump(_as_arrays(items, known), len(items), unreadable)


def _structure(native: Store, schema: int) -> _Structure | None:
    try:
        return _Structure(native, schema)
    except (TableCorruptedError, UnicodeDecodeError, RecursionError):
        return None  # whoever reads an item of it counts it as unreadable


def _as_arrays(items: list[_Item], structures: dict[int, _Structure]) -> dict[str, Any]:
    arrays: dict[str, npt.NDArray[Any]] = {
        "key": np.array([item[1] for item in items], np.uint64),
        "priority": np.array([item[2] for item in items], np.float64),
        "times_sampled": np.array([item[3] for item in items], np.int32),
        "inserted_ns": np.array([item[4] for item in items], np.int64),
        "schema": np.array([item[5] for item in items], np.int32),
    }
    for number, structure in structures.items():
        if not structure.rows or not structure.rows[0]:
            continue
        arrays[f"structure/{number}"] = np.array(structure.text)
        columns = zip(structure.names, structure.rows, structure.schema.columns, strict=True)
        for name, rows, column in columns:
            arrays[f"data/{number}/{name}"] = np.concatenate(rows)
            arrays[f"length/{number}/{name}"] = np.array([len(r) for r in rows], np.int64)
            arrays[f"squeezed/{number}/{name}"] = np.array(column.squeezed)
    return arrays
