"""Hindsight experience replay: transitions once more, with goals that were reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shmreplay import errors, tree
from shmreplay.client import Client
from shmreplay.integrations.episode_writers import EpisodeWriter, checked_at_least

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

    The items of an episode are made when it ends. They refer to its steps: goals and observations
    are in memory once, however often they are relabelled.
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
        """
        super().__init__()
        self._table = table
        self._compute_reward = compute_reward
        self._relabels = checked_at_least("relabels", relabels, 0)
        self._discount = discount
        self._max_steps = checked_at_least("max_steps", max_steps, 1)
        self._priority = priority
        self._random = np.random.default_rng(seed)
        # Of each step, the row itself and that of each reward that it gets by relabelling.
        rows = 1 + self._max_steps * (1 + self._relabels)
        self._writer = client.trajectory_writer(rows)
        self._achieved: list[Any] = []

    def _begin(self, observation: Any, action: Any, extras: Any) -> None:
        if not isinstance(observation, Mapping) or not (
            {"achieved_goal", "desired_goal"} <= observation.keys()
        ):
            raise errors.InvalidArgumentError(
                f"got the observation {observation!r:.200}; expected a dict with 'achieved_goal'"
                " and 'desired_goal'. Use NStepWriter where there are no goals"
            )
        self._writer.append({"observation": observation})
        self._achieved = [np.array(observation["achieved_goal"])]

    def _step(
        self,
        action: Any,
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
        extras: Any,
    ) -> None:
        if len(self._achieved) > self._max_steps:
            raise errors.InvalidArgumentError(
                f"got an episode of more than max_steps={self._max_steps} steps; expected"
                " at most these. Make the writer with more, or end the episode earlier"
            )
        row = {
            "observation": observation,
            "action": action,
            "reward": np.float32(reward),
            "discount": np.float32(0.0 if terminated else self._discount),
            "relabelled": np.False_,
        }
        if extras is not None:
            row["extras"] = extras
        self._writer.append(row)
        self._achieved.append(np.array(observation["achieved_goal"]))

    def _end(self) -> None:
        steps = len(self._achieved) - 1
        achieved = np.stack(self._achieved)
        first = np.repeat(np.arange(steps), self._relabels)
        goals = self._random.integers(first + 1, steps + 1)
        rewards: Any = ()
        if len(first):
            infos: list[dict[str, Any]] = [{} for _ in first]
            rewards = np.asarray(
                self._compute_reward(achieved[first + 1], achieved[goals], infos), np.float32
            )
        for reward in rewards:
            self._writer.append({"reward": reward, "relabelled": np.True_})
        for t in range(steps):
            self._create(t, None, t + 1)
        for number, (start, goal) in enumerate(zip(first, goals, strict=True)):
            self._create(int(start), int(goal), steps + 1 + number)
        self._writer.end_episode()

    def _create(self, t: int, goal: int | None, outcome: int) -> None:
        """The item of the transition from row t, with the goal of a row and another's reward."""
        history = self._writer.history
        item = {
            "observation": tree.map_structure(lambda column: column[t], history["observation"]),
            "action": tree.map_structure(lambda column: column[t + 1], history["action"]),
            "reward": history["reward"][outcome],
            "discount": history["discount"][t + 1],
            "next_observation": tree.map_structure(
                lambda column: column[t + 1], history["observation"]
            ),
            "relabelled": history["relabelled"][outcome],
        }
        if "extras" in history:
            item["extras"] = tree.map_structure(lambda column: column[t + 1], history["extras"])
        if goal is not None:
            reached = history["observation"]["achieved_goal"][goal]
            item["observation"]["desired_goal"] = reached
            item["next_observation"]["desired_goal"] = reached
        self._writer.create_item(self._table, self._priority, item)

    def close(self) -> None:
        """See `EpisodeWriter.close`."""
        self.cut()
        self._writer.close()
