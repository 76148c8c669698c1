"""What is done to a table in use, over the bridge: who waits, what is bounded, what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits, selectors
from shmreplay.bridge import protocol
from shmreplay.bridge.protocol import CHANGE, Kind
from shmreplay.bridge.wire import Reader, Writer
from shmreplay.extensions import ExtensionItem
from tests.bridge.peer import Peer
from tests.process.servants import wait_until
from tests.tables import PATIENCE, Gate, usual_table

Serve = Callable[..., reverb.Server]
Connect = Callable[..., reverb.Client]


def table(name: str = "t", **options: Any) -> reverb.Table:
    return usual_table(name, **{"sampler": selectors.Fifo(), "max_size": 5000, **options})


def close(gate: Gate, server: reverb.Server, client: reverb.Client) -> None:
    """Holds the extensions up until there is no room to tell them of anything more."""
    gate.open.clear()
    key = client.insert_batch("t", {"x": np.zeros(1)})
    assert gate.reached.wait(PATIENCE)  # from here on none are taken out of the line
    session = server._connection.take_session()
    with pytest.raises(errors.DeadlineExceededError, match="its extensions are behind"):
        for _ in range(limits.EXTENSION_EVENTS + 1):
            session.update(0, key, np.ones(1), 0.0)
    server._connection.give_session(session)


def step(client: reverb.Client, **options: Any) -> reverb.TrajectoryWriter:
    writer = client.trajectory_writer(2, **options)
    writer.append({"x": 7.0})
    return writer


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


# ------------------------------------------------------------------ extensions that are behind


def calls(client: reverb.Client, writer: reverb.TrajectoryWriter, keys: Any) -> dict[str, Any]:
    data = {"x": writer.history["x"][-1]}
    return {
        "update": lambda: client.update_priorities("t", np.repeat(keys[:3], 100), 2.0),
        "delete": lambda: client.mutate_priorities("t", deletes=keys[3:200].tolist()),
        "configure": lambda: client.configure_table("t", max_size=300),
        "replace": lambda: writer.replace_item("t", int(keys[-1]), data),
        "reset": lambda: client.reset("t"),
    }


@pytest.mark.parametrize("what", ["update", "delete", "configure", "replace", "reset"])
def test_who_waits_for_extensions_holds_up_nobody(
    serve: Serve, connect: Connect, gate: Gate, what: str
) -> None:
    server = serve(table(extensions=[gate]), table("other"))
    client, other = connect(server), connect(server)
    keys = client.insert_batch("t", {"x": np.zeros(400)})
    writer = step(client)
    call = calls(client, writer, keys)[what]
    close(gate, server, client)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    before = other.server_info()["t"]
    for i in range(20):  # what is asked meanwhile, by others and by the same client, is answered
        other.insert({"x": float(i)}, {"other": 1.0})
        assert client.sample_batch("other", 1, timeout=PATIENCE).data["x"].shape == (1, 1)
        assert other.server_info()["t"] == before
    assert thread.is_alive() and not results
    gate.open.set()
    thread.join(PATIENCE)
    assert results == [{"update": 300, "replace": True}.get(what)]
    info = other.server_info()["t"]
    assert info.max_size == (300 if what == "configure" else 5000)
    gone = {"delete": 197, "reset": before.current_size, "configure": before.current_size - 300}
    assert info.current_size == before.current_size - gone.get(what, 0)
    if what == "replace":
        assert client.fetch("t", keys[-1:])[0].data["x"] == 7.0
    writer.close()
    server.check()


@pytest.mark.parametrize("kind", [Kind.UPDATE, Kind.DELETE, Kind.RESET, Kind.CONFIGURE])
def test_who_waits_for_extensions_can_be_called_off(
    serve: Serve, connect: Connect, gate: Gate, kind: Kind
) -> None:
    server = serve(table(extensions=[gate]))
    client = connect(server)
    keys = client.insert_batch("t", {"x": np.zeros(5)})
    close(gate, server, client)
    before = client.server_info()["t"]
    body = Writer()
    if kind == Kind.CONFIGURE:
        body.meta += CHANGE.pack(0, protocol.SET_MAX_SIZE, 3, 0, 0.0, 0, 0.0, 0.0)
    else:
        body.u16(0)
    if kind == Kind.RESET:
        body.u64(1)
    if kind in (Kind.UPDATE, Kind.DELETE):
        body.array(keys)
    if kind == Kind.UPDATE:
        body.array(np.zeros(5))
    with Peer(server.port) as peer:
        peer.hello()
        peer.send(protocol.encode(kind, body, 1))
        cancel = Writer()
        cancel.u64(1)
        peer.send(protocol.encode(Kind.CANCEL, cancel))
        header, reader = peer.receive()
        assert (header.kind, header.sequence) == (Kind.FAILURE, 1)
        error = protocol.decode_error(reader)
        assert type(error) is errors.DeadlineExceededError
        assert "its extensions are behind" in str(error)
    assert client.server_info()["t"] == before
    gate.open.set()
    server.check()


# ------------------------------------------------------------------ in pieces


def test_fetched_items_come_in_as_many_answers_as_they_need(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BRIDGE_FETCH_BYTES", 1000)
    server = serve(table())
    client = connect(server)
    keys = client.insert_batch("t", {"x": np.arange(40.0 * 30).reshape(40, 30)})  # 240 bytes each
    large = client.insert_batch("t", {"x": np.arange(2.0 * 500).reshape(2, 500)})  # 4000 each
    wanted = np.concatenate([large[:1], keys[::-1], [np.uint64(3)], large[1:], keys[:2]])
    client.mutate_priorities("t", deletes=keys[5:9].tolist())
    got = client.fetch("t", wanted)
    left = [k for k in wanted.tolist() if k != 3 and k not in keys[5:9].tolist()]
    assert [item.info.key for item in got] == left
    rows = dict(zip(keys.tolist(), np.arange(40.0 * 30).reshape(40, 30), strict=True))
    for item in got:
        if item.info.key in rows:
            np.testing.assert_array_equal(item.data["x"], rows[item.info.key])
    assert server.stats()["t/samples"] == 0


def test_items_of_more_arrays_than_a_message_has_are_fetched(
    serve: Serve, connect: Connect
) -> None:
    client = connect(serve(table(), capacity=64 << 20))
    keys = []
    for length in (200, 201):  # of two lengths, so that each item is sent alone: 30 parts of each
        data = {f"c{i:02}": np.full((100, length), i, np.int64) for i in range(30)}
        keys += client.insert_batch("t", data).tolist()
    got = client.fetch("t", keys)
    assert [item.info.key for item in got] == keys
    assert all(item.data["c29"][-1] == 29 for item in got)


def test_items_are_listed_in_as_many_answers_as_they_need(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BRIDGE_LIST_PARTS", 1)
    server = serve(table(max_size=20_000, sampler=selectors.Uniform(), stripes=2))
    client = connect(server)
    keys = client.insert_batch("t", {"x": np.arange(15_000)})
    with reverb.Client(server.address) as local:
        for ours, theirs in zip(client.items("t"), local.items("t"), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    assert client.keys("t").tolist() == keys.tolist()


# ------------------------------------------------------------------ priorities


def test_nan_is_refused_where_none_was_not_meant(serve: Serve, connect: Connect) -> None:
    server = serve(table())
    client = connect(server)
    [key] = client.insert_batch("t", {"x": np.zeros(1)}, 3.0)
    writer = step(client)
    data = {"x": writer.history["x"][-1]}
    for call in (
        lambda: client.insert({"x": 1.0}, {"t": np.nan}),
        lambda: client.insert_batch("t", {"x": np.zeros(2)}, [1.0, np.nan]),
        lambda: client.update_priorities("t", [key], [np.nan]),
        lambda: writer.create_item("t", np.nan, data),
    ):
        with pytest.raises(errors.PriorityError, match="must not be NaN"):
            call()
    with pytest.raises(errors.ArgumentTypeError):
        client.update_priorities("t", [key], [None])  # type: ignore[arg-type]
    body = Writer()
    body.u16(0)
    body.array(np.array([key], np.uint64))
    body.array(np.array([np.nan]))
    with Peer(server.port) as peer:
        peer.hello()
        header, reader = peer.request(Kind.UPDATE, body)
        assert header.kind == Kind.FAILURE
        assert type(protocol.decode_error(reader)) is errors.PriorityError
    assert client.items("t").priority.tolist() == [3.0]
    assert client.max_priority("t") == 3.0
    writer.close()


def test_a_replacement_of_a_writer_that_does_not_wait(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table()))
    [key] = client.insert_batch("t", {"x": np.zeros(1)})
    writer = step(client, confirm=False)
    x = writer.history["x"]
    for _ in range(50):
        assert writer.create_item("t", None, {"x": x[-1]}) is None
    assert writer.replace_item("t", int(key), {"x": x[-1]})
    with pytest.raises(errors.SignatureError, match="another structure"):
        writer.replace_item("t", int(key), {"y": x[-1]})
    assert writer.replace_item("t", 5, {"x": x[-1]}) is False
    writer.flush()  # what was told is not told again
    assert client.fetch("t", [key])[0].data["x"] == 7.0
    assert client.server_info()["t"].current_size == 51
    writer.close()


# ------------------------------------------------------------------ what is not sampled again


@pytest.mark.parametrize("how", ["configured", "epoch"])
def test_what_is_not_sampled_again_stays_until_it_was_delivered(
    serve: Serve, connect: Connect, how: str
) -> None:
    sampler = selectors.Epoch() if how == "epoch" else selectors.Fifo()
    server = serve(table(sampler=sampler))
    client = connect(server)
    client.insert_batch("t", {"x": np.arange(6)})
    if how == "configured":
        client.configure_table("t", max_times_sampled=1)
    ask = Writer()
    ask.u16(0)
    ask.u32(4)
    ask.timeout(0.0)
    with Peer(server.port) as peer:
        peer.hello()
        header, reader = peer.request(Kind.SAMPLE, ask)
        assert (header.kind, reader.u8()) == (Kind.REPLY, 1)
        sessions = server._bridge._dispatcher._sessions
        peer.send(protocol.encode(Kind.BYE, Writer()))
        # What comes first would be a matter of luck.
        wait_until(lambda: len(sessions) == 1, "the peer is gone")
        # Of what it did not take leave with, nothing is lost.
        got = client.sample_batch("t", 6, timeout=PATIENCE).data["x"].tolist()
        while len(got) < 6:
            got += client.sample_batch("t", 6 - len(got), timeout=PATIENCE).data["x"].tolist()
    assert sorted(got) == list(range(6))
    client.configure_table("t", max_times_sampled=0)
    server.check()


# ------------------------------------------------------------------ what is refused


def numbers(**fields: Any) -> Writer:
    body = Writer()
    for name, value in fields.items():
        getattr(body, name.rstrip("_"))(value)
    return body


def change(*fields: Any) -> Writer:
    body = Writer()
    body.meta += CHANGE.pack(*fields)
    return body


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.LIST, numbers(u16=1, u64=0)),
        (Kind.LIST, numbers(u16=0)),
        (Kind.FETCH, numbers(u16=1, array=np.ones(1, np.uint64))),
        (Kind.FETCH, numbers(u16=0, array=np.ones(0, np.uint64))),
        (Kind.FETCH, numbers(u16=0, array=np.ones(257, np.uint64))),
        (Kind.FETCH, numbers(u16=0, array=np.ones(3, np.int64))),
        (Kind.FETCH, numbers(u16=0, array=np.ones((3, 1), np.uint64))),
        (Kind.CONFIGURE, change(1, 1, 5, 0, 0.0, 0, 0.0, 0.0)),
        (Kind.CONFIGURE, change(0, 8, 5, 0, 0.0, 0, 0.0, 0.0)),
    ],
)
def test_requests_that_are_none_end_the_session(serve: Serve, kind: Kind, body: Writer) -> None:
    server = serve(table())
    with Peer(server.port) as peer:
        peer.hello()
        header, _ = peer.request(kind, body)
        assert header.kind == Kind.REFUSED
    server.check()


def failure(answer: tuple[protocol.Header, Reader]) -> errors.ReverbError:
    header, reader = answer
    assert header.kind == Kind.FAILURE
    return protocol.decode_error(reader)


@pytest.mark.parametrize(
    "body",
    [
        change(0, 1, 0, 0, 0.0, 0, 0.0, 0.0),
        change(0, 1, 40_001, 0, 0.0, 0, 0.0, 0.0),
        change(0, 1, 2**40, 0, 0.0, 0, 0.0, 0.0),
        change(0, 2, 0, 2**40, 0.0, 0, 0.0, 0.0),
        change(0, 4, 0, 0, 0.0, 1, 0.0, 0.0),
        change(0, 4, 0, 0, 1.0, 0, 0.0, 0.0),
        change(0, 4, 0, 0, 1.0, 1, np.nan, 0.0),
        change(0, 7, 10, 1, np.inf, 1, 0.0, 0.0),
    ],
)
def test_settings_are_checked_at_the_server(serve: Serve, connect: Connect, body: Writer) -> None:
    server = serve(table())
    before = connect(server).server_info()
    with Peer(server.port) as peer:
        peer.hello()
        error = failure(peer.request(Kind.CONFIGURE, body))
        assert isinstance(error, errors.InvalidArgumentError | errors.ArgumentTypeError)
    assert connect(server).server_info() == before


@pytest.mark.parametrize("cursor", [2**32, 2**64 - 1, 2**63])
def test_a_place_in_a_list_that_is_not_there(serve: Serve, cursor: int) -> None:
    server = serve(table(stripes=1))
    with Peer(server.port) as peer:
        peer.hello()
        error = failure(peer.request(Kind.LIST, numbers(u16=0, u64=cursor)))
        assert type(error) is errors.InvalidArgumentError
    server.check()


def test_an_extension_does_not_wait_for_itself(serve: Serve, connect: Connect) -> None:
    """Nor over the bridge of its own server."""
    clients: list[reverb.Client] = []
    results: list[str] = []
    inserted, done = threading.Event(), threading.Event()

    class Caller(reverb.TableExtension):
        def on_insert(self, item: ExtensionItem) -> None:
            if item.priority != 5.0:
                return
            assert inserted.wait(PATIENCE)
            client = clients[0]
            for call in (
                lambda: client.insert_batch("t", {"x": np.zeros(3000)}, 3.0),
                lambda: client.update_priorities("t", [item.key] * 9, 1.0),
                lambda: client.mutate_priorities("t", deletes=[item.key] * 9),
            ):
                try:
                    call()
                except errors.ExtensionError as error:
                    results.append(str(error))
            done.set()

    server = serve(table(extensions=[Caller()]))
    clients.append(connect(server))
    clients[0].insert_batch("t", {"x": np.zeros(1)}, 5.0)
    inserted.set()
    assert done.wait(PATIENCE)
    assert len(results) == 3
    assert all("wait for itself" in text for text in results)


def test_emptying_a_large_table_holds_up_nobody(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(table(), table("other"))
    client, other = connect(server), connect(server)
    client.insert_batch("t", {"x": np.zeros(10)})
    operations: Any = server._bridge
    begun, go_on = threading.Event(), threading.Event()
    empty = operations._dispatcher._operations._empty

    def slow(number: int) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        empty(number)

    monkeypatch.setattr(operations._dispatcher._operations, "_empty", slow)
    thread = threading.Thread(target=lambda: client.reset("t"))
    thread.start()
    assert begun.wait(PATIENCE)
    other.insert_batch("other", {"x": np.zeros(1)})
    assert client.sample_batch("other", 1, timeout=PATIENCE).data["x"].shape == (1,)
    assert client.server_info()["t"].current_size == 10
    go_on.set()
    thread.join(PATIENCE)
    assert client.server_info()["t"].current_size == 0
