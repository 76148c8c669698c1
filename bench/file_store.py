"""What does it cost that a store is in a file on disk, while the page cache holds it?"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

import shmreplay
from bench import library
from bench.harness import Bench, Contender, Measure, TimedLoop
from bench.payloads import PAYLOADS, rows_for

NAME = "file_store"
QUESTION = "What does a store in a file on disk cost, all of it in the page cache?"
BATCH = 64


def _serve(stack: ExitStack, size: int, on_disk: bool) -> shmreplay.Client:
    """Serves a full table of payloads."""
    path: Path | None = None
    if on_disk:
        # Beside the sources: the directory for temporary files may be in memory.
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=Path(__file__).parent))
        path = Path(folder) / "store"
    rows = rows_for(size)
    table = shmreplay.Table(
        library.TABLE,
        shmreplay.selectors.Uniform(),
        shmreplay.selectors.Fifo(),
        rows,
        shmreplay.rate_limiters.MinSize(1),
        stripes=1,
    )
    capacity = 3 * rows * (size + 256) + (64 << 20)
    server = stack.enter_context(shmreplay.Server([table], path=path, capacity=capacity))
    client = stack.enter_context(shmreplay.Client(server.address))
    data = np.zeros((BATCH, size), np.uint8)
    # Twice over, so that all memory it will use was used.
    for _ in range(2 * rows // BATCH + 2):
        client.insert_batch(library.TABLE, {"x": data})
    library.check_size(client, rows)
    return client


def _insert(stack: ExitStack, size: int, on_disk: bool) -> Measure:
    client = _serve(stack, size, on_disk)
    data = {"x": np.zeros((BATCH, size), np.uint8)}

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.insert_batch(library.TABLE, data)

    return TimedLoop(loop)


def _sample(stack: ExitStack, size: int, on_disk: bool) -> Measure:
    client = _serve(stack, size, on_disk)

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.sample_batch(library.TABLE, BATCH)

    return TimedLoop(loop)


def run(bench: Bench) -> None:
    """Measures this question."""
    for case in ("400 B", "400 kB"):
        size = PAYLOADS[case]
        for what, measure in (("insert_batch", _insert), ("sample_batch", _sample)):
            bench.compare(
                NAME,
                f"{what}({BATCH}), {case}",
                [
                    Contender("/dev/shm", partial(measure, size=size, on_disk=False), ours=True),
                    Contender("file on disk", partial(measure, size=size, on_disk=True), ours=True),
                ],
                items_per_call=BATCH,
                bytes_per_item=size,
                box=0.3,
            )
