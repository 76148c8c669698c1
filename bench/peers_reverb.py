"""dm-reverb's rows in the workloads of bench/peers.py.

With its server in this process, where Reverb hands items over without gRPC, its fastest way; and
with the server in another, over gRPC on the loopback.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from bench.harness import Measure, TimedLoop
from bench.payloads import FIELDS, PAYLOADS, frames, transitions
from bench.peers_cases import (
    ACTORS,
    BATCH,
    EXPONENT,
    FIELD_NAMES,
    FRAME_BATCH,
    FRAME_SHAPE,
    TABLE,
    Row,
    Sizes,
    Together,
    frame_transitions,
    payload_batch,
    repeated,
)
from bench.processes import Work

Specs = dict[str, tuple[tuple[int, ...], Any]]

NEAR = "dm-reverb in-process"
FAR = "dm-reverb gRPC"
WAYS = (NEAR, FAR)
FLUSH = 256
"""Items between two calls of `flush`: they are confirmed together."""
ACTOR_CHUNK = 64
READY_SECONDS = 120.0
WORKERS = 2
IN_FLIGHT = 2048

TRANSITION: Specs = {name: (shape, dtype.type) for name, (shape, dtype) in FIELDS.items()}
FRAMES: Specs = {**TRANSITION, "obs": (FRAME_SHAPE, np.uint8), "next_obs": (FRAME_SHAPE, np.uint8)}


def serve(rows: int, specs: Specs, exponent: float | None, checkpointer: Any = None) -> Any:
    """Returns a server, in this process, with one table."""
    import reverb
    import tensorflow as tf

    uniform = exponent is None
    table = reverb.Table(
        TABLE,
        reverb.selectors.Uniform() if uniform else reverb.selectors.Prioritized(exponent),
        reverb.selectors.Fifo(),
        rows,
        reverb.rate_limiters.MinSize(1),
        signature={
            name: tf.TensorSpec((1, *shape), dtype) for name, (shape, dtype) in specs.items()
        },
    )
    return reverb.Server([table], checkpointer=checkpointer)


def serve_elsewhere(connection: Any, rows: int, specs: Specs, exponent: float | None) -> None:
    """Body of the server's process: says its port, and ends when it is told to."""
    server = serve(rows, specs, exponent)
    connection.send(server.port)
    connection.recv()
    server.stop()


def address_of(
    stack: ExitStack, way: str, rows: int, specs: Specs, exponent: float | None = None
) -> str:
    """Serves a table in the one way or the other; returns the server's address."""
    if way == NEAR:
        server = serve(rows, specs, exponent)
        stack.callback(server.stop)
        return f"localhost:{server.port}"
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=serve_elsewhere, args=(theirs, rows, specs, exponent))
    process.start()
    stack.callback(process.join)
    stack.callback(ours.send, None)
    if not ours.poll(READY_SECONDS):
        raise RuntimeError(f"the server's process is not ready after {READY_SECONDS:g} s")
    return f"localhost:{ours.recv()}"


def _client(
    stack: ExitStack, way: str, rows: int, specs: Specs, exponent: float | None = None
) -> Any:
    import reverb

    return reverb.Client(address_of(stack, way, rows, specs, exponent))


def _structured(client: Any, specs: Specs) -> Any:
    """Returns a writer that makes an item of every step."""
    from reverb import structured_writer

    step = structured_writer.create_reference_step(dict.fromkeys(specs))
    pattern = {name: step[name][-1:] for name in specs}
    config = structured_writer.create_config(pattern=pattern, table=TABLE, conditions=[])
    return client.structured_writer([config])


def steps_loop(specs: Specs, pool: Iterator[Any], client: Any) -> Callable[[int], None]:
    """Returns a loop that appends steps from a pool of tuples with a StructuredWriter."""
    writer, names = _structured(client, specs), tuple(specs)

    def loop(calls: int) -> None:
        for i, row in enumerate(islice(pool, calls)):
            writer.append(dict(zip(names, row, strict=True)))
            if i % FLUSH == FLUSH - 1:
                writer.flush()
        writer.flush()

    return loop


def batches_of(address: str, size: int) -> Iterator[Any]:
    """Returns stacked batches as numpy, from the dataset at its best setting on two cores."""
    import reverb

    dataset = reverb.TrajectoryDataset.from_table_signature(
        server_address=address,
        table=TABLE,
        max_in_flight_samples_per_worker=IN_FLIGHT if size >= BATCH else 8 * size,
        num_workers_per_iterator=WORKERS,
    )
    found: Iterator[Any] = dataset.batch(size).prefetch(2).as_numpy_iterator()
    return found


def _typed(pool: Iterator[Any]) -> Iterator[Any]:
    """Turns the bool of a transition into the dtype of its column."""
    return ((*row[:-1], np.bool_(row[-1])) for row in pool)


def _insert(stack: ExitStack, sizes: Sizes, way: str) -> Measure:
    client = _client(stack, way, sizes.transitions, TRANSITION)
    loop = steps_loop(TRANSITION, _typed(transitions()), client)
    loop(1000)
    return TimedLoop(loop)


def _filled(stack: ExitStack, sizes: Sizes, way: str, exponent: float | None = None) -> Any:
    client = _client(stack, way, sizes.transitions, TRANSITION, exponent)
    steps_loop(TRANSITION, _typed(transitions()), client)(sizes.slow_transitions)
    return client


def _sample(stack: ExitStack, sizes: Sizes, way: str) -> Measure:
    batches = batches_of(_filled(stack, sizes, way).server_address, BATCH)
    return repeated(lambda: next(batches))


def _prioritized(stack: ExitStack, sizes: Sizes, way: str) -> Measure:
    client = _filled(stack, sizes, way, EXPONENT)
    batches = batches_of(client.server_address, BATCH)
    turn = cycle(np.random.default_rng(7).random((64, BATCH)) + 0.1)

    def call() -> None:
        keys = next(batches).info.key
        client.mutate_priorities(
            TABLE, updates=dict(zip(keys.tolist(), next(turn).tolist(), strict=True))
        )

    return repeated(call)


def _frames(stack: ExitStack, sizes: Sizes, way: str, sampling: bool) -> Measure:
    client = _client(stack, way, sizes.frames, FRAMES)
    loop = steps_loop(FRAMES, _typed(frame_transitions()), client)
    loop(min(2000, sizes.frames))
    if not sampling:
        return TimedLoop(loop)
    batches = batches_of(client.server_address, FRAME_BATCH)
    return repeated(lambda: next(batches))


def _payloads(stack: ExitStack, sizes: Sizes, way: str, size: int, sampling: bool) -> Measure:
    rows = sizes.rows(size)
    specs: Specs = {"x": ((size,), np.uint8)}
    client = _client(stack, way, rows, specs)
    loop = steps_loop(specs, cycle([(payload,) for payload in frames(size, 16)]), client)
    loop(min(rows, sizes.slow_transitions))
    if not sampling:
        return TimedLoop(loop)
    batches = batches_of(client.server_address, payload_batch(size))
    return repeated(lambda: next(batches))


def actor(stack: ExitStack, address: str) -> Work:
    """A process that writes transitions one by one."""
    import reverb

    loop = steps_loop(TRANSITION, _typed(transitions()), reverb.Client(address))
    loop(ACTOR_CHUNK)
    return Work(loop, ACTOR_CHUNK)


def _together(stack: ExitStack, sizes: Sizes, inserting: bool) -> Measure:
    address = _filled(stack, sizes, FAR).server_address
    batches = batches_of(address, BATCH)
    together = Together(stack, actor, [(address,)] * ACTORS, lambda: next(batches))
    return together.inserted if inserting else together.sampled


def _client_insert(stack: ExitStack, sizes: Sizes, way: str) -> Measure:
    client = _client(stack, way, sizes.transitions, TRANSITION)
    pool = cycle(
        [
            {
                name: np.asarray(value)[np.newaxis]
                for name, value in zip(FIELD_NAMES, row, strict=True)
            }
            for row in islice(_typed(transitions()), 64)
        ]
    )
    priorities = {TABLE: 1.0}
    return repeated(lambda: client.insert(next(pool), priorities))


def _trajectory_writer(stack: ExitStack, sizes: Sizes, way: str) -> Measure:
    client = _client(stack, way, sizes.transitions, TRANSITION)
    writer = client.trajectory_writer(num_keep_alive_refs=1)
    stack.callback(writer.close)
    pool = _typed(transitions())

    def loop(calls: int) -> None:
        for i, row in enumerate(islice(pool, calls)):
            writer.append(dict(zip(FIELD_NAMES, row, strict=True)))
            history = writer.history
            trajectory = {name: history[name][-1:] for name in FIELD_NAMES}
            writer.create_item(TABLE, 1.0, trajectory)
            if i % FLUSH == FLUSH - 1:
                writer.flush()
        writer.flush()

    loop(1000)
    return TimedLoop(loop)


def _client_sample(stack: ExitStack, sizes: Sizes, way: str) -> Measure:
    client = _filled(stack, sizes, way)

    def call() -> None:
        for _ in client.sample(TABLE, BATCH, emit_timesteps=False):
            pass

    return repeated(call)


_BOTH: tuple[tuple[str, str, Callable[..., Measure]], ...] = (
    ("w1", " StructuredWriter", _insert),
    ("w3", " TrajectoryDataset", _sample),
    ("w4", " TrajectoryDataset + mutate_priorities", _prioritized),
    ("w5-insert", " StructuredWriter", partial(_frames, sampling=False)),
    ("w5-sample", " TrajectoryDataset", partial(_frames, sampling=True)),
    *(
        (f"w6-insert-{size}", " StructuredWriter", partial(_payloads, size=size, sampling=False))
        for size in PAYLOADS.values()
    ),
    *(
        (f"w6-sample-{size}", " TrajectoryDataset", partial(_payloads, size=size, sampling=True))
        for size in PAYLOADS.values()
    ),
    ("w8-insert", "", _client_insert),
    ("w8-writer", "", _trajectory_writer),
    ("w8-sample", "", _client_sample),
    ("w8-dataset", "", _sample),
)

ROWS: tuple[Row, ...] = (
    *(
        Row(case, way + what, partial(build, way=way))
        for case, what, build in _BOTH
        for way in WAYS
    ),
    Row("w7-insert", FAR, partial(_together, inserting=True)),
    Row("w7-sample", FAR, partial(_together, inserting=False)),
)
