"""What each peer has of things that there are only so many of: none can have them all."""

from __future__ import annotations

from collections import Counter

__all__ = ["Shares"]


class Shares:
    """So many of something, for all peers. Used by one thread.

    A peer gets one more while it has fewer than are left: at most half of all, the next one half of
    what that leaves, and so on. So there is always some left for a peer that has none.
    """

    def __init__(self, total: int) -> None:
        """Begins with nobody having any."""
        self._left = total
        self._taken: Counter[str] = Counter()

    def may_take(self, who: str) -> bool:
        """Whether a peer gets one more."""
        return self._taken[who] < self._left

    def take(self, who: str) -> None:
        """A peer has one more. Also of one that it had before the process that serves it died."""
        self._taken[who] += 1
        self._left -= 1

    def give(self, who: str) -> None:
        """And one less."""
        self._left += 1
        self._taken[who] -= 1
        if not self._taken[who]:
            del self._taken[who]

    def describe(self, who: str) -> str:
        """How many a peer has, and how many are left."""
        return f"{self._taken[who]} of peer {who or 'unknown'}, {self._left} left for others"
