"""What a client over the bridge does beyond what the conformance tests look at."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits, rate_limiters, selectors
from shmreplay.bridge.batch import RemoteBatch
from shmreplay.store import Store
from tests.conftest import PROCESS_DEADLINE, free_port

TABLE = "table"
DEADLINE = 60.0

Serve = Callable[..., reverb.Server]
Connect = Callable[..., reverb.Client]


def table(name: str = TABLE, **options: Any) -> reverb.Table:
    usual: dict[str, Any] = {
        "sampler": selectors.Fifo(),
        "remover": selectors.Fifo(),
        "max_size": 1000,
        "rate_limiter": rate_limiters.MinSize(1),
    }
    return reverb.Table(name, **{**usual, **options})


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.005)


# ---------------------------------------------------------------------- addresses


def test_host_and_port_lead_to_the_store_where_it_is_on_this_machine(serve: Serve) -> None:
    server = serve(table())
    for address, remote in (
        (f"localhost:{server.port}", False),
        (f"127.0.0.1:{server.port}", False),
        (f"tcp://localhost:{server.port}", True),
        (server.address, False),
    ):
        with reverb.Client(address) as client:
            client.server_info()
            assert hasattr(client._connected(), "link") == remote, address


def test_a_port_of_this_machine_without_a_store_of_this_user_is_a_bridge(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(table())
    monkeypatch.setattr(Store, "find_by_port", lambda port: None)
    monkeypatch.setattr(reverb.address, "_FOREIGN_S", 0.01)
    with reverb.Client(f"localhost:{server.port}") as client:
        client.server_info()
        assert hasattr(client._connected(), "link")


def test_a_client_waits_for_a_server_that_is_starting(serve: Serve) -> None:
    port = free_port()
    with reverb.Client(f"tcp://localhost:{port}") as client:
        started = threading.Timer(0.3, lambda: serve(table(), port=port))
        started.start()
        assert TABLE in client.server_info()
        started.join()


# ---------------------------------------------------------------------- data


def step(i: int) -> dict[str, Any]:
    return {"obs": {"image": np.full((8, 8), i, np.uint8), "v": np.float32(i)}, "r": (i, 0.5 * i)}


def test_structures_come_back_and_arrays_are_the_caller_s(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table()))
    data = {"a": (np.arange(4), [np.ones((4, 2), np.float16)]), "b": {"c": np.zeros(4, bool)}}
    client.insert_batch(TABLE, data)
    sample = client.sample_batch(TABLE, 3)
    assert type(sample.data["a"]) is tuple
    assert sample.data["a"][1][0].dtype == np.float16
    sample.data["b"]["c"][:] = True
    with client.borrow(TABLE, 2) as items:
        assert len(items) == 2
        assert not items[0].data["b"]["c"].flags.writeable
        np.testing.assert_array_equal(items[1].data["a"][1][0], [1, 1])
        kept = items[0].data["a"][0]
    assert kept == 0


def test_out_is_filled(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table(max_times_sampled=1)))
    client.insert_batch(TABLE, {"x": np.arange(20.0).reshape(5, 4)})
    out = {"x": np.zeros((2, 4))}
    assert client.sample_batch(TABLE, 2, out=out).data["x"] is out["x"]
    np.testing.assert_array_equal(out["x"], np.arange(8.0).reshape(2, 4))
    with pytest.raises(errors.InvalidArgumentError, match="out at"):
        client.sample_batch(TABLE, 2, out={"x": np.zeros((2, 5))})
    # What did not fit is delivered to the next call.
    np.testing.assert_array_equal(client.sample_batch(TABLE, 1).data["x"], [[8, 9, 10, 11]])
    got = client.sample_batch(TABLE, 5, timeout=0).data["x"]
    np.testing.assert_array_equal(got, np.arange(12.0, 20.0).reshape(2, 4))


def test_items_of_different_shapes(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table(max_times_sampled=1)))
    client.insert_batch(TABLE, {"x": np.zeros((1, 3))})
    client.insert_batch(TABLE, {"y": np.ones((1, 2), np.int32)})
    with pytest.raises(errors.InvalidArgumentError, match="cannot be stacked"):
        client.sample_batch(TABLE, 2)
    with client.borrow(TABLE, 2) as items:
        assert [list(item.data) for item in items] == [["x"], ["y"]]
    with pytest.raises(errors.DeadlineExceededError):
        client.sample_batch(TABLE, 1, timeout=0)


def test_compression(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table(max_times_sampled=1)), compress=True)
    data = {"z": np.zeros((10, 50_000)), "n": np.random.default_rng(0).random((10, 5000))}
    client.insert_batch(TABLE, data)
    sample = client.sample_batch(TABLE, 10)
    for name, array in data.items():
        np.testing.assert_array_equal(sample.data[name], array)
        assert sample.data[name].flags.writeable


def test_signatures_and_errors_are_those_of_a_local_client(serve: Serve, connect: Connect) -> None:
    signed = table(signature={"x": reverb.TensorSpec((2,), np.float32)})
    server = serve(signed)
    with reverb.Client(server.address) as local:
        clients = [connect(server), local]
        calls: list[Callable[[reverb.Client], Any]] = [
            lambda c: c.insert_batch(TABLE, {"x": np.zeros((1, 3), np.float32)}),
            lambda c: c.insert_batch(TABLE, {"y": np.zeros((1, 2), np.float32)}, np.nan),
            lambda c: c.insert_batch("nope", {"x": np.zeros((1, 2), np.float32)}),
            lambda c: c.insert({"x": np.zeros(2)}, {TABLE: 1.0}),
            lambda c: c.sample_batch(TABLE, 1, timeout=0),
            lambda c: c.update_priorities(TABLE, [1], [np.nan]),
            lambda c: c.reset("nope"),
        ]
        for call in calls:
            caught = []
            for client in clients:
                with pytest.raises(errors.ReverbError) as error:
                    call(client)
                caught.append((type(error.value), str(error.value).split("; now size")[0]))
            assert caught[0] == caught[1]


# ---------------------------------------------------------------------- writers


def test_steps_cross_once_however_many_items_refer_to_them(serve: Serve, connect: Connect) -> None:
    server = serve(table(), table("other"))
    client = connect(server)
    writer = client.trajectory_writer(10)
    sent = count_bytes(client)
    for i in range(20):
        writer.append({"x": np.full(10_000, i, np.uint8)})
        if i >= 9:
            for name in (TABLE, "other"):
                writer.create_item(name, 1.0, {"x": writer.history["x"][-10:]})
    assert 200_000 < sum(sent) < 220_000
    data = client.sample_batch(TABLE, 11).data["x"]
    np.testing.assert_array_equal(data[:, :, 0], np.arange(11)[:, None] * 0 + np.arange(10))
    writer.close()


def count_bytes(client: reverb.Client) -> list[int]:
    """Sizes of the requests from here on."""
    link = client._connected().link  # type: ignore[attr-defined]
    post, sizes = link.post, []

    def counted(kind: Any, body: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(body.meta) + body.nbytes)
        return post(kind, body, *args, **options)

    link.post = counted
    return sizes


def test_partial_steps_steps_in_place_and_columns_that_come_later(
    serve: Serve, connect: Connect
) -> None:
    client = connect(serve(table(max_times_sampled=1)))
    writer = client.trajectory_writer(5)
    writer.configure(("late",), num_keep_alive_refs=3, max_chunk_length=1)
    writer.append({"a": 1}, partial_step=True)
    writer.append({"b": 2.0})
    writer.append({"a": 3, "b": None})
    writer.append({"a": 4, "b": 5.0, "late": np.arange(3)})
    writer.append({})
    with writer.next_step({"a": np.int64(0), "place": np.zeros((2, 2), np.float32)}) as new:
        new["a"][...] = 6
        new["place"][...] = 7
    h = writer.history
    assert len(h["a"]) == 5
    assert writer.episode_steps == 5
    item = {"a": h["a"][[0, 1, 2, 4]], "b": h["b"][[0, 2]], "p": h["place"][-1], "l": h["late"][2]}
    writer.create_item(TABLE, 1.0, item)
    (got,) = client.sample(TABLE, emit_timesteps=False)
    a, b, late, place = got.data
    assert (a.tolist(), b.tolist(), late.tolist()) == ([1, 3, 4, 6], [2.0, 5.0], [0, 1, 2])
    assert (place == 7).all()
    writer.close()


def test_items_may_refer_to_steps_of_two_writers(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table()))
    one, two = client.trajectory_writer(3), client.trajectory_writer(3)
    one.append({"x": 1})
    two.append({"y": 2.0})
    two.append({"y": 3.0})
    item = {"x": one.history["x"][-1], "y": two.history["y"][-2:]}
    one.create_item(TABLE, 1.0, item)
    data = client.sample_batch(TABLE, 1).data
    assert data["x"].tolist() == [1]
    assert data["y"].tolist() == [[2.0, 3.0]]
    other = connect(serve(table()))
    with pytest.raises(errors.InvalidArgumentError, match="another store"):
        other.trajectory_writer(1).create_item(TABLE, 1.0, item)


def test_held_back_items_go_in_by_themselves_and_in_order(serve: Serve, connect: Connect) -> None:
    server = serve(reverb.Table.queue(TABLE, 3))
    client = connect(server)
    writer = client.trajectory_writer(1)
    keys = []
    for i in range(10):
        writer.append({"x": i})
        keys.append(writer.create_item(TABLE, 1.0, {"x": writer.history["x"][-1]}))
    assert [key is None for key in keys] == [False] * 3 + [True] * 7
    with reverb.Client(server.address) as local:
        got = [int(local.sample_batch(TABLE, 1, DEADLINE).data["x"][0]) for _ in range(10)]
    assert got == list(range(10))
    writer.flush(timeout_ms=int(1000 * DEADLINE))
    writer.close()


def test_a_full_window_is_back_pressure_and_not_growth(serve: Serve, connect: Connect) -> None:
    client = connect(serve(reverb.Table.queue(TABLE, 3)))
    total = limits.WRITER_WINDOW_ITEMS + 50
    for confirm in (True, False):
        created: list[int] = []

        def write(confirm: bool = confirm, created: list[int] = created) -> None:
            with client.trajectory_writer(1, confirm=confirm) as writer:
                for i in range(total):
                    writer.append({"x": i})
                    writer.create_item(TABLE, 1.0, {"x": writer.history["x"][-1]})
                    created.append(i)
            writer.close()

        thread = threading.Thread(target=write)
        thread.start()
        if confirm:
            wait_until(lambda c=created: len(c) == limits.WRITER_WINDOW_ITEMS + 3)  # type: ignore[misc]
        got = [int(client.sample_batch(TABLE, 1, DEADLINE).data["x"][0]) for _ in range(total)]
        thread.join(DEADLINE)
        assert got == list(range(total))


def test_pipelined_items_report_what_went_wrong(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table(), capacity=2 << 20))
    writer = client.trajectory_writer(1, confirm=False)
    with pytest.raises(errors.ArenaFullError, match="make a new one"):
        for _ in range(1000):
            writer.append({"x": np.zeros(50_000)})
            writer.create_item(TABLE, 1.0, {"x": writer.history["x"][-1]})
        writer.flush()
    writer.close()
    client.reset(TABLE)
    client.insert({"x": 1}, {TABLE: 1.0})


def test_a_writer_that_is_dropped_gives_its_place_back(serve: Serve, connect: Connect) -> None:
    server = serve(table())
    client = connect(server)
    client.insert({"x": 1}, {TABLE: 1.0})
    before = server.stats()["sessions"]
    for _ in range(3 * limits.BRIDGE_WRITERS):
        client.trajectory_writer(1).append({"x": 1})
    wait_until(lambda: server.stats()["sessions"] == before)


def test_keep_alive_of_remote_writers_is_bounded(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table()))
    with pytest.raises(errors.InvalidArgumentError, match="num_keep_alive_refs"):
        client.trajectory_writer(limits.BRIDGE_KEEP_ALIVE + 1)


# ---------------------------------------------------------------------- sampling


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_sampler(serve: Serve, connect: Connect, prefetch: int) -> None:
    client = connect(serve(reverb.Table.queue(TABLE, 1000)))
    client.insert_batch(TABLE, {"x": np.arange(100)})
    got: list[int] = []
    with client.sampler(TABLE, 5, prefetch=prefetch, timeout=DEADLINE) as sampler:
        for batch, _ in zip(sampler, range(10), strict=False):
            got += batch.data["x"].tolist()
            if len(got) == 50:
                break
    # What was gathered ahead is for whoever samples next.
    while len(got) < 100:
        got += client.sample_batch(TABLE, 7, timeout=0).data["x"].tolist()
    assert got == list(range(100))


def test_sampler_raises_at_its_timeout_and_goes_on(serve: Serve, connect: Connect) -> None:
    client = connect(serve(reverb.Table.queue(TABLE, 1000)))
    with client.sampler(TABLE, 2, timeout=0.05) as sampler:
        with pytest.raises(errors.DeadlineExceededError):
            next(sampler)
        client.insert_batch(TABLE, {"x": np.arange(4)})
        got: list[int] = []
        while len(got) < 4:
            try:
                got += next(sampler).data["x"].tolist()
            except errors.DeadlineExceededError:
                continue
    assert got == [0, 1, 2, 3]
    with pytest.raises(errors.ServerClosedError, match="closed"):
        next(sampler)


def test_items_that_a_dead_client_did_not_deliver_go_back(serve: Serve, connect: Connect) -> None:
    server: Any = serve(reverb.Table.queue(TABLE, 100))
    client = connect(server)
    client.insert_batch(TABLE, {"x": np.arange(10)})
    dead = connect(server)
    connection: Any = dead._connected()
    session = connection.take_session()
    batch = session.sample(0, 4, 5.0, str, None)
    assert isinstance(batch, RemoteBatch)
    assert len(batch) == 4
    dead.close()  # without having delivered them
    wait_until(lambda: len(server._bridge._dispatcher._sessions) == 1)
    got = client.sample_batch(TABLE, 10, timeout=DEADLINE).data["x"].tolist()
    assert got == list(range(10))


def test_a_request_that_waits_delays_nobody(serve: Serve, connect: Connect) -> None:
    server = serve(table(), reverb.Table.queue("empty", 10))
    client = connect(server)
    client.server_info()
    threads = [
        threading.Thread(
            target=lambda: connect(server).sample_batch("empty", 1, timeout=DEADLINE), daemon=True
        )
        for _ in range(20)
    ]
    before = threading.active_count()
    for thread in threads:
        thread.start()
    for _ in range(20):
        client.insert_batch(TABLE, {"x": np.zeros(3)})
        client.sample_batch(TABLE, 3)
    # One thread a client, and its caller; none at the server.
    assert threading.active_count() <= before + 2 * len(threads)
    client.insert_batch("empty", {"x": np.zeros(10)})
    client.insert_batch("empty", {"x": np.zeros(10)}, timeout=DEADLINE)
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_stopping_the_server_ends_everything_that_waits(serve: Serve, connect: Connect) -> None:
    server = serve(table(), reverb.Table.queue("queue", 1))
    client = connect(server)
    writer = client.trajectory_writer(1)
    for _ in range(2):
        writer.append({"x": 1})
        writer.create_item("queue", 1.0, {"x": writer.history["x"][-1]})
    calls: list[Callable[[], Any]] = [
        lambda: client.sample_batch(TABLE, 1),
        lambda: client.insert({"x": 1}, {"queue": 1.0}),
        lambda: client.insert_batch("queue", {"x": np.zeros(3)}),
        writer.flush,
    ]
    caught: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            calls[i]()
        except errors.ReverbError as error:
            caught[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    link: Any = client._connected().link  # type: ignore[attr-defined]
    wait_until(lambda: len(link._open) == len(calls))
    server.stop()
    for thread in threads:
        thread.join(DEADLINE)
    assert [type(error) for error in caught] == [errors.ServerClosedError] * len(calls)
    client._remote = reverb.RemoteOptions(timeout=0.5)  # what it asks for now never comes
    with pytest.raises(errors.ReverbError):
        client.sample_batch(TABLE, 1)


def test_stopping_a_server_that_waits_for_messages_wakes_it(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WAIT_SLICE_MS", int(10_000 * DEADLINE))
    server = serve(table())
    connect(server).server_info()
    stopping = threading.Thread(target=server.stop, daemon=True)
    stopping.start()
    stopping.join(DEADLINE)
    assert not stopping.is_alive()


# ---------------------------------------------------------------------- processes and threads


def sample_in_child(sender: Any, client: reverb.Client) -> None:
    sender.send(client.sample_batch(TABLE, 1, timeout=DEADLINE).data["x"].tolist())


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_clients_travel_by_address(
    serve: Serve, connect: Connect, run_processes: Any, method: str
) -> None:
    client = connect(serve(table()))
    client.insert_batch(TABLE, {"x": np.array([7])})
    assert pickle.loads(pickle.dumps(client)).server_address == client.server_address
    # A forked child inherits a client in use, and connects anew by itself.
    assert run_processes(method, [(sample_in_child, (client,))] * 2) == [[7], [7]]
    assert client.sample_batch(TABLE, 1).data["x"].tolist() == [7]


def use_inherited(sender: Any, writer: Any, sampler: Any) -> None:
    caught = []
    calls: list[Callable[[], Any]] = [
        lambda: writer.append({"x": 1}),
        lambda: writer.create_item(TABLE, 1.0, {"x": writer.history["x"][-1]}),
        lambda: writer.flush(),
        lambda: next(sampler),
    ]
    for call in calls:
        try:
            call()
        except errors.ReverbError as error:
            caught.append(type(error).__name__)
    writer.close()
    sender.send(caught)


def test_what_was_inherited_through_a_fork_is_refused_and_harmless(
    serve: Serve, connect: Connect
) -> None:
    client = connect(serve(table()))
    writer = client.trajectory_writer(1)
    writer.append({"x": 1})
    client.insert({"x": 1}, {TABLE: 1.0})
    sampler = client.sampler(TABLE, 1)
    next(sampler)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=use_inherited, args=(sender, writer, sampler))
    child.start()
    assert receiver.poll(PROCESS_DEADLINE)
    assert receiver.recv() == ["ForkedHandleError"] * 4
    child.join(PROCESS_DEADLINE)
    assert child.exitcode == 0
    writer.create_item(TABLE, 1.0, {"x": writer.history["x"][-1]})
    assert client.server_info()[TABLE].current_size == 2
    sampler.close()
    writer.close()


SCRIPT = """
import contextlib, sys, threading
import numpy as np
import shmreplay as reverb
client = reverb.Client(sys.argv[1])
client.insert_batch("table", {"x": np.zeros(1)})
writer = client.trajectory_writer(1)
writer.append({"x": 1.0})
sampler = client.sampler("table", 1)
next(sampler)
def wait():
    with contextlib.suppress(reverb.errors.ServerClosedError):
        client.sample_batch("empty", 1)
threading.Thread(target=wait, daemon=True).start()
"""


def test_a_program_that_closes_nothing_ends(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(table(), table("empty"))
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"tcp://127.0.0.1:{server.port}"],
        timeout=PROCESS_DEADLINE,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - begin < PROCESS_DEADLINE
    # And its sessions are given up, not waited for.
    bridge: Any = server._bridge
    wait_until(lambda: not bridge._dispatcher._sessions)
    assert "dropped" not in caplog.text


def test_a_client_is_shared_between_threads(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table(max_size=10_000)))
    errors_seen: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            writer = client.trajectory_writer(2, confirm=worker % 2 == 0)
            for i in range(50):
                writer.append({"x": worker * 1000 + i})
                writer.create_item(TABLE, 1.0, {"x": writer.history["x"][-1]})
                client.insert_batch(TABLE, {"x": np.array([worker])})
                client.sample_batch(TABLE, 2, timeout=DEADLINE)
            writer.flush()
            writer.close()
        except BaseException as error:
            errors_seen.append(error)
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not errors_seen
    assert client.server_info()[TABLE].current_size == 800
    client.check()


def test_closing_is_bounded_and_idempotent(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table(), reverb.Table.queue("queue", 1)))
    waiting = threading.Thread(target=lambda: swallow(client), daemon=True)
    client.server_info()
    waiting.start()
    begin = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - begin < 30
    waiting.join(DEADLINE)
    assert not waiting.is_alive()
    with pytest.raises(errors.ServerClosedError, match="closed"):
        client.server_info()


def swallow(client: reverb.Client) -> None:
    with pytest.raises(errors.ReverbError):
        client.sample_batch("queue", 1)


def test_interrupted_sample_loses_nothing(serve: Serve, connect: Connect) -> None:
    """Ctrl-C while a sample waits: the request is withdrawn, and what it had drawn is kept."""
    server = serve(reverb.Table.queue(TABLE, 100))
    client = connect(server)
    client.insert_batch(TABLE, {"x": np.arange(3)})
    main = threading.main_thread().ident
    assert main is not None
    import signal

    def interrupt() -> None:
        wait_until(lambda: server.stats()[f"{TABLE}/samples"] == 3)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        client.sample_batch(TABLE, 10)
    thread.join()
    client.insert_batch(TABLE, {"x": np.arange(3, 6)})
    assert client.sample_batch(TABLE, 6, timeout=DEADLINE).data["x"].tolist() == list(range(6))


def test_a_batch_that_waits_half_way_is_one_episode(serve: Serve, connect: Connect) -> None:
    server = serve(reverb.Table.queue(TABLE, 4))
    client = connect(server)
    thread = threading.Thread(
        target=lambda: client.insert_batch(TABLE, {"x": np.arange(10)}, timeout=DEADLINE)
    )
    thread.start()
    got: list[int] = []
    with reverb.Client(server.address) as local:
        while len(got) < 10:
            assert local.server_info()[TABLE].num_episodes <= 1
            got += local.sample_batch(TABLE, 1, DEADLINE).data["x"].tolist()
        thread.join(DEADLINE)
        assert got == list(range(10))
    server.check()
