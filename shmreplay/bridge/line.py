"""A client's socket: made anew after each break, with an eye on what happens to its connection."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from shmreplay import limits
from shmreplay.bridge import auth, sockets

__all__ = ["WELCOME_S", "Line"]

WELCOME_S = 3.0
"""Seconds that a server has for taking a connection and saying WELCOME."""

_END_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Line:
    """One connection at a time, by one thread; other threads only wake it."""

    def __init__(self, keys: auth.ClientKeys | None) -> None:
        """Is not connected.

        Args:
            keys: Of the client and of the server; None without encryption.
        """
        self._keys = keys
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sources = [sockets.readable(self._wake_fd)]
        self._source: list[tuple[Any, int]] = []
        self._woken = False
        self._arrivals: sockets.Arrivals | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a socket, connected or about to be."""
        return self._socket is not None

    def open(self, address: str) -> None:
        """Connects to `'tcp://host:port'`, in the background."""
        socket = _context().socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.SNDHWM, limits.BRIDGE_REQUESTS)
        socket.setsockopt(zmq.RCVHWM, limits.BRIDGE_REQUESTS)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.BRIDGE_MESSAGE_BYTES)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(WELCOME_S * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(WELCOME_S * 1000))
        socket.setsockopt(zmq.IPV6, 1)
        self._monitor = socket.get_monitor_socket(_END_EVENTS)
        self._socket = socket
        if self._keys is not None:
            self._keys.apply(socket)
        self._source = [sockets.readable(socket)]
        self._sources = [self._sources[0], *self._source, sockets.readable(self._monitor)]
        socket.connect(address)

    def close(self, linger_ms: int = 0) -> None:
        """Ends the connection. Idempotent."""
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger_ms)
        if self._monitor is not None:
            self._monitor.close(0)
        self._socket = self._monitor = self._arrivals = None
        del self._sources[1:]

    def wait(self, seconds: float) -> tuple[bool, str | None]:
        """Waits for something to happen.

        Returns:
            Whether messages came, and how the connection ended (None: it did not; "keys": the
            server knows the client's key not).
        """
        ready = sockets.wait(self._sources, seconds)
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
            self._woken = False  # before its caller looks at what there is to do
        end: str | None = None
        if self._monitor is not None and self._monitor in ready:
            event = recv_monitor_message(self._monitor)["event"]
            end = "keys" if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else "closed"
        return self._socket is not None and self._socket in ready, end

    def wake(self) -> None:
        """Lets `wait` return."""
        if self._woken:
            return
        with self._lock:
            if self._wake_fd >= 0:
                self._woken = True
                os.eventfd_write(self._wake_fd, 1)

    def end(self) -> None:
        """Nobody will wait any more."""
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def send(self, frames: list[Any], lent: list[zmq.MessageTracker] | None = None) -> bool:
        """False where nothing more can be sent now.

        Args:
            frames: Of a message.
            lent: Gets what says when those were sent that are not copied; None: nobody asks.
        """
        assert self._socket is not None
        try:
            if lent is None:
                sockets.send(self._socket, frames)
            else:
                sockets.send_lent(self._socket, frames, lent)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Any] | None:
        """The frames of a message as buffers, or None."""
        message = sockets.receive(self._source, limits.BRIDGE_PARTS + 2)
        if message is None:
            return None
        if self._arrivals is None:
            self._arrivals = sockets.Arrivals(message[0][0])
        return [frame.buffer for frame in message[0]]

    def quiet_s(self) -> float:
        """Seconds for which nothing came, not even a part of a message."""
        return math.inf if self._arrivals is None else self._arrivals.quiet_s()


# ---------------------------------------------------------------------- what lines share

_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}
_contexts_lock = threading.Lock()


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """The process's context: one thread for all of its links."""
    with _contexts_lock:
        context = _contexts.get(os.getpid())
        if context is None:
            sockets.keep_memory()
            context = zmq.Context()
            context.set(zmq.MAX_SOCKETS, 16384)
            _contexts[os.getpid()] = context
        return context


def _after_fork_in_child() -> None:
    global _contexts_lock
    _contexts_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
