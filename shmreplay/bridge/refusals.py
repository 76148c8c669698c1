"""Items of a remote writer that were refused, as the store remembers them until the client knows.

A writer's receipt says how far its items have come, and so which are not in their table for sure:
those beyond. An item that is refused is written down before the next one can be inserted, so that
of those before it is known as well which are not there. Most messages have none, and cost nothing.
"""

from __future__ import annotations

from typing import Final

from shmreplay.bridge.receipts import ClientReceipts, Receipt

__all__ = ["Refusals"]

# A receipt says of so many items in a row which were refused: a bit each, below the code.
_ITEMS: Final = 56


class Refusals:
    """Those of one writer."""

    def __init__(self, receipts: ClientReceipts, writer: int) -> None:
        """Takes what an earlier process left.

        Args:
            receipts: Of the writer's client.
            writer: Its number.
        """
        self._receipts = receipts
        self._writer = writer
        self._left: dict[int, Receipt] = {}
        for receipt in receipts.take_refusals(writer):
            # One whose first item is 0 was opened, and nothing was written down.
            numbers = range(receipt.done, receipt.done + _ITEMS) if receipt.done else ()
            bits = receipt.key
            of_receipt = {number: receipt for i, number in enumerate(numbers) if bits >> i & 1}
            if of_receipt:
                self._left |= of_receipt
            else:
                receipts.close_some([receipt])
        self._last: tuple[int, Receipt] | None = None

    def __contains__(self, number: int) -> bool:
        """Whether an earlier process refused this item, and its client may not know."""
        return number in self._left

    @property
    def any(self) -> bool:
        """Whether there is any such item."""
        return bool(self._left)

    def said_again(self, number: int, sequence: int) -> int:
        """The code of such an item, which this request names."""
        receipt = self._left[number]
        code = receipt.key >> _ITEMS
        for other in [n for n, r in self._left.items() if r is receipt and n <= number]:
            del self._left[other]
        if receipt not in self._left.values():
            self._receipts.keep(sequence, receipt)
        return code

    @property
    def full(self) -> bool:
        """Whether so many answers are not confirmed that nothing more should be begun."""
        return self._receipts.full

    def settled(self, number: int) -> None:
        """The client knows what became of the items up to this one."""
        if not self._left:
            return
        known = {id(r): r for n, r in self._left.items() if n <= number}
        self._left = {n: r for n, r in self._left.items() if n > number}
        still = {id(r) for r in self._left.values()}
        self._receipts.close_some(r for i, r in known.items() if i not in still)

    def note(self, number: int, sequence: int, code: int) -> None:
        """An item is not in its table, as the answer to this request will say.

        Raises:
            StoreLimitError, ArenaFullError: There is no room to write it down.
        """
        if self._last is not None and self._last[0] == sequence:
            receipt = self._last[1]
            place = number - receipt.done
            if place < _ITEMS and receipt.key >> _ITEMS == code:
                self._receipts.note(receipt, receipt.done, receipt.key | 1 << place)
                return
        receipt = self._receipts.open_refusals(self._writer)
        self._receipts.keep(sequence, receipt)
        self._last = (sequence, receipt)
        self._receipts.note(receipt, number, code << _ITEMS | 1)

    def left(self) -> list[Receipt]:
        """Those of an earlier process that nobody asked for."""
        return list({id(receipt): receipt for receipt in self._left.values()}.values())
