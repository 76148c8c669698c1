"""What a structured writer is told: patterns of steps, conditions, priorities.

In Reverb these are protocol buffers. Here they are plain values with the same fields, which read as
0 where they are not set, and which answer ``HasField`` and ``WhichOneof``.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from shmreplay import tree
from shmreplay.errors import ArgumentTypeError, InvalidArgumentError
from shmreplay.limits import MAX_COLUMNS, MAX_KEEP_ALIVE_REFS

__all__ = [
    "ConditionProto",
    "Config",
    "ConstantPriority",
    "Message",
    "ModuloEq",
    "PatternNode",
    "Priority",
    "TDErrorPriority",
    "check_configs",
    "named_fields",
    "reach_of",
]


class Message:
    """Named fields that may be unset; equal by value."""

    _FIELDS: ClassVar[dict[str, Any]]
    """Fields and their kinds: int, float, bool, str, a message class, or list."""
    _ONE_OF: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Groups of fields of which at most one is set."""
    _present: set[str]
    step_paths: tuple[tree.Path, ...] | None = None
    """Where the leaves of the reference step stand that the message is of, if one is known."""

    def __init__(self, **fields: Any) -> None:
        """Takes the fields that are set."""
        object.__setattr__(self, "_present", set())
        for name, kind in self._FIELDS.items():
            object.__setattr__(self, name, kind())
        for name, value in fields.items():
            setattr(self, name, value)

    def of_step(self, paths: tuple[tree.Path, ...]) -> Self:
        """Notes the reference step, which is no field: messages are equal without it."""
        object.__setattr__(self, "step_paths", paths)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field, and unsets those that stand for the same thing.

        Raises:
            AttributeError: There is no such field.
            ArgumentTypeError: It takes another type.
        """
        kind = self._FIELDS.get(name)
        if kind is None:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}; expected one of"
                f" {sorted(self._FIELDS)}. Use one of them."
            )
        for group in self._ONE_OF.values():
            for other in group if name in group else ():
                object.__setattr__(self, other, self._FIELDS[other]())
                self._present.discard(other)
        object.__setattr__(self, name, _converted(type(self).__name__, name, kind, value))
        self._present.add(name)

    def HasField(self, name: str) -> bool:
        """Returns whether a field was set.

        Raises:
            ValueError: There is no such field.
        """
        if name not in self._FIELDS:
            raise InvalidArgumentError(
                f"{type(self).__name__} has no field {name!r}; expected one of"
                f" {sorted(self._FIELDS)}. Use one of them."
            )
        return name in self._present

    def WhichOneof(self, group: str) -> str | None:
        """Returns which field of a group is set, or None.

        Raises:
            ValueError: There is no such group.
        """
        if group not in self._ONE_OF:
            raise InvalidArgumentError(
                f"{type(self).__name__} has no group {group!r}; expected one of"
                f" {sorted(self._ONE_OF)}. Use one of them."
            )
        return next((name for name in self._ONE_OF[group] if name in self._present), None)

    def _as_json(self) -> dict[str, Any]:
        return {name: _as_json(getattr(self, name)) for name in sorted(self._present)}

    def SerializeToString(self) -> bytes:
        """Returns the fields that are set as JSON text: equal values have equal texts."""
        return json.dumps(self._as_json(), separators=(",", ":")).encode()

    def __eq__(self, other: object) -> bool:
        """Returns whether the same fields are set to the same values."""
        if type(other) is not type(self):
            return NotImplemented
        return self._as_json() == other._as_json()

    __hash__ = None  # type: ignore[assignment]  # its fields may be set anew

    def __repr__(self) -> str:
        """Returns the call that would make it."""
        fields = ", ".join(f"{n}={getattr(self, n)!r}" for n in self._FIELDS if n in self._present)
        return f"{type(self).__name__}({fields})"


def _converted(owner: str, name: str, kind: Any, value: Any) -> Any:
    try:
        if kind is int:
            return operator.index(value)
        if kind is float:
            return float(value)
        if kind is list:
            return list(value)
        if kind is _Structure or isinstance(value, kind):
            return value
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{owner}.{name} takes {kind.__name__}, got {value!r:.80}. Give one of that type."
        ) from error
    raise ArgumentTypeError(
        f"{owner}.{name} takes {kind.__name__}, got {value!r:.80}. Give one of that type."
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, Message):
        return value._as_json()
    if isinstance(value, list) and all(isinstance(v, Message) for v in value):
        return [v._as_json() for v in value]
    if isinstance(value, (int, float, str)):
        return value
    return tree.structure_to_json(value, lambda leaf: None)


class _Structure:
    """Stands for any nested structure; unset it is None."""

    def __new__(cls) -> Any:
        return None


class PatternNode(Message):
    """One column of a pattern: a field of the step, and which steps of it, the newest being -1.

    With `start`: steps `start, start + step, ...` below `stop` (0: up to the newest), with a time
    dimension. Without: the one step `stop`, without a time dimension.
    """

    flat_source_index: int
    start: int
    stop: int
    step: int
    _FIELDS: ClassVar[dict[str, Any]] = {
        "flat_source_index": int,
        "start": int,
        "stop": int,
        "step": int,
    }

    @property
    def reach(self) -> int:
        """How many steps back it goes."""
        return -(self.start if self.HasField("start") else self.stop)

    @property
    def length(self) -> int:
        """Number of its steps."""
        if not self.HasField("start"):
            return 1
        step = self.step if self.HasField("step") else 1
        return -((self.start - self.stop) // step)


class ModuloEq(Message):
    """True where the left side leaves the remainder `eq` when it is divided by `mod`."""

    mod: int
    eq: int
    _FIELDS: ClassVar[dict[str, Any]] = {"mod": int, "eq": int}


class ConditionProto(Message):
    """A comparison; see `structured_writer.Condition`, which makes them."""

    step_index: bool
    steps_since_applied: bool
    buffer_length: bool
    is_end_episode: bool
    flat_source_index: int
    eq: int
    ge: int
    mod_eq: ModuloEq
    inverse: bool
    _FIELDS: ClassVar[dict[str, Any]] = {
        "step_index": bool,
        "steps_since_applied": bool,
        "buffer_length": bool,
        "is_end_episode": bool,
        "flat_source_index": int,
        "eq": int,
        "ge": int,
        "mod_eq": ModuloEq,
        "inverse": bool,
    }
    _ONE_OF: ClassVar[dict[str, tuple[str, ...]]] = {
        "left": (
            "step_index",
            "steps_since_applied",
            "buffer_length",
            "is_end_episode",
            "flat_source_index",
        ),
        "cmp": ("eq", "ge", "mod_eq"),
    }


class ConstantPriority(Message):
    """The same priority for every item."""

    value: float
    _FIELDS: ClassVar[dict[str, Any]] = {"value": float}


class TDErrorPriority(Message):
    """w * max(abs(x)) + (1 - w) * mean(abs(x)) over the values x of a field in the item."""

    max_priority_weight: float
    flat_source_index: int
    _FIELDS: ClassVar[dict[str, Any]] = {"max_priority_weight": float, "flat_source_index": int}


class Priority(Message):
    """How an item gets its priority."""

    constant_fn: ConstantPriority
    td_error: TDErrorPriority
    _FIELDS: ClassVar[dict[str, Any]] = {
        "constant_fn": ConstantPriority,
        "td_error": TDErrorPriority,
    }
    _ONE_OF: ClassVar[dict[str, tuple[str, ...]]] = {"priority": ("constant_fn", "td_error")}


class Config(Message):
    """A pattern, the table its items go to, when they are made, and with what priority."""

    flat: list[PatternNode]
    pattern_structure: Any
    table: str
    priority: Priority
    conditions: list[ConditionProto]
    _FIELDS: ClassVar[dict[str, Any]] = {
        "flat": list,
        "pattern_structure": _Structure,
        "table": str,
        "priority": Priority,
        "conditions": list,
    }


# ---------------------------------------------------------------- checks


def check_configs(configs: Sequence[Config]) -> None:
    """Refuses configs that no writer can apply.

    Raises:
        InvalidArgumentError: There are none, or one cannot be applied; says which and why.
        ArgumentTypeError: One is not a `Config`.
    """
    if not configs:
        raise InvalidArgumentError(
            "At least one config must be provided. Got none: make them with create_config()."
        )
    for position, config in enumerate(configs):
        if not isinstance(config, Config):
            raise ArgumentTypeError(
                f"Invalid configuration at position {position}: expected a Config, as "
                f"create_config() makes them, got {config!r:.80}. Use create_config()."
            )
        why = _why_invalid(config)
        if why is not None:
            raise InvalidArgumentError(
                f"Invalid configuration at position {position}: {why} Make it by create_config()."
            )


def named_fields(config: Config) -> list[tuple[int, tree.Path]]:
    """The fields of a step that a config uses, each with where it stood in the reference step.

    Those alone of which that is known.
    """
    used: list[PatternNode | ConditionProto | TDErrorPriority] = [*config.flat, *config.conditions]
    used.append(config.priority.td_error)
    return [
        (message.flat_source_index, message.step_paths[message.flat_source_index])
        for message in used
        if message.step_paths is not None
        and message.HasField("flat_source_index")
        and 0 <= message.flat_source_index < len(message.step_paths)
    ]


def reach_of(configs: Sequence[Config]) -> int:
    """How many steps the patterns go back: what a writer must keep within reach."""
    return max(node.reach for config in configs for node in config.flat)


def _why_invalid(config: Config) -> str | None:
    if not config.flat:
        return "`flat` must not be empty."
    if len(config.flat) > MAX_COLUMNS:
        return f"a pattern has at most {MAX_COLUMNS} columns but got {len(config.flat)}."
    if not config.table:
        return "`table` must not be empty."
    whys = [_why_invalid_node(node) for node in config.flat]
    whys += [_why_invalid_condition(condition) for condition in config.conditions]
    whys.append(_why_invalid_priority(config.priority))
    return next((why for why in whys if why is not None), None)


def _why_invalid_node(node: PatternNode) -> str | None:
    has_start, has_stop = node.HasField("start"), node.HasField("stop")
    why: str | None = None
    if node.flat_source_index < 0:
        why = f"`flat_source_index` must be >= 0 but got {node.flat_source_index}."
    elif not has_start and not has_stop:
        why = "At least one of `start` and `stop` must be specified."
    elif has_start and node.start >= 0:
        why = f"`start` must be < 0 but got {node.start}."
    elif node.stop > 0:
        why = f"`stop` must be <= 0 but got {node.stop}."
    elif has_start and node.stop <= node.start:
        why = f"`stop` ({node.stop}) must be > `start` ({node.start}) when both are specified."
    elif not has_start and node.stop == 0:
        why = f"`stop` must be < 0 when `start` isn't set but got {node.stop}."
    elif node.HasField("step") and not has_start:
        why = "`step` must only be set when `start` is set."
    elif node.HasField("step") and node.step <= 0:
        why = f"`step` must be > 0 but got {node.step}."
    elif node.reach > MAX_KEEP_ALIVE_REFS:
        why = f"a pattern goes back {node.reach} steps; expected at most {MAX_KEEP_ALIVE_REFS}."
    return why


def _why_invalid_condition(condition: Any) -> str | None:
    if not isinstance(condition, ConditionProto):
        return (
            f"a condition is a comparison such as Condition.step_index() >= 3, got {condition!r}."
        )
    if condition.WhichOneof("left") is None:
        return "a condition needs a left side, such as `step_index`."
    if condition.WhichOneof("cmp") is None:
        return "a condition needs a comparison: `eq`, `ge` or `mod_eq`."
    if condition.flat_source_index < 0:
        return f"`flat_source_index` must be >= 0 but got {condition.flat_source_index}."
    if condition.HasField("mod_eq") and condition.mod_eq.mod <= 0:
        return f"`mod_eq.mod` must be > 0 but got {condition.mod_eq.mod}."
    if condition.HasField("mod_eq") and condition.mod_eq.eq < 0:
        return f"`mod_eq.eq` must be >= 0 but got {condition.mod_eq.eq}."
    is_one = condition.HasField("eq") and condition.eq == 1 and not condition.inverse
    if condition.is_end_episode and not is_one:
        return "a condition on `is_end_episode` must be `eq` 1."
    numbers = (condition.eq, condition.ge, condition.mod_eq.mod, condition.mod_eq.eq)
    if any(abs(number) >= 2**63 for number in numbers):
        return f"the numbers of a condition must fit int64, got {condition!r}."
    return None


def _why_invalid_priority(priority: Priority) -> str | None:
    kind = priority.WhichOneof("priority")
    if kind is None:
        return "`priority` must be a constant or made of TD errors."
    value = (
        priority.constant_fn.value
        if kind == "constant_fn"
        else priority.td_error.max_priority_weight
    )
    if math.isnan(value):
        return "`priority` must not be nan."
    if kind == "td_error" and math.isinf(value):
        return f"`max_priority_weight` must be finite but got {value}."
    if kind == "td_error" and priority.td_error.flat_source_index < 0:
        return f"`flat_source_index` must be >= 0 but got {priority.td_error.flat_source_index}."
    return None
