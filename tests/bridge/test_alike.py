"""Steps and items like the ones before take a short way: it comes to the same as the long one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, rate_limiters, selectors
from shmreplay._native import Incoming, append_elsewhere, stage_item, stage_step, step_bytes
from shmreplay.bridge.protocol import (
    INSERTED,
    ITEM,
    LISTED,
    REFERENCE,
    SQUEEZED,
    STATE,
    Kind,
    Op,
)
from tests.bridge.killed import DEADLINE, TABLE, in_order
from tests.bridge.peer import Peer
from tests.bridge.test_client import Connect, Serve
from tests.bridge.test_refusals import GOOD, opened, written

Writers = Callable[..., Any]

NO_RECEIPT = 2**32 - 1
WRITER = 7
SCHEMA = 3


def limited(most: int) -> reverb.Table:
    """Takes so many items, and then waits for samples."""
    return reverb.Table(
        TABLE,
        selectors.Prioritized(1.0),
        selectors.Fifo(),
        1000,
        rate_limiters.RateLimiter(1.0, 1, -1e9, float(most)),
    )


@pytest.fixture
def writers(make_server: Callable[..., reverb.Server]) -> Iterator[Writers]:
    def make(table: reverb.Table | None = None, keep: int = 4) -> Any:
        server = make_server([in_order(1000) if table is None else table])
        return server.localhost_client().trajectory_writer(keep)

    yield make


def step(value: int) -> dict[str, Any]:
    return {"x": np.full(3, value, np.int32), "y": float(value)}


def both(writer: Any, index: Any = -1) -> dict[str, Any]:
    return {name: writer.history[name][index] for name in ("x", "y")}


def record(first: int = 0, **other: Any) -> bytes:
    """An item of the value of this number, squeezed, of both columns; or one that is otherwise."""
    given = {"op": Op.ITEM, "table": 0, "schema": SCHEMA, "priority": 1.0, "timeout": math.nan}
    given |= {"n": 2, "writer": WRITER, "column": 0, "flags": SQUEEZED, "length": 1, "stride": 1}
    given |= other
    names = ("op", "table", "schema", "priority", "timeout", "n")
    head = ITEM.pack(*(given[name] for name in names))
    for column in (given["column"], 1):
        head += REFERENCE.pack(
            given["writer"], column, given["flags"], given["length"], first, given["stride"]
        )
    return head


def learned(writer: Any) -> Incoming:
    """What knows of an item of both columns of the first step, which was just created."""
    incoming = Incoming(WRITER)
    trajectory = both(writer)
    assert writer.create_item(TABLE, 1.0, trajectory) is not None
    incoming.learn(writer, 0, SCHEMA, trajectory)
    return incoming


# ---------------------------------------------------------------------- the server's side


def test_items_alike_go_in_together(writers: Writers) -> None:
    writer = writers()
    writer.append(step(0))
    incoming = learned(writer)
    for value in (1, 2):
        writer.append(step(value))
    data = b"??" + record(1) + record(2, priority=math.nan) + record(0) + b"\x05"
    states, at = incoming.take(writer, data, 2, NO_RECEIPT, 1)
    assert at == len(data) - 1
    keys = []
    for state, key in STATE.iter_unpack(states):
        assert state == INSERTED
        keys.append(key)
    client = reverb.Client(writer._connection.store.address)
    drawn = client.sample_batch(TABLE, 4, DEADLINE)
    assert drawn.info.key.tolist()[1:] == keys
    assert drawn.data["y"].tolist() == [0.0, 1.0, 2.0, 0.0]
    assert drawn.data["x"].tolist() == [[value] * 3 for value in (0, 1, 2, 0)]
    client.close()


@pytest.mark.parametrize(
    "other",
    [
        {"op": Op.REPLACE},
        {"op": Op.EPISODE},
        {"table": 1},
        {"schema": SCHEMA + 1},
        {"timeout": 1.0},
        {"n": 1},
        {"n": 3},
        {"n": 0},
        {"writer": WRITER + 1},
        {"column": 1},
        {"column": 2**16 - 1},
        {"flags": 0},
        {"flags": SQUEEZED | LISTED},
        {"flags": 255},
        {"length": 2},
        {"length": 0},
        {"length": 2**32 - 1},
        {"first": 1},
        {"first": -1},
        {"first": 2**63 - 1},
        {"first": -(2**63)},
    ],
    ids=str,
)
def test_an_item_that_is_otherwise_is_left_alone(writers: Writers, other: dict[str, Any]) -> None:
    writer = writers()
    writer.append(step(0))
    incoming = learned(writer)
    first = other.get("first", 0)
    rest = {name: value for name, value in other.items() if name != "first"}
    data = record() + record(first, **rest) + record()
    states, at = incoming.take(writer, data, 0, NO_RECEIPT, 1)
    assert (len(states), at) == (STATE.size, len(record()))
    assert incoming.take(writer, data, at, NO_RECEIPT, 2) == (b"", at)
    info = writer._connection.info(0)
    assert info.current_size == 2


def test_a_record_that_is_cut_short_is_left_alone(writers: Writers) -> None:
    writer = writers()
    writer.append(step(0))
    incoming = learned(writer)
    whole = record()
    for n in range(len(whole)):
        assert incoming.take(writer, whole[:n], 0, NO_RECEIPT, 1) == (b"", 0)
    assert incoming.take(writer, whole, len(whole) + 1, NO_RECEIPT, 1) == (b"", len(whole) + 1)
    assert incoming.take(writer, whole, 0, NO_RECEIPT, 1)[1] == len(whole)


def test_a_bad_priority_and_what_is_out_of_reach_are_left_alone(writers: Writers) -> None:
    writer = writers(limited(1000), keep=2)
    writer.append(step(0))
    incoming = learned(writer)
    for priority in (-1.0, math.inf, 1e300):
        data = record(priority=priority)
        assert incoming.take(writer, data, 0, NO_RECEIPT, 1) == (b"", 0)
    for value in (1, 2):
        writer.append(step(value))
    assert incoming.take(writer, record(0), 0, NO_RECEIPT, 1) == (b"", 0)
    assert incoming.take(writer, record(1), 0, NO_RECEIPT, 1)[1] == len(record())


def test_items_that_the_limiter_holds_back_are_left_and_so_are_those_behind(
    writers: Writers,
) -> None:
    writer = writers(limited(3))
    writer.append(step(0))
    incoming = learned(writer)
    data = record() * 5
    states, at = incoming.take(writer, data, 0, NO_RECEIPT, 1)
    inserted = 1 + len(states) // STATE.size
    assert at == (inserted - 1) * len(record())
    assert 1 < inserted < 6
    assert incoming.take(writer, data, at, NO_RECEIPT, 1) == (b"", at)
    assert writer.create_item(TABLE, 1.0, both(writer)) is None  # it waits
    client = reverb.Client(writer._connection.store.address)
    client.mutate_priorities(TABLE, deletes=[])
    assert incoming.take(writer, data, at, NO_RECEIPT, 1) == (b"", at)
    client.sample_batch(TABLE, 3, DEADLINE)
    writer.flush()
    client.close()


# ---------------------------------------------------------------------- the client's side


def test_a_step_alike_is_appended_and_its_bytes_are_kept(writers: Writers) -> None:
    writer = writers()
    writer.append(step(0))
    numbers = writer.row_columns
    buffers = [bytearray(), bytearray(b"y")]
    assert stage_step(writer, numbers, buffers, step(1))
    assert bytes(buffers[0]) == step(1)["x"].tobytes()
    assert bytes(buffers[1]) == b"y" + np.float64(1).tobytes()
    assert writer.episode_steps == 2
    for other in (
        {"x": step(2)["x"]},
        {**step(2), "z": 1},
        {**step(2), "x": np.zeros(4, np.int32)},
        {**step(2), "x": np.zeros(3, np.int64)},
        [1],
    ):
        assert not stage_step(writer, numbers, buffers, other)
        assert step_bytes(writer, numbers, other) is None
    assert not stage_step(writer, (0, 1), buffers, step(2))  # other columns, for all it knows
    writer.append({"x": step(2)["x"]}, partial_step=True)
    assert not stage_step(writer, numbers, buffers, step(2))
    assert len(buffers[0]) == 12


def test_a_step_whose_bytes_go_elsewhere_counts_as_any(writers: Writers) -> None:
    writer = writers()
    writer.append(step(0))
    views: Any = step_bytes(writer, writer.row_columns, step(1))
    assert [bytes(view) for view in views] == [
        step(1)["x"].tobytes(),
        np.float64(1).tobytes(),
    ]
    assert writer.episode_steps == 1
    numbers = writer.row_columns
    assert append_elsewhere(writer, numbers)
    assert writer.episode_steps == 2
    _, _, references = writer.item_references(0, TABLE, 1.0, both(writer))
    assert [reference[3] for reference in references] == [1, 1]
    writer.append({"z": 1})
    assert not append_elsewhere(writer, numbers)
    assert not append_elsewhere(writers(), numbers)  # which has no step to be like
    assert writer.episode_steps == 3


@pytest.mark.parametrize("between", [{"z": 1}, {"y": 1.0, "x": np.full(100_000, 1, np.int32)}])
def test_a_step_appended_between_the_bytes_of_another_and_its_place(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, between: dict[str, Any]
) -> None:
    """As a signal handler may."""
    client = connect(serve(in_order(100), capacity=64 << 20))
    writer = client.trajectory_writer(4)
    given = [between]

    def bytes_of(*arguments: Any) -> Any:
        views = step_bytes(*arguments)
        if views is not None and given:
            writer.append(given.pop())
        return views

    monkeypatch.setattr("shmreplay.bridge.writer.step_bytes", bytes_of)
    for value in range(5):
        writer.append({"x": np.full(100_000, value, np.int32), "y": float(value)})
        writer.create_item(TABLE, 1.0, both(writer))
    writer.close()
    assert not given
    for value in range(5):
        data = client.sample_batch(TABLE, 1, DEADLINE).data
        assert data["y"].tolist() == [value] and np.all(data["x"] == value)


def test_an_item_alike_is_the_record_that_any_is(writers: Writers) -> None:
    writer = writers()
    writer.append(step(0))
    records = bytearray()
    trajectory = both(writer)
    assert not stage_item(writer, records, WRITER, {}, TABLE, 1.0, trajectory)
    _, schema, _ = writer.item_references(0, TABLE, 1.0, trajectory)
    assert not stage_item(writer, records, WRITER, {}, TABLE, 1.0, trajectory)
    known = {schema: SCHEMA}
    assert stage_item(writer, records, WRITER, known, TABLE, 1.0, trajectory)
    writer.append(step(1))
    assert stage_item(writer, records, WRITER, known, TABLE, 2.5, both(writer))
    assert bytes(records) == record(0) + record(1, priority=2.5)
    for other in (
        both(writer, slice(-1, None)),
        {"x": trajectory["x"]},
        {"x": trajectory["y"], "y": trajectory["x"]},
        {"x": trajectory["x"], "y": 1.0},
        [1],
    ):
        assert not stage_item(writer, records, WRITER, known, TABLE, 1.0, other)
    assert not stage_item(writer, records, WRITER, known, "elsewhere", 1.0, trajectory)
    for value in range(2, 6):
        writer.append(step(value))
    assert not stage_item(writer, records, WRITER, known, TABLE, 1.0, trajectory)  # out of reach
    with pytest.raises(errors.PriorityError):
        stage_item(writer, records, WRITER, known, TABLE, math.nan, both(writer))
    assert len(records) == 2 * len(record())


# ---------------------------------------------------------------------- both


@pytest.mark.parametrize("size", [3, 100_000])
def test_what_is_written_alike_and_otherwise_comes_in_order(
    serve: Serve, connect: Connect, size: int
) -> None:
    """A thousand steps (fewer of large ones), now and then other ones, and items of them."""
    rng = random.Random(size)
    client = connect(serve(in_order(4000), capacity=256 << 20))
    writer = client.trajectory_writer(4, confirm=False)
    expected: list[list[int]] = []
    for value in range(1000 if size == 3 else 100):
        x = np.full(size, value, np.int32)
        kind = rng.random()
        if kind < 0.05:
            writer.append({"x": x}, partial_step=True)
            writer.append({"y": value})
        elif kind < 0.1 and value:
            with writer.next_step() as placed:
                placed["x"][...] = x
                placed["y"][...] = value
        else:
            writer.append({"x": x, "y": value})
        length = 1 if rng.random() < 0.9 else min(writer.episode_steps, 3)
        index: Any = -1 if length == 1 and kind < 0.8 else slice(-length, None)
        writer.create_item(TABLE, 1.0, both(writer, index))
        expected.append(list(range(value - length + 1, value + 1)))
        if rng.random() < 0.02:
            writer.flush()
        if rng.random() < 0.02:
            writer.end_episode()
    writer.close()
    for values in expected:
        data = client.sample_batch(TABLE, 1, DEADLINE).data
        assert np.ravel(data["y"]).tolist() == values
        assert np.all(data["x"].reshape(len(values), size) == np.c_[values])


def test_items_of_values_behind_some_that_were_left_out_are_not_taken_for_others(
    serve: Serve,
) -> None:
    """The message itself says that its writer's first values were for a process before this one."""
    server = serve(in_order(1000))
    with Peer(server.port) as peer:
        assert peer.hello().kind == Kind.WELCOME
        assert peer.request(Kind.WRITER_OPEN, opened())[0].kind == Kind.REPLY
        assert peer.request(Kind.WRITE, written(3 * [GOOD], first=2, steps=4))[0].kind == Kind.REPLY
    data = server.localhost_client().sample_batch(TABLE, 3).data["id"]
    assert data.tolist() == [2, 3, 4]
