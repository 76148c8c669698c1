"""An iterator of batches that are gathered ahead by a thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from shmreplay import errors, limits
from shmreplay.replay_sample import ReplaySample

_SLICE_S = limits.WAIT_SLICE_MS / 1000


class Sampler:
    """Iterator of batches; see `Client.sampler`.

    Exactly `prefetch` batches are gathered ahead of the consumer, never more. With a table that
    items leave when sampled, `close()` returns the batches that were gathered and not delivered,
    the last of which may be short. Thread-safe; not usable after a fork.
    """

    def __init__(
        self, draw: Callable[[Callable[[], bool]], ReplaySample | None], prefetch: int
    ) -> None:
        """Takes a function that draws a batch, and how far to run ahead.

        It is given a function that says whether to end early; None from it says that it did, with
        nothing drawn.
        """
        self._prefetch = limits.checked_int("prefetch", prefetch)
        if not 0 <= self._prefetch <= limits.MAX_PREFETCH:
            raise errors.InvalidArgumentError(
                f"prefetch must be in [0, {limits.MAX_PREFETCH}], got {prefetch}"
            )
        self._draw = draw
        self._pid = os.getpid()
        self._ready: deque[ReplaySample] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if self._prefetch > 0:
            self._thread = threading.Thread(target=self._run, name="shmreplay-sampler", daemon=True)
            self._thread.start()

    def _is_closed(self) -> bool:
        return self._closed

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (
                    len(self._ready) >= self._prefetch or self._error is not None
                ):
                    self._changed.wait()
                if self._closed:
                    return
            batch, error = None, None
            try:
                batch = self._draw(self._is_closed)
            except BaseException as e:  # delivered to the consumer
                error = e
            with self._changed:
                self._error = error
                if batch is not None:
                    self._ready.append(batch)
                self._changed.notify_all()

    def __iter__(self) -> Sampler:
        """Returns the sampler."""
        return self

    def __next__(self) -> ReplaySample:
        """The next batch.

        Raises:
            DeadlineExceededError: None within the timeout; the next call waits anew.
            ServerClosedError: The server has closed the store, or the sampler was closed.
            ForkedHandleError: This process got the sampler from its parent.
        """
        if os.getpid() != self._pid:
            raise errors.ForkedHandleError(
                f"this sampler was made by process {self._pid} before a fork; make a new one of a "
                "Client in this process"
            )
        if self._prefetch == 0:
            batch = None if self._closed else self._draw(self._is_closed)
            if batch is None:
                raise self._closed_error()
            return batch
        with self._changed:
            while not self._ready:
                if self._closed:
                    raise self._closed_error()
                if self._error is not None:
                    # Once: the thread then tries again, and fails again where nothing has changed.
                    error, self._error = self._error, None
                    self._changed.notify_all()
                    raise error
                self._changed.wait(_SLICE_S)
            batch = self._ready.popleft()
            self._changed.notify_all()
            return batch

    def _closed_error(self) -> errors.ServerClosedError:
        return errors.ServerClosedError("this sampler is closed; make a new one")

    def close(self) -> list[ReplaySample]:
        """Stops the thread. Returns the batches that were gathered and not delivered.

        In a process that got the sampler from its parent it does nothing.
        """
        if os.getpid() != self._pid:
            return []
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        left = list(self._ready)
        self._ready.clear()
        return left

    def __enter__(self) -> Sampler:
        """Returns the sampler."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the sampler."""
        self.close()

    def __getstate__(self) -> Any:
        """Samplers hold threads and are not picklable; pickle the Client instead."""
        raise errors.ArgumentTypeError("a Sampler cannot be pickled; pickle its Client")
