"""Recording what happens in Gymnasium's vector environments.

env = VectorRecorder(
    gymnasium.make_vec("CartPole-v1", num_envs=8),
    lambda: NStepWriter(client, "replay", n=3, discount=0.99),
)
observations, _ = env.reset(seed=1)
for _ in range(1000):
    observations, *_ = env.step(policy(observations))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import iterate

from shmreplay import errors, tree
from shmreplay.integrations.episode_writers import (
    EpisodeItemWriter,
    EpisodeStep,
    EpisodeWriter,
)
from shmreplay.integrations.hindsight import HindsightWriter
from shmreplay.integrations.pattern_writers import NStepWriter, SequenceWriter

__all__ = [
    "EpisodeItemWriter",
    "EpisodeStep",
    "EpisodeWriter",
    "HindsightWriter",
    "NStepWriter",
    "SequenceWriter",
    "VectorRecorder",
]

_Result: TypeAlias = tuple[
    Any, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]
]

_NEXT_STEP, _SAME_STEP, _DISABLED = "NextStep", "SameStep", "Disabled"


class VectorRecorder(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """A vector environment that records what happens in it; else it behaves as the one it wraps.

    Each environment has a writer of its own. However the vector resets its environments, each
    episode is recorded from the observation of its reset to its final one, the two never mixed:

    * next step (Gymnasium's default): the step after the end is a reset, and its action and reward
      are nobody's;
    * same step: the final observation is in the infos, the one returned is the next episode's;
    * disabled: whoever steps the vector resets by `reset(options={"reset_mask": mask})`.

    An observation goes from the vector's buffer straight into shared memory. With a
    `SyncVectorEnv(copy=False)` that is the only copy of it. A vector of a class with a method

        step_into(actions, out) -> observations, rewards, terminations, truncations, infos

    writes it there itself, and nothing is copied: `out[i]` is, for each environment, the structure
    of writable arrays that the observation which its step leads to belongs in (the final one where
    the episode ends), or None where that is not recorded since the step is a reset. It returns what
    `step` does; of the observations only those of resets are read.
    """

    def __init__(
        self,
        env: gymnasium.vector.VectorEnv[Any, Any, Any],
        make_writer: Callable[[], EpisodeWriter],
    ) -> None:
        """Wraps a vector environment.

        Args:
            env: The vector. Observations and actions are arrays, or structures of them.
            make_writer: Makes a writer; called once for each environment.

        Raises:
            ArgumentTypeError: `make_writer` makes no writers.
            InvalidArgumentError: The vector resets its environments in no known way.
        """
        if not callable(make_writer):
            raise errors.ArgumentTypeError(
                f"got make_writer {make_writer!r}; expected a function without arguments that makes"
                " an EpisodeWriter. Give for instance lambda: NStepWriter(client, 'table')"
            )
        super().__init__(env)
        mode = env.metadata.get("autoreset_mode", _NEXT_STEP)
        self._mode = getattr(mode, "value", mode)
        if self._mode not in (_NEXT_STEP, _SAME_STEP, _DISABLED):
            raise errors.InvalidArgumentError(
                f"got a vector environment with autoreset_mode {mode!r}; expected one of"
                " gymnasium.vector.AutoresetMode. Set it in its metadata"
            )
        # Asked of the class: a wrapper hands on attributes of what it wraps, but it changes the
        # observations.
        self._steps_into = hasattr(type(env), "step_into")
        self._writers = [make_writer() for _ in range(self.num_envs)]
        self._ended = np.ones(self.num_envs, np.bool_)

    @property
    def writers(self) -> list[EpisodeWriter]:
        """The writer of each environment."""
        return self._writers

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the environments, or those of `options["reset_mask"]` bool[num_envs].

        Episodes that have not ended are cut off: see `EpisodeWriter.cut`.
        """
        seeds: Any = seed  # a list of them too, which the wrapper's annotation does not say
        mask = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            mask = np.array(options["reset_mask"])  # before the vector takes it out
        observations, infos = self.env.reset(seed=seeds, options=options)
        for i in np.flatnonzero(mask):
            self._writers[i].begin(_part(observations, i))
        self._ended[mask] = False
        return observations, infos

    def step(self, actions: Any, extras: Any = None) -> _Result:
        """Steps the environments and records what came of it.

        Args:
            actions: One for each environment.
            extras: Structure of arrays [num_envs, ...] to record with the actions, such as their
                probabilities; in each step or in none.

        Raises:
            WriterStateError: An environment has not been reset.
            InvalidArgumentError: An episode ended and its final observation is not in the infos.
        """
        if self._ended.any() and self._mode == _DISABLED:
            raise errors.WriterStateError(
                f"got a step while environments {np.flatnonzero(self._ended).tolist()} have ended"
                " or not begun; expected all to be in an episode. Call reset(), or"
                ' reset(options={"reset_mask": mask}) for those'
            )
        each = list(iterate(self.action_space, actions))
        result: _Result
        if self._steps_into:
            result = self._step_in_place(actions, each, extras)
        else:
            result = self.env.step(actions)
        observations, _, terminations, truncations, infos = result
        for i, action in enumerate(each):
            if self._ended[i]:
                self._writers[i].begin(_part(observations, i))
                self._ended[i] = False
                continue
            ended = bool(terminations[i] or truncations[i])
            same_step = ended and self._mode == _SAME_STEP
            if not self._steps_into:
                self._writers[i].step(
                    action,
                    result[1][i],
                    _final(infos, i) if same_step else _part(observations, i),
                    terminations[i],
                    truncations[i],
                    None if extras is None else _part(extras, i),
                )
            if same_step:
                self._writers[i].begin(_part(observations, i))
            else:
                self._ended[i] = ended
        return result

    def _step_in_place(self, actions: Any, each: list[Any], extras: Any) -> _Result:
        """Steps a vector that writes its observations where they are stored."""
        env: Any = self.env
        places: list[EpisodeStep | None] = [None] * self.num_envs
        with contextlib.ExitStack() as stack:
            for i in reversed(range(self.num_envs)):  # the last one opened is closed first
                if not self._ended[i]:
                    extra = None if extras is None else _part(extras, i)
                    places[i] = stack.enter_context(self._writers[i].next_step(each[i], extra))
            out = [None if place is None else place.observation for place in places]
            result: _Result = env.step_into(actions, out)
            for i, place in enumerate(places):
                if place is not None:
                    place.outcome(*(part[i] for part in result[1:4]))
        return result

    def close(self, **kwargs: Any) -> None:
        """Cuts off the episodes, and closes the writers and the environments."""
        for writer in self._writers:
            writer.close()
        self.env.close(**kwargs)


def _part(batch: Any, i: int | np.intp) -> Any:
    """What belongs to one environment. An array of one dimension gives a scalar."""
    return tree.map_structure(lambda array: array[i], batch)


def _final(infos: dict[str, Any], i: int) -> Any:
    """The final observation of an environment that was reset in the same step."""
    final = infos.get("final_obs")
    if isinstance(final, np.ndarray):
        final = final[i]
    elif final is not None:
        final = _part(final, i)
    if final is None:
        raise errors.InvalidArgumentError(
            f"environment {i} has ended and been reset in the same step, and its final observation"
            f" is not in the infos, which have {sorted(infos)}; expected it in 'final_obs', where"
            " Gymnasium's vectors put it. Take a vector that does"
        )
    return final
