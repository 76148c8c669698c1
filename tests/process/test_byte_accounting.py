"""Every byte of a store is accounted for: after any traffic, and after any death."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import Server
from tests.conftest import PROCESS_DEADLINE

PARTS = (
    *("fixed_bytes", "bound/index_bytes", "free/index_bytes", "block_bytes", "trajectory_bytes"),
    *("pinned_bytes", "episode_bytes", "ledger_bytes", "schema_bytes", "margin_bytes"),
    *("fragmented_bytes", "free_bytes"),
)


def make_tables() -> list[reverb.Table]:
    selectors, limiter = reverb.selectors, reverb.rate_limiters.MinSize(1)
    return [
        reverb.Table(
            "bound",
            selectors.Prioritized(0.7),
            selectors.Fifo(),
            2000,
            limiter,
            max_bytes=2_000_000,
        ),
        reverb.Table("free", selectors.Uniform(), selectors.Uniform(), 300, limiter),
    ]


def work(sender: Any, address: str, seed: int, rounds: int | None) -> None:
    """Items of all lengths, samples, updates, deletes; without an end where no rounds are given."""
    rng = random.Random(seed)
    with reverb.Client(address) as client:
        client.insert_batch("free", {"y": np.zeros((3, 5))})
        sender.send(None)
        done = 0
        while rounds is None or done < rounds:
            with client.trajectory_writer(30) as writer:
                for step in range(60):
                    writer.append({"x": np.full(rng.choice([50, 50]), step, np.float64)})
                    start = rng.randrange(max(step - 29, 0), step + 1) - step - 1
                    for name in ("bound", "free"):
                        writer.create_item(name, rng.random(), {"x": writer.history["x"][start:]})
                with client.borrow("bound", 5, timeout=10) as kept:
                    keys = [int(sample.info.key) for sample in kept]
                del kept
                client.mutate_priorities("bound", {keys[0]: 2.0}, keys[3:])
            done += 1


def check(server: Server, client: reverb.Client) -> dict[str, float]:
    stats = client.stats()
    assert sum(stats[part] for part in PARTS) == stats["committed_bytes"]
    used = ("block", "trajectory", "pinned", "episode", "ledger", "schema")
    assert sum(stats[f"{part}_bytes"] for part in used) == stats["arena_used_bytes"]
    assert stats["fragmented_bytes"] + stats["free_bytes"] == stats["arena_free_bytes"]
    assert stats["committed_bytes"] <= stats["capacity_bytes"]
    server.check()
    return stats


def test_the_parts_add_up_after_random_traffic(
    make_server: Callable[..., Server], run_processes: Callable[..., list[Any]]
) -> None:
    server = make_server(make_tables(), capacity=64 << 20)
    run_processes("spawn", [(work, (server.address, seed, 4)) for seed in range(2)])
    with server.localhost_client() as client:
        stats = check(server, client)
        assert 0 < stats["bound/data_bytes"] <= 2_000_000
        assert stats["pinned_bytes"] == 0 < stats["block_bytes"]
        with client.borrow("bound", 20) as lent:
            assert len(lent) == 20
            client.reset("bound")
            client.reset("free")
            stats = check(server, client)
            assert stats["pinned_bytes"] > 20 * 400
            assert stats["block_bytes"] == stats["bound/data_bytes"] == 0
        del lent
        assert check(server, client)["pinned_bytes"] == 0


def test_steps_that_no_item_has_are_pinned(make_server: Callable[..., Server]) -> None:
    server = make_server(make_tables())
    with server.localhost_client() as client, client.trajectory_writer(4) as writer:
        for _ in range(4):
            writer.append({"x": np.zeros(1000)})
        stats = check(server, client)
        assert stats["pinned_bytes"] >= 4 * 8000 and stats["block_bytes"] == 0
        writer.create_item("free", 1.0, {"x": writer.history["x"][-1:]})
        stats = check(server, client)
        assert stats["pinned_bytes"] == 0 and stats["block_bytes"] >= 4 * 8000


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_after_kills(make_server: Callable[..., Server], seed: int) -> None:
    import multiprocessing

    rng = random.Random(seed)
    server = make_server(make_tables(), capacity=64 << 20)
    context = multiprocessing.get_context("fork")
    with server.localhost_client() as client:
        for victim in range(8):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (sender, server.address, 100 * seed + victim, None)
            process = context.Process(target=work, args=arguments)
            process.start()
            assert receiver.poll(PROCESS_DEADLINE), "it does not begin"
            time.sleep(rng.random() * 0.05)  # the instant of its death is to be any
            check(server, client)
            process.kill()
            process.join()
            check(server, client)
        client.sample("bound", 1)
        client._connected().store.reclaim_dead()
        stats = check(server, client)
        assert stats["bound/data_bytes"] <= 2_000_000
        assert stats["pinned_bytes"] == 0
