"""A program that is ended by a signal: what stays in /dev/shm, who says so, and who removes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import cli
from shmreplay import server as server_module
from tests.conftest import PROCESS_DEADLINE, ROOT

MakeServer = Callable[..., reverb.Server]

PROGRAM = """
import signal, sys, time
import shmreplay as reverb
if sys.argv[2] == "exits":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
server = reverb.Server([reverb.Table.queue("q", 5)], name=sys.argv[1], capacity=4 << 20)
server.localhost_client().insert({"x": 1.0}, {"q": 1.0})
sys.stdout.write("ready\\n")
sys.stdout.flush()
time.sleep(1000)
"""


def terminated(name: str, how: str) -> int:
    """The exit code of a program with a server that got SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, how],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PROCESS_DEADLINE)
    finally:
        process.kill()
        process.wait()
    return process.returncode


def files_of(name: str) -> list[str]:
    return [entry.name for entry in Path("/dev/shm").iterdir() if f".{name}" in entry.name]


def test_what_a_killed_program_leaves_is_told_by_the_next_server(
    make_server: MakeServer,
    unique_name: Callable[[], str],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = unique_name()
    monkeypatch.setattr(server_module, "_MENTIONED_SHARE", 1e-9)
    try:
        assert terminated(name, "is killed") == -signal.SIGTERM
        assert files_of(name)
        make_server([reverb.Table.queue("q", 5)])
        told = [r for r in caplog.records if name in r.getMessage()]
        assert len(told) == 1 and "`shmreplay clean` removes them" in told[0].getMessage()
        assert "recover=True" in told[0].getMessage()
        make_server([reverb.Table.queue("q", 5)])  # once is enough
        assert len([r for r in caplog.records if name in r.getMessage()]) == 1
        # Nothing of it was touched.
        with reverb.Server(None, name=name, recover=True) as server:
            assert server.localhost_client().sample_batch("q", 1).data["x"] == np.ones(1)
    finally:
        cli.main(["clean", name])
    capsys.readouterr()
    assert not files_of(name)


def test_clean_removes_it(
    unique_name: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = unique_name()
    terminated(name, "is killed")
    assert cli.main(["clean", name]) == 0
    assert f"removed {name}" in capsys.readouterr().out
    assert not files_of(name)


def test_a_program_that_exits_on_the_signal_leaves_nothing(
    unique_name: Callable[[], str],
) -> None:
    name = unique_name()
    assert terminated(name, "exits") == 128 + signal.SIGTERM
    assert not files_of(name)
