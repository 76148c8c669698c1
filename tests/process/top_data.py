"""Two looks at a store, as `monitor.look` gives them, with fixed numbers."""

from __future__ import annotations

import sys
from typing import Any, Final

from shmreplay.monitor import Snapshot

MIB: Final = 1 << 20


def table(name: str, **changes: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"name": name, "sampler": "uniform", "remover": "fifo"}
    about |= {"size": 0, "max_size": 1000, "inserts": 0, "samples": 0, "updates": 0}
    about |= {"missed_updates": 0, "deletes": 0, "insert_waiters": 0, "sample_waiters": 0}
    about |= {"samples_per_insert": 1.0, "min_size_to_sample": 1, "poisoned": 0}
    about |= {"min_diff": -sys.float_info.max, "max_diff": sys.float_info.max}
    return about | changes


def session(number: int, process: int, kind: str, **counts: int) -> dict[str, Any]:
    return {"number": number, "process": process, "kind": kind} | {
        key: counts.get(key, 0) for key in ("inserts", "samples", "updates", "written_bytes")
    }


def process(number: int, pid: int, role: str, **changes: Any) -> dict[str, Any]:
    about = {"number": number, "pid": pid, "pid_namespace": 4026531836, "role": role}
    return about | {"alive": True, "sessions": {}, "attached_s": 125.0 - number} | changes


BEFORE: Final[dict[str, Any]] = {
    "name": "atari",
    "address": "shm://atari",
    "state": "served",
    "port": 8000,
    "generation": "0123456789abcdef",
    "server_pid": 4100,
    "memory": {
        "capacity_bytes": 512 * MIB,
        "committed_bytes": 300 * MIB,
        "fixed_bytes": 2 * MIB,
        "index_bytes": 18 * MIB,
        "arena_committed_bytes": 280 * MIB,
        "arena_used_bytes": 230 * MIB,
        "inserts": 1_000_000,
        "samples": 2_000_000,
        "updates": 100_000,
        "written_bytes": 900 * MIB,
    },
    "tables": [
        table("replay", size=200_000, max_size=200_000, inserts=950_000, samples=1_900_000),
        table(
            "prioritized",
            sampler="prioritized",
            size=40_000,
            max_size=100_000,
            inserts=40_000,
            samples=159_000,
            samples_per_insert=4.0,
            min_size_to_sample=1000,
            min_diff=-1000.0,
            max_diff=1000.0,
        ),
        table("queue", sampler="fifo", size=0, max_size=64, min_diff=0.0, max_diff=64.0),
        table("broken", size=12, inserts=12, poisoned=2),
    ],
    "processes": [
        process(0, 4100, "server", sessions={"references": 0, "clients": 1}),
        process(1, 4101, "client", sessions={"references": 40, "writers": 2}),
        process(2, 4102, "client", sessions={"references": 512, "samplers": 1}),
        process(3, 4103, "client", alive=False, sessions={"references": 3, "writers": 1}),
    ],
    "sessions": [
        session(0, 1, "writers", inserts=500_000, written_bytes=450 * MIB),
        session(1, 1, "writers", inserts=400_000, written_bytes=400 * MIB),
        session(2, 2, "samplers", samples=2_000_000, updates=100_000),
    ],
    "borrowed": [{"process": 2, "pid": 4102, "role": "client", "items": 256, "age_s": 31.5}],
}


def _later() -> dict[str, Any]:
    """Two seconds after it."""
    replay, prioritized, queue, broken = BEFORE["tables"]
    first, second, third = BEFORE["sessions"]
    return {
        **BEFORE,
        "memory": BEFORE["memory"]
        | {"inserts": 1_024_000, "samples": 2_090_000, "updates": 110_240}
        | {"written_bytes": 924 * MIB},
        "tables": [
            replay | {"inserts": 974_000, "samples": 1_990_000},
            prioritized | {"samples": 161_000, "updates": 10_240, "sample_waiters": 1},
            queue | {"sample_waiters": 2},
            broken,
        ],
        "sessions": [
            first | {"inserts": 512_000, "written_bytes": 462 * MIB},
            second | {"inserts": 412_000, "written_bytes": 412 * MIB},
            third | {"samples": 2_090_000, "updates": 110_240},
            session(3, 1, "clients", inserts=7),
        ],
    }


SNAPSHOTS: Final = [Snapshot(100.0, BEFORE), Snapshot(102.0, _later())]
