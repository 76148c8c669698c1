"""Actors that are killed at any instant: the others go on, and nothing is lost but what the dead
one was doing.

What a dead process held comes back and what it owed the rate limiter is settled; what it left half
done inside a lock is made anew from the items.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest

import shmreplay as reverb

DEADLINE_S = 60.0
KILLS = 25
TABLE = "t"


def act(conn: Connection, address: str, seed: int) -> None:
    """Inserts, samples, updates and deletes without a pause until it is killed."""
    choose = random.Random(seed)
    client = reverb.Client(address)
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    conn.send("ready")
    step = 0
    while True:
        step += 1
        writer.append({"x": np.full(40, step)})
        keep = slice(-2, None) if step % 2 and len(writer.history["x"]) > 1 else slice(-1, None)
        writer.create_item(TABLE, 1.0 + step % 3, {"x": writer.history["x"][keep]})
        if choose.random() < 0.3:
            batch = client.sample(TABLE, 2, emit_timesteps=False, timeout=1)
            keys = [sample.info.key for sample in batch]
            client.update_priorities(TABLE, keys, [2.0] * len(keys))
            client.mutate_priorities(TABLE, deletes=keys[:1])


def settle(server: reverb.Server) -> None:
    """Waits until the dead one's place was given back; all counts agree then."""
    end = time.monotonic() + DEADLINE_S
    while server.stats()["participants"] > 1:
        # What the server's own thread does each second.
        server._connection.store.reclaim_dead()
        assert time.monotonic() < end, server.stats()
        time.sleep(0.01)  # between two looks at a condition with a deadline
    server.check()


@pytest.mark.parametrize("stripes", [1, 2])
def test_others_go_on(stripes: int) -> None:
    context = multiprocessing.get_context("fork")
    when = random.Random(stripes)
    for kill in range(KILLS):
        table = reverb.Table(
            TABLE,
            reverb.selectors.Prioritized(1.0),
            reverb.selectors.Fifo(),
            30,
            reverb.rate_limiters.RateLimiter(1.0, 1, -1e6, 1e6),
            stripes=stripes,
        )
        with reverb.Server([table], capacity=16 << 20) as server:
            here, there = context.Pipe()
            actor = context.Process(target=act, args=(there, server.address, kill))
            actor.start()
            assert here.poll(DEADLINE_S) and here.recv() == "ready"
            here.poll(when.uniform(0.0, 0.02))  # it sends nothing more: a pause of random length
            assert actor.pid is not None
            os.kill(actor.pid, signal.SIGKILL)
            actor.join(DEADLINE_S)
            client = server.localhost_client()
            settle(server)
            client.insert({"x": np.zeros(40, np.int64)}, {TABLE: 5.0}, timeout=DEADLINE_S)
            next(client.sample(TABLE, 1, timeout=DEADLINE_S))
            server.check()
            client.close()
