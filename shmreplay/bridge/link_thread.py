"""The thread at the client's end of the line: it sends requests, and again after a reconnect.

Every request has a number. The server answers each exactly once, and keeps the answer until the
client has said that it has it; after a reconnect both say how far they got, and what the other did
not get is sent again. Where a server process took the place of one that died, all that is open is
sent again, after what the writers' logs have; the store knows which of the inserts were done.
"""

from __future__ import annotations

import enum
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from shmreplay import errors, limits
from shmreplay.bridge import auth, protocol
from shmreplay.bridge.line import WELCOME_S, Line
from shmreplay.bridge.pending import Pending, WriterLog, in_order, read_written
from shmreplay.bridge.protocol import Header, Kind
from shmreplay.bridge.wire import Reader, Writer

__all__ = ["LinkThread", "body_of", "is_much"]

_log = logging.getLogger(__name__)

# Pauses between attempts to connect.
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
# Answers after which the server is told that it need not keep them.
_SAY_AFTER = 64
# Attempts at another port than the one that was asked for, before that one is asked again.
_ATTEMPTS_ELSEWHERE = 4
_ANSWERS = frozenset((Kind.REPLY, Kind.FAILURE))
# Requests that are with the server; it keeps some more whose answers are not confirmed.
_MOST_SENT = limits.BRIDGE_REQUESTS - 2 * _SAY_AFTER


class _Room(enum.Enum):
    """Whether the server has room for a large message."""

    NONE = enum.auto()
    """It was not asked."""
    ASKED = enum.auto()
    GIVEN = enum.auto()


class LinkThread:
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
        self.look: Callable[[], None] = lambda: None
        """Called now and then by who waits for an answer; may raise."""
        self.held: set[int] = set()
        """Answers whose items the caller has not delivered yet: the server keeps them pinned."""
        self._session = secrets.token_bytes(16)
        self._generation = 0
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # Who waits for room, on it.
        self._changed = threading.Condition(self._lock)
        self._seekers = 0
        self._welcomed = threading.Event()
        # Requests that were not sent, in order, and messages without an answer.
        self._outbox: deque[Pending | list[Any]] = deque()
        # What writers want done once this thread runs: by then there may be more to send at once.
        self._soon: deque[Callable[[], None]] = deque()
        self._open: dict[int, Pending] = {}
        self._waiting = 0
        self._bytes = 0
        self._bytes_open = 0
        self._answered: list[int] = []
        # Of the outbox, how many requests from the front on the server may have known before.
        self._behind = 0
        self._sequence = 0
        self._tokens = 0
        self._logs: dict[int, WriterLog] = {}
        self._messages = 0
        self._closing = False
        self._line = Line(keys)
        self._keys = keys
        self._goes_to = address
        self._attempts = 0
        self._connected = False
        self._room = _Room.NONE
        self._down_since = time.monotonic()
        self._heard_at = 0.0
        self._said_at = 0.0
        self._try_at = 0.0
        self._pause = _FIRST_PAUSE_S
        self._why = "no connection was made"
        self._thread = threading.Thread(target=self._run, name="shmreplay-link", daemon=True)

    def _closed(self) -> str:
        return f"the client of {self.address} is closed; expected an open one. Make a new Client."

    def _lost_error(self) -> errors.ReverbError:
        lost = self.lost
        if lost is None:
            return errors.ServerClosedError(self._closed())
        return type(lost)(str(lost))  # each caller raises its own

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except errors.ReverbError as error:
            self._lose(error)
        except BaseException as error:  # told to whoever calls
            _log.exception("the connection to %s has failed", self.address)
            self._lose(
                errors.ServerClosedError(
                    f"Got an error of the connection to {self.address}; expected none: {error}."
                    " Make a new Client."
                )
            )
        finally:
            if self._connected:
                self._send(protocol.encode(Kind.BYE, Writer()))
            self._connected = False
            self._line.close(linger_ms=200)
            if self.lost is None:
                self._lose(errors.ServerClosedError(self._closed()))
            self._line.end()

    def _turn(self) -> bool:
        """Waits for something to do, and does it. False at the end."""
        now = time.monotonic()
        if self._closing and not (self._outbox or self._soon):
            return False
        if not self._line.is_open and now >= self._try_at:
            self._connect()
        if self._connected:
            # Not before there is a sign of life to give: a process may have many links.
            due = max(self._said_at + limits.BRIDGE_HEARTBEAT_S - now, 0.0)
        else:
            due = limits.BRIDGE_HEARTBEAT_S / 2 if self._line.is_open else self._try_at - now
        came, end = self._line.wait(due)
        if came:
            self._receive()
        if end is not None and self._line.is_open:
            self._ended(end)
        self._do_soon()
        if self._connected:
            self._send_outbox()
            self._keep_alive()
        else:
            self._check_time()
        return self.lost is None and not (self._closing and not self._connected)

    def _do_soon(self) -> None:
        while self._soon:
            self._soon.popleft()()

    def _connect(self) -> None:
        self._attempts += 1
        if self._attempts > _ATTEMPTS_ELSEWHERE:
            self._goes_to = self.address
        self._try_at = time.monotonic() + WELCOME_S
        self._line.open(self._goes_to)
        self._send(self._hello())

    def _hello(self) -> list[Any]:
        body = Writer()
        body.u16(protocol.VERSION)
        body.u16(protocol.VERSION)
        body.meta += self._session
        body.u64(self._generation)
        body.u64(self._sequence)
        body.u8(1 if self.compress else 0)
        with self._lock:
            for numbers in (sorted(self._open), sorted(self.held)):
                body.u32(len(numbers))
                for number in numbers:
                    body.u64(number)
            self._answered.clear()
        return protocol.encode(Kind.HELLO, body, ack=self._acknowledged())

    def _acknowledged(self) -> int:
        """All answers up to this one have come."""
        with self._lock:
            return min(self._open, default=self._sequence + 1) - 1

    def _ended(self, how: str) -> None:
        if how == "keys":
            self._lose(
                errors.AuthenticationError(
                    f"the server at {self.address} does not know this client's key; expected one of"
                    " those that it allows. Add the"
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
            _log.info("%s: %s; connecting anew", self._goes_to, why)
        self._why = why
        self._connected = False
        self._line.close()
        self._try_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

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
        elif self._line.is_open and now >= self._try_at:
            self._broken("there is no such host, or it does not answer")

    def _lose(self, error: errors.ReverbError) -> None:
        """The end: everybody who waits is told."""
        with self._lock:
            self.lost = error
            waiting = list(self._open.values())
            waiting += [entry for entry in self._outbox if isinstance(entry, Pending)]
            self._open.clear()
            self._outbox.clear()
            self._logs.clear()
            self._bytes = self._bytes_open = self._waiting = 0
            self._changed.notify_all()
        for pending in waiting:
            pending.settle(None, self._lost_error())
        self._do_soon()  # it finds that out
        self._welcomed.set()

    # ------------------------------------------------------------------ sending

    def _send(self, frames: list[Any], lent: list[Any] | None = None) -> None:
        if self._line.send(frames, lent):
            self._said_at = time.monotonic()
        else:
            self._broken("it does not take what is sent")

    def _send_request(self, pending: Pending) -> None:
        head = protocol.HEADER.pack(
            protocol.MAGIC,
            protocol.VERSION,
            pending.kind,
            0,
            len(pending.frames) - 1,
            pending.sequence,
            self._acknowledged(),
            pending.nbytes,
        )
        # Those of writers are nobody's arrays.
        self._send([head, *pending.frames], pending.lent if pending.log is None else None)
        if pending.cancelled and self._connected:
            self._send(protocol.encode(Kind.CANCEL, body_of(pending.sequence)))

    def _send_outbox(self) -> None:
        while self._connected:
            with self._lock:
                if not self._outbox:
                    return
                entry = self._outbox[0]
                if isinstance(entry, Pending) and entry.sequence == 0:
                    # Of what is said again there may be more than may be on its way at once.
                    much = is_much(self._bytes_open, entry.nbytes)
                    if self._open and (much or len(self._open) >= _MOST_SENT):
                        return
                if isinstance(entry, Pending) and entry.nbytes > limits.BRIDGE_ASK_BYTES:
                    if not self._may_send_much(entry.nbytes):
                        return
                if isinstance(entry, Pending) and entry.sequence == 0:
                    self._number_it(entry)
                self._outbox.popleft()
            if isinstance(entry, list):
                self._send(entry)
            else:
                self._send_request(entry)

    def _may_send_much(self, nbytes: int) -> bool:
        """Whether the server has room for a message of so many bytes; asks it where it must."""
        if self._room == _Room.GIVEN:
            self._room = _Room.NONE
            return True
        if self._room == _Room.NONE:
            self._room = _Room.ASKED
            self._send(protocol.encode(Kind.ROOM, body_of(nbytes)))
        return False

    def _number_it(self, pending: Pending) -> None:
        self._behind = max(self._behind - 1, 0)
        self._sequence += 1
        pending.sequence = self._sequence
        self._open[pending.sequence] = pending
        self._bytes_open += pending.nbytes

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._heard_at > limits.BRIDGE_LOST_S:
            # A large answer may take longer to come.
            self._heard_at = max(self._heard_at, now - self._line.quiet_s())
        if now - self._heard_at > limits.BRIDGE_LOST_S:
            self._broken(f"nothing was heard of it for {limits.BRIDGE_LOST_S:g} s")
        elif now - self._said_at > limits.BRIDGE_HEARTBEAT_S or len(self._answered) >= _SAY_AFTER:
            self._send(self._ping())

    def _ping(self) -> list[Any]:
        """A sign of life, with the answers that came out of turn: an older one is still open."""
        ack = self._acknowledged()
        body = Writer()
        with self._lock:
            answered = [number for number in self._answered if number > ack]
            self._answered.clear()
            caught_up = self._behind == 0
        body.u32(len(answered))
        for number in answered:
            body.u64(number)
        body.u8(1 if caught_up else 0)
        return protocol.encode(Kind.PING, body, ack=ack)

    # ------------------------------------------------------------------ receiving

    def _receive(self) -> None:
        while self._line.is_open:
            frames = self._line.receive()
            if frames is None:
                return
            self._heard_at = time.monotonic()
            try:
                header = protocol.read_header(frames[0])
                protocol.check_parts(header, frames[1:])
                self._take(header, Reader(frames[1], frames[2:]))
            except errors.ReverbError as error:
                self._lose(error)
                return

    def _take(self, header: Header, reader: Reader) -> None:
        if header.kind in _ANSWERS:
            self._take_answer(header, reader)
        elif header.kind == Kind.GO:
            self._room = _Room.GIVEN if self._room == _Room.ASKED else self._room
        elif header.kind == Kind.WELCOME:
            self._take_welcome(reader)
        elif header.kind == Kind.REDIRECT:
            self._take_redirect(reader)
        elif header.kind == Kind.BYE:
            self._lose(
                errors.ServerClosedError(
                    f"the server at {self.address} was stopped; expected it to run. Once it"
                    " does again, make a new Client."
                )
            )
        elif header.kind == Kind.REFUSED:
            self._lose(protocol.decode_error(reader))

    def _take_answer(self, header: Header, reader: Reader) -> None:
        with self._lock:
            pending = self._open.get(header.sequence)
            if pending is None:
                return  # sent twice, around a reconnect
            # One that cannot be read ends the link, and who waits for it is told as all are.
            error = protocol.decode_error(reader) if header.kind == Kind.FAILURE else None
            if error is None and pending.log is not None and pending.entry is not None:
                item, pending.states, pending.failures = read_written(reader, pending.entry.items)
                pending.log.answered(pending.entry, item)
            del self._open[header.sequence]
            self._waiting -= 1
            self._bytes -= pending.nbytes
            self._bytes_open -= pending.nbytes
            self._answered.append(header.sequence)
            if self._seekers:
                self._changed.notify_all()
        pending.settle(reader if error is None else None, error)

    def _take_redirect(self, reader: Reader) -> None:
        """Another port of the same host serves this client."""
        host, _, _ = self.address.rpartition(":")
        self._goes_to = f"{host}:{reader.u16()}"
        self._attempts = 0
        self._line.close()
        self._try_at = 0.0

    def _take_welcome(self, reader: Reader) -> None:
        generation, received, resumed = reader.u64(), reader.u64(), reader.u8()
        anew = self._generation not in (0, generation)
        if anew and not resumed:
            self._lose(
                errors.ServerClosedError(
                    f"the server at {self.address} was started anew, or gave this client up after"
                    f" {limits.BRIDGE_EXPIRE_S:g} s without a sign of life; expected the one that"
                    " this client knew. What was not confirmed"
                    " may or may not have been done; make a new Client, and new writers."
                )
            )
            return
        self._generation = generation
        self._connected = True
        self._room = _Room.NONE
        self._attempts = 0
        self.connections += 1
        with self._lock:
            # In order: first what was on its way, then what was never sent. What has no answer may
            # get lost.
            unsent = [
                entry
                for entry in self._outbox
                if isinstance(entry, Pending) and entry.sequence == 0
            ]
            self._outbox.clear()
            if anew:
                self._outbox.extend(self._say_again(received, unsent))
            else:
                for sequence in sorted(self._open):
                    pending = self._open[sequence]
                    if sequence > received:
                        self._outbox.append(pending)
                    elif pending.cancelled:
                        self._outbox.append(protocol.encode(Kind.CANCEL, body_of(sequence)))
                self._outbox.extend(unsent)
        if self.welcome is None:
            self.welcome = reader
            self._welcomed.set()

    def _say_again(self, received: int, unsent: list[Pending]) -> list[Pending]:
        """What is to be sent to a process that knows of this client what the store knows."""
        waiting = [self._open[sequence] for sequence in sorted(self._open)] + unsent
        self._open.clear()
        self.held.clear()
        self._sequence = received
        again = in_order(list(self._logs.values()))
        said = set(map(id, again))
        again += [p for p in waiting if id(p) not in said and not p.again]
        for pending in again:
            pending.sequence = 0
        self._behind = self._waiting = len(again)
        self._bytes_open = 0
        self._bytes = sum(pending.nbytes for pending in again)
        _log.warning(
            "%s: another process serves the store now; %d messages are sent again",
            self._goes_to,
            len(again),
        )
        return again


def is_much(nbytes: int, more: int) -> bool:
    """What carries nothing goes nevertheless: what is on its way may wait for it."""
    return more > limits.BRIDGE_RUN_BYTES and nbytes + more > limits.BRIDGE_CLIENT_BYTES


def body_of(value: int) -> Writer:
    """A message of one number."""
    body = Writer()
    body.u64(value)
    return body
