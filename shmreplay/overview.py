"""What is going on in a store, as plain values that JSON can hold.

Looks without locks and disturbs nobody. The values are of no single moment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from shmreplay import recovery
from shmreplay._native import Store as NativeStore
from shmreplay._native import peek_store, peek_table, session_counts, sessions
from shmreplay.lease import Participant
from shmreplay.recovery import Look
from shmreplay.table import TableConfig

__all__ = ["describe", "overview", "problems_of"]

_SESSION_KINDS: Final = {1: "clients", 2: "writers", 3: "samplers"}


def describe(found: Look) -> dict[str, Any]:
    """All that is known of a store: name, address and state, and `overview` if it can be read."""
    about: dict[str, Any] = {"name": found.name, "address": f"shm://{found.name}"}
    if found.path is not None:
        about["path"] = found.path
    about["state"] = found.state
    if found.problem:
        about["problem"] = found.problem
    if found.native is not None:
        about |= overview(found.native, found.tables, found.participants)
    return about


def overview(
    native: NativeStore, tables: Sequence[TableConfig], participants: Sequence[Participant]
) -> dict[str, Any]:
    """What is in a store, who uses it, and what they did so far.

    Args:
        native: The store.
        tables: Its tables as they were declared, in their order.
        participants: Who is attached.

    Returns:
        ``port``, ``generation``, ``server_pid``; ``memory`` in bytes by use, and counters of the
        store; ``tables``, each with its settings as they are now and its counters; ``processes``;
        ``sessions``, whose counters go on from owner to owner; and ``borrowed`` batches. Times in
        seconds.
    """
    now = time.time_ns()
    memory = peek_store(native)
    known = memory["fixed_bytes"] + memory["arena_committed_bytes"]
    memory["index_bytes"] = max(memory["committed_bytes"] - known, 0)
    about: dict[str, Any] = {"port": native.port or None, "generation": f"{native.generation:016x}"}
    about |= {"server_pid": native.creator_pid, "memory": memory}
    about["tables"] = [
        {"name": config.name, **peek_table(native, number)}
        | {"sampler": config.sampler_kind, "remover": config.remover_kind}
        for number, config in enumerate(tables)
    ]
    held: dict[int, dict[str, int]] = {}
    lent: list[tuple[int, int, int]] = []
    for number, kind, _, references, borrowed_ns in sessions(native):
        counts = held.setdefault(number, {"references": 0})
        counts["references"] += references
        name = _SESSION_KINDS.get(kind, "others")
        counts[name] = counts.get(name, 0) + 1
        if borrowed_ns != 0:
            lent.append((borrowed_ns, number, references))
    about["processes"] = [
        {"number": each.number, "pid": each.pid, "pid_namespace": each.pid_namespace}
        | {"role": each.role, "alive": each.alive, "sessions": held.get(each.number, {})}
        | {"attached_s": max(now - each.attached_ns, 0) / 1e9}
        for each in participants
    ]
    about["sessions"] = [
        {"number": number, "process": process, "kind": _SESSION_KINDS.get(kind, "others")}
        | {"inserts": inserts, "samples": samples, "updates": updates, "written_bytes": nbytes}
        for number, process, kind, inserts, samples, updates, nbytes in session_counts(native)
    ]
    who = {each.number: each for each in participants}
    about["borrowed"] = [
        {"process": number, "pid": who[number].pid, "role": who[number].role, "items": items}
        | {"age_s": max(now - since, 0) / 1e9}
        for since, number, items in sorted(lent)
        if number in who
    ]
    return about


def problems_of(about: dict[str, Any]) -> list[str]:
    """What is wrong with a store, in words."""
    problems = [about["problem"]] if about["state"] == recovery.DAMAGED else []
    problems += [
        f"table {table['name']!r} is shut: a repair failed. `shmreplay dump` reads it out."
        for table in about.get("tables", [])
        if table["poisoned"]
    ]
    return problems
