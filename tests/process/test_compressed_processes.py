"""Compressed blocks between processes: killed while they compress, dumped, written over TCP."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shmreplay as reverb
from shmreplay.cli import main
from tests.conftest import free_port

DEADLINE_S = 60.0
KILLS = 30
TABLE = "t"
WORDS = 1500


def rows(i: int) -> npt.NDArray[np.int64]:
    """Whoever reads it can tell which it is, and whether it is whole."""
    return np.full(WORDS, i) + np.arange(WORDS) // 100


def check(data: Any) -> None:
    for x, n in zip(data["x"], data["n"], strict=True):
        np.testing.assert_array_equal(x, rows(int(n)))


def serve(port: int | None = None) -> reverb.Server:
    table = reverb.Table(
        TABLE,
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        100,
        reverb.rate_limiters.MinSize(1),
        compress="lz4",
    )
    return reverb.Server([table], port=port, capacity=24 << 20)


def act(conn: Connection, address: str, first: int) -> None:
    """Writes blocks of four steps, packs them and reads others, until it is killed."""
    client = reverb.Client(address)
    writer = client.trajectory_writer(num_keep_alive_refs=4)
    for path in (("n",), ("x",)):
        writer.configure(path, num_keep_alive_refs=4, max_chunk_length=4)
    conn.send("ready")
    for i in range(first, first + 10**9):
        writer.append({"x": rows(i), "n": i})
        item = {name: writer.history[name][-1] for name in ("x", "n")}
        writer.create_item(TABLE, 1.0, item)
        if i % 3 == 0:
            check(client.sample_batch(TABLE, 2).data)
        if i % 7 == 0:
            client.insert_batch(TABLE, {"x": np.stack([rows(i)] * 3), "n": np.full(3, i)})


def test_writers_killed_while_they_compress() -> None:
    context = multiprocessing.get_context("fork")
    when = random.Random(4)
    with serve() as server:
        for kill in range(KILLS):
            here, there = context.Pipe()
            actor = context.Process(target=act, args=(there, server.address, kill * 10**6))
            actor.start()
            assert here.poll(DEADLINE_S) and here.recv() == "ready"
            here.poll(when.uniform(0.0, 0.03))  # it sends nothing more: a pause of random length
            end = time.monotonic() + DEADLINE_S
            while kill == KILLS - 1 and not server.stats()["compressed_raw_bytes"]:
                assert time.monotonic() < end, "nothing is ever compressed"
            assert actor.pid is not None
            os.kill(actor.pid, signal.SIGKILL)
            actor.join(DEADLINE_S)
            end = time.monotonic() + DEADLINE_S
            while server.stats()["participants"] > 1:
                server._connection.store.reclaim_dead()
                assert time.monotonic() < end, server.stats()
            server.check()
            client = server.localhost_client()
            if client.server_info()[TABLE].current_size:
                check(client.sample_batch(TABLE, 50).data)
            client.close()
        assert server.stats()["compressed_raw_bytes"] > 0
        client = server.localhost_client()
        client.reset(TABLE)
        stats = server.stats()
        assert stats["compressed_raw_bytes"] == stats["compressed_stored_bytes"] == 0
        assert stats["arena_used_bytes"] < 64 * 1024  # schemas, ledgers
        server.check()
        client.close()


def test_a_store_is_read_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as server:
        client = server.localhost_client()
        client.insert_batch(
            TABLE, {"x": np.stack([rows(i) for i in range(60)]), "n": np.arange(60)}
        )
        with client.trajectory_writer(1) as writer:
            for i in range(60, 90):  # the last of them in a block that is not full
                writer.append({"x": rows(i), "n": i})
                writer.create_item(TABLE, 1.0, {k: writer.history[k][-1] for k in ("x", "n")})
            name = server.address.removeprefix("shm://")
            assert main(["dump", name, "-o", str(tmp_path)]) == 0
            assert main(["info", name]) == 0
        client.close()
    assert " of steps to " in capsys.readouterr().out
    (path,) = tmp_path.glob("*.npz")
    with np.load(path) as dump:
        found = {k: dump[k] for k in dump.files}
    xs = next(v for v in found.values() if v.ndim == 2 and v.shape[1] == WORDS)
    assert len(xs) == 90
    for i, x in enumerate(xs):
        np.testing.assert_array_equal(x, rows(i))


@pytest.mark.parametrize(("asked", "compressed"), [(None, True), ("none", False), ("lz4", True)])
def test_writers_on_other_hosts(asked: str | None, compressed: bool) -> None:
    with serve(free_port()) as server:
        client = reverb.Client(f"tcp://127.0.0.1:{server.port}")
        with client.trajectory_writer(5, compress=asked) as writer:
            for i in range(90):
                writer.append({"x": rows(i), "n": i})
                writer.create_item(TABLE, 1.0, {k: writer.history[k][-1] for k in ("x", "n")})
            np.testing.assert_array_equal(writer.history["x"][-5].numpy(), rows(85))
        assert (server.stats()["compressed_raw_bytes"] > 0) == compressed
        check(client.sample_batch(TABLE, 40).data)
        keys = client.insert_batch(TABLE, {"x": np.stack([rows(7)] * 9), "n": np.full(9, 7)})
        check({k: np.stack([s.data[k] for s in client.fetch(TABLE, keys)]) for k in ("x", "n")})
        client.close()
        server.check()
