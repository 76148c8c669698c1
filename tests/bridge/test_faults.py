"""Connections that break: nothing is lost, nothing is done twice, and order is kept."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors
from shmreplay.bridge import link_thread
from tests.bridge.killed import TABLE, in_order
from tests.bridge.proxy import Proxy
from tests.bridge.test_client import wait_until

CUTS = int(os.environ.get("BRIDGE_CUTS", "200"))
INSERTS = int(os.environ.get("BRIDGE_INSERTS", "2000"))

Serve = Callable[..., reverb.Server]
Connect = Callable[..., reverb.Client]
MakeProxy = Callable[..., Proxy]


def all_ids(server: reverb.Server) -> list[int]:
    """What is in the table, in order, by way of shared memory."""
    with reverb.Client(server.address) as client:
        size = client.server_info()[TABLE].current_size
        if size == 0:
            return []
        return [int(x) for x in client.sample_batch(TABLE, size, timeout=0).data["id"].ravel()]


def link_of(client: reverb.Client) -> Any:
    """A client's end of the line."""
    return client._connected().link  # type: ignore[attr-defined]


def insert_single(client: reverb.Client, first: int, count: int) -> None:
    for i in range(first, first + count):
        client.insert({"id": np.array(i)}, {TABLE: 1.0})


def insert_batches(client: reverb.Client, first: int, count: int) -> None:
    for i in range(first, first + count, 10):
        client.insert_batch(TABLE, {"id": np.arange(i, min(i + 10, first + count))})


def write_items(client: reverb.Client, first: int, count: int, confirm: bool) -> None:
    with client.trajectory_writer(2, confirm=confirm) as writer:
        for i in range(first, first + count):
            writer.append({"id": i})
            writer.create_item(TABLE, 1.0, {"id": writer.history["id"][-1:]})
    writer.close()


WAYS: dict[str, Callable[[reverb.Client, int, int], None]] = {
    "single": insert_single,
    "batches": insert_batches,
    "items": lambda client, first, count: write_items(client, first, count, True),
    "pipelined": lambda client, first, count: write_items(client, first, count, False),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_insert_is_there_exactly_once_and_in_order(
    serve: Serve,
    connect: Connect,
    make_proxy: MakeProxy,
    way: str,
    record_property: Callable[[str, object], None],
) -> None:
    server = serve(in_order(1_000_000))
    # The largest message must have a chance to pass whole.
    bounds = {"least": 2000, "most": 15000} if way == "pipelined" else {"most": 4000}
    proxy = make_proxy(server, seed=7, **bounds)
    client = connect(proxy)
    done, share = 0, len(WAYS)
    while done < INSERTS // share or proxy.cuts < CUTS // share:
        WAYS[way](client, done, 50)
        done += 50
    assert all_ids(server) == list(range(done))
    server.check()
    record_property("inserts", done)
    record_property("cuts", proxy.cuts)


def test_each_item_of_a_queue_is_sampled_exactly_once_and_in_order(
    serve: Serve, connect: Connect, make_proxy: MakeProxy
) -> None:
    server = serve(in_order(1_000_000))
    proxy = make_proxy(server, seed=8, least=1500, most=4000)
    client = connect(proxy)
    got: list[int] = []
    with reverb.Client(server.address) as local:
        while len(got) < INSERTS // 4 or proxy.cuts < CUTS // 4:
            first = len(got)
            local.insert_batch(TABLE, {"id": np.arange(first, first + 50)})
            while len(got) < first + 50:
                n = min(7, first + 50 - len(got))
                got += [int(x) for x in client.sample_batch(TABLE, n, timeout=60).data["id"]]
    assert got == list(range(len(got)))
    assert all_ids(server) == []


def test_requests_that_wait_survive_a_cut(
    serve: Serve, connect: Connect, make_proxy: MakeProxy
) -> None:
    server = serve(in_order(100))
    proxy = make_proxy(server)
    client = connect(proxy)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(client.sample_batch(TABLE, 1, timeout=60).data["id"][0])
    )
    with reverb.Client(server.address) as local:
        client.server_info()
        thread.start()
        for _ in range(3):
            before = proxy.connections
            proxy.cut()
            wait_until(lambda n=before: proxy.connections > n)  # type: ignore[misc]
        assert not results
        local.insert_batch(TABLE, {"id": np.array([5])})
        thread.join(60)
    assert results == [5]


def test_slow_line(serve: Serve, connect: Connect, make_proxy: MakeProxy) -> None:
    server = serve(in_order(1000))
    client = connect(make_proxy(server, delay=0.005))
    data = {"id": np.arange(10), "x": np.random.default_rng(0).random((10, 100_000))}
    client.insert_batch(TABLE, data)
    sample = client.sample_batch(TABLE, 10, timeout=60)
    np.testing.assert_array_equal(sample.data["x"], data["x"])


def test_server_out_of_reach_for_longer_than_the_timeout(
    serve: Serve, connect: Connect, make_proxy: MakeProxy
) -> None:
    server = serve(in_order(100))
    proxy = make_proxy(server)
    client = connect(proxy)
    client.insert_batch(TABLE, {"id": np.array([1])})
    writer = client.trajectory_writer(1)
    link_of(client).timeout = 0.5  # not before: else what comes slowly is lost already
    proxy.cut(refuse=True)
    with pytest.raises(errors.ServerClosedError, match=r"was not reached for 0\.5 s"):
        client.sample_batch(TABLE, 2, timeout=60)
    with pytest.raises(errors.ReverbError):
        writer.append({"id": 3})
        writer.create_item(TABLE, 1.0, {"id": writer.history["id"][-1:]})
    # Back within reach, the client connects anew; what was taken for it is not lost.
    proxy.accept_again()
    client.insert_batch(TABLE, {"id": np.array([2])})
    assert client.server_info()[TABLE].rate_limiter_info.insert_stats.completed == 2


def test_a_host_that_says_nothing_is_not_taken_for_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a name that nobody knows, libzmq says as little."""
    monkeypatch.setattr(link_thread, "WELCOME_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with reverb.Client(address, reverb.RemoteOptions(timeout=1.0)) as client:
            with pytest.raises(errors.StoreNotFoundError, match="no such host, or it does not"):
                client.server_info()


def test_deadline_counts_while_the_server_is_out_of_reach(
    serve: Serve, connect: Connect, make_proxy: MakeProxy
) -> None:
    server = serve(in_order(100))
    proxy = make_proxy(server)
    client = connect(proxy, timeout=60)
    client.server_info()
    proxy.cut(refuse=True)
    wait_until(lambda: not link_of(client).connected)
    with pytest.raises(errors.DeadlineExceededError, match="out of reach"):
        client.sample_batch(TABLE, 1, timeout=0.1)
