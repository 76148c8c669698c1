"""shmreplay's rows in the workloads of bench/peers.py, and those of a plain numpy ring."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import library, single_insert
from bench.baselines import NumpySumTree, PayloadRing, TransitionRing
from bench.harness import Loop, Measure, TimedLoop
from bench.payloads import (
    FIELDS,
    PAYLOADS,
    TRANSITION_BYTES,
    batch_chunks,
    frames,
    transition_batch,
    transitions,
)
from bench.peers_cases import (
    ACTORS,
    BATCH,
    EXPONENT,
    FIELD_NAMES,
    FRAME_BATCH,
    FRAME_BYTES,
    Row,
    Sizes,
    Together,
    frame_batch,
    frame_transitions,
    in_chunks,
    payload_batch,
    payload_rows,
    repeated,
)
from bench.processes import Work

if TYPE_CHECKING:
    import shmreplay

STRUCTURED = "shmreplay StructuredWriter"
BATCHED = "shmreplay insert_batch"
SAMPLE = "shmreplay sample_batch"
PRIORITIZED = "shmreplay sample_batch + update_priorities"
TOGETHER = "shmreplay"
INSERT = "shmreplay Client.insert"
WRITER = "shmreplay TrajectoryWriter"
ITEMS = "shmreplay Client.sample"
DATASET = "shmreplay NumpyTrajectoryDataset.batch"
RING = "numpy ring"
POOL = 64
ACTOR_CHUNK = 64


def _serve(
    stack: ExitStack, rows: int, item_bytes: int, filled: int, exponent: float | None = None
) -> shmreplay.Client:
    """Serves a table of `rows` in a store with room for `filled` items twice."""
    if exponent is None:
        return library.serve(stack, rows, item_bytes)[1]
    reverb = library.require()
    table = reverb.Table(
        library.TABLE,
        reverb.selectors.Prioritized(exponent),
        reverb.selectors.Fifo(),
        rows,
        reverb.rate_limiters.MinSize(1),
    )
    capacity = 2 * filled * (item_bytes + 512) + 256 * rows + library.SPARE_BYTES
    server = stack.enter_context(reverb.Server([table], capacity=capacity))
    client: shmreplay.Client = stack.enter_context(reverb.Client(server.address))
    return client


def _structured(stack: ExitStack, sizes: Sizes) -> Measure:
    client = _serve(stack, sizes.transitions, TRANSITION_BYTES, sizes.transitions)
    loop = single_insert.append_loop(library.structured_writer(stack, client, FIELD_NAMES))
    loop(sizes.transitions * 6 // 5)
    return TimedLoop(loop)


def _writer(stack: ExitStack, sizes: Sizes) -> Measure:
    client = _serve(stack, sizes.transitions, TRANSITION_BYTES, sizes.transitions)
    writer = client.trajectory_writer(num_keep_alive_refs=1)
    stack.callback(writer.close)
    loop = single_insert.writer_loop(writer)
    loop(sizes.transitions * 6 // 5)
    return TimedLoop(loop)


def _batched(stack: ExitStack, sizes: Sizes) -> Measure:
    client = _serve(stack, sizes.transitions, TRANSITION_BYTES, sizes.transitions)
    library.fill(client, sizes.transitions * 6 // 5)
    batch = transition_batch(BATCH)
    return repeated(lambda: client.insert_batch(library.TABLE, batch))


def _filled(stack: ExitStack, sizes: Sizes) -> shmreplay.Client:
    client = _serve(stack, sizes.transitions, TRANSITION_BYTES, sizes.transitions)
    library.fill(client, sizes.transitions)
    return client


def _sample(stack: ExitStack, sizes: Sizes) -> Measure:
    client = _filled(stack, sizes)
    return repeated(lambda: client.sample_batch(library.TABLE, BATCH))


def _prioritized(stack: ExitStack, sizes: Sizes) -> Measure:
    client = _serve(stack, sizes.priorities, TRANSITION_BYTES, sizes.transitions, EXPONENT)
    library.fill(client, sizes.transitions)
    fresh = np.random.default_rng(7).random((64, BATCH)) + 0.1
    turn = cycle(list(fresh))

    def call() -> None:
        sample = client.sample_batch(library.TABLE, BATCH)
        client.update_priorities(library.TABLE, sample.info.key, next(turn))

    return repeated(call)


def _frames_in(stack: ExitStack, sizes: Sizes) -> Measure:
    client = _serve(stack, sizes.frames, FRAME_BYTES, sizes.frames)
    writer = library.structured_writer(stack, client, FIELD_NAMES)
    loop = single_insert.append_loop(writer, frame_transitions())
    loop(sizes.frames * 6 // 5)
    return TimedLoop(loop)


def _frames_out(stack: ExitStack, sizes: Sizes) -> Measure:
    client = _serve(stack, sizes.frames, FRAME_BYTES, sizes.frames)
    in_chunks(partial(client.insert_batch, library.TABLE), frame_batch(64), sizes.frames)
    return repeated(lambda: client.sample_batch(library.TABLE, FRAME_BATCH))


def payload_loop(writer: Any, size: int) -> Loop:
    """Returns a loop that writes payloads with a writer of structured items."""
    pool = cycle(frames(size, 16))

    def loop(calls: int) -> None:
        for payload in islice(pool, calls):
            writer.append({"x": payload})

    return loop


def _payload_in(stack: ExitStack, sizes: Sizes, size: int) -> Measure:
    rows = sizes.rows(size)
    client = _serve(stack, rows, size, rows)
    loop = payload_loop(library.structured_writer(stack, client, ("x",)), size)
    loop(rows * 6 // 5)
    return TimedLoop(loop)


def _payload_out(stack: ExitStack, sizes: Sizes, size: int) -> Measure:
    rows = sizes.rows(size)
    client = _serve(stack, rows, size, rows)
    in_chunks(partial(client.insert_batch, library.TABLE), payload_rows(size, 64), rows)
    return repeated(lambda: client.sample_batch(library.TABLE, payload_batch(size)))


def actor(stack: ExitStack, address: str) -> Work:
    """A process that writes transitions one by one."""
    client = stack.enter_context(library.require().Client(address))
    writer = library.structured_writer(stack, client, FIELD_NAMES)
    loop = single_insert.append_loop(writer)
    loop(ACTOR_CHUNK)
    return Work(loop, ACTOR_CHUNK)


def _together(stack: ExitStack, sizes: Sizes) -> Together:
    address, client = library.serve(stack, sizes.transitions, TRANSITION_BYTES, stripes=ACTORS)
    # By a writer as the actors have it: all items of one structure can be stacked.
    loop = single_insert.append_loop(library.structured_writer(stack, client, FIELD_NAMES))
    loop(sizes.transitions)
    return Together(
        stack, actor, [(address,)] * ACTORS, lambda: client.sample_batch(library.TABLE, BATCH)
    )


def _insert(stack: ExitStack, sizes: Sizes) -> Measure:
    client = _filled(stack, sizes)
    pool = cycle([dict(zip(FIELD_NAMES, row, strict=True)) for row in islice(transitions(), POOL)])
    priorities = {library.TABLE: 1.0}
    return repeated(lambda: client.insert(next(pool), priorities))


def _items(stack: ExitStack, sizes: Sizes) -> Measure:
    client = _filled(stack, sizes)

    def call() -> None:
        for _ in client.sample(library.TABLE, BATCH, emit_timesteps=False):
            pass

    return repeated(call)


def _dataset(stack: ExitStack, sizes: Sizes) -> Measure:
    from shmreplay.dataset import NumpyTrajectoryDataset

    address, client = library.serve(stack, sizes.transitions, TRANSITION_BYTES)
    library.fill(client, sizes.transitions)
    dataset = NumpyTrajectoryDataset(
        address,
        library.TABLE,
        dtypes={name: dtype for name, (_, dtype) in FIELDS.items()},
        shapes=dict.fromkeys(FIELDS),
        max_in_flight_samples_per_worker=2 * BATCH,
    )
    batches = iter(dataset.batch(BATCH))
    return repeated(lambda: next(batches))


# --- a plain ring ---------------------------------------------------------------------------------


def _ring(stack: ExitStack, sizes: Sizes) -> Measure:
    loop = single_insert.ring_loop(TransitionRing(sizes.transitions))
    loop(sizes.transitions)
    return TimedLoop(loop)


def _full_ring(rows: int) -> TransitionRing:
    ring = TransitionRing(rows)
    for chunk in batch_chunks(rows, 1024):
        ring.add_batch(chunk)
    return ring


def _ring_batched(stack: ExitStack, sizes: Sizes) -> Measure:
    ring, batch = _full_ring(sizes.transitions), transition_batch(BATCH)
    return repeated(lambda: ring.add_batch(batch))


def _ring_sample(stack: ExitStack, sizes: Sizes) -> Measure:
    ring, rng = _full_ring(sizes.transitions), np.random.default_rng(2)
    return repeated(lambda: ring.sample_take(rng.integers(0, ring.size, BATCH)))


def _ring_prioritized(stack: ExitStack, sizes: Sizes) -> Measure:
    ring, rng = _full_ring(sizes.transitions), np.random.default_rng(2)
    weights = np.zeros(sizes.priorities)
    weights[: sizes.transitions] = 1.0
    tree = NumpySumTree(weights)
    turn = cycle(list(rng.random((64, BATCH)) + 0.1))

    def call() -> None:
        index, _ = tree.sample(rng, BATCH)
        ring.sample_take(index)
        tree.update(index, next(turn) ** EXPONENT)

    return repeated(call)


def _ring_payload_in(stack: ExitStack, sizes: Sizes, size: int) -> Measure:
    ring, pool = PayloadRing(sizes.rows(size), size), cycle(frames(size, 16))

    def loop(calls: int) -> None:
        for payload in islice(pool, calls):
            ring.add(payload)

    loop(sizes.rows(size))
    return TimedLoop(loop)


def _ring_payload_out(stack: ExitStack, sizes: Sizes, size: int) -> Measure:
    data = np.resize(payload_rows(size, 64)["x"], (sizes.rows(size), size))
    rng = np.random.default_rng(2)
    return repeated(lambda: data.take(rng.integers(0, len(data), payload_batch(size)), axis=0))


def _inserted(build: Callable[[ExitStack, Sizes], Together]) -> Any:
    return lambda stack, sizes: build(stack, sizes).inserted


def _sampled(build: Callable[[ExitStack, Sizes], Together]) -> Any:
    return lambda stack, sizes: build(stack, sizes).sampled


ROWS: tuple[Row, ...] = (
    Row("w1", STRUCTURED, _structured),
    Row("w1", RING, _ring),
    Row("w2", BATCHED, _batched),
    Row("w2", RING, _ring_batched),
    Row("w3", SAMPLE, _sample),
    Row("w3", RING, _ring_sample),
    Row("w4", PRIORITIZED, _prioritized),
    Row("w4", RING, _ring_prioritized),
    Row("w5-insert", STRUCTURED, _frames_in),
    Row("w5-sample", SAMPLE, _frames_out),
    *(
        Row(f"w6-insert-{size}", name, partial(build, size=size))
        for size in PAYLOADS.values()
        for name, build in ((STRUCTURED, _payload_in), (RING, _ring_payload_in))
    ),
    *(
        Row(f"w6-sample-{size}", name, partial(build, size=size))
        for size in PAYLOADS.values()
        for name, build in ((SAMPLE, _payload_out), (RING, _ring_payload_out))
    ),
    Row("w7-insert", TOGETHER, _inserted(_together)),
    Row("w7-sample", TOGETHER, _sampled(_together)),
    Row("w8-insert", INSERT, _insert),
    Row("w8-writer", WRITER, _writer),
    Row("w8-sample", ITEMS, _items),
    Row("w8-dataset", DATASET, _dataset),
)
