"""shmreplay's rows of bench/peers_remote.py. The worker serves; clients are processes."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import library
from bench.bridge import free_port
from bench.harness import Measure
from bench.payloads import PAYLOADS, frames
from bench.peers_cases import (
    CHECKPOINT_BYTES,
    CLIENTS,
    Row,
    Sizes,
    by_item,
    by_item_after,
    in_chunks,
    payload_rows,
    remote_batch,
    remote_chunk,
)
from bench.processes import Crew, Work

if TYPE_CHECKING:
    import shmreplay

NAME = "shmreplay bridge"
BATCHES = "shmreplay bridge, insert_batch"
CHECKPOINT = "shmreplay"
AHEAD = 4


def inserting(stack: ExitStack, address: str, size: int) -> Work:
    """A remote client that writes payloads one by one, confirmed together."""
    client = stack.enter_context(library.require().Client(address))
    writer = client.trajectory_writer(1, confirm=False)
    stack.callback(writer.close)
    pool = cycle(frames(size, 16))

    def loop(calls: int) -> None:
        for payload in islice(pool, calls):
            writer.append({"x": payload})
            writer.create_item(library.TABLE, 1.0, {"x": writer.history["x"][-1]})
        writer.flush()

    chunk = remote_chunk(size)
    loop(chunk)
    return Work(loop, chunk)


def inserting_batches(stack: ExitStack, address: str, size: int) -> Work:
    """A remote client that writes as many payloads a call as others confirm together."""
    client = stack.enter_context(library.require().Client(address))
    chunk = remote_chunk(size)
    batch = payload_rows(size, chunk)

    def loop(calls: int) -> None:
        for _ in range(0, calls, chunk):
            client.insert_batch(library.TABLE, batch)

    loop(chunk)
    return Work(loop, chunk)


def sampling(stack: ExitStack, address: str, size: int) -> Work:
    """A remote client that samples batches, some ahead."""
    client = stack.enter_context(library.require().Client(address))
    sampler = stack.enter_context(client.sampler(library.TABLE, remote_batch(size), prefetch=AHEAD))

    def loop(calls: int) -> None:
        for _ in range(calls):
            next(sampler)

    loop(1)
    return Work(loop, 1)


def table_of(rows: int) -> shmreplay.Table:
    """Returns a uniform table."""
    reverb = library.require()
    table: shmreplay.Table = reverb.Table(
        library.TABLE,
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        rows,
        reverb.rate_limiters.MinSize(1),
    )
    return table


def _remote(stack: ExitStack, sizes: Sizes, size: int, clients: int, work: Any) -> Measure:
    reverb, rows = library.require(), sizes.rows(size)
    capacity = 2 * rows * (size + 512) + library.SPARE_BYTES
    port = free_port()
    server = stack.enter_context(reverb.Server([table_of(rows)], port=port, capacity=capacity))
    client = stack.enter_context(reverb.Client(server.address))
    in_chunks(partial(client.insert_batch, library.TABLE), payload_rows(size, 64), rows)
    address = f"tcp://127.0.0.1:{port}"
    return Crew(stack, work, [(address, size)] * clients).measure


def _serve(stack: ExitStack, rows: int, root: str) -> Any:
    reverb = library.require()
    return stack.enter_context(
        reverb.Server(
            [table_of(rows)],
            capacity=3 * rows * CHECKPOINT_BYTES + library.SPARE_BYTES,
            checkpointer=reverb.checkpointers.DefaultCheckpointer(root),
        )
    )


def _fill(server: Any, rows: int) -> None:
    with library.require().Client(server.address) as client:
        for first in range(0, rows, 100):
            batch = payload_rows(CHECKPOINT_BYTES, min(100, rows - first))
            client.insert_batch(library.TABLE, batch)


def _save(stack: ExitStack, sizes: Sizes) -> Measure:
    root = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
    server = _serve(stack, sizes.checkpoint, root)
    _fill(server, sizes.checkpoint)

    def call() -> None:
        server.checkpoint()
        # All of it anew the next time: what is unchanged is shared with the checkpoint before.
        for entry in Path(root).iterdir():
            shutil.rmtree(entry)

    return by_item(call, sizes.checkpoint)


def _again(stack: ExitStack, sizes: Sizes) -> Measure:
    root = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
    server = _serve(stack, sizes.checkpoint, root)
    _fill(server, sizes.checkpoint)
    server.checkpoint()
    tenth = sizes.checkpoint // 10
    return by_item_after(partial(_fill, server, tenth), server.checkpoint, sizes.checkpoint)


def _restore(stack: ExitStack, sizes: Sizes) -> Measure:
    root = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
    with ExitStack() as first:
        server = _serve(first, sizes.checkpoint, root)
        _fill(server, sizes.checkpoint)
        server.checkpoint()

    def call() -> None:
        with ExitStack() as each:
            _serve(each, sizes.checkpoint, root)

    return by_item(call, sizes.checkpoint)


ROWS: tuple[Row, ...] = (
    *(
        Row(f"{what}-{size}-{n}", NAME, partial(_remote, size=size, clients=n, work=work))
        for size in PAYLOADS.values()
        for n in CLIENTS
        for what, work in (("insert", inserting), ("sample", sampling))
    ),
    *(
        Row(
            f"insert-{size}-{n}",
            BATCHES,
            partial(_remote, size=size, clients=n, work=inserting_batches),
        )
        for size in PAYLOADS.values()
        for n in CLIENTS
    ),
    Row("checkpoint-save", CHECKPOINT, _save),
    Row("checkpoint-again", CHECKPOINT, _again),
    Row("checkpoint-restore", CHECKPOINT, _restore),
)
