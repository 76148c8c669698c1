"""The bridge's process dies: what was asked of it is done exactly once nevertheless."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits
from shmreplay.bridge import link_thread
from tests.bridge.killed import DEADLINE, TABLE, KilledServer, Killer, in_order
from tests.bridge.proxy import Proxy
from tests.bridge.test_faults import WAYS
from tests.conftest import free_port

RecordProperty = Callable[[str, object], None]

KILLS = int(os.environ.get("BRIDGE_KILLS", "1"))
INSERTS = int(os.environ.get("BRIDGE_INSERTS", "0"))


def inserts_a_step(kills: int) -> int:
    """So many that all ways make about `INSERTS`: a kill comes after six steps or more."""
    return max(50, INSERTS // (len(WAYS) * 6 * kills))


@pytest.fixture
def killed(unique_name: Callable[[], str]) -> Iterator[Callable[..., KilledServer]]:
    with ExitStack() as stack:

        def make(**options: Any) -> KilledServer:
            server = KilledServer(unique_name(), options.pop("port", 0) or free_port(), **options)
            stack.callback(server.stop)
            return server

        yield make


def connect(port: int, stack: ExitStack) -> reverb.Client:
    address = f"tcp://127.0.0.1:{port}"
    return stack.enter_context(reverb.Client(address, reverb.RemoteOptions(timeout=DEADLINE)))


def ids_in(name: str) -> list[int]:
    """What is in the table, in order, by way of shared memory."""
    with reverb.Client(f"shm://{name}") as client:
        size = client.server_info()[TABLE].current_size
        ids = client.sample_batch(TABLE, size, timeout=0).data["id"] if size else np.zeros(0)
        client.check()
        return [int(x) for x in ids.ravel()]


@pytest.mark.parametrize(("way", "cuts"), list(zip(WAYS, [False, True] * 2, strict=True)))
def test_each_insert_is_there_exactly_once_and_in_order(
    killed: Callable[..., KilledServer], way: str, cuts: bool, record_property: RecordProperty
) -> None:
    server = killed()
    done, each = 0, inserts_a_step(KILLS)
    with ExitStack() as stack:
        port = server.port
        if cuts:
            proxy = Proxy(server.port, seed=3, least=4000, most=40_000)
            stack.callback(proxy.close)
            port = proxy.port
        client = connect(port, stack)
        killer = Killer(server.replace, KILLS, seed=len(way) + cuts)
        stack.callback(killer.join)
        while not killer.over:
            WAYS[way](client, done, each)
            done += each
            killer.step()
    assert server.kills == KILLS
    assert ids_in(server.name) == list(range(done))
    record_property("inserts", done)


def test_a_client_goes_on_with_the_next_server(killed: Callable[..., KilledServer]) -> None:
    """What was confirmed is there; who waits goes on waiting; writers and samplers go on."""
    server = killed()
    with ExitStack() as stack:
        client = connect(server.port, stack)
        keys = client.insert_batch(TABLE, {"id": np.arange(10)})
        writer = client.trajectory_writer(4)
        for i in range(10, 14):
            writer.append({"id": i})
        got: list[Any] = []
        waiting = threading.Thread(
            target=lambda: got.append(client.sample_batch("narrow", 2, timeout=DEADLINE))
        )
        waiting.start()
        assert client.update_priorities(TABLE, keys, np.full(10, 2.0)) == 10
        server.replace()
        # Steps that the dead one had, and no item had referred to.
        assert writer.create_item(TABLE, 1.0, {"id": writer.history["id"][-1]}) is not None
        assert writer.create_item(TABLE, 1.0, {"id": writer.history["id"][0]}) is not None
        assert client.update_priorities(TABLE, keys, np.full(10, 3.0)) == 10
        client.insert_batch("narrow", {"id": np.array([1, 2])})
        waiting.join(DEADLINE)
        assert got[0].data["id"].tolist() == [1, 2]
        server.replace()
        for i in range(14, 20):
            writer.append({"id": i})
            writer.create_item(TABLE, 1.0, {"id": writer.history["id"][-1]})
        writer.end_episode()
        writer.close()
    assert ids_in(server.name) == [*range(10), 13, 10, *range(14, 20)]


def test_items_that_the_limiter_holds_back_are_not_lost(
    killed: Callable[..., KilledServer],
) -> None:
    server = killed()
    total = 40
    got: list[int] = []
    with ExitStack() as stack:
        client = connect(server.port, stack)
        writer = client.trajectory_writer(2)
        for i in range(total):
            writer.append({"id": i})
            writer.create_item("narrow", 1.0, {"id": writer.history["id"][-1]})
            if i == total // 2:
                server.replace()
        server.replace()
        flushing = threading.Thread(target=writer.flush)
        flushing.start()
        with reverb.Client(f"shm://{server.name}") as local:
            while len(got) < total:
                got.append(int(local.sample_batch("narrow", 1, timeout=DEADLINE).data["id"][0]))
                if len(got) == total // 4:
                    server.replace()
        flushing.join(DEADLINE)
        assert not flushing.is_alive()
    assert got == list(range(total))


def test_a_column_that_seldom_has_a_value_stays_within_reach(
    killed: Callable[..., KilledServer],
) -> None:
    """Its last message is kept, and those in between are not."""
    server = killed()
    with ExitStack() as stack:
        client = connect(server.port, stack)
        writer: Any = client.trajectory_writer(3)
        writer.configure(("goal",), num_keep_alive_refs=1, max_chunk_length=None)
        writer.append({"id": 0, "goal": np.full(3, 7.0)})
        goal = writer.history["goal"][-1]
        for i in range(1, 300):
            writer.append({"id": i})
            writer.create_item(TABLE, 1.0, {"id": writer.history["id"][-1]})
        assert len(writer._stream.log.entries) < 40
        server.replace()
        trajectory = {"goal": goal, "id": writer.history["id"][-3:]}
        writer.create_item("narrow", 1.0, trajectory)
        found = client.sample_batch("narrow", 1, timeout=DEADLINE).data
        assert found["goal"].tolist() == [[7.0] * 3]
        assert found["id"].tolist() == [[297, 298, 299]]
    assert ids_in(server.name) == list(range(1, 300))


def test_a_reset_is_not_repeated(killed: Callable[..., KilledServer]) -> None:
    """What was confirmed after a reset, whose own answer was lost, stays."""
    server = killed()
    with ExitStack() as stack:
        proxy = Proxy(server.port)
        stack.callback(proxy.close)
        client = connect(proxy.port, stack)
        client.insert_batch(TABLE, {"id": np.arange(5)})
        proxy.hold_answers()
        resetting = threading.Thread(target=lambda: client.reset(TABLE))
        resetting.start()
        with reverb.Client(f"shm://{server.name}") as local:
            while local.server_info()[TABLE].current_size:
                time.sleep(0.002)
            local.insert_batch(TABLE, {"id": np.arange(5, 8)})
        server.kill()
        proxy.let_go()
        server.start()
        resetting.join(DEADLINE)
        assert not resetting.is_alive()
    assert ids_in(server.name) == [5, 6, 7]


def test_a_batch_is_not_repeated_that_is_said_again_after_much_else(
    killed: Callable[..., KilledServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the store remembers of a batch stays until it was said again, however long that takes:
    signs of life that come before it do not mean that there is no more to say."""
    monkeypatch.setattr(link_thread, "_MOST_SENT", 4)
    monkeypatch.setattr(link_thread, "_SAY_AFTER", 2)
    server = killed()
    with ExitStack() as stack:
        proxy = Proxy(server.port)
        stack.callback(proxy.close)
        client = connect(proxy.port, stack)
        writer = client.trajectory_writer(60)
        for i in range(50):
            writer.append({"id": i})
            writer.create_item(TABLE, 1.0, {"id": writer.history["id"][-1]})
        proxy.hold_answers()
        batch = {"id": np.arange(50, 60)}
        keys: list[Any] = []
        inserting = threading.Thread(target=lambda: keys.append(client.insert_batch(TABLE, batch)))
        inserting.start()
        with reverb.Client(f"shm://{server.name}") as local:
            while local.server_info()[TABLE].current_size < 60:
                time.sleep(0.002)
        server.kill()
        proxy.let_go()
        server.start()
        inserting.join(DEADLINE)
        assert not inserting.is_alive()
        # Of what the dead one inserted, the last key is known; the others are no item's.
        assert np.flatnonzero(keys[0]).tolist() == [9]
        assert client.update_priorities(TABLE, keys[0], np.full(10, 2.0)) == 1
    assert ids_in(server.name) == list(range(60))


def test_a_store_that_is_new_knows_nobody(
    unique_name: Callable[[], str], make_server: Callable[..., reverb.Server]
) -> None:
    port = free_port()
    server = KilledServer(unique_name(), port)
    with ExitStack() as stack:
        client = connect(port, stack)
        client.insert_batch(TABLE, {"id": np.arange(5)})
        writer = client.trajectory_writer(1)
        server.kill()
        make_server([in_order(100)], name=server.name, port=port, recover=False)
        with pytest.raises(errors.ServerClosedError, match="started anew"):
            writer.append({"id": 1})
            writer.create_item(TABLE, 1.0, {"id": writer.history["id"][-1]})
        # The client connects to the new one.
        client.insert_batch(TABLE, {"id": np.arange(3)})
        assert client.server_info()[TABLE].current_size == 3


# ---------------------------------------------------------------------- several processes

WORKERS = 2


@pytest.fixture
def workers(
    unique_name: Callable[[], str], make_server: Callable[..., reverb.Server]
) -> reverb.Server:
    """A server whose bridge has processes of its own."""
    return make_server(
        [in_order(1_000_000), reverb.Table.queue("narrow", 3)],
        name=unique_name(),
        port=free_ports(WORKERS),
        bridge_workers=WORKERS,
        capacity=256 << 20,
    )


def free_ports(n: int) -> int:
    """The first of n ports in a row that nobody uses."""
    while True:
        first = free_port()
        try:
            for port in range(first, first + n):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def replace_worker(server: reverb.Server, number: int) -> None:
    """Kills a process of the bridge, and waits for the one that takes its place."""
    bridge: Any = server._bridge
    pid = bridge.pids[number]
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + DEADLINE
    while bridge.pids[number] == pid:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("way", ["batches", "pipelined"] if KILLS == 1 else WAYS)
def test_each_insert_is_there_exactly_once_although_the_bridge_s_process_is_killed(
    workers: reverb.Server, way: str, record_property: RecordProperty
) -> None:
    """Each process has a client, and each is killed in turn."""
    done, each = [0, 0], inserts_a_step(2 * KILLS)
    with ExitStack() as stack:
        clients = [connect(workers.port, stack) for _ in range(WORKERS)]
        turn = iter(range(1000))
        killer = Killer(lambda: replace_worker(workers, next(turn) % WORKERS), 2 * KILLS, seed=9)
        stack.callback(killer.join)
        while not killer.over:
            for i, client in enumerate(clients):
                WAYS[way](client, i * 1_000_000 + done[i], each)
                done[i] += each
                killer.step()
    ids = ids_in(workers.name)
    assert [x for x in ids if x < 1_000_000] == list(range(done[0]))
    assert [x - 1_000_000 for x in ids if x >= 1_000_000] == list(range(done[1]))
    record_property("inserts", sum(done))


def test_a_killed_server_takes_its_bridge_with_it(killed: Callable[..., KilledServer]) -> None:
    """The next one, with another number of processes, serves the clients of all of them."""
    server = killed(port=free_ports(3), bridge_workers=3)
    with ExitStack() as stack:
        clients = [connect(server.port, stack) for _ in range(3)]
        for i, client in enumerate(clients):
            client.insert_batch(TABLE, {"id": np.array([i])})
        server.options["bridge_workers"] = 2
        server.replace()
        for i, client in enumerate(clients):
            client.insert_batch(TABLE, {"id": np.array([3 + i])})
        server.options["bridge_workers"] = 0
        server.replace()
        for i, client in enumerate(clients):
            client.insert_batch(TABLE, {"id": np.array([6 + i])})
    assert ids_in(server.name) == list(range(9))


def test_a_process_whose_server_dies_while_it_starts_ends_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "shmreplay.bridge.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.close()
        how = {"ports": [free_port()], "number": 0, "bind": "127.0.0.1", "keys": None}
        line = json.dumps({**how, "insecure": False, "compress": True}) + "\n"
        process.stdin.write(line.encode())
        process.stdin.flush()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(DEADLINE) == 1


def test_a_message_without_end_costs_one_process_and_no_client_anything(
    workers: reverb.Server,
) -> None:
    """Nobody can see what libzmq has gathered of it; the memory of the process is bounded."""
    bridge: Any = workers._bridge
    unlimited = resource.RLIM_INFINITY
    for pid in bridge.pids:
        soft, _ = resource.prlimit(pid, resource.RLIMIT_DATA)
        assert 0 < soft <= limits.BRIDGE_PROCESS_BYTES
    pid = bridge.pids[0]
    resource.prlimit(pid, resource.RLIMIT_DATA, (400 << 20, unlimited))
    with ExitStack() as stack:
        clients = [connect(workers.port, stack) for _ in range(WORKERS)]
        for i, client in enumerate(clients):
            client.insert_batch(TABLE, {"id": np.array([i])})
        with socket.create_connection(("127.0.0.1", workers.port), DEADLINE) as hostile:
            greet(hostile)
            with pytest.raises(ConnectionError):
                for _ in range(1000):  # each a million of parts
                    hostile.sendall(b"\x01\x00" * 2**20)
        for i, client in enumerate(clients):
            client.insert_batch(TABLE, {"id": np.array([WORKERS + i])})
        assert bridge.pids[0] != pid
    assert ids_in(workers.name) == list(range(2 * WORKERS))


def greet(peer: socket.socket) -> None:
    """Says what libzmq wants to hear before a message, and waits until it has said the same."""
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
    heard = b""
    while b"READY" not in heard:
        part = peer.recv(4096)
        assert part, "the server ended the connection"
        heard += part


@pytest.mark.parametrize("what", ["new", "stopped", "gone"])
def test_a_process_that_hangs_does_not_hold_up_the_server_s_end(
    workers: reverb.Server, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that took the place of a dead one and does not start, or one that does nothing any more,
    or one in whose place none can be put."""
    bridge: Any = workers._bridge
    if what == "stopped":
        os.kill(bridge.pids[0], signal.SIGSTOP)
    else:
        hanging = tmp_path / "hanging"
        if what == "new":
            hanging.write_text("#!/bin/sh\nexec sleep 600\n")
            hanging.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(hanging))
        dead = bridge._workers[0]
        dead.process.kill()
        end = time.monotonic() + DEADLINE
        while not (dead.process.stdin.closed if what == "gone" else bridge._workers[0] is not dead):
            assert time.monotonic() < end
            time.sleep(0.005)
    stopping = threading.Thread(target=workers.stop, daemon=True)
    stopping.start()
    stopping.join(DEADLINE)
    assert not stopping.is_alive()
    assert bridge.pids == []


def test_a_port_of_the_bridge_that_is_taken(make_server: Callable[..., reverb.Server]) -> None:
    first = free_ports(2)
    with socket.create_server(("127.0.0.1", first + 1)):
        with pytest.raises(errors.InvalidArgumentError, match=f"{first + 1} cannot be used"):
            make_server([in_order(100)], port=first, bridge_workers=2)
    with pytest.raises(errors.InvalidArgumentError, match="bridge_workers"):
        make_server([in_order(100)], port=first, bridge_workers=-1)
    make_server([in_order(100)], port=first, bridge_workers=2)
