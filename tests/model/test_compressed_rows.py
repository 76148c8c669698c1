"""Compressed and raw blocks give the same bytes, whatever is written, referred to and read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmreplay import Client, Server, Table
from shmreplay.rate_limiters import MinSize
from shmreplay.selectors import Fifo, Uniform

Step = dict[str, npt.NDArray[Any]]

SHAPES: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
    "pixels": (np.dtype(np.uint8), (40, 41)),
    "words": (np.dtype(np.int64), (300,)),
    "noise": (np.dtype(np.float32), (500,)),
    "flags": (np.dtype(np.bool_), (3,)),
    "half": (np.dtype(np.float16), ()),
    "nothing": (np.dtype(np.int16), (0, 2)),
}


def step(i: int) -> Step:
    """Step i: a moving spot, a counter, and what cannot be compressed."""
    rng = np.random.default_rng(i)
    pixels = np.full(SHAPES["pixels"][1], 17, np.uint8)
    pixels[i % 33 : i % 33 + 6, 3 * i % 33 : 3 * i % 33 + 6] = i % 251
    return {
        "pixels": pixels,
        "words": np.arange(300) + i,
        "noise": rng.random(500, np.float32),
        "flags": rng.random(3) < 0.5,
        "half": np.asarray(i % 1000, np.float16),
        "nothing": np.zeros((0, 2), np.int16),
    }


STEPS = [step(i) for i in range(700)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    tables = [
        Table(name, Uniform(), Fifo(), 40, MinSize(1), compress=compress)
        for name, compress in (("packed", "lz4"), ("raw", None))
    ]
    with Server(tables, capacity=96 * 2**20) as running:
        yield running


@pytest.fixture
def clients(server: Server) -> Iterator[tuple[Client, Client]]:
    """One client for each of the two tables, which are empty."""
    with Client(server.address) as one, Client(server.address) as other:
        one.reset("packed")
        other.reset("raw")
        yield one, other


# How a column of an item refers to the last steps of the history.
REFERENCES = st.one_of(
    st.integers(-30, -1),
    st.tuples(st.integers(1, 30), st.integers(1, 4)).map(lambda t: slice(-t[0], None, t[1])),
    st.tuples(st.integers(1, 30), st.integers(1, 3)).map(
        lambda t: slice(-1, -t[0] - 1 if t[0] < 30 else None, -t[1])
    ),
    st.lists(st.integers(-30, -1), min_size=1, max_size=6),
)
ITEM = st.fixed_dictionaries(dict.fromkeys(SHAPES, REFERENCES))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 60)),
        st.tuples(st.just("item"), ITEM),
        st.tuples(st.just("rows"), st.integers(1, 90)),
        st.tuples(st.just("borrow"), st.integers(1, 4)),
        st.tuples(st.just("read"), st.none()),
        st.tuples(st.just("episode"), st.booleans()),
    ),
    min_size=4,
    max_size=14,
)


def expected(reference: Any, name: str, written: list[int]) -> npt.NDArray[Any]:
    column = [STEPS[i][name] for i in written]
    if isinstance(reference, int):
        return np.asarray(column[reference])
    if isinstance(reference, list):
        return np.stack([column[k] for k in reference])
    return np.stack(column[reference])


class Pair:
    """Two writers that do the same, and what their items hold."""

    def __init__(self, clients: tuple[Client, Client]) -> None:
        self.clients = clients
        self.tables = ("packed", "raw")
        self.writers = [
            client.trajectory_writer(num_keep_alive_refs=64, compress=how)
            for client, how in zip(clients, ("lz4", "none"), strict=True)
        ]
        self.written: list[int] = []
        self.next = 0
        self.items: dict[str, dict[int, Step]] = {"packed": {}, "raw": {}}
        self.lent = ExitStack()
        self.views: list[tuple[Any, Step]] = []

    def steps(self, n: int) -> None:
        for _ in range(n):
            i = self.next % len(STEPS)
            self.next += 1
            for writer in self.writers:
                writer.append(STEPS[i])
            self.written = [*self.written, i][-64:]

    def item(self, references: dict[str, Any]) -> None:
        if len(self.written) < 30:
            self.steps(30 - len(self.written))
        data = {name: expected(r, name, self.written) for name, r in references.items()}
        for writer, table in zip(self.writers, self.tables, strict=True):
            columns = {name: writer.history[name][r] for name, r in references.items()}
            for name, column in columns.items():
                np.testing.assert_array_equal(column.numpy(), data[name])
            key = writer.create_item(table, 1.0, columns)
            assert key is not None
            self.items[table][key] = data

    def rows(self, n: int) -> None:
        some = [STEPS[(self.next + i) % len(STEPS)] for i in range(n)]
        data = {name: np.stack([s[name] for s in some]) for name in SHAPES}
        for client, table in zip(self.clients, self.tables, strict=True):
            keys = client.insert_batch(table, data)
            self.items[table].update({int(k): s for k, s in zip(keys, some, strict=True)})

    def borrow(self, n: int) -> None:
        for client, table in zip(self.clients, self.tables, strict=True):
            if not self.items[table]:
                return
            for sample in self.lent.enter_context(client.borrow(table, n)):
                self.views.append((sample.data, self.items[table][int(sample.info.key)]))

    def read(self, _: None) -> None:
        for client, table in zip(self.clients, self.tables, strict=True):
            keys = client.keys(table)
            for sample in client.fetch(table, keys):
                same(sample.data, self.items[table][int(sample.info.key)])

    def episode(self, clear: bool) -> None:
        for writer in self.writers:
            writer.end_episode(clear_buffers=clear)
        if clear:
            self.written = []

    def end(self) -> None:
        self.read(None)
        for writer in self.writers:
            writer.close()
        self.read(None)
        for data, wanted in self.views:  # lent while all of that went on
            same(data, wanted)
            assert not any(leaf.flags.writeable for leaf in data.values())
        self.lent.close()
        self.clients[0].check()


def same(data: Any, wanted: Step) -> None:
    assert data.keys() == wanted.keys()
    for name, leaf in data.items():
        assert leaf.dtype == SHAPES[name][0]
        np.testing.assert_array_equal(leaf, wanted[name])


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(actions=ACTIONS)
def test_compressed_and_raw_give_the_same(
    clients: tuple[Client, Client], actions: list[tuple[str, Any]]
) -> None:
    pair = Pair(clients)
    for name, argument in actions:
        getattr(pair, name)(argument)
    pair.end()
    before = clients[0].stats()["compressed_stored_bytes"]
    clients[0].reset("packed")
    clients[1].reset("raw")
    stats = clients[0].stats()
    assert before >= 0
    assert stats["compressed_stored_bytes"] == stats["compressed_raw_bytes"] == 0
    clients[0].check()


def test_what_is_compressed_is_smaller(clients: tuple[Client, Client]) -> None:
    with clients[0].trajectory_writer(1) as writer:
        for i in range(300):
            writer.append({"pixels": STEPS[i]["pixels"]})
            writer.create_item("packed", 1.0, {"pixels": writer.history["pixels"][-1]})
    stats = clients[0].stats()
    assert stats["compressed_raw_bytes"] > 0
    assert stats["compressed_stored_bytes"] < stats["compressed_raw_bytes"] / 10
    writer.close()
