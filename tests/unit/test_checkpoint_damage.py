"""A checkpoint that is cut off or changed anywhere is refused, and nothing of it is loaded."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import checkpoint_files
from shmreplay.checkpoint_check import load
from shmreplay.checkpoint_format import BLOCK, MANIFEST, RUN, SEGMENT, SLOT, Reader
from shmreplay.checkpointers import DefaultCheckpointer
from shmreplay.cli import main
from shmreplay.errors import CheckpointError, ReverbError

# One byte in so many is changed, other ones in each file: 1 takes all of them.
STRIDE = int(os.environ.get("CHECKPOINT_STRIDE", "6"))

MakeServer = Callable[..., reverb.Server]


def tables() -> list[reverb.Table]:
    limiter = reverb.rate_limiters.MinSize(1)
    return [
        reverb.Table(
            "t", reverb.selectors.Uniform(), reverb.selectors.Fifo(), 9, limiter, stripes=2
        ),
        reverb.Table("h", reverb.selectors.MaxHeap(), reverb.selectors.Lifo(), 9, limiter),
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    with reverb.Server(tables(), checkpointer=DefaultCheckpointer(root)) as server:
        client = server.localhost_client()
        client.insert_batch("t", {"x": np.arange(12, dtype=np.int16)})
        with client.trajectory_writer(4) as writer:
            for i in range(8):
                writer.append({"a": np.float32(i), "b": np.full(3, i, np.uint8)})
                if i >= 3:
                    part = {"a": writer.history["a"][-3:], "b": writer.history["b"][-1]}
                    writer.create_item("h", float(i), part)
            writer.flush()
        client.mutate_priorities("h", deletes=[int(client.sample_batch("h", 1).info.key[0])])
        yield Path(client.checkpoint())
        client.close()


def verify(path: Path) -> None:
    contents = load(Reader(str(path)))
    for number in range(len(contents.reader.files)):
        for _ in contents.reader.chunks_of(number):
            pass


def files(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def copy_of(checkpoint: Path, to: Path) -> Path:
    return Path(shutil.copytree(checkpoint, to / checkpoint.name))


def test_a_changed_byte_anywhere_is_found(checkpoint: Path, tmp_path: Path) -> None:
    copy = copy_of(checkpoint, tmp_path)
    verify(copy)
    rng = np.random.default_rng(5)
    for name in files(copy):
        whole = (copy / name).read_bytes()
        for at in range(int(rng.integers(STRIDE)), len(whole), STRIDE):
            changed = bytearray(whole)
            changed[at] ^= 1 << int(rng.integers(8))
            (copy / name).write_bytes(changed)
            with pytest.raises(CheckpointError, match=rf"{name} at offset \d+"):
                verify(copy)
        (copy / name).write_bytes(whole)


def test_a_file_that_is_cut_off_is_found_and_where(checkpoint: Path, tmp_path: Path) -> None:
    copy = copy_of(checkpoint, tmp_path)
    for name in files(copy):
        whole = (copy / name).read_bytes()
        for size in {0, 1, len(whole) // 2, len(whole) - 1}:
            (copy / name).write_bytes(whole[:size])
            with pytest.raises(CheckpointError, match=rf"{name} at offset {size}:"):
                verify(copy)
        (copy / name).write_bytes(whole + b"x")
        with pytest.raises(CheckpointError, match=rf"{name} at offset \d+"):
            verify(copy)
        os.unlink(copy / name)
        with pytest.raises(CheckpointError, match=f"{name} at offset 0"):
            verify(copy)
        (copy / name).write_bytes(whole)


def test_a_server_refuses_it_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, make_server: MakeServer, unique_name: Callable[[], str]
) -> None:
    copy = copy_of(checkpoint, tmp_path)
    (data,) = (name for name in files(copy) if name.startswith("blocks-"))
    whole = bytearray((copy / data).read_bytes())
    whole[3] ^= 4
    (copy / data).write_bytes(whole)
    name = unique_name()
    with pytest.raises(CheckpointError, match=f"{data} at offset 0: Got the checksum"):
        reverb.Server(tables(), name=name, checkpointer=DefaultCheckpointer(tmp_path))
    with pytest.raises(ReverbError):
        reverb.Client(f"shm://{name}").server_info(timeout=1)
    assert make_server(tables(), name=name).stats()["t/size"] == 0


def test_nothing_is_shared_with_a_damaged_one(
    checkpoint: Path, tmp_path: Path, make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(tables(), checkpointer=DefaultCheckpointer(tmp_path))
    server.localhost_client().insert_batch("t", {"x": np.zeros(4)})
    first = Path(server.checkpoint().path)
    (first / MANIFEST).write_text("{}")
    again = server.checkpoint()
    assert again.new_bytes == again.data_bytes and "nothing is shared" in caplog.text
    verify(Path(again.path))


# ---------------------------------------------------------------- what the next one shares


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("blocks-*.bin"))


def damage(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes(whole)


def in_two_files(server: reverb.Server) -> Path:
    """A checkpoint with a data file of each of two earlier ones."""
    client = server.localhost_client()
    for _ in range(2):
        client.insert_batch("t", {"x": np.arange(4.0)})
        path = Path(server.checkpoint().path)
    assert len(data_files(path)) == 2
    return path


def test_what_a_disk_damages_is_not_shared_but_written_anew(
    tmp_path: Path, make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(tables(), checkpointer=DefaultCheckpointer(tmp_path, keep=2))
    first = in_two_files(server)
    one, other = data_files(first)
    damage(one)
    with pytest.raises(CheckpointError):
        verify(first)
    again = server.checkpoint()
    assert f"{one.name} at offset 0: Got the checksum" in caplog.text
    assert "is written anew" in caplog.text
    assert 0 < again.new_bytes < again.data_bytes
    names = files(Path(again.path))
    assert one.name not in names and other.name in names
    verify(Path(again.path))
    caplog.clear()
    assert server.checkpoint().new_bytes == 0 and not caplog.text
    server.stop()
    server = make_server(tables(), checkpointer=DefaultCheckpointer(tmp_path))
    server.check()
    assert server.stats()["t/size"] == 8


@pytest.mark.parametrize("gone", [True, False])
def test_a_data_file_that_was_cut_off_or_is_gone_is_written_anew(
    tmp_path: Path, make_server: MakeServer, gone: bool
) -> None:
    server = make_server(tables(), checkpointer=DefaultCheckpointer(tmp_path))
    path = data_files(in_two_files(server))[-1]
    os.truncate(path, 3)
    if gone:
        path.unlink()
    verify(Path(server.checkpoint().path))


def test_whoever_does_not_want_it_verified_inherits_the_damage(
    tmp_path: Path, make_server: MakeServer
) -> None:
    server = make_server(tables(), checkpointer=DefaultCheckpointer(tmp_path, verify=False))
    damage(data_files(in_two_files(server))[0])
    again = server.checkpoint()
    assert again.new_bytes == 0
    with pytest.raises(CheckpointError):
        verify(Path(again.path))


# ---------------------------------------------------------------- numbers that contradict others


def rewrite(path: Path, name: str, change: Callable[[Any], None], dtype: Any) -> None:
    """Changes a section, with its checksums made right."""
    manifest = json.loads((path / MANIFEST).read_text())
    (section,) = (s for s in manifest["index"]["sections"] if s["name"] == name)
    whole = bytearray((path / "index.bin").read_bytes())
    part = slice(section["offset"], section["offset"] + section["bytes"])
    array = np.frombuffer(bytes(whole[part]), dtype).copy()
    change(array)
    whole[part] = array.tobytes()
    (path / "index.bin").write_bytes(whole)
    section["crc32"] = zlib.crc32(array.tobytes())
    write_manifest(path, manifest)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("manifest_crc32", None)
    text = json.dumps(manifest, indent=1)
    body = text[: text.rindex("\n}")]
    end = f',\n "manifest_crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n'
    (path / MANIFEST).write_text(body + end)


def put(field: str | None, value: Any, at: int = 0) -> Callable[[Any], None]:
    def change(array: Any) -> None:
        if field is None:
            array[at] = value
        else:
            array[field][at] = value

    return change


def on_live(field: str, value: Any) -> Callable[[Any], None]:
    def change(array: Any) -> None:
        array[field][np.flatnonzero(array["object"])[0]] = value

    return change


SLOTS = "tables/0/stripes/0/slots"
HEAP = "tables/1/stripes/0/slots"
LIES: list[tuple[str, Any, Callable[[Any], None]]] = [
    ("blocks", BLOCK, put("rows", 2**31)),
    ("blocks", BLOCK, put("columns", 0)),
    ("blocks", BLOCK, put("columns", 255)),
    ("blocks", BLOCK, put("bytes", 2**60)),
    ("blocks", BLOCK, put("encoding", 9)),
    ("block_columns", "<u8", put(None, 2**45)),
    ("block_columns", "<u8", put(None, 2**63)),
    ("block_runs", RUN, put("episode", 77)),
    ("block_runs", RUN, put("rows", 2**32 - 1)),
    ("block_places", "<u8", put(None, 2**40, at=1)),
    ("block_places", "<u4", put(None, 3)),
    ("trajectories", "<u4", put(None, 300)),
    ("trajectories", "<u4", put(None, 0, at=2)),
    ("trajectory_blocks", "<u4", put(None, 1000)),
    ("trajectory_columns", "<u4", put(None, 2**31 - 1)),
    ("trajectory_columns", "<u4", put(None, 99, at=3)),
    ("trajectory_segments", SEGMENT, put("count", 2**31)),
    ("trajectory_segments", SEGMENT, put("start", 2**31)),
    ("trajectory_segments", SEGMENT, put("stride", -(2**31))),
    ("trajectory_segments", SEGMENT, put("column", 500)),
    ("trajectory_segments", SEGMENT, put("block", 500)),
    (SLOTS, SLOT, on_live("object", 2**63)),
    (SLOTS, SLOT, on_live("object", 1)),
    (SLOTS, SLOT, on_live("row_count", 0)),
    (SLOTS, SLOT, on_live("row_start", 2**32 - 1)),
    (SLOTS, SLOT, on_live("schema", 4000)),
    (SLOTS, SLOT, on_live("priority", np.nan)),
    (SLOTS, SLOT, on_live("key", 0)),
    (SLOTS, SLOT, on_live("touch", 2**62)),
    (HEAP, SLOT, on_live("object", 2)),
    (HEAP, SLOT, lambda slots: slots["row_start"].__setitem__(slots["object"] == 0, 7)),
    ("tables/0/stripes/0/order_0", "<u4", put(None, 2**32 - 1)),
]


@pytest.mark.parametrize("lie", range(len(LIES)), ids=lambda i: f"{LIES[i][0]}-{i}")
def test_numbers_that_contradict_each_other_are_found(
    checkpoint: Path, tmp_path: Path, lie: int
) -> None:
    name, dtype, change = LIES[lie]
    copy = copy_of(checkpoint, tmp_path)
    rewrite(copy, name, change, dtype)
    with pytest.raises(CheckpointError, match=r"(index\.bin|manifest\.json) at offset \d+"):
        verify(copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(version=3),
        lambda m: m.update(version=0),
        lambda m: m.update(tables="none"),
        lambda m: m["tables"][0]["settings"].update(max_size=-1),
        lambda m: m["tables"][0]["settings"].pop("name"),
        lambda m: m["tables"][0]["counts"].update(inserts=10**30),
        lambda m: m["tables"][0]["counts"].update(deletes=1),
        lambda m: m["tables"][0].update(stripes=[]),
        lambda m: m["tables"][0]["stripes"][0].update(free_head=1),
        lambda m: m["tables"].append(m["tables"][0]),
        lambda m: m["schemas"][0].update(text="[[["),
        lambda m: m.update(schemas=[]),
        lambda m: m["data"][0].update(file="../../etc/passwd"),
        lambda m: m["data"][0].update(bytes=2**61),
        lambda m: m["data"].clear(),
        lambda m: m["index"].update(bytes=1),
        lambda m: m["index"]["sections"][0].update(offset=64),
        lambda m: m["index"]["sections"][0].update(bytes=2**61),
        lambda m: m["index"]["sections"].pop(),
    ],
)
def test_a_manifest_that_lies_is_found(
    checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    copy = copy_of(checkpoint, tmp_path)
    manifest = json.loads((copy / MANIFEST).read_text())
    change(manifest)
    write_manifest(copy, manifest)
    with pytest.raises(CheckpointError, match="at offset"):
        verify(copy)


def test_the_version_before_is_read_as_well(
    checkpoint: Path, tmp_path: Path, make_server: MakeServer
) -> None:
    copy = copy_of(checkpoint, tmp_path)
    manifest = json.loads((copy / MANIFEST).read_text())
    assert manifest["version"] == 2
    write_manifest(copy, {**manifest, "version": 1})
    verify(copy)
    server = make_server(tables(), checkpointer=DefaultCheckpointer(tmp_path))
    assert server.stats()["t/size"] > 0


# ---------------------------------------------------------------- inspect


def test_inspect_shows_and_verifies(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_of(checkpoint, tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert str(copy) in shown and "9 " in shown and "--verify" in shown
    assert main(["inspect", str(copy), "--verify", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verified"] and [t["items"] for t in told["tables"]] == [9, 4]
    (data,) = (name for name in files(copy) if name.startswith("blocks-"))
    whole = bytearray((copy / data).read_bytes())
    whole[-1] ^= 1
    (copy / data).write_bytes(whole)
    assert main(["inspect", str(copy)]) == 0
    assert main(["inspect", str(copy), "--verify"]) == 1
    assert f"{data} at offset 0" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2


def test_the_newest_is_the_last_by_name(checkpoint: Path, tmp_path: Path) -> None:
    copy = copy_of(checkpoint, tmp_path)
    later = tmp_path / "9999-01-01T00:00:00.000000000+00:00"
    shutil.copytree(copy, later)
    assert checkpoint_files.latest(str(tmp_path)) == str(later)
    fd = os.open(tmp_path, os.O_RDONLY)
    published = checkpoint_files.publish(
        str(tmp_path), fd, checkpoint_files.new_directory(str(tmp_path))
    )
    os.close(fd)
    assert Path(published).name == "9999-01-01T00:00:00.000000001+00:00"
