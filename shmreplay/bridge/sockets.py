"""Frames through sockets, with as little of Python as there can be for each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import zmq

from shmreplay import limits

__all__ = ["keep_memory", "peer_of", "readable", "receive", "send", "send_lent", "wait"]

Socket = zmq.Socket[bytes]

# Plain numbers: to combine flags of an enum takes longer than to send a frame.
_IN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
# Frames from there on are sent from where they are; to have a smaller one copied costs less than to
# be told when it was sent.
_SHARED_BYTES: Final = 128 * 2**10


@functools.cache
def keep_memory() -> None:
    """Lets the C library keep memory of messages that were read, for those that come.

    Once a block from malloc was given back, glibc takes its size for one that comes again, and
    keeps twice as much. Else large messages are received into pages that are new to the process
    each time, which takes longer than to receive them.
    """
    bytearray(limits.BRIDGE_KEPT_BYTES // 2)


def wait(entries: Sequence[tuple[Any, int]], seconds: float) -> list[Any]:
    """Those of sockets and descriptors that can be read; empty after so many seconds without."""
    return [entry for entry, _ in zmq.zmq_poll(entries, timeout=max(int(seconds * 1000), 1))]


def send(socket: Socket, frames: Sequence[Any]) -> None:
    """Sends a message without waiting.

    Raises:
        zmq.Again: Nothing more can be sent now.
    """
    last = len(frames) - 1
    for i in range(last):
        frame = frames[i]
        socket.send(frame, _MORE, len(frame) < _SHARED_BYTES)
    socket.send(frames[last], _NOBLOCK, len(frames[last]) < _SHARED_BYTES)


def send_lent(socket: Socket, frames: Sequence[Any], lent: list[zmq.MessageTracker]) -> None:
    """As `send`; of each frame that is sent from where it is, `lent` gets what says when it was.

    Raises:
        zmq.Again: Nothing more can be sent now.
    """
    for i, frame in enumerate(frames):
        flags = _NOBLOCK if i == len(frames) - 1 else _MORE
        if len(frame) < _SHARED_BYTES:
            socket.send(frame, flags)
        else:
            lent.append(socket.send(frame, flags, copy=False, track=True))


def receive(entry: Sequence[tuple[Any, int]], most: int) -> tuple[list[zmq.Frame], int] | None:
    """A message: its frames, of which at most so many are kept, and how many it has.

    Args:
        entry: The socket as `wait` takes it, alone.
        most: Frames.

    Returns:
        None where no message is there: to ask costs less than to be refused.
    """
    if not zmq.zmq_poll(entry, timeout=0):
        return None
    socket: Socket = entry[0][0]
    frame = socket.recv(_NOBLOCK, copy=False)
    frames, n = [frame], 1
    while frame.more:
        frame = socket.recv(copy=False)
        n += 1
        if n <= most:
            frames.append(frame)
    return frames, n


def peer_of(frame: zmq.Frame) -> str:
    """Who sent a frame: the public key where keys are used, else the host's address."""
    for name in ("User-Id", "Peer-Address"):
        try:
            found = frame.get(name)
        except zmq.ZMQError:  # it has no such property
            continue
        if found:
            return str(found)
    return ""


def readable(source: Any) -> tuple[Any, int]:
    """A socket or descriptor as `wait` takes it."""
    return source, _IN
