"""Extensions while other processes work and die: what they are told is what happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits
from shmreplay.extensions import ExtensionItem

DEADLINE_S = 60.0
MAX_SIZE = 40
TABLE = "t"


class Replica(reverb.TableExtension):
    """A table made of what it is told; any change that does not fit is an error."""

    def __init__(self) -> None:
        self.items: dict[int, tuple[float, int]] = {}
        self.inserts = self.deletes = self.samples = self.updates = self.told = 0

    def on_insert(self, item: ExtensionItem) -> None:
        assert item.key not in self.items
        (value,) = set(np.ravel(item.data["x"]).tolist())  # steps that are whole
        self.items[item.key] = (item.priority, value)
        self.inserts += 1
        self.told += 1

    def known(self, item: ExtensionItem) -> None:
        self.told += 1
        _, value = self.items[item.key]
        assert set(np.ravel(item.data["x"]).tolist()) == {value}

    def on_delete(self, item: ExtensionItem) -> None:
        self.known(item)
        del self.items[item.key]
        self.deletes += 1

    def on_update(self, item: ExtensionItem) -> None:
        self.known(item)
        self.items[item.key] = (item.priority, self.items[item.key][1])
        self.updates += 1

    def on_sample(self, item: ExtensionItem) -> None:
        self.known(item)
        assert item.priority == self.items[item.key][0]
        self.samples += 1

    def on_reset(self) -> None:
        self.told += 1
        self.items.clear()
        self.inserts = self.deletes = self.samples = 0


def make_table(extension: reverb.TableExtension) -> reverb.Table:
    return reverb.Table(
        TABLE,
        reverb.selectors.Prioritized(1.0),
        reverb.selectors.Fifo(),
        MAX_SIZE,
        reverb.rate_limiters.MinSize(1),
        max_times_sampled=5,
        extensions=[extension],
    )


def work(client: reverb.Client, seed: int, rounds: int) -> int:
    """Everything that changes a table; gives the number of updates that were applied."""
    choose = random.Random(seed)
    updates = 0
    with client.trajectory_writer(num_keep_alive_refs=2) as writer:
        for step in range(rounds):
            writer.append({"x": np.full(20, seed * 10**6 + step)})
            writer.create_item(TABLE, 1.0 + step % 3, {"x": writer.history["x"][-1:]})
            n = choose.randint(1, 8)
            client.insert_batch(TABLE, {"x": np.full((n, 3), -(seed * 10**6 + step))}, 2.0)
            batch = client.sample(TABLE, 2, emit_timesteps=False, timeout=30)
            keys = [sample.info.key for sample in batch]
            updates += client.update_priorities(TABLE, keys, [float(step % 7)] * len(keys))
            client.mutate_priorities(TABLE, deletes=keys[: step % 2])
            if step % 40 == 39:
                client.reset(TABLE)
    return updates


def work_and_count(sender: Connection, address: str, seed: int) -> None:
    with reverb.Client(address) as client:
        sender.send(work(client, seed, 150))
    sender.close()


def work_until_killed(sender: Connection, address: str, seed: int) -> None:
    client = reverb.Client(address)
    client.server_info()
    sender.send("ready")
    while True:
        work(client, seed, 100)


def caught_up(server: reverb.Server) -> None:
    thread = server._extensions
    assert thread is not None
    end = time.monotonic() + DEADLINE_S
    while server.stats()[f"{TABLE}/events"] > 0 or thread._source.batch is not None:
        assert time.monotonic() < end
        time.sleep(0.001)  # between two looks at a condition with a deadline


def compare(server: reverb.Server, replica: Replica) -> None:
    """What was told is what the table holds and counts."""
    caught_up(server)
    stats = server.stats()
    assert stats[f"{TABLE}/extension_errors"] == stats[f"{TABLE}/events_dropped"] == 0
    assert len(replica.items) == stats[f"{TABLE}/size"] <= MAX_SIZE
    assert replica.inserts == stats[f"{TABLE}/inserts"]
    assert replica.deletes == stats[f"{TABLE}/deletes"]
    client = server.localhost_client()
    keys = list(replica.items)
    assert client.update_priorities(TABLE, keys, [replica.items[k][0] for k in keys]) == len(keys)
    caught_up(server)


def test_what_is_told_is_what_happened(
    make_server: Callable[..., reverb.Server], run_processes: Callable[[str, Any], list[Any]]
) -> None:
    replica = Replica()
    server = make_server([make_table(replica)])
    updates = run_processes(
        "spawn", [(work_and_count, (server.address, seed)) for seed in range(1, 4)]
    )
    caught_up(server)
    assert replica.updates == sum(updates)
    assert replica.samples == server.stats()[f"{TABLE}/samples"]
    compare(server, replica)
    server.check()


def test_killed_producers(make_server: Callable[..., reverb.Server]) -> None:
    context = multiprocessing.get_context("fork")
    when = random.Random(3)
    replica = Replica()
    server = make_server([make_table(replica)])
    for kill in range(12):
        actors = []
        for seed in (2 * kill + 1, 2 * kill + 2):
            here, there = context.Pipe()
            actor = context.Process(target=work_until_killed, args=(there, server.address, seed))
            actor.start()
            assert here.poll(DEADLINE_S)
            actors.append(actor)
        here.recv()
        before, end = replica.told, time.monotonic() + DEADLINE_S
        while replica.told < before + 10:  # they are at work
            assert time.monotonic() < end
            time.sleep(0.001)  # between two looks at a condition with a deadline
        here.poll(when.uniform(0.0, 0.1))  # it sends nothing more: a pause of random length
        for actor in actors:
            assert actor.pid is not None
            os.kill(actor.pid, signal.SIGKILL)
            actor.join(DEADLINE_S)
        end = time.monotonic() + DEADLINE_S
        while server.stats()["participants"] > 1:
            server._connection.store.reclaim_dead()  # what the server does each second
            assert time.monotonic() < end
        compare(server, replica)
        server.check()
    assert replica.told > 100


def serve_until_killed(sender: Connection, name: str) -> None:
    class Slow(reverb.TableExtension):
        def on_insert(self, item: ExtensionItem) -> None:
            sender.send("behind")
            time.sleep(3600)  # until it dies

    server = reverb.Server([make_table(Slow())], name=name, capacity=32 << 20)
    sender.send(server.address)
    time.sleep(3600)  # until it is killed


def test_nobody_waits_for_a_dead_server(unique_name: Callable[[], str]) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    name = unique_name()
    process = context.Process(target=serve_until_killed, args=(there, name))
    process.start()
    assert here.poll(DEADLINE_S)
    client = reverb.Client(here.recv())
    client.insert_batch(TABLE, {"x": np.zeros(1)})
    assert here.poll(DEADLINE_S) and here.recv() == "behind"
    with pytest.raises(errors.DeadlineExceededError, match="its extensions are behind"):
        client.insert_batch(TABLE, {"x": np.zeros(3000)}, timeout=0.3)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    before = client.stats()
    assert before[f"{TABLE}/events_dropped"] == 0
    client.insert_batch(TABLE, {"x": np.zeros(3000)}, timeout=DEADLINE_S)
    client.reset(TABLE)
    after = client.stats()
    assert after[f"{TABLE}/events_dropped"] > 5000
    assert after[f"{TABLE}/events"] == before[f"{TABLE}/events"]
    client.check()
    client.close()
    # The next server of the name clears away what the dead one left.
    reverb.Server([make_table(Replica())], name=name, capacity=16 << 20).stop()


class Keys(reverb.TableExtension):
    """Notes what is inserted, in order."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def on_insert(self, item: ExtensionItem) -> None:
        self.keys.append(item.key)


def test_the_next_server_goes_on_telling(unique_name: Callable[[], str]) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    name = unique_name()
    process = context.Process(target=serve_until_killed, args=(there, name))
    process.start()
    assert here.poll(DEADLINE_S)
    client = reverb.Client(here.recv())
    keys = client.insert_batch(TABLE, {"x": np.zeros(400)}).tolist()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    keys += client.insert_batch(TABLE, {"x": np.zeros(5)}).tolist()
    told = Keys()
    with reverb.Server([make_table(told)], name=name, recover=True) as server:
        keys += client.insert_batch(TABLE, {"x": np.zeros(5)}).tolist()
        caught_up(server)
        lost = len(keys) - len(told.keys)  # what the dead one had taken
        assert 0 <= lost <= limits.EXTENSION_BATCH
        assert told.keys == keys[lost:]
        assert server.stats()[f"{TABLE}/events_dropped"] == 0
        client.check()
        client.close()


def test_who_finds_a_server_dead_does_not_silence_its_successor(
    unique_name: Callable[[], str],
) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    name = unique_name()
    process = context.Process(target=serve_until_killed, args=(there, name))
    process.start()
    assert here.poll(DEADLINE_S)
    client = reverb.Client(here.recv())
    native = client._connected().native
    lives, found_dead, go_on = native.server_lives, threading.Event(), threading.Event()
    assert lives is not None

    def look_slowly(lives: Callable[[], bool] = lives) -> bool:
        if lives():
            return True
        found_dead.set()
        assert go_on.wait(DEADLINE_S)
        return False

    native.server_lives = look_slowly
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    data = {"x": np.zeros(3 * limits.EXTENSION_EVENTS)}
    thread = threading.Thread(target=client.insert_batch, args=(TABLE, data))
    thread.start()
    assert found_dead.wait(DEADLINE_S)
    with reverb.Server([make_table(Keys())], name=name, recover=True) as server:
        caught_up(server)  # it serves already
        go_on.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        caught_up(server)
        assert server.stats()[f"{TABLE}/events_dropped"] == 0
        client.close()


def test_a_table_that_has_lost_its_extensions(
    unique_name: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    name = unique_name()
    process = context.Process(target=serve_until_killed, args=(there, name))
    process.start()
    assert here.poll(DEADLINE_S)
    here.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    with reverb.Server(None, name=name, recover=True) as server:
        client = server.localhost_client()
        client.insert_batch(TABLE, {"x": np.zeros(3000)}, timeout=DEADLINE_S)  # nobody is behind
        client.check()
        client.close()
    assert "was made with extensions and is served without" in caplog.text
