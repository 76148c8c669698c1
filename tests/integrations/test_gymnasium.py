"""Vector environments recorded: exactly the items that the environments' own record asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", minversion="1.1")

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import shmreplay as reverb
from shmreplay.integrations.gymnasium import (
    EpisodeItemWriter,
    HindsightWriter,
    NStepWriter,
    SequenceWriter,
    VectorRecorder,
)
from tests.conftest import free_port
from tests.integrations.episodes import (
    Episode,
    Step,
    canonical,
    items_of,
    play,
    sequences,
    transitions,
)

MakeServer = Callable[..., reverb.Server]
MODES = list(AutoresetMode)
each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)


def client_of(make_server: MakeServer, max_size: int = 100_000) -> reverb.Client:
    table = reverb.Table(
        "replay",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        max_size,
        reverb.rate_limiters.MinSize(1),
    )
    return make_server([table]).localhost_client()


def same_items(found: list[Any], expected: list[Any]) -> None:
    assert sorted(map(canonical, found)) == sorted(map(canonical, expected))
    assert found


@each_mode
@pytest.mark.parametrize("nested", [False, True], ids=["array", "dict"])
def test_transitions(make_server: MakeServer, mode: AutoresetMode, nested: bool) -> None:
    client = client_of(make_server)
    episodes = play(
        mode,
        lambda env: VectorRecorder(env, lambda: NStepWriter(client, "replay", discount=0.9)),
        nested=nested,
    )
    expected = [item for episode in episodes for item in transitions(episode, 1, 0.9, 1)]
    same_items(items_of(client, "replay"), expected)
    ends = [episode.steps[-1] for episode in episodes]
    assert any(end.terminated for end in ends) and any(end.truncated for end in ends)
    assert client.sample_batch("replay", 64).data["reward"].shape == (64,)


@each_mode
@pytest.mark.parametrize(("n", "stack"), [(2, 1), (3, 1), (5, 1), (12, 1), (1, 4), (3, 2), (7, 4)])
def test_n_steps_and_stacks(
    make_server: MakeServer, mode: AutoresetMode, n: int, stack: int
) -> None:
    client = client_of(make_server)
    episodes = play(
        mode,
        lambda env: VectorRecorder(
            env, lambda: NStepWriter(client, "replay", n=n, discount=0.9, stack=stack)
        ),
        seed=n + stack,
        copy=False,
    )
    expected = [item for episode in episodes for item in transitions(episode, n, 0.9, stack)]
    same_items(items_of(client, "replay"), expected)
    assert client.sample_batch("replay", 64).data["reward"].shape == (64,)


@each_mode
@pytest.mark.parametrize(
    ("length", "burn_in", "period", "stack"),
    [(4, 0, None, 1), (2, 2, 2, 1), (3, 1, 1, 1), (20, 0, None, 1), (3, 2, 2, 3), (1, 0, 3, 1)],
)
def test_sequences(
    make_server: MakeServer,
    mode: AutoresetMode,
    length: int,
    burn_in: int,
    period: int | None,
    stack: int,
) -> None:
    client = client_of(make_server)

    def make() -> SequenceWriter:
        return SequenceWriter(
            client, "replay", length=length, burn_in=burn_in, period=period, stack=stack
        )

    episodes = play(mode, lambda env: VectorRecorder(env, make), seed=length)
    expected = [
        item
        for episode in episodes
        for item in sequences(episode, length + burn_in, period or length, stack)
    ]
    same_items(items_of(client, "replay"), expected)
    data = client.sample_batch("replay", 8).data
    assert data["observation"].shape == (8, length + burn_in + stack, 3)


@each_mode
def test_whole_episodes(make_server: MakeServer, mode: AutoresetMode) -> None:
    client = client_of(make_server)
    episodes = play(
        mode, lambda env: VectorRecorder(env, lambda: EpisodeItemWriter(client, "replay"))
    )
    expected = [
        {
            "observation": np.stack(episode.observations),
            "action": np.array([step.action for step in episode.steps]),
            "reward": np.array([step.reward for step in episode.steps], np.float32),
            "terminated": np.array([step.terminated for step in episode.steps]),
            "truncated": np.array([step.truncated for step in episode.steps]),
        }
        for episode in episodes
    ]
    same_items(items_of(client, "replay"), expected)


def test_over_the_bridge(make_server: MakeServer) -> None:
    port = free_port()
    server = make_server([reverb.Table.queue("replay", 10_000)], port=port)
    local = server.localhost_client()
    with reverb.Client(f"tcp://localhost:{port}") as client:
        episodes = play(
            AutoresetMode.NEXT_STEP,
            lambda env: VectorRecorder(env, lambda: NStepWriter(client, "replay", n=3, stack=2)),
            nested=True,
        )
        expected = [item for episode in episodes for item in transitions(episode, 3, 0.99, 2)]
        same_items(items_of(local, "replay"), expected)
        local.reset("replay")
        episodes = play(
            AutoresetMode.SAME_STEP,
            lambda env: VectorRecorder(env, lambda: EpisodeItemWriter(client, "replay")),
        )
        assert len(items_of(local, "replay")) == len(episodes)


class Reach(gymnasium.Env[Any, Any]):
    """A walk on a line, towards a goal."""

    def __init__(self, record: list[Episode]) -> None:
        box = gymnasium.spaces.Box(-100, 100, (1,), np.float32)
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = gymnasium.spaces.Dict(dict.fromkeys(names, box))
        self.action_space = gymnasium.spaces.Discrete(2)
        self.record = record

    def observe(self) -> dict[str, Any]:
        place = np.array([self.place], np.float32)
        goal = np.array([self.goal], np.float32)
        return {"observation": place * 10, "achieved_goal": place, "desired_goal": goal}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.goal = 0, int(self.np_random.integers(1, 4))
        self.record.append(Episode(self.observe(), []))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += 1 if action else -1
        reached = self.place == self.goal
        reward = float(compute_reward(self.place, self.goal, {}))
        truncated = not reached and len(self.record[-1].steps) == 7
        self.record[-1].steps.append(Step(int(action), reward, self.observe(), reached, truncated))
        return self.observe(), reward, reached, truncated, {}


def compute_reward(achieved: Any, desired: Any, infos: Any) -> Any:
    """0 at the goal, -1 elsewhere, for arrays of goals [N, 1] and for two numbers."""
    far = np.abs(np.asarray(achieved) - desired) > 0.5
    return -(far[:, 0] if far.ndim else far).astype(np.float32)


@each_mode
def test_hindsight(make_server: MakeServer, mode: AutoresetMode) -> None:
    """The transitions, and of each so many relabelled ones with later goals and their rewards."""
    client = client_of(make_server)
    record: list[Episode] = []
    recorder = VectorRecorder(
        SyncVectorEnv([lambda: Reach(record)], autoreset_mode=mode),
        lambda: HindsightWriter(client, "replay", compute_reward, relabels=3, seed=1),
    )
    recorder.reset(seed=3)
    random = np.random.default_rng(5)
    for _ in range(100):
        _, _, terminations, truncations, _ = recorder.step(random.integers(2, size=1))
        ended = terminations | truncations
        if mode == AutoresetMode.DISABLED and ended.any():
            recorder.reset(options={"reset_mask": ended})
    recorder.close()

    items = items_of(client, "replay")
    originals = [item for item in items if not item["relabelled"]]
    expected = []
    for episode in record:
        for t, step in enumerate(episode.steps):
            expected.append(
                {
                    "observation": episode.observations[t],
                    "action": np.int64(step.action),
                    "reward": np.float32(step.reward),
                    "discount": np.float32(0.0 if step.terminated else 0.98),
                    "next_observation": step.observation,
                    "relabelled": np.False_,
                }
            )
    same_items(originals, expected)
    start, goals = 0, set()
    for episode in record:
        count = len(episode.steps)
        part = items[start : start + 4 * count]
        start += 4 * count
        assert [bool(item["relabelled"]) for item in part] == [False] * count + [True] * 3 * count
        for number, item in enumerate(part[count:]):
            t = number // 3
            goal = float(item["observation"]["desired_goal"][0])
            later = [float(o["achieved_goal"][0]) for o in episode.observations[t + 1 :]]
            assert goal in later
            goals.add((count - t, later.index(goal)))
            plain = {**part[t], "relabelled": np.True_}
            wanted = {"desired_goal": np.array([goal], np.float32)}
            plain["observation"] = plain["observation"] | wanted
            plain["next_observation"] = plain["next_observation"] | wanted
            plain["reward"] = np.float32(-(abs(later[0] - goal) > 0.5))
            assert canonical(item) == canonical(plain)
    assert start == len(items) and len(goals) > 8
    assert client.sample_batch("replay", 64).data["relabelled"].any()


def test_observations_are_stored_once(make_server: MakeServer) -> None:
    """Four frames a stack, two stacks a transition: eight times as much if they were copied."""
    server = make_server([reverb.Table.queue("replay", 1000)], capacity=64 << 20)
    client = server.localhost_client()
    writer = NStepWriter(client, "replay", n=3, stack=4)
    writer.begin(np.zeros((84, 84), np.uint8))
    before = server.stats()["arena_used_bytes"]
    for t in range(500):
        writer.step(0, 1.0, np.full((84, 84), t % 256, np.uint8), False, t == 499)
    used = server.stats()["arena_used_bytes"] - before
    assert client.server_info()["replay"].current_size == 500
    assert used < 1.3 * 500 * 84 * 84
    writer.close()


def test_extras(make_server: MakeServer) -> None:
    client = client_of(make_server)
    writers = [
        NStepWriter(client, "replay", n=2),
        SequenceWriter(client, "replay", length=4),
        EpisodeItemWriter(client, "replay"),
    ]
    for writer in writers:
        client.reset("replay")
        writer.begin(np.zeros(2))
        for t in range(4):
            extras = {"log_prob": np.float32(t)}
            writer.step(t, 1.0, np.full(2, float(t)), False, t == 3, extras)
        items = items_of(client, "replay")
        seen = [item["extras"]["log_prob"].tolist() for item in items]
        assert seen == ([0, 1, 2, 3] if writer is writers[0] else [[0, 1, 2, 3]])
        writer.close()


def test_a_reset_in_mid_episode_cuts_it_off(make_server: MakeServer) -> None:
    client = client_of(make_server)
    writer = NStepWriter(client, "replay", n=3, discount=0.5)
    writer.begin(np.float32(0))
    writer.step(0, 1.0, np.float32(1), False, False)
    writer.step(0, 1.0, np.float32(2), False, False)
    writer.begin(np.float32(10))
    writer.step(0, 1.0, np.float32(11), True, False)
    writer.begin(np.float32(20))  # an episode of no steps
    writer.close()
    writer.close()
    items = items_of(client, "replay")
    seen = [
        [float(item[name]) for name in ("observation", "next_observation", "reward", "discount")]
        for item in items
    ]
    assert seen == [[0, 2, 1.5, 0.25], [1, 2, 1.0, 0.5], [10, 11, 1.0, 0.0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda client: NStepWriter(client, "replay", n=2, discount=0.5),
        lambda client: NStepWriter(client, "replay", n=2, discount=0.5, stack=2),
        lambda client: SequenceWriter(client, "replay", length=3),
        lambda client: EpisodeItemWriter(client, "replay"),
    ],
    ids=["n_step", "stack", "sequence", "episode"],
)
def test_a_step_that_is_refused_leaves_no_trace(
    make_server: MakeServer, make: Callable[[reverb.Client], Any]
) -> None:
    client = client_of(make_server)
    written = []
    for refuse in (False, True):
        client.reset("replay")
        writer = make(client)
        writer.begin(np.zeros(2))
        for t in range(2):
            writer.step(t, 1.0 + t, np.full(2, 1.0 + t), False, t == 1)
            if refuse and t == 0:
                with pytest.raises(reverb.errors.SignatureError, match="incompatible"):
                    writer.step(9, 100.0, np.zeros(3), True, False)
        writer.close()
        written.append(items_of(client, "replay"))
    same_items(written[1], written[0])


def test_errors(make_server: MakeServer) -> None:
    client = client_of(make_server)
    with pytest.raises(reverb.errors.InvalidArgumentError, match="n must be at least 1, got 0"):
        NStepWriter(client, "replay", n=0)
    with pytest.raises(reverb.errors.InvalidArgumentError, match="discount"):
        NStepWriter(client, "replay", discount=1.5)
    with pytest.raises(reverb.errors.WriterStateError, match="begin"):
        NStepWriter(client, "replay").step(0, 0.0, np.zeros(2), False, False)
    hindsight = HindsightWriter(client, "replay", compute_reward)
    hindsight.begin(np.zeros(2))
    with pytest.raises(reverb.errors.InvalidArgumentError, match="achieved_goal"):
        hindsight.step(0, 0.0, np.zeros(2), False, False)
    episodes = EpisodeItemWriter(client, "replay", max_steps=1)
    episodes.begin(np.zeros(2))
    episodes.step(0, 0.0, np.zeros(2), False, False)
    with pytest.raises(reverb.errors.InvalidArgumentError, match="max_steps=1"):
        episodes.step(0, 0.0, np.zeros(2), False, False)
    missing = NStepWriter(client, "missing")
    missing.begin(np.zeros(2))
    with pytest.raises(reverb.errors.TableNotFoundError, match="missing"):
        missing.step(0, 0.0, np.zeros(2), False, False)


def test_vectors_that_do_not_say_enough(make_server: MakeServer) -> None:
    client = client_of(make_server)

    class Silent(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
        def step(self, actions: Any) -> Any:
            return (*self.env.step(actions)[:4], {})

    vector = Silent(SyncVectorEnv([lambda: Reach([])], autoreset_mode=AutoresetMode.SAME_STEP))
    recorder = VectorRecorder(vector, lambda: NStepWriter(client, "replay"))
    recorder.reset(seed=1)
    with pytest.raises(reverb.errors.InvalidArgumentError, match="final_obs"):
        for _ in range(20):
            recorder.step(np.zeros(1, np.int64))
    disabled = SyncVectorEnv([lambda: Reach([])], autoreset_mode=AutoresetMode.DISABLED)
    recorder = VectorRecorder(disabled, lambda: NStepWriter(client, "replay"))
    with pytest.raises(reverb.errors.WriterStateError, match=r"\[0\] have ended or not begun"):
        recorder.step(np.zeros(1, np.int64))
    disabled.metadata = {"autoreset_mode": "Sometimes"}
    with pytest.raises(reverb.errors.InvalidArgumentError, match="Sometimes"):
        VectorRecorder(disabled, lambda: NStepWriter(client, "replay"))
