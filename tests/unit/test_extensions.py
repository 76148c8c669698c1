"""Extensions are told of every change, in order, outside of locks; what cannot be told waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits
from shmreplay.extensions import ExtensionItem, insert_on_sample
from tests.conftest import free_port

DEADLINE_S = 60.0
MakeServer = Callable[..., reverb.Server]


class Recorder(reverb.TableExtension):
    """Notes everything."""

    def __init__(self) -> None:
        self.happened: list[tuple[Any, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.called = threading.Event()

    def note(self, what: str, item: ExtensionItem) -> None:
        self.called.set()
        assert self.gate.wait(DEADLINE_S)
        self.happened.append((what, item.key, item.priority, item.times_sampled))

    def on_insert(self, item: ExtensionItem) -> None:
        self.note("insert", item)

    def on_delete(self, item: ExtensionItem) -> None:
        self.note("delete", item)

    def on_update(self, item: ExtensionItem) -> None:
        self.note("update", item)

    def on_sample(self, item: ExtensionItem) -> None:
        self.note("sample", item)

    def on_reset(self) -> None:
        self.happened.append(("reset",))


def table(name: str = "t", max_size: int = 10, **options: Any) -> reverb.Table:
    arguments: dict[str, Any] = {
        "name": name,
        "sampler": reverb.selectors.Fifo(),
        "remover": reverb.selectors.Fifo(),
        "max_size": max_size,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
    }
    return reverb.Table(**{**arguments, **options})


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)  # between two looks at a condition with a deadline


def told(server: reverb.Server, name: str = "t") -> None:
    """Waits until the extensions were told of everything."""
    client = server.localhost_client()
    thread = server._extensions
    assert thread is not None
    until(lambda: client.stats()[f"{name}/events"] == 0 and thread._source.batch is None)
    client.close()


def test_every_change_in_order(make_server: MakeServer) -> None:
    recorder = Recorder()
    server = make_server([table(extensions=[recorder], max_times_sampled=2)])
    client = server.localhost_client()
    keys = [int(client.insert_batch("t", {"x": np.full((1, 2), i)}, i)[0]) for i in range(11)]
    client.update_priorities("t", [keys[3], keys[0]], [7.5, 9])  # the second has left
    client.mutate_priorities("t", updates={keys[2]: 3}, deletes=[keys[4]])
    client.sample_batch("t", 3)
    client.reset("t")
    told(server)
    assert recorder.happened == [
        *[("insert", keys[i], i, 0) for i in range(11)],
        ("delete", keys[0], 0, 0),
        ("update", keys[3], 7.5, 0),
        ("delete", keys[4], 4, 0),
        ("update", keys[2], 3, 0),
        ("sample", keys[1], 1, 1),
        ("sample", keys[1], 1, 2),
        ("delete", keys[1], 1, 2),
        ("sample", keys[2], 3, 1),
        ("reset",),
    ]
    stats = server.stats()
    assert (stats["t/events_dropped"], stats["t/extension_errors"]) == (0, 0)
    server.check()


def test_data_as_a_sample_has_it(make_server: MakeServer) -> None:
    seen: list[tuple[str, Any, int]] = []
    kept: list[ExtensionItem] = []

    class Reader(reverb.TableExtension):
        def on_insert(self, item: ExtensionItem) -> None:
            seen.append((item.table, item.data, item.inserted_ns))
            assert item.data is item.data
            item.data["a"][...] += 1  # a copy

        def on_delete(self, item: ExtensionItem) -> None:
            kept.append(item)

    server = make_server([table(extensions=[Reader()])])
    client = server.localhost_client()
    writer = client.trajectory_writer(3)
    for i in range(3):
        writer.append({"a": np.full(2, i, np.int16), "b": np.float32(i)})
    history = writer.history
    writer.create_item(
        "t", 1.0, {"n": (history["a"][:], history["b"][-1:]), "last": history["a"][-1]}
    )
    client.insert({"s": 5.0}, {"t": 2.0})
    sampled = next(client.sample("t", emit_timesteps=False))
    told(server)
    (name, data, inserted_ns), second = seen
    assert name == "t"
    assert abs(inserted_ns - time.time_ns()) < 1e9 * DEADLINE_S
    assert set(data) == {"n", "last"}
    assert data["n"][0].dtype == np.int16
    np.testing.assert_array_equal(data["last"], [2, 2])
    np.testing.assert_array_equal(data["n"][0], [[0, 0], [1, 1], [2, 2]])
    np.testing.assert_array_equal(data["n"][1], np.array([2], np.float32))
    np.testing.assert_array_equal(second[1]["s"], [5.0])
    np.testing.assert_array_equal(sampled.data[1], [[0, 0], [1, 1], [2, 2]])
    client.reset("t")
    client.insert({"s": 1.0}, {"t": 2.0})
    client.mutate_priorities("t", deletes=[next(client.sample("t")).__getitem__(0).info.key])
    told(server)
    with pytest.raises(errors.ExtensionError, match=f"item {kept[0].key} of table 't'"):
        _ = kept[0].data
    with pytest.raises(errors.ExtensionError, match="insert_into"):
        kept[0].insert_into("t")
    writer.close()


def test_what_a_method_raises_is_logged_and_counted(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()

    class Broken(reverb.TableExtension):
        def on_insert(self, item: ExtensionItem) -> None:
            raise KeyError("a defect of this extension")

        def on_reset(self) -> None:
            raise SystemExit(3)

    server = make_server([table(extensions=[Broken(), recorder])])
    client = server.localhost_client()
    client.insert_batch("t", {"x": np.zeros(5)})
    client.reset("t")
    client.insert_batch("t", {"x": np.zeros(1)})
    told(server)
    assert [entry[0] for entry in recorder.happened] == [*["insert"] * 5, "reset", "insert"]
    assert server.stats()["t/extension_errors"] == 7
    (record, *_) = [r for r in caplog.records if "on_insert of an extension" in r.message]
    assert record.exc_info is not None
    assert "a defect of this extension" in str(record.exc_info[1])


def test_want_of_memory_ends_no_thread(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Else whoever changes the table would wait for ever once the ring is full."""

    class Poor:
        """A session for which there is no memory once."""

        def __init__(self, session: Any) -> None:
            self._session = session
            self.failed = threading.Event()

        def take_events(self, *arguments: int) -> Any:
            if not self.failed.is_set():
                self.failed.set()
                raise MemoryError("no memory for a batch of 64")
            return self._session.take_events(*arguments)

        def close(self) -> None:
            self._session.close()

    recorder = Recorder()
    server = make_server([table(extensions=[recorder])])
    thread = server._extensions
    assert thread is not None
    poor: Any = Poor(thread._session)
    thread._session = poor
    assert poor.failed.wait(60.0)
    server.localhost_client().insert_batch("t", {"x": np.zeros(5)})
    told(server)
    assert [entry[0] for entry in recorder.happened] == ["insert"] * 5
    assert "no memory for a batch" in caplog.text


def fill(client: reverb.Client) -> int:
    """Inserts until the ring is full; returns how many."""
    for n in range(limits.EXTENSION_EVENTS + limits.EXTENSION_BATCH + 2):
        try:
            client.insert_batch("t", {"x": np.zeros(1)}, timeout=0)
        except errors.DeadlineExceededError as error:
            assert "its extensions are behind" in str(error)
            return n
    pytest.fail("the ring is never full")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_runs_ahead_waits(make_server: MakeServer, transport: str) -> None:
    recorder = Recorder()
    server = make_server([table(extensions=[recorder], max_size=5000)], port=free_port())
    addresses = {"shm": server.address, "tcp": f"tcp://127.0.0.1:{server.port}"}
    client = reverb.Client(addresses[transport])
    first = int(client.insert_batch("t", {"x": np.zeros(1)})[0])
    told(server)
    recorder.gate.clear()
    recorder.called.clear()
    client.insert_batch("t", {"x": np.zeros(1)})
    assert recorder.called.wait(DEADLINE_S)  # from here on nothing is taken out of the ring
    n = 2 + fill(client)
    before = client.server_info()["t"]
    assert before.current_size == n
    with pytest.raises(errors.DeadlineExceededError, match="its extensions are behind"):
        client.sample_batch("t", 1, timeout=0.05)
    with pytest.raises(errors.DeadlineExceededError, match="its extensions are behind"):
        client.insert({"x": 1.0}, {"t": 1.0}, timeout=0.05)
    writer = client.trajectory_writer(1)
    writer.append({"x": 0.0})
    assert writer.create_item("t", 1.0, {"x": writer.history["x"][:]}) is None
    with pytest.raises(errors.DeadlineExceededError, match="its extensions are behind"):
        writer.flush(timeout_ms=50)
    assert client.server_info()["t"] == before
    server.check()
    keys = np.full(200, first, np.uint64)
    calls: list[Callable[[], Any]] = [
        lambda: client.update_priorities("t", keys, 2.0),
        lambda: client.mutate_priorities("t", deletes=[first]),
        lambda: client.sample_batch("t", 300),
        lambda: client.insert_batch("t", {"x": np.zeros(700)}),
    ]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    recorder.gate.set()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    writer.flush()
    writer.close()
    told(server)
    kinds = [entry[0] for entry in recorder.happened]
    assert kinds.count("insert") == n + 1 + 700
    assert kinds.count("sample") == 300
    assert kinds.count("delete") == 1
    assert kinds.count("update") in range(201)  # those before the item left
    assert server.stats()["t/events_dropped"] == 0
    client.reset("t")
    told(server)
    assert recorder.happened[-1] == ("reset",)
    server.check()
    client.close()


def test_an_extension_may_use_its_table(make_server: MakeServer) -> None:
    clients: list[reverb.Client] = []
    refused: list[Exception] = []
    inserted = threading.Event()

    class Caller(reverb.TableExtension):
        def on_insert(self, item: ExtensionItem) -> None:
            if item.priority == 1:
                clients[0].update_priorities("t", [item.key], [2.0])
            if item.priority == 5:
                assert inserted.wait(DEADLINE_S)  # its insert wants no room any more
                try:
                    clients[0].insert_batch("t", {"x": np.zeros(3000)}, 3.0)
                except errors.ExtensionError as error:
                    refused.append(error)
                for call in (
                    lambda: clients[0].sample_batch("t", 1),
                    lambda: clients[0].update_priorities("t", [item.key] * 9, 1.0),
                    lambda: clients[0].mutate_priorities("t", deletes=[item.key] * 9),
                ):
                    with pytest.raises(errors.ExtensionError, match="wait for itself"):
                        call()
                self.flush()

        def flush(self) -> None:
            writer = clients[0].trajectory_writer(1)
            writer.append({"x": 0.0})
            writer.create_item("t", 3.0, {"x": writer.history["x"][:]})
            with pytest.raises(errors.ExtensionError, match="wait for itself"):
                writer.flush()
            with pytest.raises(errors.ExtensionError, match="wait for itself"):
                writer.end_episode()
            writer.close()

    recorder = Recorder()
    server = make_server([table(extensions=[Caller(), recorder], max_size=5000)])
    clients.append(server.localhost_client())
    client = server.localhost_client()
    key = int(client.insert_batch("t", {"x": np.zeros(1)}, 1.0)[0])
    until(lambda: ("update", key, 2.0, 0) in recorder.happened)
    client.insert_batch("t", {"x": np.zeros(1)}, 5.0)
    inserted.set()
    until(lambda: bool(refused))
    assert "has no room to tell its extensions" in str(refused[0])
    told(server)
    assert server.stats()["t/extension_errors"] == 0
    server.check()


def test_a_sampled_item_is_inserted_elsewhere_without_a_copy(make_server: MakeServer) -> None:
    seen = table("seen", extensions=[recorder := Recorder()])
    server = make_server([table(extensions=[insert_on_sample("seen")]), seen])
    client = server.localhost_client()
    keys = client.insert_batch("t", {"x": np.arange(6.0).reshape(3, 2)}, [1.0, 2.0, 3.0])
    told(server)
    used = server.stats()["arena_used_bytes"]
    client.sample_batch("t", 2)  # twice the same: a fifo
    client.mutate_priorities("t", deletes=keys[:1].tolist())
    client.sample_batch("t", 1)
    told(server)
    told(server, "seen")
    assert [entry[2] for entry in recorder.happened if entry[0] == "insert"] == [1.0, 2.0]
    client.reset("t")
    told(server)
    assert server.stats()["arena_used_bytes"] == used
    first, second = (client.sample("seen", 1, emit_timesteps=False) for _ in range(2))
    np.testing.assert_array_equal(next(first).data[0], [0.0, 1.0])
    assert next(second).info.key == recorder.happened[0][1]
    server.check()


def test_insert_into_checks_what_it_is_given(make_server: MakeServer) -> None:
    results: list[Any] = []

    class Copier(reverb.TableExtension):
        def on_insert(self, item: ExtensionItem) -> None:
            for arguments in (
                ("none",),
                ("fits", float("nan")),
                ("fits", "3"),
                ("other",),
                ("queue", 1.0, 0.01),
                ("queue", 1.0, 0.01),
                ("fits", 4.0),
            ):
                try:
                    results.append(item.insert_into(*arguments))
                except errors.ReverbError as error:
                    results.append(type(error))

    def signature(dtype: Any) -> Any:
        return {"x": reverb.TensorSpec((None, 2), dtype, "x")}

    server = make_server(
        [
            table(extensions=[Copier()]),
            table("fits", signature=signature(np.float64)),
            table("other", signature=signature(np.float32)),
            reverb.Table.queue("queue", 1),
        ]
    )
    client = server.localhost_client()
    client.insert({"x": np.zeros(2)}, {"t": 1.0})
    told(server)
    *failed, key = results
    assert failed[0] is errors.TableNotFoundError
    assert failed[1:3] == [errors.PriorityError, errors.ArgumentTypeError]
    assert failed[3] is errors.SignatureError
    assert isinstance(failed[4], int)
    assert failed[5] is errors.DeadlineExceededError
    info = next(client.sample("fits"))[0].info
    assert (info.key, info.priority) == (key, 4.0)


@pytest.mark.parametrize("target", ["t", "none"])
def test_insert_on_sample_wants_another_table(make_server: MakeServer, target: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="the name of another table"):
        make_server([table(extensions=[insert_on_sample(target)])])
    with pytest.raises(errors.ArgumentTypeError, match="Got priority 'high' of type str"):
        insert_on_sample("t", priority="high")  # type: ignore[arg-type]


def test_a_stopped_server_tells_what_is_left(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EXTENSION_STOP_S", DEADLINE_S)
    recorder = Recorder()
    server = make_server([table(extensions=[recorder], max_size=1000)])
    client = server.localhost_client()
    recorder.gate.clear()
    client.insert_batch("t", {"x": np.zeros(300)})
    client.close()
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    until(lambda: server._stopped.is_set())
    recorder.gate.set()
    stopper.join(DEADLINE_S)
    assert len(recorder.happened) == 300


def test_a_stopped_server_does_not_wait_for_ever(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EXTENSION_STOP_S", 0.0)
    caplog.set_level(logging.WARNING)
    recorder = Recorder()
    server = make_server([table(extensions=[recorder], max_size=1000)])
    client = server.localhost_client()
    recorder.gate.clear()
    client.insert_batch("t", {"x": np.zeros(300)})
    client.close()
    (thread,) = [t for t in server._threads if t.name == "shmreplay-extensions"]
    assert recorder.called.wait(DEADLINE_S)  # else it may tell nothing at all and end in time
    server.stop()
    assert "still runs after the server stopped" in caplog.text
    recorder.gate.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert 1 <= len(recorder.happened) < 300
    assert "were not told of at least" in caplog.text


def test_a_store_too_small_for_the_ring(make_server: MakeServer) -> None:
    tables = [table(f"t{i}", extensions=[Recorder()]) for i in range(40)]
    with pytest.raises(errors.ArenaFullError):
        make_server(tables, capacity=1 << 20)
