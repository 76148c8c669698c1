"""Does a block of payloads go into a table at the speed of memcpy, however the caller's array lies?

Some processors copy many times slower between addresses that are a few bytes apart modulo a page,
so the source is put at several places within a page. The floor is bare C from the start of one,
into a ring of as many rows, which is where nothing of that kind happens.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench import library
from bench.baselines import BareMemcpy, aligned_zeros
from bench.harness import Bench, Contender, Measure, TimedLoop
from bench.payloads import PAYLOADS, frames, rows_for

NAME = "block_append"
QUESTION = "Does a block of payloads go into a table at the speed of memcpy, however it lies?"
SIZES = {name: size for name, size in PAYLOADS.items() if size >= 4_000}
OFFSETS = (0, 1, 16, 64, 2048)
QUICK_OFFSETS = (0, 1)
MEMCPY = "bare C memcpy, from the start of a page"
BLOCK_BYTES = 1_600_000
"""Of a block: large enough that the work around a call does not count, and cached as it is read."""


def ours(offset: int) -> str:
    """Returns the label of a source so many bytes past the start of a page."""
    return f"shmreplay insert_batch, {offset} B past a page"


def payloads_of(size: int) -> int:
    """Payloads in a block."""
    return BLOCK_BYTES // size


def _source(size: int, offset: int) -> NDArray[np.uint8]:
    """A block that begins so many bytes past the start of a page."""
    count = payloads_of(size)
    raw = aligned_zeros(1, offset + count * size)[0]
    block: NDArray[np.uint8] = raw[offset:].reshape(count, size)
    block[:] = np.resize(np.stack(frames(size)), block.shape)
    return block


def _insert(stack: ExitStack, size: int, offset: int) -> Measure:
    rows, block = rows_for(size), {"x": _source(size, offset)}
    _, client = library.serve(stack, rows, size)
    for _ in range(rows * 6 // 5 // payloads_of(size) + 1):
        client.insert_batch(library.TABLE, block)
    library.check_size(client, rows)

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.insert_batch(library.TABLE, block)

    return TimedLoop(loop)


def _memcpy(stack: ExitStack, size: int) -> Measure:
    count = payloads_of(size)
    copies = BareMemcpy(rows_for(size), size, count)
    return TimedLoop(lambda calls: copies.run(calls * count))


def run(bench: Bench) -> None:
    """Measures this question."""
    offsets = QUICK_OFFSETS if bench.settings.quick else OFFSETS
    for case, size in SIZES.items():
        bench.compare(
            NAME,
            case,
            [
                *(
                    Contender(ours(each), partial(_insert, size=size, offset=each), ours=True)
                    for each in offsets
                ),
                Contender(MEMCPY, partial(_memcpy, size=size)),
            ],
            bytes_per_item=size,
            items_per_call=payloads_of(size),
            box=0.3,
        )
