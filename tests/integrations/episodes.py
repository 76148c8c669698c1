"""A vector that keeps its own record, and what should be in a table for it, in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import shmreplay as reverb
from shmreplay import tree


class Step(NamedTuple):
    """What an action led to."""

    action: int
    reward: float
    observation: Any
    terminated: bool
    truncated: bool


class Episode(NamedTuple):
    """An episode as its environment saw it."""

    first: Any
    steps: list[Step]

    @property
    def observations(self) -> list[Any]:
        return [self.first, *(step.observation for step in self.steps)]


class Scripted(gymnasium.Env[Any, Any]):
    """Ends after random numbers of steps, in one of three ways, and remembers everything.

    Observations are made of the environment's number, its episode's and the step's: no two are the
    same.
    """

    def __init__(self, number: int, nested: bool, seed: int) -> None:
        box = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.nested = nested
        self.observation_space = box
        if nested:
            count = gymnasium.spaces.Discrete(1000)
            self.observation_space = gymnasium.spaces.Dict({"place": box, "count": count})
        self.action_space = gymnasium.spaces.Discrete(5)
        self.number = number
        self.random = np.random.default_rng((seed, number))
        self.episodes: list[Episode] = []

    def _observation(self) -> Any:
        t = len(self.episodes[-1].steps) if self.episodes else 0
        place = np.array([self.number, len(self.episodes), t], np.float32)
        return {"place": place, "count": np.int64(t)} if self.nested else place

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.length = int(self.random.integers(1, 9))
        self.episodes.append(Episode(None, []))
        self.episodes[-1] = Episode(self._observation(), [])
        return self.episodes[-1].first, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        steps = self.episodes[-1].steps
        steps.append(Step(int(action), 0.0, None, False, False))
        ended = len(steps) == self.length
        terminated = ended and bool(self.random.integers(2))
        truncated = ended and (not terminated or bool(self.random.integers(4) == 0))
        reward = float(np.float32(self.random.normal()))
        steps[-1] = Step(int(action), reward, self._observation(), terminated, truncated)
        return steps[-1].observation, reward, terminated, truncated, {"t": len(steps)}


class Writing(SyncVectorEnv):
    """Writes observations where it is told, and returns garbage but for those of resets."""

    places: list[Any]  # all that it was given

    def step_into(self, actions: Any, out: Any) -> Any:
        observations, rewards, terminations, truncations, infos = self.step(actions)
        self.__dict__.setdefault("places", []).extend(out)
        for i, place in enumerate(out):
            if place is None:
                continue
            final = self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP and bool(
                terminations[i] or truncations[i]
            )
            for array, source, returned in zip(
                tree.flatten(place),
                tree.flatten(infos["final_obs"][i] if final else at(observations, i)),
                tree.flatten(observations),
                strict=True,
            ):
                array[...] = source
                if not final:
                    returned[i] = 77
        infos.pop("final_obs", None)
        return observations, rewards, terminations, truncations, infos


def at(batch: Any, i: int) -> Any:
    return tree.map_structure(lambda array: array[i], batch)


def play(
    mode: AutoresetMode,
    record: Callable[[SyncVectorEnv], Any],
    *,
    nested: bool = False,
    steps: int = 60,
    seed: int = 1,
    copy: bool = True,
    kind: type[SyncVectorEnv] = SyncVectorEnv,
) -> list[Episode]:
    """Plays in three environments and gives the episodes that have begun, by their own account."""
    envs = [Scripted(number, nested, seed) for number in range(3)]
    vector = kind(
        [lambda env=env: env for env in envs],  # type: ignore[misc]
        autoreset_mode=mode,
        copy=copy,
    )
    random = np.random.default_rng(seed)
    recorder = record(vector)
    recorder.reset(seed=seed)
    for _ in range(steps):
        actions = random.integers(5, size=3)
        _, _, terminations, truncations, _ = recorder.step(actions)
        ended = terminations | truncations
        if mode == AutoresetMode.DISABLED and ended.any():
            recorder.reset(options={"reset_mask": ended})
    recorder.close()
    return [episode for env in envs for episode in env.episodes if episode.steps]


def items_of(client: reverb.Client, table: str) -> list[Any]:
    """The data of all items, in the order of their insertion."""
    return [sample.data for sample in client.fetch(table, client.keys(table))]


def canonical(structure: Any) -> Any:
    """The same for structures that are the same, and fit for sorting and comparing."""
    if isinstance(structure, dict):
        return tuple((name, canonical(structure[name])) for name in sorted(structure))
    if isinstance(structure, tuple):
        return tuple(map(canonical, structure))
    array = np.asarray(structure)
    return (array.dtype.str, array.shape, tuple(array.ravel().tolist()))


def stack_of(observations: list[Any], last: int, stack: int) -> Any:
    """The newest frames up to one, the first repeated where there are not enough."""
    if stack == 1:
        return observations[last]
    return stacked([observations[max(last - k, 0)] for k in reversed(range(stack))])


def stacked(structures: list[Any]) -> Any:
    if isinstance(structures[0], dict):
        return {name: stacked([each[name] for each in structures]) for name in structures[0]}
    return np.stack(structures)


def transitions(episode: Episode, n: int, gamma: float, stack: int) -> list[Any]:
    """Every n-step transition of an episode, and the shorter ones at its end."""
    observations, steps = episode.observations, episode.steps
    expected = []
    for t in range(len(steps)):
        end = min(t + n, len(steps))
        reward = 0.0
        for k in reversed(range(t, end)):
            reward = steps[k].reward + gamma * reward
        discount = 0.0 if steps[end - 1].terminated else gamma ** (end - t)
        expected.append(
            {
                "observation": stack_of(observations, t, stack),
                "action": np.int64(steps[t].action),
                "reward": np.float32(reward),
                "discount": np.float32(discount),
                "next_observation": stack_of(observations, end, stack),
            }
        )
    return expected


def sequences(episode: Episode, total: int, period: int, stack: int) -> list[Any]:
    """Every sequence of an episode."""
    observations, steps = episode.observations, episode.steps
    none = np.zeros_like(observations[0])
    missing = max(total - len(steps), 0)
    steps = steps + [Step(0, 0.0, none, False, False)] * missing
    observations = observations + [none] * missing
    starts = list(range(0, len(steps) - total + 1, period))
    if starts[-1] + total != len(steps):
        starts.append(len(steps) - total)
    frames = [observations[0]] * (stack - 1) + observations
    expected = []
    for start in starts:
        part = steps[start : start + total]
        mask = np.arange(start, start + total) < len(episode.steps)
        expected.append(
            {
                "observation": np.stack(frames[start : start + total + stack]),
                "action": np.array([step.action for step in part]),
                "reward": np.array([step.reward for step in part], np.float32),
                "terminated": np.array([step.terminated for step in part]),
                "truncated": np.array([step.truncated for step in part]),
                "mask": mask,
            }
        )
    return expected
