"""What the store remembers of remote clients, over the death of the process that serves them.

Each client has a receipt that says that it is there, each of its writers one that says how far its
items have come, and each insert of a batch and each reset one, until its answer is confirmed. The
core writes items down as it inserts them. Whoever serves the store next finds the receipts by the
client's name.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from shmreplay import _native, errors, limits

__all__ = ["CLIENT", "ClientReceipts", "Receipt", "Receipts", "of_token"]

CLIENT: Final = 0
"""Lane of the client itself. Those of its writers are their numbers."""

_TOKENS: Final = 1 << 63


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
        self.left: dict[bytes, dict[int, Receipt]] = {}
        """Receipts by lane, of clients of an earlier process that have not come again."""
        for name, owner, lane, receipt in self._all():
            if owner % workers == worker:
                # Else another number of processes would one day part what is one client's.
                if owner != worker:
                    native.receipt_take(receipt.number, worker)
                self.left.setdefault(name, {})[lane] = receipt

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

    def open(self, name: bytes, lane: int) -> Receipt:
        """A new one.

        Raises:
            StoreLimitError: There are too many.
            ArenaFullError: There is no memory for it.
        """
        return Receipt(self._native.receipt_open(name, lane, self._worker))

    def close(self, receipt: Receipt) -> None:
        """It is not needed any more. The store may be gone already."""
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
            for receipt in lanes.values():
                self.close(receipt)
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
        self._kept: dict[int, Receipt] = {}
        own = self._left.pop(CLIENT, None)
        self._own = receipts.open(name, CLIENT) if own is None else own

    def take(self, lane: int) -> Receipt:
        """The receipt of a lane: as it was left, or a new one."""
        left = self._left.pop(lane, None)
        return self._receipts.open(self._name, lane) if left is None else left

    def note(self, receipt: Receipt, done: int, key: int) -> None:
        """Writes down what is no insert."""
        self._receipts.note(receipt, done, key)

    @property
    def full(self) -> bool:
        """Whether so many answers are not confirmed that nothing more should be begun."""
        return len(self._kept) >= limits.BRIDGE_RECEIPTS

    def keep(self, sequence: int, receipt: Receipt) -> None:
        """It is kept until the answer to this request is confirmed."""
        self._kept[sequence] = receipt

    def confirmed(self, sequence: int) -> None:
        """The answer to this request is confirmed."""
        receipt = self._kept.pop(sequence, None)
        if receipt is not None:
            self._receipts.close(receipt)

    def caught_up(self) -> None:
        """The client has said again all that it had to."""
        for receipt in self._left.values():
            self._receipts.close(receipt)
        self._left.clear()

    def close(self, writers: list[Receipt]) -> None:
        """The client is gone, and so are these writers."""
        for receipt in (*writers, *self._kept.values(), *self._left.values(), self._own):
            self._receipts.close(receipt)
        self._kept.clear()
        self._left.clear()
