"""The wire format: golden messages, and what becomes of damaged ones."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits, rate_limiters, selectors
from shmreplay.bridge import protocol
from shmreplay.bridge.dispatch import Dispatcher, Sent
from shmreplay.bridge.protocol import HEADER, Kind
from shmreplay.bridge.wire import Reader, Writer
from tests.bridge.peer import hello_body
from tests.golden.messages import golden, messages

FUZZ = int(os.environ.get("BRIDGE_FUZZ", "20000"))
SEED = int(os.environ.get("BRIDGE_SEED", "20240229"))
GOLDEN = golden()
# Their bytes may differ from one version of lz4 to the next.
COMPRESSED = {"insert_batch_compressed"}


def table() -> reverb.Table:
    return reverb.Table("t", selectors.Uniform(), selectors.Fifo(), 1000, rate_limiters.MinSize(1))


class Bench:
    """A dispatcher without sockets, and what it sent to whom."""

    def __init__(self, store_address: str) -> None:
        self.sent: dict[bytes, list[list[Any]]] = {}
        self.dispatcher = Dispatcher(store_address, "here", True, self._send)
        self.peers = 0

    def _send(self, peer: bytes, frames: list[Any]) -> Sent:
        self.sent.setdefault(peer, []).append(frames)
        return Sent.YES

    def take(self, peer: bytes, frames: list[bytes]) -> list[protocol.Header]:
        """What is answered at once."""
        self.sent[peer] = []
        self.dispatcher.take(peer, frames, len(frames))
        self.dispatcher.turn()
        return [protocol.read_header(frames[0]) for frames in self.sent.pop(peer, [])]

    def new_peer(self) -> bytes:
        self.peers += 1
        peer = self.peers.to_bytes(5, "big")
        hello = protocol.encode(Kind.HELLO, hello_body(peer * 3 + b"x"))
        assert [h.kind for h in self.take(peer, hello)] == [Kind.WELCOME]
        return peer

    def received(self, peer: bytes) -> int | None:
        """The last request of a peer that is still heard, else None."""
        session = self.dispatcher._peers.get(peer)
        return None if session is None else session.received


@pytest.fixture
def bench(make_server: Callable[..., reverb.Server]) -> Any:
    server = make_server([table()])
    bench = Bench(server.address)
    yield bench
    bench.dispatcher.close()
    assert bench.dispatcher._nbytes == 0
    server.check()


@pytest.mark.parametrize("name", sorted(set(GOLDEN) - COMPRESSED))
def test_messages_are_written_as_ever(name: str) -> None:
    assert messages()[name] == GOLDEN[name]


def test_golden_messages_are_understood(bench: Bench) -> None:
    peer = b"peer"
    for name, frames in GOLDEN.items():
        if name in ("failure", "go", "bye"):
            continue  # the first two are a server's, the other is the end
        headers = bench.take(peer, frames)
        kinds = {header.kind for header in headers}
        if name == "hello":
            assert kinds == {Kind.WELCOME}
        elif protocol.read_header(frames[0]).kind in protocol.REQUESTS:
            while not headers:  # a check of the store has a thread of its own
                bench.sent[peer] = []
                bench.dispatcher.turn()
                headers = [protocol.read_header(f[0]) for f in bench.sent.pop(peer)]
            assert [header.kind for header in headers] == [Kind.REPLY], name
    assert bench.received(peer) == 19
    assert bench.take(peer, GOLDEN["bye"]) == []
    assert bench.received(peer) is None


def test_golden_error_is_read_as_it_was_raised() -> None:
    _, meta = GOLDEN["failure"]
    error = protocol.decode_error(Reader(meta))
    assert type(error) is errors.TableNotFoundError
    assert str(error) == "no such table"
    assert error.__notes__ == ["inserted into: ['a']"]


def test_every_error_has_a_number_and_keeps_its_class() -> None:
    for name in errors.__all__:
        cls = getattr(errors, name)
        body = Writer()
        protocol.encode_error(body, cls("text"))
        assert type(protocol.decode_error(Reader(body.meta))) is cls


def test_arrays_of_all_types_and_sizes_come_back() -> None:
    rng = np.random.default_rng(0)
    for compress in (False, True):
        for dtype in ("bool", "int8", "uint64", "float16", "float64", "complex128", "S3", "U5"):
            for shape in ((), (0,), (3, 0, 2), (7,), (1000, 3), (200, 300)):
                for array in (np.zeros(shape, dtype), (rng.random(shape) * 9).astype(dtype)):
                    body = Writer(compress)
                    body.array(np.ascontiguousarray(array).reshape(shape))
                    reader = Reader(bytes(body.meta), [bytes(part) for part in body.parts])
                    back = reader.array()
                    reader.finish()
                    assert back.dtype == array.dtype
                    np.testing.assert_array_equal(back, array)


def test_compression_only_where_it_shrinks() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    for array, smaller in ((noise, False), (np.zeros(100_000, np.uint8), True)):
        body = Writer(compress=True)
        body.array(array)
        assert (body.nbytes < array.nbytes // 2) == smaller
        assert body.nbytes <= array.nbytes


def test_a_compressed_part_cannot_grow_beyond_what_is_said() -> None:
    body = Writer(compress=True)
    body.array(np.zeros(2**20, np.uint8))
    small = Writer()
    small.array(np.zeros(2**10 + 1, np.uint8))
    # The head of the small array, which says how much may come, with the part of the large one.
    head = bytearray(small.meta)
    head[1] = 2
    with pytest.raises(errors.ProtocolError, match="compressed part"):
        Reader(bytes(head), body.parts).array()


@pytest.mark.parametrize("n", [2**40, 2**63, 2**64 - 1])
def test_sizes_are_checked_before_memory_is_taken(n: int) -> None:
    body = Writer()
    body.array(np.zeros((2, 2), np.uint8))
    head = bytearray(body.meta)
    head[4:12] = n.to_bytes(8, "little")
    with pytest.raises(errors.ProtocolError):
        Reader(bytes(head)).array()


def damaged(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """The frames with something wrong."""
    out = [bytearray(frame) for frame in frames]
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        frame = rng.choice(out)
        match rng.randrange(7):
            case 0 if frame:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 1 if frame:
                frame[rng.randrange(len(frame))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del frame[rng.randrange(len(frame) + 1) :]
            case 3:
                frame += rng.randbytes(rng.randrange(1, 40))
            case 4 if len(out) > 1:
                out.remove(frame)
            case 5:
                out.append(bytearray(rng.randbytes(rng.randrange(64))))
            case 6 if len(frame) >= 8:
                at = rng.randrange(len(frame) - 7)
                frame[at : at + 8] = rng.choice((0, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(
                    8, "little"
                )
    if rng.random() < 0.7 and out and len(out[0]) == HEADER.size:
        # Mostly with true sizes in the header, so that the rest is looked at.
        fields = list(HEADER.unpack(out[0]))
        fields[4], fields[7] = max(len(out) - 2, 0), sum(map(len, out[1:]))
        out[0] = bytearray(HEADER.pack(*fields))
    return [bytes(frame) for frame in out]


def numbered(frames: list[bytes], sequence: int, ack: int = 0) -> list[bytes]:
    fields = list(HEADER.unpack(frames[0]))
    fields[6] = ack or fields[6]
    if fields[2] in protocol.REQUESTS:
        fields[5] = sequence
    return [HEADER.pack(*fields), *frames[1:]]


def test_damaged_messages_cost_their_sender_and_nobody_else(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    rng = random.Random(SEED)
    names = [name for name in GOLDEN if name not in ("hello", "check")]
    healthy = bench.new_peer()
    peer, dropped = bench.new_peer(), 0
    answers = {Kind.REPLY, Kind.FAILURE, Kind.REFUSED, Kind.PONG, Kind.GO}
    for case in range(FUZZ):
        if bench.received(peer) in (None, 500):
            dropped += 1
            peer = bench.new_peer()
            for name in ("writer_open", "write"):
                sequence = bench.received(peer)
                assert sequence is not None
                bench.take(peer, numbered(GOLDEN[name], sequence + 1))
        sequence = bench.received(peer)
        assert sequence is not None
        name = rng.choice(names)
        for header in bench.take(peer, damaged(numbered(GOLDEN[name], sequence + 1), rng)):
            assert header.kind in answers, case
        if case % 500 == 0:
            expected = (bench.received(healthy) or 0) + 1
            (answer,) = bench.take(healthy, numbered(GOLDEN["info"], expected, expected - 1))
            assert (answer.kind, answer.sequence) == (Kind.REPLY, expected)
    # Both things happen often, or the test does not test.
    assert FUZZ // 20 < dropped < FUZZ
    assert len(bench.dispatcher._sessions) < limits.BRIDGE_SESSIONS
    assert not caplog.records, "an error of the server's own"
