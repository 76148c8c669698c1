"""The server's end of the line: one thread with a socket. What to do is the dispatcher's matter."""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from shmreplay import limits
from shmreplay.bridge import auth, sockets
from shmreplay.bridge.dispatch import Dispatcher, Sent
from shmreplay.errors import InvalidArgumentError

__all__ = ["BridgeServer", "check_address", "is_loopback"]

_log = logging.getLogger(__name__)

# Messages that are taken before requests get their turn.
_MESSAGES_A_TURN = 256
_LINGER_MS = 500


def is_loopback(host: str) -> bool:
    """Whether no other host can reach what listens on this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_address(bind: str, keys: object, insecure: bool) -> None:
    """Refuses an address that others can reach without keys.

    Raises:
        InvalidArgumentError: It is one.
    """
    if keys is None and not insecure and not is_loopback(bind):
        raise InvalidArgumentError(
            f"bind={bind!r} lets other hosts in, and without keys anybody there can read and"
            " change every table; expected keys. Give auth=ServerKeys(...), or say"
            " insecure=True if the network is trusted."
        )


class BridgeServer:
    """Serves one store to clients on other hosts, by a thread of its own.

    It binds when it is made, and serves from `start` on: what can go wrong with ports and keys does
    so before there is a store.
    """

    def __init__(
        self,
        port: int,
        *,
        bind: str = "127.0.0.1",
        keys: auth.ServerKeys | None = None,
        insecure: bool = False,
        compress: bool = True,
        ports: Sequence[int] = (0,),
        worker: int = 0,
    ) -> None:
        """Binds.

        Args:
            port: To listen on.
            bind: Address to listen on.
            keys: Which clients may connect; None without encryption.
            insecure: Allow an address that other hosts reach without keys.
            compress: Compress for clients that ask for it.
            ports: Of all processes that serve the store.
            worker: Which of them this is.

        Raises:
            InvalidArgumentError: The address cannot be used, or needs keys.
            ArgumentTypeError: The keys are something else.
            AuthenticationError: The keys cannot be used.
        """
        check_address(bind, keys, insecure)
        auth.check_type(keys, auth.ServerKeys)
        host = f"[{bind}]" if ":" in bind and not bind.startswith("[") else bind
        self.endpoint = f"tcp://{host}:{port}"
        self._compress = compress
        self._place = (ports, worker)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 16384)
        self._authenticator = None if keys is None else self._start_authenticator(keys)
        self._socket = self._context.socket(zmq.ROUTER)
        self._source = [sockets.readable(self._socket)]
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._open_socket(keys)
        except BaseException:
            self._close_context()
            raise

    def start(self, store_address: str) -> None:
        """Serves the store at `'shm://NAME'`."""
        self._dispatcher = Dispatcher(
            *(store_address, self.endpoint, self._compress, self._send),
            *self._place,
            who=sockets.peer_of,
            arrivals=lambda frame: sockets.Arrivals(frame).quiet_s,
        )
        self._thread = threading.Thread(target=self._run, name="shmreplay-bridge", daemon=True)
        self._thread.start()

    def _start_authenticator(self, keys: auth.ServerKeys) -> Any:
        authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        authenticator.start()
        try:
            keys.allow(authenticator)
        except BaseException:
            authenticator.stop()
            self._context.destroy(0)
            raise
        return authenticator

    def _open_socket(self, keys: auth.ServerKeys | None) -> None:
        socket = self._socket
        socket.linger = _LINGER_MS
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, limits.BRIDGE_REQUESTS)
        socket.setsockopt(zmq.RCVHWM, limits.BRIDGE_REQUESTS)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.BRIDGE_MESSAGE_BYTES)
        # Not libzmq's heartbeats: those wait behind a large frame that comes.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(int(limits.BRIDGE_LOST_S), 1))
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(int(limits.BRIDGE_LOST_S), 1))
        socket.setsockopt(zmq.TCP_MAXRT, int(limits.BRIDGE_EXPIRE_S * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.BRIDGE_LOST_S * 1000))
        socket.setsockopt(zmq.BACKLOG, limits.BRIDGE_SESSIONS)
        socket.setsockopt(zmq.IPV6, 1 if "[" in self.endpoint else 0)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        if keys is not None:
            keys.apply(socket)
        try:
            socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            raise InvalidArgumentError(
                f"{self.endpoint} cannot be used ({error.strerror}); expected a free port of this"
                " host. Choose another port or bind="
            ) from None

    def stop(self) -> None:
        """Takes leave of all clients and ends the thread. Idempotent."""
        if self._thread is None:
            if not self._stopping.is_set():
                self._close_context()
        elif self._thread is not threading.current_thread():
            self._stopping.set()
            with self._wake_lock:
                if self._wake_fd >= 0:
                    os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
        self._stopping.set()

    def _close_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._context.term()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        wake = sockets.readable(self._wake_fd)
        sources = [*self._source, sockets.readable(self._monitor), wake]
        sockets.keep_memory()
        next_sweep = time.monotonic() + limits.BRIDGE_HEARTBEAT_S
        try:
            while not self._stopping.is_set():
                idle = self._dispatcher.idle
                pause = limits.WAIT_SLICE_MS / 1000 if idle else limits.BRIDGE_POLL_S
                ready = sockets.wait(sources, pause)
                if self._socket in ready:
                    self._receive()
                if self._monitor in ready:
                    self._look_at_monitor()
                self._dispatcher.turn()
                if time.monotonic() >= next_sweep:
                    next_sweep = time.monotonic() + limits.BRIDGE_HEARTBEAT_S
                    self._dispatcher.sweep()
        except Exception:  # local clients go on; remote ones time out
            _log.exception("the bridge at %s has failed", self.endpoint)
        finally:
            self._dispatcher.close()
            self._close_context()

    def _look_at_monitor(self) -> None:
        event = recv_monitor_message(self._monitor)
        _log.warning(
            "%s: a peer was turned away in the handshake: %s",
            self.endpoint,
            zmq.Event(event["event"]).name,
        )

    # ------------------------------------------------------------------ receiving

    def _receive(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            message = sockets.receive(self._source, limits.BRIDGE_PARTS + 3)
            if message is None:
                return
            frames, n = message
            buffers = [frame.buffer for frame in frames[1:]]
            self._dispatcher.take(frames[0].bytes, buffers, n - 1, frames[-1])

    def _send(self, peer: bytes, frames: list[Any]) -> Sent:
        """Sends to a peer, if it takes more and is still there."""
        try:
            sockets.send(self._socket, [peer, *frames])
        except zmq.Again:
            return Sent.LATER
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        return Sent.YES
