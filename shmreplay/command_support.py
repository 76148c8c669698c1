"""What the commands share: exit codes, what they write, and how they name a store."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from shmreplay import recovery, segment
from shmreplay._native import borrowers, peek_store, peek_table, sessions
from shmreplay.recovery import Look

__all__ = [
    "OK",
    "PROBLEM",
    "USAGE",
    "Commands",
    "Usage",
    "add_command",
    "all_stores",
    "check_there",
    "columns",
    "complain",
    "describe",
    "problems_of",
    "say",
    "say_json",
    "size",
]

OK: Final = 0
PROBLEM: Final = 1
USAGE: Final = 2

Commands = Any
"""What `argparse` gives for subcommands; it has no public name."""

_SESSION_KINDS: Final = {1: "clients", 2: "writers", 3: "samplers"}


class Usage(Exception):
    """The command line asks for what cannot be done."""


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    """A parser for one more command, which takes `--json` as they all do.

    Args:
        commands: What to add it to.
        name: Of the command.
        run: Does it and returns the exit code.
        about: One line for the help.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.add_argument("--json", action="store_true", help="write JSON instead of text")
    parser.set_defaults(run=run)
    return parser


def say(text: str) -> None:
    """Writes to standard output."""
    sys.stdout.write(text + "\n")


def say_json(value: Any) -> None:
    """Writes a value as JSON to standard output."""
    say(json.dumps(value, indent=2))


def complain(text: str) -> None:
    """Writes to standard error."""
    sys.stderr.write(f"shmreplay: {text}\n")


def size(nbytes: int) -> str:
    """Bytes as people read them: `16.0 MiB`."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes} B"


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Columns side by side, the first row being their titles."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    )


def describe(found: Look) -> dict[str, Any]:
    """All that is known of a store, as JSON has it."""
    about: dict[str, Any] = {"name": found.name, "address": f"shm://{found.name}"}
    about["state"] = found.state
    if found.problem:
        about["problem"] = found.problem
    native = found.native
    if native is None:
        return about
    now = time.time_ns()
    about |= {"port": native.port or None, "generation": f"{native.generation:016x}"}
    about |= {"server_pid": native.creator_pid, "memory": peek_store(native)}
    about["tables"] = [
        {"name": config.name, "max_size": config.max_size, **peek_table(native, number)}
        | {"sampler": config.sampler_kind, "remover": config.remover_kind}
        for number, config in enumerate(found.tables)
    ]
    held: dict[int, dict[str, int]] = {}
    for number, kind, _, references, _ in sessions(native):
        counts = held.setdefault(number, {"references": 0})
        counts["references"] += references
        name = _SESSION_KINDS.get(kind, "others")
        counts[name] = counts.get(name, 0) + 1
    about["processes"] = [
        {"number": each.number, "pid": each.pid, "pid_namespace": each.pid_namespace}
        | {"role": each.role, "alive": each.alive, "sessions": held.get(each.number, {})}
        | {"attached_s": max(now - each.attached_ns, 0) / 1e9}
        for each in found.participants
    ]
    about["borrowed"] = [
        {"pid": pid, "role": role, "items": items, "age_s": max(now - since, 0) / 1e9}
        for pid, role, items, since in borrowers(native)
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


def all_stores() -> list[dict[str, Any]]:
    """`describe` of every store of this user."""
    stores = []
    for name in recovery.names():
        with recovery.look(name) as found:
            stores.append(describe(found))
    return stores


def check_there(name: str) -> None:
    """Raises what explains the usage where there is no store of this name."""
    segment.check_name(name)
    names = recovery.names()
    if name not in names:
        there = ", ".join(names) or "none"
        raise Usage(f"there is no store {name!r} of user {os.geteuid()}; there are: {there}")
