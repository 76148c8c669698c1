"""What the store remembers of remote clients, over the death of the process that serves them.

Each client has a receipt that says that it is there, each of its writers one that says how far its
items have come, and each insert of a batch and each reset one, until its answer is confirmed; so
have items that were refused (`refusals`). The core writes items down as it inserts them. Whoever
serves the store next finds the receipts by the client's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from shmreplay import _native, errors, limits

__all__ = ["CLIENT", "ClientReceipts", "Receipt", "Receipts", "of_token"]

CLIENT: Final = 0
"""Lane of the client itself. Those of its writers are their numbers."""

_TOKENS: Final = 1 << 63
_REFUSALS: Final = 1 << 62
# Such a lane has the number of a writer in its low half, and above it a number that tells apart
# those of one client.
_SERIALS: Final = 1 << 30


def of_token(token: int) -> int:
    """Lane of an insert of a batch, or of a reset."""
    return _TOKENS | token


@dataclasses.dataclass
class Receipt:
    """A place in the store."""

    number: int
    done: int = 0
    """Number of the last item that was in its table when this was read; 0: none."""
    key: int = 0
    """And its key."""


class Receipts:
    """The receipts that one process of the bridge keeps. Used by one thread."""

    def __init__(self, native: _native.Store, worker: int, workers: int) -> None:
        """Takes what a process before it left.

        Args:
            native: The store.
            worker: Number of this process, from 0.
            workers: How many there are.
        """
        self._native = native
        self._worker = worker
        self._workers = workers
        # Receipts are the store's; each process has its share of them.
        share = limits.BRIDGE_ALL_RECEIPTS // workers
        # For those who have as many as each client gets.
        self._pool = share - share // 2
        self.left: dict[bytes, dict[int, Receipt]] = {}
        """Receipts by lane, of clients of an earlier process that have not come again."""
        for name, owner, lane, receipt in self._all():
            if owner % workers == worker:
                # Else another number of processes would one day part what is one client's.
                if owner != worker:
                    native.receipt_take(receipt.number, worker)
                lanes = self.left.setdefault(name, {})
                lanes[lane] = receipt
                self._count(len(lanes), -1)

    def _all(self) -> list[tuple[bytes, int, int, Receipt]]:
        found = []
        for number in range(self._native.receipts()):
            read = self._native.receipt(number)
            if read is not None:
                name, lane, done, key, owner = read
                found.append((name, owner, lane, Receipt(number, done, key)))
        return found

    def worker_of(self, name: bytes) -> int | None:
        """Which process serves a client that this one does not know, if any does."""
        for known, owner, lane, _ in self._all():
            if known == name and lane == CLIENT and owner % self._workers != self._worker:
                return owner % self._workers
        return None

    def open(self, name: bytes, lane: int, owned: int) -> Receipt:
        """A new one, for a client that has so many.

        However many take all that they get, each gets the few that most need.

        Raises:
            StoreLimitError: There are too many.
            ArenaFullError: There is no memory for it.
        """
        if self.scarce(owned):
            raise errors.StoreLimitError(
                f"this client has {owned} writers and batches that the store must remember, and"
                f" those of all clients are so many that each has {limits.BRIDGE_OWN_RECEIPTS} at"
                " most. Close writers that are not needed, of this client or of others."
            )
        receipt = Receipt(self._native.receipt_open(name, lane, self._worker))
        self._count(owned + 1, -1)
        return receipt

    def scarce(self, owned: int) -> bool:
        """Whether a client that has so many gets no more now."""
        return owned >= limits.BRIDGE_OWN_RECEIPTS and self._pool <= 0

    def _count(self, owned: int, change: int) -> None:
        """A client has so many with the one that is opened or closed."""
        if owned > limits.BRIDGE_OWN_RECEIPTS:
            self._pool += change

    def close(self, receipt: Receipt, owned: int) -> None:
        """One of as many as a client has is not needed any more. The store may be gone already."""
        self._count(owned, 1)
        try:
            self._native.receipt_close(receipt.number)
        except errors.ServerClosedError:
            return  # and with it all that it remembers

    def note(self, receipt: Receipt, done: int, key: int) -> None:
        """Writes down what is no insert."""
        self._native.receipt_note(receipt.number, done, key)
        receipt.done, receipt.key = done, key

    def forget_left(self) -> None:
        """Those who have not come again will not come."""
        for lanes in self.left.values():
            for owned, receipt in enumerate(lanes.values(), 1):
                self.close(receipt, owned)
        self.left = {}


class ClientReceipts:
    """Those of one client."""

    def __init__(self, receipts: Receipts, name: bytes, left: dict[int, Receipt] | None) -> None:
        """Begins, or goes on with what an earlier process left.

        Raises:
            StoreLimitError, ArenaFullError: There is no room.
        """
        self._receipts = receipts
        self._name = name
        self._left = {} if left is None else left
        self._owned = len(self._left)
        self._kept: dict[int, list[Receipt]] = {}
        self._n_kept = 0
        self._serial = 0
        for lane in filter(_is_of_refusals, self._left):
            self._serial = max(self._serial, lane >> 32 & _SERIALS - 1)
        own = self._left.pop(CLIENT, None)
        self._own = self._open(CLIENT) if own is None else own

    def _open(self, lane: int) -> Receipt:
        receipt = self._receipts.open(self._name, lane, self._owned)
        self._owned += 1
        return receipt

    def close_some(self, receipts: Iterable[Receipt]) -> None:
        """These are needed no more."""
        for receipt in receipts:
            self._receipts.close(receipt, self._owned)
            self._owned -= 1

    def take(self, lane: int) -> Receipt:
        """The receipt of a lane: as it was left, or a new one.

        Raises:
            StoreLimitError, ArenaFullError: There is no room for a new one.
        """
        left = self._left.pop(lane, None)
        return self._open(lane) if left is None else left

    def was_left(self, lane: int) -> bool:
        """Whether a process before this one had begun what this lane is for."""
        return lane in self._left

    def take_refusals(self, writer: int) -> list[Receipt]:
        """Those that were left of items of a writer that were refused. See `refusals`."""
        lanes = [n for n in self._left if _is_of_refusals(n) and n & 0xFFFFFFFF == writer]
        return [self._left.pop(lane) for lane in lanes]

    def open_refusals(self, writer: int) -> Receipt:
        """A new one for them.

        Raises:
            StoreLimitError, ArenaFullError: There is no room.
        """
        self._serial = (self._serial + 1) % _SERIALS
        return self._open(_REFUSALS | self._serial << 32 | writer)

    def note(self, receipt: Receipt, done: int, key: int) -> None:
        """Writes down what is no insert."""
        self._receipts.note(receipt, done, key)

    @property
    def full(self) -> bool:
        """Whether so many answers are not confirmed that nothing more should be begun."""
        return self._n_kept >= limits.BRIDGE_RECEIPTS or (
            self._n_kept > 0 and self._receipts.scarce(self._owned)
        )

    def keep(self, sequence: int, *receipts: Receipt) -> None:
        """They are kept until the answer to this request is confirmed."""
        self._kept.setdefault(sequence, []).extend(receipts)
        self._n_kept += len(receipts)

    def confirmed(self, sequence: int) -> None:
        """The answer to this request is confirmed."""
        kept = self._kept.pop(sequence, ())
        self._n_kept -= len(kept)
        self.close_some(kept)

    def caught_up(self) -> None:
        """The client has said again all that it had to."""
        self.close_some(self._left.values())
        self._left.clear()

    def close(self) -> None:
        """The client is gone."""
        for kept in self._kept.values():
            self.close_some(kept)
        self.close_some((*self._left.values(), self._own))
        self._kept.clear()
        self._left.clear()


def _is_of_refusals(lane: int) -> bool:
    return lane >> 62 == 1
