"""Hindsight experience replay: transitions once more, with goals that were reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shmreplay import errors, limits, structured, tree
from shmreplay.client import Client
from shmreplay.integrations.episode_writers import (
    EpisodeWriter,
    check_table,
    checked_at_least,
    checked_discount,
    columns_of,
)

__all__ = ["HindsightWriter"]

ComputeReward = Callable[[Any, Any, Any], Any]


class HindsightWriter(EpisodeWriter):
    """Writes one-step transitions, and each some times more with a goal that was reached.

    Observations are dicts with `achieved_goal` and `desired_goal`, as of a `gymnasium.Env` with
    `compute_reward`. Each item has

    * ``observation`` and ``next_observation``: all that is in the observation. In a relabelled item
      `desired_goal` is the achieved goal of a later step, drawn evenly from those up to the end of
      the episode;
    * ``action``; ``reward`` float32, for a relabelled item what `compute_reward` says;
    * ``discount`` float32: that of the constructor, or 0 where the episode terminated;
    * ``relabelled`` bool.

    An episode is kept until it ends, since goals come from later steps, and then written: each
    observation once, and after it the rows of its relabelled transitions, of a goal and a reward
    alone. The items are patterns over these rows, so an observation is in the table's memory once,
    however often it is relabelled.
    """

    def __init__(
        self,
        client: Client,
        table: str,
        compute_reward: ComputeReward,
        *,
        relabels: int = 4,
        discount: float = 0.98,
        max_steps: int = 1000,
        priority: float = 1.0,
        seed: int | None = None,
    ) -> None:
        """Makes a writer for one environment.

        Args:
            client: A client.
            table: Name of the table.
            compute_reward: The environment's: from arrays of achieved and desired goals [N, ...]
                and a list of N empty dicts, gives float[N].
            relabels: Relabelled items for each transition.
            discount: Of one step.
            max_steps: Steps of an episode at most.
            priority: Of each item.
            seed: Of the goals' choice.

        Raises:
            InvalidArgumentError: A number is out of range.
            TableNotFoundError: The server has no such table.
            ArgumentTypeError: compute_reward cannot be called, or a number is none.
        """
        super().__init__()
        if not callable(compute_reward):
            raise errors.ArgumentTypeError(
                f"compute_reward must be a function, got {compute_reward!r:.200}. Give the"
                " environment's compute_reward"
            )
        check_table(client, table)
        self._table = table
        self._compute_reward = compute_reward
        self._relabels = checked_at_least("relabels", relabels, 0)
        self._discount = checked_discount(discount)
        self._max_steps = checked_at_least("max_steps", max_steps, 1)
        self._priority = limits.checked_number("priority", priority)
        if not 0.0 <= self._priority < math.inf:
            raise errors.InvalidArgumentError(
                f"priority must be finite and not negative, got {priority}. Give 1.0 for all alike"
            )
        self._random = np.random.default_rng(
            None if seed is None else checked_at_least("seed", seed, 0)
        )
        self._client = client
        self._writer: structured.StructuredWriter | None = None
        self._empty: dict[str, Any] = {}
        self._specs: dict[tree.Path, Any] = {}  # dtype and shape of what each step has
        self._observations: list[Any] = []
        self._rows: list[dict[str, Any]] = []

    def _learn(self, observation: Any, action: Any, extras: Any) -> None:
        if not isinstance(observation, Mapping) or not (
            {"achieved_goal", "desired_goal"} <= observation.keys()
        ):
            raise errors.InvalidArgumentError(
                f"got the observation {observation!r:.200}; expected a dict with 'achieved_goal'"
                " and 'desired_goal'. Use NStepWriter where there are no goals"
            )
        row = {"observation": observation, "action": action}
        if extras is not None:
            row["extras"] = extras
        self._specs = _specs_of(row)
        names = ("reward", "discount", "relabelled", "goal", "place")
        self._empty = tree.map_structure(lambda _: None, row) | dict.fromkeys(names)
        self._writer = self._client.structured_writer(self._configs())

    def _configs(self) -> list[structured.Config]:
        """One for transitions, and one for each of the relabelled ones that come after it.

        A step's row is followed by `relabels` more: the one of place k makes the k-th item.
        """
        step = structured.create_reference_step(self._empty)
        place = structured.Condition.data(self._empty)["place"]
        configs = []
        for k in range(self._relabels + 1):
            last, first = -k - 1, -k - 2 - self._relabels
            pattern = {
                "observation": columns_of(step["observation"], first),
                "action": columns_of(step["action"], last),
                "reward": step["reward"][-1],
                "discount": step["discount"][last],
                "next_observation": columns_of(step["observation"], last),
                "relabelled": step["relabelled"][-1],
            }
            if "extras" in step:
                pattern["extras"] = columns_of(step["extras"], last)
            if k > 0:
                for name in ("observation", "next_observation"):
                    pattern[name]["desired_goal"] = step["goal"][-1]
            priority = structured.constant_priority_fn(self._priority)
            configs.append(
                structured.create_config(pattern, self._table, [place == k], priority=priority)
            )
        return configs

    def _begin(self, observation: Any) -> None:
        self._check({"observation": observation})
        self._observations = [tree.map_structure(np.array, observation)]
        self._rows = []

    def _step(
        self,
        action: Any,
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
        extras: Any,
    ) -> None:
        if len(self._rows) >= self._max_steps:
            raise errors.InvalidArgumentError(
                f"got an episode of more than max_steps={self._max_steps} steps; expected"
                " at most these. Make the writer with more, or end the episode earlier"
            )
        row = {"observation": observation, "action": action}
        if extras is not None:
            row["extras"] = extras
        self._check(row)
        row = tree.map_structure(np.array, row)
        row["reward"] = np.float32(reward)
        row["discount"] = np.float32(0.0 if terminated else self._discount)
        self._observations.append(row["observation"])
        self._rows.append(row)

    def _check(self, row: dict[str, Any]) -> None:
        """Refuses at once what could not be written where the episode ends."""
        given = _specs_of(row)
        # The row of a reset has no more than an observation.
        known = {p: s for p, s in self._specs.items() if len(row) > 1 or p[0] in row}
        for path in sorted(given.keys() | known.keys(), key=str):
            got, expected = given.get(path, "nothing"), known.get(path, "nothing")
            if got != expected:
                raise errors.SignatureError(
                    f"got {got} at {path!r}, which is incompatible with the steps before; expected"
                    f" {expected} (dtype, shape). Convert it, or make another writer"
                )

    def _next_row(self) -> Any:
        return None

    def _end(self) -> None:
        steps = len(self._rows)
        achieved = np.stack([each["achieved_goal"] for each in self._observations])
        first = np.repeat(np.arange(steps), self._relabels)
        goals = achieved[self._random.integers(first + 1, steps + 1)]
        rewards: Any = ()
        if len(first):
            infos: list[dict[str, Any]] = [{} for _ in first]
            rewards = np.asarray(
                self._compute_reward(achieved[first + 1], goals, infos), np.float32
            ).reshape(len(first))
        self._append(observation=self._observations[0])
        for _ in range(self._relabels):
            self._append(place=np.int32(-1))
        for t, row in enumerate(self._rows):
            self._append(**row, relabelled=np.False_, place=np.int32(0))
            for k in range(self._relabels):
                i = t * self._relabels + k
                self._append(
                    goal=goals[i],
                    reward=rewards[i],
                    relabelled=np.True_,
                    place=np.int32(k + 1),
                )
        self._observations, self._rows = [], []
        self._abandon()

    def _append(self, **fields: Any) -> None:
        assert self._writer is not None
        self._writer.append(self._empty | fields)

    def _abandon(self) -> None:
        assert self._writer is not None
        self._writer.end_episode()

    def close(self) -> None:
        """See `EpisodeWriter.close`."""
        self.cut()
        if self._writer is not None:
            self._writer.close()


def _specs_of(row: dict[str, Any]) -> dict[tree.Path, Any]:
    """Dtype and shape of each leaf."""
    arrays = [(path, np.asarray(leaf)) for path, leaf in tree.flatten_with_path(row)]
    return {path: f"{array.dtype}{list(array.shape)}" for path, array in arrays}
