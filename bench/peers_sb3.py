"""stable-baselines3's rows in the workloads of bench/peers.py."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from bench.harness import Measure
from bench.payloads import PAYLOADS, frames, transition_batch
from bench.peers_cases import (
    BATCH,
    FRAME_BATCH,
    FRAME_SHAPE,
    Row,
    Sizes,
    each_transition,
    frame_transitions,
    payload_batch,
    repeated,
)

NAME = "stable-baselines3"
NO_PROCESSES = "its buffer is of one process"
NO_PRIORITIES = "it has no priorities"


def _buffer(rows: int, shape: tuple[int, ...], dtype: Any, environments: int = 1) -> Any:
    import torch
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    torch.set_num_threads(1)  # The better setting of two on two cores.
    low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
    return ReplayBuffer(
        rows,
        spaces.Box(low, high, shape, dtype),
        spaces.Discrete(4),
        device="cpu",
        n_envs=environments,
        handle_timeout_termination=False,
    )


def _adder(buffer: Any) -> Any:
    infos: list[dict[str, Any]] = [{}]

    def add(obs: Any, next_obs: Any, action: Any, reward: Any, done: Any) -> None:
        buffer.add(obs, next_obs, np.array([action]), np.array([reward]), np.array([done]), infos)

    return add


def _insert(stack: ExitStack, sizes: Sizes) -> Measure:
    return each_transition(_adder(_buffer(sizes.transitions, (84,), np.float32)), sizes.transitions)


def _filled(sizes: Sizes) -> tuple[Any, Any]:
    """Returns a full buffer of 256 environments, and what writes a step of all of them."""
    buffer = _buffer(sizes.transitions, (84,), np.float32, BATCH)
    batch = transition_batch(BATCH)
    done = batch["done"].astype(np.float32)
    infos: list[dict[str, Any]] = [{} for _ in range(BATCH)]

    def add() -> None:
        buffer.add(
            batch["obs"], batch["next_obs"], batch["action"] % 4, batch["reward"], done, infos
        )

    for _ in range(sizes.transitions // BATCH + 1):
        add()
    return buffer, add


def _batched(stack: ExitStack, sizes: Sizes) -> Measure:
    return repeated(_filled(sizes)[1])


def _sample(stack: ExitStack, sizes: Sizes) -> Measure:
    buffer = _buffer(sizes.transitions, (84,), np.float32)
    each_transition(_adder(buffer), sizes.transitions)
    return repeated(lambda: buffer.sample(BATCH))


def _frames(stack: ExitStack, sizes: Sizes, sampling: bool) -> Measure:
    buffer = _buffer(sizes.frames, FRAME_SHAPE, np.uint8)
    inserting = each_transition(_adder(buffer), sizes.frames, frame_transitions())
    return repeated(lambda: buffer.sample(FRAME_BATCH)) if sampling else inserting


def _payloads(stack: ExitStack, sizes: Sizes, size: int, sampling: bool) -> Measure:
    """A payload is an observation of half its size and the next one: it has no other place."""
    half, rows = size // 2, sizes.rows(size)
    buffer = _buffer(rows, (half,), np.uint8)
    pool = cycle([(p[:half], p[half:], 0, 0.0, False) for p in frames(size, 16)])
    inserting = each_transition(_adder(buffer), rows, pool)
    return repeated(lambda: buffer.sample(payload_batch(size))) if sampling else inserting


ROWS: tuple[Row, ...] = (
    Row("w1", NAME, _insert),
    Row("w2", f"{NAME}, a step of 256 environments", _batched),
    Row("w3", NAME, _sample),
    Row("w5-insert", NAME, partial(_frames, sampling=False)),
    Row("w5-sample", NAME, partial(_frames, sampling=True)),
    *(
        Row(f"w6-{what}-{size}", NAME, partial(_payloads, size=size, sampling=what == "sample"))
        for size in PAYLOADS.values()
        for what in ("insert", "sample")
    ),
)
