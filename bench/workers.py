"""Contenders in processes of their own: seconds in by the line, `calls seconds` out."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from bench.harness import Measure, Reading

READY_SECONDS = 300.0
"""A worker that is not ready after this time is given up."""

ANSWER_SECONDS = 60.0
"""As is one that says nothing for this long, beyond what it was told to measure."""

END_SECONDS = 20.0
ERROR_CHARACTERS = 2000


class Worker:
    """A process that measures one contender."""

    def __init__(
        self, stack: ExitStack, command: Sequence[str], cwd: Path, env: Mapping[str, str]
    ) -> None:
        """Starts it.

        Args:
            stack: Ends it.
            command: What to run.
            cwd: Where.
            env: Set on top of this process's environment.
        """
        self._errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._request: IO[str] = self._process.stdin
        self._answer: IO[str] = self._process.stdout
        stack.callback(self._end)

    def ready(self) -> Measure:
        """Waits until it says that it is ready; returns what measures with it.

        Raises:
            RuntimeError: It ended or said nothing; with the end of what it wrote to its stderr.
        """
        self._hear(READY_SECONDS)
        return self.measure

    def bid(self) -> None:
        """Tells it to end, without waiting for that."""
        if not self._request.closed:
            self._request.close()

    def measure(self, seconds: float) -> Reading:
        """Lets it measure for this many seconds.

        Raises:
            RuntimeError: As `ready`.
        """
        self._request.write(f"{seconds!r}\n")
        self._request.flush()
        calls, taken = self._hear(seconds + ANSWER_SECONDS).split()
        return Reading(int(calls), float(taken))

    def _hear(self, seconds: float) -> str:
        readable, _, _ = select.select([self._answer], [], [], seconds)
        line = self._answer.readline() if readable else ""
        if line:
            return line
        state = f"ended, status {self._end()}" if readable else f"said nothing for {seconds:g} s"
        self._errors.seek(0)
        raise RuntimeError(
            f"the process that measures {state}: {self._errors.read()[-ERROR_CHARACTERS:].strip()}"
        )

    def _end(self) -> int:
        """Ends it by closing its input, or by force; returns its exit status."""
        self.bid()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._answer.close()
        return self._process.wait()
