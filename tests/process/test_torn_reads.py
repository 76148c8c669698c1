"""No reader ever sees a step that is half of one and half of another.

Tiny tables evict all the time, so that memory is used again as soon as it may be, while several
processes read in every way there is. Each step says in each element of each of its fields which
step it is, so that any mixture shows. Processes do a fixed number of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import rate_limiters, selectors

TABLE = "table"
# Seconds after which a call that waits for another process is taken to hang.
DEADLINE = 60.0
# Ids of a writer's steps start at its number times this.
STRIDE = 1 << 24
# Steps in an item.
LENGTH = 3

RunProcesses = Callable[[str, Sequence[tuple[Callable[..., None], tuple[Any, ...]]]], list[Any]]


def step_of(id_: int, size: int) -> dict[str, Any]:
    """A step with `size` elements in its large field.

    Elements differ from their neighbours, so a row that is shifted shows as well.
    """
    large = np.arange(size, dtype=np.uint32) + np.uint32(id_)
    return {
        "id": np.int64(id_),
        "large": large,
        "odd": np.full(7, id_ % 251, np.uint8),
        "sum": np.uint32(crc32(large.tobytes())),
    }


def assert_whole(data: Any, ids_must_follow: bool) -> list[int]:
    """Fails unless every step of one item is whole; returns the ids of the steps.

    Args:
      data: columns with a time dimension: a dict, or flat in the order of the dict's sorted keys.
      ids_must_follow: whether the item is made of steps that one writer wrote in a row.
    """
    if not isinstance(data, dict):
        data = dict(zip(("id", "large", "odd", "sum"), data, strict=True))
    ids = [int(id_) for id_ in data["id"]]
    for row, id_ in enumerate(ids):
        large = data["large"][row]
        expected = step_of(id_, len(large))
        np.testing.assert_array_equal(large, expected["large"])
        np.testing.assert_array_equal(data["odd"][row], expected["odd"])
        assert data["sum"][row] == expected["sum"]
        assert crc32(large.tobytes()) == data["sum"][row]
    if ids_must_follow:
        assert ids == list(range(ids[0], ids[0] + len(ids)))
    return ids


def write_overlapping(conn: Connection, address: str, writer: int, count: int, size: int) -> None:
    """Writes trajectories of which each shares steps with the next, and ends episodes now and then.

    Odd writers fill each step in place.
    """
    with (
        reverb.Client(address) as client,
        client.trajectory_writer(num_keep_alive_refs=LENGTH) as trajectories,
    ):
        for number in range(count):
            step = step_of(writer * STRIDE + number, size)
            if writer % 2 == 0 or number == 0:
                trajectories.append(step)
            else:
                with trajectories.next_step() as cells:
                    for name, value in step.items():
                        cells[name][...] = value
            if trajectories.episode_steps >= LENGTH:
                history = trajectories.history
                item = {name: history[name][-LENGTH:] for name in step}
                trajectories.create_item(TABLE, 1.0 + number % 3, item)
            if number % 50 == 49:
                trajectories.end_episode()
    conn.send(count)


def write_rows(conn: Connection, address: str, writer: int, count: int, size: int) -> None:
    """Inserts items that share nothing, some one by one and some by the batch."""
    with reverb.Client(address) as client:
        for start in range(0, count, LENGTH):
            ids = [writer * STRIDE + start + offset for offset in range(LENGTH)]
            steps = [step_of(id_, size) for id_ in ids]
            rows = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
            # Two items of `LENGTH` rows in a batch.
            batch = {name: np.stack([column, column[::-1]]) for name, column in rows.items()}
            client.insert_batch(TABLE, batch, [1.0, 0.5], timeout=DEADLINE)
    conn.send(count)


def read_batches(conn: Connection, address: str, count: int, follow: bool) -> None:
    """Reads copies of several items, and changes the priorities of what it read."""
    seen = set()
    with reverb.Client(address) as client:
        for number in range(count):
            info, data = client.sample_batch(TABLE, 4, timeout=DEADLINE)
            for row in range(len(info.key)):
                one = {name: column[row] for name, column in data.items()}
                seen.update(assert_whole(one, follow))
            client.update_priorities(TABLE, info.key, np.full(len(info.key), 1.0 + number % 5))
    conn.send(len(seen))


def read_loans(conn: Connection, address: str, count: int, follow: bool) -> None:
    """Reads shared memory itself, and looks once more after it was held for a while."""
    seen = set()
    with reverb.Client(address) as client, ExitStack() as stack:
        held: list[tuple[ExitStack, list[Any]]] = []
        for _ in range(count):
            loan = stack.enter_context(ExitStack())
            samples = loan.enter_context(client.borrow(TABLE, 2, timeout=DEADLINE))
            for one in samples:
                seen.update(assert_whole(one.data, follow))
            held.append((loan, samples))
            if len(held) > 5:
                loan, samples = held.pop(0)
                for one in samples:
                    assert_whole(one.data, follow)
                # No view may outlive the loan.
                samples = []
                loan.close()
        for loan, samples in held:
            for one in samples:
                assert_whole(one.data, follow)
            samples.clear()
            loan.close()
    conn.send(len(seen))


def read_and_delete(conn: Connection, address: str, count: int, follow: bool) -> None:
    """Reads items one by one, and deletes every third, where that cannot empty the table."""
    seen = set()
    with reverb.Client(address) as client:
        samples = client.sample(TABLE, count, emit_timesteps=False, timeout=DEADLINE)
        for number, (info, data) in enumerate(samples):
            seen.update(assert_whole(data, follow))
            if number % 3 == 0 and info.table_size >= 4:
                client.mutate_priorities(TABLE, None, [info.key])
    conn.send(len(seen))


@pytest.mark.parametrize("size", [1, 1_000, 10_000], ids=["4 bytes", "4 kB", "40 kB"])
@pytest.mark.parametrize("max_size", [4, 16])
@pytest.mark.parametrize("writing", ["overlapping", "rows"])
@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_no_step_is_ever_torn(
    make_server: Callable[..., reverb.Server],
    run_processes: RunProcesses,
    kind: str,
    writing: str,
    max_size: int,
    size: int,
) -> None:
    table = reverb.Table(
        TABLE,
        selectors.Uniform() if kind == "uniform" else selectors.Prioritized(0.6),
        selectors.Fifo() if kind == "uniform" else selectors.Uniform(),
        max_size=max_size,
        rate_limiter=rate_limiters.MinSize(1),
        # In half of the cases processes meet on one lock, in the others on several.
        stripes=1 if max_size == 4 else 3,
    )
    server = make_server([table], capacity=64 << 20)
    writes, reads = (3_000, 1_200) if size <= 1_000 else (1_200, 500)
    follow = writing == "overlapping"
    write = write_overlapping if follow else write_rows
    results = run_processes(
        "fork",
        [(write, (server.address, writer, writes, size)) for writer in range(2)]
        + [
            (read, (server.address, reads, follow))
            for read in (read_batches, read_loans, read_and_delete)
        ],
    )
    assert results[:2] == [writes, writes]
    with reverb.Client(server.address) as client:
        client.check()
        info = client.server_info()[TABLE]
        items = writes - 2 * -(-writes // 50) if follow else 2 * -(-writes // LENGTH)
        assert info.rate_limiter_info.insert_stats.completed == 2 * items
        assert info.rate_limiter_info.sample_stats.completed == (4 + 2 + 1) * reads
        # All the memory that items do not use is free again: the table empties without a trace.
        client.reset(TABLE)
        client.check()
        assert client.server_info()[TABLE].num_episodes == 0
