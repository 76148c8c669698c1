"""What every peer is asked: the workloads, and the code that measures them alike.

Imported in every peer's environment, so it needs numpy alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from bench.harness import Loop, Measure, Reading, TimedLoop
from bench.payloads import PAYLOADS, TRANSITION_BYTES, Fields, frames, transitions
from bench.processes import Crew, Work

TABLE = "replay"
BATCH = 256
FRAME_SHAPE = (84, 84, 4)
FRAME_BATCH = 32
FRAME_BYTES = 2 * 84 * 84 * 4 + 4 + 4 + 1
EXPONENT = 0.6
ACTORS = 2
FIELD_NAMES = ("obs", "next_obs", "action", "reward", "done")


@dataclass(frozen=True)
class Case:
    """A workload.

    Attributes:
        title: As the report names it.
        items: Items that one call handles.
        bytes_per_item: Payload of an item in bytes.
    """

    title: str
    items: int
    bytes_per_item: int


def payload_batch(size: int) -> int:
    """Items of this size in a batch that is sampled."""
    return BATCH if size < 400_000 else 32


CASES: dict[str, Case] = {
    "w1": Case("W1 insert one transition", 1, TRANSITION_BYTES),
    "w2": Case("W2 insert 256 transitions at once", BATCH, TRANSITION_BYTES),
    "w3": Case("W3 sample 256, uniformly", BATCH, TRANSITION_BYTES),
    "w4": Case("W4 sample 256 by priority, set their priorities", BATCH, TRANSITION_BYTES),
    "w5-insert": Case("W5 insert a transition of frames, 84x84x4", 1, FRAME_BYTES),
    "w5-sample": Case("W5 sample 32 transitions of frames", FRAME_BATCH, FRAME_BYTES),
    **{
        f"w6-insert-{size}": Case(f"W6 insert a payload of {label}", 1, size)
        for label, size in PAYLOADS.items()
    },
    **{
        f"w6-sample-{size}": Case(
            f"W6 sample {payload_batch(size)} payloads of {label}", payload_batch(size), size
        )
        for label, size in PAYLOADS.items()
    },
    "w7-insert": Case(
        "W7 two actors and a learner in processes: inserted, one a call", 1, TRANSITION_BYTES
    ),
    "w7-sample": Case(
        "W7 two actors and a learner in processes: sampled, 256 a call", BATCH, TRANSITION_BYTES
    ),
    "w8-insert": Case("W8 Client.insert", 1, TRANSITION_BYTES),
    "w8-writer": Case("W8 TrajectoryWriter, append + create_item", 1, TRANSITION_BYTES),
    "w8-sample": Case("W8 Client.sample, a generator of 256", BATCH, TRANSITION_BYTES),
    "w8-dataset": Case("W8 TrajectoryDataset, batches of 256", BATCH, TRANSITION_BYTES),
}


@dataclass(frozen=True)
class Sizes:
    """How large the buffers are.

    Attributes:
        transitions: Items of W1 to W4, W7 and W8.
        slow_transitions: What is filled where filling takes long; a smaller buffer lies more in
            the caches, which favours the one that it is allowed.
        priorities: Capacity in W4, of which `transitions` are filled.
        frames: Items of W5.
        checkpoint: Items of 40 kB in a checkpoint.
        payload_bytes: Of all items of W6.
    """

    transitions: int = 200_000
    slow_transitions: int = 20_000
    priorities: int = 1_000_000
    frames: int = 6_000
    checkpoint: int = 5_000
    payload_bytes: int = 200_000_000

    def rows(self, size: int) -> int:
        """Items of W6, of `size` bytes."""
        return max(128, min(100_000, self.payload_bytes // size))


QUICK_SIZES = Sizes(8_000, 2_000, 20_000, 400, 300, 20_000_000)

Prepare = Callable[[ExitStack, Sizes], Measure]
"""Builds one row in its own process; returns what measures it."""


CLIENTS = (1, 4)
CHECKPOINT_BYTES = 40_000
REMOTE_CHUNK = 256
"""Items that a remote client confirms together."""


def remote_chunk(size: int) -> int:
    """The same of this size: as many are on their way at most."""
    return max(1, min(REMOTE_CHUNK, 4_000_000 // size))


def remote_batch(size: int) -> int:
    """Items of this size in a batch that is sampled over a socket: about 400 kB."""
    return max(1, min(BATCH, 400_000 // size))


REMOTE_CASES: dict[str, Case] = {
    **{
        f"insert-{size}-{clients}": Case(
            f"{clients} remote client{'s' * (clients > 1)}: insert payloads of {label}", 1, size
        )
        for label, size in PAYLOADS.items()
        for clients in CLIENTS
    },
    **{
        f"sample-{size}-{clients}": Case(
            f"{clients} remote client{'s' * (clients > 1)}: sample payloads of {label}",
            remote_batch(size),
            size,
        )
        for label, size in PAYLOADS.items()
        for clients in CLIENTS
    },
    "checkpoint-save": Case("a checkpoint of all items, written", 1, CHECKPOINT_BYTES),
    "checkpoint-again": Case("the next one, a tenth of the items new", 1, CHECKPOINT_BYTES),
    "checkpoint-restore": Case("a server started from the checkpoint", 1, CHECKPOINT_BYTES),
}
"""The cases of bench/peers_remote.py. A call of a checkpoint's figure is an item of it."""


@dataclass(frozen=True)
class Row:
    """One contender in one workload.

    Attributes:
        case: Key of `CASES` or `REMOTE_CASES`.
        name: The row's label.
        prepare: Builds it.
    """

    case: str
    name: str
    prepare: Prepare


def repeated(call: Callable[[], Any]) -> Measure:
    """Measures one call, made again and again."""

    def loop(calls: int) -> None:
        for _ in range(calls):
            call()

    return TimedLoop(loop)


def by_item(call: Callable[[], Any], items: int) -> Measure:
    """Measures a call that handles so many items, and counts the items."""
    timed = repeated(call)

    def measure(seconds: float) -> Reading:
        reading = timed(seconds)
        return Reading(reading.calls * items, reading.seconds)

    return measure


def by_item_after(prepare: Callable[[], Any], call: Callable[[], Any], items: int) -> Measure:
    """The same, of calls before each of which there is something to prepare, which is not timed."""

    def measure(seconds: float) -> Reading:
        handled, spent = 0, 0.0
        while spent < seconds:
            prepare()
            start = time.perf_counter()
            call()
            spent += time.perf_counter() - start
            handled += items
        return Reading(handled, spent)

    return measure


def each_transition(
    add: Callable[..., Any], fill: int, pool: Iterator[Any] | None = None
) -> Measure:
    """Measures `add(obs, next_obs, action, reward, done)`, after so many calls to fill a buffer."""
    loop = _transition_loop(add, transitions() if pool is None else pool)
    loop(fill)
    return TimedLoop(loop)


def adding_work(add: Callable[..., Any], chunk: int) -> Work:
    """What an actor does that calls `add(obs, next_obs, action, reward, done)`, a chunk at once."""
    loop = _transition_loop(add, transitions())
    loop(chunk)
    return Work(loop, chunk)


def _transition_loop(add: Callable[..., Any], pool: Iterator[Any]) -> Loop:
    def loop(calls: int) -> None:
        for obs, next_obs, action, reward, done in islice(pool, calls):
            add(obs, next_obs, action, reward, done)

    return loop


def each_payload(add: Callable[[Any], Any], size: int) -> Measure:
    """Measures `add(payload)` of payloads of so many bytes."""
    pool = cycle(frames(size, 16))

    def loop(calls: int) -> None:
        for payload in islice(pool, calls):
            add(payload)

    return TimedLoop(loop)


def rows_of_peer(
    names: Mapping[str, str],
    cases: Mapping[str, Prepare],
    frames_case: Callable[..., Measure],
    payloads_case: Callable[..., Measure],
) -> tuple[Row, ...]:
    """The rows of a library that stores transitions.

    Args:
        names: What a row is called where that differs from `names['']`, by workload.
        cases: What it does in the workloads w1 to w4.
        frames_case: The same for w5, given `sampling`.
        payloads_case: The same for w6, given `size` and `sampling`.
    """
    usual = names[""]
    return (
        *(Row(work, names.get(work, usual), case) for work, case in cases.items()),
        Row("w5-insert", usual, partial(frames_case, sampling=False)),
        Row("w5-sample", usual, partial(frames_case, sampling=True)),
        *(
            Row(f"w6-{what}-{size}", usual, partial(payloads_case, size=size, sampling=sampling))
            for size in PAYLOADS.values()
            for what, sampling in (("insert", False), ("sample", True))
        ),
    )


def frame_transitions(count: int = 16) -> Iterator[Any]:
    """Returns transitions with frames of random bytes, for ever."""
    rng = np.random.default_rng(5)
    stacks = [rng.integers(0, 256, FRAME_SHAPE, dtype=np.uint8) for _ in range(count + 1)]
    return cycle(
        [(stacks[i], stacks[i + 1], np.int32(i % 4), np.float32(0.5), False) for i in range(count)]
    )


def frame_batch(rows: int) -> Fields:
    """Returns transitions with frames as arrays with a leading axis."""
    found = list(islice(frame_transitions(), rows))
    dtypes = (np.uint8, np.uint8, np.int32, np.float32, np.bool_)
    return {
        name: np.array([row[i] for row in found], dtype=dtype)
        for i, (name, dtype) in enumerate(zip(FIELD_NAMES, dtypes, strict=True))
    }


def payload_rows(size: int, rows: int) -> Fields:
    """Returns payloads of random bytes with a leading axis, as the field `x`."""
    rng = np.random.default_rng(size)
    return {"x": rng.integers(0, 256, (rows, size), dtype=np.uint8)}


def in_chunks(insert: Callable[[Fields], Any], batch: Fields, total: int) -> None:
    """Calls `insert` with parts of `batch` until `total` items are in."""
    rows = len(next(iter(batch.values())))
    for first in range(0, total, rows):
        count = min(rows, total - first)
        insert(batch if count == rows else {name: col[:count] for name, col in batch.items()})


class Together:
    """Actors in processes and a learner here, all at work in the same time."""

    def __init__(
        self,
        stack: ExitStack,
        actor: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        learn: Callable[[], Any],
    ) -> None:
        """Starts the actors.

        Args:
            stack: Ends them.
            actor: Prepares the work of an actor; see `bench.processes.Prepare`.
            arguments: Of each actor.
            learn: Samples a batch.
        """
        self._actors = Crew(stack, actor, arguments)
        self._learner = repeated(learn)

    def measure(self, seconds: float) -> tuple[Reading, Reading]:
        """Returns what the actors inserted (calls are items), and the learner's batches."""
        self._actors.start(seconds)
        learned = self._learner(seconds)
        return Reading(self._actors.results(seconds), seconds), learned

    def inserted(self, seconds: float) -> Reading:
        """Measures all, returns what was inserted."""
        return self.measure(seconds)[0]

    def sampled(self, seconds: float) -> Reading:
        """Measures all, returns what was sampled."""
        return self.measure(seconds)[1]
