"""Processes that hold memory: the dead give it back to whoever needs it, the living are named."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import _native, errors
from shmreplay.cli import main
from tests.process.servants import DEADLINE, MIB, Other, make_tables, rows, wait_until

Others = Callable[[], Other]

# Newer versions of Python warn of forking where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

FRAME = 4096  # float64 values of a step


@contextmanager
def serving(name: str, others: Others) -> Iterator[tuple[Other, reverb.Client]]:
    """A server in another process, stopped from cleaning up by itself, and a client here."""
    server = others()
    limiter = reverb.rate_limiters.MinSize(1)
    select = reverb.selectors
    table = reverb.Table("replay", select.Uniform(), select.Fifo(), 1000, limiter, stripes=1)
    server.call("serve", name, [table], capacity=8 * MIB)
    with reverb.Client(f"shm://{name}") as client:
        # The table has memory for all of its items: that cannot be taken from between steps.
        client.insert_batch("replay", rows(*range(1000)))
        client.reset("replay")
        stop(server, client)
        yield server, client
        os.kill(server.pid, signal.SIGCONT)


def stop(server: Other, client: reverb.Client) -> None:
    """Stops a process where it holds no lock, for which everybody would wait."""
    while True:
        os.kill(server.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)
        look = threading.Thread(target=client.check)
        look.start()
        look.join(1.0)
        if not look.is_alive():
            return
        os.kill(server.pid, signal.SIGCONT)
        look.join()


def frames(number: int) -> dict[str, Any]:
    return {"x": np.full((1, FRAME), number, np.float64)}


def fill(client: reverb.Client, keep: list[Any]) -> None:
    """Takes all the memory there is, with steps of a writer that no item refers to."""
    writer = client.trajectory_writer(10**6)
    keep.append(writer)
    for number in range(10**6):
        writer.append({"x": np.full(FRAME, number, np.float64)})


def test_a_dead_borrowers_pins_come_back_to_whoever_needs_room(
    store_name: str, others: Others
) -> None:
    """No server cleans up here: the allocation that finds no room does it."""
    with serving(store_name, others) as (_, client):
        dead = others()
        dead.call("connect", f"shm://{store_name}")
        dead.call("hold_steps", 180, FRAME)
        used = client.stats()["arena_used_bytes"]
        assert used > 180 * 8 * FRAME
        keep: list[Any] = []
        with pytest.raises(errors.ArenaFullError):
            fill(client, keep)
        writer = keep[0]
        dead.kill()
        assert client.stats()["participants"] == 3
        writer.append({"x": np.zeros(FRAME)})  # has room now
        assert client.stats()["participants"] == 2
        for _ in range(100):
            writer.append({"x": np.zeros(FRAME)})
        writer.close()
        client.check()


CALLS: dict[str, Callable[[reverb.Client], Any]] = {
    "insert_batch": lambda c: c.insert_batch("replay", {"x": np.zeros((40, FRAME))}),
    "insert": lambda c: insert_one_by_one(c),
    "next_step": lambda c: write_in_place(c),
    "create_item": lambda c: create_items(c),
}


def insert_one_by_one(client: reverb.Client) -> None:
    for _ in range(9):
        client.insert({"x": np.zeros(FRAME)}, {"replay": 1.0})


def write_in_place(client: reverb.Client) -> None:
    with client.trajectory_writer(50) as writer:
        for _ in range(9):
            with writer.next_step({"x": reverb.TensorSpec((FRAME,), "float64")}) as step:
                step["x"][...] = 1
    writer.close()


def create_items(client: reverb.Client) -> None:
    with client.trajectory_writer(50) as writer:
        for _ in range(9):
            writer.append({"x": np.zeros(FRAME)})
        for _ in range(2000):
            writer.create_item("replay", 1.0, {"x": writer.history["x"][::-2]})
    writer.close()


@pytest.mark.parametrize("call", CALLS)
def test_every_call_that_allocates_looks_for_the_dead(
    store_name: str, others: Others, call: str
) -> None:
    with serving(store_name, others) as (_, client):
        dead = others()
        dead.call("connect", f"shm://{store_name}")
        dead.call("hold_steps", 100, FRAME)
        keep: list[Any] = []
        with pytest.raises(errors.ArenaFullError):
            fill(client, keep)
        before = client.stats()["replay/size"]
        with pytest.raises(errors.ArenaFullError):
            CALLS[call](client)
        dead.kill()
        CALLS[call](client)
        assert client.stats()["replay/size"] >= before
        keep[0].close()
        client.check()


def test_places_of_the_dead_are_used_again(store_name: str, others: Others) -> None:
    """A store has so many places for writers and samplers: those of the dead count."""
    with serving(store_name, others) as (_, client):
        dead = others()
        dead.call("connect", f"shm://{store_name}")
        for _ in range(30):
            dead.call("hold_steps", 1, 1)
        writers = []
        with pytest.raises(errors.StoreLimitError):
            for _ in range(1000):
                writers.append(client.trajectory_writer(1))  # noqa: PERF401
        dead.kill()
        more = [client.trajectory_writer(1) for _ in range(30)]
        for writer in [*writers, *more]:
            writer.close()


def test_a_living_borrower_is_named(
    store_name: str, others: Others, capsys: pytest.CaptureFixture[str]
) -> None:
    server, slow = others(), others()
    server.call("serve", store_name, capacity=8 * MIB)
    with reverb.Client(f"shm://{store_name}") as client:
        client.insert_batch("replay", {"x": np.arange(20.0 * FRAME).reshape(20, FRAME)})
        stats = client.stats()
        assert (stats["borrowed_batches"], stats["oldest_borrow_pid"]) == (0, 0)
        slow.call("connect", f"shm://{store_name}")
        assert slow.call("borrow", "replay", 5) == slow.pid
        slow.call("borrow", "replay", 2)
        stats = client.stats()
        assert (stats["borrowed_batches"], stats["borrowed_items"]) == (2, 7)
        assert stats["oldest_borrow_pid"] == slow.pid
        wait_until(lambda: client.stats()["oldest_borrow_s"] > stats["oldest_borrow_s"], "it ages")
        assert main(["info", store_name]) == 0
        shown = capsys.readouterr().out
        assert f"process {slow.pid} (client) has borrowed 7 items for" in shown

        # What is pinned is not to be had, whatever becomes of the items; the error says why.
        client.reset("replay")
        keep: list[Any] = []
        with pytest.raises(errors.ArenaFullError) as caught:
            fill(client, keep)
        message = str(caught.value)
        assert f"process {slow.pid} (client) has 2 with 7 items, the oldest for" in message
        slow.call("give_back")
        slow.call("give_back")
        assert client.stats()["borrowed_batches"] == 0
        keep[0].append({"x": np.zeros(FRAME)})
        keep[0].close()
        with pytest.raises(errors.ArenaFullError) as caught:
            fill(client, keep)
        assert "orrowed" not in str(caught.value)
        keep[-1].close()
        client.check()


def test_a_view_counts_as_long_as_it_lives(make_server: Callable[..., reverb.Server]) -> None:
    server = make_server(make_tables(), capacity=8 * MIB)
    with server.localhost_client() as client:
        client.insert_batch("replay", rows(1, 2, 3))
        with client.borrow("replay", 2) as items:
            assert server.stats()["borrowed_items"] == 2
            view = items[0].data["x"]
        del items
        assert server.stats()["oldest_borrow_pid"] == os.getpid()
        assert _native.borrowers(server._connection.native)[0][:3] == (os.getpid(), "server", 2)
        del view
        assert server.stats()["borrowed_batches"] == 0
        client.sample_batch("replay", 3)
        next(client.sample("replay", 1))
        assert server.stats()["borrowed_batches"] == 0


def test_the_janitor_takes_back_what_a_dead_borrower_held(store_name: str, others: Others) -> None:
    server, dead = others(), others()
    server.call("serve", store_name, capacity=8 * MIB)
    with reverb.Client(f"shm://{store_name}") as client:
        client.insert_batch("replay", frames(1))
        dead.call("connect", f"shm://{store_name}")
        dead.call("borrow", "replay", 1)
        client.reset("replay")
        before = client.stats()
        assert before["arena_used_bytes"] > 8 * FRAME
        dead.kill()
        wait_until(lambda: client.stats()["participants"] == 2, f"within {DEADLINE} s")
        after = client.stats()
        assert after["arena_used_bytes"] < before["arena_used_bytes"] - 8 * FRAME
        assert after["borrowed_batches"] == 0
