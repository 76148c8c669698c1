"""A peer that says what it is told to say, well-formed or not."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import zmq

from shmreplay.bridge import protocol
from shmreplay.bridge.protocol import Header, Kind
from shmreplay.bridge.wire import Reader, Writer

DEADLINE_MS = 20_000
ONLY = (protocol.VERSION, protocol.VERSION)


class Peer:
    """A bare DEALER."""

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(f"tcp://{source}:0;127.0.0.1:{port}")
        self.identity = secrets.token_bytes(16)
        self.sequence = 0

    def close(self) -> None:
        self.socket.close()
        self._context.term()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, frames: Sequence[Any]) -> None:
        self.socket.send_multipart(list(frames))

    def hello(self, generation: int = 0, versions: tuple[int, int] = ONLY) -> Header:
        self.send(protocol.encode(Kind.HELLO, hello_body(self.identity, generation, versions)))
        return self.receive()[0]

    def request(self, kind: Kind, body: Writer) -> tuple[Header, Reader]:
        """Sends a request and waits for what comes."""
        self.sequence += 1
        self.send(protocol.encode(kind, body, self.sequence, self.sequence - 1))
        return self.receive()

    def receive(self) -> tuple[Header, Reader]:
        assert self.socket.poll(DEADLINE_MS), "no answer"
        frames = self.socket.recv_multipart()
        return protocol.read_header(frames[0]), Reader(frames[1], frames[2:])

    def is_dropped(self) -> bool:
        """Whether the next thing that comes is the notice that this peer is not heard any more."""
        while True:
            header, _ = self.receive()
            if header.kind != Kind.PONG:
                return header.kind == Kind.REFUSED


def hello_body(
    identity: bytes,
    generation: int = 0,
    versions: tuple[int, int] = ONLY,
) -> Writer:
    body = Writer()
    body.u16(versions[0])
    body.u16(versions[1])
    body.meta += identity
    body.u64(generation)
    body.u64(0)
    body.u8(0)
    body.u32(0)
    body.u32(0)
    return body
