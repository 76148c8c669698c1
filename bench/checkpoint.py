"""How fast is a store saved and restored, and what does that cost those who use it meanwhile?"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench import library
from bench.harness import Bench, Contender, Measure, Reading, TimedLoop
from bench.processes import context

if TYPE_CHECKING:
    import shmreplay

NAME = "checkpoint"
QUESTION = "How fast is a store saved and restored, and what does that cost those who use it?"
SAVE = "shmreplay, all of it"
AGAIN = "shmreplay, with a tenth of it new"
TRUSTING = "shmreplay, with a tenth of it new, verify=False"
RESTORE = "shmreplay, restored into a new server"
PLAIN = "plain write of the same bytes, to disk"
CALM = "shmreplay, no checkpoint"
DURING = "shmreplay, while a checkpoint is written"
ITEM_BYTES = 40_000


def _table(rows: int) -> shmreplay.Table:
    reverb = library.require()
    table: shmreplay.Table = reverb.Table(
        library.TABLE,
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        rows,
        reverb.rate_limiters.MinSize(1),
    )
    return table


def _directory(stack: ExitStack) -> Path:
    path = Path(tempfile.mkdtemp(prefix="shmreplay-bench-", dir=os.environ.get("BENCH_DISK")))
    stack.callback(shutil.rmtree, path)
    return path


def _serve(
    stack: ExitStack, rows: int, root: Path, verify: bool = True
) -> tuple[shmreplay.Server, shmreplay.Client]:
    reverb = library.require()
    server = stack.enter_context(
        reverb.Server(
            [_table(rows)],
            capacity=4 * rows * ITEM_BYTES + library.SPARE_BYTES,
            checkpointer=reverb.checkpointers.DefaultCheckpointer(root, verify=verify),
        )
    )
    return server, stack.enter_context(reverb.Client(server.address))


def _insert(client: shmreplay.Client, rows: int) -> None:
    rng = np.random.default_rng(3)
    for first in range(0, rows, 100):
        n = min(100, rows - first)
        client.insert_batch(library.TABLE, {"x": _frames(rng, n)})


def _frames(rng: np.random.Generator, n: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return rng.integers(0, 256, (n, ITEM_BYTES), dtype=np.uint8)


def _empty(root: Path) -> None:
    for entry in root.iterdir():
        shutil.rmtree(entry)


def _save(stack: ExitStack, rows: int) -> Measure:
    root = _directory(stack)
    server, client = _serve(stack, rows, root)
    _insert(client, rows)

    def loop(calls: int) -> None:
        for _ in range(calls):
            _empty(root)
            server.checkpoint()

    return TimedLoop(loop)


def _again(stack: ExitStack, rows: int, verify: bool) -> Measure:
    root = _directory(stack)
    server, client = _serve(stack, rows, root, verify)
    _insert(client, rows)
    server.checkpoint()
    fresh = {"x": _frames(np.random.default_rng(4), rows // 10)}

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.insert_batch(library.TABLE, fresh)
            server.checkpoint()

    return TimedLoop(loop)


def _restore(stack: ExitStack, rows: int) -> Measure:
    root = _directory(stack)
    with ExitStack() as first:
        server, client = _serve(first, rows, root)
        _insert(client, rows)
        server.checkpoint()

    def loop(calls: int) -> None:
        for _ in range(calls):
            with ExitStack() as each:
                _, client = _serve(each, rows, root)
                library.check_size(client, rows)

    return TimedLoop(loop)


def _plain(stack: ExitStack, rows: int) -> Measure:
    path = _directory(stack) / "plain"
    data = memoryview(np.random.default_rng(3).bytes(rows * ITEM_BYTES))

    def loop(calls: int) -> None:
        for _ in range(calls):
            path.unlink(missing_ok=True)
            with path.open("wb", buffering=0) as file:
                for first in range(0, len(data), 4 << 20):
                    file.write(data[first : first + (4 << 20)])
                os.fsync(file.fileno())

    return TimedLoop(loop)


# --- those who use the store meanwhile ----------------------------------------------------------


def _keep_saving(address: str, root: str, started: Event, stopped: Event) -> None:
    """Another process: writes all of the store, again and again."""
    with library.require().Client(address) as client:
        while not stopped.is_set():
            _empty(Path(root))
            started.set()
            client.checkpoint()


def _beside(stack: ExitStack, rows: int, sampling: bool, saving: bool) -> Measure:
    root = _directory(stack)
    server, client = _serve(stack, rows, root)
    _insert(client, rows)
    batch = {"x": _frames(np.random.default_rng(5), 32)}

    def loop(calls: int) -> None:
        for _ in range(calls):
            if sampling:
                client.sample_batch(library.TABLE, 32)
            else:
                client.insert_batch(library.TABLE, batch)

    timed = TimedLoop(loop)
    if not saving:
        return timed

    def measure(seconds: float) -> Reading:
        started, stopped = context().Event(), context().Event()
        process = context().Process(
            target=_keep_saving, args=(server.address, str(root), started, stopped)
        )
        process.start()
        try:
            started.wait()
            return timed(seconds)
        finally:
            stopped.set()
            process.join()

    return measure


def run(bench: Bench) -> None:
    """Measures this question."""
    rows = 500 if bench.settings.quick else 10_000
    whole = rows * ITEM_BYTES
    bench.compare(
        NAME,
        "save and restore",
        [
            Contender(SAVE, partial(_save, rows=rows), ours=True),
            Contender(AGAIN, partial(_again, rows=rows, verify=True), ours=True),
            Contender(TRUSTING, partial(_again, rows=rows, verify=False), ours=True),
            Contender(RESTORE, partial(_restore, rows=rows), ours=True),
            Contender(PLAIN, partial(_plain, rows=rows)),
        ],
        items_per_call=rows,
        bytes_per_item=whole // rows,
        box=1.0,
    )
    for case, sampling in (("32 inserted", False), ("32 sampled", True)):
        bench.compare(
            NAME,
            case,
            [
                Contender(CALM, partial(_beside, rows=rows, sampling=sampling, saving=False)),
                Contender(
                    DURING,
                    partial(_beside, rows=rows, sampling=sampling, saving=True),
                    ours=True,
                ),
            ],
            items_per_call=32,
            bytes_per_item=ITEM_BYTES,
            box=1.0,
        )
