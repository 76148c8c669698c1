"""What the server knows of one remote client."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from shmreplay import _native, limits
from shmreplay.bridge.channel import Channel
from shmreplay.bridge.receipts import ClientReceipts
from shmreplay.bridge.scheduler import Task
from shmreplay.bridge.wire import Writer

__all__ = ["Session"]


class Session:
    """A remote client: what it asked for, what it was answered, its writers."""

    def __init__(
        self,
        identity: bytes,
        compress: bool,
        receipts: ClientReceipts,
        received: int,
        who: str = "",
    ) -> None:
        """A client that is new to this process.

        Args:
            identity: Its own name for itself, which nobody else knows.
            compress: Whether it wants arrays compressed.
            receipts: What the store remembers of it.
            received: Number of the last request that it sent to another process.
            who: The host or the key that it came from first.
        """
        self.who = who
        self.receipts = receipts
        self.identity = identity
        self.generation = 1 + secrets.randbelow(2**64 - 1)
        """Tells a client that comes back whether this is still what it knew."""
        self.peer: bytes | None = None
        """Its latest connection."""
        self.reachable = False
        self.received = received
        """All requests up to this one have come."""
        self.tasks: dict[int, Task] = {}
        self.answers: dict[int, list[Any]] = {}
        """Answers that the client has not confirmed."""
        self.backlog: deque[list[Any]] = deque()
        """What could not be sent yet."""
        self.lent: dict[int, tuple[int, _native.Batch]] = {}
        """Table and items of answers whose items the client has not delivered."""
        self.channels: dict[int, Channel] = {}
        self.nbytes = 0
        """What is kept for it, `unpacked` included."""
        self.unpacked = 0
        """Of requests that came compressed and wait: what they became. Its client cannot know."""
        self.seen_at = time.monotonic()
        self.quiet_s: Callable[[], float] = lambda: math.inf
        """Seconds for which nothing came through its connection, not even a part of a message."""
        self.sizes: dict[int, tuple[int, int]] = {}
        self._compress = compress

    def body(self) -> Writer:
        """A new answer."""
        return Writer(self._compress)

    @property
    def full(self) -> bool:
        """Whether so much is on its way that nothing more should be drawn."""
        return self.nbytes - self.unpacked > limits.BRIDGE_SESSION_BYTES // 2
