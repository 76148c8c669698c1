"""Writers of transitions and of sequences: patterns over the rows of `episode_writers`."""

from __future__ import annotations

import abc
from collections import deque
from typing import Any

import numpy as np

from shmreplay import structured, tree
from shmreplay.client import Client
from shmreplay.integrations.episode_writers import (
    EpisodeWriter,
    check_table,
    checked_at_least,
    checked_discount,
    columns_of,
    outcome_of,
)

__all__ = ["NStepWriter", "SequenceWriter"]


def _nothing_like(structure: Any) -> Any:
    return tree.map_structure(lambda _: None, structure)


class _PatternWriter(EpisodeWriter):
    """A writer of episodes by patterns, which are made once the structure of a step is known."""

    def __init__(self, client: Client, table: str, stack: int, priority: float) -> None:
        super().__init__()
        check_table(client, table)
        self._client = client
        self._table = table
        self._stack = checked_at_least("stack", stack, 1)
        self._priority = priority
        self._writer: structured.StructuredWriter | None = None
        self._empty: dict[str, Any] = {}

    @abc.abstractmethod
    def _fields(self) -> tuple[str, ...]:
        """The fields of a row beside observation, action and extras."""

    @abc.abstractmethod
    def _configs(self, step: Any) -> list[structured.Config]:
        """Patterns over the fields of a row."""

    def _learn(self, observation: Any, action: Any, extras: Any) -> None:
        self._empty = {
            "observation": _nothing_like(observation),
            "action": _nothing_like(action),
            **dict.fromkeys(self._fields()),
        }
        if extras is not None:
            self._empty["extras"] = _nothing_like(extras)
        step = structured.create_reference_step(self._empty)
        self._writer = self._client.structured_writer(self._configs(step))

    def _begin(self, observation: Any) -> None:
        # A stack before there are enough frames repeats the first.
        for _ in range(self._stack):
            self._append(observation=observation)

    def _next_row(self) -> Any:
        assert self._writer is not None
        return self._writer.next_step()

    def _append(self, **fields: Any) -> None:
        assert self._writer is not None
        if fields.get("extras", 0) is None:
            del fields["extras"]
        self._put(self._writer, self._empty | fields)

    def _config(
        self, pattern: Any, conditions: list[structured.ConditionProto]
    ) -> structured.Config:
        return structured.create_config(
            pattern,
            self._table,
            conditions,
            priority=structured.constant_priority_fn(self._priority),
        )

    def _end(self) -> None:
        assert self._writer is not None
        self._writer.end_episode()

    def _abandon(self) -> None:
        _PatternWriter._end(self)

    def close(self) -> None:
        """See `EpisodeWriter.close`."""
        self.cut()
        if self._writer is not None:
            self._writer.close()


class NStepWriter(_PatternWriter):
    """Writes n-step transitions, each an item of

    * ``observation``: s(t); with a stack of more than 1, [stack, ...]: the newest frames up to it,
      of which each is in memory once, whatever number of items show it;
    * ``action``: a(t), and ``extras`` where there are any: those of a(t);
    * ``reward`` float32: r(t+1) + discount * r(t+2) + ... over n steps;
    * ``discount`` float32: discount**n, or 0 where the episode terminated: what the value of
      next_observation counts;
    * ``next_observation``: s(t+n), stacked likewise.

    So the target is reward + discount * value(next_observation), always. The last n - 1 steps of an
    episode make transitions of fewer steps, which end with it.
    """  # noqa: D415

    def __init__(
        self,
        client: Client,
        table: str,
        *,
        n: int = 1,
        discount: float = 0.99,
        stack: int = 1,
        priority: float = 1.0,
    ) -> None:
        """Makes a writer for one environment.

        Args:
            client: A client.
            table: Name of the table.
            n: Steps of a transition.
            discount: Of one step.
            stack: Frames of an observation; 1: the observation as it is, with no such axis.
            priority: Of each item.

        Raises:
            InvalidArgumentError: n or stack is below 1, or discount not in [0, 1].
            TableNotFoundError: The server has no such table.
        """
        super().__init__(client, table, stack, priority)
        self._n = checked_at_least("n", n, 1)
        self._discount = checked_discount(discount)
        self._rewards: deque[float] = deque(maxlen=self._n)
        self._terminated = False

    def _fields(self) -> tuple[str, ...]:
        return ("reward", "discount", "tail")

    def _configs(self, step: Any) -> list[structured.Config]:
        """One for whole transitions, and one for those of each smaller number of steps.

        The latter are made after the end, where row `tail` = j is the j-th without an observation.
        Counted from there, a transition of n - j steps begins as far back as one of n at the end.
        """
        n, stack = self._n, self._stack
        structure = tree.map_structure(lambda _: None, self._empty)
        tail = structured.Condition.data(structure)["tail"]
        first = -n - 1 if stack == 1 else slice(-n - stack, -n)
        configs = []
        for j in range(n):
            last = -j - 1 if stack == 1 else slice(-j - stack, -j or None)
            pattern = {
                "observation": columns_of(step["observation"], first),
                "action": columns_of(step["action"], -n),
                "reward": step["reward"][-1],
                "discount": step["discount"][-1],
                "next_observation": columns_of(step["observation"], last),
            }
            if "extras" in step:
                pattern["extras"] = columns_of(step["extras"], -n)
            configs.append(self._config(pattern, [tail == j]))
        return configs

    def _begin(self, observation: Any) -> None:
        super()._begin(observation)
        self._rewards.clear()
        self._terminated = False

    def _step(
        self,
        action: Any,
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
        extras: Any,
    ) -> None:
        before = self._rewards.copy()
        self._rewards.append(reward)
        self._terminated = terminated
        fields = self._outcome(len(self._rewards), 0)
        try:
            self._append(observation=observation, action=action, extras=extras, **fields)
        except BaseException:  # the step was refused: its reward belongs to no transition
            self._rewards, self._terminated = before, False
            raise

    def _outcome(self, steps: int, tail: int) -> dict[str, Any]:
        """What the last so many steps gave."""
        total = 0.0
        for k in range(1, steps + 1):
            total = self._rewards[-k] + self._discount * total
        discount = 0.0 if self._terminated else self._discount**steps
        return {
            "reward": np.float32(total),
            "discount": np.float32(discount),
            "tail": np.int32(tail),
        }

    def _end(self) -> None:
        for tail in range(1, self._n):
            steps = self._n - tail
            if steps <= len(self._rewards):
                self._append(**self._outcome(steps, tail))
            else:
                self._append(tail=np.int32(tail))
        super()._end()


class SequenceWriter(_PatternWriter):
    """Writes sequences of T = burn_in + length steps, as recurrent policies want them.

    Each is an item of

    * ``observation`` [T + 1, ...]: the last one is what follows the last action. With a stack,
      stack - 1 frames more in front, so that the stack of each step can be made as a view;
    * ``action`` [T, ...], and ``extras`` [T, ...] where there are any;
    * ``reward`` float32[T], ``terminated`` bool[T], ``truncated`` bool[T]: what action[t] led to;
    * ``mask`` bool[T]: False for steps that fill up an episode of fewer than T steps; they are 0.

    A sequence begins every `period` steps, and one ends with the episode. The first `burn_in` steps
    of each are there for the policy's state to settle.
    """

    def __init__(
        self,
        client: Client,
        table: str,
        *,
        length: int,
        burn_in: int = 0,
        period: int | None = None,
        stack: int = 1,
        priority: float = 1.0,
    ) -> None:
        """Makes a writer for one environment.

        Args:
            client: A client.
            table: Name of the table.
            length: Steps to learn from.
            burn_in: Steps before them.
            period: Steps from the beginning of a sequence to that of the next; None: length, so
                that each step is learned from once.
            stack: Frames of an observation.
            priority: Of each item.

        Raises:
            InvalidArgumentError: A number is out of range.
            TableNotFoundError: The server has no such table.
        """
        super().__init__(client, table, stack, priority)
        self._length = checked_at_least("length", length, 1) + checked_at_least(
            "burn_in", burn_in, 0
        )
        self._period = checked_at_least("period", length if period is None else period, 1)
        self._steps = 0
        self._zeros: Any = None

    def _fields(self) -> tuple[str, ...]:
        return ("reward", "terminated", "truncated", "mask")

    def _configs(self, step: Any) -> list[structured.Config]:
        n = self._length
        pattern = {name: step[name][-n:] for name in self._fields()}
        pattern["observation"] = columns_of(step["observation"], slice(-n - self._stack, None))
        pattern["action"] = columns_of(step["action"], slice(-n, None))
        if "extras" in step:
            pattern["extras"] = columns_of(step["extras"], slice(-n, None))
        index = structured.Condition.step_index()
        first = self._stack - 1 + n  # row that ends the first sequence
        phase = first % self._period
        ended = structured.Condition.is_end_episode()
        return [
            self._config(pattern, [index >= first, index % self._period == phase]),
            self._config(pattern, [index >= first, index % self._period != phase, ended]),
        ]

    def _begin(self, observation: Any) -> None:
        super()._begin(observation)
        self._steps = 0

    def _step(
        self,
        action: Any,
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
        extras: Any,
    ) -> None:
        if self._zeros is None:
            row = {"observation": observation, "action": action, "extras": extras}
            self._zeros = {
                name: tree.map_structure(lambda leaf: np.zeros_like(np.asarray(leaf)), field)
                for name, field in row.items()
                if field is not None
            }
        outcome = outcome_of(reward, terminated, truncated)
        self._append(
            observation=observation, action=action, extras=extras, mask=np.True_, **outcome
        )
        self._steps += 1

    def _end(self) -> None:
        for _ in range(self._steps, self._length):
            self._append(mask=np.False_, **self._zeros, **outcome_of(0.0, False, False))
        super()._end()
