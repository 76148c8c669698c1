"""A sampler over the bridge: its requests are on their way before the batches are asked for."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from shmreplay import errors
from shmreplay.bridge.pending import Pending
from shmreplay.sampler import Prefetched, Sampler

if TYPE_CHECKING:
    from shmreplay.bridge.client import RemoteConnection, RemoteSession
    from shmreplay.client import Client

__all__ = ["RemoteSampler"]


class RemoteSampler(Sampler):
    """As `Sampler`. No thread of its own: `prefetch` requests are with the server at any time."""

    def __init__(
        self, client: Client, table: str, n: int, prefetch: int, timeout: float | None
    ) -> None:
        """See `Client.sampler`."""
        super().__init__(self._draw_one, prefetch, threaded=False)
        self._client = client
        self._table = table
        self._n = n
        self._prefetch = prefetch
        self._timeout = timeout
        self._lock = threading.RLock()
        self._connection: RemoteConnection | None = None
        self._session: RemoteSession | None = None
        self._asked: deque[Pending] = deque()

    def _draw_one(self, stopped: object) -> Prefetched | None:
        """The next batch; the requests of those after it go out first."""
        with self._lock:
            if self._ahead.closed:
                return None
            connection, number = self._connect()
            drawing = self._client._drawing_over(connection)
            stashed: Any = drawing.from_stash(number, self._n)
            if stashed is not None:
                batch = drawing.draw(number, self._n, self._timeout, stashed)
                return drawing.prefetched(number, batch)
            session = self._session
            assert session is not None
            while len(self._asked) < max(self._prefetch, 1):
                self._asked.append(session.ask(number, self._n, None))
            pending = self._asked.popleft()
            if not self._in_time(pending):
                # It is answered now: with what was drawn until then, or that nothing was.
                connection.link.cancel(pending)
            if self._prefetch:
                self._asked.append(session.ask(number, self._n, None))
            try:
                drawn: Any = session.take(number, pending, None)
            except errors.DeadlineExceededError:
                raise errors.DeadlineExceededError(
                    f"no sample within {self._timeout} s:"
                    f" {connection.describe_wait(number, 'sampling')()}"
                ) from None
            return drawing.prefetched(number, drawn)

    def _in_time(self, pending: Pending) -> bool:
        if self._timeout is None:
            return True
        end = time.monotonic() + self._timeout
        while not pending.wait(min(max(end - time.monotonic(), 0.0), 1.0)):
            if time.monotonic() >= end:
                return False
        return True

    def _connect(self) -> tuple[RemoteConnection, int]:
        connection: RemoteConnection = self._client._connected()  # type: ignore[assignment]
        if connection is not self._connection:
            # What was asked of a connection that is gone for good went with it.
            self._asked.clear()
            self._connection = connection
            self._session = connection.take_session()  # type: ignore[assignment]
        return connection, connection.number(self._table)

    def _end(self) -> list[Prefetched]:
        """Withdraws what was asked for. Gives what had been drawn."""
        if self._forked():
            return []
        self._ahead.stop()
        with self._lock:
            asked, self._asked = self._asked, deque()
            connection, session = self._connection, self._session
            if connection is None or session is None or connection.unusable:
                return []
            for pending in reversed(asked):
                connection.link.cancel(pending)
            number = connection.number(self._table)
            drawn: list[Any] = [session.drawn_nevertheless(number, pending) for pending in asked]
            return [
                self._client._drawing_over(connection).prefetched(number, batch)
                for batch in drawn
                if batch is not None and len(batch)
            ]

    def __del__(self) -> None:
        """Withdraws what nobody will take; what was drawn is for the client's next call."""
        if hasattr(self, "_asked") and not self._forked():
            for batch in reversed(self._end()):
                batch.put_back()
