"""When a pattern makes an item, and of which steps: the definition, in plain Python.

`PatternEvaluator` applies patterns over any writer. For the writer of this machine the native
`StructuredCore` does the same without a Python object a step; tests hold the two together.

The rules: patterns are tried in order after every append, and once more where the episode ends.
Each makes at most one item a step, if all its conditions hold and all its cells are there. A step
counts for the step index. While it has no value of a used column (one that a pattern or a condition
names) no pattern is tried, and it does not count for the steps since a pattern made an item.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from logging import getLogger
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shmreplay import limits, tree
from shmreplay.binding_support import as_array, step_open_already
from shmreplay.errors import ReverbError, SignatureError, WriterStateError
from shmreplay.patterns import ConditionProto, Config, named_fields

__all__ = [
    "ConditionPlan",
    "ConfigPlan",
    "NodePlan",
    "PatternEvaluator",
    "StepWriter",
    "check_new_column",
    "check_places",
    "check_step",
    "compile_config",
    "relabelled",
    "set_twice",
    "step_unknown",
    "told_unusable",
    "used_columns",
    "without_values",
]

_logger = getLogger("shmreplay")

# What a condition looks at, and how it compares.
STEP_INDEX, STEPS_SINCE_APPLIED, BUFFER_LENGTH, IS_END_EPISODE, DATA = range(5)
EQUAL, AT_LEAST, MODULO = range(3)

_LEFT: Final = {
    "step_index": STEP_INDEX,
    "steps_since_applied": STEPS_SINCE_APPLIED,
    "buffer_length": BUFFER_LENGTH,
    "is_end_episode": IS_END_EPISODE,
    "flat_source_index": DATA,
}

_TD_DTYPES: Final = ("float32", "float64", "int32", "int64")


class NodePlan(NamedTuple):
    """Cells of one column: `length` steps, `step` apart, from `first` (0 is the newest step)."""

    column: int
    first: int
    step: int
    length: int
    squeeze: bool


class ConditionPlan(NamedTuple):
    """left == a, left >= a, or left % a == b (remainder as in C); or the inverse of it."""

    left: int
    column: int
    compare: int
    a: int
    b: int
    inverse: bool


class ConfigPlan(NamedTuple):
    """A config in numbers. `td_column` is -1 for the constant priority `weight`."""

    table: str
    structure: Any
    nodes: tuple[NodePlan, ...]
    conditions: tuple[ConditionPlan, ...]
    weight: float
    td_column: int
    names: tuple[tuple[int, tree.Path], ...]
    """Fields of a step by their flat index, and where the reference step has them, if known."""


class StepWriter(Protocol):
    """What the patterns need of a writer."""

    @property
    def history(self) -> Any:
        """References to what was appended."""

    def append(self, data: Any, *, partial_step: bool = False) -> None:
        """Appends a step or a part of it."""

    def create_item(
        self, table: str, priority: float, trajectory: Any, timeout: float | None = None
    ) -> int | None:
        """Makes an item."""

    def flush(self, block_until_num_items: int = 0, timeout_ms: float | None = None) -> None:
        """Waits for items to be in their tables."""

    def end_episode(self, clear_buffers: bool = True, timeout_ms: int | None = None) -> None:
        """Starts a new episode."""

    def close(self) -> None:
        """Ends the writer."""


def compile_config(config: Config) -> ConfigPlan:
    """Puts a checked config into numbers."""
    nodes = tuple(
        NodePlan(
            column=node.flat_source_index,
            first=1 - node.reach,
            step=node.step if node.HasField("step") else 1,
            length=node.length,
            squeeze=not node.HasField("start"),
        )
        for node in config.flat
    )
    priority = config.priority
    td = priority.WhichOneof("priority") == "td_error"
    return ConfigPlan(
        table=config.table,
        structure=config.pattern_structure,
        nodes=nodes,
        conditions=tuple(map(_compile_condition, config.conditions)),
        weight=priority.td_error.max_priority_weight if td else priority.constant_fn.value,
        td_column=priority.td_error.flat_source_index if td else -1,
        names=tuple(named_fields(config)),
    )


def _compile_condition(condition: ConditionProto) -> ConditionPlan:
    left = _LEFT[str(condition.WhichOneof("left"))]
    column = condition.flat_source_index if left == DATA else -1
    if condition.HasField("mod_eq"):
        compare, a, b = MODULO, condition.mod_eq.mod, condition.mod_eq.eq
    elif condition.HasField("ge"):
        compare, a, b = AT_LEAST, condition.ge, 0
    else:
        compare, a, b = EQUAL, condition.eq, 0
    return ConditionPlan(left, column, compare, a, b, condition.inverse)


def used_columns(plans: Sequence[ConfigPlan]) -> list[int]:
    """Flat indices of the leaves that a pattern or a condition looks at, in order."""
    used = {node.column for plan in plans for node in plan.nodes}
    used |= {c.column for plan in plans for c in plan.conditions if c.left == DATA}
    return sorted(used)


# ---------------------------------------------------------------- errors that both give


def check_step(
    flat: Sequence[tuple[tree.Path, Any]],
    known: Sequence[tree.Path] | None,
    used: Sequence[int],
    plans: Sequence[ConfigPlan],
) -> None:
    """Refuses a step with other leaves than those before it.

    Args:
        flat: Paths and leaves.
        known: Where the leaves of steps stand; None for the first.
        used: Leaves that the patterns name.
        plans: What is made of the steps: the first step is compared with their reference steps.

    Raises:
        SignatureError: It has too many, too few or others.
    """
    wanted = None if known is None else len(known)
    if wanted is None and len(flat) <= used[-1]:
        wanted = used[-1] + 1
    if wanted is not None and len(flat) != wanted:
        raise SignatureError(
            f"Flattened data has an unexpected length, got {len(flat)} but wanted {wanted}. Give "
            "every leaf in each step, None for those that it lacks."
        )
    paths = [path for path, _ in flat]
    if known is not None:
        check_places(paths, known)
    else:
        check_names(paths, [plan.names for plan in plans])


def check_names(
    paths: Sequence[tree.Path], fields: Sequence[Sequence[tuple[int, tree.Path]]]
) -> None:
    """Refuses steps whose leaves have other names than those of a reference step.

    Lists and tuples have no names, and go with any; keys that are numbers are names.

    Args:
        paths: Where the leaves stand.
        fields: Of each config the indices of leaves, with where the reference step has them.

    Raises:
        SignatureError: One has another name; says which.
    """
    for index, wanted in (field for config in fields for field in config):
        path = paths[index] if index < len(paths) else wanted
        names, known = ([part for part in p if isinstance(part, str)] for p in (path, wanted))
        keyed = _has_numbers_as_keys(path, index) or _has_numbers_as_keys(wanted, index)
        if (names and known and names != known) or (keyed and path != wanted):
            raise SignatureError(
                f"Got a step whose leaf {index} is at {path!r}; expected {wanted!r}, as in the "
                "reference step of the pattern. Leaves are known by their place: make the reference"
                " step of the structure that is appended."
            )


def _has_numbers_as_keys(path: tree.Path, index: int) -> bool:
    """Is there a number in the path that no list has there?"""
    # A leaf's place in any of the lists around it is at most its place among all leaves.
    return any(isinstance(part, int) and part > index for part in path)


def check_places(paths: Sequence[tree.Path], known: Sequence[tree.Path]) -> None:
    """Refuses a step whose leaves are known by their place, and stand elsewhere than before.

    Raises:
        SignatureError: One does; names the first.
    """
    for path, before in zip(paths, known, strict=True):
        if path != before:
            raise SignatureError(
                f"Got a step with a leaf at {path!r}; expected one at {before!r}, as in those "
                "before."
                " Leaves are known by their place: give every step the same structure, with None "
                "for what it lacks, or make another writer."
            )


def set_twice(index: int, path: tree.Path) -> WriterStateError:
    """The error for a column that an open step has a value of already."""
    return WriterStateError(
        f"A value for column {index} (path={path!r}) was provided by multiple Append/AppendPartial "
        "calls in the same step; expected one. Give None for it in all of them but one."
    )


def step_unknown() -> WriterStateError:
    """The error for a step in place before it is known what a step looks like."""
    return WriterStateError(
        "Got next_step() before a step with all columns; dtype and shape of each must be known. "
        "Append the first step, and write those after it in place."
    )


def without_values(data: Any) -> Any:
    """The structure of a step, with None for its leaves."""
    return tree.map_structure(lambda _: None, data)


def check_new_column(plans: Sequence[ConfigPlan], index: int, path: tree.Path, leaf: Any) -> None:
    """Refuses the first value of a column that priorities are made of, if it is no number.

    Raises:
        SignatureError: It is no single float32, float64, int32 or int64.
    """
    if not any(
        plan.td_column == index and any(node.column == index for node in plan.nodes)
        for plan in plans
    ):
        return
    array = as_array(leaf, path)
    if array.size != 1:
        raise SignatureError(
            f"TD Error expects a scalar tensor, got shape {array.shape} for column {index} "
            f"(path={path!r}). Give one number a step."
        )
    if array.dtype.name not in _TD_DTYPES:
        raise SignatureError(
            f"TD Error expects a double/float/int tensor and it is {array.dtype} for column "
            f"{index} (path={path!r}). Convert it with float()."
        )


def relabelled(error: ReverbError, flat: Sequence[tuple[tree.Path, Any]]) -> ReverbError:
    """The same error, with columns under the names that the user knows them by.

    The writer below knows a column by its flat index alone.
    """
    text = str(error)
    for index, (path, _) in enumerate(flat):
        text = text.replace(f"column ({index},)", f"column {index} (path={path!r})")
        text = text.replace(f" at ({index},)", f" at {path!r}")
    return type(error)(text)


def told_unusable(index: int, dtype: Any, shape: tuple[int, ...]) -> None:
    """Logs that a condition looks at data that it cannot compare, and is never true."""
    _logger.error(
        "a condition on column %d is never true: it needs one integer or bool a step, the column "
        "has dtype %s and shape %s",
        index,
        dtype,
        shape,
    )


# ---------------------------------------------------------------- the evaluator


class PatternEvaluator:
    """Applies patterns over any writer of trajectories."""

    def __init__(self, writer: StepWriter, plans: Sequence[ConfigPlan], reach: int) -> None:
        """Takes an unused writer that keeps `reach` steps."""
        self._writer = writer
        self._plans = plans
        self._used = used_columns(plans)
        self._paths: list[tree.Path] | None = None
        self._blank: dict[int, npt.NDArray[Any]] = {}  # of each column that has had a value, zeros
        self.step_structure: Any = None  # of the steps; leaves do not matter
        self._told: set[int] = set()
        # Of each step since the buffers were cleared, the newest last: the used values that it has.
        self._steps: deque[dict[int, npt.NDArray[Any]]] = deque(maxlen=reach)
        self._buffer_length = 0
        self._episode_steps = 0
        self._used_steps = 0
        self._fired_at = [0] * len(plans)  # in used steps
        self._fired = [False] * len(plans)  # for the newest step
        self.step_is_open = False

    def append(self, data: Any, partial_step: bool, timeout: float | None = None) -> None:
        """See `StructuredWriter.append`."""
        flat = tree.flatten_with_path(data)
        check_step(flat, self._paths, self._used, self._plans)
        given = {i: flat[i][1] for i in self._used if flat[i][1] is not None}
        open_step = self._steps[-1] if self.step_is_open else {}
        for index, leaf in given.items():
            if index in open_step:
                raise set_twice(index, flat[index][0])
            if index not in self._blank:
                check_new_column(self._plans, index, flat[index][0], leaf)
        if timeout is not None:
            # Room for all items that the step can make; to the writer, 0 means for ever.
            room = limits.WRITER_WINDOW_ITEMS - len(self._plans)
            self._writer.flush(max(room, 0), max(timeout * 1000, 1e-3))
        try:
            self._writer.append(given, partial_step=partial_step)
        except ReverbError as error:
            raise relabelled(error, flat) from None
        if self._paths is None:
            self.step_structure = without_values(data)
        self._paths = [path for path, _ in flat]
        for index in given.keys() - self._blank.keys():
            self._blank[index] = np.zeros_like(as_array(given[index], flat[index][0]))
        self._take(given)
        self.step_is_open = partial_step
        if given:
            self._apply(at_end=False)

    def blank_step(self) -> list[npt.NDArray[Any] | None]:
        """Arrays of zeros for the leaves of a step, None for those that are not used.

        Raises:
            WriterStateError: A column is not known yet, or a step is open.
        """
        if self._paths is None or len(self._blank) < len(self._used):
            raise step_unknown()
        if self.step_is_open:
            raise WriterStateError(step_open_already(in_place=False))
        leaves = range(len(self._paths))
        return [self._blank[i].copy() if i in self._blank else None for i in leaves]

    def _take(self, given: Mapping[int, Any]) -> None:
        """Notes values of the newest step, which a step that is not open begins."""
        if not self.step_is_open:
            self._steps.append({})
            self._buffer_length += 1
            self._episode_steps += 1
            self._fired = [False] * len(self._plans)
        if given and not self._steps[-1]:
            self._used_steps += 1
        # Copies: the caller may reuse its arrays.
        self._steps[-1].update({i: np.array(leaf) for i, leaf in given.items()})

    def apply_at_end(self) -> None:
        """Applies the patterns where the episode is about to end."""
        if self._episode_steps > 0 and self._steps[-1]:
            self._apply(at_end=True)

    def ended(self, clear_buffers: bool) -> None:
        """Notes that the episode has ended."""
        self.step_is_open = False
        self._episode_steps = 0
        if clear_buffers:
            self._steps.clear()
            self._buffer_length = 0

    def _apply(self, at_end: bool) -> None:
        for number, plan in enumerate(self._plans):
            if self._fired[number]:
                continue
            since = self._used_steps - self._fired_at[number]
            if not all(self._holds(c, since, at_end) for c in plan.conditions):
                continue
            if not all(self._is_there(node) for node in plan.nodes):
                continue
            columns = [self._column(node) for node in plan.nodes]
            trajectory = tree.unflatten_as(plan.structure, columns)
            self._writer.create_item(plan.table, self._priority(plan), trajectory)
            self._fired[number] = True
            self._fired_at[number] = self._used_steps

    # ------------------------------------------------------------ conditions

    def _holds(self, condition: ConditionPlan, since: int, at_end: bool) -> bool:
        value: int | None
        if condition.left == STEP_INDEX:
            value = self._episode_steps - 1
        elif condition.left == STEPS_SINCE_APPLIED:
            value = since
        elif condition.left == BUFFER_LENGTH:
            value = self._buffer_length
        elif condition.left == IS_END_EPISODE:
            value = int(at_end)
        else:
            value = self._scalar(condition.column)
        if value is None:
            return False
        return _compares(condition, value) is not condition.inverse

    def _scalar(self, index: int) -> int | None:
        """The integer that the newest step has in a column, if it has one."""
        array = self._steps[-1].get(index)
        if array is None:
            return None
        if array.size != 1 or array.dtype.kind not in "iub":
            if index not in self._told:
                self._told.add(index)
                told_unusable(index, array.dtype, array.shape)
            return None
        return int(array.reshape(())[()])

    # ------------------------------------------------------------ items

    def _offsets(self, node: NodePlan) -> range:
        """Positions in the deque of steps, from its end."""
        start = node.first - 1
        return range(start, start + node.step * node.length, node.step)

    def _is_there(self, node: NodePlan) -> bool:
        return len(self._steps) >= 1 - node.first and all(
            node.column in self._steps[i] for i in self._offsets(node)
        )

    def _column(self, node: NodePlan) -> Any:
        history = self._writer.history[node.column]
        if node.squeeze:
            return history[node.first - 1]
        cells = self._offsets(node)
        return history[cells.start : cells.stop if cells.stop < 0 else None : cells.step]

    def _priority(self, plan: ConfigPlan) -> float:
        if plan.td_column < 0:
            return plan.weight
        errors = [
            abs(float(self._steps[i][node.column].reshape(())[()]))
            for node in plan.nodes
            if node.column == plan.td_column
            for i in self._offsets(node)
        ]
        if not errors:
            return 0.0
        # Not max(): with it, whether a NaN shows would depend on where it stands.
        highest = float(np.max(errors))
        return plan.weight * highest + (1.0 - plan.weight) * (sum(errors) / len(errors))


def _compares(condition: ConditionPlan, value: int) -> bool:
    if condition.compare == EQUAL:
        return value == condition.a
    if condition.compare == AT_LEAST:
        return value >= condition.a
    # The sign of the remainder is that of the value, as in C.
    remainder = abs(value) % condition.a
    return (remainder if value >= 0 else -remainder) == condition.b
