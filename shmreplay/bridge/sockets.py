"""Frames through sockets, with as little of Python as there can be for each."""

from __future__ import annotations

import functools
import math
import socket as tcp
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from shmreplay import limits

__all__ = ["Arrivals", "keep_memory", "peer_of", "readable", "receive", "send", "send_lent", "wait"]

Socket = zmq.Socket[bytes]

# Plain numbers: to combine flags of an enum takes longer than to send a frame.
_IN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
# Frames from there on are sent from where they are; to have a smaller one copied costs less than to
# be told when it was sent.
_SHARED_BYTES: Final = 128 * 2**10
_LAST_DATA_RECV: Final = 52
"""Where Linux's `tcp_info` says how many milliseconds ago data came last, as u32."""


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


class Arrivals:
    """When data came last through a connection, be it of a message that has not come whole.

    libzmq says nothing of such a message, and a large one may take minutes on a slow line. What
    else its sender says waits behind it.
    """

    def __init__(self, frame: zmq.Frame) -> None:
        """Takes a frame that came through the connection."""
        self._fd = int(frame.get(zmq.SRCFD))
        self._peer = self._ask(lambda line: line.getpeername())

    def quiet_s(self) -> float:
        """Seconds since then; infinity where the connection is closed."""
        return float(self._ask(self._quiet_s))

    def _quiet_s(self, line: tcp.socket) -> float:
        if line.getpeername() != self._peer:  # another connection got the descriptor
            return math.inf
        info = line.getsockopt(tcp.IPPROTO_TCP, tcp.TCP_INFO, _LAST_DATA_RECV + 4)
        milliseconds: int = struct.unpack_from("=I", info, _LAST_DATA_RECV)[0]
        return milliseconds / 1000

    def _ask(self, question: Callable[[tcp.socket], Any]) -> Any:
        """Asks the kernel; the descriptor is libzmq's, and may be closed at any time."""
        try:
            line = tcp.socket(fileno=self._fd)
        except OSError:
            return math.inf
        try:
            return question(line)
        except OSError:
            return math.inf
        finally:
            line.detach()


def readable(source: Any) -> tuple[Any, int]:
    """A socket or descriptor as `wait` takes it."""
    return source, _IN
