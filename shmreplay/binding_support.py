"""What the native module asks of Python: conversions and error texts that need no speed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmreplay import errors
from shmreplay.limits import MAX_DIMS
from shmreplay.spec import dtype_code
from shmreplay.tree import Path, flatten_with_path

SELECTOR_CODES: Final = {
    "fifo": 1,
    "lifo": 2,
    "uniform": 3,
    "prioritized": 4,
    "min_heap": 5,
    "max_heap": 6,
    "epoch": 7,
}
"""Selector kinds as the core numbers them (enum sr_selector)."""


_MASKED: Final = np.ma.MaskedArray


def as_plain(value: Any, what: str) -> npt.NDArray[Any]:
    """Returns a value as an array; one that is an array already as it is.

    Args:
        value: Anything that numpy makes an array of.
        what: It is, for the message.

    Raises:
        ArgumentTypeError: It has a mask.
        OutOfMemoryError: It must be copied, and is too large for that.
    """
    if isinstance(value, _MASKED):
        raise errors.ArgumentTypeError(
            f"Got a masked array as {what}; expected a plain one: a mask is not kept, and what it"
            " hides would be used. Give x.filled(value), or x.data and np.ma.getmaskarray(x) by"
            " themselves."
        )
    try:
        return np.asarray(value)
    except MemoryError as error:
        raise _no_memory(what, error) from None


def as_contiguous(array: npt.NDArray[Any], dtype: Any, what: str) -> npt.NDArray[Any]:
    """Returns the array C-contiguous and of this dtype: as it is, or a copy.

    Args:
        array: Of any strides.
        dtype: That it is to have.
        what: It is, for the message.

    Raises:
        OutOfMemoryError: It is too large to be copied.
    """
    try:
        return np.asarray(array, dtype, order="C")
    except MemoryError as error:
        raise _no_memory(what, error) from None


def _no_memory(what: str, error: MemoryError) -> errors.OutOfMemoryError:
    return errors.OutOfMemoryError(
        f"Got {what} that this process has no memory to copy ({error}); expected less, or arrays"
        " that need no copy: C-contiguous and of native byte order. Give it in several calls."
    )


def as_array(leaf: Any, path: Path, most_dims: int = MAX_DIMS) -> npt.NDArray[Any]:
    """Returns the leaf as a C-contiguous array of native byte order, of a type that can be stored.

    Args:
        leaf: Anything that numpy makes an array of.
        path: Where it stands in the data, for the message.
        most_dims: Dimensions that it may have.

    Raises:
        ArgumentTypeError: Its type cannot be stored (objects, dates), or it has a mask.
        SignatureError: It has too many dimensions.
        OutOfMemoryError: It must be copied, and is too large for that.
    """
    array = leaf if type(leaf) is np.ndarray else as_plain(leaf, f"data at {path}")
    native = array.dtype.newbyteorder("=")
    dtype_code(native, path)
    if array.ndim > most_dims:
        raise errors.SignatureError(
            f"Got data of {array.ndim} dimensions at {path}; expected at most {most_dims}. Merge "
            "some of them with reshape."
        )
    if array.dtype == native and array.flags.c_contiguous:
        return array
    return as_contiguous(array, native, f"data at {path}")


def table_not_found(
    name: object, tables: Mapping[str, Any], *, for_item: bool = False
) -> errors.ReverbError:
    """The error for a table that is not there; names those that are.

    Args:
        name: What was given.
        tables: Those that there are.
        for_item: Say, as Reverb's writers do, that it was to hold an item.
    """
    there = ", ".join(repr(t) for t in sorted(tables))
    if not isinstance(name, str):
        return errors.ArgumentTypeError(
            f"a table must be named by a str, got {type(name).__name__}: {name!r}. "
            f"The server has these tables: {there}. Use one of them."
        )
    what = f"Unable to create item in table {name!r} since the table could not be found. "
    return errors.TableNotFoundError(
        f"{what if for_item else ''}Priority table {_printable(name)} was not found. "
        f"The server has these tables: {there}. Use one of them."
    )


def _printable(name: str) -> str:
    """The name as Reverb's message has it, or quoted where it could not be printed."""
    return name if name.isprintable() else repr(name)


def describe_borrowers(lent: Iterable[tuple[int, str, int, int]]) -> str:
    """Who pins memory by batches that it has borrowed, for the end of a message; '' if nobody.

    Args:
        lent: (process id, role, items, since when in ns since the epoch) of each batch.
    """
    by_process: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for pid, role, items, since in lent:
        by_process.setdefault((pid, role), []).append((items, since))
    if not by_process:
        return ""
    now = time.time_ns()
    who = [
        f"process {pid} ({role}) has {len(batches)} with {sum(items for items, _ in batches)} "
        f"items, the oldest for {max(now - min(since for _, since in batches), 0) / 1e9:.1f} s"
        for (pid, role), batches in by_process.items()
    ]
    return (
        " Borrowed batches pin memory that cannot be used meanwhile: "
        f"{'; '.join(who)}. End their `with` blocks and drop their views."
    )


def step_open_already(in_place: bool) -> str:
    """What is wrong with `next_step` while another step is open."""
    what = "Got next_step() while a step is open already; expected none."
    if in_place:
        return f"{what} Leave the `with next_step()` block that it is written in first."
    return f"{what} Finish it by append() with partial_step=False."


def bad_priority(table: str, priority: float) -> errors.PriorityError:
    """The error for a priority that the table does not take."""
    if priority != priority:
        why = "Priority must not be NaN."
    elif priority < 0:
        why = "Priority must not be negative."
    else:
        why = "Priority must be finite, and so must priority ** priority_exponent (at most 1e290)."
    return errors.PriorityError(
        f"{why} Table {table!r} was given {priority!r}; nothing was changed. Give a number that "
        "the table takes."
    )


def check_new_structure(data: Any, columns: Iterable[Any]) -> None:
    """Refuses data in which a known leaf has become a nest, or a known nest a leaf.

    Args:
        data: A step's data.
        columns: Known columns, with their `path`.

    Raises:
        SignatureError: Names both paths.
    """
    known = [c.path for c in columns]
    given = {path for path, leaf in flatten_with_path(data) if leaf is not None}
    for old in known:
        for new in given:
            shorter, longer = (old, new) if len(old) < len(new) else (new, old)
            if shorter != longer and longer[: len(shorter)] == shorter:
                raise errors.SignatureError(
                    f"column {old} was given before, now {new}: a leaf cannot become a nest or the "
                    "other way round; expected is what it was. Use another name for the new "
                    "structure."
                )
