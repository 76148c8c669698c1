"""What the processes of a torture run do until they are killed.

A role is a function that is given its surroundings and a client and returns one operation, which
is then called over and over. What an operation has seen return goes to the worker's journal at
once, as the process may be gone an instant later.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import numpy as np
from torture_shared import (
    BOUND,
    BULK,
    CHURN,
    CONSUMED,
    DELETED,
    DELETING,
    INSERTED,
    KEPT,
    LENGTH,
    LOAD_BYTES,
    QUEUE,
    RANKED,
    SAMPLED,
    UNSURE,
    UPDATED,
    UPDATING,
    WEIGHTED,
    Board,
    Journal,
    first_seq,
    make_tables,
    priority_of,
    read_batch,
    read_item,
    rows_of,
    step_of,
)

import shmreplay as reverb
from shmreplay import errors

BATCH_MAX: Final = 4
"""Items in a batch, at most: what a killed worker may have inserted or consumed unseen."""

BULK_ROWS: Final = 300
"""Items of a large batch."""

AHEAD: Final = 2
"""Batches that the consumer with a sampler gathers ahead."""

_WAIT_S: Final = 0.5  # of one operation for the limiter, after which the heart beats
_FULL_PAUSE_S: Final = 0.01


class Work(NamedTuple):
    """The surroundings of one worker."""

    store: str
    slot: int
    who: int
    """Number of this process: no two of a run have the same."""
    board: Board
    journal: Journal
    random: random.Random
    stack: ExitStack
    """What it closes when it ends by itself."""


Operation = Callable[[], None]
Role = Callable[[Work, reverb.Client], Operation]


# --- writing ------------------------------------------------------------------------------------


class _Line:
    """A trajectory writer and the steps that it writes for one table."""

    def __init__(self, work: Work, client: reverb.Client, table: str) -> None:
        self._work = work
        self._table = table
        self._size = work.random.choice(LOAD_BYTES[table])
        self._seq = first_seq(table)
        self._held: int | None = None
        self._writer = client.trajectory_writer(num_keep_alive_refs=LENGTH)
        work.stack.callback(self._writer.close)

    def step(self) -> None:
        if self._held is not None:
            self._flush()
        writer, choose = self._writer, self._work.random
        seq = self._seq
        step = step_of(self._work.who, seq, self._size)
        if seq == first_seq(self._table) or choose.random() < 0.5:
            writer.append(step)
        else:
            with writer.next_step() as cells:
                for name, value in step.items():
                    cells[name][...] = value
        self._seq += 1
        within = min(LENGTH, writer.episode_steps)
        if self._table == CHURN and within < LENGTH:
            return
        rows: Any = slice(-(LENGTH if self._table == CHURN else choose.randint(1, within)), None)
        if self._table == BOUND:
            rows = -1
        history = writer.history
        item = {name: history[name][rows] for name in step}
        key = writer.create_item(self._table, priority_of(seq), item)
        if key is None:
            self._held = seq
            self._flush()
        else:
            self._work.journal.write(INSERTED, self._table, seq, key)
        if choose.random() < 0.02:
            writer.end_episode(timeout_ms=int(1000 * _WAIT_S))

    def _flush(self) -> None:
        """Waits for the item that the limiter holds back; at the deadline it stays in line."""
        assert self._held is not None
        self._writer.flush(timeout_ms=int(1000 * _WAIT_S))
        self._work.journal.write(INSERTED, self._table, self._held)
        self._held = None


def _write_lines(tables: tuple[str, ...]) -> Role:
    def role(work: Work, client: reverb.Client) -> Operation:
        lines = [_Line(work, client, table) for table in tables]
        weights = [1 if table == KEPT else 4 for table in tables]  # that one only grows
        return lambda: work.random.choices(lines, weights)[0].step()

    return role


def _insert_steps(work: Work, client: reverb.Client) -> Operation:
    """Single steps, each into two tables at once."""
    seq = first_seq(KEPT)

    def operation() -> None:
        nonlocal seq
        step, priority = step_of(work.who, seq, LOAD_BYTES[KEPT][0]), priority_of(seq)
        seq += 1
        try:
            client.insert(step, {WEIGHTED: priority, KEPT: priority}, timeout=_WAIT_S)
        except errors.ReverbError:
            work.journal.write(UNSURE, KEPT, seq - 1, 1)
            raise
        work.journal.write(INSERTED, KEPT, seq - 1)

    return operation


def _insert_batches(tables: tuple[str, ...]) -> Role:
    """Batches of several items, into one table after the other."""

    def role(work: Work, client: reverb.Client) -> Operation:
        seqs = {table: first_seq(table) for table in tables}

        def operation() -> None:
            table = work.random.choice(tables)
            seq, count = seqs[table], work.random.randint(1, BATCH_MAX)
            seqs[table] += count
            rows = rows_of(work.who, seq, count, work.random.choice(LOAD_BYTES[table]))
            priorities = [priority_of(seq + n) for n in range(count)]
            try:
                keys = client.insert_batch(table, rows, priorities, timeout=_WAIT_S)
            except errors.ReverbError:
                work.journal.write(UNSURE, table, seq, count)
                raise
            for n, key in enumerate(keys):
                work.journal.write(INSERTED, table, seq + n, int(key))

        return operation

    return role


def _insert_bulk(work: Work, client: reverb.Client) -> Operation:
    """The same large batch over and over: nearly all the time is spent in shared memory."""
    rows = rows_of(work.who, first_seq(BULK), BULK_ROWS, LOAD_BYTES[BULK][0])
    priorities = np.array([priority_of(n) for n in range(BULK_ROWS)])

    def operation() -> None:
        client.insert_batch(BULK, rows, priorities, timeout=_WAIT_S)

    return operation


# --- reading ------------------------------------------------------------------------------------


def _sample_items(work: Work, client: reverb.Client) -> Operation:
    def operation() -> None:
        table = work.random.choice((CHURN, WEIGHTED, RANKED, KEPT))
        for sample in client.sample(table, 3, emit_timesteps=False, timeout=_WAIT_S):
            read_item(sample.data)
            work.board.read(work.slot, 1)

    return operation


def _sample_batches(work: Work, client: reverb.Client) -> Operation:
    def operation() -> None:
        table = work.random.choice((CHURN, BOUND))
        batch = client.sample_batch(table, BATCH_MAX, timeout=_WAIT_S)
        if table == BOUND:
            work.journal.write(SAMPLED, BOUND, len(batch.info.key))
        work.board.read(work.slot, len(read_batch(batch)))

    return operation


def _sample_bulk(work: Work, client: reverb.Client) -> Operation:
    """Large batches, of which a few rows are looked at."""

    def operation() -> None:
        info, data = client.sample_batch(BULK, BULK_ROWS, timeout=_WAIT_S)
        some = work.random.sample(range(len(info.key)), min(len(info.key), 5))
        few = reverb.SampleInfo(*(field[some] for field in info))
        few_data = {name: column[some] for name, column in data.items()}
        work.board.read(work.slot, len(read_batch(reverb.ReplaySample(few, few_data))))

    return operation


def _iterate(work: Work, client: reverb.Client) -> Operation:
    """A sampler that gathers ahead, and is closed and made anew now and then."""
    sampler = client.sampler(CHURN, 4, prefetch=2, timeout=_WAIT_S)

    def operation() -> None:
        nonlocal sampler
        if work.random.random() < 0.02:
            sampler.close()
            sampler = client.sampler(CHURN, 4, prefetch=2, timeout=_WAIT_S)
        work.board.read(work.slot, len(read_batch(next(sampler))))

    work.stack.callback(lambda: sampler.close())
    return operation


def _borrow(work: Work, client: reverb.Client) -> Operation:
    """Holds several loans, and looks at each again before it gives it back."""
    held: deque[tuple[ExitStack, list[reverb.ReplaySample]]] = deque()

    def give_back() -> None:
        loan, samples = held.popleft()
        for sample in samples:
            read_item(sample.data)
        samples.clear()  # no view may outlive the loan
        loan.close()

    def operation() -> None:
        table = work.random.choice((CHURN, WEIGHTED, RANKED))
        loan = ExitStack()
        samples = loan.enter_context(client.borrow(table, 2, timeout=_WAIT_S))
        held.append((loan, samples))
        for sample in samples:
            read_item(sample.data)
        work.board.read(work.slot, len(samples))
        if len(held) > 4:
            give_back()

    def give_all_back() -> None:
        while held:
            give_back()

    work.stack.callback(give_all_back)
    return operation


def _consume(work: Work, client: reverb.Client) -> Operation:
    def operation() -> None:
        _note_consumed(work, client.sample_batch(QUEUE, BATCH_MAX, timeout=_WAIT_S))

    return operation


def _consume_ahead(work: Work, client: reverb.Client) -> Operation:
    sampler = client.sampler(QUEUE, BATCH_MAX, prefetch=AHEAD, timeout=_WAIT_S)

    def finish() -> None:
        for batch in sampler.close():
            _note_consumed(work, batch)

    work.stack.callback(finish)
    return lambda: _note_consumed(work, next(sampler))


def _note_consumed(work: Work, batch: reverb.ReplaySample) -> None:
    items = read_batch(batch)
    for who, seqs in items:
        work.journal.write(CONSUMED, QUEUE, seqs[-1], who)
    work.board.read(work.slot, len(items))


# --- changing -----------------------------------------------------------------------------------


def _mutate(work: Work, client: reverb.Client) -> Operation:
    """New priorities and deletions where nobody keeps books."""

    def operation() -> None:
        table = work.random.choice((CHURN, WEIGHTED, RANKED))
        infos = [s.info for s in client.sample(table, 3, emit_timesteps=False, timeout=_WAIT_S)]
        keys = np.array([info.key for info in infos], np.uint64)
        client.update_priorities(table, keys, [work.random.uniform(0.1, 9.0) for _ in keys])
        if work.random.random() < 0.3:
            updates = {int(keys[0]): 3.0}
            client.mutate_priorities(table, updates, [int(keys[-1])])

    return operation


def _mutate_kept(work: Work, client: reverb.Client) -> Operation:
    """New priorities and deletions of items that must be there at the end, with books.

    One worker at a time has this role, so the order of its changes is that of its journals.
    """

    def operation() -> None:
        samples = list(client.sample(KEPT, 2, emit_timesteps=False, timeout=_WAIT_S))
        for info, data in samples:
            read_item(data)
            note = work.journal.write
            if work.random.random() < 0.1:
                note(DELETING, KEPT, second=info.key)
                client.mutate_priorities(KEPT, None, [info.key])
                note(DELETED, KEPT, second=info.key)
            else:
                priority = work.random.uniform(0.5, 9.0)
                note(UPDATING, KEPT, second=info.key, value=priority)
                client.update_priorities(KEPT, [info.key], [priority])
                note(UPDATED, KEPT, second=info.key, value=priority)

    return operation


def _mutate_bulk(work: Work, client: reverb.Client) -> Operation:
    """New priorities of many items at once, and deletion of many."""

    def operation() -> None:
        keys = client.sample_batch(BULK, BULK_ROWS, timeout=_WAIT_S).info.key
        for _ in range(5):
            factor = work.random.uniform(0.5, 2.0)
            client.update_priorities(BULK, keys, factor * np.arange(1, len(keys) + 1))
        client.mutate_priorities(BULK, None, [int(key) for key in keys[:50]])

    return operation


def _watch(work: Work, client: reverb.Client) -> Operation:
    """What people look at while a run goes on."""

    def operation() -> None:
        client.server_info()
        client.stats()
        if work.random.random() < 0.1:
            client.check()
        time.sleep(0.005)  # to leave the processors to the others

    return operation


ROLES: Final[dict[str, Role]] = {
    "writer": _write_lines((CHURN, WEIGHTED, KEPT)),
    "ranked writer": _write_lines((RANKED, CHURN)),
    "bound writer": _write_lines((BOUND,)),
    "inserter": _insert_steps,
    "batch inserter": _insert_batches((WEIGHTED, RANKED, KEPT, BOUND)),
    "producer": _insert_batches((QUEUE,)),
    "sampler": _sample_items,
    "batch sampler": _sample_batches,
    "bulk inserter": _insert_bulk,
    "bulk sampler": _sample_bulk,
    "bulk mutator": _mutate_bulk,
    "iterator": _iterate,
    "borrower": _borrow,
    "mutator": _mutate,
    "keeper": _mutate_kept,
    "consumer": _consume,
    "consumer ahead": _consume_ahead,
    "watcher": _watch,
}
"""What workers do, by name. Each role has one process."""

SERVER: Final = "server"


def work_until_stopped(work: Work, role: str) -> None:
    """Calls a role's operation over and over, until the board says stop."""
    with reverb.Client(f"shm://{work.store}") as client, work.stack:
        operation = ROLES[role](work, client)
        work.board.beat(work.slot)
        while not work.board.stopping:
            try:
                operation()
                work.board.done(work.slot)
            except errors.DeadlineExceededError:
                work.board.beat(work.slot)
            except errors.ArenaFullError:
                work.board.beat(work.slot)
                time.sleep(_FULL_PAUSE_S)  # somebody else makes room


def serve(work: Work, *, capacity: int, seed: int, recover: bool) -> None:
    """A server, until the board says stop; then it removes the store."""
    # A first server and one that takes over are told apart: only the latter finds anything.
    options: dict[str, Any] = {"recover": True} if recover else {}
    with reverb.Server(make_tables(seed), name=work.store, capacity=capacity, **options):
        while not work.board.closing:
            work.board.done(work.slot)
            time.sleep(0.01)
