"""What the store remembers of a remote client goes to one process, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

import shmreplay as reverb
from shmreplay.bridge.receipts import ClientReceipts, Receipts, of_token
from tests.bridge.killed import in_order

NAME = bytes(range(16))


@pytest.mark.parametrize("counts", list(product([1, 2, 4], [1, 2, 3], [1, 3, 5])))
def test_all_of_a_client_s_receipts_stay_with_one_process(
    make_server: Callable[..., reverb.Server], counts: tuple[int, ...]
) -> None:
    """Also where each server had another number of processes, and each opened some of them."""
    server: Any = make_server([in_order(10)])
    native = server._connection.native
    first = Receipts(native, counts[0] - 1, counts[0])
    client, lanes = ClientReceipts(first, NAME, None), {0, 1}
    client.take(1)
    for server_number, n in enumerate(counts[1:], 2):
        every = [Receipts(native, worker, n) for worker in range(n)]
        found = [receipts for receipts in every if NAME in receipts.left]
        assert [set(receipts.left[NAME]) for receipts in found] == [lanes]
        client = ClientReceipts(found[0], NAME, found[0].left.pop(NAME))
        for lane in (1, of_token(server_number)):
            client.take(lane)
            lanes.add(lane)
