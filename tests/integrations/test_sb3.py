"""The buffer for Stable-Baselines3 beside its own, and its algorithms through it."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import tree

torch = pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")

import gymnasium  # noqa: E402
from gymnasium import spaces  # noqa: E402
from stable_baselines3 import DQN, SAC, TD3  # noqa: E402
from stable_baselines3.common import buffers  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402

from shmreplay.integrations.sb3 import DictReplayBuffer, ReplayBuffer  # noqa: E402

MakeServer = Callable[..., reverb.Server]

SPACES: dict[str, tuple[Any, Any]] = {
    "box": (spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)),
    "frame": (spaces.Box(0, 255, (1, 8, 8), np.uint8), spaces.Discrete(4)),
    "double": (spaces.Box(-1, 1, (3,), np.float64), spaces.Box(-1, 1, (2,), np.float64)),
    "discrete": (spaces.Discrete(500), spaces.MultiDiscrete([3, 4])),
    "binary": (spaces.MultiBinary(6), spaces.MultiBinary(2)),
    "dict": (
        spaces.Dict({"a": spaces.Box(-1, 1, (3,), np.float32), "b": spaces.Discrete(300)}),
        spaces.Discrete(4),
    ),
}


def batch_of(space: Any, n: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: batch_of(part, n) for name, part in space.spaces.items()}
    return np.stack([np.asarray(space.sample()) for _ in range(n)])


def mixed(mask: Any, one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {name: mixed(mask, one[name], other[name]) for name in one}
    return np.where(mask.reshape(-1, *[1] * (one.ndim - 1)), one, other)


def feed(targets: list[Any], observation_space: Any, action_space: Any, n: int, adds: int) -> None:
    """Adds what Stable-Baselines3's loop would: final observations, resets, time limits."""
    random = np.random.default_rng(1)
    observation_space.seed(1)
    action_space.seed(1)
    observations = batch_of(observation_space, n)
    for _ in range(adds):
        following = batch_of(observation_space, n)
        dones = random.random(n) < 0.2
        infos = [{"TimeLimit.truncated": bool(done and random.random() < 0.5)} for done in dones]
        arguments = (
            observations,
            following,
            batch_of(action_space, n),
            random.normal(size=n),
            dones,
            infos,
        )
        for target in targets:
            target.add(*copy.deepcopy(arguments))
        observations = mixed(dones, batch_of(observation_space, n), following)


def transitions_of(samples: Any) -> Counter[Any]:
    """How often each transition is among samples, with dtypes and shapes."""

    def flat(value: Any) -> list[Any]:
        return [value[name] for name in sorted(value)] if isinstance(value, dict) else [value]

    fields = ("observations", "actions", "next_observations", "dones", "rewards")
    columns = [leaf.numpy() for name in fields for leaf in flat(getattr(samples, name))]
    kinds = tuple((column.dtype.str, column.shape[1:]) for column in columns)
    return Counter(
        (kinds, *(column[i].tobytes() for column in columns)) for i in range(len(columns[0]))
    )


def all_of_theirs(buffer: Any) -> Any:
    """Their buffer's transitions, each once."""
    rows = buffer.buffer_size if buffer.full else buffer.pos
    found: Counter[Any] = Counter()
    for env in range(buffer.n_envs):
        with pytest.MonkeyPatch.context() as patch:  # it picks environments at random
            patch.setattr(np.random, "randint", lambda *_, env=env, size, **__: np.full(size, env))
            found += transitions_of(buffer._get_samples(np.arange(rows)))
    return found


def all_of_ours(buffer: ReplayBuffer) -> Counter[Any]:
    state = buffer.__getstate__()["transitions"]
    tensors = {
        name: {k: torch.from_numpy(v) for k, v in value.items()}
        if isinstance(value, dict)
        else torch.from_numpy(value)
        for name, value in state.items()
    }
    kind = buffers.DictReplayBufferSamples if isinstance(buffer.obs_shape, dict) else None
    return transitions_of((kind or buffers.ReplayBufferSamples)(**tensors))


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("timeouts", [True, False])
def test_the_same_transitions(name: str, n_envs: int, timeouts: bool) -> None:
    observation_space, action_space = SPACES[name]
    arguments: Any = (64, observation_space, action_space, "cpu", n_envs, False, timeouts)
    nested = isinstance(observation_space, spaces.Dict)
    theirs = (buffers.DictReplayBuffer if nested else buffers.ReplayBuffer)(*arguments)
    ours = (DictReplayBuffer if nested else ReplayBuffer)(*arguments)
    for adds in (10, 50):  # the second time it is full
        feed([theirs, ours], observation_space, action_space, n_envs, adds)
        assert all_of_ours(ours) == all_of_theirs(theirs)
        assert (ours.size(), ours.pos, ours.full) == (theirs.size(), theirs.pos, theirs.full)
        assert ours.buffer_size == theirs.buffer_size and ours.obs_shape == theirs.obs_shape
        drawn, known = transitions_of(ours.sample(40)), all_of_ours(ours)
        assert set(drawn) <= set(known)
        assert type(ours.sample(3)) is type(theirs.sample(3))
    ours.close()
    ours.close()


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("n_envs", [1, 4])
def test_samples_are_theirs_field_by_field(name: str, n_envs: int) -> None:
    """Names, types, dtypes, shapes; and with contents of one transition each, values."""
    observation_space, action_space = SPACES[name]
    nested = isinstance(observation_space, spaces.Dict)
    arguments: Any = (n_envs, observation_space, action_space, "cpu", n_envs)
    theirs = (buffers.DictReplayBuffer if nested else buffers.ReplayBuffer)(*arguments)
    ours = (DictReplayBuffer if nested else ReplayBuffer)(*arguments)
    feed([theirs, ours], observation_space, action_space, n_envs, 1)
    np.random.seed(3)
    one, other = ours.sample(200), theirs.sample(200)
    assert type(one) is type(other) and one._fields == other._fields
    assert set(transitions_of(one)) == set(transitions_of(other))
    for field in one._fields:
        mine, reference = getattr(one, field), getattr(other, field)
        assert type(mine) is type(reference), field
        if reference is None:
            continue
        both = zip(tree.flatten(mine), tree.flatten(reference), strict=True)
        assert not isinstance(reference, dict) or mine.keys() == reference.keys()
        for a, b in both:
            assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), field
            assert a.is_contiguous() and not a.requires_grad
            assert n_envs > 1 or torch.equal(a, b), field
    ours.close()


def test_they_are_instances() -> None:
    observation_space, action_space = SPACES["box"]
    plain = ReplayBuffer(10, observation_space, action_space)
    assert isinstance(plain, buffers.ReplayBuffer)
    assert not isinstance(plain, buffers.DictReplayBuffer)
    nested = DictReplayBuffer(10, *SPACES["dict"])
    assert isinstance(nested, buffers.DictReplayBuffer) and isinstance(nested, ReplayBuffer)
    plain.close()
    nested.close()


def test_without_their_package() -> None:
    program = """
import sys
sys.modules["stable_baselines3"] = None
import numpy as np
from gymnasium import spaces
from shmreplay.integrations.sb3 import ReplayBuffer
buffer = ReplayBuffer(10, spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
assert ReplayBuffer.__bases__ == (object,)
buffer.extend(*np.zeros((2, 4, 1, 3)), *np.zeros((3, 4, 1)), [[{}]] * 4)
samples = buffer.sample(5)
assert samples.observations.shape == (5, 3) and buffer.size() == 4
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def test_frames_are_there_once() -> None:
    space = spaces.Box(0, 255, (1, 84, 84), np.uint8)
    buffer = ReplayBuffer(1000, space, spaces.Discrete(2), n_envs=2, optimize_memory_usage=True)
    frames = np.zeros((2, 1, 84, 84), np.uint8)
    for t in range(500):
        following = np.full_like(frames, t % 256)
        buffer.add(frames, following, np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}])
        frames = following
    assert buffer.size() == 500 and buffer.full
    assert buffer._server is not None
    assert buffer._server.stats()["arena_used_bytes"] < 1.2 * 1000 * 84 * 84
    buffer.close()


def test_as_cleanrl_uses_it() -> None:
    """With the infos of a Gymnasium vector, and arguments by name."""
    envs = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1")],
        autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP,
    )
    buffer = ReplayBuffer(
        200,
        envs.single_observation_space,
        envs.single_action_space,
        torch.device("cpu"),
        optimize_memory_usage=True,
        handle_timeout_termination=False,
    )
    observations, _ = envs.reset(seed=1)
    envs.action_space.seed(1)
    for _ in range(300):
        actions = envs.action_space.sample()
        following, rewards, terminations, truncations, infos = envs.step(actions)
        final = following.copy()
        for i in np.flatnonzero(terminations | truncations):
            final[i] = infos["final_obs"][i]
        buffer.add(observations, final, actions, rewards, terminations, infos)
        observations = following
    data = buffer.sample(128)
    assert data.observations.shape == data.next_observations.shape == (128, 4)
    assert data.actions.dtype == torch.int64 and data.actions.shape == (128, 1)
    assert data.rewards.flatten().shape == data.dones.flatten().shape == (128,)
    # A step of CartPole moves it by its speed, also where the episode ends.
    moved = data.observations[:, 0] + 0.02 * data.observations[:, 1]
    assert torch.allclose(moved, data.next_observations[:, 0], atol=1e-5)
    assert data.dones.any()
    buffer.close()


def test_normalised() -> None:
    env = VecNormalize(DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")]))
    env.obs_rms.mean, env.obs_rms.var = np.ones(3), np.full(3, 4.0)
    env.ret_rms.var = np.float64(9.0)
    buffer = ReplayBuffer(10, env.observation_space, env.action_space)
    buffer.add(np.zeros((1, 3)), np.ones((1, 3)), np.zeros((1, 1)), np.ones(1), np.zeros(1), [{}])
    data = buffer.sample(4, env)
    assert torch.allclose(data.observations, torch.full((4, 3), -0.5), atol=1e-4)
    assert torch.allclose(data.next_observations, torch.zeros(4, 3), atol=1e-4)
    assert torch.allclose(data.rewards, torch.full((4, 1), 1 / 3), atol=1e-4)
    assert data.rewards.dtype == torch.float32
    buffer.close()


def test_reset_and_empty() -> None:
    buffer = ReplayBuffer(10, *SPACES["box"])
    with pytest.raises(reverb.errors.InvalidArgumentError, match="empty buffer"):
        buffer.sample(3)
    feed([buffer], *SPACES["box"], 1, 14)
    assert buffer.size() == 10
    buffer.reset()
    assert (buffer.size(), buffer.pos, buffer.full) == (0, 0, False)
    feed([buffer], *SPACES["box"], 1, 4)
    assert buffer.size() == 4
    buffer.close()


@pytest.mark.parametrize("name", ["box", "dict"])
def test_copies(name: str) -> None:
    """What a saved buffer holds when it is loaded; both go on by themselves."""
    buffer = ReplayBuffer(60, *SPACES[name], n_envs=3)
    feed([buffer], *SPACES[name], 3, 33)
    other = copy.deepcopy(buffer)
    assert all_of_ours(other) == all_of_ours(buffer)
    assert (other.size(), other.pos, other.full) == (20, 13, True)
    buffer.reset()
    feed([other], *SPACES[name], 3, 2)
    assert other.size() == 20 and buffer.size() == 0
    buffer.close()
    other.close()


def test_a_table_of_a_server(make_server: MakeServer) -> None:
    """Two buffers, as of two processes, share it."""
    table = reverb.Table(
        "shared",
        reverb.selectors.Prioritized(0.6),
        reverb.selectors.Fifo(),
        1000,
        reverb.rate_limiters.MinSize(20),
    )
    address = make_server([table]).address
    one, other = (
        ReplayBuffer(100, *SPACES["frame"], client=address, table="shared") for _ in range(2)
    )
    feed([one, other], *SPACES["frame"], 1, 15)
    assert one.size() == other.size() == 30
    assert one.sample(64).observations.shape == (64, 1, 8, 8)
    again = copy.deepcopy(one)
    assert again.size() == 30
    for buffer in (one, other, again):
        buffer.close()


def test_saving_a_table_of_a_server(make_server: MakeServer, tmp_path: Path) -> None:
    """Its address is what is saved: the data stay the server's, and go with it."""
    table = reverb.Table.queue("shared", 1000)
    server = make_server([table])
    arguments: Any = {
        "replay_buffer_class": ReplayBuffer,
        "replay_buffer_kwargs": {"client": server.address, "table": "shared"},
        "learning_starts": 1000,
        "device": "cpu",
    }
    model = DQN("MlpPolicy", "CartPole-v1", **arguments)
    model.learn(32)
    path = tmp_path / "buffer"
    model.save_replay_buffer(path)
    assert path.with_suffix(".pkl").stat().st_size < 20_000
    model.replay_buffer.close()
    model.load_replay_buffer(path)
    model.learn(32, reset_num_timesteps=False)
    assert model.replay_buffer.size() == 64
    model.replay_buffer.close()
    server.stop()
    with pytest.raises(reverb.errors.StoreNotFoundError):
        model.load_replay_buffer(path)
        model.replay_buffer.size()


def have_changed(before: list[Any], model: Any) -> bool:
    after = model.policy.parameters()
    return any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("optimize", [False, True])
def test_dqn(tmp_path: Path, optimize: bool) -> None:
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_starts=50,
        buffer_size=500,
        batch_size=16,
        train_freq=10,
        optimize_memory_usage=optimize,
        replay_buffer_class=ReplayBuffer,
        seed=1,
        policy_kwargs={"net_arch": [16]},
        device="cpu",
    )
    before = [weight.clone() for weight in model.policy.parameters()]
    model.learn(300)
    assert have_changed(before, model)
    assert model.replay_buffer is not None and model.replay_buffer.size() == 300
    model.save_replay_buffer(tmp_path / "buffer")
    found = all_of_ours(model.replay_buffer)
    model.replay_buffer.close()
    model.load_replay_buffer(tmp_path / "buffer")
    assert all_of_ours(model.replay_buffer) == found
    model.learn(100, reset_num_timesteps=False)
    assert model.replay_buffer.size() == 400
    model.replay_buffer.close()


@pytest.mark.filterwarnings("ignore:The last trajectory in the replay buffer will be truncated")
def test_learning_anew_after_a_cut(tmp_path: Path) -> None:
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_starts=50,
        buffer_size=500,
        optimize_memory_usage=True,
        replay_buffer_class=ReplayBuffer,
        replay_buffer_kwargs={"handle_timeout_termination": False},
        device="cpu",
    )
    model.learn(60)
    model.learn(60)
    assert model.replay_buffer is not None and model.replay_buffer.size() == 120
    model.replay_buffer.close()


def test_runs_repeat() -> None:
    weights = []
    for _ in range(2):
        model = DQN(
            "MlpPolicy",
            "CartPole-v1",
            learning_starts=20,
            batch_size=8,
            replay_buffer_class=ReplayBuffer,
            buffer_size=500,
            seed=7,
            policy_kwargs={"net_arch": [8]},
            device="cpu",
        )
        model.learn(100)
        weights.append(torch.cat([weight.flatten() for weight in model.policy.parameters()]))
        model.replay_buffer.close()
    assert torch.equal(*weights)


class Goals(gymnasium.Env[Any, Any]):
    """A dict of observations, which SAC has to combine."""

    observation_space = spaces.Dict(
        {"place": spaces.Box(-10, 10, (2,), np.float32), "mode": spaces.Discrete(3)}
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.place = 0, np.zeros(2, np.float32)
        return {"place": self.place, "mode": 0}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.place = np.clip(self.place + action, -10, 10).astype(np.float32)
        observation = {"place": self.place, "mode": self.t % 3}
        return observation, -float(np.abs(self.place).sum()), False, self.t >= 20, {}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "n_envs", "steps", "stored"), [(SAC, 2, 160, 80), (TD3, 3, 150, 50)]
)
def test_continuous_actions(
    algorithm: type[SAC] | type[TD3], n_envs: int, steps: int, stored: int, nested: bool
) -> None:
    env = DummyVecEnv([Goals if nested else lambda: gymnasium.make("Pendulum-v1")] * n_envs)
    model = algorithm(
        "MultiInputPolicy" if nested else "MlpPolicy",
        env,
        learning_starts=40,
        buffer_size=100 * n_envs,
        batch_size=16,
        replay_buffer_class=DictReplayBuffer if nested else ReplayBuffer,
        seed=1,
        policy_kwargs={"net_arch": [16]},
        device="cpu",
    )
    before = [weight.clone() for weight in model.policy.parameters()]
    model.learn(steps)
    assert have_changed(before, model)
    assert model.replay_buffer is not None and model.replay_buffer.size() == stored
    model.replay_buffer.close()


def test_errors() -> None:
    box, discrete = SPACES["box"]
    with pytest.raises(reverb.errors.InvalidArgumentError, match="buffer_size"):
        ReplayBuffer(0, box, discrete)
    with pytest.raises(reverb.errors.InvalidArgumentError, match=r"Text.*expected Box"):
        ReplayBuffer(10, spaces.Text(10), discrete)
    with pytest.raises(reverb.errors.InvalidArgumentError, match=r"Dict.*expected Box"):
        ReplayBuffer(10, spaces.Dict({"a": spaces.Dict({"b": box})}), discrete)
