"""Whoever writes a checkpoint is killed at its system calls: the one before is whole each time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay.checkpointers import DefaultCheckpointer
from tests.conftest import PROCESS_DEADLINE, ROOT, SHARED_MEMORY

# 1: at each stop; 5: at every fifth, where that takes too long.
STEP = int(os.environ.get("CHECKPOINT_KILL_STEP", "1"))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory whose files are synchronised without a wait for a disk."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as path:
        yield Path(path)


def test_killed_at_its_system_calls(
    make_server: Callable[..., reverb.Server], in_memory: Path
) -> None:
    def tables() -> list[reverb.Table]:
        limiter = reverb.rate_limiters.MinSize(1)
        return [
            reverb.Table("t", reverb.selectors.Uniform(), reverb.selectors.Fifo(), 50, limiter),
            reverb.Table("h", reverb.selectors.MaxHeap(), reverb.selectors.Fifo(), 50, limiter),
            reverb.Table(
                *("packed", reverb.selectors.Uniform(), reverb.selectors.Fifo(), 50, limiter),
                compress="lz4",
            ),
        ]

    server = make_server(tables(), checkpointer=DefaultCheckpointer(in_memory))
    with server.localhost_client() as client:
        for name in ("t", "h"):
            client.insert_batch(name, {"x": np.arange(30)})
        client.checkpoint()
        for name in ("t", "h"):
            client.insert_batch(name, {"x": np.arange(30, 70)})
    # One block is compressed, and one is not yet: its rows are held apart from it meanwhile.
    writer = server.localhost_client().trajectory_writer(1)
    for i in range(3):
        writer.append({"x": np.full(200_000, i, np.uint8)})
        writer.create_item("packed", 1.0, {"x": writer.history["x"][-1:]})
    writer.flush()
    allocated = server.stats()["arena_allocations"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.process.checkpoint_killer"),
            *(server.address, str(in_memory), str(STEP), "1"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=5 * PROCESS_DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50
    server.check()
    last = Path(server.checkpoint().path)
    assert os.listdir(in_memory) == [last.name]
    assert server.stats()["arena_allocations"] == allocated < 30
    assert server.stats()["compressed_stored_bytes"] > 0
    writer.close()
    server.stop()
    server = make_server(tables(), checkpointer=DefaultCheckpointer(in_memory))
    with server.localhost_client() as client:
        sizes = {name: info.current_size for name, info in client.server_info().items()}
        assert sizes == {"t": 50, "h": 50, "packed": 3}
        for (sample,) in client.sample("packed", 20):
            assert (sample.data[0] == sample.data[0][0]).all()
        assert set(client.sample_batch("t", 100).data["x"]) <= set(range(20, 70))
