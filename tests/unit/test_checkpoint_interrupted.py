"""Ctrl-C while a checkpoint is written, at any instruction: the next one is written as ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import _native, checkpoint
from shmreplay.checkpointers import DefaultCheckpointer
from tests.conftest import PROCESS_DEADLINE

MakeServer = Callable[..., reverb.Server]

# Of all instructions, one in so many is interrupted: 1 takes each.
STRIDE = int(os.environ.get("CHECKPOINT_INTERRUPT_STRIDE", "7"))
SIGNALS = int(os.environ.get("CHECKPOINT_SIGNALS", "40"))


def serve(make_server: MakeServer, root: Path) -> reverb.Server:
    limiter = reverb.rate_limiters.MinSize(1)
    selectors = reverb.selectors
    table = reverb.Table("t", selectors.Uniform(), selectors.Fifo(), 50, limiter)
    server = make_server([table], checkpointer=DefaultCheckpointer(root))
    with server.localhost_client() as client:
        client.insert_batch("t", {"x": np.arange(20)})
    return server


class Interrupter:
    """Raises KeyboardInterrupt before the instruction of that number; counts them."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.count = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        # Only ours: Python looks for signals between some of its instructions, and in its own
        # modules not where a lock was just taken.
        frame.f_trace_opcodes = frame.f_globals["__name__"].startswith("shmreplay")
        if event == "opcode":
            self.count += 1
            if self.count == self._at:
                raise KeyboardInterrupt
        return self.trace


def interrupted(call: Callable[[], Any], at: int) -> tuple[bool, int]:
    """Whether it was, and how many instructions this thread went through."""
    interrupter = Interrupter(at)
    before = sys.gettrace()
    sys.settrace(interrupter.trace)
    try:
        call()
    except KeyboardInterrupt:
        return True, interrupter.count
    finally:
        sys.settrace(before)
    return False, interrupter.count


def writers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "shmreplay-checkpoint" and t.is_alive()]


def assert_the_next_one_is_written(connection: Any, root: Path, what: str) -> None:
    for thread in writers():
        thread.join(PROCESS_DEADLINE)
    assert connection.save().items == 20, what
    # The checkpoint that was just written, and nothing else of any.
    assert len(os.listdir(root)) == 1
    assert _native.hold_claim(connection.native)
    _native.hold_release(connection.native)


def test_at_any_instruction_of_the_caller(make_server: MakeServer, tmp_path: Path) -> None:
    server = serve(make_server, tmp_path)
    connection = server._connection
    _, count = interrupted(connection.save, -1)
    assert count > 100
    hits = 0
    for at in range(1, count + 1, STRIDE):
        hit, _ = interrupted(connection.save, at)
        hits += hit
        assert_the_next_one_is_written(connection, tmp_path, f"instruction {at}")
    assert hits > 10
    server.check()
    assert server.stats()["sessions"] <= 2


def test_by_signals_at_any_time(make_server: MakeServer, tmp_path: Path) -> None:
    server = serve(make_server, tmp_path)
    connection = server._connection

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    hits = 0
    try:
        for i in range(SIGNALS):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 2e-4 * i)
                while True:
                    connection.save()
            except KeyboardInterrupt:
                hits += 1
            assert_the_next_one_is_written(connection, tmp_path, f"signal {i}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits == SIGNALS
    server.check()


def test_while_it_is_written_it_ends_before_the_caller_goes_on(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(make_server, tmp_path)
    join, joined = threading.Thread.join, threading.Event()

    def interrupted_join(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name == "shmreplay-checkpoint" and not joined.is_set():
            if threading.current_thread() is threading.main_thread():
                reading.wait(PROCESS_DEADLINE)
                joined.set()
                raise KeyboardInterrupt
        join(self, timeout)

    reading = threading.Event()
    read = _native.image_rows

    def slowly(*arguments: Any) -> int:
        reading.set()
        joined.wait(PROCESS_DEADLINE)
        return read(*arguments)

    monkeypatch.setattr(checkpoint._Work, "join", interrupted_join)
    monkeypatch.setattr(_native, "image_rows", slowly)
    with pytest.raises(KeyboardInterrupt):
        server.checkpoint()
    assert not writers() and not os.listdir(tmp_path)
    monkeypatch.undo()
    assert server.checkpoint().items == 20
