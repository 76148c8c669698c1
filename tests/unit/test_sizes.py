"""What a table will need, against what one takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import Server, cli, errors
from shmreplay.sizes import table_size


def table(n: int, sampler: Any = None) -> reverb.Table:
    return reverb.Table(
        "t",
        reverb.selectors.Uniform() if sampler is None else sampler,
        reverb.selectors.Fifo(),
        n,
        reverb.rate_limiters.MinSize(1),
        stripes=1,
        max_bytes=2**46,
    )


def step(width: int) -> dict[str, Any]:
    return {"x": np.zeros(width, np.float32), "n": np.int64(0)}


def fill(writer: Any, width: int, n: int, length: int, overlap: int, episode: int) -> None:
    """Writes n items, of episodes of so many steps."""
    done = since = 0
    while done < n:
        writer.append(step(width))
        since += 1
        if since >= length and (since - length) % (length - overlap) == 0:
            trajectory = {name: writer.history[name][-length:] for name in ("x", "n")}
            writer.create_item("t", 1.0, trajectory)
            done += 1
        if since == episode:
            writer.end_episode()
            since = 0


@pytest.mark.parametrize(
    ("sampler", "width", "length", "overlap"),
    [
        (reverb.selectors.Uniform(), 16, 1, 0),
        (reverb.selectors.Prioritized(0.6), 64, 5, 4),
        (reverb.selectors.MaxHeap(), 64, 8, 0),
        (reverb.selectors.Fifo(), 2000, 20, 10),
    ],
)
def test_a_full_table_takes_what_was_computed(
    make_server: Callable[..., Server], sampler: Any, width: int, length: int, overlap: int
) -> None:
    described = table(2000 if width < 2000 else 200, sampler)
    options: dict[str, Any] = {
        "steps_per_item": length,
        "overlap": overlap,
        "steps_per_episode": 100,
    }
    want = table_size(described, step(width), **options)
    server = make_server([described], capacity=want.capacity_bytes)
    with server.localhost_client() as client, client.trajectory_writer(length) as writer:
        fill(writer, width, described.info.max_size * 3 // 2, length, overlap, 100)
        stats = client.stats()
        # Of few blocks one more or less is a large part; of many it is not.
        slack = 2 / want.blocks + 0.03
        assert stats["t/data_bytes"] == pytest.approx(want.data_bytes, rel=slack)
        assert stats["t/index_bytes"] == want.index_bytes
        assert stats["block_bytes"] + stats["pinned_bytes"] == pytest.approx(
            want.block_bytes, rel=slack
        )
        assert want.steps_per_block * want.step_bytes <= 64 << 10 or want.steps_per_block == 1


def test_a_table_filled_by_batches(make_server: Callable[..., Server]) -> None:
    described = table(20_000)
    want = table_size(described, step(64), batch=True)
    with make_server([described]).localhost_client() as client:
        for _ in range(3):
            x = np.zeros((10_000, 64), np.float32)
            client.insert_batch("t", {"x": x, "n": np.zeros(10_000, np.int64)})
        stats = client.stats()
        slack = 2 / want.blocks + 0.03
        assert stats["t/data_bytes"] == pytest.approx(want.data_bytes, rel=slack)
        assert stats["t/index_bytes"] == pytest.approx(want.index_bytes, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_item": 0},
        {"overlap": 1},
        {"overlap": -1},
        {"steps_per_item": 2, "batch": True},
        {"steps_per_item": 9, "steps_per_episode": 8},
        {"max_chunk_length": 0},
        {"tables": 0},
        {"signature": {"x": reverb.TensorSpec([None], np.float32)}},
        {"signature": None},
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        table_size(table(10), **{"signature": step(3), **options})


def test_the_command_reads_files_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = tmp_path / "table.toml"
    toml.write_text(
        "max_size = 1000\nsteps_per_item = 4\n[columns]\n"
        "x = {dtype = 'float32', shape = [64]}\nn = {dtype = 'int64'}\n"
    )
    assert cli.main(["size", str(toml), "--overlap", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    columns = ["--column", "x:float32:64", "--column", "n:int64"]
    numbers = ["--max-size", "1000", "--steps-per-item", "4", "--overlap", "3"]
    assert cli.main(["size", *columns, *numbers, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    want = table_size(table(1000), step(64), steps_per_item=4, overlap=3)
    assert found == want._asdict()
    assert cli.main(["size", *columns, *numbers]) == 0
    assert "capacity" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-size", "10"],
        ["--column", "x:float32"],
        ["--column", "x", "--max-size", "10"],
        ["--column", "x:float32:a", "--max-size", "10"],
        ["--column", "x:nothing", "--max-size", "10"],
        ["--column", "x:float32", "--max-size", "0"],
        ["--column", "x:float32", "--max-size", "10", "--overlap", "1"],
    ],
)
def test_the_command_says_what_it_needs(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["size", *arguments]) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("text", ["max_size = ", "other = 1", "[columns]\nx = 3"])
def test_the_command_refuses_other_files(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.toml"
    path.write_text(text)
    assert cli.main(["size", str(path)]) == 2
    assert capsys.readouterr().err
