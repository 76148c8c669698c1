"""The index of a large store takes no memory of the process that writes a checkpoint of it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay.checkpoint_scratch import PIECE, Scratch, pieces, unique
from shmreplay.checkpointers import DefaultCheckpointer
from tests.conftest import PROCESS_DEADLINE, ROOT

MakeServer = Callable[..., reverb.Server]

ITEMS = int(os.environ.get("CHECKPOINT_MEMORY_ITEMS", "400000"))
TRAJECTORIES = ITEMS // 20
LIMIT_MIB = 40  # stacks of two threads among it: 16

SAVER = """
import re, resource, sys
from pathlib import Path
import shmreplay as reverb
with reverb.Client(sys.argv[1]) as client:
    client.server_info()
    now = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (now + (int(sys.argv[2]) << 20), -1))
    for _ in range(2):
        client.checkpoint()
"""


def test_little_memory_however_many_items(make_server: MakeServer, tmp_path: Path) -> None:
    limiter = reverb.rate_limiters.MinSize(1)
    selectors = reverb.selectors
    tables = [
        reverb.Table("rows", selectors.Uniform(), selectors.Fifo(), ITEMS, limiter),
        reverb.Table("parts", selectors.Prioritized(0.5), selectors.Fifo(), ITEMS, limiter),
    ]
    server = make_server(
        tables, capacity=(256 << 20) + 600 * ITEMS, checkpointer=DefaultCheckpointer(tmp_path)
    )
    with server.localhost_client() as client:
        for first in range(0, ITEMS, 1000):
            client.insert_batch("rows", {"x": np.arange(first, first + 1000)})
        with client.trajectory_writer(2) as writer:
            for i in range(TRAJECTORIES + 1):
                writer.append({"a": np.int32(i), "b": np.int32(-i)})
                if i == 0:
                    continue
                history = writer.history
                parts = {"a": history["a"][-1:], "b": history["b"][-2:]}
                writer.create_item("parts", 1.0, parts)
    saver = subprocess.run(
        [sys.executable, "-c", SAVER, server.address, str(LIMIT_MIB)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PROCESS_DEADLINE,
    )
    assert saver.returncode == 0, saver.stderr
    server.stop()
    server = make_server(
        tables, capacity=(256 << 20) + 600 * ITEMS, checkpointer=DefaultCheckpointer(tmp_path)
    )
    stats = server.stats()
    assert (stats["rows/size"], stats["parts/size"]) == (ITEMS, TRAJECTORIES)


def test_where_files_cannot_be_mapped_there_is_memory(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(mmap, "mmap", refused)
    limiter = reverb.rate_limiters.MinSize(1)
    selectors = reverb.selectors
    table = reverb.Table("t", selectors.Uniform(), selectors.Fifo(), 50, limiter)
    server = make_server([table], checkpointer=DefaultCheckpointer(tmp_path))
    server.localhost_client().insert_batch("t", {"x": np.arange(20)})
    assert server.checkpoint().items == 20 and server.checkpoint().new_bytes == 0


def test_what_is_scratched_on_has_no_name_and_starts_as_zeros(tmp_path: Path) -> None:
    scratch = Scratch(str(tmp_path))
    assert not os.listdir(tmp_path)
    arrays = [
        scratch.array(n, np.uint32, populate) for n in (0, 1, 5000) for populate in (False, True)
    ]
    scratch.close()
    for number, array in enumerate(arrays):
        assert not array.any()
        array[:] = number + 1
    assert [set(array.tolist()) for array in arrays[2:]] == [{3}, {4}, {5}, {6}]


@pytest.mark.parametrize("n", [0, 1, PIECE - 1, PIECE, 3 * PIECE + 5])
def test_sorting_piece_by_piece(n: int) -> None:
    assert sum(part.stop - part.start for part in pieces(n)) == n
    values = np.random.default_rng(n).integers(0, n // 2 + 1, n).astype(np.uint64)
    np.testing.assert_array_equal(unique(values.copy()), np.unique(values))
