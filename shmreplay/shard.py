"""One of the servers of a `ShardedClient`: whether it is up, and what its tables weigh."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from shmreplay import errors, limits
from shmreplay.address import RemoteOptions
from shmreplay.client import Client
from shmreplay.replay_sample import ReplaySample
from shmreplay.reverb_types import TableInfo

__all__ = ["GONE", "Shard", "ShardStatus"]

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
