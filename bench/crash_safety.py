"""What does it cost that any process may die at any instant?

As a user meets it, through the Python API, and in the core alone, where it shows most.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench import crash_safety_worker, workers
from bench.baselines import CompilerError
from bench.harness import Bench, Contender, Measure, TimedLoop
from bench.payloads import TRANSITION_BYTES

NAME = "crash_safety"
QUESTION = "What does it cost that any process may die at any instant?"
OURS = "shmreplay"
FRAGILE = "the same, compiled without crash safety"
CORE_CASES = {
    "insert, the core alone": ("bench_insert", 1),
    "sample 256, the core alone": ("bench_sample", 256),
    "update 256, the core alone": ("bench_update", 256),
}
ALL_CASES = (*crash_safety_worker.CASES, *CORE_CASES)
ROWS = 100_000

ROOT = Path(__file__).parent.parent
DRIVER = ROOT / "bench" / "c" / "crash_safety.c"
CORE = ROOT / "shmreplay" / "_core"


@functools.cache
def _library(fragile: bool) -> ctypes.CDLL:
    """Compiles the core with its driver, once a process for each variant, and loads it.

    Raises:
        CompilerError: There is no C compiler, or it refused the source.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise CompilerError("this question needs a C compiler: install cc or name one in CC")
    with tempfile.TemporaryDirectory(prefix="shmreplay-bench-") as directory:
        target = Path(directory) / "core.so"
        flags = [
            "-std=c11",
            "-O3",
            "-fno-strict-aliasing",
            "-fwrapv",
            "-shared",
            "-fPIC",
            f"-I{CORE}",
        ]
        if fragile:
            flags.append("-DSR_FRAGILE")
        sources = [str(DRIVER), *map(str, sorted(CORE.glob("*.c")))]
        command = [compiler, *flags, "-o", str(target), *sources, "-lm", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CompilerError(f"compiling {DRIVER.name} failed:\n{done.stderr}")
        library = ctypes.CDLL(str(target))
    library.bench_open.restype = ctypes.c_void_p
    library.bench_open.argtypes = [ctypes.c_uint64]
    library.bench_close.restype = None
    library.bench_close.argtypes = [ctypes.c_void_p]
    for function, _ in CORE_CASES.values():
        getattr(library, function).restype = ctypes.c_int
        getattr(library, function).argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return library


def _prepare(stack: ExitStack, function: str, rows: int, fragile: bool) -> Measure:
    library = _library(fragile)
    table = library.bench_open(rows)
    if table is None:
        raise MemoryError(f"no memory for a table of {rows} transitions")
    stack.callback(library.bench_close, table)

    def call(name: str, calls: int) -> None:
        if getattr(library, name)(table, calls) != 0:
            raise RuntimeError(f"the core refused {name}")

    call("bench_insert", 2 * rows)
    call("bench_sample", 1)
    return TimedLoop(partial(call, function))


@functools.cache
def _fragile_copy() -> Path:
    """Copies the package, builds it without crash safety, and gives where; once a process.

    Raises:
        CompilerError: It could not be built.
    """
    keep = tempfile.TemporaryDirectory(prefix="shmreplay-bench-")
    atexit.register(keep.cleanup)
    root = Path(keep.name)
    built = shutil.ignore_patterns("*.so", "_native.c", "__pycache__", "results")
    for name in ("shmreplay", "bench"):
        shutil.copytree(ROOT / name, root / name, ignore=built)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root / name)
    command = [sys.executable, "-c", "from setuptools import setup; setup()"]
    done = subprocess.run(
        [*command, "-q", "build_ext", "--inplace"],
        cwd=root,
        env={**os.environ, "CFLAGS": "-DSR_FRAGILE"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CompilerError(f"building shmreplay without crash safety failed:\n{done.stderr}")
    return root


def _prepare_worker(stack: ExitStack, case: str, rows: int, fragile: bool) -> Measure:
    """Starts a process that measures the one or the other package."""
    root = _fragile_copy() if fragile else ROOT
    command = [sys.executable, "-m", "bench.crash_safety_worker", case, str(rows)]
    return workers.Worker(stack, command, root, {}).ready()


def run(bench: Bench) -> None:
    """Measures this question."""
    rows = ROWS // 10 if bench.settings.quick else ROWS
    cases: list[tuple[str, int, Callable[..., Measure]]] = [
        *(
            (case, batch, partial(_prepare_worker, case=case))
            for case, (_, batch) in crash_safety_worker.CASES.items()
        ),
        *(
            (case, batch, partial(_prepare, function=function))
            for case, (function, batch) in CORE_CASES.items()
        ),
    ]
    for case, batch, prepare in cases:
        bench.compare(
            NAME,
            case,
            [
                Contender(name, partial(prepare, rows=rows, fragile=fragile), ours=True)
                for name, fragile in ((OURS, False), (FRAGILE, True))
            ],
            items_per_call=batch,
            bytes_per_item=TRANSITION_BYTES,
            box=0.4,
        )
