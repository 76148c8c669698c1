"""Making patterns: reference steps, conditions, priorities; `structured_writer` offers them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from shmreplay import errors, tree
from shmreplay.patterns import (
    ConditionProto,
    Config,
    ConstantPriority,
    ModuloEq,
    PatternNode,
    Priority,
    TDErrorPriority,
)

__all__ = [
    "Condition",
    "Pattern",
    "PatternTransform",
    "ReferenceStep",
    "constant_priority_fn",
    "create_config",
    "create_reference_step",
    "paths_of",
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
                    f"Key must be int or slice but got {key!r} (type {type(key)}). Use for "
                    "instance [-1] or [-3:]."
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
    paths = paths_of(step_structure)
    leaves = [_ReferenceLeaf(i, paths) for i in range(len(paths))]
    return tree.unflatten_as(step_structure, leaves)


def paths_of(structure: Any) -> tuple[tree.Path, ...]:
    """Returns where the leaves of a step stand."""
    return tuple(path for path, _ in tree.flatten_with_path(structure))


def pattern_from_transform(step_structure: Any, transform: PatternTransform) -> Pattern:
    """Returns `transform` of a reference step of this structure.

    Args:
        step_structure: Like the data that is going to be appended.
        transform: Makes the pattern of the reference step.
    """
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
                f"a leaf of a pattern must be a column such as step['obs'][-4:], got {leaf!r:.80} "
                f"at {path!r}"
            )
    for condition in conditions:
        if not isinstance(condition, ConditionProto):
            raise errors.ArgumentTypeError(
                f"a condition must be a comparison such as Condition.step_index() >= 3, got "
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
    """Returns the pattern that a config was made of.

    Args:
        config: As `create_config` makes it.
    """
    return tree.unflatten_as(config.pattern_structure, config.flat)


# ---------------------------------------------------------------- priorities


def constant_priority_fn(value: float) -> Priority:
    """Gives every item the same priority.

    Args:
        value: The priority.
    """
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

    Raises:
        ArgumentTypeError: The function does not return one field of the step.
    """
    field = get_field_from_step_fn(create_reference_step(step_structure))
    if not isinstance(field, _ReferenceLeaf):
        raise errors.ArgumentTypeError(
            f"get_field_from_step_fn must return one field of the step, got {field!r:.80}. Use for "
            "instance lambda step: step['done']."
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
            f"a condition must compare with an int, got {value!r:.80} of type "
            f"{type(value).__name__}. Use int()."
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
        paths = paths_of(step_structure)
        leaves = [_Operand(paths, flat_source_index=i) for i in range(len(paths))]
        return tree.unflatten_as(step_structure, leaves)
