"""Random selectors draw what they say they draw: chi-square tests at awkward sizes, and seeds.

All tables are seeded, so a test gives the same p-value each time it runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chi2

import shmreplay as reverb

TABLE = "table"
SIZES = (1, 2, 3, 7, 1000, 65537)
# A table has no more stripes than items.
SIZES_AND_STRIPES = [(size, stripes) for size in SIZES for stripes in (1, 3) if stripes <= size]
BATCH = 4096
# A true distribution fails one test in 10,000, and then always.
P_MIN = 1e-4
# Draws for each item of a table: enough for the approximation by a chi-square.
DRAWS_PER_ITEM = 10
DRAWS_MIN = 20_000

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def assert_follows(counts: Ints, probabilities: Floats) -> None:
    """Fails if the counts do not look like draws from `probabilities`.

    Args:
      counts: how often each outcome came, int64[N].
      probabilities: of each outcome, float64[N]; their sum is 1.
    """
    possible = probabilities > 0.0
    assert not counts[~possible].any(), "an item of weight zero was drawn"
    counts, probabilities = counts[possible], probabilities[possible]
    if len(counts) == 1:
        return
    expected = counts.sum() * probabilities
    assert expected.min() >= 5.0, "too few draws for a chi-square test"
    statistic = float((np.square(counts - expected) / expected).sum())
    freedom = len(counts) - 1
    assert chi2.sf(statistic, freedom) > P_MIN, f"chi-square {statistic} with {freedom} degrees"
    if freedom >= 6:
        # Draws that are more even than chance are not independent.
        assert chi2.cdf(statistic, freedom) > P_MIN, f"{statistic} with {freedom} is too even"


def insert(client: reverb.Client, ids: Sequence[int] | Ints, priorities: Any = 1.0) -> list[int]:
    """Inserts one row for each id and returns the keys."""
    ids = np.asarray(ids, np.int64)
    given = np.broadcast_to(np.asarray(priorities, np.float64), ids.shape)
    keys: list[int] = []
    for start in range(0, len(ids), BATCH):
        rows = slice(start, start + BATCH)
        batch = client.insert_batch(TABLE, {"id": ids[rows]}, given[rows], timeout=0)
        keys.extend(int(key) for key in batch)
    return keys


def draw(client: reverb.Client, count: int) -> tuple[Ints, Floats]:
    """The ids of `count` samples, and the probabilities they report."""
    ids, probabilities = [], []
    while count > 0:
        info, data = client.sample_batch(TABLE, min(count, BATCH), timeout=0)
        ids.append(data["id"])
        probabilities.append(info.probability)
        count -= len(info.key)
    return np.concatenate(ids), np.concatenate(probabilities)


def make_table(sampler: Any, remover: Any, max_size: int, **options: Any) -> reverb.Table:
    limiter = reverb.rate_limiters.MinSize(1)
    return reverb.Table(TABLE, sampler, remover, max_size, limiter, **options)


def assert_samples_follow(client: reverb.Client, weights: Floats) -> None:
    """Draws from a table that holds the ids with a weight above zero, and no others.

    Args:
      client: of the table.
      weights: of each id, float64[N].
    """
    probabilities = weights / math.fsum(weights)
    ids, reported = draw(client, max(DRAWS_MIN, DRAWS_PER_ITEM * len(weights)))
    np.testing.assert_allclose(reported, probabilities[ids], rtol=1e-12)
    assert_follows(np.bincount(ids, minlength=len(weights)), probabilities)


@pytest.mark.parametrize(("size", "stripes"), SIZES_AND_STRIPES)
def test_uniform_sampling(make_server: Callable[..., Any], size: int, stripes: int) -> None:
    selectors = reverb.selectors
    table = make_table(selectors.Uniform(), selectors.Fifo(), size, seed=size, stripes=stripes)
    with reverb.Client(make_server([table], capacity=64 << 20).address) as client:
        # The table is full twice over: only the second lot stays.
        insert(client, np.arange(-size, size))
        ids, reported = draw(client, max(DRAWS_MIN, DRAWS_PER_ITEM * size))
        assert (reported == 1.0 / size).all()
        assert_follows(np.bincount(ids, minlength=size), np.full(size, 1.0 / size))
        client.check()


@pytest.mark.parametrize("exponent", [1.0, 0.6])
@pytest.mark.parametrize(("size", "stripes"), SIZES_AND_STRIPES)
def test_prioritized_sampling(
    make_server: Callable[..., Any], size: int, exponent: float, stripes: int
) -> None:
    selectors = reverb.selectors
    sampler = selectors.Prioritized(exponent)
    table = make_table(sampler, selectors.Fifo(), size, seed=size, stripes=stripes)
    rng = np.random.default_rng(size)
    priorities = rng.uniform(1.0, 3.0, size)
    # Some items of weight zero, the last one among them, where a draw past the end would land.
    priorities[1 :: max(2, size // 5)] = 0.0
    if size > 2:
        priorities[-1] = 0.0
    with reverb.Client(make_server([table], capacity=64 << 20).address) as client:
        insert(client, np.arange(-size, 0), 7.0)
        insert(client, np.arange(size), priorities)
        weights = np.where(priorities == 0.0, 0.0, priorities**exponent)
        assert_samples_follow(client, weights)
        client.check()


@pytest.mark.parametrize("stripes", [1, 3])
def test_prioritized_sampling_where_all_weights_are_zero(
    make_server: Callable[..., Any], stripes: int
) -> None:
    selectors = reverb.selectors
    table = make_table(selectors.Prioritized(1.0), selectors.Fifo(), 100, seed=4, stripes=stripes)
    with reverb.Client(make_server([table]).address) as client:
        insert(client, range(7), 0.0)
        ids, reported = draw(client, DRAWS_MIN)
        assert (reported == 1.0 / 7.0).all()
        assert_follows(np.bincount(ids, minlength=7), np.full(7, 1.0 / 7.0))


@pytest.mark.parametrize("stripes", [1, 3])
@pytest.mark.parametrize("exponent", [None, 1.0, 0.6])
@pytest.mark.parametrize("size", [3, 7, 1000])
def test_sampling_after_inserts_updates_and_deletes(
    make_server: Callable[..., Any], size: int, exponent: float | None, stripes: int
) -> None:
    """`exponent` None is the uniform sampler."""
    selectors = reverb.selectors
    sampler = selectors.Uniform() if exponent is None else selectors.Prioritized(exponent)
    table = make_table(sampler, selectors.Fifo(), size, seed=size + 1, stripes=stripes)
    rng = np.random.default_rng(size)
    present: dict[int, tuple[int, float]] = {}
    with reverb.Client(make_server([table]).address) as client:
        for turn in range(4):
            ids = np.arange(size) + turn * size
            priorities = rng.uniform(0.5, 2.0, size)
            keys = insert(client, ids, priorities)
            present = {
                int(id_): (key, priority)
                for id_, key, priority in zip(ids, keys, priorities, strict=True)
            }
            changed = rng.choice(ids, size // 2, replace=False)
            for id_ in changed:
                present[int(id_)] = (present[int(id_)][0], float(rng.choice([0.0, 1.0, 3.0])))
            found = client.update_priorities(
                TABLE,
                [present[int(id_)][0] for id_ in changed],
                [present[int(id_)][1] for id_ in changed],
            )
            assert found == len(changed)
            dropped = [int(id_) for id_ in rng.choice(ids, size // 3, replace=False)]
            client.mutate_priorities(TABLE, None, [present.pop(id_)[0] for id_ in dropped])
            client.check()
            weights = np.zeros(4 * size)
            for id_, (_, priority) in present.items():
                nothing = exponent is not None and priority == 0.0
                weights[id_] = 0.0 if nothing else priority ** (exponent or 0.0)
            if weights.any():
                assert_samples_follow(client, weights)


def test_epochs_come_in_random_order(make_server: Callable[..., Any]) -> None:
    table = reverb.Table(
        TABLE,
        reverb.selectors.Epoch(),
        reverb.selectors.Fifo(),
        100,
        reverb.rate_limiters.MinSize(1),
        seed=3,
    )
    client = make_server([table]).localhost_client()
    insert(client, range(4))
    passes = 6000
    batches = [client.sample_batch(TABLE, BATCH) for _ in range(4 * passes // BATCH + 1)]
    ids = np.concatenate([batch.data["id"] for batch in batches])[: 4 * passes].reshape(-1, 4)
    chances = np.concatenate([batch.info.probability for batch in batches])[: 4 * passes]
    assert (np.sort(ids, axis=1) == np.arange(4)).all(), "something came twice in a pass"
    np.testing.assert_array_equal(chances.reshape(-1, 4)[0], [1 / 4, 1 / 3, 1 / 2, 1])
    np.testing.assert_array_equal(chances.reshape(-1, 4), np.tile(chances[:4], (passes, 1)))
    # Every order of a pass is as likely as every other, and the next pass does not depend on it.
    codes = (ids[:, :3] * np.array([16, 4, 1])).sum(axis=1)
    _, orders = np.unique(codes, return_counts=True)
    assert len(orders) == 24
    assert_follows(orders, np.full(24, 1 / 24))
    seams = np.bincount(ids[:-1, 3] * 4 + ids[1:, 0], minlength=16)
    assert_follows(seams, np.full(16, 1 / 16))
    client.close()


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
@pytest.mark.parametrize(("size", "stripes"), [(2, 1), (2, 2), (3, 1), (3, 3)])
def test_single_samples_do_not_depend_on_the_one_before(
    make_server: Callable[..., Any], kind: str, size: int, stripes: int
) -> None:
    selectors = reverb.selectors
    sampler = selectors.Uniform() if kind == "uniform" else selectors.Prioritized(1.0)
    table = make_table(sampler, selectors.Fifo(), size, seed=11, stripes=stripes)
    with reverb.Client(make_server([table]).address) as client:
        insert(client, range(size))
        drawn = [int(client.sample_batch(TABLE, 1, timeout=0).data["id"][0]) for _ in range(8_001)]
    pairs = np.array(drawn[:-1]) * size + np.array(drawn[1:])
    # Each row of a contingency table by itself: given the sample before, all are equally likely.
    for before in range(size):
        counts = np.bincount(pairs, minlength=size**2)[before * size : (before + 1) * size]
        assert_follows(counts, np.full(size, 1.0 / size))


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
@pytest.mark.parametrize("stripes", [1, 3])
def test_batches_vary_as_independent_draws_do(
    make_server: Callable[..., Any], kind: str, stripes: int
) -> None:
    """A batch that gave each stripe its exact share would vary less than it should."""
    selectors = reverb.selectors
    sampler = selectors.Uniform() if kind == "uniform" else selectors.Prioritized(1.0)
    table = make_table(sampler, selectors.Fifo(), 3, seed=12, stripes=stripes)
    rows, batches = 300, 400
    with reverb.Client(make_server([table]).address) as client:
        insert(client, range(3))
        counts = np.array(
            [
                np.bincount(client.sample_batch(TABLE, rows, timeout=0).data["id"], minlength=3)
                for _ in range(batches)
            ]
        )
    # Each batch gives a chi-square of two degrees; together they have two for each batch.
    statistic = float((np.square(counts - rows / 3) / (rows / 3)).sum())
    assert P_MIN < chi2.cdf(statistic, 2 * batches) < 1.0 - P_MIN


# ------------------------------------------------------------------------------ removers


def one_that_left(client: reverb.Client, keys: Sequence[int]) -> int:
    """Position of the one key among `keys` that is not in the table, by halving."""
    low, high = 0, len(keys)
    assert client.update_priorities(TABLE, keys, [1.0] * len(keys)) == len(keys) - 1
    while high - low > 1:
        middle = (low + high) // 2
        found = client.update_priorities(TABLE, keys[low:middle], [1.0] * (middle - low))
        low, high = (low, middle) if found < middle - low else (middle, high)
    return low


@pytest.mark.parametrize(
    ("size", "stripes"), [(1, 1), (2, 1), (2, 2), (6, 1), (6, 3), (100, 1), (100, 3)]
)
def test_uniform_removal(make_server: Callable[..., Any], size: int, stripes: int) -> None:
    selectors = reverb.selectors
    table = make_table(
        selectors.Uniform(), selectors.Uniform(), size, seed=size + 5, stripes=stripes
    )
    counts = np.zeros(size + 1, np.int64)
    with reverb.Client(make_server([table]).address) as client:
        for _ in range(2_000):
            counts[one_that_left(client, insert(client, range(size + 1)))] += 1
            client.reset(TABLE)
    # The new item enters before one leaves, and may be the one.
    assert_follows(counts, np.full(size + 1, 1.0 / (size + 1)))


@pytest.mark.parametrize("exponent", [1.0, 0.5, -1.0])
@pytest.mark.parametrize(
    ("size", "stripes"), [(1, 1), (2, 1), (2, 2), (6, 1), (6, 3), (50, 1), (50, 3)]
)
def test_prioritized_removal(
    make_server: Callable[..., Any], size: int, exponent: float, stripes: int
) -> None:
    selectors = reverb.selectors
    table = make_table(
        selectors.Uniform(),
        selectors.Prioritized(exponent),
        size,
        seed=size + 6,
        stripes=stripes,
    )
    priorities = np.random.default_rng(size).uniform(0.5, 2.0, size + 1)
    priorities[2::4] = 0.0
    counts = np.zeros(size + 1, np.int64)
    with reverb.Client(make_server([table]).address) as client:
        for _ in range(2_000):
            counts[one_that_left(client, insert(client, range(size + 1), priorities))] += 1
            client.reset(TABLE)
    weights = np.zeros(size + 1)
    weights[priorities > 0.0] = priorities[priorities > 0.0] ** exponent
    assert_follows(counts, weights / math.fsum(weights))


@pytest.mark.parametrize("stripes", [1, 2])
def test_removal_within_a_batch_goes_item_by_item(
    make_server: Callable[..., Any], stripes: int
) -> None:
    """A batch is inserted like so many single items: after each of them one leaves."""
    selectors = reverb.selectors
    table = make_table(selectors.Uniform(), selectors.Uniform(), 2, seed=9, stripes=stripes)
    counts = np.zeros(6, np.int64)
    with reverb.Client(make_server([table]).address) as client:
        for _ in range(4_000):
            keys = insert(client, range(2))
            keys += insert(client, range(2, 6))
            found = [client.update_priorities(TABLE, [key], [1.0]) for key in keys]
            assert sum(found) == 2
            counts += found
            client.reset(TABLE)
    # Each of four removals takes one of three: the later an item came, the fewer it had to survive.
    survival = (2 / 3) ** np.array([4, 4, 4, 3, 2, 1])
    expected = counts.sum() * survival / survival.sum()
    # Items compete for two places, so the counts vary less than in independent draws: the bound
    # holds all the more.
    statistic = float((np.square(counts - expected) / expected).sum())
    assert chi2.sf(statistic, 5) > P_MIN, f"survivors {counts}, expected {expected}"


# ------------------------------------------------------------------------------ seeds


def scripted_run(address: str) -> list[Any]:
    """What one client sees of a run with inserts, removals, updates and samples of every kind."""
    seen: list[Any] = []
    with reverb.Client(address) as client:
        for turn in range(20):
            keys = insert(client, range(turn * 10, turn * 10 + 10), np.arange(10) % 3 + 1.0)
            client.update_priorities(TABLE, keys[::3], [5.0] * len(keys[::3]))
            info, data = client.sample_batch(TABLE, 16, timeout=0)
            seen += [data["id"].tolist(), info.probability.tolist(), info.times_sampled.tolist()]
            with client.borrow(TABLE, 2, timeout=0) as loans:
                seen += [int(data["id"]) for _, data in loans]
            for one in client.sample(TABLE, 3, emit_timesteps=False, timeout=0):
                seen.append((int(one.data[0]), one.info.probability))
    return seen


@pytest.mark.parametrize("stripes", [1, 3])
@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_same_seed_and_same_run_give_the_same_samples(
    make_server: Callable[..., Any], kind: str, stripes: int
) -> None:
    selectors = reverb.selectors

    def run(seed: int | None) -> list[Any]:
        pair = [
            selectors.Uniform() if kind == "uniform" else selectors.Prioritized(0.7)
            for _ in range(2)
        ]
        table = make_table(pair[0], pair[1], 40, seed=seed, stripes=stripes)
        with make_server([table]) as server:
            return scripted_run(server.address)

    first = run(7)
    assert run(7) == first
    assert run(8) != first
    # Without a seed no two tables draw alike.
    assert run(None) != run(None)


def send_ids(conn: Connection, client_or_address: Any) -> None:
    """Sends this process's id and what it draws, through a client of its own or its parent's."""
    client = client_or_address
    if isinstance(client, str):
        client = reverb.Client(client)
    conn.send((os.getpid(), draw(client, 200)[0].tolist()))
    client.close()


@pytest.mark.parametrize(
    ("kind", "start_method"),
    [
        ("uniform", "fork"),
        ("prioritized", "fork"),
        ("uniform", "spawn"),
        ("prioritized", "forkserver"),
    ],
)
def test_processes_draw_different_streams(
    make_server: Callable[..., Any],
    run_processes: Callable[..., list[Any]],
    kind: str,
    start_method: str,
) -> None:
    selectors = reverb.selectors
    sampler = selectors.Uniform() if kind == "uniform" else selectors.Prioritized(1.0)
    table = make_table(sampler, selectors.Fifo(), 1000, seed=3)
    server = make_server([table])
    with reverb.Client(server.address) as client:
        insert(client, range(1000))
        # The parent has begun its stream before the children are made. A child that is given the
        # client itself attaches anew, be it by fork or by pickle.
        drawn = [draw(client, 200)[0].tolist()]
        arguments = [server.address, server.address, client, client]
        results = run_processes(start_method, [(send_ids, (given,)) for given in arguments])
        drawn += [ids for _, ids in results]
        drawn.append(draw(client, 200)[0].tolist())
    assert len({process for process, _ in results}) == len(arguments)
    assert len({tuple(ids) for ids in drawn}) == len(drawn)
