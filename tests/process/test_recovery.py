"""A server that is killed, and the one that takes its store over."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import _native, errors, rate_limiters, recovery, selectors, store
from tests.conftest import free_port
from tests.process.servants import (
    DEADLINE,
    MIB,
    Other,
    make_tables,
    rows,
    values_of,
    wait_until,
)

Others = Callable[[], Other]

# Newer versions of Python warn of forking where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def file_of(name: str) -> Path:
    return Path(f"/dev/shm/shmreplay.{os.geteuid()}.{name}")


def items_of(name: str, table: int) -> list[tuple[Any, ...]]:
    """All that a table holds, read without sampling: what counts samples would change it."""
    opened = store.Store.open(name)
    try:
        found = _native.peek_items(opened.native, table)
        return [_native.peek_item(opened.native, table, *at[1:]) or () for at in sorted(found)]
    finally:
        opened.release()


def counters(client: reverb.Client) -> dict[str, float]:
    return {key: value for key, value in client.stats().items() if "/" in key}


# --- what is taken over -------------------------------------------------------------------------


def test_everything_is_taken_over(store_name: str, others: Others) -> None:
    server, witness = others(), others()
    server.call("serve", store_name)
    client = reverb.Client(f"shm://{store_name}")
    keys = client.insert_batch("replay", rows(*range(200)), priorities=np.arange(200) / 7)
    client.update_priorities("replay", keys[:20], np.full(20, 11.0))
    client.mutate_priorities("replay", deletes=[int(key) for key in keys[50:60]])
    client.sample_batch("replay", 64)
    client.insert_batch("queue", rows(1, 2, 3))
    assert values_of(client.sample_batch("queue", 2)) == [1, 2]
    with client.trajectory_writer(5) as writer:
        for number in range(5):
            writer.append({"a": np.full(7, number), "b": number})
        writer.create_item(
            "replay", 3.0, {"a": writer.history["a"][-1::-2], "b": writer.history["b"][:]}
        )
    writer.close()
    before = counters(client)
    items = [items_of(store_name, table) for table in (0, 1)]
    info = client.server_info()
    client.close()
    server.kill()
    # Nobody lives now.
    witness.call("serve", store_name, recover=True)
    client = reverb.Client(f"shm://{store_name}")
    assert counters(client) == before
    assert client.server_info() == info
    assert [items_of(store_name, table) for table in (0, 1)] == items
    assert [len(table) for table in items] == [191, 1]
    client.check()
    assert client.update_priorities("replay", keys, np.ones(200)) == 190
    assert values_of(client.sample_batch("queue", 1)) == [3]
    client.close()


def test_attached_clients_do_not_notice(store_name: str, others: Others) -> None:
    first, second, waiting = others(), others(), others()
    port = first.call("serve", store_name)
    client = reverb.Client(f"localhost:{port}")
    client.insert_batch("replay", rows(1, 2, 3))
    writer = client.trajectory_writer(2)
    writer.append({"x": 4.0})
    sampler = client.sampler("replay", 2)
    next(sampler)
    with client.borrow("replay", 3) as items:
        views = [item.data["x"] for item in items]
    seen = [float(view) for view in views]
    waiting.call("connect", f"shm://{store_name}")
    waiting.ask("wait_for_items", "queue", 2)
    wait_until(lambda: client.stats()["queue/sample_waiters"] > 0, "it waits")

    first.kill()
    writer.append({"x": 5.0})
    writer.create_item("replay", 1.0, {"x": writer.history["x"][-1]})
    next(sampler)
    assert client.server_info()["replay"].current_size == 4

    assert second.call("serve", store_name, recover=True) == port
    writer.append({"x": 6.0})
    writer.create_item("replay", 1.0, {"x": writer.history["x"][-1]})
    assert client.stats()["replay/size"] == 5
    second.call("connect", f"localhost:{port}")
    second.call("insert", "queue", 7, 8)
    assert waiting.answer() == [7, 8]
    assert [float(view) for view in views] == seen
    next(sampler)
    sampler.close()
    writer.close()
    client.check()
    # The new server is the server in all respects: when it stops, the store is closed.
    second.call("stop")
    with pytest.raises(errors.ServerClosedError):
        client.sample_batch("replay", 1)
    assert not file_of(store_name).exists()
    client.close()


def test_a_client_becomes_the_server(store_name: str, others: Others) -> None:
    server, another = others(), others()
    server.call("serve", store_name)
    client = reverb.Client(f"shm://{store_name}")
    client.insert_batch("replay", rows(1, 2))
    server.kill()
    tables = make_tables()
    taken = reverb.Server(tables, name=store_name, recover=True)
    assert tables[0].info.current_size == 2
    another.call("connect", f"shm://{store_name}")
    another.call("insert", "replay", 3)
    assert taken.stats()["replay/size"] == client.stats()["replay/size"] == 3
    participants = taken._connection.store.participants()
    assert [each.pid for each in participants] == [os.getpid(), os.getpid(), another.pid]
    assert all(each.alive for each in participants)
    taken._connection.store.reclaim_dead()
    assert len(taken._connection.store.participants()) == 3
    with pytest.raises(errors.StoreExistsError, match="this one"):
        reverb.Server(make_tables(), name=store_name, recover=True)
    taken.stop()
    with pytest.raises(errors.ServerClosedError):
        client.stats()
    with pytest.raises(errors.ServerClosedError):
        another.call("sample", "replay", 1)
    client.close()
    assert not file_of(store_name).exists()


def test_what_dead_clients_held_comes_back(store_name: str, others: Others) -> None:
    server, dead, heir = others(), others(), others()
    server.call("serve", store_name)
    client = reverb.Client(f"shm://{store_name}")
    client.insert_batch("replay", rows(1, 2, 3))
    dead.call("connect", f"shm://{store_name}")
    before = client.stats()
    dead.call("borrow", "replay", 3)
    dead.call("hold_steps", 100, 1000)
    server.call("connect", f"shm://{store_name}")
    server.call("hold_steps", 100, 1000)
    assert client.stats()["arena_used_bytes"] > before["arena_used_bytes"] + 1.6e6
    # Stopped first, so that its janitor is not faster.
    os.kill(server.pid, signal.SIGSTOP)
    dead.kill()
    server.kill()
    heir.call("serve", store_name, recover=True)
    after = client.stats()
    assert after["participants"] == 2
    assert after["arena_used_bytes"] < before["arena_used_bytes"] + 2048
    assert (after["borrowed_batches"], after["poisoned_tables"]) == (0, 0)
    client.check()
    client.close()


@pytest.mark.parametrize("reaped", [True, False])
def test_server_after_server(store_name: str, others: Others, reaped: bool) -> None:
    """Killed again and again under a writer that goes on: whatever it acknowledged is there."""
    server = others()
    server.call("serve", store_name, other_tables(max_size=10**5))
    client = reverb.Client(f"shm://{store_name}")
    client.server_info()
    acknowledged = threading.Event()
    ended = threading.Event()
    keys: list[int] = []

    def write() -> None:
        with reverb.Client(f"shm://{store_name}") as own:
            while not ended.wait(0.001):  # so that they all fit
                keys.append(int(own.insert_batch("replay", rows(len(keys)))[0]))
                acknowledged.set()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(4):
            acknowledged.clear()
            if reaped:
                server.kill()
            else:
                os.kill(server.pid, signal.SIGKILL)
                os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
            known = len(keys)
            assert acknowledged.wait(DEADLINE)
            server = others()
            server.call("serve", store_name, other_tables(max_size=10**5), recover=True)
            found = {item[1] for item in items_of(store_name, 0)}
            assert found >= set(keys[:known])
    finally:
        ended.set()
        thread.join(DEADLINE)
    assert {item[1] for item in items_of(store_name, 0)} == set(keys)
    client.check()
    client.close()


def test_all_killed_at_once(store_name: str, others: Others) -> None:
    server, *clients = others(), others(), others()
    server.call("serve", store_name)
    for number, each in enumerate(clients):
        each.call("connect", f"shm://{store_name}")
        each.call("insert", "replay", number)
        each.call("borrow", "replay", 1)
    for each in (server, *clients):
        os.kill(each.pid, signal.SIGKILL)
    for each in (server, *clients):
        each.process.join()
    with reverb.Server(None, name=store_name, recover=True) as taken:
        stats = taken.stats()
        assert (stats["replay/size"], stats["participants"], stats["sessions"]) == (2, 1, 0)
        assert stats["borrowed_batches"] == 0
        taken.check()
    assert not file_of(store_name).exists()


# --- what is declared ---------------------------------------------------------------------------


def other_tables(max_size: int = 1000, **options: Any) -> list[reverb.Table]:
    limiter = rate_limiters.MinSize(1)
    sampler = selectors.Prioritized(0.8)
    replay = reverb.Table("replay", sampler, selectors.Fifo(), max_size, limiter, **options)
    return [replay, reverb.Table.queue("queue", 4)]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (other_tables(max_size=7), ("'replay'", "max_size 1000 in the store", "declared is 7")),
        (other_tables()[:1], ("'queue' is in the store and not declared",)),
        (
            [*other_tables(), reverb.Table.queue("more", 1)],
            ("'more' is declared and not in the store",),
        ),
        (other_tables(max_times_sampled=3), ("max_times_sampled 0 in the store", "is 3")),
        (other_tables(signature={"x": reverb.TensorSpec((), "float64")}), ("signature_json",)),
        (
            other_tables(extensions=[reverb.TableExtension()]),
            ("'replay' was made without extensions, and is declared with",),
        ),
    ],
)
def test_other_tables(
    store_name: str, others: Others, tables: list[reverb.Table], words: tuple[str, ...]
) -> None:
    server, heir = others(), others()
    port = server.call("serve", store_name)
    server.call("connect", f"shm://{store_name}")
    server.call("insert", "replay", 5)
    server.kill()
    image = file_of(store_name).read_bytes()[: 1 << 16]
    with pytest.raises(errors.InvalidArgumentError) as caught:
        heir.call("serve", store_name, tables, recover=True)
    for word in (store_name, *words):
        assert word in str(caught.value)
    assert file_of(store_name).read_bytes()[: 1 << 16] == image, "something was changed"
    assert heir.call("serve", store_name, recover=True) == port
    heir.call("connect", f"shm://{store_name}")
    assert heir.call("sample", "replay", 1) == [5]


def test_the_default_of_stripes_is_that_of_the_store(
    store_name: str, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = others()
    server.call("serve", store_name, other_tables(stripes=3))
    server.kill()
    with pytest.raises(errors.InvalidArgumentError, match="stripes 3 in the store, declared is 2"):
        reverb.Server(other_tables(stripes=2), name=store_name, recover=True)
    with reverb.Server(other_tables(), name=store_name, recover=True) as taken:
        assert taken._connection.configs[0].stripes == 3


def test_nothing_to_recover(store_name: str) -> None:
    with pytest.raises(errors.StoreNotFoundError, match="nothing to recover"):
        reverb.Server(None, name=store_name, recover=True)
    with pytest.raises(errors.InvalidArgumentError, match="without a name"):
        reverb.Server(make_tables(), recover=True)
    assert not file_of(store_name).exists()
    with reverb.Server(make_tables(), name=store_name, capacity=16 * MIB, recover=True) as server:
        server.localhost_client().insert_batch("replay", rows(1))


def test_the_port_is_kept(
    store_name: str, others: Others, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = others(), others(), others()
    port = first.call("serve", store_name)
    first.kill()
    assert second.call("serve", store_name, recover=True) == port
    second.kill()
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", port))
        with reverb.Server(None, name=store_name, recover=True) as server:
            assert server.port != port
            assert f"it has {server.port} now" in caplog.text
            assert reverb.Client(f"localhost:{server.port}").server_info()
    third.call("serve", store_name)
    third.kill()
    wanted = free_port()
    with reverb.Server(None, port=wanted, name=store_name, recover=True) as server:
        assert server.port == wanted
        assert store.Store.find_by_port(wanted) == store_name


# --- who may ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("thread", ["shmreplay-commit", "shmreplay-extensions"])
def test_a_server_that_cannot_start_leaves_what_it_took_over(
    store_name: str,
    others: Others,
    monkeypatch: pytest.MonkeyPatch,
    attached: bool,
    thread: str,
) -> None:
    def tables() -> list[reverb.Table]:
        return other_tables(extensions=[reverb.TableExtension()])

    server, client = others(), others()
    server.call("serve", store_name, tables())
    client.call("connect", f"shm://{store_name}")
    client.call("insert", "replay", 1, 2, 3)
    own = reverb.Client(f"shm://{store_name}")
    if attached:
        assert own.server_info()["replay"].current_size == 3
    server.kill()
    start = threading.Thread.start

    def fail(self: threading.Thread) -> None:
        if self.name == thread:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        reverb.Server(tables(), name=store_name, recover=True)
    monkeypatch.undo()
    with recovery.look(store_name) as found:
        assert found.state == recovery.CLIENTS_ONLY
    client.call("insert", "replay", 4)
    with reverb.Server(tables(), name=store_name, recover=True) as successor:
        assert successor.stats()["replay/size"] == 4
        assert own.server_info()["replay"].current_size == 4
        successor.check()
    assert not file_of(store_name).exists()


def test_a_living_server_stays(
    store_name: str, others: Others, caplog: pytest.LogCaptureFixture
) -> None:
    server, rival = others(), others()
    server.call("serve", store_name)
    with pytest.raises(errors.StoreExistsError, match=rf"server {server.pid}") as caught:
        rival.call("serve", store_name, recover=True)
    assert "recover=True" not in str(caught.value)
    with pytest.raises(errors.StoreExistsError):
        reverb.Server(make_tables(), name=store_name, recover=True)
    assert not caplog.records, "its port was not taken from it"
    # Nor does stopping it for a while make it dead.
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(errors.StoreExistsError):
        rival.call("serve", store_name, recover=True)
    os.kill(server.pid, signal.SIGCONT)
    server.call("connect", f"shm://{store_name}")
    server.call("insert", "replay", 1)


def test_one_of_several_recovers(store_name: str, others: Others) -> None:
    server = others()
    server.call("serve", store_name)
    client = reverb.Client(f"shm://{store_name}")
    client.insert_batch("replay", rows(1))
    for _ in range(3):
        server.kill()
        rivals = [others() for _ in range(3)]
        for rival in rivals:
            rival.ask("serve", store_name, recover=True)
        winners: list[Other] = []
        for rival in rivals:
            try:
                rival.answer()
            except errors.StoreExistsError as error:
                assert "server" in str(error)
            else:
                winners.append(rival)
        (server,) = winners
        client.insert_batch("replay", rows(2))
    assert client.stats()["replay/size"] == 4
    client.check()
    client.close()


def test_without_recover(store_name: str, others: Others, caplog: pytest.LogCaptureFixture) -> None:
    server, client, rival = others(), others(), others()
    server.call("serve", store_name)
    client.call("connect", f"shm://{store_name}")
    client.call("insert", "replay", 1)
    server.kill()
    with pytest.raises(errors.StoreExistsError) as caught:
        rival.call("serve", store_name)
    for word in (f"client {client.pid}", "recover=True", "shmreplay clean", store_name):
        assert word in str(caught.value)
    assert client.call("sample", "replay", 1) == [1]
    client.kill()
    with (
        caplog.at_level(logging.INFO, "shmreplay"),
        reverb.Server(make_tables(), name=store_name, capacity=16 * MIB) as anew,
    ):
        assert f"replacing store '{store_name}'" in caplog.text
        assert anew.stats()["replay/size"] == 0


@pytest.mark.parametrize("left", ["closed", "not laid out", "empty"])
def test_what_cannot_be_recovered_is_made_anew(store_name: str, others: Others, left: str) -> None:
    if left == "closed":
        server = others()
        server.call("serve", store_name)
        with store.guard():
            opened = store.Store.open(store_name)
            opened.native.close_server()
            opened.release()
        server.kill()
    else:
        for suffix in ("", ".lease"):
            path = file_of(store_name + suffix)
            path.touch(0o600)
            if left == "not laid out" and not suffix:
                os.truncate(path, MIB)
    with reverb.Server(make_tables(), name=store_name, capacity=16 * MIB, recover=True) as anew:
        anew.localhost_client().insert_batch("replay", rows(1))
        assert anew.stats()["closed"] == 0


# --- a server that was stopped and started again ------------------------------------------------


@pytest.mark.parametrize("by", ["port", "name"])
def test_a_client_goes_on_with_the_next_server(store_name: str, others: Others, by: str) -> None:
    first, second = others(), others()
    port = first.call("serve", store_name)
    client = reverb.Client(f"localhost:{port}" if by == "port" else f"shm://{store_name}")
    client.insert_batch("replay", rows(1))
    client.insert({"x": 1.0}, {"replay": 1.0})
    client.insert_batch("queue", rows(1, 2, 3))
    generator = client.sample("replay", 10, emit_timesteps=False)
    next(generator)
    writer = client.trajectory_writer(2)
    writer.append({"x": 1.0})
    sampler = client.sampler("replay", 1, prefetch=0)
    first.call("stop")
    calls: list[Callable[[], Any]] = [
        client.server_info,
        client.stats,
        lambda: client.sample_batch("replay", 1),
        lambda: client.insert_batch("replay", rows(1)),
        lambda: client.insert({"x": 1.0}, {"replay": 1.0}),
        lambda: client.update_priorities("replay", [1], [1.0]),
        lambda: client.reset("replay"),
        lambda: client.check(),
        lambda: client.trajectory_writer(1),
        lambda: next(generator),
    ]
    for call in calls:
        with pytest.raises(errors.ServerClosedError, match="server has closed this store"):
            call()

    # Other tables, too: the numbers of the old ones mean nothing now.
    second.call("serve", store_name, [reverb.Table.queue("new", 2), *make_tables()], port=port)
    assert client.stats()["replay/size"] == 0
    client.insert({"x": 5.0}, {"replay": 1.0})
    client.insert_batch("queue", rows(9))
    assert values_of(client.sample_batch("queue", 1)) == [9]
    for old in (
        lambda: next(sampler),
        lambda: writer.create_item("replay", 1.0, {"x": writer.history["x"][:]}),
    ):
        with pytest.raises(errors.ServerClosedError, match=r"make new|made anew"):
            old()
    with pytest.raises(errors.ServerClosedError):
        for number in range(10_000):
            writer.append({"x": float(number)})
    writer.close()
    sampler.close()
    with client.trajectory_writer(1) as writer:
        writer.append({"x": 6.0})
        writer.create_item("replay", 1.0, {"x": writer.history["x"][-1]})
    writer.close()
    assert client.stats()["replay/size"] == 2
    client.check()
    client.close()


def test_a_server_that_was_stopped_says_so(store_name: str) -> None:
    tables = make_tables()
    server = reverb.Server(tables, name=store_name, capacity=16 * MIB)
    server.stop()
    for call in (server.stats, lambda: tables[0].info):
        with pytest.raises(errors.ServerClosedError):
            call()


def test_no_server_at_a_port() -> None:
    port = free_port()
    client = reverb.Client(f"localhost:{port}")
    with pytest.raises(errors.DeadlineExceededError) as caught:
        client.server_info(timeout=1)
    for word in ("timeout of 1s", f"localhost:{port}", "/dev/shm", f"user {os.geteuid()}"):
        assert word in str(caught.value)
