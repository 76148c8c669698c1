"""The client's end of the line: one thread that sends requests, and again after a reconnect.

Every request has a number. The server answers each exactly once, and keeps the answer until the
client has said that it has it; after a reconnect both say how far they got, and what the other did
not get is sent again. So nothing is done twice and nothing is lost as long as both live.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from shmreplay import errors, limits
from shmreplay.bridge import auth, protocol
from shmreplay.bridge.protocol import Header, Kind
from shmreplay.bridge.wire import Reader, Writer

__all__ = ["Link", "Pending"]

_log = logging.getLogger(__name__)

_SLICE_S = limits.WAIT_SLICE_MS / 1000
# Pauses between attempts to connect.
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_WELCOME_S = 3.0
_LEAST_S = 1.0
# Answers after which the server is told that it need not keep them.
_SAY_AFTER = 64
_END_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Pending:
    """A request on its way, and then its answer."""

    __slots__ = ("_done", "callback", "error", "frames", "kind", "nbytes", "reader", "sequence")

    def __init__(
        self, kind: Kind, body: Writer, callback: Callable[[Pending], None] | None = None
    ) -> None:
        """Takes the message. The callback is called by the link's thread with the answer."""
        self.kind = kind
        self.frames: list[Any] = [None, bytes(body.meta), *body.parts]
        self.nbytes = len(body.meta) + body.nbytes
        self.sequence = 0
        self.reader: Reader | None = None
        self.error: BaseException | None = None
        self.callback = callback
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._done.is_set()

    def wait(self, seconds: float | None) -> bool:
        """Waits for the answer; False if it is not there in time."""
        return self._done.wait(seconds)

    def settle(self, reader: Reader | None, error: BaseException | None) -> None:
        """The answer has come."""
        self.reader, self.error = reader, error
        self.frames = []
        self._done.set()
        if self.callback is not None:
            self.callback(self)

    def result(self) -> Reader:
        """The answer.

        Raises:
            ReverbError: The server could not do it.
        """
        if self.error is not None:
            raise self.error
        assert self.reader is not None
        return self.reader


class Link:
    """A connection to a bridge, made anew whenever it breaks. Thread-safe; not usable after a fork.

    Lost for good (`lost` says why) when the server was out of reach for `timeout` seconds, knows
    the client no more, or refuses it.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        keys: auth.ClientKeys | None = None,
        compress: bool = False,
    ) -> None:
        """Does not connect yet.

        Args:
            address: `'tcp://host:port'`.
            timeout: Seconds that the server may be out of reach.
            keys: Of this client and of the server; None without encryption.
            compress: Ask the server to compress what it sends.
        """
        self.address = address
        self.timeout = timeout
        self.compress = compress
        self.lost: errors.ReverbError | None = None
        self.welcome: Reader | None = None
        self.connections = 0
        self.held: set[int] = set()
        """Answers whose items the caller has not delivered yet: the server keeps them pinned."""
        self._keys = keys
        self._session = secrets.token_bytes(16)
        self._generation = 0
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._welcomed = threading.Event()
        self._outbox: deque[Pending | list[Any]] = deque()
        self._open: dict[int, Pending] = {}
        self._answered: list[int] = []
        self._sequence = 0
        self._bytes = 0
        self._closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._connected = False
        self._down_since = time.monotonic()
        self._heard_at = 0.0
        self._said_at = 0.0
        self._try_at = 0.0
        self._pause = _FIRST_PAUSE_S
        self._why = "no connection was made"
        self._thread = threading.Thread(target=self._run, name="shmreplay-link", daemon=True)

    # ------------------------------------------------------------------ for callers

    @property
    def forked(self) -> bool:
        """Whether this process got the link from its parent."""
        return self._pid != os.getpid()

    def connect(self, within: float | None = None) -> Reader:
        """Connects; returns what the server said of itself.

        Args:
            within: Seconds that it may take; never fewer than a connection needs.

        Raises:
            DeadlineExceededError: It took longer.
            ServerClosedError: It was not reached within the timeout.
            AuthenticationError, VersionMismatchError, ProtocolError: It refused.
        """
        self._thread.start()
        _links.add(self)
        end = math.inf if within is None else time.monotonic() + max(within, _LEAST_S)
        while not self._welcomed.wait(_SLICE_S):
            if self.lost is not None:
                raise self.lost
            if time.monotonic() > end:
                raise errors.DeadlineExceededError(
                    f"the server at {self.address} was not reached within {within} s: {self._why}"
                )
        if self.welcome is None:
            raise self._lost_error()
        return self.welcome

    def post(
        self,
        kind: Kind,
        body: Writer,
        callback: Callable[[Pending], None] | None = None,
        *,
        wait: bool = True,
    ) -> Pending:
        """Sends a request; its answer comes into what this returns.

        Args:
            kind: One of `protocol.REQUESTS`.
            body: The message.
            callback: Called with the answer, by the link's thread.
            wait: Wait while too much is on its way.

        Raises:
            InvalidArgumentError: The message is too large.
            ServerClosedError: The server is gone.
        """
        body.check_size(kind.name.lower())
        pending = Pending(kind, body, callback)
        with self._changed:
            log_at = time.monotonic() + limits.WAIT_LOG_AFTER_S
            while wait and self._is_full(pending.nbytes) and self.lost is None:
                self._changed.wait(_SLICE_S)
                if time.monotonic() > log_at:
                    log_at = time.monotonic() + 2 * limits.WAIT_LOG_AFTER_S
                    _log.warning(
                        "%s: %d requests of %d bytes wait for the server to take them",
                        self.address,
                        len(self._open),
                        self._bytes,
                    )
            if self.lost is not None:
                raise self._lost_error()
            self._sequence += 1
            pending.sequence = self._sequence
            self._open[pending.sequence] = pending
            self._bytes += pending.nbytes
            self._outbox.append(pending)
        self._wake()
        return pending

    def _is_full(self, nbytes: int) -> bool:
        if not self._open:
            return False
        # Some are left for requests that carry nothing.
        full = len(self._open) >= limits.BRIDGE_REQUESTS * 3 // 4
        return full or self._bytes + nbytes > limits.BRIDGE_CLIENT_BYTES

    def tell(self, kind: Kind, body: Writer) -> None:
        """Sends what has no answer and may get lost with the connection."""
        with self._changed:
            self._outbox.append(protocol.encode(kind, body))
        self._wake()

    def release(self, sequence: int) -> None:
        """The items of this answer were delivered."""
        if sequence in self.held:
            self.held.discard(sequence)
            body = Writer()
            body.u64(sequence)
            self.tell(Kind.RELEASE, body)

    def call(
        self, kind: Kind, body: Writer, timeout: float | None = None, *, cancel: bool = False
    ) -> Reader:
        """Sends a request and waits for the answer; see `answer`."""
        return self.answer(self.post(kind, body), timeout, cancel=cancel)

    def answer(
        self, pending: Pending, timeout: float | None = None, *, cancel: bool = False
    ) -> Reader:
        """Waits for an answer.

        The server keeps the deadline; here it counts only while the server is out of reach.

        Args:
            pending: The request.
            timeout: Seconds; None: for ever.
            cancel: The request has no deadline that the server knows: once the time is over, it is
                told to wait no longer, and answers what it has done.

        Raises:
            DeadlineExceededError: The server is out of reach, and the time is over.
            ServerClosedError: It is gone for good.
        """
        end = None if timeout is None else time.monotonic() + timeout + 1.0
        try:
            if cancel and timeout is not None and not pending.wait(max(timeout, 0.0)):
                self.cancel(pending)
            while not pending.wait(1.0):
                if end is not None and not self._connected and time.monotonic() > end:
                    raise errors.DeadlineExceededError(
                        f"no answer within {timeout} s: the server at {self.address} is out of"
                        f" reach ({self._why}). Whether the call was carried out is not known."
                    )
        except BaseException:
            self.cancel(pending)
            raise
        return pending.result()

    def cancel(self, pending: Pending) -> None:
        """Asks the server to stop waiting on behalf of a request; it is answered in any case."""
        body = Writer()
        body.u64(pending.sequence)
        self.tell(Kind.CANCEL, body)

    def close(self) -> None:
        """Takes leave of the server and ends the thread. Idempotent, bounded in time."""
        if self.forked:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(limits.BRIDGE_CLOSE_S)

    def _lost_error(self) -> errors.ReverbError:
        lost = self.lost
        if lost is None:
            return errors.ServerClosedError(f"the client of {self.address} is closed")
        return type(lost)(str(lost))  # each caller raises its own

    def _wake(self) -> None:
        with self._changed:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except errors.ReverbError as error:
            self._lose(error)
        except BaseException as error:  # told to whoever calls
            _log.exception("the connection to %s has failed", self.address)
            self._lose(errors.ServerClosedError(f"the connection to {self.address}: {error}"))
        finally:
            if self._connected:
                self._send(protocol.encode(Kind.BYE, Writer()))
            self._drop_socket(linger_ms=200)
            if self.lost is None:
                self._lose(errors.ServerClosedError(f"the client of {self.address} is closed"))
            with self._changed:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _turn(self) -> bool:
        """Waits for something to do, and does it. False at the end."""
        now = time.monotonic()
        if self._closing and not self._outbox:
            return False
        if self._socket is None and now >= self._try_at:
            self._open_socket()
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
        due = limits.BRIDGE_HEARTBEAT_S / 2 if self._socket is not None else self._try_at - now
        ready = dict(poller.poll(max(int(due * 1000), 1)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._socket is not None and self._socket in ready:
            self._receive()
        if self._monitor is not None and self._monitor in ready:
            self._look_at_monitor()
        if self._connected:
            self._send_outbox()
            self._keep_alive()
        else:
            self._check_time()
        return self.lost is None and not (self._closing and not self._connected)

    def _open_socket(self) -> None:
        socket = _context().socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.SNDHWM, limits.BRIDGE_REQUESTS)
        socket.setsockopt(zmq.RCVHWM, limits.BRIDGE_REQUESTS)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.BRIDGE_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(limits.BRIDGE_HEARTBEAT_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(limits.BRIDGE_LOST_S * 1000))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(_WELCOME_S * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(_WELCOME_S * 1000))
        socket.setsockopt(zmq.IPV6, 1)
        self._monitor = socket.get_monitor_socket(_END_EVENTS)
        self._socket = socket
        if self._keys is not None:
            self._keys.apply(socket)
        self._try_at = time.monotonic() + _WELCOME_S
        socket.connect(self.address)
        self._send(self._hello())

    def _hello(self) -> list[Any]:
        body = Writer()
        body.u16(protocol.VERSION)
        body.u16(protocol.VERSION)
        body.meta += self._session
        body.u64(self._generation)
        body.u8(1 if self.compress else 0)
        with self._changed:
            for numbers in (sorted(self._open), sorted(self.held)):
                body.u32(len(numbers))
                for number in numbers:
                    body.u64(number)
            self._answered.clear()
        return protocol.encode(Kind.HELLO, body, ack=self._acknowledged())

    def _acknowledged(self) -> int:
        """All answers up to this one have come."""
        with self._changed:
            return min(self._open, default=self._sequence + 1) - 1

    def _look_at_monitor(self) -> None:
        assert self._monitor is not None
        event = recv_monitor_message(self._monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._lose(
                errors.AuthenticationError(
                    f"the server at {self.address} does not know this client's key. Add the"
                    " client's public key to the directory of keys that the server allows."
                )
            )
        else:
            self._broken("the connection was closed" if self._connected else self._refusal())

    def _refusal(self) -> str:
        if self._keys is None:
            return "no server answers there, or it demands keys"
        return "no server answers there, or it is not the one with the key that was given"

    def _broken(self, why: str) -> None:
        """The connection is gone: try again after a pause."""
        if self._connected:
            self._down_since = time.monotonic()
            self._pause = _FIRST_PAUSE_S
            _log.info("%s: %s; connecting anew", self.address, why)
        self._why = why
        self._drop_socket()
        self._try_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def _drop_socket(self, linger_ms: int = 0) -> None:
        self._connected = False
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger_ms)
        if self._monitor is not None:
            self._monitor.close(0)
        self._socket = self._monitor = None

    def _check_time(self) -> None:
        now = time.monotonic()
        if now - self._down_since > self.timeout and self.lost is None:
            never = self.connections == 0
            kind = errors.StoreNotFoundError if never else errors.ServerClosedError
            self._lose(
                kind(
                    f"the server at {self.address} was not reached for {self.timeout:g} s:"
                    f" {self._why}. Is it running, and is the address right? What was not confirmed"
                    " may or may not have been done."
                )
            )
        elif self._socket is not None and now >= self._try_at:
            self._broken("it accepted the connection and does not answer")

    def _lose(self, error: errors.ReverbError) -> None:
        """The end: everybody who waits is told."""
        with self._changed:
            self.lost = error
            waiting = list(self._open.values())
            self._open.clear()
            self._outbox.clear()
            self._bytes = 0
            self._changed.notify_all()
        for pending in waiting:
            pending.settle(None, self._lost_error())
        self._welcomed.set()

    # ------------------------------------------------------------------ sending

    def _send(self, frames: list[Any]) -> None:
        assert self._socket is not None
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            self._said_at = time.monotonic()
        except zmq.Again:
            self._broken("it does not take what is sent")

    def _send_request(self, pending: Pending) -> None:
        head = protocol.HEADER.pack(
            protocol.MAGIC,
            protocol.VERSION,
            pending.kind,
            0,
            len(pending.frames) - 2,
            pending.sequence,
            self._acknowledged(),
            pending.nbytes,
        )
        self._send([head, *pending.frames[1:]])

    def _send_outbox(self) -> None:
        while self._connected and self._outbox:
            entry = self._outbox.popleft()
            if isinstance(entry, list):
                self._send(entry)
            elif entry.frames:
                self._send_request(entry)

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._heard_at > limits.BRIDGE_LOST_S:
            self._broken(f"nothing was heard of it for {limits.BRIDGE_LOST_S:g} s")
        elif now - self._said_at > limits.BRIDGE_HEARTBEAT_S or len(self._answered) >= _SAY_AFTER:
            self._send(self._ping())

    def _ping(self) -> list[Any]:
        """A sign of life, with the answers that came out of turn: an older one is still open."""
        ack = self._acknowledged()
        body = Writer()
        with self._changed:
            answered = [number for number in self._answered if number > ack]
            self._answered.clear()
        body.u32(len(answered))
        for number in answered:
            body.u64(number)
        return protocol.encode(Kind.PING, body, ack=ack)

    # ------------------------------------------------------------------ receiving

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            try:
                header = protocol.read_header(frames[0].buffer)
                buffers = [frame.buffer for frame in frames[1:]]
                protocol.check_parts(header, buffers)
                self._take(header, Reader(buffers[0], buffers[1:]))
            except errors.ReverbError as error:
                self._lose(error)
                return

    def _take(self, header: Header, reader: Reader) -> None:
        if header.kind == Kind.WELCOME:
            self._take_welcome(reader)
        elif header.kind == Kind.BYE:
            self._lose(errors.ServerClosedError(f"the server at {self.address} was stopped"))
        elif header.kind == Kind.REFUSED:
            self._lose(protocol.decode_error(reader))
        elif header.kind in (Kind.REPLY, Kind.FAILURE):
            self._take_answer(header, reader)

    def _take_answer(self, header: Header, reader: Reader) -> None:
        with self._changed:
            pending = self._open.pop(header.sequence, None)
            if pending is None:
                return  # sent twice, around a reconnect
            self._bytes -= pending.nbytes
            self._answered.append(header.sequence)
            self._changed.notify_all()
        if header.kind == Kind.FAILURE:
            pending.settle(None, protocol.decode_error(reader))
        else:
            pending.settle(reader, None)

    def _take_welcome(self, reader: Reader) -> None:
        generation, received = reader.u64(), reader.u64()
        if self._generation not in (0, generation):
            self._lose(
                errors.ServerClosedError(
                    f"the server at {self.address} was started anew, or gave this client up after"
                    f" {limits.BRIDGE_EXPIRE_S:g} s without a sign of life. What was not confirmed"
                    " may or may not have been done; make a new Client, and new writers."
                )
            )
            return
        self._generation = generation
        self._connected = True
        self.connections += 1
        with self._changed:
            # In order: first what was on its way and did not arrive, then what was never sent.
            waiting = [self._open[key] for key in sorted(self._open) if key > received]
            self._outbox.clear()
        for pending in waiting:
            if self._connected:
                self._send_request(pending)
        if self.welcome is None:
            self.welcome = reader
            self._welcomed.set()


# ---------------------------------------------------------------------- what links share

_links: weakref.WeakSet[Link] = weakref.WeakSet()
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}
_contexts_lock = threading.Lock()


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """The process's context: one thread for all of its links."""
    with _contexts_lock:
        context = _contexts.get(os.getpid())
        if context is None:
            context = zmq.Context()
            context.set(zmq.MAX_SOCKETS, 16384)
            _contexts[os.getpid()] = context
        return context


def _after_fork_in_child() -> None:
    global _contexts_lock
    _contexts_lock = threading.Lock()
    _links.clear()


def _at_exit() -> None:
    """Takes leave, so that servers need not wait for what will not come."""
    for link in list(_links):
        link.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
