"""Replay buffers for Stable-Baselines3, and for programs that use its classes, such as CleanRL's.

    model = DQN("CnnPolicy", env, replay_buffer_class=ReplayBuffer)

Where Stable-Baselines3 is installed the classes are subclasses of its own; they work without it.
Each observation is in memory once: as the `next_obs` of one transition and the `obs` of the next.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces

from shmreplay import errors, limits, structured, tree
from shmreplay.client import Client
from shmreplay.integrations.torch import as_tensors
from shmreplay.rate_limiters import MinSize
from shmreplay.selectors import Fifo, Uniform
from shmreplay.server import Server
from shmreplay.table import Table

__all__ = ["DictReplayBuffer", "ReplayBuffer"]


class _PlainSamples(NamedTuple):
    """What sampling gives, under Stable-Baselines3's names."""

    observations: Any
    actions: Any
    next_observations: Any
    dones: Any
    rewards: Any


_Base: Any = object
_DictBase: Any = object
_Samples: Any = _PlainSamples
_DictSamples: Any = _PlainSamples
if importlib.util.find_spec("stable_baselines3") is not None:
    from stable_baselines3.common import buffers, type_aliases

    _Base, _DictBase = buffers.ReplayBuffer, buffers.DictReplayBuffer
    _Samples = type_aliases.ReplayBufferSamples
    _DictSamples = type_aliases.DictReplayBufferSamples

# Bytes of an item beside its data, generously, and of what writers hold.
_ITEM_BYTES = 512
_SPARE_BYTES = 256 << 20
_CHUNK = 1024


class ReplayBuffer(_Base):  # type: ignore[misc]
    """Stands in for Stable-Baselines3's `ReplayBuffer` and `DictReplayBuffer`.

    The same calls give the same transitions. `add` writes each observation once, whatever
    `optimize_memory_usage` says: an `obs` that equals the environment's last `next_obs` is not
    stored again, and any other one is, so that nothing is ever paired with what did not follow it.
    With it `handle_timeout_termination` works too.

    By default the buffer has a store of its own, which goes when the buffer does. With a client, it
    uses a table of a server: several processes may then add to one table, and sample from it. Its
    limiter may hold up `sample`.

    Numbers are drawn by the table. Its own table is seeded by numpy's global generator, which
    Stable-Baselines3 seeds, so that runs repeat as far as they do with Stable-Baselines3's buffers.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        client: Client | str | None = None,
        table: str = "replay",
        capacity: int | None = None,
    ) -> None:
        """Makes a buffer.

        Args:
            buffer_size: Transitions, over all environments.
            observation_space: A space of one array, or a Dict of them.
            action_space: A space of one array.
            device: Of the tensors that `sample` gives; "auto": CUDA where there is one.
            n_envs: Environments that each `add` has a transition of.
            optimize_memory_usage: Accepted, and needed by nobody.
            handle_timeout_termination: Episodes that a time limit ended are not done: those whose
                info has `TimeLimit.truncated`.
            client: Of a server, or its address, to use a table there; None: make a store.
            table: Name of the table.
            capacity: Bytes that the buffer's own store may use; None: what it can need. They are
                taken from /dev/shm as they are needed.

        Raises:
            InvalidArgumentError: A number is out of range, or a space cannot be used.
        """
        if limits.checked_int("buffer_size", buffer_size) < 1 or n_envs < 1:
            raise errors.InvalidArgumentError(
                f"buffer_size and n_envs must be at least 1, got {buffer_size} and {n_envs}."
                " Give 1 or more"
            )
        self.buffer_size = max(int(buffer_size) // n_envs, 1)
        self.n_envs = n_envs
        self.observation_space = observation_space
        self.action_space = action_space
        parts = _parts_of(observation_space)
        shapes = {name: _shape_of(space) for name, space in parts.items()}
        self.obs_shape: Any = shapes if isinstance(observation_space, spaces.Dict) else shapes[None]
        self.action_dim = math.prod(_shape_of(action_space))
        self.device = _device(device)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self._table = table
        self._capacity = capacity
        self._server: Server | None = None
        if client is None:
            # From where Stable-Baselines3 draws the indices of its samples.
            self._start(int(np.random.randint(2**31 - 1)))
        else:
            self._client = Client(client) if isinstance(client, str) else client
        self._begin()

    def _start(self, seed: int) -> None:
        """Makes a store of its own."""
        items = self.buffer_size * self.n_envs
        table = Table(self._table, Uniform(), Fifo(), items, MinSize(1), seed=seed)
        capacity = self._capacity
        if capacity is None:
            capacity = items * (2 * self._row_bytes() + _ITEM_BYTES) + _SPARE_BYTES
        self._server = Server([table], capacity=capacity)
        self._client = self._server.localhost_client()

    def _begin(self) -> None:
        self.pos = 0
        self.full = False
        self._writers: list[structured.StructuredWriter] = []
        # The last observations, and of which environments they ended an episode.
        self._last: Any = None

    def _row_bytes(self) -> int:
        parts = [*_parts_of(self.observation_space).values(), self.action_space]
        return sum(math.prod(_shape_of(part)) * np.dtype(part.dtype).itemsize for part in parts)

    # ------------------------------------------------------------------ adding

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: Any,
    ) -> None:
        """Adds a transition of each environment.

        Args:
            obs: Array [n_envs, ...], or a dict of them.
            next_obs: What followed, of the same kind; where an episode ended, the final one.
            action: [n_envs, ...].
            reward: [n_envs].
            done: [n_envs].
            infos: A dict for each environment; of no matter unless time limits are.

        Raises:
            ArenaFullError: No memory; says what to do.
            SignatureError: The table of a server takes other data.
        """
        before, after = self._observations(obs), self._observations(next_obs)
        actions = np.asarray(action).reshape((self.n_envs, self.action_dim))
        rewards = np.asarray(reward, np.float32).reshape(self.n_envs, 1)
        dones = np.asarray(done, np.float32).reshape(self.n_envs, 1)
        ended = dones[:, 0] != 0
        if self.handle_timeout_termination:
            cut = [bool(info.get("TimeLimit.truncated", False)) for info in infos]
            dones = dones * (1 - np.array(cut, np.float32).reshape(self.n_envs, 1))
        actions = actions.astype(_action_dtype(self.action_space), copy=False)
        self._write(before, after, actions, rewards, dones, ended)
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    def extend(self, *args: Any, **kwargs: Any) -> None:
        """Adds one after the other what the arguments of `add` have along their first axes."""
        for data in zip(*args, strict=True):
            self.add(*data)

    def _observations(self, given: Any) -> Any:
        """Observations of all environments in the dtypes and shapes of the space."""
        parts = _parts_of(self.observation_space)
        arrays = {}
        for name, space in parts.items():
            array = np.asarray(given if name is None else given[name])
            array = array.astype(space.dtype, copy=False)
            arrays[name] = array.reshape((self.n_envs, *_shape_of(space)))
        return arrays if isinstance(self.observation_space, spaces.Dict) else arrays[None]

    def _write(
        self, before: Any, after: Any, actions: Any, rewards: Any, dones: Any, ended: Any
    ) -> None:
        """Writes a transition of each of the first environments."""
        if not self._writers:
            self._writers = [self._make_writer(before) for _ in range(self.n_envs)]
        apart = self._are_apart(before, len(ended))
        for i, writer in enumerate(self._writers[: len(ended)]):
            if apart[i]:
                row = tree.map_structure(lambda array, i=i: array[i], before)
                writer.append({"observation": row, "action": None, "reward": None, "done": None})
            outcome = {"action": actions[i], "reward": rewards[i], "done": dones[i]}
            row = tree.map_structure(lambda array, i=i: array[i], after)
            writer.append({"observation": row, **outcome})
            if ended[i]:
                writer.end_episode()
        self._last = (tree.map_structure(np.array, after), ended)

    def _are_apart(self, before: Any, n: int) -> npt.NDArray[np.bool_]:
        """Of which environments an observation has to be stored since it is not the last one."""
        if self._last is None:
            return np.ones(n, np.bool_)
        last, ended = self._last
        apart = np.array(ended[:n])
        for one, other in zip(tree.flatten(before), tree.flatten(last), strict=True):
            apart |= (one[:n] != other[:n]).reshape(n, -1).any(axis=1)
        return apart

    def _make_writer(self, observations: Any) -> structured.StructuredWriter:
        none = tree.map_structure(lambda _: None, observations)
        row = {"observation": none, "action": None, "reward": None, "done": None}
        step = structured.create_reference_step(row)
        pattern = {
            "observations": tree.map_structure(lambda leaf: leaf[-2], step["observation"]),
            "next_observations": tree.map_structure(lambda leaf: leaf[-1], step["observation"]),
            "actions": step["action"][-1],
            "rewards": step["reward"][-1],
            "dones": step["done"][-1],
        }
        return self._client.structured_writer([structured.create_config(pattern, self._table)])

    # ------------------------------------------------------------------ sampling

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Samples transitions evenly, with replacement.

        Args:
            batch_size: How many, B.
            env: A `VecNormalize` whose statistics observations and rewards are normalised by.

        Returns:
            Stable-Baselines3's `ReplayBufferSamples` (or `DictReplayBufferSamples`) of tensors on
            the buffer's device: observations, actions, next_observations [B, ...], dones float32
            [B, 1], rewards float32[B, 1]. On the CPU they lie on the memory that the batch was
            gathered into: no copy is made.

        Raises:
            InvalidArgumentError: The buffer is empty.
            ServerClosedError: The server whose table it uses was stopped.
        """
        if self._server is not None and self.size() == 0:
            raise errors.InvalidArgumentError(
                f"got sample({batch_size}) of an empty buffer; expected transitions in it. Call"
                " add() first"
            )
        data = self._client.sample_batch(self._table, batch_size).data
        if env is not None:
            for name in ("observations", "next_observations"):
                data[name] = env.normalize_obs(data[name])
            data["rewards"] = env.normalize_reward(data["rewards"]).astype(np.float32)
        tensors = tree.map_structure(lambda tensor: tensor.to(self.device), as_tensors(data))
        kind = _DictSamples if isinstance(self.observation_space, spaces.Dict) else _Samples
        return kind(**tensors)

    def size(self) -> int:
        """Transitions in the buffer, for each environment."""
        return self._client.server_info()[self._table].current_size // self.n_envs

    @property
    def dones(self) -> _Ignored:
        """For Stable-Baselines3, which sets the last one where its own buffer would run together.

        Here what does not follow one another is apart in any case. Cannot be read.
        """
        return _Ignored()

    def reset(self) -> None:
        """Empties the buffer; with a client, the table of the server."""
        for writer in self._writers:
            writer.close()
        self._client.reset(self._table)
        self._begin()

    def close(self) -> None:
        """Gives the buffer's own store back at once, not when the buffer goes. Idempotent."""
        for writer in self._writers:
            writer.close()
        self._writers = []
        self._client.close()
        if self._server is not None:
            self._server.stop()

    # ------------------------------------------------------------------ saving

    def __getstate__(self) -> dict[str, Any]:
        """What `save_replay_buffer` saves: all transitions, or the address of the server's table.

        In the copy observations are there twice.
        """
        state = {name: value for name, value in vars(self).items() if name not in _NOT_SAVED}
        if self._server is None:
            return {**state, "_client": self._client}
        keys = self._client.keys(self._table)
        items: list[Any] = []
        for start in range(0, len(keys), _CHUNK):
            part = self._client.fetch(self._table, keys[start : start + _CHUNK])
            items.extend(sample.data for sample in part)
        stacked = None
        if items:
            stacked = tree.map_structure(lambda *leaves: np.stack(leaves), *items)
        return {**state, "transitions": stacked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes a store with what was saved, or goes on with the server's table."""
        saved = dict(state)
        transitions = saved.pop("transitions", None)
        self.__dict__.update(saved)
        self._server = None
        if "_client" not in saved:
            self._start(int(np.random.randint(2**31 - 1)))
        pos, full = self.pos, self.full
        self._begin()
        self.pos, self.full = pos, full
        if transitions is None:
            return
        total = len(transitions["rewards"])
        for start in range(0, total, self.n_envs):
            stop = start + self.n_envs
            part = tree.map_structure(lambda leaf, a=start, b=stop: leaf[a:b], transitions)
            self._write(
                part["observations"],
                part["next_observations"],
                part["actions"],
                part["rewards"],
                part["dones"],
                part["dones"][:, 0] != 0,
            )
        self._last = None  # what comes next begins an episode


class DictReplayBuffer(ReplayBuffer, _DictBase):  # type: ignore[misc]
    """`ReplayBuffer` for who asks whether a buffer is a `DictReplayBuffer`."""


_NOT_SAVED = ("_server", "_client", "_writers", "_last")


class _Ignored:
    """An array that nobody reads."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Does nothing: see `ReplayBuffer.dones`."""


def _parts_of(space: Any) -> dict[Any, Any]:
    """The spaces of a Dict by name; of another space that one, under None."""
    return dict(space.spaces) if isinstance(space, spaces.Dict) else {None: space}


def _shape_of(space: Any) -> tuple[int, ...]:
    """The shape of a value of a space, as Stable-Baselines3 stores it."""
    match space:
        case spaces.Discrete():
            return (1,)
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return tuple(space.shape)
    raise errors.InvalidArgumentError(
        f"got the space {space!r}; expected Box, Discrete, MultiDiscrete or MultiBinary, or a Dict"
        " of them for observations. Flatten it with a wrapper of Gymnasium"
    )


def _action_dtype(space: Any) -> npt.DTypeLike:
    """Policies give float32, whatever the space has."""
    return np.float32 if space.dtype == np.float64 else space.dtype


def _device(device: torch.device | str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)
