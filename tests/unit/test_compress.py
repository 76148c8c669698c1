"""Compressed blocks: who compresses, what it comes to, and what damage to them does."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shmreplay as reverb
from shmreplay import _native, errors, structured_writer
from shmreplay.table import TableConfig

FRAME = (64, 64)
NBYTES = 64 * 64
# An item of the core: see layout_blocks.h.
PACKED = struct.Struct("<IIIIQQQ")
PACKED_COLUMN = struct.Struct("<QQQQII")
KIND_PACKED = 6


def frame(i: int) -> npt.NDArray[np.uint8]:
    """A spot that moves over a fixed background."""
    out = np.arange(NBYTES, dtype=np.uint8).reshape(FRAME) // 16
    out[i % 50 : i % 50 + 9, 2 * i % 50 : 2 * i % 50 + 9] = i % 200
    return out


def table(name: str, compress: str | None = None, max_size: int = 1000) -> reverb.Table:
    return reverb.Table(
        name,
        reverb.selectors.Fifo(),
        reverb.selectors.Fifo(),
        max_size,
        reverb.rate_limiters.MinSize(1),
        compress=compress,
    )


@pytest.fixture
def packing() -> Iterator[reverb.Server]:
    """A server with a table that compresses and one that does not."""
    with reverb.Server([table("packed", "lz4"), table("raw")], capacity=64 << 20) as server:
        yield server


@pytest.fixture
def plain() -> Iterator[reverb.Server]:
    with reverb.Server([table("raw")], capacity=64 << 20) as server:
        yield server


def write(writer: Any, name: str, n: int) -> None:
    for i in range(n):
        writer.append({"x": frame(i)})
        writer.create_item(name, 1.0, {"x": writer.history["x"][-1]})


def raw_bytes(server: reverb.Server) -> float:
    return server.stats()["compressed_raw_bytes"]


# ---------------------------------------------------------------- who compresses


def test_settings_are_checked_and_kept() -> None:
    assert TableConfig.from_json(table("t", "lz4").config().to_json()).compress == "lz4"
    assert table("t").config().compress == table("t", "none").config().compress == "none"
    assert table("t", "lz4").replace(name="u").config().compress == "lz4"
    assert table("t", "lz4").replace(compress="none").config().compress == "none"
    assert reverb.Table.from_config(table("t", "lz4").config()).config().compress == "lz4"
    with pytest.raises(errors.InvalidArgumentError, match="'zip'"):
        table("t", "zip")


def test_writers_go_by_the_tables_of_their_server(
    packing: reverb.Server, plain: reverb.Server
) -> None:
    for server, expected in ((packing, 200 * NBYTES), (plain, 0)):
        client = server.localhost_client()
        with client.trajectory_writer(1) as writer:
            write(writer, "raw", 200)
        writer.close()
        assert raw_bytes(server) == expected  # also the block that was not full
        client.close()


@pytest.mark.parametrize(("asked", "expected"), [("lz4", 100 * NBYTES), ("none", 0)])
def test_a_writer_may_be_told(plain: reverb.Server, asked: str, expected: int) -> None:
    client = plain.localhost_client()
    with client.trajectory_writer(1, compress=asked) as writer:
        write(writer, "raw", 100)
    writer.close()
    assert raw_bytes(plain) == expected
    with pytest.raises(errors.InvalidArgumentError, match="'zstd'"):
        client.trajectory_writer(1, compress="zstd")
    client.close()


def test_other_ways_to_write(packing: reverb.Server) -> None:
    client = packing.localhost_client()
    client.insert_batch("raw", {"x": np.stack([frame(i) for i in range(80)])})
    assert raw_bytes(packing) == 0
    client.insert_batch("packed", {"x": np.stack([frame(i) for i in range(80)])})
    before = raw_bytes(packing)
    assert before == 80 * NBYTES
    with client.writer(2) as writer:
        for i in range(100):
            writer.append([frame(i)])
            writer.create_item("packed", 1, 1.0)
    assert raw_bytes(packing) == before + 100 * NBYTES
    pattern = structured_writer.pattern_from_transform(
        {"x": None}, lambda step: {"x": step["x"][-2:]}
    )
    config = structured_writer.create_config(pattern, "packed")
    structured = client.structured_writer([config])
    for i in range(130):
        structured.append({"x": frame(i)})
    structured.flush()
    assert raw_bytes(packing) == before + 100 * NBYTES + 128 * NBYTES  # two full blocks
    for i in range(300):
        client.insert({"y": frame(i)}, {"packed": 1.0})
    assert raw_bytes(packing) > before + 228 * NBYTES
    client.close()
    packing.check()


def test_small_blocks_stay_as_they_are(packing: reverb.Server) -> None:
    client = packing.localhost_client()
    client.insert_batch("packed", {"x": np.zeros((8, 50), np.uint8)})
    assert raw_bytes(packing) == 0
    client.close()


def test_what_does_not_shrink_is_stored_as_it_is(packing: reverb.Server) -> None:
    client = packing.localhost_client()
    noise = np.random.default_rng(1).integers(0, 256, (64, NBYTES), np.uint8)
    keys = client.insert_batch("packed", {"x": noise, "n": np.arange(64)})
    stats = packing.stats()
    raw, stored = stats["compressed_raw_bytes"], stats["compressed_stored_bytes"]
    assert raw == noise.nbytes + 64 * 8
    assert raw < stored < raw + 1024  # what describes it comes to that
    for sample in client.fetch("packed", keys):
        assert np.array_equal(sample.data["x"], noise[int(sample.data["n"])])
    client.close()


# ---------------------------------------------------------------- reading


def test_history_reaches_into_compressed_blocks(packing: reverb.Server) -> None:
    client = packing.localhost_client()
    writer = client.trajectory_writer(150)
    write(writer, "packed", 200)
    for k in (1, 70, 149):
        assert np.array_equal(writer.history["x"][-k].numpy(), frame(200 - k))
    key = writer.create_item("packed", 1.0, {"x": writer.history["x"][-140::20]})
    assert key is not None
    (sample,) = client.fetch("packed", [key])
    wanted = np.stack([frame(200 - k) for k in range(140, 0, -20)])
    assert np.array_equal(sample.data["x"], wanted)
    client.close()


def test_replaced_data(packing: reverb.Server) -> None:
    client = packing.localhost_client()
    writer = client.trajectory_writer(150)
    write(writer, "packed", 149)
    key = int(client.keys("packed")[3])
    assert writer.replace_item("packed", key, {"x": writer.history["x"][-100]})
    (sample,) = client.fetch("packed", [key])
    assert np.array_equal(sample.data["x"], frame(49))
    packing.check()
    client.close()


def test_a_view_outlives_the_block(packing: reverb.Server) -> None:
    client = packing.localhost_client()
    with client.trajectory_writer(1) as writer:
        write(writer, "packed", 100)
        with client.borrow("packed", 10) as samples:
            views = [sample.data["x"] for sample in samples]
        client.reset("packed")
        write(writer, "packed", 100)
    for i, view in enumerate(views):
        assert np.array_equal(view, frame(0)), i  # Fifo: the oldest, ten times
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 1
    client.close()


def test_memory_comes_back(packing: reverb.Server) -> None:
    client = packing.localhost_client()
    used = packing.stats()["arena_used_bytes"]
    client.insert_batch("packed", {"x": np.stack([frame(i) for i in range(500)])})
    assert packing.stats()["arena_used_bytes"] - used < 500 * NBYTES / 5
    client.reset("packed")
    stats = packing.stats()
    assert stats["arena_used_bytes"] <= used + 4096
    assert stats["compressed_raw_bytes"] == stats["compressed_stored_bytes"] == 0
    client.close()


def test_without_room_to_compress_steps_stay_raw() -> None:
    with reverb.Server([table("packed", "lz4")], capacity=3 << 20) as server:
        client = server.localhost_client()
        with client.trajectory_writer(1) as writer:
            for i in range(2000):
                try:
                    writer.append({"x": np.random.default_rng(i).integers(0, 256, FRAME, np.uint8)})
                    writer.create_item("packed", 1.0, {"x": writer.history["x"][-1]})
                except errors.ArenaFullError:
                    break
            else:
                pytest.fail("the store did not fill up")
        server.check()
        assert client.server_info()["packed"].current_size > 100
        client.sample_batch("packed", 16)
        client.close()


# ---------------------------------------------------------------- damage


class Segment:
    """A store's memory, and the packed rows of one column in it."""

    def __init__(self, name: str) -> None:
        path = Path("/dev/shm") / f"shmreplay.{os.getuid()}.{name}"
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        self.at = next(self._packed())
        head = PACKED.unpack_from(self.memory, self.at)
        self.nbytes = head[4]
        self.column = PACKED_COLUMN.unpack_from(self.memory, self.at + 64)

    def _packed(self) -> Iterator[int]:
        for at in range(4096, 32 << 20, 64):
            kind, columns, references, rows, nbytes, raw, serial = PACKED.unpack_from(
                self.memory, at
            )
            if (kind, columns, references) == (KIND_PACKED, 1, 1) and serial > 0:
                if raw == rows * NBYTES and nbytes < raw:
                    yield at

    def flip(self, at: int, bits: int = 0xFF) -> None:
        self.memory[at] ^= bits


@pytest.fixture
def damaged(packing: reverb.Server) -> Iterator[tuple[reverb.Client, Segment]]:
    client = packing.localhost_client()
    client.insert_batch("packed", {"x": np.stack([frame(i) for i in range(64)])})
    segment = Segment(packing.address.removeprefix("shm://"))
    yield client, segment
    segment.memory.close()
    client.close()


DAMAGE: dict[str, Callable[[Segment], int]] = {
    "where its groups end": lambda s: s.at + s.column[3],
    "stored bytes": lambda s: s.at + s.column[0] + 3,
    "bytes of a row": lambda s: s.at + 64 + 16,
    "rows of a group": lambda s: s.at + 64 + 36,
    "encoding": lambda s: s.at + 64 + 32,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_an_error(damaged: tuple[reverb.Client, Segment], what: str) -> None:
    client, segment = damaged
    place = DAMAGE[what](segment)
    segment.flip(place)
    for read in (
        lambda: client.sample_batch("packed", 1),
        lambda: client.borrow("packed", 1).__enter__(),
        lambda: list(client.sample("packed", 1)),
    ):
        with pytest.raises(errors.TableCorruptedError):
            read()
    segment.flip(place)
    assert np.array_equal(client.sample_batch("packed", 1).data["x"][0], frame(0))


def test_any_byte_may_be_wrong(
    packing: reverb.Server, damaged: tuple[reverb.Client, Segment]
) -> None:
    """Each byte in turn, read as `dump` does: without what was decoded before."""
    _, segment = damaged
    native = packing._connection.native
    _, stripe, slot = _native.peek_items(native, 0)[40]
    wanted = frame(40).tobytes()
    unreadable = 0
    for at in range(segment.at, segment.at + segment.nbytes, 5):
        for bits in (0x01, 0xFF):
            segment.flip(at, bits)
            item = _native.peek_item(native, 0, stripe, slot)
            segment.flip(at, bits)
            assert item is not None
            unreadable += item[6] is None
    assert unreadable > 50
    item = _native.peek_item(native, 0, stripe, slot)
    assert item is not None
    assert item[6] is not None
    assert item[6][0][2] == wanted
