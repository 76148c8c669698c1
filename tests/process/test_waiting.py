"""What is said of a call that waits for a rate limiter, and by whose death it may wait in vain."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import shmreplay as reverb
from shmreplay import _native, connection, errors, limits
from tests.process.servants import DEADLINE, Other, make_tables, rows, wait_until

Others = Callable[[], Other]

# Newer versions of Python warn of forking where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def test_the_log_says_what_calls_wait_for(
    store_name: str, others: Others, caplog: pytest.LogCaptureFixture
) -> None:
    """One line a wait, after five seconds; all waits at once, so that the test is not longer."""
    server, writer = others(), others()
    tables = [*make_tables(), reverb.Table.queue("full", 4)]
    server.call("serve", store_name, tables)
    writer.call("connect", f"shm://{store_name}")
    client = reverb.Client(f"shm://{store_name}")
    client.insert_batch("full", rows(1, 2, 3, 4))
    held = client.trajectory_writer(1)
    held.append({"x": 1.0})
    for _ in range(limits.WRITER_WINDOW_ITEMS):
        held.create_item("full", 1.0, {"x": held.history["x"][-1]})
    sampler = client.sampler("queue", 2)
    calls: list[Callable[[], Any]] = [
        lambda: client.sample_batch("queue", 2),
        lambda: client.insert_batch("full", rows(5)),
        lambda: client.insert({"x": 5.0}, {"full": 1.0}),
        lambda: held.flush(),
        lambda: held.create_item("full", 1.0, {"x": held.history["x"][-1]}),
        lambda: next(sampler),
    ]
    ends: list[str] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except errors.ServerClosedError as error:
            ends.append(str(error))

    server.kill()
    with caplog.at_level(logging.WARNING, "shmreplay"):
        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(caplog.records) >= len(calls), "each wait is in the log")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(calls)
    for word in ("sampling", "insert_batch", "insert on", "flush", "create_item", "a sampler"):
        assert any(word in line for line in lines), word
    for line in lines:
        assert "the server is dead" in line
        assert f"{writer.pid} (client)" in line
        waited = re.match(r"waiting for (\d+\.\d) s: ", line)
        assert waited is not None and float(waited[1]) >= limits.WAIT_LOG_AFTER_S
        assert "samples_per_insert=1" in line
        if "'full'" in line:
            assert "size=4, inserts=4, samples=0" in line
        else:
            assert "'queue'" in line
            assert "size=0, inserts=0" in line
    # They end as soon as there is what they wait for, or the store is closed.
    heir = reverb.Server(None, name=store_name, recover=True)
    heir.stop()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert len(ends) == len(calls)
    held.close()
    sampler.close()
    client.close()


def test_a_wait_is_said_once_and_then_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = connection.WaitLog(lambda: "for nothing")
    for now in (100.1, 104.9):  # noqa: B007 - what the clock says
        log.tick()
    assert not caplog.records
    for now in (105.0, 105.1, 120.0, 134.9):  # noqa: B007
        log.tick()
    assert [record.getMessage() for record in caplog.records] == ["waiting for 5.0 s: for nothing"]
    now = 135.0
    log.tick()
    assert len(caplog.records) == 2
    assert _native.logger.name == "shmreplay"


def test_deadlines_say_who_lives(store_name: str, others: Others) -> None:
    server, writer = others(), others()
    server.call("serve", store_name)
    writer.call("connect", f"shm://{store_name}")
    with reverb.Client(f"shm://{store_name}") as client:
        with pytest.raises(errors.DeadlineExceededError) as caught:
            client.sample_batch("queue", 1, timeout=0.01)
        assert f"{server.pid} (server), {writer.pid} (client)" in str(caught.value)
        assert "is dead" not in str(caught.value)
        server.kill()
        client.insert_batch("queue", rows(1, 2, 3, 4))
        held = client.trajectory_writer(1)
        held.append({"x": 1.0})
        held.create_item("queue", 1.0, {"x": held.history["x"][-1]})
        calls: list[Callable[[], Any]] = [
            lambda: client.insert_batch("queue", rows(5), timeout=0.01),
            lambda: client.insert({"x": 5.0}, {"queue": 1.0}, timeout=0.01),
            lambda: held.flush(timeout_ms=10),
            lambda: held.end_episode(timeout_ms=10),
        ]
        for call in calls:
            with pytest.raises(errors.DeadlineExceededError) as caught:
                call()
            message = str(caught.value)
            assert "the server is dead" in message
            assert "'queue'" in message
            assert f"{writer.pid} (client)" in message
            assert f"{server.pid} " not in message
        held.close()
