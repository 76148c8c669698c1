"""The demo, scripts/cartpole_dqn.py, run as a user runs it but with a tiny budget."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium")

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
DEADLINE = 200.0  # seconds; a run takes a few
BATCH_SIZE = 64
PNG = b"\x89PNG\r\n\x1a\n"
# No episode is longer than 500 steps: a run with this target goes on until it is ended.
OUT_OF_REACH = "--target=501"

Start = Callable[..., "subprocess.Popen[str]"]

pytestmark = pytest.mark.slow


def segments_of(pid: int) -> list[Path]:
    """Entries of the shared-memory file system with a process's id in their name."""
    theirs = re.compile(rf"(?<!\d){pid}(?!\d)")
    return [entry for entry in SHARED_MEMORY.iterdir() if theirs.search(entry.name)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the demo in a process group of its own, of which nothing is left afterwards."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "scripts" / "cartpole_dqn.py"),
                f"--out={tmp_path / 'curve.png'}",
                f"--summary={tmp_path / 'summary.json'}",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE)
        for segment in segments_of(process.pid):
            segment.unlink()


def wait_for_line(process: subprocess.Popen[str], pattern: str) -> None:
    """Reads the output up to a line that matches."""
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        if re.search(pattern, line):
            return
        output.append(line)
    pytest.fail(f"no line matches {pattern!r} in the output:\n{''.join(output)}")


def wait_for_all(process: subprocess.Popen[str]) -> str:
    """Waits for a run and every process that it started, and returns the rest of the output.

    All of them have inherited the pipe, so it ends when the last of them does.
    """
    output, _ = process.communicate(timeout=DEADLINE)
    return output


def spawned_by(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the actors and the evaluator."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal():
            continue
        try:
            group = os.getpgid(int(directory.name))
            command = (directory / "cmdline").read_bytes()
        except (ProcessLookupError, FileNotFoundError):  # has ended meanwhile
            continue
        if group == process.pid and b"spawn_main" in command:
            found.append(int(directory.name))
    return found


def read_summary(tmp_path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    return summary


def test_transitions_reach_the_learner_and_priorities_go_back(start: Start, tmp_path: Path) -> None:
    updates = 4_000  # too few for 50 evaluation episodes, one a hundred updates
    process = start(f"--max-updates={updates}")
    output = wait_for_all(process)

    assert process.returncode == 1, output
    assert "Not learned within the budget." in output
    summary = read_summary(tmp_path)
    assert summary["learned"] is False
    assert summary["updates"] == updates
    assert 0 < summary["samples"] <= updates * BATCH_SIZE
    by_actor = summary["sampled_by_actor"]
    assert len(by_actor) == 2
    assert min(by_actor) > 0
    assert sum(by_actor) == summary["samples"]
    # Nothing is evicted so early, so every priority finds its item.
    assert summary["table_size"] == summary["inserts"]
    assert summary["priorities_written"] == summary["samples"]
    # The limiter of 16 samples an insert, which allows for a tenth of the first thousand items.
    slack = 0.1 * 16 * 1_000
    assert abs(summary["samples"] - 16 * (summary["inserts"] - 1_000)) <= slack
    assert summary["arena_bytes"] > 0
    assert 0 < summary["episodes"] < 50
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    assert not segments_of(process.pid)


def test_reaching_the_target_is_success(start: Start, tmp_path: Path) -> None:
    process = start("--target=20", "--max-seconds=180")
    output = wait_for_all(process)

    assert process.returncode == 0, output
    assert "Learned." in output
    summary = read_summary(tmp_path)
    assert summary["learned"] is True
    assert summary["episodes"] >= 50
    assert summary["mean_return"] >= 20.0
    assert not segments_of(process.pid)


def test_ctrl_c_ends_the_run_and_everything_it_started(start: Start) -> None:
    process = start("--seed=1", OUT_OF_REACH)
    wait_for_line(process, r"inserts/s")
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of them, too
    output = wait_for_all(process)

    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "Interrupted" in output
    assert not segments_of(process.pid)


def test_a_killed_learner_takes_its_actors_along(start: Start) -> None:
    process = start("--seed=2", OUT_OF_REACH)
    wait_for_line(process, r"inserts/s")
    process.kill()
    wait_for_all(process)  # ends only when the actors and the evaluator have


def test_a_dead_actor_ends_the_run(start: Start) -> None:
    process = start("--seed=3", OUT_OF_REACH)
    wait_for_line(process, r"inserts/s")
    os.kill(spawned_by(process)[0], signal.SIGKILL)
    output = wait_for_all(process)

    assert process.returncode == 3, output
    assert "ended with exit code -9" in output
    assert "Traceback" not in output
    assert not segments_of(process.pid)
