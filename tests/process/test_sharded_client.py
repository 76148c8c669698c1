"""Several servers as one: true probabilities, keys that find their shard, shards that die."""

from __future__ import annotations

import logging
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, rate_limiters, selectors, shard_batch
from tests.conftest import free_port
from tests.process.servants import Other, rows, wait_until

each = pytest.mark.parametrize

PATIENCE = reverb.RemoteOptions(timeout=60.0)
IMPATIENCE = reverb.RemoteOptions(timeout=1.0)


def table(name: str, sampler: Any, max_times_sampled: int = 0, seed: int = 1) -> reverb.Table:
    return reverb.Table(
        name,
        sampler,
        selectors.Fifo(),
        1000,
        rate_limiters.MinSize(1),
        max_times_sampled,
        seed=seed,
    )


def make_tables(seed: int = 1) -> list[reverb.Table]:
    return [
        table("prioritized", selectors.Prioritized(0.5), seed=seed),
        table("uniform", selectors.Uniform(), seed=seed),
        table("queue", selectors.Fifo(), 1, seed=seed),
    ]


Make = Callable[..., tuple[reverb.ShardedClient, list[reverb.Server]]]


@pytest.fixture
def make(make_server: Callable[..., reverb.Server]) -> Iterator[Make]:
    """Makes servers in this process and a client of all of them."""
    clients: list[reverb.ShardedClient] = []

    def servers(ways: Sequence[str], **options: Any) -> Any:
        made = [
            make_server(make_tables(seed), port=free_port() if way != "shm" else None)
            for seed, way in enumerate(ways)
        ]
        where = [
            server.address if way == "shm" else f"{way}127.0.0.1:{server.port}"
            for server, way in zip(made, ways, strict=True)
        ]
        clients.append(reverb.ShardedClient(where, PATIENCE, **{"seed": 7, **options}))
        return clients[-1], made

    yield servers
    for client in clients:
        client.close()


def fill(server: reverb.Server, table: str, first: int, priorities: Sequence[float]) -> None:
    with reverb.Client(server.address) as client:
        values = range(first, first + len(priorities))
        client.insert_batch(table, rows(*values), np.array(priorities, np.float64))


WAYS = [("shm", "shm", "shm"), ("tcp://", "tcp://", "tcp://"), ("shm", "", "tcp://")]


# ---------------------------------------------------------------- probabilities


@each("ways", WAYS)
def test_draws_follow_the_true_probabilities(make: Make, ways: Sequence[str]) -> None:
    """Items weigh as much as in one table, and the shards are of very different mass."""
    client, servers = make(ways)
    priorities = [[1.0, 4.0], [9.0] * 10, [0.0, 100.0]]
    for number, (server, given) in enumerate(zip(servers, priorities, strict=True)):
        fill(server, "prioritized", 100 * number, given)
    weights = {
        100.0 * number + i: priority**0.5
        for number, given in enumerate(priorities)
        for i, priority in enumerate(given)
    }
    total = sum(weights.values())
    counts: Counter[float] = Counter()
    n, batches = 256, 40
    for _ in range(batches):
        info, data = client.sample_batch("prioritized", n, 10.0)
        assert len(info.key) == n
        values = data["x"]
        np.testing.assert_allclose(info.probability, [weights[v] / total for v in values])
        np.testing.assert_array_equal(info.key["shard"], values // 100)
        np.testing.assert_array_equal(info.table_size, 14)
        counts.update(values.tolist())
    assert counts[200.0] == 0, "weight 0 beside others is never drawn"
    expected = {v: n * batches * w / total for v, w in weights.items() if w > 0}
    chi2 = sum((counts[v] - e) ** 2 / e for v, e in expected.items())
    assert chi2 < 40.0  # 12 degrees of freedom: exceeded once in 10,000 seeds; these are fixed


def test_uniform_draws_go_by_the_sizes(make: Make) -> None:
    client, servers = make(("shm", "shm"))
    fill(servers[0], "uniform", 0, [1.0] * 3)
    fill(servers[1], "uniform", 100, [50.0] * 9)
    info = client.sample_batch("uniform", 4096, 10.0).info
    np.testing.assert_allclose(info.probability, 1 / 12)
    share = np.mean(info.key["shard"] == 0)
    assert abs(share - 0.25) < 0.03  # more than four standard deviations
    # The rows are mixed: the shards do not stand one after the other.
    assert np.count_nonzero(np.diff(info.key["shard"].astype(int))) > 1000


def test_where_all_weights_are_zero_items_are_alike(make: Make) -> None:
    client, servers = make(("shm", "shm"))
    fill(servers[0], "prioritized", 0, [0.0])
    fill(servers[1], "prioritized", 100, [0.0] * 3)
    info = client.sample_batch("prioritized", 400, 10.0).info
    np.testing.assert_allclose(info.probability, 0.25)
    assert set(info.key["shard"]) == {0, 1}


def test_old_masses_change_the_split_and_not_the_honesty(make: Make) -> None:
    """The probability is that with which the item was selected, by the masses that were used."""
    client, servers = make(("shm", "shm"))
    fill(servers[0], "uniform", 0, [1.0] * 5)
    fill(servers[1], "uniform", 100, [1.0] * 5)
    client.sample_batch("uniform", 1, 10.0)
    with ExitStack() as nobody_looks:
        for shard in client._group.shards:
            nobody_looks.enter_context(shard._looking)
        fill(servers[1], "uniform", 105, [1.0] * 15)
        info = client.sample_batch("uniform", 1000, 10.0).info
        np.testing.assert_allclose(info.probability, np.where(info.key["shard"] == 0, 0.1, 0.025))
    for shard in client._group.shards:
        shard.looked_at = 0.0
    info = client.sample_batch("uniform", 1000, 10.0).info
    np.testing.assert_allclose(info.probability, 0.04)


def test_same_seed_same_samples(make: Make) -> None:
    drawn = []
    for _ in range(2):
        client, servers = make(("shm", "shm"))
        for number, server in enumerate(servers):
            fill(server, "prioritized", 100 * number, [1.0, 2.0, 3.0])
        drawn.append([client.sample_batch("prioritized", 64, 10.0).data["x"] for _ in range(3)])
        client.close()
    np.testing.assert_array_equal(drawn[0], drawn[1])


@each("in_steps", [False, True])
def test_single_samples(make: Make, in_steps: bool) -> None:
    client, servers = make(("shm", "tcp://"))
    fill(servers[0], "prioritized", 0, [1.0])
    fill(servers[1], "prioritized", 100, [9.0])
    seen = set()
    for sample in client.sample("prioritized", 100, emit_timesteps=in_steps, timeout=10.0):
        info, data = sample[0] if in_steps else sample
        shard = int(data[0] // 100)
        assert info.key.shard == shard and info.probability == (0.25, 0.75)[shard]
        assert info.table_size == 2
        seen.add(shard)
    assert seen == {0, 1}


# ---------------------------------------------------------------- inserting, by key


@each("ways", WAYS)
def test_inserts_are_spread_and_keys_find_their_shard(make: Make, ways: Sequence[str]) -> None:
    client, servers = make(ways)
    for value in range(6):
        client.insert({"x": np.float64(value)}, {"uniform": 1.0, "queue": 1.0})
    keys = np.concatenate(
        [client.insert_batch("prioritized", rows(v), [1.0]) for v in range(10, 16)]
    )
    for name in ("prioritized", "uniform", "queue"):
        infos = [server.localhost_client().server_info()[name] for server in servers]
        assert [info.current_size for info in infos] == [2, 2, 2]
        assert client.server_info()[name].current_size == 6
    assert Counter(keys["shard"].tolist()) == {0: 2, 1: 2, 2: 2}

    assert client.update_priorities("prioritized", keys, np.arange(6.0)) == 6
    wanted = dict(zip(keys.tolist(), np.arange(6.0), strict=True))
    wait_until(
        lambda: (
            client.server_info()["prioritized"].sampling_mass
            == pytest.approx(sum(np.arange(6.0) ** 0.5))
        ),
        "the new masses",
    )
    found = client.sample_batch("prioritized", 500, 10.0).info
    for key, priority in zip(found.key.tolist(), found.priority, strict=True):
        assert priority == wanted[key]
    client.mutate_priorities("prioritized", {keys[5].item(): 0.0}, list(keys[:5]))
    assert client.server_info()["prioritized"].current_size == 1
    assert client.update_priorities("prioritized", keys, 1.0) == 1
    client.reset("prioritized")
    assert client.server_info()["prioritized"].current_size == 0


def test_equal_keys_of_two_shards_are_two_keys() -> None:
    """The keys of the servers may be the same numbers."""
    keys = np.concatenate([shard_batch.keys_of(i, np.array([5], np.uint64)) for i in (0, 1)])
    assert keys[0] != keys[1]
    assert len(np.unique(keys)) == 2


def test_writers_stay_with_a_shard(make: Make) -> None:
    client, servers = make(("shm", "tcp://"))
    for _ in range(2):
        with client.trajectory_writer(2) as writer:
            for value in range(4):
                writer.append({"x": np.float64(value)})
                if value:
                    writer.create_item("uniform", 1.0, {"x": writer.history["x"][-2:]})
            writer.end_episode()
    sizes = [s.localhost_client().server_info()["uniform"].current_size for s in servers]
    assert sizes == [3, 3]
    assert client.sample_batch("uniform", 8, 10.0).data["x"].shape == (8, 2)


def test_what_is_refused_changes_nothing(make: Make) -> None:
    client, _ = make(("shm", "shm"))
    keys = [client.insert_batch("prioritized", rows(v), [1.0])[0] for v in range(2)]
    before = client.server_info()["prioritized"].sampling_mass
    with pytest.raises(errors.PriorityError):
        client.update_priorities("prioritized", keys, [3.0, -1.0])
    with pytest.raises(errors.PriorityError):
        client.mutate_priorities("prioritized", {keys[0].item(): float("nan")}, [keys[1]])
    with pytest.raises(errors.ArgumentTypeError, match="shard"):
        client.update_priorities("prioritized", np.array([5], np.uint64), 1.0)
    with pytest.raises(errors.ArgumentTypeError, match="shard"):
        client.update_priorities("prioritized", [5], 1.0)
    with pytest.raises(errors.InvalidArgumentError, match="there are 2 shards"):
        client.update_priorities("prioritized", [(2, 5)], 1.0)
    for call in (
        lambda: client.sample_batch("missing", 2),
        lambda: client.sampler("missing", 2),
        lambda: client.sample("missing"),
        lambda: client.reset("missing"),
        lambda: client.update_priorities("missing", keys, 1.0),
        lambda: client.insert({"x": 1.0}, {"missing": 1.0}),
        lambda: client.insert_batch("missing", rows(1.0)),
    ):
        with pytest.raises(errors.TableNotFoundError, match="missing"):
            call()
    with pytest.raises(errors.DeadlineExceededError, match=r"shard 1 .* has no items"):
        client.sample_batch("uniform", 2, 0.0)
    assert client.server_info()["prioritized"].sampling_mass == before
    for bad in ([], "localhost:80", ["x"], ["shm://a", "shm://a"]):
        with pytest.raises((errors.InvalidArgumentError, errors.ArgumentTypeError)):
            reverb.ShardedClient(bad)
    with pytest.raises(errors.InvalidArgumentError, match="1 RemoteOptions for 2 servers"):
        reverb.ShardedClient(["shm://a", "shm://b"], [PATIENCE])


def test_a_table_that_one_shard_has_not(make_server: Callable[..., reverb.Server]) -> None:
    servers = [make_server([table(name, selectors.Uniform())]) for name in ("a", "b")]
    with reverb.ShardedClient([s.address for s in servers]) as client:
        with pytest.raises(errors.TableNotFoundError, match=r"'a'.* not on shard 1 .*\['b'\]"):
            client.sample_batch("a", 1, 1.0)
        assert client.server_info() == {}


# ---------------------------------------------------------------- waiting, sampling ahead


@each("ways", [("shm", "tcp://", "shm"), ("shm", "shm", "shm")])
def test_a_queue_over_shards_gives_each_item_once(make: Make, ways: Sequence[str]) -> None:
    client, _ = make(ways)
    for value in range(30):
        client.insert_batch("queue", rows(value), 1.0)
    seen: list[float] = []
    with client.sampler("queue", 4, prefetch=2, timeout=20.0) as sampler:
        for _ in range(3):
            seen += next(sampler).data["x"].tolist()
    # What was gathered ahead was not lost: it comes first.
    while len(seen) < 30:
        seen += client.sample_batch("queue", min(7, 30 - len(seen)), 20.0).data["x"].tolist()
    assert sorted(seen) == list(range(30))
    with pytest.raises(errors.DeadlineExceededError):
        client.sample_batch("queue", 1, 0.0)


def test_a_shard_whose_limiter_holds_back_is_passed_over(
    make_server: Callable[..., reverb.Server],
) -> None:
    """Four samples an insert: one shard has none left, and the other gives the whole batch."""
    limiter = rate_limiters.RateLimiter(4.0, 1, 0.0, 1e9)
    servers = [
        make_server(
            [reverb.Table("limited", selectors.Uniform(), selectors.Fifo(), 100, limiter, seed=1)]
        )
        for _ in range(2)
    ]
    with reverb.ShardedClient([s.address for s in servers], seed=1) as client:
        for number, server in enumerate(servers):
            fill(server, "limited", 100 * number, [1.0] * 10)
        info = client.sample_batch("limited", 16, 20.0).info
        assert set(info.key["shard"]) == {0, 1}
        left = [40 - int(np.count_nonzero(info.key["shard"] == i)) for i in range(2)]
        # Whether or not it is known before the batch is split that one is held back.
        servers[0].localhost_client().sample_batch("limited", left[0], 20.0)
        info = client.sample_batch("limited", left[1], 20.0).info
        assert len(info.key) == left[1] and not np.any(info.key["shard"] == 0)
        assert set(info.probability) <= {0.1, 0.05}
        assert set(info.table_size) == {20}
        with pytest.raises(errors.DeadlineExceededError, match=r"shard 0 .*; shard 1 "):
            client.sample_batch("limited", 1, 0.0)


def test_a_call_waits_for_items_of_any_shard(make: Make) -> None:
    client, servers = make(("shm", "tcp://"))
    client.server_info()
    sampled: list[Any] = []
    thread = threading.Thread(
        target=lambda: sampled.append(client.sample_batch("uniform", 3, 60.0))
    )
    thread.start()
    fill(servers[1], "uniform", 100, [1.0])
    thread.join()
    np.testing.assert_array_equal(sampled[0].data["x"], [100.0] * 3)


def test_batches_into_arrays_that_are_there(make: Make) -> None:
    client, _ = make(("shm", "shm"))
    for value in range(8):
        client.insert_batch("uniform", rows(value), 1.0)
    out = {"x": np.zeros(16)}
    batch = client.sample_batch("uniform", 16, 10.0, out)
    assert np.shares_memory(batch.data["x"], out["x"])
    assert len(set(out["x"])) > 1
    with pytest.raises(errors.InvalidArgumentError, match=r"out at .*float32"):
        client.sample_batch("uniform", 16, 10.0, {"x": np.zeros(16, np.float32)})


# ---------------------------------------------------------------- shards on this machine


def in_one_thread(client: reverb.ShardedClient, patch: pytest.MonkeyPatch) -> None:
    """From now on a call fails that hands something to another thread."""
    client.sample_batch("uniform", 1, 10.0)

    def refuse(*arguments: Any) -> Any:
        raise AssertionError(f"handed over: {arguments}")

    patch.setattr(client._group, "look", lambda shards: None)
    patch.setattr(client._group, "submit", refuse)


def test_near_shards_are_drawn_from_in_the_calling_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, servers = make(("shm", "shm", "shm"))
    fill(servers[0], "uniform", 0, [1.0] * 10)
    fill(servers[1], "uniform", 100, [1.0] * 30)
    in_one_thread(client, monkeypatch)
    out = {"x": np.full(300, -1.0)}
    for n, given in ((1, None), (300, None), (300, out)):
        info, data = client.sample_batch("uniform", n, 10.0, given)
        np.testing.assert_array_equal(info.key["shard"], data["x"] // 100)
        np.testing.assert_allclose(info.probability, 1 / 40)
        np.testing.assert_array_equal(info.table_size, 40)
        assert info.inserted_ns.shape == (n,) and (info.inserted_ns > 0).all()
        assert data["x"] is given["x"] if given else len(data["x"]) == n
    assert set(info.key["shard"]) == {0, 1}
    unique = np.unique(info.key)
    assert client.update_priorities("uniform", unique, 2.0) == len(unique)
    client.mutate_priorities("uniform", deletes=list(unique))
    assert client.update_priorities("uniform", unique, 3.0) == 0


@each("compress", ["none", "lz4"])
def test_rows_of_near_shards_are_in_their_places(
    make_server: Callable[..., reverb.Server], monkeypatch: pytest.MonkeyPatch, compress: str
) -> None:
    """Items of several steps and columns, whole rows of blocks and trajectories, in one batch."""
    options: Any = {"compress": compress}
    tables = [
        [
            reverb.Table(
                "uniform",
                selectors.Uniform(),
                selectors.Fifo(),
                1000,
                rate_limiters.MinSize(1),
                seed=seed,
                **options,
            )
        ]
        for seed in range(2)
    ]
    servers = [make_server(each) for each in tables]
    values: dict[Any, float] = {}
    for number, server in enumerate(servers):
        with reverb.Client(server.address) as client, client.trajectory_writer(3) as writer:
            for i in range(60):
                value = 1000.0 * number + i
                writer.append({"wide": np.full(200, value), "pair": (value, np.int8(i))})
                if i < 2:
                    continue
                history = writer.history
                key = writer.create_item(
                    "uniform",
                    1.0,
                    {
                        "wide": history["wide"][-3:] if i % 2 else history["wide"][-3::1],
                        "last": (history["pair"][0][-1], history["pair"][1][-1]),
                    },
                )
                values[number, key] = value
            writer.end_episode()
    with reverb.ShardedClient([s.address for s in servers], seed=5) as sharded:
        in_one_thread(sharded, monkeypatch)
        info, data = sharded.sample_batch("uniform", 400, 10.0)
    expected = np.array([values[key] for key in info.key.tolist()])
    np.testing.assert_array_equal(data["last"][0], expected)
    np.testing.assert_array_equal(data["last"][1], expected % 1000)
    steps = expected[:, None, None] + np.array([-2.0, -1.0, 0.0])[:, None]
    np.testing.assert_array_equal(data["wide"], np.broadcast_to(steps, (400, 3, 200)))


def test_items_of_two_kinds_are_refused_and_not_lost(make: Make) -> None:
    client, servers = make(("shm", "shm"))
    with reverb.Client(servers[0].address) as one, reverb.Client(servers[1].address) as other:
        one.insert_batch("queue", {"x": np.arange(2.0)})
        other.insert_batch("queue", {"x": np.arange(2, 4, dtype=np.float32)})
    with pytest.raises(errors.InvalidArgumentError, match="cannot be stacked"):
        client.sample_batch("queue", 4, 10.0)
    drawn = [client.sample_batch("queue", 1, 10.0).data["x"].item() for _ in range(4)]
    assert sorted(drawn) == [0.0, 1.0, 2.0, 3.0]


def test_arrays_that_do_not_fit_lose_nothing(make: Make) -> None:
    client, servers = make(("shm", "shm"))
    for number, server in enumerate(servers):
        fill(server, "queue", 10 * number, [1.0] * 3)
    wrong = ({"x": np.zeros(5)}, {"x": np.zeros(6, np.int64)}, {"y": np.zeros(6)}, [np.zeros(6)])
    for out in wrong:
        with pytest.raises(errors.InvalidArgumentError, match="out"):
            client.sample_batch("queue", 6, 10.0, out)
    longer = {"x": np.zeros((8, 2))[:, 0]}
    batch = client.sample_batch("queue", 6, 10.0, longer)
    assert sorted(longer["x"][:6]) == sorted(batch.data["x"]) == [0, 1, 2, 10, 11, 12]


def _child(sender: Any, client: reverb.ShardedClient) -> None:
    value = client.sample_batch("uniform", 64, 20.0).data["x"]
    client.insert({"x": np.float64(77.0)}, {"queue": 1.0})
    sender.send(sorted(set(value.tolist())))
    client.close()


@each("method", ["fork", "spawn"])
def test_other_processes_use_it(make: Make, run_processes: Any, method: str) -> None:
    client, servers = make(("shm", "tcp://"))
    fill(servers[0], "uniform", 0, [1.0])
    fill(servers[1], "uniform", 1, [1.0])
    client.sample_batch("uniform", 4, 10.0)
    assert run_processes(method, [(_child, (client,))]) == [[0.0, 1.0]]
    assert client.server_info()["queue"].current_size == 1
    assert pickle.loads(pickle.dumps(client)).server_addresses == client.server_addresses


def test_threads_share_it(make: Make) -> None:
    client, _ = make(("shm", "tcp://"))
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(20):
                client.insert_batch("prioritized", rows(100 * number + i), 1.0, 20.0)
                batch = client.sample_batch("prioritized", 8, 20.0)
                client.update_priorities("prioritized", batch.info.key, batch.info.priority + 1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert client.server_info()["prioritized"].current_size == 80


# ---------------------------------------------------------------- shards that die


@contextmanager
def busy(client: reverb.ShardedClient) -> Iterator[Callable[[], None]]:
    """Samples, updates and inserts all the while; gives a function that waits for some more.

    None of the calls may fail.
    """
    stop = threading.Event()
    failures: list[BaseException] = []
    counts = Counter({"sample": 0, "insert": 0})

    def sample() -> None:
        info = client.sample_batch("uniform", 16, 60.0).info
        client.update_priorities("uniform", info.key, 1.0)

    def insert() -> None:
        client.insert_batch("uniform", rows(counts["insert"]), 1.0, 60.0)

    def work(what: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                what()
                counts[what.__name__] += 1
        except BaseException as error:
            failures.append(error)

    def go_on() -> None:
        before = dict(counts)
        wait_until(
            lambda: failures or all(counts[name] > n + 10 for name, n in before.items()), "work"
        )
        assert not failures

    threads = [threading.Thread(target=work, args=(what,)) for what in (sample, insert)]
    for thread in threads:
        thread.start()
    try:
        yield go_on
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


@each("recover", [True, False])
def test_a_killed_shard_is_left_out_until_it_is_back(
    make_server: Callable[..., reverb.Server],
    others: Callable[[], Other],
    store_name: str,
    caplog: pytest.LogCaptureFixture,
    recover: bool,
) -> None:
    """Killed in the middle of sampling and inserting; back with what it had, or empty."""
    port = free_port()
    other = others()
    other.call("serve", store_name, make_tables(), port=port)
    server = make_server(make_tables(), port=free_port())
    where = [f"tcp://127.0.0.1:{server.port}", f"tcp://127.0.0.1:{port}"]
    caplog.set_level(logging.WARNING, "shmreplay")

    def said(what: str) -> list[str]:
        return [r.getMessage() for r in caplog.records if what in r.getMessage()]

    with reverb.ShardedClient(where, PATIENCE, seed=3) as client:
        for value in range(20):
            client.insert_batch("uniform", rows(value), 1.0)
        old = client.sample_batch("uniform", 64, 20.0).info.key
        assert set(old["shard"]) == {0, 1}
        with busy(client) as go_on:
            go_on()
            # Not before: else a machine that is slow for a moment loses it as well.
            client._group.shards[1].client._connected().link.timeout = 0.5  # type: ignore[attr-defined]
            other.kill()
            wait_until(lambda: not client.shards[1].up, "noticing")
            go_on()
            (line,) = said("is left out")
            assert line.startswith(f"shard 1 ({where[1]})")
            assert client.shards[1].problem and client.shards[0].up
        size = server.localhost_client().server_info()["uniform"].current_size
        wait_until(lambda: client._group.shards[0].tables["uniform"].current_size == size, "a look")
        info = client.sample_batch("uniform", 8, 20.0).info
        np.testing.assert_allclose(info.probability, 1 / size)
        np.testing.assert_array_equal(info.key["shard"], 0)
        other = others()
        other.call("serve", store_name, make_tables(), port=port, recover=recover)
        wait_until(lambda: client.shards[1].up, "its return")
        wait_until(lambda: len(said(") is back")) == 1, "the line that says so")
        found = client.update_priorities("uniform", old[old["shard"] == 1], 1.0)
        assert (found > 0) == recover
        with busy(client) as go_on:
            go_on()
            wait_until(
                lambda: 1 in client.sample_batch("uniform", 64, 60.0).info.key["shard"],
                "samples of the shard that is back",
            )
        other.call("stop")


def test_a_local_shard_that_was_stopped_and_started_anew(
    make_server: Callable[..., reverb.Server], unique_name: Callable[[], str]
) -> None:
    servers = [make_server(make_tables(), name=unique_name()) for _ in range(2)]
    with reverb.ShardedClient([s.address for s in servers], seed=1) as client:
        for value in range(4):
            client.insert_batch("uniform", rows(value), 1.0)
        old = client.sample_batch("uniform", 32, 10.0).info.key
        servers[1].stop()
        for _ in range(3):
            client.insert_batch("uniform", rows(9.0), 1.0)
            assert not client.sample_batch("uniform", 32, 10.0).info.key["shard"].any()
        assert [s.up for s in client.shards] == [True, False]
        assert client.update_priorities("uniform", old, 1.0) == np.count_nonzero(old["shard"] == 0)
        make_server(make_tables(), name=servers[1].name)
        wait_until(lambda: client.shards[1].up, "its return")
        # Empty: nothing is drawn of it, and its old keys are of no item.
        assert not client.sample_batch("uniform", 32, 10.0).info.key["shard"].any()
        assert client.update_priorities("uniform", old[old["shard"] == 1], 1.0) == 0
        for _ in range(8):
            client.insert_batch("uniform", rows(5.0), 1.0)
        wait_until(
            lambda: client.sample_batch("uniform", 32, 10.0).info.key["shard"].any(), "its share"
        )


def test_where_all_are_down_the_error_names_each_and_why(make: Make) -> None:
    client, servers = make(("shm", "tcp://", ""))
    client.insert_batch("uniform", rows(1.0), 1.0)
    for server in servers:
        server.stop()
    for call in (
        lambda: client.sample_batch("uniform", 1),
        lambda: client.insert({"x": np.float64(1.0)}, {"uniform": 1.0}),
        lambda: client.server_info(),
        lambda: client.trajectory_writer(1),
    ):
        with pytest.raises(errors.ServerClosedError, match="none of the 3 shards") as raised:
            call()
        for number, where in enumerate(client.server_addresses):
            assert f"shard {number} ({where}): " in str(raised.value)
    assert not any(status.up for status in client.shards)


def test_shards_that_never_were_there(make_server: Callable[..., reverb.Server]) -> None:
    """One is left out from the beginning, all of them are an error."""
    server = make_server(make_tables())
    nobody = f"tcp://127.0.0.1:{free_port()}"
    with reverb.ShardedClient([nobody, server.address], IMPATIENCE) as client:
        client.insert_batch("uniform", rows(3.0), 1.0)
        assert client.sample_batch("uniform", 2, 10.0).data["x"].tolist() == [3.0, 3.0]
        assert [status.up for status in client.shards] == [False, True]
    with reverb.ShardedClient([nobody], IMPATIENCE) as client:
        with pytest.raises(errors.ServerClosedError, match="none of the 1 shards"):
            client.sample_batch("uniform", 2)


def test_a_closed_client_says_so(make: Make) -> None:
    client, _ = make(("shm", "tcp://"))
    client.insert_batch("uniform", rows(3.0), 1.0)
    client.sample_batch("uniform", 2, 10.0)
    client.close()
    client.close()
    for call in (
        lambda: client.sample_batch("uniform", 1),
        lambda: client.insert({"x": 1.0}, {"uniform": 1.0}),
        lambda: client.shards,
    ):
        with pytest.raises(errors.ServerClosedError, match="closed client"):
            call()


def test_nothing_runs_on_without_it(make: Make) -> None:
    client, _ = make(("shm", "tcp://"))
    client.insert_batch("uniform", rows(3.0), 1.0)
    client.sample_batch("uniform", 2, 10.0)
    client.close()
    mine = [t for t in threading.enumerate() if t.name.startswith("shmreplay-shard")]
    for thread in mine:
        thread.join(60.0)
        assert not thread.is_alive()
