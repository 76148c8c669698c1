"""torchrl's rows in the workloads of bench/peers.py."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any

from bench.harness import Measure
from bench.payloads import Fields, transition_batch
from bench.peers_cases import (
    ACTORS,
    BATCH,
    EXPONENT,
    FRAME_BATCH,
    Row,
    Sizes,
    Together,
    adding_work,
    each_payload,
    each_transition,
    frame_batch,
    frame_transitions,
    in_chunks,
    payload_batch,
    payload_rows,
    repeated,
    rows_of_peer,
)
from bench.processes import Work

NAME = "torchrl LazyTensorStorage"
PRIORITIZED = "torchrl PrioritizedSampler"
SHARED = "torchrl LazyMemmapStorage, shared"
ACTOR_CHUNK = 4


def _batch_of(batch: Fields) -> Any:
    """Returns a batch as the tensordict that its users hand over; the arrays are not copied."""
    import torch
    from tensordict import TensorDict

    rows = len(next(iter(batch.values())))
    return TensorDict({name: torch.from_numpy(col) for name, col in batch.items()}, [rows])


def _buffer(rows: int, batch_size: int, sampler: Any = None) -> Any:
    import torch
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    torch.set_num_threads(1)  # Two threads stall on two cores, now and then for long.
    return ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=batch_size, sampler=sampler)


def _adder(buffer: Any) -> Any:
    import torch
    from tensordict import TensorDict

    def add(obs: Any, next_obs: Any, action: Any, reward: Any, done: Any) -> None:
        buffer.add(
            TensorDict(
                {
                    "obs": torch.from_numpy(obs),
                    "next_obs": torch.from_numpy(next_obs),
                    "action": torch.tensor(action, dtype=torch.int32),
                    "reward": torch.tensor(reward, dtype=torch.float32),
                    "done": torch.tensor(done),
                },
                [],
            )
        )

    return add


def _filled(sizes: Sizes, sampler: Any = None) -> Any:
    buffer = _buffer(sizes.transitions, BATCH, sampler)
    _fill(buffer, transition_batch(1024), sizes.transitions)
    return buffer


def _fill(buffer: Any, batch: Fields, total: int) -> None:
    in_chunks(lambda part: buffer.extend(_batch_of(part)), batch, total)


def _insert(stack: ExitStack, sizes: Sizes) -> Measure:
    return each_transition(_adder(_filled(sizes)), 64)


def _batched(stack: ExitStack, sizes: Sizes) -> Measure:
    buffer, batch = _filled(sizes), transition_batch(BATCH)
    return repeated(lambda: buffer.extend(_batch_of(batch)))


def _sample(stack: ExitStack, sizes: Sizes) -> Measure:
    return repeated(_filled(sizes).sample)


def _prioritized(stack: ExitStack, sizes: Sizes) -> Measure:
    import torch
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    sampler = PrioritizedSampler(sizes.priorities, alpha=EXPONENT, beta=0.4)
    buffer = _buffer(sizes.priorities, BATCH, sampler)
    _fill(buffer, transition_batch(1024), sizes.transitions)
    turn = cycle(list(torch.rand(64, BATCH) + 0.1))

    def call() -> None:
        _, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], next(turn))

    return repeated(call)


def _frames(stack: ExitStack, sizes: Sizes, sampling: bool) -> Measure:
    buffer = _buffer(sizes.frames, FRAME_BATCH)
    _fill(buffer, frame_batch(64), sizes.frames)
    if sampling:
        return repeated(buffer.sample)
    return each_transition(_adder(buffer), 16, frame_transitions())


def _payloads(stack: ExitStack, sizes: Sizes, size: int, sampling: bool) -> Measure:
    import torch
    from tensordict import TensorDict

    rows = sizes.rows(size)
    buffer = _buffer(rows, payload_batch(size))
    _fill(buffer, payload_rows(size, 64), rows)
    if sampling:
        return repeated(buffer.sample)
    return each_payload(
        lambda payload: buffer.add(TensorDict({"x": torch.from_numpy(payload)}, [])), size
    )


def actor(stack: ExitStack, buffer: Any) -> Work:
    """A process that adds transitions one by one."""
    return adding_work(_adder(buffer), ACTOR_CHUNK)


def _together(stack: ExitStack, sizes: Sizes, inserting: bool) -> Measure:
    import torch
    from torchrl.data import LazyMemmapStorage, ReplayBuffer

    torch.set_num_threads(1)
    scratch = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-"))
    storage = LazyMemmapStorage(sizes.transitions, scratch_dir=scratch)
    buffer = ReplayBuffer(storage=storage, batch_size=BATCH, shared=True)
    _fill(buffer, transition_batch(1024), sizes.transitions)
    together = Together(stack, actor, [(buffer,)] * ACTORS, buffer.sample)
    return together.inserted if inserting else together.sampled


ROWS: tuple[Row, ...] = (
    *rows_of_peer(
        {"": NAME, "w4": PRIORITIZED},
        {"w1": _insert, "w2": _batched, "w3": _sample, "w4": _prioritized},
        _frames,
        _payloads,
    ),
    Row("w7-insert", SHARED, partial(_together, inserting=True)),
    Row("w7-sample", SHARED, partial(_together, inserting=False)),
)
