"""How long does importing the package take?"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack

from bench.harness import Bench, Contender, Measure, Reading

NAME = "import_time"
QUESTION = "How long does importing the package take?"
CASE = "import in a new process"
OURS = "import shmreplay"
NUMPY = "import numpy"
CHILD = """
import time
begin = time.perf_counter()
import {module}
print(time.perf_counter() - begin)
"""


def _import(module: str) -> Measure:
    """Imports in processes of their own, which take the time themselves: Python's start is out."""

    def measure(seconds: float) -> Reading:
        calls, total = 0, 0.0
        deadline = time.perf_counter() + seconds
        while calls == 0 or time.perf_counter() < deadline:
            child = [sys.executable, "-c", CHILD.format(module=module)]
            done = subprocess.run(child, check=True, capture_output=True, text=True)
            total += float(done.stdout)
            calls += 1
        return Reading(calls, total)

    return measure


def _ours(_: ExitStack) -> Measure:
    return _import("shmreplay")


def _numpy(_: ExitStack) -> Measure:
    return _import("numpy")


def run(bench: Bench) -> None:
    """Measures this question."""
    rows = [Contender(OURS, _ours, ours=True), Contender(NUMPY, _numpy)]
    bench.compare(NAME, CASE, rows, bytes_per_item=0)
