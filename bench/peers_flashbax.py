"""flashbax's rows in the workloads of bench/peers.py: numpy in and numpy out, as a host has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from bench.harness import Measure
from bench.payloads import Fields, transition_batch
from bench.peers_cases import (
    BATCH,
    EXPONENT,
    FIELD_NAMES,
    FRAME_BATCH,
    Row,
    Sizes,
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

NAME = "flashbax item buffer, jitted"
PRIORITIZED = "flashbax prioritised item buffer, jitted"


class Buffer:
    """A buffer with its state, which every call replaces, and with its functions compiled."""

    def __init__(self, rows: int, batch_size: int, example: Fields, exponent: float | None = None):
        """Makes an empty buffer for items like the first of `example`, and fills one item in."""
        import flashbax
        import jax

        self._jax = jax
        options: dict[str, Any] = {
            "max_length": rows,
            "min_length": 1,
            "sample_batch_size": batch_size,
        }
        make: Callable[..., Any] = flashbax.make_item_buffer
        if exponent is not None:
            make = partial(flashbax.make_prioritised_item_buffer, priority_exponent=exponent)
        one, many = make(**options), make(**options, add_batches=True)
        self._add = jax.jit(one.add, donate_argnums=0)
        self._extend = jax.jit(many.add, donate_argnums=0)
        self._sample = jax.jit(one.sample)
        self._key = jax.random.key(0)
        self._split = jax.jit(jax.random.split)
        if exponent is not None:
            self._set = jax.jit(one.set_priorities, donate_argnums=0)
        self.state = one.init({name: column[0] for name, column in example.items()})

    def add(self, item: Any) -> None:
        """Adds one item."""
        self.state = self._add(self.state, item)
        self._jax.block_until_ready(self.state.current_index)

    def extend(self, batch: Any) -> None:
        """Adds items with a leading axis."""
        self.state = self._extend(self.state, batch)
        self._jax.block_until_ready(self.state.current_index)

    def sample(self) -> Any:
        """Draws a batch; its fields as numpy arrays."""
        self._key, key = self._split(self._key)
        return self._jax.tree.map(np.asarray, self._sample(self.state, key))

    def sample_and_set(self, priorities: Any) -> None:
        """Draws a batch by priority, and sets the priorities of what it drew."""
        sample = self.sample()
        self.state = self._set(self.state, sample.indices, priorities)
        self._jax.block_until_ready(self.state.current_index)


def _transitions(sizes: Sizes, capacity: int, exponent: float | None = None) -> Buffer:
    buffer = Buffer(capacity, BATCH, transition_batch(1), exponent)
    in_chunks(buffer.extend, transition_batch(1000), sizes.transitions)
    return buffer


def _adder(buffer: Buffer) -> Any:
    def add(*fields: Any) -> None:
        buffer.add(dict(zip(FIELD_NAMES, fields, strict=True)))

    return add


def _insert(stack: ExitStack, sizes: Sizes) -> Measure:
    return each_transition(_adder(_transitions(sizes, sizes.transitions)), 64)


def _batched(stack: ExitStack, sizes: Sizes) -> Measure:
    buffer, batch = _transitions(sizes, sizes.transitions), transition_batch(BATCH)
    return repeated(lambda: buffer.extend(batch))


def _sample(stack: ExitStack, sizes: Sizes) -> Measure:
    return repeated(_transitions(sizes, sizes.transitions).sample)


def _prioritized(stack: ExitStack, sizes: Sizes) -> Measure:
    buffer = _transitions(sizes, sizes.priorities, EXPONENT)
    turn = cycle(list(np.random.default_rng(7).random((64, BATCH), dtype=np.float32) + 0.1))
    return repeated(lambda: buffer.sample_and_set(next(turn)))


def _frames(stack: ExitStack, sizes: Sizes, sampling: bool) -> Measure:
    batch = frame_batch(50)
    buffer = Buffer(sizes.frames, FRAME_BATCH, batch)
    in_chunks(buffer.extend, batch, sizes.frames)
    if sampling:
        return repeated(buffer.sample)
    return each_transition(_adder(buffer), 16, frame_transitions())


def _payloads(stack: ExitStack, sizes: Sizes, size: int, sampling: bool) -> Measure:
    rows, batch = sizes.rows(size), payload_rows(size, 50)
    buffer = Buffer(rows, payload_batch(size), batch)
    in_chunks(buffer.extend, batch, rows)
    if sampling:
        return repeated(buffer.sample)
    return each_payload(lambda payload: buffer.add({"x": payload}), size)


ROWS: tuple[Row, ...] = rows_of_peer(
    {"": NAME, "w4": PRIORITIZED},
    {"w1": _insert, "w2": _batched, "w3": _sample, "w4": _prioritized},
    _frames,
    _payloads,
)
