"""Room for large messages: who has much to send asks first, and is told when there is room."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import limits, rate_limiters, selectors
from shmreplay.bridge import protocol
from shmreplay.bridge.protocol import Kind
from shmreplay.bridge.room import Room
from shmreplay.bridge.wire import Writer
from tests.bridge.peer import Peer
from tests.bridge.proxy import Proxy

MIB = 1 << 20
TABLE = "table"
DEADLINE = 60.0

Serve = Callable[..., reverb.Server]
Connect = Callable[..., reverb.Client]


def table() -> reverb.Table:
    limiter = rate_limiters.MinSize(1)
    return reverb.Table(
        TABLE, selectors.Fifo(), selectors.Fifo(), 1000, limiter, max_times_sampled=1
    )


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[Room, list[Any]]:
    """Room for 100 bytes, and who was told to send."""
    monkeypatch.setattr(limits, "BRIDGE_ARRIVING_BYTES", 100)
    told: list[Any] = []
    return Room(told.append), told


def test_who_asks_gets_room_in_turn(told: tuple[Any, list[Any]]) -> None:
    room, sent = told
    for name, nbytes in (("a", 60), ("b", 40), ("c", 50), ("d", 10)):
        room.ask(name, nbytes)
    assert sent == ["a", "b"]  # d has little, and still does not overtake c
    room.arrived("b")
    assert sent == ["a", "b"]
    room.arrived("a")
    assert sent == ["a", "b", "c", "d"]
    room.arrived("a")  # nothing is granted to it: nothing happens
    room.ask("a", 60)
    assert sent[4:] == []
    room.forget("c")
    assert sent[4:] == ["a"]


def test_one_that_has_more_than_there_is_goes_alone(told: tuple[Any, list[Any]]) -> None:
    room, sent = told
    room.ask("a", 1000)
    room.ask("b", 1)
    assert sent == ["a"]
    room.arrived("a")
    assert sent == ["a", "b"]


def test_who_goes_is_not_waited_for(told: tuple[Any, list[Any]]) -> None:
    room, sent = told
    for name in "abc":
        room.ask(name, 80)
    room.forget("b")
    room.expire(0.0)
    assert sent == ["a"]
    room.expire(1e12)  # it was told long ago
    assert sent == ["a", "c"]


def test_less_room_where_a_process_may_have_little_memory() -> None:
    body = f"""
import resource
from shmreplay.bridge.room import _bound
assert _bound() == {limits.BRIDGE_ARRIVING_BYTES}
resource.setrlimit(resource.RLIMIT_DATA, ({1 << 30}, resource.RLIM_INFINITY))
assert _bound() == {1 << 28}
"""
    subprocess.run([sys.executable, "-c", body], check=True, timeout=DEADLINE)


def ask(peer: Peer, nbytes: int) -> None:
    body = Writer()
    body.u64(nbytes)
    peer.send(protocol.encode(Kind.ROOM, body))


def test_a_peer_waits_for_one_that_does_not_send(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BRIDGE_ARRIVING_BYTES", 32 * MIB)
    server = serve(table())
    with ExitStack() as stack:
        first, second = (stack.enter_context(Peer(server.port)) for _ in range(2))
        for peer in (first, second):
            assert peer.hello().kind == Kind.WELCOME
        ask(first, 20 * MIB)
        assert first.receive()[0].kind == Kind.GO
        ask(second, 20 * MIB)
        body = Writer()
        body.u16(0)
        assert second.request(Kind.INFO, body)[0].kind == Kind.REPLY  # and not GO
        first.send(protocol.encode(Kind.BYE, Writer()))
        assert second.receive()[0].kind == Kind.GO
        ask(second, 20 * MIB)  # a second time, with nothing sent
        assert second.is_dropped()


def test_a_call_that_gets_no_room_ends_at_its_deadline_and_is_not_sent(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BRIDGE_ARRIVING_BYTES", 8 * MIB)
    server = serve(table())
    client = connect(server)
    with Peer(server.port) as peer:
        assert peer.hello().kind == Kind.WELCOME
        ask(peer, 8 * MIB)
        assert peer.receive()[0].kind == Kind.GO
        with pytest.raises(reverb.errors.DeadlineExceededError, match="Nothing was sent"):
            client.insert_batch(TABLE, {"x": np.zeros((1, MIB), np.int64)}, timeout=0.1)
        assert client.server_info()[TABLE].current_size == 0  # does not wait for it
        peer.send(protocol.encode(Kind.BYE, Writer()))
    for number in (1, 2):
        client.insert_batch(TABLE, {"x": np.full((1, MIB), number)}, timeout=DEADLINE)
    data = server.localhost_client().sample_batch(TABLE, 2).data["x"]
    assert data[:, 0].tolist() == [1, 2]


def test_many_large_batches_at_once(
    serve: Serve,
    connect: Connect,
    make_proxy: Callable[..., Proxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the clients has more than half of the room; some lose their connection meanwhile."""
    monkeypatch.setattr(limits, "BRIDGE_ARRIVING_BYTES", 8 * MIB)
    asked: list[int] = []
    monkeypatch.setattr(Room, "ask", _noting(Room.ask, asked))
    server = serve(table(), capacity=400 * MIB)
    proxy = make_proxy(server, least=12 * MIB, most=30 * MIB)
    clients = [connect(proxy if i % 2 else server) for i in range(6)]
    failures: list[str] = []

    def insert(number: int) -> None:
        try:
            for turn in range(3):
                rows = np.full((2, 300_000), 10 * number + turn, np.int64)
                clients[number].insert_batch(TABLE, {"x": rows}, timeout=DEADLINE)
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=insert, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(asked) >= 18 and set(asked) == {asked[0]} and asked[0] > limits.BRIDGE_ASK_BYTES
    local = server.localhost_client()
    local.check()
    data = local.sample_batch(TABLE, 36).data["x"]
    assert sorted(data[:, 0]) == sorted(2 * [10 * i + turn for i in range(6) for turn in range(3)])
    assert (data == data[:, :1]).all()


def _noting(call: Callable[..., None], nbytes: list[int]) -> Callable[..., None]:
    def noting(room: Room, session: Any, n: int) -> None:
        nbytes.append(n)
        call(room, session, n)

    return noting
