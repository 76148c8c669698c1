"""dm-reverb's rows of bench/peers_remote.py. The worker serves; clients are processes."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Measure
from bench.payloads import PAYLOADS, frames
from bench.peers_cases import (
    CHECKPOINT_BYTES,
    CLIENTS,
    REMOTE_CHUNK,
    TABLE,
    Row,
    Sizes,
    by_item,
    by_item_after,
    remote_batch,
    remote_chunk,
)
from bench.peers_reverb import FAR, NEAR, Specs, address_of, batches_of, serve, steps_loop
from bench.processes import Crew, Work

CHECKPOINT = "dm-reverb"


def _specs(size: int) -> Specs:
    return {"x": ((size,), np.uint8)}


def _payload_loop(address: str, size: int) -> Any:
    import reverb

    pool = cycle([(payload,) for payload in frames(size, 16)])
    return steps_loop(_specs(size), pool, reverb.Client(address))


def inserting(stack: ExitStack, address: str, size: int) -> Work:
    """A client that writes payloads one by one, confirmed together."""
    loop = _payload_loop(address, size)
    chunk = remote_chunk(size)
    loop(chunk)
    return Work(loop, chunk)


def sampling(stack: ExitStack, address: str, size: int) -> Work:
    """A client that samples batches, with its dataset running ahead."""
    batches = batches_of(address, remote_batch(size))

    def loop(calls: int) -> None:
        for _ in range(calls):
            next(batches)

    loop(1)
    return Work(loop, 1)


def _remote(stack: ExitStack, sizes: Sizes, size: int, clients: int, work: Any) -> Measure:
    rows = sizes.rows(size)
    address = address_of(stack, NEAR, rows, _specs(size))
    _payload_loop(address, size)(min(rows, sizes.slow_transitions))
    return Crew(stack, work, [(address, size)] * clients).measure


def _serve(sizes: Sizes, root: str) -> Any:
    from reverb.platform.default.checkpointers import DefaultCheckpointer

    checkpointer = DefaultCheckpointer(root)
    return serve(sizes.checkpoint, _specs(CHECKPOINT_BYTES), None, checkpointer)


def _fill(address: str, rows: int) -> None:
    import reverb

    rng = np.random.default_rng(3)
    # Every item random by itself: nothing for its compression to find.
    pool = ((rng.integers(0, 256, CHECKPOINT_BYTES, np.uint8),) for _ in range(rows))
    loop = steps_loop(_specs(CHECKPOINT_BYTES), pool, reverb.Client(address))
    for first in range(0, rows, REMOTE_CHUNK):
        loop(min(REMOTE_CHUNK, rows - first))


def _save(stack: ExitStack, sizes: Sizes) -> Measure:
    import reverb

    root = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
    server = _serve(sizes, root)
    stack.callback(server.stop)
    address = f"localhost:{server.port}"
    _fill(address, sizes.checkpoint)
    client = reverb.Client(address)

    def call() -> None:
        shutil.rmtree(client.checkpoint())

    return by_item(call, sizes.checkpoint)


def _again(stack: ExitStack, sizes: Sizes) -> Measure:
    import reverb

    root = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
    server = _serve(sizes, root)
    stack.callback(server.stop)
    address = f"localhost:{server.port}"
    _fill(address, sizes.checkpoint)
    client = reverb.Client(address)
    written = [client.checkpoint()]

    def prepare() -> None:
        while len(written) > 1:
            shutil.rmtree(written.pop(0), ignore_errors=True)
        _fill(address, sizes.checkpoint // 10)

    def call() -> None:
        written.append(client.checkpoint())

    return by_item_after(prepare, call, sizes.checkpoint)


def _restore(stack: ExitStack, sizes: Sizes) -> Measure:
    import reverb

    root = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
    server = _serve(sizes, root)
    _fill(f"localhost:{server.port}", sizes.checkpoint)
    saved = Path(reverb.Client(f"localhost:{server.port}").checkpoint())
    server.stop()
    if not saved.exists():
        raise RuntimeError(f"expected a checkpoint in {saved}, found none")

    def call() -> None:
        restored = _serve(sizes, root)
        size = reverb.Client(f"localhost:{restored.port}").server_info()[TABLE].current_size
        restored.stop()
        if size != sizes.checkpoint:
            raise RuntimeError(f"expected {sizes.checkpoint} items restored, found {size}")

    return by_item(call, sizes.checkpoint)


ROWS: tuple[Row, ...] = (
    *(
        Row(f"{what}-{size}-{n}", FAR, partial(_remote, size=size, clients=n, work=work))
        for size in PAYLOADS.values()
        for n in CLIENTS
        for what, work in (("insert", inserting), ("sample", sampling))
    ),
    Row("checkpoint-save", CHECKPOINT, _save),
    Row("checkpoint-again", CHECKPOINT, _again),
    Row("checkpoint-restore", CHECKPOINT, _restore),
)
