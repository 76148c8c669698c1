"""Room for large messages that come: libzmq takes memory for a frame before anybody sees it.

So who has much to send asks first, and sends once it is told to. Those who ask get room in turn, as
long as what was granted and has not come is within a bound.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from shmreplay import limits

if TYPE_CHECKING:
    from shmreplay.bridge.sessions import Session

__all__ = ["Room"]


def _bound() -> int:
    """Bytes: fewer where this process can have little memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    most = limits.BRIDGE_ARRIVING_BYTES
    return most if soft == resource.RLIM_INFINITY else min(most, soft // 4)


class Room:
    """What was granted to whom. Used by one thread."""

    def __init__(self, tell: Callable[[Session], None]) -> None:
        """Takes what tells a client to send."""
        self._tell = tell
        self._left = _bound()
        self._granted: dict[Session, tuple[int, float]] = {}
        self._waiting: deque[tuple[Session, int]] = deque()

    def ask(self, session: Session, nbytes: int) -> None:
        """A client has so many bytes to send."""
        self._waiting.append((session, nbytes))
        self._grant()

    def arrived(self, session: Session) -> None:
        """What was granted to a client has come, or never will. Nothing if nothing was."""
        granted = self._granted.pop(session, None)
        if granted is not None:
            self._left += granted[0]
            self._grant()

    def forget(self, session: Session) -> None:
        """A client is gone, or has a new connection, on which it asks anew."""
        if self._waiting:
            self._waiting = deque(entry for entry in self._waiting if entry[0] != session)
        self.arrived(session)

    def expire(self, now: float) -> None:
        """Others wait no longer for who was told to send, and did not within its time."""
        if self._waiting:
            for session, (_, since) in list(self._granted.items()):
                if now - since > limits.BRIDGE_EXPIRE_S:
                    self.arrived(session)

    def _grant(self) -> None:
        # One alone may have more than there is: else it would wait for ever.
        while self._waiting and (self._waiting[0][1] <= self._left or not self._granted):
            session, nbytes = self._waiting.popleft()
            self._left -= nbytes
            self._granted[session] = (nbytes, time.monotonic())
            self._tell(session)
