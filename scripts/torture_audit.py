"""What must be in a store once its workers are gone, and whether it is.

An audit runs in a process of its own while no worker does. It reads everything that the workers'
journals say, empties the tables item by item, and compares.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from torture_shared import (
    BOUND,
    CONSUMED,
    DELETED,
    DELETING,
    EXPONENTS,
    INSERTED,
    KEPT,
    NAMES,
    QUEUE,
    RANKED,
    SAMPLED,
    UNSURE,
    UPDATED,
    UPDATING,
    BadPayloadError,
    Record,
    priority_of,
    read_item,
)
from torture_workers import AHEAD, BATCH_MAX

import shmreplay as reverb
from shmreplay import errors

_SWEEP_DEADLINE_S: Final = 20.0
_DRAIN_AT_ONCE: Final = 4096
_CHUNK_HEAD: Final = 16
_CHUNK_UNIT: Final = 64


class Incarnation(NamedTuple):
    """One worker from its fork to its end."""

    who: int
    role: str
    killed: bool
    records: list[Record]


class Found(NamedTuple):
    """An item that the audit took out of a table."""

    who: int
    seq: int
    key: int
    priority: float
    probability: float
    """With which it was drawn; 0 if some of the table's items were gone by then."""


@dataclass
class Findings:
    """What an audit has to say."""

    items: int = 0
    """Items that were acknowledged and found, or read and found right."""
    faults: list[str] = field(default_factory=list)
    bad_payloads: int = 0
    leaked_bytes: int = 0
    consumed: int = 0
    lost_in_consumers: int = 0
    """Items that a queue gave to a process which was killed before it could say so."""
    stats: dict[str, float] = field(default_factory=dict)


def audit(store: str, incarnations: list[Incarnation]) -> Findings:
    """Compares the store with what its workers saw, and empties it."""
    findings = Findings()
    with reverb.Client(f"shm://{store}") as client:
        _wait_for_sweep(client, findings)
        _check(client, findings, "with everything in it")
        _audit_counts(client, incarnations, findings)
        items = {table: _drain(client, table, findings) for table in NAMES}
        _audit_kept(items[KEPT], incarnations, findings)
        _audit_queue(items[QUEUE], incarnations, findings)
        _audit_order(items, incarnations, findings)
        _audit_probabilities(items, findings)
        client.reset(BOUND)
    with reverb.Client(f"shm://{store}") as client:  # without the sessions of the other one
        _check(client, findings, "when it was emptied")
        findings.stats = client.stats()
        findings.leaked_bytes = int(findings.stats["arena_used_bytes"]) - _schema_bytes(client)
        if findings.leaked_bytes or findings.stats["sessions"]:
            findings.faults.append(
                f"an empty store has {findings.leaked_bytes} bytes in use, "
                f"{findings.stats['sessions']:.0f} sessions"
            )
    return findings


def _wait_for_sweep(client: reverb.Client, findings: Findings) -> None:
    """Waits until the server has cleared away who died: then only it and this process are there."""
    end = time.monotonic() + _SWEEP_DEADLINE_S
    while (there := client.stats()["participants"]) > 2:
        if time.monotonic() > end:
            findings.faults.append(f"{there - 2:.0f} dead processes were not cleared away")
            return
        time.sleep(0.01)


def _check(client: reverb.Client, findings: Findings, when: str) -> None:
    try:
        client.check()
    except errors.TableCorruptedError as e:
        findings.faults.append(f"the store is damaged {when}: {e}")


def _schema_bytes(client: reverb.Client) -> int:
    """Bytes of the descriptions of item structures, which a store keeps for ever."""
    native = client._connected().native
    total, number = 0, 0
    while True:
        try:
            text = native.schema_text(number)
        except errors.TableCorruptedError:  # the answer for a number that is not in use
            return total
        total += -(-(len(text) + _CHUNK_HEAD) // _CHUNK_UNIT) * _CHUNK_UNIT
        number += 1


# --- emptying -----------------------------------------------------------------------------------


def _drain(client: reverb.Client, table: str, findings: Findings) -> list[Found]:
    """Takes all items out of a table, or out of `BOUND` as many as the limiter lets one see."""
    found: dict[int, Found] = {}
    while (size := client.server_info()[table].current_size) > 0:
        whole = not found
        fresh: list[int] = []
        try:
            with client.borrow(table, min(size, _DRAIN_AT_ONCE), timeout=0) as samples:
                for info, data in samples:
                    if info.key not in found:
                        fresh.append(info.key)
                        found[info.key] = _read(info, data, table, whole, findings)
                del samples, data
        except errors.DeadlineExceededError:
            if table != BOUND:
                findings.faults.append(f"{size} items of table {table} cannot be sampled")
            break
        client.mutate_priorities(table, None, fresh)
    findings.items += len(found)
    return list(found.values())


def _read(info: Any, data: Any, table: str, whole: bool, findings: Findings) -> Found:
    try:
        who, seqs = read_item(data)
    except BadPayloadError as e:
        findings.bad_payloads += 1
        findings.faults.append(f"table {table}, key {info.key:#x}: {e}")
        who, seqs = 0, [0]
    return Found(who, seqs[-1], info.key, info.priority, info.probability if whole else 0.0)


# --- comparing ----------------------------------------------------------------------------------


class Book:
    """What one table must and may hold, by the journals."""

    def __init__(self, table: str, incarnations: list[Incarnation]) -> None:
        """Reads the journals in the order in which the workers were started."""
        self.acknowledged: dict[tuple[int, int], int] = {}
        self.unsure: set[tuple[int, int]] = set()
        self.last: dict[int, int] = {}
        self.killed = {i.who for i in incarnations if i.killed}
        self.deleted: set[int] = set()
        self.deleting: set[int] = set()
        self.changed: set[int] = set()
        self.priorities: dict[int, list[float]] = {}
        for who, record in ((i.who, r) for i in incarnations for r in i.records):
            if record.table == table:
                self._take(who, record)

    def _take(self, who: int, record: Record) -> None:
        if record.what == INSERTED:
            self.acknowledged[who, record.first] = record.second
            self.last[who] = max(self.last.get(who, 0), record.first)
        elif record.what == UNSURE:
            self.unsure.update((who, record.first + n) for n in range(record.second))
        elif record.what == UPDATING:
            self.priorities.setdefault(record.second, []).append(record.value)
        elif record.what == UPDATED:
            self.priorities[record.second] = [record.value]
            self.changed.add(record.second)
        elif record.what == DELETING:
            self.deleting.add(record.second)
        elif record.what == DELETED:
            self.deleted.add(record.second)

    def may_hold(self, who: int, seq: int) -> bool:
        """Whether an item that nobody was told of can be there: the last of a killed worker's."""
        last = self.last.get(who)
        return (who, seq) in self.unsure or (who in self.killed and (last is None or seq > last))

    def priorities_of(self, item: Found) -> list[float]:
        """What its priority can be: the last one acknowledged, or one that was on its way."""
        changes = self.priorities.get(item.key, [])
        return changes if item.key in self.changed else [priority_of(item.seq), *changes]


def _audit_kept(items: list[Found], incarnations: list[Incarnation], findings: Findings) -> None:
    """Every acknowledged item is there once, as it was inserted and last changed, and no other."""
    book = Book(KEPT, incarnations)
    there = Counter((item.who, item.seq) for item in items)
    unseen: Counter[int] = Counter()
    for item in items:
        name = f"item {item.seq:#x} of worker {item.who}, key {item.key:#x}"
        key = book.acknowledged.get((item.who, item.seq))
        if there[item.who, item.seq] > 1:
            findings.faults.append(f"{name} is there {there[item.who, item.seq]} times")
        if key is None:
            unseen[item.who] += 1
            if not book.may_hold(item.who, item.seq) or unseen[item.who] > BATCH_MAX:
                findings.faults.append(f"{name} is there, and nobody inserted it")
        elif key not in (0, item.key):
            findings.faults.append(f"{name} was acknowledged with key {key:#x}")
        if item.key in book.deleted:
            findings.faults.append(f"{name} is there, and was deleted")
        if item.priority not in (allowed := book.priorities_of(item)):
            findings.faults.append(f"{name} has priority {item.priority}, not one of {allowed}")
    gone = book.deleted | book.deleting
    missing = [
        (who, seq, key)
        for (who, seq), key in book.acknowledged.items()
        if (who, seq) not in there and key not in gone
    ]
    # Single steps are acknowledged without a key, so deletions of theirs are only counted.
    without_key = sum(1 for _, _, key in missing if key == 0)
    with_key = {key for key in book.acknowledged.values() if key}
    if without_key > len(gone - with_key):
        findings.faults.append(f"{without_key} single steps of table {KEPT} are gone")
    for who, seq, key in missing:
        if key != 0:
            findings.faults.append(f"item {seq:#x} of worker {who}, key {key:#x} is gone")


def _audit_queue(items: list[Found], incarnations: list[Incarnation], findings: Findings) -> None:
    """Every item is consumed at most once; only a killed consumer may have taken some with it."""
    book = Book(QUEUE, incarnations)
    consumed = Counter(
        (r.second, r.first) for i in incarnations for r in i.records if r.what == CONSUMED
    )
    findings.consumed = consumed.total()
    consumed.update((item.who, item.seq) for item in items)
    for (who, seq), times in consumed.items():
        if times > 1:
            findings.faults.append(f"queue: step {seq:#x} of worker {who} came {times} times")
        if (who, seq) not in book.acknowledged and not book.may_hold(who, seq):
            findings.faults.append(f"queue: step {seq:#x} of worker {who} was never inserted")
    lost = sum(1 for name in book.acknowledged if name not in consumed)
    taken = {"consumer": BATCH_MAX, "consumer ahead": BATCH_MAX * (AHEAD + 2)}
    bound = sum(taken.get(i.role, 0) for i in incarnations if i.killed)
    findings.lost_in_consumers = lost
    if lost > bound:
        findings.faults.append(f"queue: {lost} items are gone; killed consumers had {bound}")


def _audit_order(
    items: dict[str, list[Found]], incarnations: list[Incarnation], findings: Findings
) -> None:
    """A queue keeps each producer's order, and the item of the highest priority comes first."""
    lines = [[(r.second, r.first) for r in i.records if r.what == CONSUMED] for i in incarnations]
    lines.append([(item.who, item.seq) for item in items[QUEUE]])
    for line in lines:
        last: dict[int, int] = {}
        for who, seq in line:
            if seq <= last.get(who, 0):
                findings.faults.append(f"queue: step {seq:#x} of worker {who} came late")
            last[who] = seq
    ranks = [item.priority for item in items[RANKED]]
    if ranks != sorted(ranks, reverse=True):
        findings.faults.append(f"table {RANKED} gave priorities in the order {ranks}")


def _audit_probabilities(items: dict[str, list[Found]], findings: Findings) -> None:
    """Each item was drawn with its share of all weights."""
    for table, exponent in EXPONENTS.items():
        total = sum(item.priority**exponent for item in items[table])
        for item in items[table]:
            share = item.priority**exponent / total
            if item.probability and abs(item.probability - share) > 1e-9 * share:
                findings.faults.append(
                    f"table {table}, key {item.key:#x}: drawn with probability "
                    f"{item.probability}, not {share}"
                )


def _audit_counts(
    client: reverb.Client, incarnations: list[Incarnation], findings: Findings
) -> None:
    """The limiter's counts are what was acknowledged, give or take what was on its way."""
    info = client.server_info()[BOUND].rate_limiter_info
    records = [r for i in incarnations for r in i.records if r.table == BOUND]
    inserts = sum(1 for r in records if r.what == INSERTED)
    unsure = sum(r.second for r in records if r.what == UNSURE)
    samples = sum(r.first for r in records if r.what == SAMPLED)
    writers = [i for i in incarnations if i.role in ("bound writer", "batch inserter")]
    slack_inserts = unsure + BATCH_MAX * len(writers)
    slack_samples = BATCH_MAX * sum(1 for i in incarnations if i.role == "batch sampler")
    for what, count, seen, slack in (
        ("inserts", info.insert_stats.completed, inserts, slack_inserts),
        ("samples", info.sample_stats.completed, samples, slack_samples),
    ):
        if not seen <= count <= seen + slack:
            findings.faults.append(
                f"table {BOUND} counts {count} {what}; {seen} were acknowledged, "
                f"at most {slack} more were on their way"
            )
    diff = info.insert_stats.completed * info.samples_per_insert - info.sample_stats.completed
    if not info.min_diff <= diff <= info.max_diff:
        findings.faults.append(
            f"table {BOUND} is {diff} ahead; its limiter allows {info.min_diff} to {info.max_diff}"
        )
