"""What the processes of a torture run share: tables, payloads, heartbeats and journals."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np

import shmreplay as reverb

# --- tables -------------------------------------------------------------------------------------

CHURN: Final = "churn"
WEIGHTED: Final = "weighted"
RANKED: Final = "ranked"
KEPT: Final = "kept"
QUEUE: Final = "queue"
BOUND: Final = "bound"
BULK: Final = "bulk"
NAMES: Final = (CHURN, WEIGHTED, RANKED, KEPT, QUEUE, BOUND, BULK)

EXPONENTS: Final = {WEIGHTED: 0.7, KEPT: 1.0, BULK: 0.5}
"""Of the tables that draw by priority."""

LENGTH: Final = 3
"""Steps that a trajectory has at most; in `CHURN`, exactly."""

LOAD_BYTES: Final[dict[str, tuple[int, ...]]] = {
    CHURN: (3000,),
    WEIGHTED: (60,),
    RANKED: (1, 40, 5000, 70_000),  # the last is longer than a block usually is
    KEPT: (60,),
    QUEUE: (500,),
    BOUND: (100,),
    BULK: (40,),
}
"""Sizes of the payload of a step, by table. Where there is one, items can be stacked."""


def make_tables(seed: int) -> list[reverb.Table]:
    """Small tables that evict all the time, one that keeps everything, and two with limiters."""
    select, limit = reverb.selectors, reverb.rate_limiters
    return [
        reverb.Table(
            CHURN, select.Uniform(), select.Fifo(), 8, limit.MinSize(1), seed=seed, stripes=2
        ),
        reverb.Table(
            WEIGHTED,
            select.Prioritized(EXPONENTS[WEIGHTED]),
            select.Fifo(),
            64,
            limit.MinSize(1),
            seed=seed,
            stripes=2,
        ),
        reverb.Table(RANKED, select.MaxHeap(), select.MinHeap(), 16, limit.MinSize(1), seed=seed),
        reverb.Table(
            KEPT,
            select.Prioritized(EXPONENTS[KEPT]),
            select.Fifo(),
            1 << 20,
            limit.MinSize(1),
            seed=seed,
            stripes=2,
        ),
        reverb.Table.queue(QUEUE, 20),
        reverb.Table(
            BOUND,
            select.Uniform(),
            select.Fifo(),
            100,
            limit.SampleToInsertRatio(2.0, 4, 16.0),
            seed=seed,
        ),
        reverb.Table(
            BULK,
            select.Prioritized(EXPONENTS[BULK]),
            select.Fifo(),
            2000,
            limit.MinSize(1),
            seed=seed,
            stripes=2,
        ),
    ]


# --- payloads -----------------------------------------------------------------------------------

_RAMP = np.arange(max(map(max, LOAD_BYTES.values())), dtype=np.uint32)


class BadPayloadError(Exception):
    """What was read is not what anybody wrote."""


def first_seq(table: str) -> int:
    """Number of a writer's first step for a table: those of two tables are never the same."""
    return (NAMES.index(table) + 1) << 32


def priority_of(seq: int) -> float:
    """Priority with which the item that ends with this step is inserted."""
    return 1.0 + seq % 7


def _crc(who: int, seq: int, load: Any) -> int:
    return crc32(load, crc32(struct.pack("<qq", who, seq)))


def step_of(who: int, seq: int, size: int) -> dict[str, Any]:
    """Step `seq` of writer `who`. Bytes differ from their neighbours, so a shifted row shows."""
    load = (_RAMP[:size] + (31 * who + seq) % 256).astype(np.uint8)
    return {
        "who": np.int64(who),
        "seq": np.int64(seq),
        "load": load,
        "crc": np.uint32(_crc(who, seq, load)),
    }


def rows_of(who: int, seq: int, count: int, size: int) -> dict[str, Any]:
    """`count` steps from `seq` on, stacked."""
    steps = [step_of(who, seq + n, size) for n in range(count)]
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


def read_item(data: Any) -> tuple[int, list[int]]:
    """Checks one item and says who wrote it and which steps it has.

    Args:
        data: Its columns: a dict, or flat in the order of the dict's sorted keys; with a time
            dimension or, for one step, without.

    Raises:
        BadPayloadError: A step is not whole, or they are not consecutive steps of one writer.
    """
    if not isinstance(data, dict):
        data = dict(zip(("crc", "load", "seq", "who"), data, strict=True))
    who = [int(n) for n in np.atleast_1d(data["who"])]
    seqs = [int(n) for n in np.atleast_1d(data["seq"])]
    crcs = [int(n) for n in np.atleast_1d(data["crc"])]
    loads = np.ascontiguousarray(data["load"]).reshape(len(who), -1)
    for writer, seq, crc, load in zip(who, seqs, crcs, loads, strict=True):
        if _crc(writer, seq, load) != crc:
            raise BadPayloadError(f"step {seq:#x} of writer {writer} has a wrong checksum")
        if load[0] != (31 * writer + seq) % 256:
            raise BadPayloadError(f"step {seq:#x} of writer {writer} has a wrong first byte")
    if len(set(who)) != 1 or seqs != list(range(seqs[0], seqs[0] + len(seqs))):
        raise BadPayloadError(f"an item has steps {seqs} of writers {who}")
    return who[0], seqs


def read_batch(batch: reverb.ReplaySample) -> list[tuple[int, list[int]]]:
    """`read_item` for each row of a batch."""
    return [
        read_item({name: column[row] for name, column in batch.data.items()})
        for row in range(len(batch.info.key))
    ]


# --- heartbeats ---------------------------------------------------------------------------------

_WORDS_A_SLOT = 8  # a cache line
_BEATS, _SUCCESSES, _ITEMS, _LAST, _LONGEST, _LONGEST_AT = range(6)


class Board:
    """Counters that the supervisor and its workers share, one line a worker.

    Made before the workers are forked. Stores are whole words, so a worker that dies while it
    counts leaves either the old or the new number.
    """

    def __init__(self, slots: int) -> None:
        """Makes it with all counters at 0."""
        self._words = memoryview(mmap.mmap(-1, 8 * _WORDS_A_SLOT * (slots + 1))).cast("Q")

    def _word(self, slot: int, number: int) -> int:
        return _WORDS_A_SLOT * (slot + 1) + number

    @property
    def stopping(self) -> bool:
        """Whether workers are to end by themselves."""
        return self._words[0] != 0

    @property
    def closing(self) -> bool:
        """Whether the server is to end as well."""
        return self._words[0] == 2

    def order(self, *, stop: bool, close: bool = False) -> None:
        """Tells workers, and the server, whether to end."""
        self._words[0] = 2 if close else int(stop)

    def start(self, slot: int) -> None:
        """A worker is about to be forked."""
        self._words[self._word(slot, _LAST)] = time.monotonic_ns()
        self._words[self._word(slot, _LONGEST)] = 0

    def beat(self, slot: int) -> None:
        """An operation returned, with or without success.

        The worker itself measures how long that took: the supervisor may be late to look.
        """
        now = time.monotonic_ns()
        took = now - self._words[self._word(slot, _LAST)]
        if took > self._words[self._word(slot, _LONGEST)]:
            self._words[self._word(slot, _LONGEST)] = took
            self._words[self._word(slot, _LONGEST_AT)] = self.beats(slot)
        self._words[self._word(slot, _LAST)] = now
        self._words[self._word(slot, _BEATS)] += 1

    def done(self, slot: int) -> None:
        """An operation succeeded."""
        self._words[self._word(slot, _SUCCESSES)] += 1
        self.beat(slot)

    def read(self, slot: int, items: int) -> None:
        """So many items were read and found right."""
        self._words[self._word(slot, _ITEMS)] += items

    def beats(self, slot: int) -> int:
        """Operations that returned."""
        return self._words[self._word(slot, _BEATS)]

    def idle_s(self, slot: int) -> float:
        """Seconds since the last beat, or since the start."""
        return (time.monotonic_ns() - self._words[self._word(slot, _LAST)]) / 1e9

    def longest(self, slot: int) -> tuple[float, int]:
        """Longest time between two beats since the start in seconds, and beats before it."""
        word = self._word
        return self._words[word(slot, _LONGEST)] / 1e9, self._words[word(slot, _LONGEST_AT)]

    def successes(self, slot: int) -> int:
        """Operations that succeeded."""
        return self._words[self._word(slot, _SUCCESSES)]

    def items_read(self) -> int:
        """Items that workers read and found right."""
        return sum(self._words[_WORDS_A_SLOT + _ITEMS :: _WORDS_A_SLOT])


# --- journals -----------------------------------------------------------------------------------

INSERTED: Final = 1  # first: number of the item's last step; second: key, 0 where none is returned
UNSURE: Final = 2  # first: number of a step; second: so many from there on may be in
SAMPLED: Final = 3  # first: how many items
CONSUMED: Final = 4  # first: number of a step; second: its writer
UPDATING: Final = 5  # second: key; value: new priority. This is about to be done
UPDATED: Final = 6  # the same, done
DELETING: Final = 7  # second: key. This is about to be done
DELETED: Final = 8

_RECORD = struct.Struct("<HHIqQd")


class Record(NamedTuple):
    """One line of a journal."""

    what: int
    table: str
    first: int
    second: int
    value: float


class Journal:
    """What a worker has seen return, in a file of its own that survives it.

    A record is written by one system call and its length divides a page's, so that a death leaves
    it whole or not there.
    """

    def __init__(self, path: Path) -> None:
        """Opens it for appending."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(
        self, what: int, table: str = CHURN, first: int = 0, second: int = 0, value: float = 0.0
    ) -> None:
        """Appends one record."""
        os.write(self._fd, _RECORD.pack(what, NAMES.index(table), 0, first, second, value))

    def close(self) -> None:
        """Closes this process's end."""
        os.close(self._fd)


def read_journal(path: Path) -> list[Record]:
    """All records of a journal, which need not be there."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = len(text) - len(text) % _RECORD.size
    return [
        Record(what, NAMES[table], first, second, value)
        for what, table, _, first, second, value in _RECORD.iter_unpack(text[:whole])
    ]
