"""What does it cost that any process may die at any instant?"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.baselines import CompilerError
from bench.harness import Bench, Contender, Measure, TimedLoop
from bench.payloads import TRANSITION_BYTES

NAME = "crash_safety"
QUESTION = "What does it cost that any process may die at any instant (the core, without Python)?"
OURS = "shmreplay's core"
FRAGILE = "the same, compiled without crash safety"
CASES = {"insert": ("bench_insert", 1), "sample 256": ("bench_sample", 256)}
CASES["update 256"] = ("bench_update", 256)
ROWS = 100_000

DRIVER = Path(__file__).parent / "c" / "crash_safety.c"
CORE = Path(__file__).parent.parent / "shmreplay" / "_core"


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
    for function, _ in CASES.values():
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


def run(bench: Bench) -> None:
    """Measures this question."""
    rows = ROWS // 10 if bench.settings.quick else ROWS
    for case, (function, batch) in CASES.items():
        bench.compare(
            NAME,
            case,
            [
                Contender(
                    name,
                    partial(_prepare, function=function, rows=rows, fragile=fragile),
                    ours=True,
                )
                for name, fragile in ((OURS, False), (FRAGILE, True))
            ],
            items_per_call=batch,
            bytes_per_item=TRANSITION_BYTES,
            box=0.4,
        )
