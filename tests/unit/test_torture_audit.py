"""The audit of `scripts/torture` finds what is wrong: else a run would pass whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torture_shared as shared
from torture_audit import Findings, Incarnation, audit
from torture_shared import BOUND, KEPT, QUEUE, Record

import shmreplay as reverb

WHO = 7
SEQ = shared.first_seq(KEPT)
SIZE = shared.LOAD_BYTES[KEPT][0]


class Bench:
    """A store, and journals of what was done to it."""

    def __init__(self, server: reverb.Server) -> None:
        self.client = reverb.Client(server.address)
        self._name = server.name
        self.records: list[Record] = []

    def note(
        self, what: int, table: str, first: int = 0, second: int = 0, value: float = 0
    ) -> None:
        self.records.append(Record(what, table, first, second, value))

    def insert(self, table: str, first: int, count: int) -> list[int]:
        rows = shared.rows_of(WHO, first, count, shared.LOAD_BYTES[table][0])
        priorities = [shared.priority_of(first + n) for n in range(count)]
        keys = [int(key) for key in self.client.insert_batch(table, rows, priorities)]
        for n, key in enumerate(keys):
            self.note(shared.INSERTED, table, first + n, key)
        return keys

    def audit(self, role: str = "batch inserter", killed: bool = False) -> Findings:
        self.client.close()
        return audit(self._name, [Incarnation(WHO, role, killed, self.records)])


@pytest.fixture
def bench(make_server: Callable[..., reverb.Server]) -> Iterator[Bench]:
    bench = Bench(make_server(shared.make_tables(0)))
    yield bench
    bench.client.close()


def test_what_is_right_is_not_a_fault(bench: Bench) -> None:
    keys = bench.insert(KEPT, SEQ, 9)
    bench.client.update_priorities(KEPT, [keys[0]], [2.5])
    bench.note(shared.UPDATING, KEPT, second=keys[0], value=2.5)
    bench.note(shared.UPDATED, KEPT, second=keys[0], value=2.5)
    bench.client.mutate_priorities(KEPT, None, [keys[1]])
    bench.note(shared.DELETING, KEPT, second=keys[1])
    bench.note(shared.DELETED, KEPT, second=keys[1])
    first = shared.first_seq(QUEUE)
    bench.insert(QUEUE, first, 3)
    bench.client.sample_batch(QUEUE, 2)
    bench.note(shared.CONSUMED, QUEUE, first, WHO)
    bench.note(shared.CONSUMED, QUEUE, first + 1, WHO)
    bench.insert(BOUND, shared.first_seq(BOUND), 6)
    bench.client.sample_batch(BOUND, 4)
    bench.note(shared.SAMPLED, BOUND, 4)
    findings = bench.audit()
    assert findings.faults == []
    assert (findings.consumed, findings.leaked_bytes) == (2, 0)
    assert findings.items > 8 + 1  # of the table with a limiter, as many as that lets one see


def test_an_item_that_is_gone(bench: Bench) -> None:
    keys = bench.insert(KEPT, SEQ, 3)
    bench.client.mutate_priorities(KEPT, None, [keys[1]])
    (fault,) = bench.audit().faults
    assert "is gone" in fault


def test_an_item_that_came_twice_and_one_that_nobody_inserted(bench: Bench) -> None:
    bench.insert(KEPT, SEQ, 2)
    bench.records.pop()
    bench.insert(KEPT, SEQ, 1)
    text = "\n".join(bench.audit().faults)
    assert "2 times" in text and "nobody inserted it" in text


@pytest.mark.parametrize("killed", [True, False])
def test_only_a_killed_worker_may_leave_an_item_that_nobody_was_told_of(
    bench: Bench, killed: bool
) -> None:
    bench.insert(KEPT, SEQ, 2)
    bench.records.pop()
    assert (bench.audit(killed=killed).faults == []) is killed


def test_an_item_that_was_deleted_and_a_priority_that_was_not_set(bench: Bench) -> None:
    keys = bench.insert(KEPT, SEQ, 2)
    bench.note(shared.DELETED, KEPT, second=keys[0])
    bench.note(shared.UPDATED, KEPT, second=keys[1], value=5.5)
    text = "\n".join(bench.audit().faults)
    assert "was deleted" in text and "not one of [5.5]" in text


def test_a_payload_that_is_not_whole(bench: Bench) -> None:
    rows = shared.rows_of(WHO, SEQ, 1, SIZE)
    rows["load"][0, 5] += 1
    (key,) = bench.client.insert_batch(KEPT, rows)
    bench.note(shared.INSERTED, KEPT, SEQ, int(key))
    assert bench.audit().bad_payloads == 1


def test_an_item_of_a_queue_that_came_twice_or_not_at_all(bench: Bench) -> None:
    first = shared.first_seq(QUEUE)
    bench.insert(QUEUE, first, 4)
    bench.client.sample_batch(QUEUE, 2)
    bench.note(shared.CONSUMED, QUEUE, first, WHO)
    bench.note(shared.CONSUMED, QUEUE, first, WHO)
    text = "\n".join(bench.audit().faults)
    assert "came 2 times" in text and "1 items are gone" in text


def test_counts_that_do_not_agree(bench: Bench) -> None:
    bench.insert(BOUND, shared.first_seq(BOUND), 6)
    bench.records.pop()
    bench.note(shared.SAMPLED, BOUND, 4)
    text = "\n".join(bench.audit("a role of its own").faults)
    assert "6 inserts; 5 were" in text and "0 samples; 4 were" in text


def test_memory_that_is_not_given_back(bench: Bench) -> None:
    with reverb.Client(bench.client.server_address) as other:
        writer = other.trajectory_writer(num_keep_alive_refs=2)
        writer.append({"x": np.zeros(100)})
        findings = bench.audit()
        writer.close()
    assert findings.leaked_bytes > 800 and "bytes in use" in findings.faults[-1]


def test_an_order_that_a_queue_does_not_have(bench: Bench) -> None:
    first = shared.first_seq(QUEUE)
    bench.insert(QUEUE, first, 2)
    bench.client.sample_batch(QUEUE, 2)
    bench.note(shared.CONSUMED, QUEUE, first + 1, WHO)
    bench.note(shared.CONSUMED, QUEUE, first, WHO)
    (fault,) = bench.audit().faults
    assert "came late" in fault
