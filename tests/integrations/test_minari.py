"""Episodes to Minari's datasets and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import cli

minari = pytest.importorskip("minari")
pytest.importorskip("h5py")
pytest.importorskip("PIL")

import gymnasium  # noqa: E402

from shmreplay.integrations.episode_writers import EpisodeItemWriter  # noqa: E402
from shmreplay.integrations.gymnasium import NStepWriter, VectorRecorder  # noqa: E402
from shmreplay.integrations.minari import export_table, import_dataset  # noqa: E402
from tests.integrations.episodes import Episode as Played  # noqa: E402
from tests.integrations.episodes import (  # noqa: E402
    Step,
    canonical,
    items_of,
    transitions,
)

# What Minari says of datasets without an author and the like.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari")

MakeServer = Callable[..., reverb.Server]


@pytest.fixture(autouse=True)
def _datasets_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def client_of(make_server: MakeServer) -> reverb.Client:
    tables = [reverb.Table.queue(name, 1000) for name in ("episodes", "again")]
    return make_server(tables).localhost_client()


def write(client: reverb.Client, make: Callable[[np.random.Generator], tuple[Any, Any]]) -> None:
    """Ten episodes of one to nine steps, some terminated, some truncated, one neither."""
    random = np.random.default_rng(1)
    writer = EpisodeItemWriter(client, "episodes", reward_dtype=np.float64)
    for episode in range(10):
        writer.begin(make(random)[0])
        steps = int(random.integers(1, 10))
        for t in range(steps):
            observation, action = make(random)
            last = t == steps - 1 and episode != 7
            reward = float(random.normal())
            writer.step(action, reward, observation, last and episode % 2 == 0, last)
    writer.close()


def arrays(random: np.random.Generator) -> tuple[Any, Any]:
    return random.normal(size=3).astype(np.float32), np.int64(random.integers(5))


def nested(random: np.random.Generator) -> tuple[Any, Any]:
    pixels = random.integers(256, size=(8, 8, 3)).astype(np.uint8)
    inner = (random.normal(size=2), np.bool_(random.integers(2)))
    observation = {"pixels": pixels, "inner": inner, "count": np.uint64(2**63 + 5)}
    return observation, {"move": random.normal(size=2).astype(np.float16), "jump": np.int8(-1)}


@pytest.mark.parametrize("make", [arrays, nested], ids=["arrays", "dicts"])
def test_there_and_back(make_server: MakeServer, make: Any) -> None:
    client = client_of(make_server)
    write(client, make)
    dataset = export_table(client, "episodes", "test/there-v0", author="me", description="text")
    assert dataset.total_episodes == 10
    assert dataset.storage.metadata["author"] == {"me"}
    for episode in dataset:
        assert dataset.observation_space.contains(first_of(episode.observations))
        assert dataset.action_space.contains(first_of(episode.actions))
    assert import_dataset(client, "again", "test/there-v0") == 10
    before = [canonical(item) for item in items_of(client, "episodes")]
    assert [canonical(item) for item in items_of(client, "again")] == before


def first_of(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: first_of(part) for name, part in batch.items()}
    return tuple(map(first_of, batch)) if isinstance(batch, tuple) else np.asarray(batch[0])


def test_an_environment_and_its_spaces(make_server: MakeServer) -> None:
    client = client_of(make_server)
    recorder = VectorRecorder(
        gymnasium.make_vec("CartPole-v1", num_envs=2),
        lambda: EpisodeItemWriter(client, "episodes"),
    )
    recorder.reset(seed=1)
    recorder.action_space.seed(1)
    for _ in range(100):
        recorder.step(recorder.action_space.sample())
    recorder.close()
    dataset = export_table(client, "episodes", "test/cart-v0", env="CartPole-v1", limit=3)
    assert dataset.total_episodes == 3
    assert dataset.action_space == gymnasium.spaces.Discrete(2)
    assert dataset.recover_environment().spec.id == "CartPole-v1"
    import_dataset(client, "again", dataset)
    before = [canonical(item) for item in items_of(client, "episodes")[:3]]
    assert [canonical(item) for item in items_of(client, "again")] == before


def test_extras_are_infos(make_server: MakeServer) -> None:
    client = client_of(make_server)
    with_extras = EpisodeItemWriter(client, "episodes")
    with_extras.begin(np.zeros(2))
    for t in range(3):
        extras = {"policy": {"log_prob": np.float32(t)}}
        with_extras.step(t, 0.0, np.zeros(2), False, t == 2, extras)
    with_extras.close()
    dataset = export_table(client, "episodes", "test/extras-v0")
    (episode,) = dataset.iterate_episodes()
    assert episode.infos["policy"]["log_prob"].tolist() == [0, 1, 2]
    import_dataset(client, "again", dataset)
    assert canonical(items_of(client, "again")[0]) == canonical(items_of(client, "episodes")[0])


def test_as_transitions(make_server: MakeServer) -> None:
    client = client_of(make_server)
    write(client, arrays)
    dataset = export_table(client, "episodes", "test/transitions-v0")
    writer = NStepWriter(client, "again", n=3, discount=0.9)
    assert import_dataset(client, "again", dataset, writer=writer, limit=4) == 4
    expected = []
    for item in items_of(client, "episodes")[:4]:
        columns = ("action", "reward", "terminated", "truncated")
        rows = zip(*(item[name] for name in columns), item["observation"][1:], strict=True)
        steps = [Step(int(a), float(r), o, bool(d), bool(u)) for a, r, d, u, o in rows]
        expected += transitions(Played(item["observation"][0], steps), 3, 0.9, 1)
    found = sorted(map(canonical, items_of(client, "again")))
    assert found == sorted(map(canonical, expected))


def test_errors(make_server: MakeServer) -> None:
    client = client_of(make_server)
    invalid = reverb.errors.InvalidArgumentError
    with pytest.raises(invalid, match="no items"):
        export_table(client, "episodes", "test/empty-v0")
    with pytest.raises(reverb.errors.TableNotFoundError, match="other"):
        export_table(client, "other", "test/empty-v0")
    with pytest.raises(reverb.errors.TableNotFoundError, match="other"):
        import_dataset(client, "other", make_dataset(client))
    with pytest.raises(invalid, match=r"'test/none-v3'.*test/made-v0"):
        import_dataset(client, "again", "test/none-v3")
    with pytest.raises(invalid, match="already exists"):
        export_table(client, "episodes", "test/made-v0")
    with pytest.raises(invalid, match="NoSuchGame"):
        export_table(client, "episodes", "test/game-v0", env="NoSuchGame-v1")
    with pytest.raises(invalid, match="Malformed"):
        export_table(client, "episodes", "no version")
    client.insert_batch("again", {"x": np.zeros(3)})
    with pytest.raises(invalid, match=r"item 0 of table 'again' with \['x'\]"):
        export_table(client, "again", "test/new-v0")
    client.reset("again")
    short = {name: np.zeros((1, 4)) for name in ("observation", "action", "reward")}
    ends = {name: np.zeros((1, 4), bool) for name in ("terminated", "truncated")}
    client.insert_batch("again", {**short, **ends})
    with pytest.raises(invalid, match=r"shape \[4\] at \('observation',\).*T \+ 1"):
        export_table(client, "again", "test/new-v0")
    assert sorted(minari.list_local_datasets()) == ["test/made-v0"]


def make_dataset(client: reverb.Client) -> Any:
    write(client, arrays)
    return export_table(client, "episodes", "test/made-v0")


def test_commands(make_server: MakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    client = client_of(make_server)
    write(client, nested)
    store = client.server_address.removeprefix("shm://")
    dataset = ("--minari", "test/command-v0")
    assert cli.main(["export", *dataset, store, "episodes", "--author", "me"]) == 0
    assert "episodes: 10 episodes" in capsys.readouterr().out
    path = Path(minari.storage.get_dataset_path(dataset[1]))
    files = [each for each in path.rglob("*") if each.is_file()]
    assert {each.stat().st_mode & 0o077 for each in files} == {0}
    before_again = {each: each.read_bytes() for each in files}
    assert cli.main(["export", *dataset, store, "episodes"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert {each: each.read_bytes() for each in files} == before_again
    assert cli.main(["import", *dataset, "--json", client.server_address, "again"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"dataset": dataset[1], "table": "again", "episodes": 10}
    assert not err
    before = [canonical(item) for item in items_of(client, "episodes")]
    assert [canonical(item) for item in items_of(client, "again")] == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("export", "no-such-store", "episodes"), "no store 'no-such-store'"),
        (("export", "STORE", "other"), "no table 'other'; there are: again, episodes"),
        (("export", "STORE", "again"), "no items"),
        (("import", "STORE", "again"), "test/none-v0"),
        (("import", "STORE", "again", "--limit", "0"), "--limit 0: expected 1 or more"),
    ],
)
def test_commands_that_cannot_be_done(
    make_server: MakeServer,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    complaint: str,
) -> None:
    client = client_of(make_server)
    store = client.server_address.removeprefix("shm://")
    given = [store if argument == "STORE" else argument for argument in arguments]
    assert cli.main([*given, "--minari", "test/none-v0"]) == 2
    assert complaint in capsys.readouterr().err
