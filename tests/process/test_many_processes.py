"""Four writing and two sampling processes on one table: nothing is lost, doubled or miscounted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import rate_limiters, selectors

TABLE = "table"
START_METHODS = ("fork", "spawn", "forkserver")
METHODS_AND_STRIPES = [("fork", 1), ("fork", 4), ("spawn", 4), ("forkserver", 1)]
WRITERS = 4
SAMPLERS = 2
# Seconds after which a call that waits for another process is taken to hang.
DEADLINE = 60.0
# Ids of a writer's items start at its number times this.
STRIDE = 1_000_000

RunProcesses = Callable[[str, Sequence[tuple[Callable[..., None], tuple[Any, ...]]]], list[Any]]
MakeServer = Callable[..., reverb.Server]


def ids_of(writer: int, count: int) -> range:
    return range(writer * STRIDE, writer * STRIDE + count)


def write(conn: Connection, address: str, writer: int, count: int) -> None:
    """Inserts `count` items and sends their keys in order.

    Even writers insert batches of up to eight; odd ones use a trajectory writer, whose items
    overlap in storage but hold one step each.
    """
    ids = ids_of(writer, count)
    keys: list[int] = []
    with reverb.Client(address) as client:
        if writer % 2 == 0:
            while len(keys) < count:
                part = np.array(ids[len(keys) : len(keys) + 1 + len(keys) % 8], np.int64)
                batch = client.insert_batch(TABLE, {"id": part}, 1.0, timeout=DEADLINE)
                keys.extend(int(key) for key in batch)
        else:
            with client.trajectory_writer(num_keep_alive_refs=4) as trajectories:
                for id_ in ids:
                    trajectories.append({"id": np.int64(id_)})
                    last = {"id": trajectories.history["id"][-1]}
                    key = trajectories.create_item(TABLE, 1.0, last)
                    assert key is not None
                    keys.append(key)
    conn.send(keys)


def write_through_the_limiter(conn: Connection, address: str, writer: int, count: int) -> None:
    """Inserts `count` items, which may have to wait, in one of three ways."""
    with reverb.Client(address) as client:
        ids = ids_of(writer, count)
        if writer % 3 == 0:
            for id_ in ids:
                client.insert({"id": np.int64(id_)}, {TABLE: 1.0}, timeout=DEADLINE)
        elif writer % 3 == 1:
            for start in range(0, count, 5):
                part = np.array(ids[start : start + 5], np.int64)[:, None]
                client.insert_batch(TABLE, {"id": part}, timeout=DEADLINE)
        else:
            with client.trajectory_writer(num_keep_alive_refs=1) as trajectories:
                for id_ in ids:
                    trajectories.append({"id": np.int64(id_)})
                    trajectories.create_item(TABLE, 1.0, {"id": trajectories.history["id"][-1:]})
                trajectories.flush(timeout_ms=int(1000 * DEADLINE))
    conn.send(None)


def sample(conn: Connection, address: str, count: int, stripes: int) -> None:
    """Draws `count` samples in batches, and sends (key, id, times_sampled) of each.

    In one stripe a draw's probability is 1/size exactly, whatever others do meanwhile. Of several,
    one is chosen by the sizes of that moment and may have another size when it is drawn from: the
    probability is that of this draw, near 1/size while others write.
    """
    seen: list[tuple[int, int, int]] = []
    with reverb.Client(address) as client:
        while len(seen) < count:
            batch = min(7, count - len(seen))
            info, data = client.sample_batch(TABLE, batch, timeout=DEADLINE)
            if stripes == 1:
                assert (info.probability == 1.0 / info.table_size).all()
            else:
                assert (0 < info.probability).all() and (info.probability <= 1).all()
            seen.extend(
                zip(
                    info.key.tolist(),
                    data["id"].tolist(),
                    info.times_sampled.tolist(),
                    strict=True,
                )
            )
    conn.send(seen)


def consume(conn: Connection, address: str, count: int, one_by_one: bool) -> None:
    """Takes `count` items of shape [1], which came into the table in several ways.

    Sends their ids in the order of arrival.
    """
    seen: list[int] = []
    with reverb.Client(address) as client:
        if one_by_one:
            samples = client.sample(TABLE, count, emit_timesteps=False, timeout=DEADLINE)
            seen.extend(int(one.data[0][0]) for one in samples)
        while len(seen) < count:
            with client.borrow(TABLE, min(5, count - len(seen)), timeout=DEADLINE) as loans:
                seen.extend(int(one.data["id"][0]) for one in loans)
    conn.send(seen)


def sample_and_watch_limiter(conn: Connection, address: str, count: int) -> None:
    """Draws `count` samples; after each batch, sends what the limiter's difference was then."""
    seen = 0
    differences: list[tuple[int, int]] = []
    with reverb.Client(address) as client:
        while seen < count:
            with client.borrow(TABLE, min(3, count - seen), timeout=DEADLINE) as loans:
                seen += len(loans)
            limiter = client.server_info()[TABLE].rate_limiter_info
            differences.append((limiter.insert_stats.completed, limiter.sample_stats.completed))
    conn.send(differences)


def completed(client: reverb.Client) -> tuple[int, int]:
    """Inserts and samples that the table has counted."""
    limiter = client.server_info()[TABLE].rate_limiter_info
    return limiter.insert_stats.completed, limiter.sample_stats.completed


@pytest.mark.parametrize(("start_method", "stripes"), METHODS_AND_STRIPES)
def test_uniform_table_counts_and_contents_are_exact(
    make_server: MakeServer, run_processes: RunProcesses, start_method: str, stripes: int
) -> None:
    count, draws = 300, 1500
    table = reverb.Table(
        TABLE,
        selectors.Uniform(),
        selectors.Fifo(),
        max_size=WRITERS * count,
        rate_limiter=rate_limiters.MinSize(1),
        seed=1,
        stripes=stripes,
    )
    server = make_server([table])
    results = run_processes(
        start_method,
        [(write, (server.address, writer, count)) for writer in range(WRITERS)]
        + [(sample, (server.address, draws, stripes)) for _ in range(SAMPLERS)],
    )
    id_of = {
        key: id_
        for writer, keys in enumerate(results[:WRITERS])
        for key, id_ in zip(keys, ids_of(writer, count), strict=True)
    }
    assert len(id_of) == WRITERS * count
    drawn = [one for seen in results[WRITERS:] for one in seen]
    assert all(id_of[key] == id_ for key, id_, _ in drawn)
    # Every sample of an item has a number of its own.
    times: dict[int, list[int]] = {}
    for key, _, times_sampled in drawn:
        times.setdefault(key, []).append(times_sampled)
    assert all(sorted(t) == list(range(1, len(t) + 1)) for t in times.values())

    with reverb.Client(server.address) as client:
        client.check()
        info = client.server_info()[TABLE]
        assert info.current_size == WRITERS * count
        assert completed(client) == (WRITERS * count, SAMPLERS * draws)
        assert info.num_unique_samples == len(times)
        assert info.num_deleted_episodes == 0
        assert client.update_priorities(TABLE, list(id_of), [2.0] * len(id_of)) == len(id_of)
        # Every item is still there with the data and the count that it should have.
        rest = dict(id_of)
        for _ in range(10_000):
            key, id_, times_sampled = one_sample(client)
            times[key] = [*times.get(key, []), times_sampled]
            assert times_sampled == len(times[key])
            assert id_of[key] == id_
            rest.pop(key, None)
            if not rest:
                break
            if len(times[key]) > 1:
                # Makes way for the others.
                client.mutate_priorities(TABLE, None, [key])
        assert not rest
        client.check()


def one_sample(client: reverb.Client) -> tuple[int, int, int]:
    info, data = client.sample_batch(TABLE, 1, timeout=0)
    return int(info.key[0]), int(data["id"][0]), int(info.times_sampled[0])


@pytest.mark.parametrize("start_method", START_METHODS)
def test_queue_delivers_each_item_exactly_once(
    make_server: MakeServer, run_processes: RunProcesses, start_method: str
) -> None:
    count = 200
    server = make_server([reverb.Table.queue(TABLE, max_size=16)])
    share = WRITERS * count // SAMPLERS
    results = run_processes(
        start_method,
        [(write_through_the_limiter, (server.address, w, count)) for w in range(WRITERS)]
        + [(consume, (server.address, share, number == 0)) for number in range(SAMPLERS)],
    )
    arrivals = results[WRITERS:]
    delivered = Counter(id_ for seen in arrivals for id_ in seen)
    assert delivered == Counter(id_ for w in range(WRITERS) for id_ in ids_of(w, count))
    for seen in arrivals:
        for writer in range(WRITERS):
            mine = [id_ for id_ in seen if id_ // STRIDE == writer]
            assert mine == sorted(mine), f"items of writer {writer} overtook each other"
    with reverb.Client(server.address) as client:
        client.check()
        info = client.server_info()[TABLE]
        assert (info.current_size, info.num_episodes) == (0, 0)
        assert info.num_unique_samples == WRITERS * count
        assert completed(client) == (WRITERS * count, WRITERS * count)


@pytest.mark.parametrize(("start_method", "stripes"), METHODS_AND_STRIPES)
def test_constant_eviction_leaves_the_newest_items(
    make_server: MakeServer, run_processes: RunProcesses, start_method: str, stripes: int
) -> None:
    count, max_size = 1000, 50
    table = reverb.Table(
        TABLE,
        selectors.Uniform(),
        selectors.Fifo(),
        max_size=max_size,
        rate_limiter=rate_limiters.MinSize(1),
        stripes=stripes,
    )
    server = make_server([table])
    results = run_processes(
        start_method,
        [(write, (server.address, writer, count)) for writer in range(WRITERS)]
        + [(sample, (server.address, 1000, stripes)) for _ in range(SAMPLERS)],
    )
    with reverb.Client(server.address) as client:
        client.check()
        info = client.server_info()[TABLE]
        assert info.current_size == max_size
        assert completed(client) == (WRITERS * count, SAMPLERS * 1000)
        left = 0
        for keys in results[:WRITERS]:
            # The oldest leave first, so of each writer the last ones stay.
            there = [client.update_priorities(TABLE, [key], [1.0]) == 1 for key in keys]
            assert there == sorted(there)
            left += sum(there)
        assert left == max_size


@pytest.mark.parametrize("start_method", START_METHODS)
def test_limiter_is_never_passed_where_it_must_hold(
    make_server: MakeServer, run_processes: RunProcesses, start_method: str
) -> None:
    count, ratio, min_size, buffer = 100, 2.0, 10, 8.0
    table = reverb.Table(
        TABLE,
        selectors.Prioritized(1.0),
        selectors.Fifo(),
        max_size=60,
        rate_limiter=rate_limiters.SampleToInsertRatio(ratio, min_size, buffer),
    )
    server = make_server([table])
    # At the end the limiter stands in the middle of its range.
    draws = int(ratio * (WRITERS * count - min_size)) // SAMPLERS
    results = run_processes(
        start_method,
        [(write_through_the_limiter, (server.address, w, count)) for w in range(WRITERS)]
        + [(sample_and_watch_limiter, (server.address, draws)) for _ in range(SAMPLERS)],
    )
    low, high = ratio * min_size - buffer, ratio * min_size + buffer
    for inserts, samples in (pair for pairs in results[WRITERS:] for pair in pairs):
        assert inserts >= min_size
        assert low <= ratio * inserts - samples <= high
    with reverb.Client(server.address) as client:
        client.check()
        assert completed(client) == (WRITERS * count, SAMPLERS * draws)
        assert client.server_info()[TABLE].current_size == 60


def insert_through(conn: Connection, client: reverb.Client, id_: int) -> None:
    """Inserts one item through a client that another process made."""
    client.insert_batch(TABLE, {"id": np.array([id_])}, timeout=DEADLINE)
    client.close()
    conn.send(id_)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_client_travels_to_other_processes(
    make_server: MakeServer, run_processes: RunProcesses, start_method: str
) -> None:
    server = make_server([reverb.Table.queue(TABLE, max_size=10)])
    with reverb.Client(server.address) as client:
        client.insert_batch(TABLE, {"id": np.array([0])}, timeout=0)
        run_processes(start_method, [(insert_through, (client, id_)) for id_ in (1, 2)])
        # What the children did to their copies does not touch the parent's.
        ids = client.sample_batch(TABLE, 3, timeout=0).data["id"]
        assert ids[0] == 0
        assert sorted(ids.tolist()) == [0, 1, 2]
