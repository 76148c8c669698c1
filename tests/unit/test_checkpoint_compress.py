"""Checkpoints of compressed blocks: what is stored is saved as it is, and comes back."""

from __future__ import annotations

import os
import tempfile
import threading
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shmreplay as reverb
from shmreplay import _native
from shmreplay.checkpoint_check import PACKED, load
from shmreplay.checkpoint_format import BLOCK, Reader
from shmreplay.checkpoint_restore import choose
from shmreplay.checkpointers import DefaultCheckpointer
from shmreplay.cli import main
from shmreplay.errors import CheckpointError
from tests.conftest import SHARED_MEMORY
from tests.unit.test_checkpoint_damage import copy_of, put, rewrite, verify

MakeServer = Callable[..., reverb.Server]

SIDE = 96
LONG, SHORT = 100, 20
STEP_BYTES = 8 + SIDE * SIDE + 16


def table(compress: str | None = "lz4", max_size: int = 5000, name: str = "t") -> reverb.Table:
    return reverb.Table(
        name,
        reverb.selectors.Epoch(),
        reverb.selectors.Fifo(),
        max_size,
        reverb.rate_limiters.MinSize(1),
        compress=compress,
    )


def frame(i: int) -> Any:
    out = np.zeros((SIDE, SIDE), np.uint8)
    out[i % SIDE] = i % 251 + 1
    return out


def noise(i: int) -> Any:
    return np.random.default_rng(i).integers(0, 256, 16, dtype=np.uint8)


def step(i: int) -> dict[str, Any]:
    return {"i": np.int64(i), "frame": frame(i), "noise": noise(i)}


def write(writer: Any, first: int, n: int, back: int = 3, name: str = "t") -> None:
    """Steps, each but the first with an item of what is there of the last `back`."""
    for i in range(first, first + n):
        writer.append(step(i))
        length = min(back, i - first + 1)
        part = {key: column[-length:] for key, column in writer.history.items()}
        writer.create_item(name, 1.0, part)
    writer.flush()


def contents(client: reverb.Client, name: str = "t") -> list[tuple[int, ...]]:
    """Of each item the numbers of its steps, after looking whether these are as they were."""
    found = set()
    draws = 2 * client.server_info()[name].current_size  # at least one whole epoch
    for sample in client.sample(name, draws, emit_timesteps=False, unpack_as_table_signature=True):
        data: Any = sample.data
        rows = dict(zip(("frame", "i", "noise"), data, strict=True))
        for at, i in enumerate(rows["i"]):
            np.testing.assert_array_equal(rows["frame"][at], frame(int(i)))
            np.testing.assert_array_equal(rows["noise"][at], noise(int(i)))
        found.add(tuple(int(i) for i in rows["i"]))
    return sorted(found, key=lambda item: item[-1])


def expected(first: int, n: int, back: int = 3) -> list[tuple[int, ...]]:
    return [tuple(range(max(first, i - back + 1), i + 1)) for i in range(first, first + n)]


def encodings(path: str | Path) -> list[int]:
    found: list[int] = load(Reader(str(path))).blocks["encoding"].tolist()
    return found


def restored(
    make_server: MakeServer, root: Path, compress: str | None = "lz4"
) -> tuple[reverb.Server, reverb.Client]:
    server = make_server([table(compress)], checkpointer=DefaultCheckpointer(root))
    server.check()
    return server, server.localhost_client()


@pytest.mark.parametrize("compress", ["lz4", None])
def test_packed_and_open_blocks_come_back(
    make_server: MakeServer, tmp_path: Path, compress: str | None
) -> None:
    server = make_server([table()], checkpointer=DefaultCheckpointer(tmp_path))
    with server.localhost_client() as client, closing(client.trajectory_writer(4)) as writer:
        write(writer, 0, LONG)
        stored = server.stats()["compressed_stored_bytes"]
        assert stored > 0
        path = client.checkpoint()
    server.stop()
    before = encodings(path)
    assert set(before) == {0, PACKED}
    server, client = restored(make_server, tmp_path, compress)
    assert server.stats()["compressed_stored_bytes"] == stored
    assert contents(client) == expected(0, LONG)
    # And what came from a checkpoint is saved as anything else, without being written again.
    again = server.checkpoint()
    assert again.new_bytes == 0 and encodings(again.path) == before
    with closing(client.trajectory_writer(4)) as writer:
        write(writer, 1000, LONG)
    server.check()
    assert contents(client)[LONG:] == expected(1000, LONG)
    client.reset("t")
    server.check()
    assert server.stats()["compressed_stored_bytes"] == 0
    client.close()


def sealing(client: reverb.Client, writers: list[Any]) -> Callable[..., int]:
    """Reads rows for a checkpoint after all writers have sealed the blocks they had open."""
    read = _native.image_rows

    def after_seals(*arguments: Any) -> int:
        for number, writer in enumerate(writers):
            write(writer, 10_000 * (number + 1) + 5000, LONG)
        return read(*arguments)

    return after_seals


def test_rows_that_are_packed_while_they_are_saved(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server([table(max_size=3 * SHORT)], checkpointer=DefaultCheckpointer(tmp_path))
    client = server.localhost_client()
    writers = [client.trajectory_writer(4) for _ in range(3)]
    for number, writer in enumerate(writers):
        write(writer, 10_000 * (number + 1), SHORT)
    assert server.stats()["compressed_stored_bytes"] == 0
    monkeypatch.setattr(_native, "image_rows", sealing(client, writers))
    path = client.checkpoint()
    monkeypatch.undo()
    server.check()
    assert encodings(path) == [0, 0, 0]
    for writer in writers:
        writer.close()
    client.reset("t")
    server.check()
    assert server.stats()["arena_allocations"] == 2  # two texts, and no steps
    client.close()
    server.stop()
    server, client = restored(make_server, tmp_path)
    wanted = [item for k in range(3) for item in expected(10_000 * (k + 1), SHORT)]
    assert contents(client) == wanted
    client.close()


writes = st.tuples(
    st.integers(0, 2),  # which writer
    st.integers(1, 60),  # steps
    st.booleans(),  # closes it, which seals
)


@given(before=st.lists(writes, min_size=1, max_size=6), meanwhile=st.lists(writes, max_size=3))
def test_any_mixture_comes_back_while_others_write(before: list[Any], meanwhile: list[Any]) -> None:
    counts = [0, 0, 0, 0]
    wanted: list[tuple[int, ...]] = []
    with (
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as root,  # no disk to wait for each time
        reverb.Server(
            [table(), table(None, name="plain")], checkpointer=DefaultCheckpointer(root)
        ) as server,
        server.localhost_client() as client,
    ):
        kinds = ("lz4", "lz4", None)
        writers = [client.trajectory_writer(4, compress=c) for c in kinds]

        def apply(many: list[Any]) -> None:
            for number, steps, ends in many:
                first = 100_000 * (number + 1) + 1000 * counts[number]
                counts[number] += 1
                write(writers[number], first, steps)
                wanted.extend(expected(first, steps))
                if ends:
                    writers[number].close()
                    writers[number] = client.trajectory_writer(4, compress=kinds[number])

        apply(before)
        there = list(wanted)
        thread = threading.Thread(target=apply, args=(meanwhile,))
        thread.start()
        path = client.checkpoint()
        thread.join()
        server.check()
        again = client.checkpoint()
        for writer in writers:
            writer.close()
        loaded = load(Reader(again))
        assert sum(t.size for t in loaded.tables) == len(wanted)
        server.stop()
        os.rename(again, os.path.join(root, "kept"))
        with reverb.Server(
            [table(), table(None, name="plain")],
            checkpointer=DefaultCheckpointer(
                os.path.join(root, "new"), fallback_checkpoint_path=os.path.join(root, "kept")
            ),
        ) as second:
            second.check()
            with second.localhost_client() as reader:
                assert contents(reader) == sorted(wanted, key=lambda item: item[-1])
    assert wanted[: len(there)] == there and path != again


def test_packed_blocks_are_written_once(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server([table()], checkpointer=DefaultCheckpointer(tmp_path, keep=2))
    with server.localhost_client() as client:
        with closing(client.trajectory_writer(4)) as writer:
            write(writer, 0, 3 * LONG)
        first = server.checkpoint()
        assert set(encodings(first.path)) == {PACKED} and first.new_bytes == first.data_bytes
        assert server.checkpoint().new_bytes == 0
        with closing(client.trajectory_writer(4)) as writer:
            write(writer, 5000, SHORT)
            third = server.checkpoint()
            assert third.new_bytes == SHORT * STEP_BYTES
            assert third.data_bytes == first.data_bytes + third.new_bytes
        # The block that was open is compressed now, and is written as that.
        last = server.checkpoint()
        assert set(encodings(last.path)) == {PACKED}
        assert 0 < last.new_bytes < third.new_bytes
        verify(Path(last.path))


# ---------------------------------------------------------------- damage


@pytest.fixture
def checkpoint(make_server: MakeServer, tmp_path: Path) -> Path:
    server = make_server([table()], checkpointer=DefaultCheckpointer(tmp_path / "made"))
    with server.localhost_client() as client:
        with closing(client.trajectory_writer(4)) as writer:
            write(writer, 0, LONG)
        path = client.checkpoint()
    server.stop()
    return Path(path)


def load_fails(make_server: MakeServer, copy: Path, match: str) -> None:
    before = set(os.listdir("/dev/shm"))
    settings = DefaultCheckpointer(copy.parent)
    assert choose(settings.internal_checkpointer()) == str(copy)
    with pytest.raises(CheckpointError, match=match):
        make_server([table()], checkpointer=settings)
    assert {n for n in os.listdir("/dev/shm") if f".{os.getpid()}-" in n} <= before


def data_file(path: Path) -> Path:
    (found,) = path.glob("blocks-*.bin")
    return found


def test_a_changed_byte_of_what_is_stored_is_refused(
    make_server: MakeServer, checkpoint: Path, tmp_path: Path
) -> None:
    copy = copy_of(checkpoint, tmp_path / "copy")
    file = data_file(copy)
    for at in (0, 70, file.stat().st_size - 1):  # all of it under one checksum
        whole = bytearray(file.read_bytes())
        whole[at] ^= 4
        file.write_bytes(whole)
        load_fails(make_server, copy, rf"{file.name} at offset 0: Got the checksum")
        assert main(["inspect", "--verify", str(copy)]) == 1
        whole[at] ^= 4
        file.write_bytes(whole)
    file.write_bytes(file.read_bytes()[:-9])
    load_fails(make_server, copy, rf"{file.name} at offset \d+: Got the end of the file")


@pytest.mark.parametrize("word", [0, 1, 3, 4, 6, 16, 18, 20, 22, 24])
def test_stored_rows_that_are_not_those_of_their_block_are_refused(
    make_server: MakeServer, checkpoint: Path, tmp_path: Path, word: int
) -> None:
    copy = copy_of(checkpoint, tmp_path / "copy")
    file = data_file(copy)
    places = load(Reader(str(copy))).places
    whole = bytearray(file.read_bytes())
    at = int(places["offset"][-1])
    numbers = np.frombuffer(whole, "<u4", offset=at)[: len(whole[at:]) // 4]
    numbers[word] ^= 1 << 30
    sums = [zlib.crc32(whole[i : i + (1 << 20)]) for i in range(0, len(whole), 1 << 20)]
    file.write_bytes(whole)
    rewrite(copy, "data/0/crc32", lambda array: array.__setitem__(slice(None), sums), "<u4")
    load_fails(make_server, copy, rf"{file.name} at offset {at}: Got other rows")


@pytest.mark.parametrize(
    ("field", "value"), [("encoding", 0), ("encoding", 2), ("bytes", 63), ("bytes", 2**61)]
)
def test_an_index_that_lies_about_them_is_refused(
    make_server: MakeServer, checkpoint: Path, tmp_path: Path, field: str, value: int
) -> None:
    copy = copy_of(checkpoint, tmp_path / "copy")
    rewrite(copy, "blocks", put(field, value), BLOCK)
    load_fails(make_server, copy, r"index.bin at offset \d+")
