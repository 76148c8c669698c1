"""Calls that wait for extensions that are behind, or for room in a writer: they end in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits
from tests.tables import PATIENCE, Gate, usual_table

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def table(gate: Gate) -> reverb.Table:
    return usual_table(max_size=5000, extensions=[gate])


def close(gate: Gate, client: reverb.Client) -> None:
    """From here on nothing is taken out of the line of changes that extensions are to be told."""
    gate.open.clear()
    client.insert_batch("t", {"x": np.zeros(1)})
    assert gate.reached.wait(PATIENCE)


def fill(server: reverb.Server, key: Any) -> None:
    """Fills that line."""
    client = server.localhost_client()
    for _ in range(limits.EXTENSION_EVENTS + 1):
        try:
            client.update_priorities("t", key, 1.0, timeout=0)
        except errors.DeadlineExceededError:
            return
    pytest.fail("the line is never full")


@pytest.mark.parametrize("seconds", [0, 0.02])
def test_calls_that_wait_for_extensions_end_at_their_deadline_and_change_nothing(
    make_client: MakeClient, gate: Gate, seconds: float
) -> None:
    server, client = make_client([table(gate)])
    writer = client.trajectory_writer(1)
    writer.append({"x": 7.0})
    keys = client.insert_batch("t", {"x": np.zeros(300)})
    close(gate, client)
    fill(server, keys[:1])
    before, priorities = client.server_info()["t"], client.items("t").priority
    calls: list[Callable[[], Any]] = [
        lambda: client.update_priorities("t", keys[:10], 2.0, timeout=seconds),
        lambda: client.mutate_priorities("t", {int(keys[0]): 2.0}, timeout=seconds),
        lambda: client.mutate_priorities("t", deletes=keys[:10].tolist(), timeout=seconds),
        lambda: client.configure_table("t", max_size=3, timeout=seconds),
        lambda: server.configure_table("t", max_size=3, timeout=seconds),
        lambda: client.reset("t", timeout=seconds),
        lambda: writer.replace_item(
            "t", int(keys[0]), {"x": writer.history["x"][-1]}, timeout=seconds
        ),
    ]
    for call in calls:
        with pytest.raises(reverb.DeadlineExceededError, match="its extensions are behind"):
            call()
    assert client.server_info()["t"] == before
    assert (client.items("t").priority == priorities).all()
    gate.open.set()
    assert client.update_priorities("t", keys[:10], 2.0, timeout=PATIENCE) == 10
    client.mutate_priorities("t", {int(keys[0]): 3.0}, keys[1:3].tolist(), timeout=PATIENCE)
    client.configure_table("t", max_size=200, timeout=PATIENCE)
    assert client.server_info()["t"].current_size == 200
    client.reset("t", timeout=PATIENCE)
    assert client.server_info()["t"].current_size == 0


def test_a_change_of_many_keys_says_at_its_deadline_how_many_are_done(
    make_client: MakeClient, gate: Gate
) -> None:
    server, client = make_client([table(gate)])
    keys = client.insert_batch("t", {"x": np.zeros(100)})
    close(gate, client)
    with pytest.raises(reverb.DeadlineExceededError, match=r"\(\d+ of \d+ keys are done\)") as e:
        client.update_priorities("t", np.tile(keys, 30), 2.0, timeout=0.05)
    done = int(str(e.value).split("(")[1].split(" of ")[0])
    assert 100 <= done < 3000
    assert (client.items("t").priority == 2.0).sum() == 100
    with pytest.raises(reverb.DeadlineExceededError, match="come before updates"):
        client.mutate_priorities("t", dict.fromkeys(keys.tolist(), 1.0), keys.tolist(), timeout=0)
    gate.open.set()
    server.stop()


# ------------------------------------------------------------------ writers


def queue_that_is_full(make_client: MakeClient) -> reverb.Client:
    """A client of a table that takes nothing more, and of one that takes everything."""
    other = reverb.Table(
        "other",
        reverb.selectors.Fifo(),
        reverb.selectors.Fifo(),
        5000,
        reverb.rate_limiters.MinSize(1),
    )
    _, client = make_client([reverb.Table.queue("queue", 1), other])
    client.insert({"x": -1.0}, {"queue": 1.0})
    return client


def taken(client: reverb.Client, n: int) -> list[float]:
    """The values of the next n items of the queue."""
    samples = client.sample("queue", n, emit_timesteps=False, timeout=PATIENCE)
    return [float(np.asarray(sample.data[0]).flat[0]) for sample in samples]


@pytest.mark.parametrize("seconds", [0, 0.02])
def test_items_that_do_not_fit_the_window_end_at_their_deadline_and_change_nothing(
    make_client: MakeClient, seconds: float
) -> None:
    client = queue_that_is_full(make_client)
    writer = client.trajectory_writer(1)
    for i in range(limits.WRITER_WINDOW_ITEMS):
        writer.append({"x": float(i)})
        assert writer.create_item("queue", 1.0, {"x": writer.history["x"][-1:]}, PATIENCE) is None
    with pytest.raises(reverb.DeadlineExceededError, match="create_item did not complete"):
        writer.create_item("queue", 1.0, {"x": writer.history["x"][-1:]}, timeout=seconds)
    # Another table makes no difference: items get in in their order.
    with pytest.raises(reverb.DeadlineExceededError, match="create_item did not complete"):
        writer.create_item("other", 1.0, {"x": writer.history["x"][-1:]}, timeout=seconds)
    count = limits.WRITER_WINDOW_ITEMS + 1
    assert taken(client, count) == [float(i - 1) for i in range(count)]
    writer.flush(timeout_ms=int(PATIENCE * 1000))
    assert [info.current_size for info in client.server_info().values()] == [0, 0]


@pytest.mark.parametrize("seconds", [0, 0.02])
def test_steps_whose_items_do_not_fit_the_window_end_at_their_deadline(
    make_client: MakeClient, seconds: float
) -> None:
    client = queue_that_is_full(make_client)
    step = reverb.structured.create_reference_step({"x": None})
    config = reverb.structured.create_config({"x": step["x"][-1:]}, "queue")
    writer = client.structured_writer([config])
    written = 0
    with pytest.raises(reverb.DeadlineExceededError, match=r"(append|flush) did not complete"):
        while written <= 2 * limits.WRITER_WINDOW_ITEMS:
            writer.append({"x": float(written)}, timeout=seconds)
            written += 1
    assert limits.WRITER_WINDOW_ITEMS <= written <= limits.WRITER_WINDOW_ITEMS + 1
    assert taken(client, 1) == [-1.0]
    writer.append({"x": float(written)}, timeout=PATIENCE)
    assert taken(client, written + 1) == [float(i) for i in range(written + 1)]


@pytest.mark.parametrize("seconds", [0, 0.02])
def test_a_legacy_writer_that_cannot_be_closed_in_time_stays_open(
    make_client: MakeClient, seconds: float
) -> None:
    client = queue_that_is_full(make_client)
    writer = client.writer(1, max_in_flight_items=None)
    writer.append({"x": 0.0})
    writer.create_item("queue", 1, 1.0)
    with pytest.raises(reverb.DeadlineExceededError, match="The items stay in line"):
        writer.close(timeout=seconds)
    writer.append({"x": 1.0})
    writer.create_item("queue", 1, 1.0, timeout=PATIENCE)
    assert taken(client, 2) == [-1.0, 0.0]
    writer.close(timeout=PATIENCE)
    assert taken(client, 1) == [1.0]
    with pytest.raises(ValueError, match=r"close\(\) has already been called"):
        writer.close(timeout=PATIENCE)


def test_replacing_answers_in_time_where_another_call_of_the_writer_waits(
    make_client: MakeClient, transport: str
) -> None:
    client = queue_that_is_full(make_client)
    writer = client.trajectory_writer(1)
    writer.append({"x": 7.0})
    newest = {"x": writer.history["x"][-1:]}
    key = writer.create_item("other", 1.0, newest)
    assert key is not None
    writer.append({"x": 8.0})
    newest = {"x": writer.history["x"][-1:]}
    for _ in range(limits.WRITER_WINDOW_ITEMS):
        writer.create_item("queue", 1.0, newest)
    waiting = threading.Thread(target=lambda: writer.create_item("queue", 1.0, newest))
    waiting.start()
    end, value = time.monotonic() + PATIENCE, 7.0
    try:
        if transport == "tcp":  # there, all that a writer sends is dealt with in its order
            with pytest.raises(reverb.DeadlineExceededError, match="replace_item did not complete"):
                while time.monotonic() < end:
                    writer.append({"x": value + 1.0})
                    writer.replace_item("other", key, {"x": writer.history["x"][-1:]}, timeout=0)
                    value += 1.0
        assert client.fetch("other", [key])[0].data["x"].tolist() == [value]
    finally:
        taken(client, limits.WRITER_WINDOW_ITEMS + 2)
        waiting.join(PATIENCE)
    assert not waiting.is_alive()
    writer.append({"x": 10.0})
    assert writer.replace_item("other", key, {"x": writer.history["x"][-1:]}, timeout=PATIENCE)
    assert client.fetch("other", [key])[0].data["x"].tolist() == [10.0]
