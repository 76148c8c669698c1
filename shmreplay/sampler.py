"""An iterator of batches that are gathered ahead by a thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from shmreplay import errors, limits
from shmreplay.replay_sample import ReplaySample

_SLICE_S = limits.WAIT_SLICE_MS / 1000


class Prefetched(NamedTuple):
    """A batch that was gathered ahead: what to do when it is delivered, and when it is not."""

    sample: ReplaySample
    deliver: Callable[[], None]
    put_back: Callable[[], None]


Draw = Callable[[Callable[[], bool]], Prefetched | None]


class _Ahead:
    """What the thread and the sampler share.

    The thread refers to this and not to the sampler, so that a sampler which nobody refers to any
    more can go, and stops its thread.
    """

    def __init__(self, draw: Draw, prefetch: int) -> None:
        self.draw = draw
        self.prefetch = prefetch
        self.ready: deque[Prefetched] = deque()
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.closed = False
        self.abandoned = False

    def is_closed(self) -> bool:
        return self.closed

    def is_full(self) -> bool:
        return len(self.ready) >= self.prefetch or self.error is not None

    def run(self) -> None:
        while True:
            with self.changed:
                while not self.closed and self.is_full():
                    self.changed.wait()
                if self.closed:
                    return
            batch, error = None, None
            try:
                batch = self.draw(self.is_closed)
            except BaseException as e:  # delivered to the consumer
                error = e
            with self.changed:
                self.error = error
                if batch is not None:
                    self.ready.append(batch)
                self.changed.notify_all()
                if self.abandoned:
                    self.give_back()
            # An error holds its traceback, and that the consumer's frames with the sampler.
            batch = error = None

    def stop(self) -> None:
        """Lets the thread end; does not wait for it."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def give_back(self) -> None:
        """What was not delivered is for the client's next call."""
        while self.ready:
            self.ready.pop().put_back()

    def abandon(self) -> None:
        """The sampler went without being closed."""
        with self.changed:
            self.abandoned = True
            self.stop()
            self.give_back()


class Sampler:
    """Iterator of batches; see `Client.sampler`.

    Exactly `prefetch` batches are gathered ahead of the consumer, never more. With a table that
    items leave when sampled, nothing that was gathered is lost: at the end of a `with` block the
    batches that were not delivered go back to the client, whose next call on the table gives them
    out, and `close()` returns them instead. Thread-safe; not usable after a fork.
    """

    def __init__(self, draw: Draw, prefetch: int, *, threaded: bool = True) -> None:
        """Takes a function that draws a batch, how far to run ahead, and whether by a thread.

        It is given a function that says whether to end early; None from it says that it did, with
        nothing drawn.
        """
        n = limits.checked_int("prefetch", prefetch)
        if not 0 <= n <= limits.MAX_PREFETCH:
            raise errors.InvalidArgumentError(
                f"prefetch must be in [0, {limits.MAX_PREFETCH}], got {prefetch}. Give 2 to "
                "gather two batches ahead."
            )
        self._pid = os.getpid()
        self._ahead = _Ahead(draw, n if threaded else 0)
        self._thread: threading.Thread | None = None
        if self._ahead.prefetch > 0:
            self._thread = threading.Thread(
                target=self._ahead.run, name="shmreplay-sampler", daemon=True
            )
            self._thread.start()

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
        if self._forked():
            raise errors.ForkedHandleError(
                f"this sampler was made by process {self._pid} before a fork; expected one "
                "of this process. Make a new one of a Client in this process."
            )
        ahead = self._ahead
        if ahead.prefetch == 0:
            batch = None if ahead.closed else ahead.draw(ahead.is_closed)
            if batch is None:
                raise self._closed_error()
        else:
            batch = self._next_ready()
        batch.deliver()
        return batch.sample

    def _next_ready(self) -> Prefetched:
        ahead = self._ahead
        with ahead.changed:
            while not ahead.ready:
                if ahead.closed:
                    raise self._closed_error()
                if ahead.error is not None:
                    # Once: the thread then tries again, and fails again where nothing has changed.
                    error, ahead.error = ahead.error, None
                    ahead.changed.notify_all()
                    raise error
                ahead.changed.wait(_SLICE_S)
            batch = ahead.ready.popleft()
            ahead.changed.notify_all()
            return batch

    def _closed_error(self) -> errors.ServerClosedError:
        return errors.ServerClosedError(
            "Got a call on a sampler that is closed; expected an open one; make a new one"
        )

    def _forked(self) -> bool:
        """Whether this process got the sampler from its parent."""
        return os.getpid() != self._pid

    def _end(self) -> list[Prefetched]:
        """Stops the thread and waits for it. Gives what was not delivered."""
        if self._forked():
            return []
        self._ahead.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._ahead.changed:
            left = list(self._ahead.ready)
            self._ahead.ready.clear()
        return left

    def close(self) -> list[ReplaySample]:
        """Stops the thread. Returns the batches that were gathered and not delivered.

        In a process that got the sampler from its parent it does nothing.
        """
        left = self._end()
        for batch in left:
            batch.deliver()
        return [batch.sample for batch in left]

    def __enter__(self) -> Sampler:
        """Returns the sampler."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the sampler; what was not delivered goes back to the client."""
        for batch in reversed(self._end()):
            batch.put_back()

    def __del__(self) -> None:
        """Stops the thread of a sampler that nobody refers to any more."""
        if hasattr(self, "_ahead") and not self._forked():
            self._ahead.abandon()

    def __getstate__(self) -> Any:
        """Samplers hold threads and are not picklable; pickle the Client instead."""
        raise errors.ArgumentTypeError(
            "Got a Sampler to pickle; expected what can be sent to other processes. Use its "
            "Client, and make a Sampler of that there."
        )
