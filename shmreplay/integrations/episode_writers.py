"""What writers of episodes have in common, and the one that writes an episode as an item.

A step is a row, of what came in at the time: an observation, and the action and reward that led to
it. The first row of an episode has an observation alone; the last has the final one. Each is
written once, straight into the table's memory, and items refer to rows.
"""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import errors, limits, tree
from shmreplay.binding_support import table_not_found
from shmreplay.client import Client

__all__ = [
    "EpisodeItemWriter",
    "EpisodeStep",
    "EpisodeWriter",
    "check_table",
    "checked_at_least",
    "columns_of",
    "outcome_of",
]


class EpisodeWriter(abc.ABC):
    """A writer for one environment, with the two calls that a loop over it has.

        writer = NStepWriter(client, "replay", n=3, discount=0.99)
        writer.begin(observation)
        writer.step(action, reward, observation, terminated, truncated)

    The step that is terminated or truncated ends the episode. `VectorRecorder` makes these calls
    for each environment of a vector.
    """

    def __init__(self) -> None:
        """Begins outside of an episode."""
        self._in_episode = False
        self._learned = False  # it is known what a row looks like
        self._whole = False  # one with all its fields was written
        self._first: Any = None  # observation of a reset that is not written yet
        self._blank: Any = None  # an observation of zeros
        self._steps_written = 0
        self._dirty = False  # rows are there that no end was made for
        self._place: Any = None  # the row that is being written in place

    def begin(self, observation: Any) -> None:
        """Begins an episode with the observation of a reset.

        An episode that has not ended is cut off first: see `cut`.

        Args:
            observation: Nested structure of arrays and scalars. Copied.
        """
        self.cut()
        self._steps_written = 0
        if self._learned:
            self._write_first(observation)
        else:
            # Written with the first step: only then is it known what an action looks like.
            self._first = tree.map_structure(np.array, observation)
            self._blank = tree.map_structure(np.zeros_like, self._first)
        self._in_episode = True

    def step(
        self,
        action: Any,
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
        extras: Any = None,
    ) -> None:
        """Writes a step, and the items that it completes; ends the episode where it has ended.

        Args:
            action: Nested structure: what was done.
            reward: What that gave; written as float32.
            observation: What it led to. Of the last step of an episode the final one, and not
                what the next episode begins with. Copied once, into the table's memory.
            terminated: Whether the task is over: nothing more is to be had.
            truncated: Whether the episode ends though the task is not over, as at a time limit.
            extras: Nested structure of more about the action, such as the probability that it had
                or the state of a recurrent policy; in each step or in none.

        Raises:
            WriterStateError: No episode has begun.
            SignatureError: A dtype or shape is not that of the steps before.
            ArenaFullError: No memory.
        """
        if self._place is not None:
            raise errors.WriterStateError(
                "got a step while one is being written in place; expected the end of its"
                " `with next_step()` block before. Leave it first"
            )
        self.write_step(action, reward, observation, terminated, truncated, extras)

    def write_step(
        self,
        action: Any,
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
        extras: Any,
    ) -> None:
        """See `step`; for `EpisodeStep`, the one that is being written in place."""
        self._check_in_episode()
        if self._first is not None:
            if not self._learned:
                self._learn(self._first, action, extras)
                self._learned = True
            if self._dirty:  # the last try ended half way
                self._abandon()
            self._write_first(self._first)
            self._first = None
        self._step(action, float(reward), observation, bool(terminated), bool(truncated), extras)
        self._steps_written += 1
        self._whole = True
        if terminated or truncated:
            self._finish()

    def next_step(self, action: Any, extras: Any = None) -> EpisodeStep:
        """A step whose observation is written in place, by who makes it: no copy is made.

            with writer.next_step(action) as step:
                reward, terminated, truncated = simulate(action, out=step.observation)
                step.outcome(reward, terminated, truncated)

        `step.observation` is the structure of an observation, of writable arrays (zeros to begin
        with) that lie in the table's memory; keep neither them nor views of them. At the end of the
        block the step is written as by `step`; if the block raised there is none. The first step
        that a writer writes, those over a bridge and those of a `HindsightWriter` are copied.

        Args:
            action: See `step`.
            extras: See `step`.

        Raises:
            WriterStateError: No episode has begun, or the block ended without an outcome.
            SignatureError, ArenaFullError: As `step`.
        """
        return EpisodeStep(self, action, extras)

    def open_place(self) -> Any:
        """For `EpisodeStep`: the observation of the next row, to be written in place."""
        self._check_in_episode()
        place = self._next_row() if self._whole else None
        if place is None:
            return tree.map_structure(np.copy, self._blank)
        row = place.__enter__()
        self._place = (place, row)
        return row["observation"]

    def drop_place(self, error: BaseException | None) -> None:
        """For `EpisodeStep`: there is no such step, unless it was written already."""
        if self._place is not None:
            place, self._place = self._place[0], None
            place.__exit__(type(error), error, None)

    def cut(self) -> None:
        """Ends the episode where it is; its last step is neither terminated nor truncated.

        Without an episode it does nothing, and of one without steps no item is made.
        """
        if self._in_episode and self._steps_written:
            self._finish()
        elif self._dirty:  # a reset alone, or an end that failed
            self._abandon()
            self._dirty = False
        self._in_episode = False
        self._first = None

    def _check_in_episode(self) -> None:
        if not self._in_episode:
            raise errors.WriterStateError(
                "got a step outside of an episode; expected begin() before it. Call it with the"
                " observation of the reset"
            )

    def _write_first(self, observation: Any) -> None:
        self._dirty = True
        self._begin(observation)

    def _finish(self) -> None:
        self._in_episode = False
        self._end()
        self._dirty = False

    def _put(self, writer: Any, row: dict[str, Any]) -> None:
        """Appends a row, or what it lacks yet to the one that is being written in place."""
        if self._place is None:
            writer.append(row)
            return
        place, placed = self._place
        for name, field in row.items():
            if name not in placed:
                raise errors.SignatureError(
                    f"got a step with {name!r}, which the steps before did not have; expected"
                    f" {sorted(placed)}. Give it with every step or with none"
                )
            if name != "observation":
                tree.map_structure(_fill, placed[name], field)
        self._place = None
        place.__exit__(None, None, None)

    @abc.abstractmethod
    def _learn(self, observation: Any, action: Any, extras: Any) -> None:
        """Takes in what rows look like, once, before any is written."""

    @abc.abstractmethod
    def _begin(self, observation: Any) -> None:
        """Writes the row of a reset."""

    @abc.abstractmethod
    def _step(
        self,
        action: Any,
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
        extras: Any,
    ) -> None:
        """Writes a row, by `_put`."""

    @abc.abstractmethod
    def _next_row(self) -> Any:
        """A row to be written in place: a context manager; None where that cannot be."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Makes the items of the end and begins anew."""

    @abc.abstractmethod
    def _abandon(self) -> None:
        """Begins anew without items of the end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Cuts off the episode, waits for its items, and closes the writer. Idempotent."""


class EpisodeStep:
    """A step whose observation is written in place; see `EpisodeWriter.next_step`."""

    def __init__(self, writer: EpisodeWriter, action: Any, extras: Any) -> None:
        """See `EpisodeWriter.next_step`."""
        self._writer = writer
        self._action = action
        self._extras = extras
        self._outcome: tuple[float, bool, bool] | None = None
        self.observation: Any = None

    def outcome(self, reward: float, terminated: bool, truncated: bool) -> None:
        """Says what the action led to beside the observation: see `EpisodeWriter.step`."""
        self._outcome = (reward, terminated, truncated)

    def __enter__(self) -> EpisodeStep:
        """Opens the step."""
        self.observation = self._writer.open_place()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Writes the step, or drops it if the block raised."""
        observation, self.observation = self.observation, None
        try:
            if exc is None:
                if self._outcome is None:
                    raise errors.WriterStateError(
                        "got no outcome of the step; expected reward, terminated and truncated."
                        " Call step.outcome(...) within the block"
                    )
                reward, terminated, truncated = self._outcome
                self._writer.write_step(
                    self._action, reward, observation, terminated, truncated, self._extras
                )
        except BaseException as error:
            self._writer.drop_place(error)
            raise
        self._writer.drop_place(exc)


def _fill(array: npt.NDArray[Any], leaf: Any) -> None:
    """Copies a leaf to where it is stored.

    Raises:
        SignatureError: It is of another dtype or shape.
    """
    value = np.asarray(leaf)
    if value.dtype != array.dtype or value.shape != array.shape:
        raise errors.SignatureError(
            f"got a step with {value.dtype.name}{list(value.shape)} where the steps before had"
            f" {array.dtype.name}{list(array.shape)}; expected the same dtype and shape in each,"
            " the two are incompatible. Convert it"
        )
    array[...] = value


class EpisodeItemWriter(EpisodeWriter):
    """Writes each episode of T steps as one item of

    * ``observation`` [T + 1, ...], from that of the reset to the final one;
    * ``action`` [T, ...], and ``extras`` [T, ...] where there are any;
    * ``reward`` [T], ``terminated`` bool[T], ``truncated`` bool[T].

    Items of different length cannot be stacked: see `shmreplay.padding.pad_batch`.
    """  # noqa: D415

    def __init__(
        self,
        client: Client,
        table: str,
        *,
        max_steps: int = 2**16,
        priority: float = 1.0,
        reward_dtype: npt.DTypeLike = np.float32,
    ) -> None:
        """Makes a writer for one environment.

        Args:
            client: A client.
            table: Name of the table.
            max_steps: Steps of an episode at most.
            priority: Of each item.
            reward_dtype: What rewards are written as.

        Raises:
            InvalidArgumentError: max_steps is out of range.
            TableNotFoundError: The server has no such table.
        """
        super().__init__()
        check_table(client, table)
        self._table = table
        self._max_steps = checked_at_least("max_steps", max_steps, 1)
        self._priority = priority
        self._reward_dtype = np.dtype(reward_dtype)
        self._writer = client.trajectory_writer(self._max_steps + 1)
        self._steps = 0
        self._has_extras = False

    def _learn(self, observation: Any, action: Any, extras: Any) -> None:
        self._has_extras = extras is not None

    def _begin(self, observation: Any) -> None:
        self._writer.append({"observation": observation})
        self._steps = 0

    def _next_row(self) -> Any:
        return self._writer.next_step()

    def _step(
        self,
        action: Any,
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
        extras: Any,
    ) -> None:
        if self._steps == self._max_steps:
            raise errors.InvalidArgumentError(
                f"got an episode of more than max_steps={self._max_steps} steps; expected"
                " at most these. Make the writer with more, or end the episode earlier"
            )
        row = {"observation": observation, "action": action}
        row |= outcome_of(reward, terminated, truncated)
        row["reward"] = np.array(reward, self._reward_dtype)
        if extras is not None:
            row["extras"] = extras
        self._put(self._writer, row)
        self._steps += 1

    def _end(self) -> None:
        history, n = self._writer.history, self._steps
        names = ["action", "reward", "terminated", "truncated", *["extras"] * self._has_extras]
        item = {name: columns_of(history[name], slice(-n, None)) for name in names}
        item["observation"] = columns_of(history["observation"], slice(-n - 1, None))
        self._writer.create_item(self._table, self._priority, item)
        self._writer.end_episode()

    def _abandon(self) -> None:
        self._writer.end_episode()

    def close(self) -> None:
        """See `EpisodeWriter.close`."""
        self.cut()
        self._writer.close()


def columns_of(field: Any, key: int | slice) -> Any:
    """A column of each leaf of a field."""
    return tree.map_structure(lambda leaf: leaf[key], field)


def outcome_of(reward: float, terminated: bool, truncated: bool) -> dict[str, Any]:
    """The fields of a row that say what an action led to."""
    return {
        "reward": np.float32(reward),
        "terminated": np.bool_(terminated),
        "truncated": np.bool_(truncated),
    }


def checked_discount(discount: Any) -> float:
    """The discount of one step.

    Raises:
        InvalidArgumentError: It is not in [0, 1].
        ArgumentTypeError: It is no number.
    """
    number = limits.checked_number("discount", discount)
    if not 0.0 <= number <= 1.0:
        raise errors.InvalidArgumentError(
            f"discount must be in [0, 1], got {discount}. Give 1.0 for none"
        )
    return number


def check_table(client: Client, table: str) -> None:
    """Refuses a table that is not there when a writer is made: its first item may be far away.

    Raises:
        TableNotFoundError: Names those that are there.
        ArgumentTypeError: The name is not a str.
    """
    tables = client.server_info()
    if not isinstance(table, str) or table not in tables:
        raise table_not_found(table, tables)


def checked_at_least(name: str, value: Any, least: int) -> int:
    """An integer argument.

    Raises:
        InvalidArgumentError: It is below the least.
        ArgumentTypeError: It is no integer.
    """
    number = limits.checked_int(name, value)
    if number < least:
        raise errors.InvalidArgumentError(
            f"{name} must be at least {least}, got {value}. Give {least} or more"
        )
    return number
