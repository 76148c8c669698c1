"""Faults that were there once: each test is named for one and says what happened."""

from __future__ import annotations

import collections
import gc
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb

DEADLINE_S = 60.0
Pair = collections.namedtuple("Pair", "a b")


@pytest.fixture
def client() -> Iterator[reverb.Client]:
    def table(name: str) -> reverb.Table:
        uniform, fifo = reverb.selectors.Uniform(), reverb.selectors.Fifo()
        return reverb.Table(name, uniform, fifo, 1000, reverb.rate_limiters.MinSize(1))

    tables = [table("a"), table("b"), reverb.Table.queue("q", 5)]
    with reverb.Server(tables, capacity=32 << 20) as server:
        client = server.localhost_client()
        yield client
        client.close()


def until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the condition did not come about"
        time.sleep(0.01)  # between two looks


def sampler_threads() -> int:
    return sum(thread.name == "shmreplay-sampler" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1, "b": 2}, Pair(1, 2)),
        ({"o": {"a": 1, "b": 2}}, {"o": Pair(1, 2)}),
        ({0: 1, 1: 2}, [1, 2]),
    ],
)
def test_insert_remembered_another_container(
    client: reverb.Client, first: Any, second: Any
) -> None:
    # An insert was refused because an earlier one had the same paths in another container.
    client.insert(first, {"a": 1.0})
    client.insert(second, {"b": 1.0})
    assert client.server_info()["b"].current_size == 1


def test_a_refused_insert_spoiled_the_next(client: reverb.Client) -> None:
    # True and False are 1 and 0 as keys: the writer that refused them then refused a list.
    with pytest.raises(TypeError):
        client.insert({True: 1, False: 2}, {"a": 1.0})
    client.insert([1, 2], {"a": 1.0})
    client.check()


def test_a_dropped_sampler_ran_for_ever(client: reverb.Client) -> None:
    # Its thread held it, so it went on drawing; on a queue it ate the items.
    before = sampler_threads()
    sampler = client.sampler("q", 1, timeout=0.05)
    with pytest.raises(reverb.DeadlineExceededError):
        next(sampler)
    del sampler
    gc.collect()
    until(lambda: sampler_threads() == before)
    for i in range(2):
        client.insert({"x": i}, {"q": 1.0})
    assert [s[0].data[0] for s in client.sample("q", 2, timeout=DEADLINE_S)] == [0, 1]


def test_a_with_block_lost_what_was_gathered_ahead(client: reverb.Client) -> None:
    # Two of four items of a queue were gathered ahead when the block ended, and were gone.
    for i in range(4):
        client.insert({"x": i}, {"q": 1.0})
    with client.sampler("q", 1, prefetch=2) as batches:
        assert next(batches).data["x"].tolist() == [[0]]
        until(lambda: client.server_info()["q"].current_size == 1)
    rest = client.sample_batch("q", 3, timeout=DEADLINE_S)
    assert rest.data["x"].ravel().tolist() == [1, 2, 3]
    client.check()


def test_close_gives_out_what_was_gathered_ahead(client: reverb.Client) -> None:
    for i in range(3):
        client.insert({"x": i}, {"q": 1.0})
    sampler = client.sampler("q", 1, prefetch=2)
    until(lambda: client.server_info()["q"].current_size == 1)
    assert [b.data["x"].item() for b in sampler.close()] == [0, 1]
    assert client.sample_batch("q", 1, timeout=DEADLINE_S).data["x"].item() == 2
    client.check()


def test_a_leaf_that_read_its_writer_hung(client: reverb.Client) -> None:
    # append held the writer's lock while it asked the leaf for its array.
    writer = client.trajectory_writer(4)
    writer.append({"x": np.zeros(1)})

    class Lazy:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return writer.history["x"][-1].numpy()

    with pytest.raises(reverb.errors.WriterStateError, match="within a call of its own"):
        writer.append({"x": Lazy()})
    writer.append({"x": np.ones(1)})
    assert len(writer.history["x"]) == 2


def test_huge_slice_steps_overflowed(client: reverb.Client) -> None:
    # The length of a slice was computed with an overflow: empty columns, or no memory.
    writer = client.trajectory_writer(8)
    for i in range(8):
        writer.append({"a": i})
    history = writer.history["a"]
    assert len(history[:: sys.maxsize]) == 1
    assert len(history[:: -sys.maxsize]) == 1
    assert len(history[0 : 3 : sys.maxsize]) == 1
    assert len(history[0 : 3 : 10**30]) == 1


def test_timeouts_were_not_checked(client: reverb.Client) -> None:
    # An int beyond all floats, or text in a writer's calls, raised bare errors.
    client.insert({"x": 1}, {"a": 1.0}, timeout=10**400)
    assert len(client.sample_batch("a", 2, timeout=10**400).info.key) == 2
    writer = client.trajectory_writer(1)
    bad: Any = "1"
    for call in (writer.flush, writer.end_episode):
        with pytest.raises(reverb.errors.ArgumentTypeError):
            call(timeout_ms=bad)
