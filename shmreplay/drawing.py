"""Drawing items over one connection, and what was drawn and could not be delivered."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from shmreplay import _native, errors, limits
from shmreplay.batches import gather, item_views
from shmreplay.connection import Connection, WaitLog
from shmreplay.replay_sample import ReplaySample, SampleInfo
from shmreplay.sampler import Prefetched

__all__ = ["Borrowed", "Drawing"]


class Drawing:
    """Draws over one connection. Thread-safe.

    Where sampling consumes, a call that fails after it drew leaves the items here, for the next.
    """

    def __init__(self, connection: Connection) -> None:
        """Nothing was drawn yet."""
        self.connection = connection
        self._stash: dict[int, deque[_native.Batch]] = {}
        self._lock = threading.RLock()

    def draw(
        self,
        number: int,
        n: int,
        timeout: float | None,
        partial: _native.Batch | None = None,
    ) -> _native.Batch:
        """Draws and pins n items, of which `partial` has the first.

        The batch owns a session, which goes back by `finish`.
        """
        if partial is None:
            partial = self.from_stash(number, n)
        session = self.connection.take_session() if partial is None else partial.owner
        describe = self.connection.describe_wait(number, "sampling")
        try:
            return session.sample(number, n, timeout, describe, partial)
        except BaseException:
            begun, session.interrupted = session.interrupted, None
            if begun is not None and len(begun) > 0:
                self.keep(number, begun)
            else:
                self.connection.give_session(session)
            raise

    def from_stash(self, number: int, n: int) -> _native.Batch | None:
        """At most n items that an earlier call drew and could not deliver, in their order."""
        if not self._stash:
            return None
        with self._lock:
            waiting = self._stash.get(number)
            if not waiting:
                return None
            if len(waiting[0]) > n:
                return self._part_of(waiting[0], n)
            batch = waiting.popleft()
            while waiting and len(batch) < n:
                more = waiting[0]
                if len(batch) + len(more) > n:
                    more = self._part_of(more, n - len(batch))
                else:
                    waiting.popleft()
                batch.absorb(more)
                self.connection.give_session(more.owner)
            return batch

    def _part_of(self, batch: _native.Batch, n: int) -> _native.Batch:
        """The first n items of a batch that has more, with a session of their own."""
        session = self.connection.take_session()
        try:
            return batch.split(n, session)
        except BaseException:
            self.connection.give_session(session)
            raise

    def keep(self, number: int, batch: _native.Batch) -> None:
        """A call failed after drawing: where sampling consumes, nothing may be lost."""
        if self.connection.consumes(number, batch):
            with self._lock:
                self._stash.setdefault(number, deque()).appendleft(batch)
        else:
            self.finish(batch)

    def finish(self, batch: _native.Batch) -> None:
        """The items were delivered: their pins go, and the session comes back."""
        batch.release()
        self.connection.give_session(batch.owner)

    def delivered(self, number: int, batch: _native.Batch, out: Any) -> ReplaySample:
        """The batch as arrays; its pins and its session are given back."""
        try:
            result = gather(self.connection, batch, out)
        except BaseException:
            self.keep(number, batch)
            raise
        self.finish(batch)
        return result

    def draw_ahead(
        self,
        number: int,
        n: int,
        timeout: float | None,
        ended: Callable[[], bool],
    ) -> Prefetched | None:
        """As `Client.sample_batch`, but ends soon after `ended` says so.

        With what was drawn until then; None: nothing was.
        """
        self.connection.check_open()
        log = WaitLog(self.connection.describe_wait(number, "a sampler"))
        end = math.inf if timeout is None else time.monotonic() + timeout
        batch: _native.Batch | None = None
        while True:
            left = max(min(end - time.monotonic(), limits.WAIT_SLICE_MS / 1000), 0.0)
            try:
                batch = self.draw(number, n, left, batch)
            except errors.DeadlineExceededError:
                if ended():
                    return None
                if time.monotonic() >= end:
                    describe = self.connection.describe_wait(number, "sampling")
                    raise errors.DeadlineExceededError(
                        f"no sample within {timeout} s: {describe()}"
                    ) from None
                log.tick()
                continue
            if len(batch) == n or ended() or time.monotonic() >= end:
                return self.prefetched(number, batch)
            log.tick()

    def prefetched(self, number: int, batch: _native.Batch) -> Prefetched:
        """A gathered batch. Where sampling consumes, it stays pinned until it is delivered."""
        if not self.connection.consumes(number, batch):
            return Prefetched(self.delivered(number, batch, None), _nothing, _nothing)
        try:
            sample = gather(self.connection, batch, None)
        except BaseException:
            self.keep(number, batch)
            raise
        return Prefetched(
            sample,
            lambda: self.finish(batch),
            lambda: self.keep(number, batch),
        )

    def forget(self, number: int) -> None:
        """The table was emptied: nobody gets what was drawn before."""
        with self._lock:
            undelivered = self._stash.pop(number, ())
        for batch in undelivered:
            self.finish(batch)

    def drop(self) -> None:
        """The client is closed: nobody is left to get what was drawn."""
        with self._lock:
            self._stash = {}


class Borrowed:
    """Context manager of `Client.borrow`."""

    def __init__(self, connection: Connection, draw: Callable[[], _native.Batch]) -> None:
        """See `Client.borrow`."""
        self._connection = connection
        self._draw = draw
        self._batch: _native.Batch | None = None

    def __enter__(self) -> list[ReplaySample]:
        """Draws and pins the items."""
        batch = self._draw()
        # From here on the pins go, and the session comes back, when the last view is gone.
        batch.lend(self._connection.idle)
        self._batch = batch
        return [
            ReplaySample(SampleInfo(*batch.info_of(i)), item_views(self._connection, batch, i))
            for i in range(len(batch))
        ]

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Lets go: the pins end with the last view."""
        self._batch = None


def _nothing() -> None:
    """Delivering or dropping a copy of items that are still in their table asks for nothing."""
