"""What ``shmreplay top`` and ``shmreplay info`` show: looks at a store, and rates between two.

A `Snapshot` is what one look found. `view` makes of one, or of two, what a person wants to see:
plain values that need no terminal.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any, Final, NamedTuple

from shmreplay import address, recovery, reverb_types
from shmreplay.client import Client
from shmreplay.overview import describe, problems_of

__all__ = [
    "Process",
    "Rates",
    "Snapshot",
    "Source",
    "StoreView",
    "Table",
    "look",
    "source",
    "view",
]

_COUNTS: Final = ("inserts", "samples", "updates", "written_bytes")


class Snapshot(NamedTuple):
    """What one look found."""

    at_s: float
    """When: seconds of a monotonic clock."""
    about: dict[str, Any]
    """See `overview.describe`."""


Source = Callable[[], Snapshot]
"""Looks once more."""


class Rates(NamedTuple):
    """What is done in a second."""

    inserts: float = 0.0
    samples: float = 0.0
    updates: float = 0.0
    written_bytes: float = 0.0
    """Bytes of steps."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table as people see it."""

    name: str
    size: int
    max_size: int
    inserts: int
    samples: int
    deletes: int
    sampler: str
    remover: str
    rates: Rates | None
    """None from a single look."""
    ratio: float | None
    """Samples for each insert since the last reset; None before the first insert."""
    target: float | None
    """The ratio that the limiter holds the two to; None: none."""
    insert_blocked_by: str
    """Why the next insert would wait; empty: it would not."""
    sample_blocked_by: str
    """Why the next sample would wait; empty: it would not."""
    insert_waiters: int
    sample_waiters: int
    poisoned: bool
    """A repair failed: the table is shut."""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that is attached to the store, or died while it was."""

    pid: int
    role: str
    alive: bool
    rates: Rates | None
    """None from a single look."""
    attached_s: float
    holds: str
    """Its sessions and the references that they hold, in words."""
    oldest_pin_s: float | None
    """For how long it has held what it borrowed first; None: it has borrowed nothing."""
    borrowed_items: int


@dataclasses.dataclass(frozen=True)
class StoreView:
    """A store as people see it."""

    name: str
    address: str
    state: str
    port: int | None
    server_pid: int | None
    generation: str
    problems: list[str]
    capacity_bytes: int
    committed_bytes: int
    memory: dict[str, int]
    """Bytes by use: what adds up to ``committed_bytes``."""
    compressed: tuple[int, int]
    """Bytes of steps that are kept compressed, and what they take of "steps and items"."""
    rates: Rates | None
    tables: list[Table]
    processes: list[Process]

    @property
    def readable(self) -> bool:
        """Whether there is more to say of it than its state."""
        return self.capacity_bytes > 0


# --- looking ------------------------------------------------------------------------------------


def look(name: str) -> Snapshot:
    """Looks at a store of this machine without attaching to it, whatever its state.

    One that is not there is dead, and there is nothing in it.
    """
    with recovery.look(name) as found:
        return Snapshot(time.monotonic(), describe(found))


def source(where: str, remote: address.RemoteOptions | None = None) -> Source:
    """What gives snapshots of the store at an address: the name of one, or as `Client` takes it.

    Raises:
        InvalidArgumentError: It is neither a name nor an address.
    """
    if "://" not in where and ":" not in where:
        where = f"shm://{where}"
    parsed = address.parse(where)
    if parsed.name is None and not parsed.is_bridge and address.is_local(parsed.host):
        parsed = address.resolve(where, timeout=0.0)
    if parsed.name is not None:
        return partial(look, parsed.name)
    client = Client(parsed.endpoint, remote)
    return lambda: Snapshot(time.monotonic(), client.overview())


# --- what it comes to ---------------------------------------------------------------------------


def view(now: Snapshot, before: Snapshot | None = None) -> StoreView:
    """Makes of what was found what is shown.

    Args:
        now: What the last look found.
        before: An earlier one: with it there are rates, if both are of the same store.
    """
    about = now.about
    memory: dict[str, int] = about.get("memory", {})
    same = before is not None and before.about.get("generation") == about.get("generation")
    earlier = before if same and before is not None and now.at_s > before.at_s else None
    used = memory.get("arena_used_bytes", 0)
    return StoreView(
        name=about["name"],
        address=about["address"],
        state=about["state"],
        port=about.get("port"),
        server_pid=about.get("server_pid"),
        generation=about.get("generation", ""),
        problems=problems_of(about),
        capacity_bytes=memory.get("capacity_bytes", 0),
        committed_bytes=memory.get("committed_bytes", 0),
        memory={
            "steps and items": used,
            "ready for use": max(memory.get("arena_committed_bytes", 0) - used, 0),
            "indexes": memory.get("index_bytes", 0),
            "fixed": memory.get("fixed_bytes", 0),
        },
        compressed=(
            memory.get("compressed_raw_bytes", 0),
            memory.get("compressed_stored_bytes", 0),
        ),
        rates=_store_rates(now, earlier),
        tables=[_table(each, now, earlier) for each in about.get("tables", [])],
        processes=[_process(each, now, earlier) for each in about.get("processes", [])],
    )


def _rates(pairs: list[tuple[dict[str, Any], dict[str, Any]]], seconds: float) -> Rates:
    """From counters (before, now): one that has gone back was reset meanwhile."""
    sums = dict.fromkeys(_COUNTS, 0)
    for old, new in pairs:
        for key in _COUNTS:
            grown = new.get(key, 0) - old.get(key, 0)
            sums[key] += grown if grown >= 0 else new.get(key, 0)
    return Rates(*(sums[key] / seconds for key in _COUNTS))


def _store_rates(now: Snapshot, before: Snapshot | None) -> Rates | None:
    if before is None or "memory" not in now.about or "memory" not in before.about:
        return None
    return _rates([(before.about["memory"], now.about["memory"])], now.at_s - before.at_s)


def _table(about: dict[str, Any], now: Snapshot, before: Snapshot | None) -> Table:
    limiter = reverb_types.RateLimiterInfo(
        about["samples_per_insert"],
        about["min_size_to_sample"],
        about["min_diff"],
        about["max_diff"],
        reverb_types.RateLimiterCallStats(about["inserts"]),
        reverb_types.RateLimiterCallStats(about["samples"]),
    )
    bounded = about["max_diff"] < sys.float_info.max or about["min_diff"] > -sys.float_info.max
    old = [] if before is None else before.about.get("tables", [])
    pairs = [(each, about) for each in old if each["name"] == about["name"]]
    return Table(
        **{key: about[key] for key in ("name", "size", "max_size", "inserts", "samples")},
        **{key: about[key] for key in ("deletes", "sampler", "remover")},
        **{key: about[key] for key in ("insert_waiters", "sample_waiters")},
        rates=_rates(pairs, now.at_s - before.at_s) if before is not None else None,
        ratio=about["samples"] / about["inserts"] if about["inserts"] else None,
        target=about["samples_per_insert"] if bounded else None,
        insert_blocked_by=reverb_types.insert_blocked_by(limiter, about["size"]),
        sample_blocked_by=reverb_types.sample_blocked_by(limiter, about["size"]),
        poisoned=bool(about["poisoned"]),
    )


def _many(what: str, n: int) -> str:
    return f"{n} {what.removesuffix('s') if n == 1 else what}"


def _process(about: dict[str, Any], now: Snapshot, before: Snapshot | None) -> Process:
    lent = [each for each in now.about["borrowed"] if each["process"] == about["number"]]
    rates = None
    if before is not None:
        # What a session had counted before it became this process's is not this process's doing.
        old = {(each["number"], each["process"]): each for each in before.about.get("sessions", [])}
        rates = _rates(
            [
                (old[each["number"], each["process"]], each)
                for each in now.about["sessions"]
                if each["process"] == about["number"] and (each["number"], each["process"]) in old
            ],
            now.at_s - before.at_s,
        )
    return Process(
        pid=about["pid"],
        role=about["role"],
        alive=about["alive"],
        rates=rates,
        attached_s=about["attached_s"],
        holds=", ".join(starmap(_many, about["sessions"].items())) or "nothing",
        oldest_pin_s=max((each["age_s"] for each in lent), default=None),
        borrowed_items=sum(each["items"] for each in lent),
    )
