"""What does it cost to write one transition?

append + five history slices + create_item, beside the same transition written into a numpy ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import library
from bench.baselines import BareMemcpy, TransitionRing
from bench.harness import Bench, Contender, Loop, Measure, TimedLoop
from bench.payloads import TRANSITION_BYTES, Transition, transitions

if TYPE_CHECKING:
    import shmreplay

NAME = "single_insert"
QUESTION = "What does it cost to write one transition?"
ITEMS = 200_000
CASE = "transition of 681 B, table of 200k"
RING = "numpy ring"
OURS = "shmreplay append + 5 slices + create_item"
OURS_IN_PLACE = "shmreplay next_step + 5 slices + create_item"
OURS_STRUCTURED = "shmreplay structured append, which makes the item"
OURS_APPEND = "shmreplay append alone"
OURS_INSERT = "shmreplay client.insert"
MEMCPY = "bare C memcpy"
FIELDS = ("obs", "next_obs", "action", "reward", "done")
POOL = 64
KEEP_ALIVE = 16


def writer_loop(writer: shmreplay.TrajectoryWriter) -> Loop:
    """Returns a loop that writes transitions; each step builds its dict and looks up history."""
    pool = transitions(POOL)

    def loop(calls: int) -> None:
        for obs, next_obs, action, reward, done in islice(pool, calls):
            writer.append(
                {
                    "obs": obs,
                    "next_obs": next_obs,
                    "action": action,
                    "reward": reward,
                    "done": done,
                }
            )
            history = writer.history
            writer.create_item(
                library.TABLE,
                1.0,
                {
                    "obs": history["obs"][-1:],
                    "next_obs": history["next_obs"][-1:],
                    "action": history["action"][-1:],
                    "reward": history["reward"][-1:],
                    "done": history["done"][-1:],
                },
            )

    return loop


def in_place_loop(writer: shmreplay.TrajectoryWriter) -> Loop:
    """Returns the same loop with the step written straight into shared memory."""
    pool = transitions(POOL)

    def loop(calls: int) -> None:
        for obs, next_obs, action, reward, done in islice(pool, calls):
            with writer.next_step() as step:
                step["obs"][...] = obs
                step["next_obs"][...] = next_obs
                step["action"][...] = action
                step["reward"][...] = reward
                step["done"][...] = done
            history = writer.history
            writer.create_item(
                library.TABLE,
                1.0,
                {
                    "obs": history["obs"][-1:],
                    "next_obs": history["next_obs"][-1:],
                    "action": history["action"][-1:],
                    "reward": history["reward"][-1:],
                    "done": history["done"][-1:],
                },
            )

    return loop


def append_loop(
    writer: shmreplay.TrajectoryWriter | shmreplay.StructuredWriter,
    steps: Iterator[Any] | None = None,
) -> Loop:
    """Returns a loop that appends steps, and leaves it to the writer to make items of them."""
    pool = transitions(POOL) if steps is None else steps

    def loop(calls: int) -> None:
        for obs, next_obs, action, reward, done in islice(pool, calls):
            writer.append(
                {
                    "obs": obs,
                    "next_obs": next_obs,
                    "action": action,
                    "reward": reward,
                    "done": done,
                }
            )

    return loop


def _writer(stack: ExitStack) -> tuple[shmreplay.Client, shmreplay.TrajectoryWriter]:
    """Serves a table; returns a client and a writer with one step written (so columns exist)."""
    _, client = library.serve(stack, ITEMS, TRANSITION_BYTES)
    writer = client.trajectory_writer(num_keep_alive_refs=KEEP_ALIVE)
    stack.callback(writer.close)
    append_loop(writer)(1)
    return client, writer


def _ours(stack: ExitStack) -> Measure:
    client, writer = _writer(stack)
    loop = writer_loop(writer)
    loop(ITEMS + ITEMS // 5)
    library.check_size(client, ITEMS)
    return TimedLoop(loop)


def _ours_in_place(stack: ExitStack) -> Measure:
    client, writer = _writer(stack)
    loop = in_place_loop(writer)
    loop(ITEMS + ITEMS // 5)
    library.check_size(client, ITEMS)
    return TimedLoop(loop)


def _ours_append(stack: ExitStack) -> Measure:
    _, writer = _writer(stack)
    loop = append_loop(writer)
    loop(ITEMS)
    return TimedLoop(loop)


def _ours_structured(stack: ExitStack) -> Measure:
    _, client = library.serve(stack, ITEMS, TRANSITION_BYTES)
    loop = append_loop(library.structured_writer(stack, client, FIELDS))
    loop(ITEMS + ITEMS // 5)
    library.check_size(client, ITEMS)
    return TimedLoop(loop)


def _ours_insert(stack: ExitStack) -> Measure:
    _, client = library.serve(stack, ITEMS, TRANSITION_BYTES)
    pool = transitions(POOL)
    priorities = {library.TABLE: 1.0}

    def loop(calls: int) -> None:
        for obs, next_obs, action, reward, done in islice(pool, calls):
            client.insert(
                {
                    "obs": obs,
                    "next_obs": next_obs,
                    "action": action,
                    "reward": reward,
                    "done": done,
                },
                priorities=priorities,
            )

    library.fill(client, ITEMS)
    library.check_size(client, ITEMS)
    return TimedLoop(loop)


def ring_loop(ring: TransitionRing) -> Loop:
    """Returns a loop that writes transitions into a numpy ring."""
    pool = transitions(POOL)

    def loop(calls: int) -> None:
        for obs, next_obs, action, reward, done in islice(pool, calls):
            ring.add(obs, next_obs, action, reward, done)

    return loop


def _ring(stack: ExitStack) -> Measure:
    loop = ring_loop(TransitionRing(ITEMS))
    loop(ITEMS)
    return TimedLoop(loop)


def packed(transition: Transition) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Returns the 681 bytes of a transition, one field after the other."""
    parts = [np.asarray(part).reshape(-1).view(np.uint8) for part in transition]
    return np.concatenate(parts)


def _memcpy(stack: ExitStack) -> Measure:
    copies = BareMemcpy(ITEMS, TRANSITION_BYTES, POOL)
    pool = transitions(POOL)
    for source in range(POOL):
        copies.set_source(source, packed(next(pool)))
    copies.run(ITEMS)
    return TimedLoop(copies.run)


def run(bench: Bench) -> None:
    """Measures this question."""
    bench.compare(
        NAME,
        CASE,
        [
            Contender(OURS, _ours, ours=True),
            Contender(RING, _ring),
            Contender(OURS_IN_PLACE, _ours_in_place, ours=True),
            Contender(OURS_STRUCTURED, _ours_structured, ours=True),
            Contender(OURS_APPEND, _ours_append, ours=True),
            Contender(OURS_INSERT, _ours_insert, ours=True),
            Contender(MEMCPY, _memcpy),
        ],
        bytes_per_item=TRANSITION_BYTES,
    )
