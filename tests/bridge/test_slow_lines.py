"""Messages that take longer than the time after which a silent peer is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import limits, rate_limiters, selectors
from shmreplay.bridge import protocol
from shmreplay.bridge.protocol import Kind
from tests.bridge.peer import Peer
from tests.bridge.proxy import Proxy

TABLE = "table"
MIB = 1 << 20
RATE = 4 * MIB
DEADLINE = 60.0

Serve = Callable[..., reverb.Server]
Connect = Callable[..., reverb.Client]
MakeProxy = Callable[..., Proxy]


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BRIDGE_HEARTBEAT_S", 0.1)
    monkeypatch.setattr(limits, "BRIDGE_LOST_S", 0.75)
    monkeypatch.setattr(limits, "BRIDGE_EXPIRE_S", 1.5)


@pytest.fixture
def server(serve: Serve) -> reverb.Server:
    limiter = rate_limiters.MinSize(1)
    return serve(reverb.Table(TABLE, selectors.Uniform(), selectors.Fifo(), 100, limiter))


@pytest.fixture
def data() -> dict[str, np.ndarray]:
    """Takes some seconds on the line."""
    return {"x": np.arange(2 * MIB).reshape(4, -1)}


def ends(call: Callable[[], None]) -> bool:
    """Whether a call ends in time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    return not thread.is_alive()


def test_a_large_batch(
    server: reverb.Server, connect: Connect, make_proxy: MakeProxy, data: dict[str, np.ndarray]
) -> None:
    client = connect(make_proxy(server, rate=RATE))
    keys: list[int] = []
    assert ends(lambda: keys.extend(client.insert_batch(TABLE, data)))
    assert len(keys) == 4
    local = server.localhost_client()
    assert local.server_info()[TABLE].current_size == 4
    found = local.sample_batch(TABLE, 1).data["x"][0]
    assert found.tolist() in data["x"].tolist()


def test_a_large_sample(
    server: reverb.Server, connect: Connect, make_proxy: MakeProxy, data: dict[str, np.ndarray]
) -> None:
    server.localhost_client().insert_batch(TABLE, data)
    client = connect(make_proxy(server, rate=RATE))
    found: list[np.ndarray] = []
    assert ends(lambda: found.append(client.sample_batch(TABLE, 4).data["x"]))
    for row in found[0]:
        assert row.tolist() in data["x"].tolist()


def test_who_says_nothing_at_all_is_told_that_it_was_given_up(server: reverb.Server) -> None:
    with Peer(server.port) as peer:
        assert peer.hello().kind == Kind.WELCOME
        while (answer := peer.receive())[0].kind == Kind.PONG:
            continue
        assert answer[0].kind == Kind.REFUSED
        error = protocol.decode_error(answer[1])
    assert isinstance(error, reverb.errors.ServerClosedError)
    assert "gave this client up after 1.5 s" in str(error)
