"""An iterator of batches that are gathered ahead by a thread."""

from __future__ import annotations

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
    items leave when sampled, `close()` returns the batches that were gathered and not delivered.
    """

    def __init__(
        self,
        draw: Callable[[float | None], ReplaySample],
        prefetch: int,
        timeout: float | None,
    ) -> None:
        """Takes a function that draws a batch within so many seconds, and how far to run ahead."""
        self._prefetch = limits.checked_int("prefetch", prefetch)
        if not 0 <= self._prefetch <= limits.MAX_PREFETCH:
            raise errors.InvalidArgumentError(
                f"prefetch must be in [0, {limits.MAX_PREFETCH}], got {prefetch}"
            )
        self._draw = draw
        self._timeout = timeout
        self._ready: deque[ReplaySample] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if self._prefetch > 0:
            self._thread = threading.Thread(
                target=self._run, name="shmreplay-sampler", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        waited = 0.0
        while True:
            with self._changed:
                while len(self._ready) >= self._prefetch and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            try:
                # In slices, so that close() does not wait for the limiter.
                batch = self._draw(_SLICE_S)
            except errors.DeadlineExceededError as e:
                waited += _SLICE_S
                if self._timeout is not None and waited >= self._timeout:
                    self._fail(e)
                    return
                continue
            except BaseException as e:  # delivered to the consumer
                self._fail(e)
                return
            waited = 0.0
            with self._changed:
                self._ready.append(batch)
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def __iter__(self) -> Sampler:
        """Returns the sampler."""
        return self

    def __next__(self) -> ReplaySample:
        """The next batch.

        Raises:
            DeadlineExceededError: None within the timeout.
            ServerClosedError: The server has closed the store, or the sampler was closed.
        """
        if self._prefetch == 0:
            if self._closed:
                raise errors.ServerClosedError("this sampler is closed; make a new one")
            return self._draw(self._timeout)
        with self._changed:
            while not self._ready:
                if self._closed:
                    raise errors.ServerClosedError("this sampler is closed; make a new one")
                if self._error is not None:
                    raise self._error
                self._changed.wait(_SLICE_S)
            batch = self._ready.popleft()
            self._changed.notify_all()
            return batch

    def close(self) -> list[ReplaySample]:
        """Stops the thread. Returns the batches that were gathered and not delivered."""
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
