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
from shmreplay import tree
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
    Writing,
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


def walk(
    recorder: VectorRecorder, mode: AutoresetMode, steps: int = 100, extras: bool = False
) -> None:
    """Random steps in one environment, and the end."""
    recorder.reset(seed=3)
    random = np.random.default_rng(5)
    for t in range(steps):
        more = {"t": np.array([t])} if extras else None
        _, _, terminations, truncations, _ = recorder.step(random.integers(2, size=1), more)
        ended = terminations | truncations
        if mode == AutoresetMode.DISABLED and ended.any():
            recorder.reset(options={"reset_mask": ended})
    recorder.close()


def hindsight(record: list[Episode], relabels: int, seed: int) -> list[Any]:
    """Each transition, and after it so many relabelled ones with later goals and their rewards."""
    random = np.random.default_rng(seed)
    expected = []
    for episode in record:
        count, observations = len(episode.steps), episode.observations
        first = [t for t in range(count) for _ in range(relabels)]
        goals = iter(random.integers(np.array(first, int) + 1, count + 1) if count else ())
        for t, step in enumerate(episode.steps):
            plain = {
                "observation": observations[t],
                "action": np.int64(step.action),
                "reward": np.float32(step.reward),
                "discount": np.float32(0.0 if step.terminated else 0.98),
                "next_observation": step.observation,
                "relabelled": np.False_,
            }
            expected.append(plain)
            for _ in range(relabels):
                goal = observations[next(goals)]["achieved_goal"]
                item = {**plain, "relabelled": np.True_}
                for name in ("observation", "next_observation"):
                    item[name] = {**plain[name], "desired_goal": goal}
                far = abs(float(step.observation["achieved_goal"][0] - goal[0])) > 0.5
                item["reward"] = np.float32(-1.0 if far else 0.0)
                expected.append(item)
    return expected


@each_mode
@pytest.mark.parametrize("relabels", [0, 1, 3])
def test_hindsight(make_server: MakeServer, mode: AutoresetMode, relabels: int) -> None:
    client = client_of(make_server)
    record: list[Episode] = []
    recorder = VectorRecorder(
        SyncVectorEnv([lambda: Reach(record)], autoreset_mode=mode),
        lambda: HindsightWriter(client, "replay", compute_reward, relabels=relabels, seed=1),
    )
    walk(recorder, mode)
    items = items_of(client, "replay")
    expected = hindsight(record, relabels, 1)
    assert list(map(canonical, items)) == list(map(canonical, expected))
    assert len(record) > 8 and {item["reward"].item() for item in items} == {0.0, -1.0}
    goals = {item["observation"]["desired_goal"].item() for item in items if item["relabelled"]}
    assert len(goals) > 3 or not relabels
    assert client.sample_batch("replay", 64).data["reward"].shape == (64,)


def test_hindsight_over_the_bridge_and_with_extras(make_server: MakeServer) -> None:
    port = free_port()
    server = make_server([reverb.Table.queue("replay", 10_000)], port=port)
    record: list[Episode] = []
    with reverb.Client(f"tcp://localhost:{port}") as client:
        recorder = VectorRecorder(
            SyncVectorEnv([lambda: Reach(record)], autoreset_mode=AutoresetMode.SAME_STEP),
            lambda: HindsightWriter(client, "replay", compute_reward, relabels=2, seed=1),
        )
        walk(recorder, AutoresetMode.SAME_STEP, 50, extras=True)
    items = items_of(server.localhost_client(), "replay")
    extras = [item.pop("extras")["t"].item() for item in items]
    expected = hindsight(record, 2, 1)
    assert list(map(canonical, items)) == list(map(canonical, expected))
    assert extras == [t for t in range(50) for _ in range(3)]


def test_hindsight_stores_observations_once(make_server: MakeServer) -> None:
    server = make_server([reverb.Table.queue("replay", 10_000)], capacity=64 << 20)
    client = server.localhost_client()
    writer = HindsightWriter(client, "replay", compute_reward, relabels=4)

    def observe(t: int) -> dict[str, Any]:
        frame = np.full((84, 84), t % 256, np.uint8)
        goal = np.array([t], np.float32)
        return {"frame": frame, "achieved_goal": goal, "desired_goal": goal}

    before = server.stats()["arena_used_bytes"]
    for _ in range(10):
        writer.begin(observe(0))
        for t in range(1, 51):
            writer.step(0, 1.0, observe(t), False, t == 50)
    assert client.server_info()["replay"].current_size == 5 * 500
    assert server.stats()["arena_used_bytes"] - before < 1.4 * 510 * 84 * 84
    writer.close()


WRITERS: dict[str, Callable[[reverb.Client], Any]] = {
    "n_step": lambda client: NStepWriter(client, "replay", n=3, discount=0.5),
    "stack": lambda client: NStepWriter(client, "replay", n=2, discount=0.5, stack=2),
    "sequence": lambda client: SequenceWriter(client, "replay", length=3, burn_in=1, period=2),
    "episode": lambda client: EpisodeItemWriter(client, "replay"),
}


@each_mode
@pytest.mark.parametrize("nested", [False, True], ids=["array", "dict"])
@pytest.mark.parametrize("name", WRITERS)
def test_in_place_is_as_by_copy(
    make_server: MakeServer, mode: AutoresetMode, nested: bool, name: str
) -> None:
    """A vector that writes observations where they are stored; it returns garbage for them."""
    client = client_of(make_server)
    vectors: list[Any] = []
    found = []

    def record(env: SyncVectorEnv) -> VectorRecorder:
        vectors.append(env)
        return VectorRecorder(env, lambda: WRITERS[name](client))

    for kind in (SyncVectorEnv, Writing):
        client.reset("replay")
        play(mode, record, nested=nested, kind=kind)
        found.append(list(map(canonical, items_of(client, "replay"))))
    assert found[0] == found[1] and found[0]
    places = [place for place in vectors[1].places if place is not None]
    shared = [all(map(lies_in_shared_memory, tree.flatten(place))) for place in places]
    assert shared.count(False) == 3 < len(places) / 4  # the first step of each environment


def lies_in_shared_memory(array: Any) -> bool:
    address = array.ctypes.data
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
            if first <= address < last:
                return "/dev/shm/" in line
    return False


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("remote", [False, True])
def test_a_step_in_place_that_fails_leaves_no_trace(
    make_server: MakeServer, name: str, remote: bool
) -> None:
    port = free_port() if remote else None
    table = reverb.Table.queue("replay", 1000)
    server = make_server([table], port=port)
    local = server.localhost_client()
    address = f"tcp://localhost:{port}" if remote else server.address
    with reverb.Client(address) as client:
        written = []
        for fail in (False, True):
            local.reset("replay")
            writer = WRITERS[name](client)
            writer.begin(np.zeros(2))
            for t in range(6):
                with writer.next_step(t) as step:
                    step.observation[...] = t + 1
                    step.outcome(1.0 + t, False, t == 5)
                if fail and t < 5:
                    fail_in_place(writer)
            writer.close()
            written.append(items_of(local, "replay"))
    same_items(written[1], written[0])


def fail_in_place(writer: Any) -> None:
    with pytest.raises(ZeroDivisionError), writer.next_step(9) as step:
        step.observation[...] = 1 / 0
    with pytest.raises(reverb.errors.WriterStateError, match="no outcome"), writer.next_step(9):
        pass
    bad = np.zeros(3)
    with pytest.raises(reverb.errors.SignatureError), writer.next_step(bad) as step:
        step.outcome(100.0, True, False)
    with pytest.raises(reverb.errors.SignatureError), writer.next_step(9, {"more": bad}) as step:
        step.outcome(100.0, True, False)


def test_calls_within_a_step_in_place(make_server: MakeServer) -> None:
    writer = NStepWriter(client_of(make_server), "replay")
    with pytest.raises(reverb.errors.WriterStateError, match="begin"):
        writer.next_step(0).__enter__()
    writer.begin(np.zeros(2))
    writer.step(0, 1.0, np.ones(2), False, False)
    with pytest.raises(reverb.errors.WriterStateError, match="in place"), writer.next_step(0):
        writer.step(0, 1.0, np.ones(2), False, False)
    with writer.next_step(0) as step:
        step.outcome(1.0, False, True)
    writer.close()


def test_an_end_that_failed_does_not_reach_into_the_next_episode(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(make_server)
    writer = NStepWriter(client, "replay", n=3, discount=1.0)
    writer.begin(np.float32(0))
    writer.step(0, 1.0, np.float32(1), False, False)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_end", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            writer.step(0, 1.0, np.float32(2), False, True)
    writer.begin(np.float32(10))
    for t in range(11, 14):
        writer.step(0, 1.0, np.float32(t), False, t == 13)
    writer.close()
    starts = [item["observation"].item() for item in items_of(client, "replay")]
    assert starts == [10, 11, 12]


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
        *WRITERS.values(),
        lambda client: HindsightWriter(client, "replay", compute_reward, relabels=1, seed=1),
    ],
    ids=[*WRITERS, "hindsight"],
)
def test_a_step_that_is_refused_leaves_no_trace(
    make_server: MakeServer, make: Callable[[reverb.Client], Any]
) -> None:
    client = client_of(make_server)
    written = []

    def observe(*values: float) -> Any:
        names = ("achieved_goal", "desired_goal")
        array = np.array(values, float)
        return dict.fromkeys(names, array) if isinstance(writer, HindsightWriter) else array

    for refuse in (False, True):
        client.reset("replay")
        writer = make(client)
        writer.begin(observe(0, 0))
        for t in range(2):
            writer.step(t, 1.0 + t, observe(1.0 + t, 0), False, t == 1)
            if refuse and t == 0:
                with pytest.raises(reverb.errors.SignatureError, match="incompatible"):
                    writer.step(9, 100.0, observe(1, 2, 3), True, False)
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
    bad: list[dict[str, Any]] = [
        {"discount": float("nan")},
        {"discount": "x"},
        {"priority": float("nan")},
        {"priority": -1.0},
        {"priority": "x"},
        {"seed": -1},
        {"seed": "x"},
    ]
    for options in bad:
        with pytest.raises(reverb.errors.ReverbError, match=next(iter(options))):
            HindsightWriter(client, "replay", compute_reward, **options)
    with pytest.raises(reverb.errors.ReverbError, match="compute_reward must be a function, got 5"):
        HindsightWriter(client, "replay", 5)  # type: ignore[arg-type]
    hindsight = HindsightWriter(client, "replay", compute_reward)
    hindsight.begin(np.zeros(2))
    with pytest.raises(reverb.errors.InvalidArgumentError, match="achieved_goal"):
        hindsight.step(0, 0.0, np.zeros(2), False, False)
    episodes = EpisodeItemWriter(client, "replay", max_steps=1)
    episodes.begin(np.zeros(2))
    episodes.step(0, 0.0, np.zeros(2), False, False)
    with pytest.raises(reverb.errors.InvalidArgumentError, match="max_steps=1"):
        episodes.step(0, 0.0, np.zeros(2), False, False)


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


def test_writers_of_tables_that_are_not_there(make_server: MakeServer) -> None:
    client = client_of(make_server)
    makers: list[Callable[[Any], object]] = [
        lambda table: NStepWriter(client, table),
        lambda table: SequenceWriter(client, table, length=2),
        lambda table: EpisodeItemWriter(client, table),
        lambda table: HindsightWriter(client, table, lambda *_: np.zeros(1)),
    ]
    for make in makers:
        with pytest.raises(reverb.errors.TableNotFoundError, match="these tables: 'replay'"):
            make("repaly")
        with pytest.raises(reverb.errors.ArgumentTypeError, match="'replay'"):
            make(["replay"])
    assert client.stats()["sessions"] <= 1  # none has opened one


def test_a_recorder_without_writers() -> None:
    vector = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")])
    try:
        with pytest.raises(reverb.errors.ArgumentTypeError, match="got make_writer None; expected"):
            VectorRecorder(vector, None)  # type: ignore[arg-type]
    finally:
        vector.close()
