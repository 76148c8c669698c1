"""Patterns, and the writer that makes an item wherever one of them applies.

A pattern says once which steps make up an item, relative to the newest; the writer then makes the
items by itself:

    step = structured_writer.create_reference_step({"obs": ..., "action": ...})
    config = structured_writer.create_config(
        pattern={"stacked": step["obs"][-4:], "action": step["action"][-1]},
        table="replay",
        conditions=[structured_writer.Condition.step_index() >= 3],
    )
    writer = client.structured_writer([config])
    writer.append({"obs": ..., "action": ...})
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias

from shmreplay import errors, tree
from shmreplay._native import StructuredCore, WriterCore, logger
from shmreplay.limits import checked_timeout_ms
from shmreplay.pattern_plan import PatternEvaluator, StepWriter, check_names, compile_config
from shmreplay.patterns import (
    ConditionProto,
    Config,
    ConstantPriority,
    ModuloEq,
    PatternNode,
    Priority,
    TDErrorPriority,
    check_configs,
    named_fields,
    reach_of,
)
from shmreplay.spec import TensorSpec, as_signature

__all__ = [
    "Condition",
    "ConditionProto",
    "Config",
    "Pattern",
    "PatternTransform",
    "ReferenceStep",
    "StructuredStep",
    "StructuredWriter",
    "constant_priority_fn",
    "create_config",
    "create_reference_step",
    "infer_signature",
    "pattern_from_transform",
    "td_error",
    "unpack_pattern",
]

ReferenceStep: TypeAlias = Any
"""Structure of a step, whose leaves are indexed to make a pattern."""

Pattern: TypeAlias = Any
"""Structure of an item, whose leaves are columns of reference steps."""

PatternTransform: TypeAlias = Callable[[ReferenceStep], Pattern]
"""Makes a pattern of a reference step."""

_FLUSH_BEFORE_GONE_MS = 5000


class StructuredWriter(StructuredCore):
    """Appends steps, and makes an item wherever a pattern applies.

    Make one with `Client.structured_writer`. All configs are tried in order after each append, also
    a partial one, and once more where the episode ends; each makes at most one item a step. Not
    usable after a fork.
    """

    def __init__(self, make_writer: Callable[[int], StepWriter], configs: Sequence[Config]) -> None:
        """Makes a writer and compiles the patterns.

        Args:
            make_writer: Gives a new writer of trajectories, from how many steps to keep.
            configs: What to make items of.

        Raises:
            InvalidArgumentError: There are no configs, or one cannot be applied.
            ArgumentTypeError: They are no list of configs.
            TableNotFoundError, PriorityError: A config's table is not there, or does not take its
                priority.
        """
        if not isinstance(configs, Sequence):
            raise errors.ArgumentTypeError(
                f"configs must be a list of Config, as create_config() makes them, got {configs!r}"
            )
        configs = list(configs)
        check_configs(configs)
        plans = [compile_config(config) for config in configs]
        reach = reach_of(configs)
        self._writer = make_writer(reach)
        native = isinstance(self._writer, WriterCore) and self._writer.in_native_code
        evaluator = None if native else PatternEvaluator(self._writer, plans, reach)
        try:
            if isinstance(self._writer, WriterCore):
                for plan in plans:
                    priority = plan.weight if plan.td_column < 0 else 0.0
                    self._writer.check_target(plan.table, priority)
            super().__init__(self._writer, plans, evaluator)
        except BaseException:
            self._writer.close()
            raise

    def next_step(self) -> StructuredStep:
        """A step to write in place: no copy is made.

        Use it as `with writer.next_step() as step: step['obs'][...] = ...`. Inside, `step` is the
        structure of a step, of writable arrays (zeros to begin with) that lie in shared memory,
        and None for leaves that no pattern and no condition names; at the end of the block the step
        is appended and the patterns are applied, or it is dropped if the block raised. Keep neither
        the arrays nor views of them for later: the memory then belongs to the step, and in the end
        to others. Over a bridge the arrays lie in the client's memory.

        Raises:
            WriterStateError: No step with all of its columns was appended yet.
        """
        return StructuredStep(self)

    def flush(self, block_until_num_items: int = 0, timeout_ms: int | None = None) -> None:
        """Waits until at most so many items are not in their table yet.

        Args:
            block_until_num_items: How many may remain.
            timeout_ms: Milliseconds to wait at most; None or negative: for ever; 0: do not wait.

        Raises:
            DeadlineExceededError: The time is over; the items stay in line.
            InvalidArgumentError: block_until_num_items is negative.
        """
        # To the writer below, 0 means for ever.
        now = checked_timeout_ms(timeout_ms) == 0.0
        self._writer.flush(block_until_num_items, 1 if now else timeout_ms)

    def end_episode(self, clear_buffers: bool = True, timeout_ms: int | None = None) -> None:
        """Makes the items of the end, waits for all items, and starts a new episode at step 0.

        Args:
            clear_buffers: Forget the steps. With False, patterns may reach back over the end of the
                episode.
            timeout_ms: Milliseconds to wait at most; None: for ever; 0: do not wait.

        Raises:
            DeadlineExceededError: The time is over. Items were made, the episode goes on; call it
                again.
        """
        self.apply_at_end()
        self._writer.end_episode(clear_buffers, timeout_ms)
        if self.evaluator is not None:
            self.evaluator.ended(clear_buffers)

    def close(self) -> None:
        """Closes the writer. Items that the rate limiter still holds back are dropped."""
        self._writer.close()

    def __enter__(self) -> StructuredWriter:
        """Returns the writer."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Flushes, unless an error of this package is on its way. The writer stays usable."""
        if exc_type is None or not issubclass(exc_type, errors.ReverbError):
            self.flush()

    def __del__(self) -> None:
        """Gives items that are held back some seconds to get in."""
        writer = getattr(self, "_writer", None)
        if writer is None or sys.is_finalizing():
            return
        if isinstance(writer, WriterCore) and writer.in_native_code and not writer.pending:
            return
        try:
            writer.flush(0, _FLUSH_BEFORE_GONE_MS)
        except errors.ReverbError as error:
            if not isinstance(error, errors.WriterClosedError | errors.ForkedHandleError):
                logger.warning("a structured writer is gone before all its items got in: %s", error)


class StructuredStep:
    """A step that is written in place; see `StructuredWriter.next_step`."""

    def __init__(self, writer: StructuredWriter) -> None:
        """See `StructuredWriter.next_step`."""
        self._writer = writer
        self._arrays: list[Any] = []
        self._step: Any = None

    def __enter__(self) -> Any:
        """Opens the step; returns the structure of arrays."""
        evaluator = self._writer.evaluator
        if evaluator is None:
            self._arrays = self._writer.place_open()
            structure = self._writer.step_structure
        else:
            self._arrays = evaluator.blank_step()
            structure = evaluator.step_structure
        self._step = tree.unflatten_as(structure, self._arrays)
        return self._step

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Appends the step, or drops it if the block raised. The arrays become read-only."""
        for array in self._arrays:
            if array is not None:
                array.flags.writeable = False
        if self._writer.evaluator is None:
            self._writer.place_close(exc_type is None)
        elif exc_type is None:
            self._writer.append(self._step)


# ---------------------------------------------------------------- patterns


class _ReferenceLeaf:
    """One field of a reference step."""

    def __init__(self, index: int, paths: tuple[tree.Path, ...]) -> None:
        self._index = index
        self._paths = paths

    def __getitem__(self, key: int | slice) -> PatternNode:
        """Returns a column of a pattern: of one step (int) or of several (slice)."""
        if not isinstance(key, slice):
            try:
                key = slice(operator.index(key))
            except TypeError:
                raise errors.InvalidArgumentError(
                    f"Key must be int or slice but got {key!r} (type {type(key)})."
                ) from None
        parts = {"start": key.start, "stop": key.stop, "step": key.step}
        node = PatternNode(**{name: v for name, v in parts.items() if v is not None})
        node.flat_source_index = self._index
        return node.of_step(self._paths)

    def __repr__(self) -> str:
        return f"<field {self._index} of a reference step>"


def create_reference_step(step_structure: Any) -> ReferenceStep:
    """Returns the structure with leaves that are indexed to make a pattern.

    Args:
        step_structure: Like the data that is going to be appended; its leaves do not matter. Fields
            are known by their place among the leaves; a writer whose first step has another name
            there refuses it.
    """
    paths = _paths_of(step_structure)
    leaves = [_ReferenceLeaf(i, paths) for i in range(len(paths))]
    return tree.unflatten_as(step_structure, leaves)


def _paths_of(structure: Any) -> tuple[tree.Path, ...]:
    return tuple(path for path, _ in tree.flatten_with_path(structure))


def pattern_from_transform(step_structure: Any, transform: PatternTransform) -> Pattern:
    """Returns `transform` of a reference step of this structure."""
    return transform(create_reference_step(step_structure))


def create_config(
    pattern: Pattern,
    table: str,
    conditions: Sequence[ConditionProto] = (),
    priority: Priority | None = None,
) -> Config:
    """Says what items to make, and when.

    Args:
        pattern: Structure of the items, of columns such as `step["obs"][-4:]` (the newest four,
            with a time dimension) or `step["obs"][-1]` (the newest, without).
        table: Name of the table.
        conditions: All must hold. That enough steps are there is a condition in any case.
        priority: From `constant_priority_fn` or `td_error`; None: 1.0.

    Raises:
        ArgumentTypeError: A leaf of the pattern is no column, or a condition no comparison.
    """
    flat = tree.flatten_with_path(pattern)
    for path, leaf in flat:
        if not isinstance(leaf, PatternNode):
            raise errors.ArgumentTypeError(
                f"a leaf of a pattern is a column such as step['obs'][-4:], got {leaf!r:.80} at "
                f"{path!r}"
            )
    for condition in conditions:
        if not isinstance(condition, ConditionProto):
            raise errors.ArgumentTypeError(
                f"a condition is a comparison such as Condition.step_index() >= 3, got "
                f"{condition!r:.80}"
            )
    return Config(
        flat=[leaf for _, leaf in flat],
        pattern_structure=tree.map_structure(lambda _: None, pattern),
        table=table,
        priority=constant_priority_fn(1.0) if priority is None else priority,
        conditions=list(conditions),
    )


def unpack_pattern(config: Config) -> Pattern:
    """Returns the pattern that a config was made of."""
    return tree.unflatten_as(config.pattern_structure, config.flat)


# ---------------------------------------------------------------- priorities


def constant_priority_fn(value: float) -> Priority:
    """Gives every item the same priority."""
    return Priority(constant_fn=ConstantPriority(value=value))


def td_error(
    max_priority_weight: float,
    step_structure: Any,
    get_field_from_step_fn: Callable[[Any], Any],
) -> Priority:
    """Makes priorities of TD errors that are a field of the steps.

    The priority is w * max(abs(x)) + (1 - w) * mean(abs(x)) over all values x of the field that are
    in the item; 0 if there are none.

    Args:
        max_priority_weight: The weight w.
        step_structure: Like the data that is going to be appended.
        get_field_from_step_fn: Picks the field (one float32, float64, int32 or int64 a step).
    """
    field = get_field_from_step_fn(create_reference_step(step_structure))
    if not isinstance(field, _ReferenceLeaf):
        raise errors.ArgumentTypeError(
            f"get_field_from_step_fn must return one field of the step, got {field!r:.80}"
        )
    priority = TDErrorPriority(
        max_priority_weight=max_priority_weight, flat_source_index=field._index
    )
    return Priority(td_error=priority.of_step(field._paths))


# ---------------------------------------------------------------- conditions


def _next_int(value: Any) -> int:
    """The int after the right side of a comparison.

    Raises:
        ArgumentTypeError: It is no int.
    """
    try:
        return operator.index(value) + 1
    except TypeError:
        raise errors.ArgumentTypeError(
            f"a condition compares with an int, got {value!r:.80} of type {type(value).__name__}"
        ) from None


class _Operand:
    """The left side of a comparison."""

    def __init__(self, paths: tuple[tree.Path, ...] | None = None, **left: Any) -> None:
        self._paths = paths
        self._left = left

    def _made(self, **comparison: Any) -> ConditionProto:
        condition = ConditionProto(**self._left, **comparison)
        return condition if self._paths is None else condition.of_step(self._paths)

    def __eq__(self, value: int) -> ConditionProto:  # type: ignore[override]
        return self._made(eq=value)

    def __ne__(self, value: int) -> ConditionProto:  # type: ignore[override]
        return self._made(eq=value, inverse=True)

    def __ge__(self, value: int) -> ConditionProto:
        return self._made(ge=value)

    def __gt__(self, value: int) -> ConditionProto:
        return self._made(ge=_next_int(value))

    def __lt__(self, value: int) -> ConditionProto:
        return self._made(ge=value, inverse=True)

    def __le__(self, value: int) -> ConditionProto:
        return self._made(ge=_next_int(value), inverse=True)

    def __mod__(self, divisor: int) -> _Remainder:
        return _Remainder(self, divisor)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<the left side of a condition: {self._left}; compare it>"


class _Remainder:
    """The left side of a comparison with a remainder."""

    def __init__(self, left: _Operand, divisor: int) -> None:
        self._left = left
        self._divisor = divisor

    def __eq__(self, value: int) -> ConditionProto:  # type: ignore[override]
        return self._left._made(mod_eq=ModuloEq(mod=self._divisor, eq=value))

    def __ne__(self, value: int) -> ConditionProto:  # type: ignore[override]
        mod_eq = ModuloEq(mod=self._divisor, eq=value)
        return self._left._made(mod_eq=mod_eq, inverse=True)

    __hash__ = None  # type: ignore[assignment]


class Condition:
    """What conditions compare: `==`, `!=`, `<`, `<=`, `>`, `>=` with an int, `% n == k`."""

    @staticmethod
    def step_index() -> _Operand:
        """Index of the newest step within its episode."""
        return _Operand(step_index=True)

    @staticmethod
    def steps_since_applied() -> _Operand:
        """Steps since the config last made an item, or since the first; episodes do not matter.

        Only steps with a value of some used column count.
        """
        return _Operand(steps_since_applied=True)

    @staticmethod
    def buffer_length() -> _Operand:
        """Steps since the buffers were last cleared."""
        return _Operand(buffer_length=True)

    @staticmethod
    def is_end_episode() -> ConditionProto:
        """True within `end_episode` only."""
        return ConditionProto(is_end_episode=True, eq=1)

    @staticmethod
    def data(step_structure: Any) -> Any:
        """Values of the newest step, in the structure given: one integer or bool each.

        A comparison with a value that the step lacks, or that is of another type, is false. The
        remainder of a negative value is negative or 0.
        """
        paths = _paths_of(step_structure)
        leaves = [_Operand(paths, flat_source_index=i) for i in range(len(paths))]
        return tree.unflatten_as(step_structure, leaves)


# ---------------------------------------------------------------- signatures


def infer_signature(configs: Sequence[Config], step_spec: Any) -> Any:
    """Returns the signature of a table that the items of all these configs fit.

    Args:
        configs: Of one table and of one structure.
        step_spec: Structure of specs of the steps: anything with shape and dtype.

    Returns:
        `TensorSpec`s in the structure of the patterns, named after their path. Where lengths
        differ, the leading dimension is None.

    Raises:
        InvalidArgumentError: There are no configs, or they do not go together.
        SignatureError: The fields of `step_spec` have other names than those of the reference step.
    """
    if not configs:
        raise errors.InvalidArgumentError("At least one config must be provided.")
    structure = configs[0].pattern_structure
    for config in configs:
        if not _same_structure(structure, config.pattern_structure):
            raise errors.InvalidArgumentError(
                "All configs must have exactly the same pattern_structure."
            )
    tables = sorted({config.table for config in configs})
    if len(tables) > 1:
        raise errors.InvalidArgumentError(
            "All configs must target the same table but provided configs included "
            f"{', '.join(tables)}."
        )
    signature = as_signature(step_spec)
    check_names(_paths_of(signature), [named_fields(config) for config in configs])
    step = tree.flatten(signature)
    paths = [path for path, _ in tree.flatten_with_path(structure)]
    merged = [
        _merged_spec(path, [_spec_of(config.flat[i], step, path) for config in configs])
        for i, path in enumerate(paths)
    ]
    return tree.unflatten_as(structure, merged)


def _same_structure(one: Any, other: Any) -> bool:
    try:
        tree.assert_same_structure(one, other)
    except errors.InvalidArgumentError:
        return False
    return True


def _spec_of(node: PatternNode, step: Sequence[TensorSpec], path: tree.Path) -> TensorSpec:
    if not 0 <= node.flat_source_index < len(step):
        raise errors.InvalidArgumentError(
            f"the pattern refers at {path!r} to field {node.flat_source_index} of a step, but "
            f"step_spec has {len(step)} fields"
        )
    spec = step[node.flat_source_index]
    shape = (node.length, *spec.shape) if node.HasField("start") else spec.shape
    return TensorSpec(shape, spec.dtype)


def _merged_spec(path: tree.Path, specs: Sequence[TensorSpec]) -> TensorSpec:
    if len({spec.dtype for spec in specs}) > 1:
        raise errors.InvalidArgumentError(
            f"Configs produce trajectories with multiple dtypes at {path!r}. Got "
            f"{[spec.dtype.name for spec in specs]}."
        )
    shape = specs[0].shape
    for spec in specs[1:]:
        if len(spec.shape) != len(shape) or spec.shape[1:] != shape[1:]:
            raise errors.InvalidArgumentError(
                f"Configs produce trajectories with incompatible shapes at {path!r}. Got "
                f"{[spec.shape for spec in specs]}."
            )
        if spec.shape != shape:
            shape = (None, *shape[1:])
    return TensorSpec(shape, specs[0].dtype, "/".join(map(str, path)))
