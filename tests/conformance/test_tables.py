"""What Reverb's own tests pin of tables, rate limiters and selectors, a test for each fact."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import rate_limiters, selectors

TABLE = "table"
# Seconds after which a call that should go on at once is taken to hang.
DEADLINE = 30.0

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]
DETERMINISTIC: list[Any] = [selectors.Fifo, selectors.Lifo, selectors.MinHeap, selectors.MaxHeap]


def uniform_table(**options: Any) -> reverb.Table:
    usual: dict[str, Any] = {
        "name": TABLE,
        "sampler": selectors.Uniform(),
        "remover": selectors.Fifo(),
        "max_size": 1000,
        "rate_limiter": rate_limiters.MinSize(1),
    }
    return reverb.Table(**{**usual, **options})


def insert(client: reverb.Client, *ids: int, priority: Any = 1.0, timeout: float = 0) -> list[int]:
    """Inserts a row for each id; returns the keys."""
    batch = {"id": np.array(ids, np.int64)}
    return [int(key) for key in client.insert_batch(TABLE, batch, priority, timeout=timeout)]


def sample(client: reverb.Client, count: int = 1, timeout: float = 0) -> list[int]:
    """The ids of `count` samples, or of fewer if the limiter stops before."""
    ids = client.sample_batch(TABLE, count, timeout=timeout).data["id"]
    return [int(id_) for id_ in ids]


def sample_info(client: reverb.Client) -> Any:
    """The report of one sample, in numbers."""
    info = client.sample_batch(TABLE, 1, timeout=0).info
    return type(info)(*(column.item() for column in info))


def info_of(client: reverb.Client) -> Any:
    return client.server_info()[TABLE]


def is_there(client: reverb.Client, key: int) -> bool:
    return bool(client.update_priorities(TABLE, [key], [1.0]) == 1)


def expect_wait(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Fails unless the call would have to wait."""
    with pytest.raises(reverb.DeadlineExceededError):
        call(*args, **options)


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future[Any]]]:
    """Runs a call on a thread of its own; returns once the thread is about to make the call."""
    with ThreadPoolExecutor(max_workers=16) as pool:

        def start(call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
            running = threading.Event()

            def run() -> Any:
                running.set()
                return call(*args, **options)

            future = pool.submit(run)
            assert running.wait(DEADLINE)
            return future

        yield start


# ------------------------------------------------------------------------------ table


def test_table_keeps_the_name_it_was_given(make_client: MakeClient) -> None:
    table = uniform_table(name="a name")
    _, client = make_client([table])
    assert table.name == "a name"
    assert client.server_info()["a name"].name == "a name"


def test_inserted_item_is_present_with_its_priority_and_zero_samples(
    make_client: MakeClient,
) -> None:
    _, client = make_client([uniform_table()])
    (key,) = insert(client, 1, priority=123.0)
    assert info_of(client).current_size == 1
    assert info_of(client).num_unique_samples == 0
    first = sample_info(client)
    assert (first.key, first.priority, first.times_sampled) == (key, 123.0, 1)


def test_updates_with_unknown_keys_are_skipped_the_known_ones_applied(
    make_client: MakeClient,
) -> None:
    _, client = make_client([uniform_table()])
    (key,) = insert(client, 1, priority=123.0)
    client.mutate_priorities(TABLE, {key: 456.0, 5: 55.0, 2**64 - 1: 1.0}, None)
    assert sample_info(client).priority == 456.0
    assert client.update_priorities(TABLE, [5, key, 2**64 - 1], [1.0, 789.0, 2.0]) == 1
    assert sample_info(client).priority == 789.0
    assert info_of(client).current_size == 1


def test_deletes_with_unknown_keys_are_skipped_the_known_ones_applied(
    make_client: MakeClient,
) -> None:
    _, client = make_client([uniform_table()])
    keys = insert(client, 1, 2)
    client.mutate_priorities(TABLE, None, [5, keys[0], 2**64 - 1])
    assert info_of(client).current_size == 1
    assert [is_there(client, key) for key in keys] == [False, True]


def test_mutate_deletes_before_it_updates(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table()])
    keys = insert(client, 1, 2)
    client.mutate_priorities(TABLE, {keys[0]: 3.0, keys[1]: 4.0}, [keys[0]])
    assert info_of(client).current_size == 1
    assert sample_info(client).priority == 4.0


def test_sample_on_an_empty_table_blocks_and_is_released_by_an_insert(
    make_client: MakeClient, in_thread: Callable[..., Future[Any]]
) -> None:
    _, client = make_client([uniform_table()])
    expect_wait(sample, client)
    waiting = in_thread(sample, client, timeout=DEADLINE)
    assert not waiting.done()
    insert(client, 7)
    assert waiting.result(DEADLINE) == [7]


def test_sampled_item_equals_the_inserted_one_and_a_single_item_has_probability_one(
    make_client: MakeClient,
) -> None:
    _, client = make_client([uniform_table()])
    (key,) = insert(client, 7, priority=123.0)
    info, data = client.sample_batch(TABLE, 1, timeout=0)
    assert info.key.tolist() == [key]
    assert info.priority.tolist() == [123.0]
    assert info.probability.tolist() == [1.0]
    np.testing.assert_array_equal(data["id"], [7])


def test_times_sampled_grows_by_one_a_sample(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table()])
    insert(client, 1)
    assert [sample_info(client).times_sampled for _ in range(5)] == [1, 2, 3, 4, 5]
    assert client.sample_batch(TABLE, 3, timeout=0).info.times_sampled.tolist() == [6, 7, 8]


def test_item_leaves_when_times_sampled_reaches_max_times_sampled(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table(sampler=selectors.Fifo(), max_times_sampled=2)])
    first, second = insert(client, 1, 2)
    assert sample(client) == [1]
    assert is_there(client, first)
    assert sample(client) == [1]
    assert not is_there(client, first)
    assert is_there(client, second)
    assert sample(client, 2) == [2, 2]
    assert info_of(client).current_size == 0


def test_batch_that_runs_dry_returns_what_it_got(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table(sampler=selectors.Fifo(), max_times_sampled=1)])
    insert(client, 1, 2, 3)
    assert sample(client, 10) == [1, 2, 3]
    assert info_of(client).rate_limiter_info.sample_stats.completed == 3
    expect_wait(sample, client, 10)


def test_overflow_evicts_through_the_remover(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table(max_size=10)])
    keys = [key for i in range(15) for key in insert(client, i)]
    assert info_of(client).current_size == 10
    assert [is_there(client, key) for key in keys] == [False] * 5 + [True] * 10


def test_a_thousand_concurrent_insert_sample_and_update_calls_all_finish(
    make_client: MakeClient,
) -> None:
    _, client = make_client([uniform_table(max_size=2000)])
    first = insert(client, -1)[0]
    calls: list[Callable[[int], Any]] = [
        lambda i: insert(client, i, timeout=DEADLINE),
        lambda i: sample(client, timeout=DEADLINE),
        lambda i: client.update_priorities(TABLE, [first], [float(i)]),
    ]
    with ThreadPoolExecutor(max_workers=16) as pool:
        futures = [pool.submit(calls[i % 3], i) for i in range(1000)]
        results = [future.result(2 * DEADLINE) for future in futures]
    assert info_of(client).rate_limiter_info.insert_stats.completed == 1 + 334
    assert info_of(client).rate_limiter_info.sample_stats.completed == 333
    assert results[2::3] == [1] * 333
    client.check()


def test_queue_gives_items_in_order_and_blocks_when_full_or_empty(
    make_client: MakeClient, in_thread: Callable[..., Future[Any]]
) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 10)])
    insert(client, *range(10))
    expect_wait(insert, client, 10)
    eleventh = in_thread(insert, client, 10, timeout=DEADLINE)
    assert not eleventh.done()
    assert sample(client) == [0]
    eleventh.result(DEADLINE)
    assert sample(client, 10) == list(range(1, 11))
    expect_wait(sample, client)
    waiting = in_thread(sample, client, timeout=DEADLINE)
    insert(client, 11)
    assert waiting.result(DEADLINE) == [11]
    assert info_of(client).current_size == 0


def test_stack_gives_the_newest_first(make_client: MakeClient) -> None:
    _, client = make_client([reverb.Table.stack(TABLE, 10)])
    insert(client, *range(10))
    expect_wait(insert, client, 10)
    assert sample(client, 10) == list(reversed(range(10)))
    expect_wait(sample, client)


def test_reset_releases_waiting_inserts(
    make_client: MakeClient, in_thread: Callable[..., Future[Any]]
) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 3)])
    insert(client, 0, 1, 2)
    waiting = [in_thread(insert, client, i, timeout=DEADLINE) for i in (3, 4)]
    assert not any(future.done() for future in waiting)
    client.reset(TABLE)
    for future in waiting:
        future.result(DEADLINE)
    assert sorted(sample(client, 2)) == [3, 4]


def test_reset_empties_the_table(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table()])
    old = insert(client, 1, 2, 3)
    sample(client, 2)
    client.reset(TABLE)
    info = info_of(client)
    assert info.current_size == 0
    assert info.num_episodes == info.num_deleted_episodes == info.num_unique_samples == 0
    assert info.rate_limiter_info.insert_stats.completed == 0
    assert info.rate_limiter_info.sample_stats.completed == 0
    expect_wait(sample, client)
    # No key comes back.
    assert not set(old) & set(insert(client, 4, 5, 6))
    assert not any(is_there(client, key) for key in old)


def test_reset_during_concurrent_traffic_is_safe(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table(max_size=20, sampler=selectors.Prioritized(1.0))])

    def work(worker: int) -> int:
        resets = 0
        for turn in range(200):
            keys = insert(client, worker * 1000 + turn, timeout=DEADLINE)
            try:
                (id_,) = sample(client)
                assert id_ % 1000 < 200
            except reverb.DeadlineExceededError:
                # Another thread reset the table between the two calls.
                resets += 1
            client.update_priorities(TABLE, keys, [2.0])
            if turn % 10 == worker:
                client.reset(TABLE)
        return resets

    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = [pool.submit(work, worker) for worker in range(4)]
        assert all(future.result(2 * DEADLINE) >= 0 for future in futures)
    client.check()
    assert info_of(client).current_size <= 20


def test_samples_stop_when_automatic_removal_drops_the_size_below_min_size(
    make_client: MakeClient,
) -> None:
    limiter = rate_limiters.MinSize(3)
    _, client = make_client(
        [uniform_table(sampler=selectors.Fifo(), rate_limiter=limiter, max_times_sampled=1)]
    )
    insert(client, 0, 1, 2)
    assert sample(client, 5) == [0]
    expect_wait(sample, client)
    insert(client, 3)
    assert sample(client, 5) == [1]


def test_samples_stop_when_a_delete_drops_the_size_below_min_size(make_client: MakeClient) -> None:
    _, client = make_client(
        [uniform_table(sampler=selectors.Fifo(), rate_limiter=rate_limiters.MinSize(3))]
    )
    keys = insert(client, 0, 1, 2)
    assert sample(client, 2) == [0, 0]
    client.mutate_priorities(TABLE, None, [keys[0]])
    expect_wait(sample, client)
    insert(client, 3)
    assert sample(client, 2) == [1, 1]


def test_table_size_in_the_sample_equals_the_size_at_that_time(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table()])
    for size in range(1, 11):
        insert(client, size)
        assert sample_info(client).table_size == size


def test_table_size_counts_the_item_that_leaves_with_this_sample(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table(sampler=selectors.Fifo(), max_times_sampled=1)])
    insert(client, 1, 2, 3)
    assert client.sample_batch(TABLE, 3, timeout=0).info.table_size.tolist() == [3, 2, 1]


def test_num_episodes_with_shared_and_separate_episodes(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table()])
    keys = []
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        # Two items in the first episode, one in the second.
        for episode in ((1, 2), (3,)):
            for id_ in episode:
                writer.append({"id": id_})
                last = {"id": writer.history["id"][-1:]}
                keys.append(writer.create_item(TABLE, 1.0, last))
            writer.end_episode()
    counts = [info_of(client).num_episodes]
    for key in keys:
        assert key is not None
        client.mutate_priorities(TABLE, None, [key])
        counts.append(info_of(client).num_episodes)
    assert counts == [2, 2, 1, 0]
    insert(client, 4)
    assert info_of(client).num_episodes == 1
    client.reset(TABLE)
    assert info_of(client).num_episodes == 0


def test_num_deleted_episodes_with_shared_and_separate_episodes(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table()])
    first = insert(client, 1, 2)
    second = insert(client, 3)
    counts = []
    for key in (*first, *second):
        client.mutate_priorities(TABLE, None, [key])
        counts.append(info_of(client).num_deleted_episodes)
    assert counts == [0, 1, 2]
    client.reset(TABLE)
    assert info_of(client).num_deleted_episodes == 0


def test_item_that_spans_two_episodes_counts_in_both(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"id": 1})
    writer.end_episode(clear_buffers=False)
    writer.append({"id": 2})
    key = writer.create_item(TABLE, 1.0, {"id": writer.history["id"][-2:]})
    assert info_of(client).num_episodes == 2
    assert key is not None
    client.mutate_priorities(TABLE, None, [key])
    assert info_of(client).num_episodes == 0
    assert info_of(client).num_deleted_episodes == 2
    writer.close()


def test_info_carries_every_field(make_client: MakeClient) -> None:
    table = uniform_table(
        sampler=selectors.Prioritized(0.5),
        remover=selectors.MinHeap(),
        max_size=7,
        rate_limiter=rate_limiters.RateLimiter(2.5, 1, -3.0, 100.0),
        max_times_sampled=1,
    )
    _, client = make_client([table])
    insert(client, 1)
    insert(client, 2)
    sample(client)
    for info in (info_of(client), table.info):
        assert info.name == TABLE
        assert info.sampler_options.prioritized.priority_exponent == 0.5
        assert info.remover_options.heap.min_heap
        assert info.max_size == 7
        assert info.max_times_sampled == 1
        limiter = info.rate_limiter_info
        assert limiter.samples_per_insert == 2.5
        assert limiter.min_size_to_sample == 1
        assert (limiter.min_diff, limiter.max_diff) == (-3.0, 100.0)
        assert limiter.insert_stats.completed == 2
        assert limiter.sample_stats.completed == 1
        assert info.signature is None
        assert info.current_size == 1
        assert info.num_episodes == 1
        assert info.num_deleted_episodes == 1
        assert info.num_unique_samples == 1
        assert info.table_worker_time is not None


def test_insert_with_timeout_fails_with_deadline_exceeded_and_changes_nothing(
    make_client: MakeClient,
) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 2)])
    insert(client, 1, 2)
    expect_wait(insert, client, 3, timeout=0.01)
    expect_wait(client.insert, {"id": 3}, {TABLE: 1.0}, timeout=0.01)
    assert info_of(client).current_size == 2
    assert info_of(client).rate_limiter_info.insert_stats.completed == 2
    assert sample(client, 5) == [1, 2]


def test_batch_that_stops_half_way_says_how_many_items_are_in(make_client: MakeClient) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 3)])
    with pytest.raises(reverb.DeadlineExceededError, match="3"):
        insert(client, *range(5))
    assert info_of(client).rate_limiter_info.insert_stats.completed == 3
    assert sample(client, 5) == [0, 1, 2]


def test_stopping_the_server_ends_a_waiting_sample_and_a_waiting_insert(
    make_client: MakeClient, in_thread: Callable[..., Future[Any]]
) -> None:
    server, client = make_client([reverb.Table.queue(TABLE, 1), uniform_table(name="empty")])
    insert(client, 1)
    waiting = [
        in_thread(insert, client, 2, timeout=None),
        in_thread(client.sample_batch, "empty", 1, timeout=None),
    ]
    server.stop()
    for future in waiting:
        with pytest.raises(reverb.errors.ServerClosedError):
            future.result(DEADLINE)


# ------------------------------------------------------------------------------ rate limiter


def test_sampling_waits_for_min_size_inserts(
    make_client: MakeClient, in_thread: Callable[..., Future[Any]]
) -> None:
    _, client = make_client([uniform_table(rate_limiter=rate_limiters.MinSize(3))])
    expect_wait(sample, client)
    waiting = in_thread(sample, client, timeout=DEADLINE)
    for id_ in range(2):
        insert(client, id_)
        expect_wait(sample, client)
    assert not waiting.done()
    insert(client, 2)
    assert len(waiting.result(DEADLINE)) == 1


def test_operations_inside_the_range_never_wait(make_client: MakeClient) -> None:
    limiter = rate_limiters.RateLimiter(1.0, 1, -2.0, 2.0)
    _, client = make_client([uniform_table(rate_limiter=limiter)])
    insert(client, 1)
    for _ in range(50):
        sample(client, 1)
        sample(client, 1)
        insert(client, 2)
        insert(client, 3)


def test_operation_that_would_leave_the_range_waits_until_the_opposite_one(
    make_client: MakeClient, in_thread: Callable[..., Future[Any]]
) -> None:
    limiter = rate_limiters.RateLimiter(1.0, 1, -1.0, 2.0)
    _, client = make_client([uniform_table(rate_limiter=limiter)])
    insert(client, 1, 2)
    expect_wait(insert, client, 3)
    inserting = in_thread(insert, client, 3, timeout=DEADLINE)
    assert not inserting.done()
    sample(client)
    inserting.result(DEADLINE)
    # Three inserts, one sample: three more samples bring the difference to its lower end.
    assert len(sample(client, 10)) == 3
    expect_wait(sample, client)
    sampling = in_thread(sample, client, timeout=DEADLINE)
    assert not sampling.done()
    insert(client, 4)
    assert len(sampling.result(DEADLINE)) == 1


def test_can_sample_at_one_insert_and_range_of_one(make_client: MakeClient) -> None:
    table = uniform_table(rate_limiter=rate_limiters.RateLimiter(1.0, 1, -1.0, 1.0))
    _, client = make_client([table])
    assert not table.can_sample(1)
    insert(client, 1)
    assert [table.can_sample(n) for n in (1, 2, 3)] == [True, True, False]


def test_can_insert_up_to_max_diff(make_client: MakeClient) -> None:
    table = uniform_table(rate_limiter=rate_limiters.RateLimiter(1.5, 2, -100.0, 5.0))
    _, client = make_client([table])
    assert [table.can_insert(n) for n in (1, 2, 3, 4)] == [True, True, True, False]
    insert(client, 1, 2, 3)
    assert not table.can_insert(1)
    sample(client)
    assert table.can_insert(1)


def test_worked_example_of_ratio_two_and_range_two_to_ten(make_client: MakeClient) -> None:
    limiter = rate_limiters.RateLimiter(2.0, 3, 2.0, 10.0)
    _, client = make_client([uniform_table(rate_limiter=limiter)])
    insert(client, *range(5))
    expect_wait(insert, client, 5)
    assert len(sample(client, 20)) == 8
    expect_wait(sample, client)


def test_deletes_that_bring_the_size_under_min_size_free_inserts(make_client: MakeClient) -> None:
    table = uniform_table(rate_limiter=rate_limiters.RateLimiter(1.0, 2, 0.0, 2.0))
    _, client = make_client([table])
    keys = insert(client, 1, 2)
    assert not table.can_insert(1)
    client.mutate_priorities(TABLE, None, keys[:1])
    assert table.can_insert(1)
    insert(client, 3)
    assert not table.can_insert(1)


def test_delete_alone_frees_no_room_in_a_queue(make_client: MakeClient) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 3)])
    keys = insert(client, 1, 2, 3)
    client.mutate_priorities(TABLE, None, keys[:2])
    expect_wait(insert, client, 4)
    # Unless it empties the table.
    client.mutate_priorities(TABLE, None, keys[2:])
    insert(client, 4)


def test_deletes_under_min_size_stop_samples_until_an_insert_is_finished(
    make_client: MakeClient, in_thread: Callable[..., Future[Any]]
) -> None:
    table = uniform_table(rate_limiter=rate_limiters.MinSize(2))
    _, client = make_client([table])
    keys = insert(client, 1, 2)
    assert table.can_sample(1)
    client.mutate_priorities(TABLE, None, keys[:1])
    assert not table.can_sample(1)
    waiting = in_thread(sample, client, timeout=DEADLINE)
    assert not waiting.done()
    insert(client, 3)
    assert waiting.result(DEADLINE)[0] in (2, 3)


def test_new_limiter_lists_its_parameters_and_zero_counts(make_client: MakeClient) -> None:
    limiter = rate_limiters.SampleToInsertRatio(2.0, 5, 4.0)
    _, client = make_client([uniform_table(rate_limiter=limiter)])
    info = info_of(client).rate_limiter_info
    assert info.samples_per_insert == 2.0
    assert info.min_size_to_sample == 5
    assert (info.min_diff, info.max_diff) == (6.0, 14.0)
    assert info.insert_stats.completed == info.sample_stats.completed == 0


@pytest.mark.parametrize("size", [0, -1])
def test_min_size_to_sample_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=str(size)):
        rate_limiters.RateLimiter(1.0, size, 0.0, 5.0)
    with pytest.raises(ValueError, match=str(size)):
        rate_limiters.MinSize(size)


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan")])
def test_samples_per_insert_not_above_zero_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=str(ratio)):
        rate_limiters.RateLimiter(ratio, 1, 0.0, 5.0)
    with pytest.raises(ValueError, match=str(ratio)):
        rate_limiters.SampleToInsertRatio(ratio, 1, 5.0)


# ------------------------------------------------------------------------------ selectors


def drained(client: reverb.Client) -> list[int]:
    """Ids in the order in which the table gives and drops them; every probability must be 1."""
    info, data = client.sample_batch(TABLE, 100, timeout=0)
    assert (info.probability == 1.0).all()
    return [int(id_) for id_ in data["id"]]


def consuming_table(sampler: Any, **options: Any) -> reverb.Table:
    return uniform_table(sampler=sampler, max_times_sampled=1, **options)


def kept(client: reverb.Client, keys: Sequence[int]) -> list[int]:
    """Positions of the keys that are still there."""
    return [i for i, key in enumerate(keys) if is_there(client, key)]


def test_fifo_gives_and_removes_in_insertion_order_with_probability_one(
    make_client: MakeClient,
) -> None:
    _, client = make_client([consuming_table(selectors.Fifo(), max_size=4)])
    keys = insert(client, 0, 1, 2, 3, 4, 5, priority=np.array([3.0, 1.0, 6.0, 2.0, 5.0, 4.0]))
    # Updates move nothing.
    client.update_priorities(TABLE, keys[2:4], [100.0, 0.0])
    assert drained(client) == [2, 3, 4, 5]


def test_lifo_gives_and_removes_the_newest_first_with_probability_one(
    make_client: MakeClient,
) -> None:
    _, client = make_client(
        [consuming_table(selectors.Lifo(), remover=selectors.Lifo(), max_size=4)]
    )
    keys = insert(client, 0, 1, 2, 3, 4, 5)
    client.update_priorities(TABLE, keys[:2], [100.0, 0.0])
    # The new item enters first, and is then the newest: it leaves at once.
    assert drained(client) == [3, 2, 1, 0]


def test_uniform_frequencies_and_probabilities_are_one_over_n(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table(seed=1)])
    insert(client, *range(100))
    info, data = client.sample_batch(TABLE, 20_000, timeout=0)
    assert (info.probability == 1.0 / 100).all()
    counts = np.bincount(data["id"], minlength=100)
    # Five standard deviations from 200 draws an item.
    assert (np.abs(counts - 200) < 5 * np.sqrt(200)).all()


def test_options_say_which_selectors_are_deterministic(make_client: MakeClient) -> None:
    cases: list[tuple[Any, bool]] = [(selector(), True) for selector in DETERMINISTIC]
    cases += [(selectors.Uniform(), False), (selectors.Prioritized(1.0), False)]
    kinds = ["fifo", "lifo", "heap", "heap", "uniform", "prioritized"]
    tables = [uniform_table(name=str(i), sampler=selector) for i, (selector, _) in enumerate(cases)]
    _, client = make_client(tables, capacity=64 << 20)
    for i, (_, deterministic) in enumerate(cases):
        options = client.server_info()[str(i)].sampler_options
        assert options.is_deterministic is deterministic
        assert options.WhichOneof("distribution") == kinds[i]
        assert options.HasField(kinds[i])


def test_min_heap_gives_the_lowest_priority_first(make_client: MakeClient) -> None:
    _, client = make_client([consuming_table(selectors.MinHeap())])
    insert(client, 0, 1, 2, 3, priority=np.array([2.0, -1.0, 5.0, 0.0]))
    assert drained(client) == [1, 3, 0, 2]


def test_min_heap_removes_the_lowest_priority(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table(remover=selectors.MinHeap(), max_size=2)])
    keys = insert(client, 0, 1, 2, priority=np.array([5.0, 4.0, 1.0]))
    assert kept(client, keys) == [0, 1]
    assert info_of(client).rate_limiter_info.insert_stats.completed == 3


@pytest.mark.parametrize("heap", [selectors.MinHeap, selectors.MaxHeap])
def test_heap_ties_go_by_insertion_order(make_client: MakeClient, heap: Any) -> None:
    _, client = make_client([consuming_table(heap())])
    insert(client, *range(20), priority=5.0)
    assert drained(client) == list(range(20))


@pytest.mark.parametrize("heap", [selectors.MinHeap, selectors.MaxHeap])
def test_heap_ties_go_by_update_order_once_updated(make_client: MakeClient, heap: Any) -> None:
    _, client = make_client([consuming_table(heap())])
    keys = insert(client, *range(5), priority=5.0)
    # To the same value, in one call and in two.
    client.update_priorities(TABLE, [keys[3], keys[0]], [5.0, 5.0])
    client.update_priorities(TABLE, [keys[1]], [5.0])
    assert drained(client) == [2, 4, 3, 0, 1]


def test_max_heap_gives_the_highest_priority_first(make_client: MakeClient) -> None:
    _, client = make_client([consuming_table(selectors.MaxHeap())])
    insert(client, 0, 1, 2, 3, priority=np.array([5.0, 5.0, 7.0, 5.0]))
    info, data = client.sample_batch(TABLE, 4, timeout=0)
    assert data["id"].tolist() == [2, 0, 1, 3]
    assert info.table_size.tolist() == [4, 3, 2, 1]


def test_heap_update_reorders(make_client: MakeClient) -> None:
    _, client = make_client([consuming_table(selectors.MinHeap())])
    keys = insert(client, 0, 1, 2, 3, priority=np.array([0.0, 1.0, 2.0, 3.0]))
    client.update_priorities(TABLE, [keys[0], keys[3]], [2.5, -1.0])
    assert drained(client) == [3, 1, 2, 0]


def test_heap_after_reset_only_knows_new_items(make_client: MakeClient) -> None:
    _, client = make_client([consuming_table(selectors.MinHeap())])
    insert(client, 0, 1, priority=np.array([1.0, 2.0]))
    client.reset(TABLE)
    insert(client, 2, 3, priority=np.array([9.0, 8.0]))
    assert drained(client) == [3, 2]


@pytest.mark.parametrize("selector", DETERMINISTIC)
def test_probability_of_deterministic_selectors_is_always_one(
    make_client: MakeClient, selector: Any
) -> None:
    _, client = make_client([uniform_table(sampler=selector())])
    insert(client, *range(10), priority=np.arange(10.0))
    assert (client.sample_batch(TABLE, 20, timeout=0).info.probability == 1.0).all()


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 1e200])
def test_prioritized_refuses_bad_priorities_on_insert_and_update(
    make_client: MakeClient, bad: float
) -> None:
    # The square of the last one is infinite, and so would its weight be.
    _, client = make_client([uniform_table(sampler=selectors.Prioritized(2.0))])
    (key,) = insert(client, 1, priority=2.0)
    with pytest.raises(reverb.errors.PriorityError):
        insert(client, 2, priority=bad)
    with pytest.raises(reverb.errors.PriorityError):
        client.insert({"id": 2}, {TABLE: bad}, timeout=0)
    with pytest.raises(reverb.errors.PriorityError):
        client.update_priorities(TABLE, [key], [bad])
    with pytest.raises(reverb.errors.PriorityError):
        client.mutate_priorities(TABLE, {key: bad}, None)
    # The table lives on, and nothing has changed.
    assert info_of(client).current_size == 1
    assert sample_info(client).priority == 2.0
    insert(client, 3)


@pytest.mark.parametrize("stripes", [1, 3])
def test_all_zero_priorities_are_uniform_with_exactly_one_over_n(
    make_client: MakeClient, stripes: int
) -> None:
    sampler = selectors.Prioritized(1.0)
    _, client = make_client([uniform_table(sampler=sampler, seed=1, stripes=stripes)])
    insert(client, 0, 1, 2, priority=0.0)
    info, data = client.sample_batch(TABLE, 3000, timeout=0)
    assert (info.probability == 1.0 / 3).all()
    assert min(Counter(data["id"].tolist()).values()) > 800
    insert(client, 3, priority=3.0)
    info, data = client.sample_batch(TABLE, 1000, timeout=0)
    assert (info.probability == 1.0).all()
    assert (data["id"] == 3).all()


def test_prioritized_probabilities_after_inserts_updates_and_deletes(
    make_client: MakeClient,
) -> None:
    _, client = make_client([uniform_table(sampler=selectors.Prioritized(1.0), seed=2)])
    keys = insert(client, 0, 1, 2, 3, priority=np.array([2.0, 1.0, 4.0, 1.0]))

    def probabilities() -> dict[int, float]:
        info, data = client.sample_batch(TABLE, 8_000, timeout=0)
        pairs = set(zip(data["id"].tolist(), info.probability.tolist(), strict=True))
        counts = Counter(data["id"].tolist())
        for id_, probability in pairs:
            expected = 8_000 * probability
            assert abs(counts[id_] - expected) < 5 * np.sqrt(expected)
        assert len(pairs) == len(counts)
        return dict(pairs)

    assert probabilities() == {0: 0.25, 1: 0.125, 2: 0.5, 3: 0.125}
    client.update_priorities(TABLE, [keys[2]], [0.0])
    assert probabilities() == {0: 0.5, 1: 0.25, 3: 0.25}
    client.mutate_priorities(TABLE, None, [keys[0]])
    assert probabilities() == {1: 0.5, 3: 0.5}
    insert(client, 4, priority=6.0)
    assert probabilities() == {1: 0.125, 3: 0.125, 4: 0.75}


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [
        (0.5, [0.261204, 0.184699, 0.369398, 0.184699]),
        (0.0, [0.25, 0.25, 0.25, 0.25]),
        (-1.0, [0.181818, 0.363636, 0.090909, 0.363636]),
    ],
)
def test_prioritized_exponent_shows_in_the_options_and_in_the_probabilities(
    make_client: MakeClient, exponent: float, expected: list[float]
) -> None:
    _, client = make_client([uniform_table(sampler=selectors.Prioritized(exponent), seed=3)])
    options = info_of(client).sampler_options
    assert options.prioritized.priority_exponent == exponent
    insert(client, 0, 1, 2, 3, priority=np.array([2.0, 1.0, 4.0, 1.0]))
    info, data = client.sample_batch(TABLE, 1000, timeout=0)
    seen = dict(zip(data["id"].tolist(), info.probability.tolist(), strict=True))
    assert [seen[id_] for id_ in range(4)] == pytest.approx(expected, rel=1e-4)


def test_prioritized_exponent_zero_leaves_zero_at_zero(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table(sampler=selectors.Prioritized(0.0), seed=4)])
    insert(client, 0, 1, 2, priority=np.array([0.0, 1.0, 5.0]))
    info, data = client.sample_batch(TABLE, 1000, timeout=0)
    assert (info.probability == 0.5).all()
    assert set(data["id"].tolist()) == {1, 2}


def test_many_tiny_weights_beside_large_ones_never_spoil_the_sums(make_client: MakeClient) -> None:
    _, client = make_client([uniform_table(sampler=selectors.Prioritized(1.0), max_size=64)])
    small = insert(client, 0, priority=1e-15)
    for turn in range(200):
        keys = insert(client, *range(1, 51), priority=0.3)
        client.mutate_priorities(TABLE, None, keys)
        if turn % 50 == 0:
            client.check()
    info = sample_info(client)
    assert (info.key, info.probability) == (small[0], 1.0)
