"""Every process of a store may die at any instant, and all of them at once.

`scripts/torture` does the work: this runs it for a while. How long says `TORTURE_SECONDS`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import shmreplay as reverb

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
SECONDS = float(os.environ.get("TORTURE_SECONDS", "8"))
DEADLINE_S = 120.0
ROUNDS = 10


@contextmanager
def torture(directory: Path, name: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process group of its own, which does not outlive the block."""
    with subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "torture_run.py"), "--name", name, *options],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TMPDIR": str(directory),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            yield run
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)


def entries(name: str) -> set[str]:
    """What the shared-memory file system has of a store."""
    user = os.getuid()
    return {
        entry.name
        for entry in SHARED_MEMORY.iterdir()
        if entry.name.removesuffix(".lease") == f"shmreplay.{user}.{name}"
    }


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 2 * DEADLINE_S)
def test_nothing_is_lost_torn_stuck_or_leaked(
    tmp_path: Path, unique_name: Callable[[], str]
) -> None:
    name = unique_name()
    # A machine with other work may hold a process up for seconds: only what hangs is a fault here.
    options = ["--seconds", str(SECONDS), "--seed", "1", "--kill-server"]
    options += ["--stall", "15", "--json"]
    with torture(tmp_path, name, *options) as run:
        output, _ = run.communicate(timeout=SECONDS + DEADLINE_S)
    assert run.returncode == 0, output
    seen = json.loads(output.splitlines()[-1])
    assert seen["good"] and seen["audits"] > 0
    # Many, however slow the machine is: ten times as many are usual.
    assert seen["kills"] > SECONDS / 5
    assert seen["items_verified"] > 10 * SECONDS
    assert not entries(name)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_a_run_and_leaves_nothing(
    tmp_path: Path, unique_name: Callable[[], str]
) -> None:
    name = unique_name()
    with torture(tmp_path, name, "--seconds", "600", "--seed", "2") as run:
        wait_for_store(run, name)
        os.killpg(run.pid, signal.SIGINT)
        output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 130, output
    assert not entries(name)
    assert not list(tmp_path.iterdir())


def test_all_killed_at_once(tmp_path: Path, unique_name: Callable[[], str]) -> None:
    name = unique_name()
    when = random.Random(3)
    for number in range(ROUNDS):
        # Each round finds what the last one left.
        with torture(tmp_path, name, "--seconds", "600", "--seed", str(number)) as run:
            wait_for_store(run, name)
            time.sleep(when.uniform(0.0, 0.6))  # any instant, that of the start included
            os.killpg(run.pid, signal.SIGKILL)
            wait_for_the_dead(run.pid)
    tables = [reverb.Table.queue("t", 5)]
    with reverb.Server(tables, name=name, capacity=4 << 20) as server:
        with reverb.Client(server.address) as client:
            client.insert_batch("t", {"x": np.arange(3)})
            client.check()
        own = server.name
        assert entries(own) == {f"shmreplay.{os.getuid()}.{name}{s}" for s in ("", ".lease")}
        assert server.stats()["participants"] == 1
    assert not entries(name)


def wait_for_store(run: subprocess.Popen[str], name: str) -> None:
    """Waits until a run has laid its store out, and clients can attach."""
    end = time.monotonic() + DEADLINE_S
    while True:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < end
        try:
            with reverb.Client(f"shm://{name}") as client:
                client.stats()
                return
        except (reverb.errors.StoreNotFoundError, reverb.errors.ServerClosedError):
            time.sleep(0.01)  # between two looks at a condition with a deadline


def wait_for_the_dead(group: int) -> None:
    """Waits until no process of a group is left but zombies: a killed one needs a moment to die.

    A zombie may still have a thread; whoever makes its store anew waits for that.
    """
    end = time.monotonic() + DEADLINE_S
    while any(living(entry, group) for entry in Path("/proc").glob("[0-9]*/stat")):
        assert time.monotonic() < end
        time.sleep(0.01)  # between two looks at a condition with a deadline


def living(stat: Path, group: int) -> bool:
    """Whether a process is of the group and no zombie."""
    try:
        state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):  # it went meanwhile
        return False
    return int(its_group) == group and state not in "ZX"
