"""What writers of episodes have in common, and the one that writes an episode as an item.

A step is a row, of what came in at the time: an observation, and the action and reward that led to
it. The first row of an episode has an observation alone; the last has the final one. Each is
written once, straight into the table's memory, and items refer to rows.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import errors, limits, tree
from shmreplay.client import Client

__all__ = ["EpisodeItemWriter", "EpisodeWriter", "checked_at_least", "columns_of", "outcome_of"]


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
        self._first: Any = None
        self._began = False

    def begin(self, observation: Any) -> None:
        """Begins an episode with the observation of a reset.

        An episode that has not ended is cut off first: see `cut`.

        Args:
            observation: Nested structure of arrays and scalars. Copied.
        """
        self.cut()
        # Written with the first step: only then is it known what an action looks like.
        self._first = tree.map_structure(np.array, observation)
        self._in_episode = True
        self._began = False

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
                what the next episode begins with.
            terminated: Whether the task is over: nothing more is to be had.
            truncated: Whether the episode ends though the task is not over, as at a time limit.
            extras: Nested structure of more about the action, such as the probability that it had
                or the state of a recurrent policy; in each step or in none.

        Raises:
            WriterStateError: No episode has begun.
            SignatureError: A dtype or shape is not that of the steps before.
            ArenaFullError: No memory.
        """
        if not self._in_episode:
            raise errors.WriterStateError(
                "got a step outside of an episode; expected begin() before it. Call it with the"
                " observation of the reset"
            )
        if not self._began:
            self._begin(self._first, action, extras)
            self._first, self._began = None, True
        self._step(action, float(reward), observation, bool(terminated), bool(truncated), extras)
        if terminated or truncated:
            self._finish()

    def cut(self) -> None:
        """Ends the episode where it is; its last step is neither terminated nor truncated.

        Without an episode it does nothing.
        """
        if self._in_episode and self._began:
            self._finish()
        self._in_episode = False
        self._first = None

    def _finish(self) -> None:
        self._in_episode = False
        self._end()

    @abc.abstractmethod
    def _begin(self, observation: Any, action: Any, extras: Any) -> None:
        """Writes the row of a reset; `action` and `extras` say what later ones look like."""

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
        """Writes a row."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Makes the items of the end and begins anew."""

    @abc.abstractmethod
    def close(self) -> None:
        """Cuts off the episode, waits for its items, and closes the writer. Idempotent."""


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
        """
        super().__init__()
        self._table = table
        self._max_steps = checked_at_least("max_steps", max_steps, 1)
        self._priority = priority
        self._reward_dtype = np.dtype(reward_dtype)
        self._writer = client.trajectory_writer(self._max_steps + 1)
        self._steps = 0
        self._has_extras = False

    def _begin(self, observation: Any, action: Any, extras: Any) -> None:
        self._writer.append({"observation": observation})
        self._steps = 0
        self._has_extras = extras is not None

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
        self._writer.append(row)
        self._steps += 1

    def _end(self) -> None:
        history, n = self._writer.history, self._steps
        names = ["action", "reward", "terminated", "truncated", *["extras"] * self._has_extras]
        item = {name: columns_of(history[name], slice(-n, None)) for name in names}
        item["observation"] = columns_of(history["observation"], slice(-n - 1, None))
        self._writer.create_item(self._table, self._priority, item)
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
