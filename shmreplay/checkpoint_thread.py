"""A server's checkpoints: loading one as it starts, writing them as time and inserts go by."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Final

from shmreplay import checkpoint
from shmreplay._native import set_checkpointer
from shmreplay.checkpointers import CheckpointSettings
from shmreplay.connection import Connection
from shmreplay.errors import ReverbError
from shmreplay.limits import WAIT_SLICE_MS

__all__ = ["CheckpointThread"]

_log = logging.getLogger(__name__)

_LEAST_PAUSE_S: Final = 1.0
"""Between two attempts by the number of inserts, whatever that is: one must not follow another."""


class CheckpointThread:
    """Writes checkpoints by itself, where the settings say so, and counts them."""

    def __init__(self, connection: Connection, settings: CheckpointSettings) -> None:
        """Tells the store's clients where checkpoints go."""
        self._connection = connection
        self._settings = settings
        if settings.path:
            settings = settings._replace(path=os.path.abspath(settings.path))
        set_checkpointer(connection.native, settings.to_json() if settings.path else None)
        self._written = 0
        self._failures = 0
        self._last: checkpoint.Saved | None = None

    def start(self, stopped: threading.Event) -> list[threading.Thread]:
        """Starts the thread, if there is something for it to do."""
        if self._settings.every_seconds is None and self._settings.every_inserts is None:
            return []
        thread = threading.Thread(
            target=self._run, args=(stopped,), name="shmreplay-checkpoints", daemon=True
        )
        thread.start()
        return [thread]

    def stats(self) -> dict[str, float]:
        """Counts of what this thread wrote, and figures of the last one."""
        last = self._last
        return {
            "checkpoints_written": self._written,
            "checkpoint_failures": self._failures,
            "checkpoint_last_s": last.seconds if last else 0.0,
            "checkpoint_last_held_s": last.held_s if last else 0.0,
            "checkpoint_last_bytes": last.data_bytes if last else 0,
            "checkpoint_last_new_bytes": last.new_bytes if last else 0,
        }

    def _inserts(self) -> int:
        native = self._connection.native
        return sum(native.table_info(i)["inserts"] for i in range(len(self._connection.configs)))

    def _run(self, stopped: threading.Event) -> None:
        began, inserts = time.monotonic(), 0
        while not stopped.wait(WAIT_SLICE_MS / 1000):
            try:
                now, passed = self._inserts(), time.monotonic() - began
                if now < inserts:  # a table was reset
                    inserts = now
                if not self._due(passed, now - inserts):
                    continue
                began, inserts = time.monotonic(), now
                self._last = self._connection.save()
                self._written += 1
            except (ReverbError, OSError, MemoryError) as error:
                if stopped.is_set():
                    return
                self._failures += 1
                _log.error("a checkpoint could not be written: %s", error)

    def _due(self, passed: float, inserted: int) -> bool:
        seconds, inserts = self._settings.every_seconds, self._settings.every_inserts
        if seconds is not None and passed >= seconds:
            return True
        return inserts is not None and inserted >= inserts and passed >= _LEAST_PAUSE_S
