"""cpprb's rows in the workloads of bench/peers.py."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from bench.harness import Measure
from bench.payloads import FIELDS, transition_batch
from bench.peers_cases import (
    ACTORS,
    BATCH,
    EXPONENT,
    FRAME_BATCH,
    FRAME_SHAPE,
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
from bench.processes import Work, context

NAME = "cpprb"
SHARED = "cpprb MPReplayBuffer"
ACTOR_CHUNK = 16


def _fields(obs_shape: tuple[int, ...] = (84,), obs_dtype: Any = np.float32) -> Any:
    found = {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in FIELDS.items()}
    for name in ("obs", "next_obs"):
        found[name] = {"shape": obs_shape, "dtype": obs_dtype}
    return found


def _buffer(rows: int, fields: Any) -> Any:
    from cpprb import ReplayBuffer

    return ReplayBuffer(rows, fields)


def _adder(buffer: Any) -> Any:
    def add(obs: Any, next_obs: Any, action: Any, reward: Any, done: Any) -> None:
        buffer.add(obs=obs, next_obs=next_obs, action=action, reward=reward, done=done)

    return add


def _insert(stack: ExitStack, sizes: Sizes) -> Measure:
    buffer = _buffer(sizes.transitions, _fields())
    in_chunks(lambda batch: buffer.add(**batch), transition_batch(1024), sizes.transitions)
    return each_transition(_adder(buffer), 64)


def _filled(sizes: Sizes) -> Any:
    buffer = _buffer(sizes.transitions, _fields())
    in_chunks(lambda batch: buffer.add(**batch), transition_batch(1024), sizes.transitions)
    return buffer


def _batched(stack: ExitStack, sizes: Sizes) -> Measure:
    buffer, batch = _filled(sizes), transition_batch(BATCH)
    return repeated(lambda: buffer.add(**batch))


def _sample(stack: ExitStack, sizes: Sizes) -> Measure:
    buffer = _filled(sizes)
    return repeated(lambda: buffer.sample(BATCH))


def _prioritized(stack: ExitStack, sizes: Sizes) -> Measure:
    from cpprb import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(sizes.priorities, _fields(), alpha=EXPONENT)
    in_chunks(lambda batch: buffer.add(**batch), transition_batch(1024), sizes.transitions)
    turn = cycle(list(np.random.default_rng(7).random((64, BATCH)) + 0.1))

    def call() -> None:
        sample = buffer.sample(BATCH, beta=0.4)
        buffer.update_priorities(sample["indexes"], next(turn))

    return repeated(call)


def _frames(stack: ExitStack, sizes: Sizes, sampling: bool) -> Measure:
    buffer = _buffer(sizes.frames, _fields(FRAME_SHAPE, np.uint8))
    in_chunks(lambda batch: buffer.add(**batch), frame_batch(64), sizes.frames)
    if sampling:
        return repeated(lambda: buffer.sample(FRAME_BATCH))
    return each_transition(_adder(buffer), 64, frame_transitions())


def _payloads(stack: ExitStack, sizes: Sizes, size: int, sampling: bool) -> Measure:
    rows = sizes.rows(size)
    buffer = _buffer(rows, {"x": {"shape": size, "dtype": np.uint8}})
    in_chunks(lambda batch: buffer.add(**batch), payload_rows(size, 64), rows)
    if sampling:
        return repeated(lambda: buffer.sample(payload_batch(size)))
    return each_payload(lambda payload: buffer.add(x=payload), size)


def actor(stack: ExitStack, buffer: Any) -> Work:
    """A process that adds transitions one by one."""
    return adding_work(_adder(buffer), ACTOR_CHUNK)


def _together(stack: ExitStack, sizes: Sizes, inserting: bool) -> Measure:
    from cpprb import MPReplayBuffer

    buffer = MPReplayBuffer(sizes.transitions, _fields(), ctx=context(), backend="SharedMemory")
    in_chunks(lambda batch: buffer.add(**batch), transition_batch(1024), sizes.transitions)
    together = Together(stack, actor, [(buffer,)] * ACTORS, lambda: buffer.sample(BATCH))
    return together.inserted if inserting else together.sampled


ROWS: tuple[Row, ...] = (
    *rows_of_peer(
        {"": NAME},
        {"w1": _insert, "w2": _batched, "w3": _sample, "w4": _prioritized},
        _frames,
        _payloads,
    ),
    Row("w7-insert", SHARED, partial(_together, inserting=True)),
    Row("w7-sample", SHARED, partial(_together, inserting=False)),
)
