"""What is done to a table in use: other bounds, another limiter; listing,
fetching by key, other data for an item, and the largest priority.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import Client, Server, errors
from tests.tables import usual_table

PATIENCE = 60.0
"""Seconds within which a call that was woken returns. Nothing is expected to come near it."""

Maker = Callable[..., Server]
Connect = Callable[[Server], Client]


def table(name: str = "t", **options: Any) -> reverb.Table:
    return usual_table(name, **{"max_size": 100, **options})


def rows(n: int, start: int = 0) -> dict[str, Any]:
    return {"x": np.arange(start, start + n)}


def created(key: int | None) -> int:
    assert key is not None, "held back"
    return key


def there(client: Client, name: str, keys: Any) -> list[bool]:
    return [client.update_priorities(name, [key], [1.0]) == 1 for key in keys]


# ------------------------------------------------------------------ other settings


@pytest.mark.parametrize("stripes", [1, 4])
def test_shrinking_evicts_by_the_remover(serve: Maker, connect: Connect, stripes: int) -> None:
    server = serve([table(stripes=stripes)])
    with connect(server) as client, connect(server) as other:
        keys = client.insert_batch("t", rows(30))
        more = other.insert_batch("t", rows(30, 30))
        client.configure_table("t", max_size=10)
        info = client.server_info()["t"]
        assert (info.max_size, info.current_size) == (10, 10)
        assert info.rate_limiter_info.insert_stats.completed == 60
        assert there(client, "t", keys) == [False] * 30
        assert there(client, "t", more) == [False] * 20 + [True] * 10
        newest = client.insert_batch("t", rows(2))
        assert there(client, "t", [*more, *newest]) == [False] * 22 + [True] * 10
        client.configure_table("t", max_size=11)
        client.insert_batch("t", rows(5))
        assert client.server_info()["t"].current_size == 11
        client.check()


def test_shrinking_below_the_number_of_stripes(serve: Maker, connect: Connect) -> None:
    server = serve([table(stripes=8, sampler=reverb.selectors.Prioritized(1.0))])
    with connect(server) as client:
        client.insert_batch("t", rows(50), np.arange(50.0))
        client.configure_table("t", max_size=1)
        assert client.server_info()["t"].current_size == 1
        assert client.sample_batch("t", 3).data["x"].tolist() == [49] * 3
        client.check()


def test_growing_makes_room_and_ends_at_the_address_space(serve: Maker, connect: Connect) -> None:
    server = serve([table(max_size=10)])
    with connect(server) as client:
        client.insert_batch("t", rows(20))
        client.configure_table("t", max_size=80)
        client.insert_batch("t", rows(100))
        assert client.server_info()["t"].current_size == 80
        with pytest.raises(errors.InvalidArgumentError, match=r"max_size 81 .* at most 80"):
            client.configure_table("t", max_size=81, max_times_sampled=1)
        info = client.server_info()["t"]
        assert (info.max_size, info.max_times_sampled) == (80, 0)
        server.configure_table("t", max_size=8)
        assert server.localhost_client().server_info()["t"].current_size == 8
        client.check()


def test_the_capacity_bounds_how_far_a_table_can_grow(serve: Maker, connect: Connect) -> None:
    server = serve([table(max_size=100_000)], capacity=8 << 20)
    with connect(server) as client:
        with pytest.raises(errors.InvalidArgumentError, match=r"at most 13209\d"):
            client.configure_table("t", max_size=800_000)
        client.configure_table("t", max_size=130_000)
        assert client.server_info()["t"].max_size == 130_000


def test_a_bound_on_samples_takes_out_what_has_reached_it(serve: Maker, connect: Connect) -> None:
    server = serve([table(sampler=reverb.selectors.Fifo())])
    with connect(server) as client:
        keys = client.insert_batch("t", rows(3))
        client.sample_batch("t", 4)
        client.configure_table("t", max_times_sampled=4)
        info = client.server_info()["t"]
        assert (info.current_size, info.max_times_sampled) == (2, 4)
        assert client.sample_batch("t", 8).data["x"].tolist() == [1] * 4 + [2] * 4
        assert client.server_info()["t"].current_size == 0
        client.insert_batch("t", rows(1))
        client.sample_batch("t", 3)
        client.configure_table("t", max_times_sampled=0)
        assert client.sample_batch("t", 9).info.times_sampled.tolist() == list(range(4, 13))
        assert there(client, "t", keys) == [False] * 3
        client.check()


@pytest.mark.parametrize("stripes", [1, 3])
def test_a_bound_on_samples_comes_and_goes_under_load(
    serve: Maker, connect: Connect, stripes: int
) -> None:
    server = serve([table(stripes=stripes)])
    stop, sampled = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def sample() -> None:
        try:
            with connect(server) as mine:
                while not stop.is_set():
                    batch = mine.sample_batch("t", 64, timeout=PATIENCE)
                    assert len(batch.info.key) == 64
        except BaseException as error:
            failures.append(error)

    def insert() -> None:
        try:
            with connect(server) as mine:
                while not sampled.is_set():
                    mine.insert_batch("t", rows(16), timeout=PATIENCE)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=job) for job in (sample, sample, insert)]
    for thread in threads:
        thread.start()
    with connect(server) as client:
        for i in range(60):
            client.configure_table("t", max_times_sampled=i % 3, max_size=[100, 5, 700, 64][i % 4])
            client.check()
        client.configure_table("t", max_times_sampled=0, max_size=50)
        stop.set()
        for thread in threads:
            if thread is threads[-1]:
                sampled.set()  # until then a sample may wait for items
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert not failures
        assert client.server_info()["t"].current_size <= 50
        client.check()


def test_another_limiter_holds_at_once_and_wakes_who_waits(serve: Maker, connect: Connect) -> None:
    limits = reverb.rate_limiters
    server = serve([table(rate_limiter=limits.MinSize(5)), reverb.Table.queue("q", 2)])
    with connect(server) as client:
        client.insert_batch("t", rows(2))
        client.insert_batch("q", rows(2))
        done: list[str] = []

        def sample() -> None:
            client.sample_batch("t", 2, timeout=PATIENCE)
            done.append("sample")

        def insert() -> None:
            client.insert_batch("q", rows(1), timeout=PATIENCE)
            done.append("insert")

        threads = [threading.Thread(target=job) for job in (sample, insert)]
        for thread in threads:
            thread.start()
        with pytest.raises(errors.DeadlineExceededError):
            client.sample_batch("t", 1, timeout=0)
        assert not done
        client.configure_table("t", rate_limiter=limits.MinSize(2))
        client.configure_table("q", rate_limiter=limits.Queue(3))
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(done) == ["insert", "sample"]
        client.configure_table("t", rate_limiter=limits.SampleToInsertRatio(2.0, 1, 4.0))
        info = client.server_info()["t"].rate_limiter_info
        assert (info.samples_per_insert, info.min_diff, info.max_diff) == (2.0, -2.0, 6.0)
        assert info.sample_stats.completed == 2
        # From now on an insert may be refused; and back.
        with pytest.raises(errors.DeadlineExceededError, match="max_diff=6"):
            client.insert_batch("t", rows(10), timeout=0)
        client.configure_table("t", rate_limiter=limits.MinSize(1))
        client.insert_batch("t", rows(10), timeout=0)


@pytest.mark.parametrize(
    ("change", "error", "fragment"),
    [
        ({"max_size": 0}, errors.InvalidArgumentError, "max_size 0"),
        ({"max_size": 2**31}, errors.ArgumentTypeError, "max_size"),
        ({"max_size": 2.5}, errors.ArgumentTypeError, "max_size"),
        ({"max_times_sampled": 2**31}, errors.ArgumentTypeError, "max_times_sampled"),
        ({"rate_limiter": 3}, errors.ArgumentTypeError, "rate_limiter"),
        ({"max_size": 5, "rate_limiter": "x"}, errors.ArgumentTypeError, "rate_limiter"),
    ],
    ids=repr,
)
def test_settings_out_of_range_change_nothing(
    serve: Maker, connect: Connect, change: dict[str, Any], error: type[Exception], fragment: str
) -> None:
    server = serve([table()])
    with connect(server) as client:
        client.insert_batch("t", rows(9))
        before = client.server_info()["t"]
        with pytest.raises(error, match=fragment):
            client.configure_table("t", **change)
        with pytest.raises(errors.TableNotFoundError):
            client.configure_table("u", max_size=1)
        assert client.server_info()["t"] == before


# ------------------------------------------------------------------ listing


@pytest.mark.parametrize("stripes", [1, 3])
def test_items_are_listed_in_the_order_of_their_insertion(
    serve: Maker, connect: Connect, stripes: int
) -> None:
    server = serve([table(stripes=stripes, sampler=reverb.selectors.Prioritized(1.0))])
    before = time.time() - 1
    with connect(server) as client, connect(server) as other:
        assert client.keys("t").shape == (0,) and client.keys("t").dtype == np.uint64
        keys: list[int] = []
        for i in range(8):
            writer = client if i % 2 else other
            keys += writer.insert_batch("t", rows(5, 5 * i), np.arange(5.0) + i).tolist()
        client.mutate_priorities("t", {keys[7]: 70.0}, [keys[3], keys[20]])
        keys = [key for i, key in enumerate(keys) if i not in (3, 20)]
        assert client.keys("t").tolist() == keys
        drawn = client.sample_batch("t", 50).info
        items = client.items("t")
        assert [a.dtype.name for a in items] == ["uint64", "float64", "int32", "float64"]
        assert items.key.tolist() == keys
        assert items.priority.tolist()[:7] == [0, 1, 2, 4, 1, 2, 70]
        counts = {int(k): int(n) for k, n in zip(items.key, items.times_sampled, strict=True)}
        assert counts == {k: drawn.key.tolist().count(k) for k in keys}
        assert (items.inserted > before).all() and (items.inserted < time.time() + 1).all()
        assert (np.diff(items.inserted) >= 0).all()


def test_a_large_table_is_listed_while_it_changes(serve: Maker, connect: Connect) -> None:
    server = serve([table(max_size=40_000, stripes=2)], capacity=64 << 20)
    with connect(server) as client:
        kept = client.insert_batch("t", rows(20_000)).tolist()
        stop = threading.Event()

        def churn() -> None:
            with connect(server) as mine:
                while not stop.is_set():
                    mine.mutate_priorities("t", deletes=mine.insert_batch("t", rows(500)).tolist())

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for _ in range(20):
                listed = client.keys("t").tolist()
                assert len(set(listed)) == len(listed)
                assert listed[: len(kept)] == kept
        finally:
            stop.set()
            thread.join(PATIENCE)


def test_listing_a_table_that_is_not_there(serve: Maker, connect: Connect) -> None:
    server = serve([table()])
    with connect(server) as client:
        for call in (client.keys, client.items, lambda name: client.fetch(name, [1])):
            with pytest.raises(errors.TableNotFoundError):
                call("u")


# ------------------------------------------------------------------ fetching


@pytest.mark.parametrize("stripes", [1, 3])
def test_fetch_gives_what_is_there_and_counts_nothing(
    serve: Maker, connect: Connect, stripes: int
) -> None:
    server = serve([table(max_size=2000, stripes=stripes)])
    with connect(server) as client, connect(server) as other:
        keys = client.insert_batch("t", rows(600), np.arange(600.0))
        keys = np.concatenate([keys, other.insert_batch("t", rows(600, 600), np.arange(600.0))])
        client.mutate_priorities("t", deletes=keys[100:200].tolist())
        more = np.array([2**64 - 1, 0, int(keys[5])], np.uint64)
        wanted = np.concatenate([keys[::-1], more])
        fetched = client.fetch("t", wanted)
        left = [key for i, key in enumerate(keys.tolist()) if not 100 <= i < 200]
        assert [f.info.key for f in fetched] == [*left[::-1], int(keys[5])]
        for f in fetched:
            number = keys.tolist().index(f.info.key)
            assert f.data["x"] == number
            assert f.info == (f.info.key, 0.0, 1100, number % 600, 0)
        info = client.server_info()["t"]
        assert (info.num_unique_samples, info.rate_limiter_info.sample_stats.completed) == (0, 0)
        assert (client.items("t").times_sampled == 0).all()
        assert client.fetch("t", []) == []
        client.check()


def test_fetch_gives_items_of_any_structure_and_length(serve: Maker, connect: Connect) -> None:
    server = serve([table(max_times_sampled=1)])
    with connect(server) as client:
        writer = client.trajectory_writer(3)
        keys: list[int] = []
        for t in range(3):
            writer.append({"a": np.float32(t), "n": {"v": np.full(2, t)}})
            trajectory = {"all": writer.history["n"]["v"][:]}
            keys.append(created(writer.create_item("t", 1.0, trajectory)))
        [key] = client.insert_batch("t", rows(1))
        got = client.fetch("t", [keys[2], key, keys[0]])
        assert got[0].data["all"].tolist() == [[0, 0], [1, 1], [2, 2]]
        assert got[1].data["x"] == 0
        assert got[2].data["all"].tolist() == [[0, 0]]
        got[0].data["all"][...] = 9  # a copy, the caller's own
        assert client.fetch("t", keys[2:])[0].data["all"][0].tolist() == [0, 0]
        assert client.server_info()["t"].current_size == 4
        for bad in (["a"], [1.5], [-1], 3):
            with pytest.raises((errors.ArgumentTypeError, errors.InvalidArgumentError)):
                client.fetch("t", bad)
        writer.close()


# ------------------------------------------------------------------ other data for an item


def three_steps(client: Client) -> reverb.TrajectoryWriter:
    writer = client.trajectory_writer(3)
    for t in range(3):
        writer.append({"x": np.int64(t), "y": np.full(2, t, np.float32)})
    return writer


@pytest.mark.parametrize("selector", ["Fifo", "Lifo", "MinHeap", "Uniform"])
def test_replaced_data_in_the_same_place(serve: Maker, connect: Connect, selector: str) -> None:
    server = serve([table(sampler=getattr(reverb.selectors, selector)())])
    with connect(server) as client:
        writer = three_steps(client)
        x, y = writer.history["x"], writer.history["y"]
        keys = [created(writer.create_item("t", 2.0, {"x": x[i:], "y": y[i:]})) for i in range(3)]
        before = client.items("t")
        with client.borrow("t", 9) as old:
            views = {item.info.key: item.data["x"] for item in old}
            shown = {key: view.copy() for key, view in views.items()}
            for key in keys:
                assert writer.replace_item("t", key, {"x": x[1:2], "y": y[1:2]})
            for key, view in views.items():
                assert view.tolist() == shown[key].tolist()
        after = client.items("t")
        assert after.key.tolist() == before.key.tolist() == keys
        assert (after.priority == 2.0).all() and (after.inserted == before.inserted).all()
        assert int(after.times_sampled.sum()) == 9
        batch = client.sample_batch("t", 20)
        assert (batch.data["x"] == 1).all() and (batch.data["y"] == 1).all()
        top = {"Fifo": keys[:1], "Lifo": keys[2:], "MinHeap": keys[:1], "Uniform": keys}[selector]
        assert set(batch.info.key.tolist()) <= set(top)
        client.check()
        writer.close()


def structures(server: reverb.Server) -> int:
    """How many item structures the store has."""
    for number in itertools.count():
        try:
            server._connection.native.schema_text(number)
        except errors.TableCorruptedError:
            return number
    raise AssertionError


def test_replacing_what_is_gone_or_was_made_in_another_way(serve: Maker, connect: Connect) -> None:
    server = serve([table(), table("u")])
    with connect(server) as client:
        writer = three_steps(client)
        x, y = writer.history["x"], writer.history["y"]
        key = created(writer.create_item("t", 1.0, {"x": x[:], "y": y[:]}))
        known = structures(server)
        for other in ({"x": x[:]}, {"x": y[:], "y": x[:]}, {"x": x[0], "y": y[0]}, [x[:], y[:]]):
            with pytest.raises(errors.SignatureError, match=r"another structure.*\[5,\[\],false\]"):
                writer.replace_item("t", key, other)
        assert structures(server) == known  # what is refused leaves nothing in the store
        for bad in (-1, 2**64, 1.5, "1", None, True):
            with pytest.raises(errors.ArgumentTypeError, match="key"):
                writer.replace_item("t", bad, {"x": x[:], "y": y[:]})  # type: ignore[arg-type]
        with pytest.raises(errors.TableNotFoundError):
            writer.replace_item("v", key, {"x": x[:], "y": y[:]})
        with pytest.raises(errors.InvalidArgumentError, match="empty"):
            writer.replace_item("t", key, {"x": x[0:0], "y": y[0:0]})
        assert client.sample_batch("t", 1).data["x"].tolist() == [[0, 1, 2]]
        assert writer.replace_item("u", key, {"x": x[:1], "y": y[:1]}) is False
        client.mutate_priorities("t", deletes=[key])
        assert writer.replace_item("t", key, {"x": x[:1], "y": y[:1]}) is False
        client.check()
        writer.close()


def test_replaced_items_of_a_batch_and_of_another_writer(serve: Maker, connect: Connect) -> None:
    signature = {"x": reverb.TensorSpec((), np.int64), "y": reverb.TensorSpec((2,), np.float32)}
    server = serve([table(signature=signature), table("u")])
    with connect(server) as client:
        data = {"x": np.arange(4) + 10, "y": np.zeros((4, 2), np.float32)}
        keys = client.insert_batch("t", data)
        writer, other = three_steps(client), three_steps(client)
        x, y = writer.history["x"], writer.history["y"]
        with pytest.raises(errors.SignatureError, match="table signature"):
            writer.replace_item("t", int(keys[0]), {"x": x[:], "y": y[:]})
        # Whole rows of one block, squeezed; and columns that come from two writers.
        assert writer.replace_item("t", keys[1], {"x": x[2], "y": y[2]})
        assert writer.replace_item("t", keys[2], {"x": x[1], "y": other.history["y"][-3]})
        other.close()
        got = client.fetch("t", keys)
        assert [int(item.data["x"]) for item in got] == [10, 2, 1, 13]
        assert [float(item.data["y"][0]) for item in got] == [0, 2, 0, 0]
        info = client.server_info()["t"]
        assert (info.num_episodes, info.current_size) == (3, 4)
        # Strided, reordered, of another length.
        key = created(writer.create_item("u", 1.0, {"x": x[-1:]}))
        for index, want in ((slice(None, None, 2), [0, 2]), ([2, 0, 0], [2, 0, 0])):
            assert writer.replace_item("u", key, {"x": x[index]})
            assert client.fetch("u", [key])[0].data["x"].tolist() == want
        assert client.server_info()["u"].num_deleted_episodes == 0
        writer.close()
        client.reset("t")
        client.reset("u")
        client.check()


def test_no_sample_sees_a_part_of_each(serve: Maker, connect: Connect) -> None:
    server = serve([table()])
    with connect(server) as client:
        writer = client.trajectory_writer(2)
        writer.append({"a": np.zeros(64), "b": np.zeros(64)})
        last = {name: column[-1:] for name, column in writer.history.items()}
        key = created(writer.create_item("t", 1.0, last))
        stop = threading.Event()

        def write() -> None:
            for n in range(1, 2000):
                writer.append({"a": np.full(64, n, np.float64), "b": np.full(64, n, np.float64)})
                new = {name: column[-1:] for name, column in writer.history.items()}
                assert writer.replace_item("t", key, new)
            stop.set()

        thread = threading.Thread(target=write)
        thread.start()
        seen = 0.0
        while not stop.is_set():
            batch = client.sample_batch("t", 8)
            for a, b in zip(batch.data["a"], batch.data["b"], strict=True):
                assert (a == a[0, 0]).all() and (b == a[0, 0]).all()
            assert batch.data["a"].min() >= seen
            seen = batch.data["a"].max()
        thread.join(PATIENCE)
        assert client.sample_batch("t", 1).data["a"].max() == 1999
        writer.close()
        client.reset("t")
        client.check()
        assert server.stats()["arena_allocations"] < 40


# ------------------------------------------------------------------ the largest priority


def test_without_a_priority_an_item_gets_the_largest_seen(serve: Maker, connect: Connect) -> None:
    server = serve(
        [table(sampler=reverb.selectors.Prioritized(1.0), stripes=2, max_size=4), table("u")]
    )
    with connect(server) as client, connect(server) as other:
        assert client.max_priority("t") == 1.0
        writer = three_steps(client)
        step = {"x": writer.history["x"][-1]}
        keys = client.insert_batch("t", rows(2), 0.25)
        assert client.max_priority("t") == 0.25
        other.update_priorities("t", [*keys, 7], [0.5, 0.375, 9.0])  # 7: nobody's key
        assert client.max_priority("t") == 0.5
        made = created(writer.create_item("t", None, step))
        client.insert({"x": np.int64(1)}, {"t": None, "u": None})
        assert client.items("t").priority.tolist() == [0.5, 0.375, 0.5, 0.5]
        assert client.items("u").priority.tolist() == [1.0]
        client.mutate_priorities("t", {made: 8.0}, keys.tolist())
        assert client.max_priority("t") == 8.0
        client.mutate_priorities("t", deletes=[made])
        client.insert_batch("t", rows(1), [0.125])
        assert other.insert_batch("t", rows(9), None).shape == (9,)
        assert client.items("t").priority.tolist() == [8.0] * 4
        client.reset("t")
        assert client.max_priority("t") == 1.0
        client.insert_batch("t", rows(1), 0.0)
        assert client.max_priority("t") == 0.0
        with pytest.raises(errors.PriorityError, match="NaN"):
            client.insert_batch("t", rows(1), [np.nan])
        with pytest.raises(errors.TableNotFoundError):
            client.max_priority("v")
        client.check()
        writer.close()


def test_an_item_that_is_held_back_gets_the_largest_priority_of_its_moment(
    serve: Maker,
    connect: Connect,
) -> None:
    server = serve([reverb.Table.queue("q", 1)])
    with connect(server) as client:
        writer = three_steps(client)
        step = {"x": writer.history["x"][-1]}
        first = created(writer.create_item("q", -2.0, step))
        assert writer.create_item("q", None, step) is None
        client.update_priorities("q", [first], [-1.5])
        client.sample_batch("q", 1)
        writer.flush(timeout_ms=int(PATIENCE * 1000))
        assert client.items("q").priority.tolist() == [-1.5]
        writer.close()


# ------------------------------------------------------------------ what extensions are told


class Mirror(reverb.TableExtension):
    """What the table holds, made of what it tells."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}

    def on_insert(self, item: Any) -> None:
        self.held[item.key] = np.ravel(item.data["x"]).tolist()

    def on_update(self, item: Any) -> None:
        assert item.key in self.held
        self.held[item.key] = np.ravel(item.data["x"]).tolist()

    def on_delete(self, item: Any) -> None:
        assert self.held.pop(item.key) == np.ravel(item.data["x"]).tolist()


def test_extensions_are_told_of_all_of_it(serve: Maker, connect: Connect) -> None:
    mirror = Mirror()
    server = serve([table(max_size=5000, extensions=[mirror])])
    with connect(server) as client:
        client.insert_batch("t", rows(3000))  # more than the events that may wait
        client.configure_table("t", max_size=20)
        client.sample_batch("t", 30)
        client.configure_table("t", max_times_sampled=1)
        writer = three_steps(client)
        key = created(writer.create_item("t", None, {"x": writer.history["x"][:1]}))
        for i in range(1500):
            assert writer.replace_item("t", key, {"x": writer.history["x"][i % 3 :]})
        writer.close()
        while server.stats()["t/events"]:
            time.sleep(0.001)
        keys = client.keys("t").tolist()
        fetched = {f.info.key: np.ravel(f.data["x"]).tolist() for f in client.fetch("t", keys)}
        end = time.monotonic() + PATIENCE
        while mirror.held != fetched and time.monotonic() < end:
            time.sleep(0.001)
        assert mirror.held == fetched and fetched[key] == [2] and len(fetched) <= 20
        assert server.stats()["t/events_dropped"] == 0
        client.check()
