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

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from shmreplay import errors, tree
from shmreplay._native import StructuredCore, WriterCore, logger
from shmreplay.limits import checked_timeout_ms
from shmreplay.pattern_building import (
    Condition,
    Pattern,
    PatternTransform,
    ReferenceStep,
    constant_priority_fn,
    create_config,
    create_reference_step,
    pattern_from_transform,
    td_error,
    unpack_pattern,
)
from shmreplay.pattern_plan import PatternEvaluator, StepWriter, compile_config
from shmreplay.pattern_signature import infer_signature
from shmreplay.patterns import (
    ConditionProto,
    Config,
    check_configs,
    reach_of,
)

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
                f"configs must be a list of Config, got {configs!r}. Make them with "
                "create_config()."
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
