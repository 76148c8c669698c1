"""Many clients at once: all make progress, and what there is of each is bounded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import shmreplay as reverb
from shmreplay import rate_limiters, selectors
from tests.bridge.test_client import wait_until

CLIENTS = int(os.environ.get("BRIDGE_CLIENTS", "200"))
PROCESSES = 4
ROUNDS = 5
DEADLINE = 120.0


def work(sender: Any, address: str, first: int, count: int) -> None:
    """Clients of one process take turns on few threads, each with an insert and a sample."""
    failures: list[str] = []
    with ExitStack() as stack:
        remote = reverb.RemoteOptions(timeout=DEADLINE)
        clients = [stack.enter_context(reverb.Client(address, remote)) for _ in range(count)]

        def run(part: int) -> None:
            try:
                for turn in range(ROUNDS):
                    for i in range(part, count, 4):
                        one = np.array([first + i + turn * 10_000])
                        clients[i].insert_batch("uniform", {"id": one}, timeout=DEADLINE)
                        clients[i].insert({"id": one[0]}, {"queue": 1.0}, timeout=DEADLINE)
                        clients[i].sample_batch("uniform", 2, timeout=DEADLINE)
            except Exception as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=run, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sender.send(failures)


def test_many_clients_write_and_sample(
    serve: Callable[..., reverb.Server], run_processes: Callable[..., list[Any]]
) -> None:
    limiter = rate_limiters.MinSize(1)
    server = serve(
        reverb.Table("uniform", selectors.Uniform(), selectors.Fifo(), 1000, limiter),
        reverb.Table.queue("queue", CLIENTS * ROUNDS),
        capacity=128 << 20,
    )
    share = CLIENTS // PROCESSES
    address = f"tcp://127.0.0.1:{server.port}"
    jobs = [(work, (address, i * share, share)) for i in range(PROCESSES)]
    assert run_processes("spawn", jobs) == [[]] * PROCESSES
    with reverb.Client(server.address) as client:
        info = client.server_info()
        assert info["uniform"].rate_limiter_info.insert_stats.completed == CLIENTS * ROUNDS
        assert info["uniform"].rate_limiter_info.sample_stats.completed == 2 * CLIENTS * ROUNDS
        ids = client.sample_batch("queue", CLIENTS * ROUNDS, timeout=0).data["id"].ravel()
    expected = [i + turn * 10_000 for turn in range(ROUNDS) for i in range(CLIENTS)]
    assert sorted(ids.tolist()) == sorted(expected)
    server.check()
    # Everything of the clients is gone.
    bridge: Any = server._bridge
    wait_until(lambda: bridge._dispatcher._nbytes == 0)
