"""Items that are refused stay refused for their client, whoever dies before it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits
from shmreplay.bridge import protocol
from shmreplay.bridge.pending import read_written
from shmreplay.bridge.protocol import ITEM, REFERENCE, REPLACE, SQUEEZED, Kind, Op
from shmreplay.bridge.receipts import ClientReceipts, Receipts
from shmreplay.bridge.refusals import Refusals
from shmreplay.bridge.wire import Reader, Writer
from tests.bridge.killed import DEADLINE, TABLE, KilledServer, in_order
from tests.bridge.peer import Peer
from tests.conftest import free_port

GOOD, BAD, REPLACED = "good", "bad", "replaced"


@pytest.fixture
def killed(unique_name: Callable[[], str]) -> Iterator[KilledServer]:
    server = KilledServer(unique_name(), free_port())
    yield server
    server.stop()


def opened() -> Writer:
    body = Writer()
    body.u32(1)
    body.u32(4)
    body.u8(0)
    return body


def written(items: list[str], first: int = 0, steps: int = 1) -> Writer:
    """Steps from this number on, which is their value, and an item of each; more are of the first
    ones again. A bad one refers to a writer that is not there.
    """
    body = Writer()
    body.u32(1)
    body.u64(1)
    body.u64(0)
    body.u32(0)
    body.u8(Op.COLUMN)
    body.u16(0)
    body.text('["id"]')
    body.u8(5)
    body.u8(0)
    body.u8(Op.ROWS)
    body.u16(1)
    body.u16(0)
    body.u64(first)
    body.u32(steps)
    body.u8(1)
    body.array(np.arange(first, first + steps))
    body.u8(Op.SCHEMA)
    body.u32(0)
    body.text('["dict",[["id",["leaf",[5,[],true]]]]]')
    for i, kind in enumerate(items):
        if kind == REPLACED:
            body.meta += REPLACE.pack(Op.REPLACE, 0, 0, 2**40, 1)
        else:
            body.meta += ITEM.pack(Op.ITEM, 0, 0, 1.0, float("nan"), 1)
        body.meta += REFERENCE.pack(99 if kind == BAD else 1, 0, SQUEEZED, 1, first + i % steps, 1)
    return body


def states_of(reader: Reader, items: list[str]) -> tuple[list[int], dict[int, errors.ReverbError]]:
    _, states, failures = read_written(reader, len(items))
    return [state for state, _ in states], failures


@pytest.mark.parametrize("deaths", [1, 2])
def test_an_item_that_was_refused_is_not_taken_for_one_that_is_in(
    killed: KilledServer, deaths: int
) -> None:
    """Nor inserted after all, with the answer lost and a later item of the writer in its table."""
    items = [BAD, GOOD, BAD, BAD, REPLACED, GOOD, *[BAD] * 120, GOOD, BAD]
    n_good = items.count(GOOD)
    with Peer(killed.port) as first:
        assert first.hello().kind == Kind.WELCOME
        identity = first.identity
        assert first.request(Kind.WRITER_OPEN, opened())[0].kind == Kind.REPLY
        header, reader = first.request(Kind.WRITE, written(items))
        assert header.kind == Kind.REPLY
        before, why_before = states_of(reader, items)
    for _ in range(deaths):
        killed.replace()
        with Peer(killed.port) as peer:
            peer.identity = identity
            assert peer.hello(generation=1).kind == Kind.WELCOME
            assert peer.request(Kind.WRITER_OPEN, opened())[0].kind == Kind.REPLY
            header, reader = peer.request(Kind.WRITE, written(items))
            assert header.kind == Kind.REPLY
            after, why = states_of(reader, items)
        assert after == before
        assert {k: type(error) for k, error in why.items()} == {
            k: type(error) for k, error in why_before.items()
        }
        assert isinstance(why[0], errors.WriterClosedError)
        assert "not in the table" in str(why[0])
    with reverb.Client(f"shm://{killed.name}") as client:
        assert client.server_info()[TABLE].current_size == n_good
        assert len(client.sample_batch(TABLE, n_good, timeout=DEADLINE).info.key) == n_good


def test_what_the_client_knows_takes_no_room(
    make_server: Callable[..., reverb.Server],
) -> None:
    native = make_server([in_order(10)])._connection.native
    name = bytes(range(16))

    def count() -> int:
        return sum(native.receipt(i) is not None for i in range(native.receipts()))

    client = ClientReceipts(Receipts(native, 0, 1), name, None)
    refusals = Refusals(client, 7)
    for number in (1, 2, 56, 57, 60):
        refusals.note(number, 1, 4)
    refusals.note(61, 2, 4)
    refusals.note(62, 2, 5)
    assert count() == 1 + 2 + 2
    client.confirmed(1)
    assert count() == 1 + 2
    # The next process: one of the two is known to the client by now.
    receipts = Receipts(native, 0, 1)
    client = ClientReceipts(receipts, name, receipts.left.pop(name))
    assert [n in Refusals(client, 8) for n in (60, 61, 62)] == [False] * 3
    refusals = Refusals(client, 7)
    client.caught_up()
    assert [n in refusals for n in (60, 61, 62)] == [False, True, True]
    refusals.settled(61)
    assert [n in refusals for n in (60, 61, 62)] == [False, False, True]
    assert count() == 1 + 1
    assert refusals.said_again(62, 9) == 5
    client.confirmed(9)
    assert count() == 1
    client.close()
    assert count() == 0


def test_a_client_that_takes_all_it_gets_leaves_some_for_others(
    make_server: Callable[..., reverb.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them there are."""
    monkeypatch.setattr(limits, "BRIDGE_ALL_RECEIPTS", 1000)
    native = make_server([in_order(10)])._connection.native
    receipts = Receipts(native, 0, 1)
    hogs = [ClientReceipts(receipts, i.to_bytes(16, "big"), None) for i in range(30)]
    lane = 0
    for hog in hogs:
        with pytest.raises(errors.StoreLimitError, match="Close writers"):
            while True:
                lane += 1
                hog.keep(lane, hog.take(lane))
    honest = ClientReceipts(receipts, b"h" * 16, None)
    for _ in range(5):
        lane += 1
        honest.note(honest.take(lane), 1, 1)
    # What those have who go is free again.
    for hog in hogs:
        hog.close()
    for _ in range(100):
        lane += 1
        honest.take(lane)


def test_sessions_that_take_all_receipts_do_not_keep_others_out(
    make_server: Callable[..., reverb.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer opens sessions, each with as many batches whose answers it never confirms."""
    monkeypatch.setattr(limits, "BRIDGE_ALL_RECEIPTS", 60)
    server = make_server([in_order(1000)], port=free_port())
    peers = []
    try:
        for _ in range(8):
            peer = Peer(server.port)
            peers.append(peer)
            assert peer.hello().kind == Kind.WELCOME
            for token in range(1, 40):
                peer.sequence += 1
                peer.send(protocol.encode(Kind.INSERT_BATCH, batch(token), peer.sequence))
        for peer in peers:
            for _ in range(limits.BRIDGE_OWN_RECEIPTS - 1):
                assert peer.receive()[0].kind == Kind.REPLY
        with reverb.Client(f"tcp://127.0.0.1:{server.port}") as client:
            for i in range(20):
                client.insert({"id": i}, {TABLE: 1.0})
                client.insert_batch(TABLE, {"id": np.arange(3)})
    finally:
        for peer in peers:
            peer.close()


def batch(token: int) -> Writer:
    body = Writer()
    body.u16(0)
    body.u64(token)
    body.timeout(None)
    body.u64(1)
    body.text('["dict",[["id",["leaf",[5,[],true]]]]]')
    body.array(np.ones(1))
    body.array(np.arange(1))
    return body


def test_an_item_that_was_held_back_and_cannot_be_said_again_is_reported(
    killed: KilledServer,
) -> None:
    """Its steps were another writer's, which is closed."""
    options = reverb.RemoteOptions(timeout=DEADLINE)
    with reverb.Client(f"tcp://127.0.0.1:{killed.port}", options) as client:
        lender = client.trajectory_writer(1)
        lender.append({"id": 1})
        step = {"id": lender.history["id"][-1]}
        for _ in range(3):
            lender.create_item("narrow", 1.0, step)
        with client.trajectory_writer(1) as writer:
            assert writer.create_item("narrow", 1.0, step) is None
            lender.close()
            killed.replace()
            with pytest.raises(errors.WriterClosedError, match="closed writer"):
                writer.flush(timeout_ms=int(DEADLINE * 1000))
            writer.flush(timeout_ms=int(DEADLINE * 1000))  # it is said once
