"""``shmreplay info``: what is in a store, who uses it, and what is wrong with it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from shmreplay import recovery, segment
from shmreplay.command_support import (
    OK,
    PROBLEM,
    Commands,
    add_command,
    all_stores,
    check_there,
    columns,
    complain,
    say,
    say_json,
    size,
)
from shmreplay.overview import describe, problems_of

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(commands, "info", run, "Show a store's tables, processes and memory.")
    parser.add_argument("name", nargs="?", help="name of the store; all of them without it")


def run(options: argparse.Namespace) -> int:
    if options.name is None:
        stores = all_stores()
    else:
        check_there(options.name)
        with recovery.look(options.name) as found:
            stores = [describe(found)]
    if options.json:
        say_json(stores if options.name is None else stores[0])
    elif not stores:
        say(f"no stores of user {os.geteuid()} in {segment.DIRECTORY}")
    else:
        say("\n\n".join(map(_info_text, stores)))
    problems = [problem for about in stores for problem in problems_of(about)]
    for problem in problems:
        complain(problem)
    return PROBLEM if problems else OK


def _info_text(about: dict[str, Any]) -> str:
    lines = [f"{about['name']}: {about['state']}"]
    if "memory" not in about:
        return lines[0]
    memory = about["memory"]
    lines += [
        f"  port {about['port'] or '-'}, server process {about['server_pid']}",
        f"  generation {about['generation']}",
        f"  committed {size(memory['committed_bytes'])} of {size(memory['capacity_bytes'])}",
        f"  in use {size(memory['arena_used_bytes'])}, {memory['arena_allocations']} allocations",
    ]
    tables: list[Sequence[object]] = [
        ("  TABLE", "ITEMS", "OF", "INSERTS", "SAMPLES", "DELETES", "SAMPLER", "REMOVER", "STATE")
    ]
    for each in about["tables"]:
        numbers = (each["size"], each["max_size"], each["inserts"], each["samples"])
        state = "shut" if each["poisoned"] else "ok"
        kinds = (each["sampler"], each["remover"], state)
        tables.append((f"  {each['name']}", *numbers, each["deletes"], *kinds))
    processes: list[Sequence[object]] = [
        ("  PROCESS", "ROLE", "LIVES", "ATTACHED", "HOLDS"),
    ]
    for each in about["processes"]:
        held = ", ".join(f"{count} {what}" for what, count in each["sessions"].items())
        lives = "yes" if each["alive"] else "no"
        attached = f"{each['attached_s']:.0f} s"
        processes.append((f"  {each['pid']}", each["role"], lives, attached, held or "nothing"))
    lines += [columns(tables), columns(processes)]
    lines += [
        f"  process {each['pid']} ({each['role']}) has borrowed {each['items']} items for"
        f" {each['age_s']:.1f} s"
        for each in about["borrowed"]
    ]
    return "\n".join(lines)
