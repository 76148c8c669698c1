"""What the server does with messages: sessions, requests in turn, answers exactly once.

Nothing here waits for a client or a rate limiter, and what a client sends can cost that client its
session and nobody else anything. It knows nothing of sockets. The work itself is done by
`operations` and `channel`.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from shmreplay import errors, limits
from shmreplay.bridge import protocol
from shmreplay.bridge.channels import Channels
from shmreplay.bridge.operations import Operations
from shmreplay.bridge.protocol import Header, Kind
from shmreplay.bridge.receipts import CLIENT, ClientReceipts, Receipts
from shmreplay.bridge.room import Room
from shmreplay.bridge.scheduler import Scheduler, Task, Work
from shmreplay.bridge.sessions import Session
from shmreplay.bridge.shares import Shares
from shmreplay.bridge.wire import Reader, Writer
from shmreplay.errors import ProtocolError

__all__ = ["Dispatcher", "Sent"]

_log = logging.getLogger(__name__)


class Sent(enum.Enum):
    """What became of a message to a peer."""

    YES = enum.auto()
    LATER = enum.auto()
    """It takes no more now."""
    GONE = enum.auto()


class Dispatcher:
    """Serves one store to remote clients. Used by one thread."""

    def __init__(
        self,
        store_address: str,
        endpoint: str,
        compress: bool,
        send: Callable[[bytes, list[Any]], Sent],
        ports: Sequence[int] = (0,),
        worker: int = 0,
        who: Callable[[Any], str] = lambda source: "",
        arrivals: Callable[[Any], Callable[[], float]] = lambda source: lambda: math.inf,
    ) -> None:
        """Attaches to the store.

        Args:
            store_address: `'shm://NAME'`.
            endpoint: Where clients connect to, for messages.
            compress: Compress for clients that ask for it.
            send: Sends frames to a peer.
            ports: Of all processes that serve the store.
            worker: Which of them this is.
            who: Names the host or the key that a message is from, by what `take` is given of it.
            arrivals: Gives, for the same, what tells for how many seconds nothing came through the
                connection, not even a part of a message.
        """
        self.endpoint = endpoint
        self._who = who
        self._arrivals = arrivals
        self._compress = compress
        self._send_frames = send
        self._operations = Operations(store_address)
        self._store_name = store_address.removeprefix("shm://")
        self._scheduler = Scheduler(self._operations.may_help)
        self._sessions: dict[bytes, Session] = {}
        self._peers: dict[bytes, Session] = {}
        # Those with something that could not be sent yet: few, of however many.
        self._behind: set[Session] = set()
        self._strangers: OrderedDict[bytes, None] = OrderedDict()
        self._nbytes = 0
        self._ports = ports
        self._worker = worker
        self._new_clients = 0
        self._receipts = Receipts(self._operations.connection.native, worker, len(ports))
        self._forget_left_at = time.monotonic() + limits.BRIDGE_EXPIRE_S
        self._room = Room(self._go)
        # Those that have asked for room, and not sent what for.
        self._asked: set[Session] = set()
        self._clients = Shares(limits.BRIDGE_SESSIONS)
        writers = Shares(self._operations.connection.native.n_sessions // len(ports))
        self._channels = Channels(self._operations.connection, self._scheduler, self._done, writers)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do before the next message."""
        return self._scheduler.idle and not self._behind

    def turn(self) -> None:
        """Lets what waits try again."""
        self._scheduler.expire()
        self._scheduler.retry()
        self._send_backlogs()

    def close(self) -> None:
        """Takes leave of all clients."""
        for session in list(self._sessions.values()):
            self._send(session, protocol.encode(Kind.BYE, Writer()))
            self._drop(session)
        self._operations.close()

    def sweep(self) -> None:
        """Gives up clients that were not heard of for long."""
        now = time.monotonic()
        if now > self._forget_left_at:
            self._forget_left_at = math.inf
            self._receipts.forget_left()
        self._room.expire(now)
        for session in list(self._sessions.values()):
            if now - session.seen_at > 2 * limits.BRIDGE_HEARTBEAT_S:
                self._look_after(session, now)

    def _look_after(self, session: Session, now: float) -> None:
        """A client did not say that it lives: that may wait behind a large message that comes.

        Then it gets no answer to it either: so it is told that the server lives.
        """
        session.seen_at = max(session.seen_at, now - session.quiet_s())
        if now - session.seen_at <= limits.BRIDGE_EXPIRE_S:
            if not session.backlog:
                self._send(session, protocol.encode(Kind.PONG, Writer()))
            return
        if session.peer is not None and session.reachable:
            self._refuse(
                session.peer,
                errors.ServerClosedError(
                    f"the server gave this client up after {limits.BRIDGE_EXPIRE_S:g} s without a"
                    " sign of life; expected one each second. Make a new Client, and new writers."
                ),
            )
        else:
            _log.warning("%s: a client was not heard of for long, and given up", self.endpoint)
            self._drop(session)

    # ------------------------------------------------------------------ receiving

    def take(self, peer: bytes, frames: Sequence[Any], n: int, source: Any = None) -> None:
        """Takes a message.

        Args:
            peer: Who sent it, as `send` knows it.
            frames: Its frames as buffers; if it has too many, only the first.
            n: How many it has.
            source: What `who` says of whom it is from.
        """
        if peer in self._strangers:
            return
        try:
            self._take(peer, frames, n, source)
        except (ProtocolError, errors.VersionMismatchError, errors.StoreLimitError) as error:
            self._refuse(peer, error)
        except Exception as error:  # whatever it is, it must not cost anybody else anything
            _log.exception("%s: a message could not be dealt with", self.endpoint)
            self._refuse(peer, ProtocolError(f"the server failed: {type(error).__name__}: {error}"))

    def _take(self, peer: bytes, frames: Sequence[Any], n: int, source: Any) -> None:
        if n < 2:
            raise ProtocolError(f"a message of {n} frames")
        header = protocol.read_header(frames[0])
        if n != len(frames):
            raise ProtocolError(f"a message of {n} frames")
        protocol.check_parts(header, frames[1:])
        reader = Reader(frames[1], frames[2:])
        session = self._peers.get(peer)
        if header.kind == Kind.HELLO:
            self._hello(peer, reader, source)
            return
        if session is None:
            raise ProtocolError(f"a message of kind {header.kind.name} before HELLO")
        session.seen_at = time.monotonic()
        self._confirmed(session, header.ack)
        if header.kind in protocol.REQUESTS:
            self._request(session, header, reader)
        else:
            self._notice(session, header, reader)

    def _notice(self, session: Session, header: Header, reader: Reader) -> None:
        """What has no answer."""
        match header.kind:
            case Kind.PING:
                for _ in range(reader.count(limits.BRIDGE_REQUESTS, "answers")):
                    self._forget_answer(session, reader.u64())
                if reader.u8():
                    session.receipts.caught_up()
                self._send(session, protocol.encode(Kind.PONG, Writer()))
            case Kind.ROOM:
                nbytes = reader.u64()
                if session in self._asked or nbytes > limits.BRIDGE_MESSAGE_BYTES:
                    raise ProtocolError(f"room asked for {nbytes} bytes, or for more at once")
                self._asked.add(session)
                self._room.ask(session, nbytes)
            case Kind.RELEASE:
                self._release(session, reader.u64())
            case Kind.CANCEL:
                task = session.tasks.get(reader.u64())
                if task is not None:
                    self._scheduler.cancel(task)
            case Kind.BYE:
                self._drop(session)
            case _:
                raise ProtocolError(f"a client does not send {header.kind.name}")
        reader.finish()

    def _hello(self, peer: bytes, reader: Reader, source: Any) -> None:
        least, most = reader.u16(), reader.u16()
        identity, generation = bytes(reader.take(16)), reader.u64()
        received, compress = reader.u64(), reader.u8()
        waiting = {reader.u64() for _ in range(reader.count(limits.BRIDGE_REQUESTS, "requests"))}
        held = {reader.u64() for _ in range(reader.count(limits.BRIDGE_REQUESTS, "answers"))}
        reader.finish()
        if not least <= protocol.VERSION <= most:
            raise errors.VersionMismatchError(
                f"the client speaks versions {least} to {most} of the protocol; expected the"
                f" server's, {protocol.VERSION}. Install the same version of shmreplay on both"
                " sides."
            )
        if peer in self._peers:
            raise ProtocolError("a second HELLO")
        session = self._sessions.get(identity)
        if session is None:
            worker = self._worker_for(identity, generation)
            if worker is not None and worker != self._worker:
                body = Writer()
                body.u16(self._ports[worker])
                self._send_to(peer, protocol.encode(Kind.REDIRECT, body))
                return
            if worker is None:
                # Of another store, or given up: it is told another generation than it knows.
                self._send_to(peer, protocol.encode(Kind.WELCOME, self._welcome(1, 0, False)))
                return
            who = self._who(source)
            session = self._new_session(identity, bool(compress), received, who)
        if session.peer is not None:
            self._peers.pop(session.peer, None)
        self._forget_room(session)
        session.peer = peer
        session.reachable = True
        session.backlog.clear()
        session.seen_at = time.monotonic()
        session.quiet_s = self._arrivals(source)
        self._peers[peer] = session
        for sequence in [s for s in session.answers if s not in waiting]:
            self._forget_answer(session, sequence)
        for sequence in [s for s in session.lent if s not in held | waiting]:
            self._release(session, sequence)
        body = self._welcome(session.generation, session.received, True)
        self._send(session, protocol.encode(Kind.WELCOME, body))
        for sequence in sorted(session.answers):
            self._send(session, session.answers[sequence])

    def _go(self, session: Session) -> None:
        """There is room for what a client has."""
        self._send(session, protocol.encode(Kind.GO, Writer()))

    def _forget_room(self, session: Session) -> None:
        """What a client had asked for room for has come, or it has another connection, or none."""
        if session in self._asked:
            self._asked.discard(session)
            self._room.forget(session)

    def _worker_for(self, identity: bytes, generation: int) -> int | None:
        """Which process serves a client that this one does not know yet; None: none does."""
        if generation == 0:
            if self._worker != 0:
                return self._worker
            self._new_clients += 1
            return self._new_clients % len(self._ports)
        lanes = self._receipts.left.get(identity)
        if lanes is not None and CLIENT in lanes:
            return self._worker
        return self._receipts.worker_of(identity)

    def _new_session(self, identity: bytes, compress: bool, received: int, who: str) -> Session:
        left = self._receipts.left.get(identity)
        if left is None and not self._clients.may_take(who):
            raise errors.StoreLimitError(
                f"Got a client too many: {self._clients.describe(who)} of the"
                f" {limits.BRIDGE_SESSIONS} that a process of the bridge serves; expected fewer of"
                " one host, or key. Share a client between threads, or close some."
            )
        self._receipts.left.pop(identity, None)
        try:
            receipts = ClientReceipts(self._receipts, identity, left)
        except errors.ReverbError as error:
            raise ProtocolError(f"no room for another client: {error}") from None
        session = Session(identity, compress and self._compress, receipts, received, who)
        self._sessions[identity] = session
        self._clients.take(who)
        return session

    def _welcome(self, generation: int, received: int, known: bool) -> Writer:
        body = Writer()
        body.u64(generation)
        body.u64(received)
        body.u8(1 if known else 0)
        body.text(self._store_name)
        configs = self._operations.connection.configs
        body.u16(len(configs))
        for config in configs:
            body.text(config.to_json())
        return body

    # ------------------------------------------------------------------ requests

    def _request(self, session: Session, header: Header, reader: Reader) -> None:
        sequence = header.sequence
        if header.total > limits.BRIDGE_ASK_BYTES:
            self._forget_room(session)
        if sequence <= session.received:
            return  # it came before, and is answered once it is done
        if sequence != session.received + 1:
            raise ProtocolError(f"request {sequence} after {session.received}")
        if len(session.tasks) + len(session.answers) >= limits.BRIDGE_REQUESTS:
            raise ProtocolError(f"more than {limits.BRIDGE_REQUESTS} requests at once")
        sent = session.nbytes - session.unpacked + header.total
        if sent > limits.BRIDGE_SESSION_BYTES + header.total // 2:
            raise ProtocolError(f"more than {limits.BRIDGE_SESSION_BYTES} bytes at once")
        session.received = sequence
        task = Task(lambda t, result, error: self._done(session, t, result, error), sequence)
        session.tasks[sequence] = task
        self._account(session, sequence, header.total)
        full = self._why_full(session, header)
        if full is not None:
            task.work = None
            self._done(session, task, None, full)
            return
        work = self._work(session, header.kind, reader, task)
        if work is not None:
            self._scheduler.start(task, work)
            if reader.unpacked and not task.done:
                self._account(session, sequence, header.total, reader.unpacked)

    def _why_full(self, session: Session, header: Header) -> errors.ArenaFullError | None:
        """Why there is no memory for a request that carries data; None: there is, or it has none.

        How much a compressed batch becomes is known once it is read: the next one is refused.
        """
        batch = header.kind == Kind.INSERT_BATCH
        if batch and session.unpacked > limits.BRIDGE_SESSION_BYTES:
            return errors.ArenaFullError(
                f"batches of this client that wait have {session.unpacked} bytes, decompressed;"
                f" expected at most {limits.BRIDGE_SESSION_BYTES}. Nothing was done: insert again"
                " once some of them are in."
            )
        if self._nbytes > limits.BRIDGE_TOTAL_BYTES and (
            batch or header.total > limits.BRIDGE_RUN_BYTES
        ):
            return errors.ArenaFullError(
                f"the bridge has {self._nbytes} bytes of requests and answers on their way, at most"
                f" {limits.BRIDGE_TOTAL_BYTES}; nothing was done. Try again later."
            )
        return None

    def _work(self, session: Session, kind: Kind, reader: Reader, task: Task) -> Work | None:
        """What a request does; None for messages of writers, which go in line."""
        if kind in self._operations.kinds:
            return self._operations.kinds[kind](session, reader, task)
        if kind == Kind.WRITER_OPEN:
            return self._channels.open(session, reader, task)
        channel = session.channels.get(number := reader.u32())
        if kind == Kind.WRITER_CLOSE:
            return self._channels.close(session, number, channel, task)
        if channel is None:
            raise ProtocolError(f"writer {number}, which is not open")
        if kind == Kind.FLUSH:
            return self._channels.flush(channel, reader, task)
        self._channels.write(session, channel, reader, task)
        return None

    # ------------------------------------------------------------------ answers

    def _done(
        self, session: Session, task: Task, result: Writer | None, error: Exception | None
    ) -> None:
        """A request is done: answer it, and keep the answer until the client confirms it."""
        session.tasks.pop(task.sequence, None)
        if session.identity not in self._sessions:
            return
        kind = Kind.REPLY
        if error is not None:
            if isinstance(error, ProtocolError) and session.peer is not None:
                self._refuse(session.peer, error)
                return
            kind, result = Kind.FAILURE, Writer()
            if not isinstance(error, errors.ReverbError):
                _log.error("%s: a request failed", self.endpoint, exc_info=error)
                error = errors.ReverbError(
                    f"the server failed: {type(error).__name__}: {error}; its log must say more."
                    " Look there."
                )
            protocol.encode_error(result, error)
        assert result is not None
        frames = protocol.encode(kind, result, task.sequence)
        self._account(session, task.sequence, len(result.meta) + result.nbytes)
        session.answers[task.sequence] = frames
        self._send(session, frames)

    def _account(self, session: Session, sequence: int, nbytes: int, unpacked: int = 0) -> None:
        """So many bytes are kept for a request now, and so many that it was decompressed to."""
        had, had_unpacked = session.sizes.pop(sequence, (0, 0))
        if nbytes:
            session.sizes[sequence] = (nbytes, unpacked)
        change = nbytes + unpacked - had - had_unpacked
        session.unpacked += unpacked - had_unpacked
        session.nbytes += change
        self._nbytes += change

    def _confirmed(self, session: Session, ack: int) -> None:
        """The client has all answers up to this one."""
        if (session.answers and next(iter(session.answers)) <= ack) or len(session.answers) > 8:
            for sequence in [s for s in session.answers if s <= ack]:
                self._forget_answer(session, sequence)

    def _forget_answer(self, session: Session, sequence: int) -> None:
        if session.answers.pop(sequence, None) is not None:
            self._account(session, sequence, 0)
            session.receipts.confirmed(sequence)

    def _release(self, session: Session, sequence: int) -> None:
        lent = session.lent.pop(sequence, None)
        if lent is not None:
            self._operations.delivered(lent[1])

    # ------------------------------------------------------------------ sending

    def _send(self, session: Session, frames: list[Any]) -> None:
        """Sends to a client; what it does not take now waits, and is bounded by what it asked."""
        if session.peer is None or not session.reachable:
            return
        if session.backlog or not self._send_to(session.peer, frames):
            session.backlog.append(frames)
            self._behind.add(session)

    def _send_to(self, peer: bytes, frames: list[Any]) -> bool:
        """False where the peer takes no more now. To one that is gone nothing is sent."""
        sent = self._send_frames(peer, frames)
        if sent == Sent.GONE:
            session = self._peers.get(peer)
            if session is not None:  # what it said before it went may still come
                session.reachable = False
                session.backlog.clear()
        return sent != Sent.LATER

    def _send_backlogs(self) -> None:
        for session in list(self._behind):
            while session.backlog and session.peer is not None:
                frames = session.backlog.popleft()
                if not self._send_to(session.peer, frames):
                    session.backlog.appendleft(frames)
                    break
            else:
                self._behind.discard(session)

    # ------------------------------------------------------------------ ends

    def _refuse(self, peer: bytes, error: errors.ReverbError) -> None:
        """A peer broke the protocol: it is told, its session ends, and it is not heard again."""
        _log.warning("%s: a peer was dropped: %s", self.endpoint, error)
        body = Writer()
        protocol.encode_error(body, error)
        self._send_to(peer, protocol.encode(Kind.REFUSED, body))
        self._strangers[peer] = None
        while len(self._strangers) > limits.BRIDGE_STRANGERS:
            self._strangers.popitem(last=False)
        session = self._peers.pop(peer, None)
        if session is not None:
            self._drop(session)

    def _drop(self, session: Session) -> None:
        """Ends a session: what it waits for is given up, what it did not deliver goes back."""
        if self._sessions.pop(session.identity, None) is not None:
            self._clients.give(session.who)
        self._behind.discard(session)
        self._forget_room(session)
        if session.peer is not None:
            self._peers.pop(session.peer, None)
        for task in list(session.tasks.values()):
            self._scheduler.drop(task)
        for sequence in list(session.sizes):
            self._account(session, sequence, 0)
        for number, batch in reversed(session.lent.values()):
            self._operations.put_back(number, batch)
        for channel in session.channels.values():
            if channel.drain_task is not None:
                self._scheduler.drop(channel.drain_task)
            try:
                lost = channel.close()
            except errors.ReverbError as error:
                _log.warning("%s: closing a remote writer: %s", self.endpoint, error)
                continue
            if lost:
                _log.warning(
                    "%s: a client went with %d items that the rate limiter held back: they are"
                    " dropped",
                    self.endpoint,
                    lost,
                )
        for channel in session.channels.values():
            self._channels.forget(session)
            session.receipts.close_some((channel.receipt, *channel.refusals.left()))
        session.receipts.close()
        session.tasks.clear()
        session.answers.clear()
        session.lent.clear()
        session.channels.clear()
