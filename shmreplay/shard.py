"""One of the servers of a `ShardedClient`: whether it is up, and what its tables weigh."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from shmreplay import _native, errors, limits
from shmreplay.address import RemoteOptions
from shmreplay.client import Client
from shmreplay.connection import Connection
from shmreplay.drawing import Drawing
from shmreplay.replay_sample import ReplaySample
from shmreplay.reverb_types import TableInfo

__all__ = ["GONE", "Pinned", "Shard", "ShardStatus"]

_log = logging.getLogger(__name__)

GONE: Final = (
    errors.ServerClosedError,
    errors.StoreNotFoundError,
    errors.StorePermissionError,
    errors.AuthenticationError,
    errors.VersionMismatchError,
    errors.ProtocolError,
)
"""What says that a server cannot be used at all, now."""

_Result = TypeVar("_Result")


class ShardStatus(NamedTuple):
    """How a shard is."""

    number: int
    """Its place in the list of addresses: the `shard` of its keys."""

    address: str
    """Where it is."""

    up: bool
    """Whether it is used."""

    problem: str
    """Why it is left out; empty while it is up."""

    since: float
    """When that began: seconds since the epoch."""


class Pinned(NamedTuple):
    """Items of a shard on this machine, drawn and not yet delivered."""

    connection: Connection
    drawing: Drawing
    number: int
    """Of the table."""

    batch: _native.Batch


class Shard:
    """One server. Thread-safe.

    A shard that fails is down, and left alone but for a thread that tries it now and then.
    """

    def __init__(self, number: int, address: str, remote: RemoteOptions) -> None:
        """Does not connect."""
        self.number = number
        self.client = Client(address, remote)
        self.tables: dict[str, TableInfo] = {}
        """As they were at the last look."""
        self.looked_at = -math.inf
        """When that was, by the monotonic clock."""
        self.watched = False
        """Whether its thread looks now and then."""
        self.closed = False
        self._patience = remote.timeout
        self._problem = ""
        self._since = time.time()
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Number and address, for messages."""
        return f"shard {self.number} ({self.client.server_address})"

    @property
    def status(self) -> ShardStatus:
        """How it is."""
        up = self.up  # which may find that it is not
        return ShardStatus(self.number, self.client.server_address, up, self._problem, self._since)

    @property
    def up(self) -> bool:
        """Whether it is used. Costs no request."""
        if self._problem:
            return False
        connection = self.client._connection
        if connection is None or connection.reachable:
            return True
        self.fail(errors.ServerClosedError("it was stopped, or the connection to it is lost"))
        return False

    @property
    def near(self) -> bool:
        """Whether its store is on this machine, and this process attached to it."""
        return type(self.client._connection) is Connection

    def changes_at_once(self, table: str) -> bool:
        """Whether a change by key never waits: it is near, and the table has no extensions."""
        connection = self.client._connection
        number = connection.tables.get(table) if type(connection) is Connection else None
        if connection is None or number is None:
            return False
        try:
            return not connection.native.has_events(number)
        except GONE:
            return False  # which the change itself will notice

    def fail(self, error: BaseException) -> None:
        """Notes that it cannot be used; says so in the log, once until it is back."""
        with self._lock:
            was_up, self._problem = not self._problem, str(error) or type(error).__name__
            if was_up:
                self._since = time.time()
        if was_up and not self.closed:
            _log.warning("%s is left out until it is back: %s", self.name, error)
            self._start()

    def look(self, within: float | None = None) -> bool:
        """Asks what its tables weigh; gives whether it is up.

        Another look may be on its way already: then this one does not wait for it.

        Args:
            within: Seconds for connecting, if it is not connected; None: as long as a shard may be
                out of reach.
        """
        if not self._looking.acquire(blocking=False):
            return not self._problem
        try:
            tables = self.client.server_info(self._patience if within is None else within)
        except (*GONE, errors.DeadlineExceededError) as error:
            self.fail(error)
            return False
        finally:
            self._looking.release()
        with self._lock:
            self.tables, self.looked_at = tables, time.monotonic()
            was, self._problem = self._problem, ""
            if was:
                self._since = time.time()
        if was:
            _log.warning("%s is back", self.name)
        return True

    def attempt(self, call: Callable[[Client], _Result]) -> _Result | None:
        """Calls something of its client; None where the shard turns out to be gone."""
        try:
            return call(self.client)
        except GONE as error:
            if self.closed:
                raise
            self.fail(error)
        except errors.DeadlineExceededError as error:
            connection = self.client._connection
            if connection is None or connection.reachable:
                raise
            self.fail(error)
        return None

    def draw(self, table: str, n: int, wait: float) -> ReplaySample | None:
        """A batch of at most n items, of those that are to be had within `wait` seconds."""
        try:
            return self.attempt(lambda client: client.sample_batch(table, n, wait))
        except errors.DeadlineExceededError:
            return None

    def draw_now(self, table: str, n: int) -> Pinned | None:
        """At most n items of a shard that is near, of those that are to be had without waiting.

        None: there are none, or it is not near any more.
        """
        try:
            return self.attempt(functools.partial(_pin, table=table, n=n))
        except errors.DeadlineExceededError:
            return None

    def watch(self) -> None:
        """From now on looks at the tables now and then, as somebody samples them."""
        if not self.watched:
            self.watched = True
            self._start()

    def close(self) -> None:
        """Closes its client and ends its thread."""
        self.closed = True
        self._wake.set()
        self.client.close()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self.closed:
                self._thread = threading.Thread(
                    target=_watch,
                    args=(weakref.ref(self), self._wake),
                    name=f"shmreplay-shard-{self.number}",
                    daemon=True,
                )
                self._thread.start()

    def _tick(self) -> float:
        """What its thread does; gives the seconds until the next time."""
        if self._problem:
            return limits.SHARD_LOOK_S if self.look(limits.SHARD_RETRY_S) else limits.SHARD_RETRY_S
        if self.watched:
            self.look()
        return limits.SHARD_LOOK_S


def _pin(client: Client, table: str, n: int) -> Pinned | None:
    connection = client._connected()
    if type(connection) is not Connection:
        return None
    number = connection.number(table)
    drawing = client._drawing_over(connection)
    return Pinned(connection, drawing, number, drawing.draw(number, n, 0.0))


def _watch(ref: weakref.ref[Shard], wake: threading.Event) -> None:
    """Runs as long as somebody refers to the shard, and it is not closed."""
    pause = 0.0
    while not wake.wait(pause):
        shard = ref()
        if shard is None or shard.closed:
            return
        try:
            pause = shard._tick()
        except errors.ReverbError as error:  # it answers, but cannot be used
            shard.fail(error)
            pause = limits.SHARD_RETRY_S
        del shard
