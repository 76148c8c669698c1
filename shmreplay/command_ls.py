"""``shmreplay ls``: the stores that there are."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from shmreplay import segment
from shmreplay.command_support import (
    OK,
    PROBLEM,
    Commands,
    add_command,
    all_stores,
    columns,
    say,
    say_json,
    size,
)
from shmreplay.overview import problems_of

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the command."""
    add_command(commands, "ls", run, "List the stores, the dead ones included.")


def run(options: argparse.Namespace) -> int:
    stores = all_stores()
    if options.json:
        say_json(stores)
    elif not stores:
        say(f"no stores of user {os.geteuid()} in {segment.DIRECTORY}")
    else:
        rows: list[Sequence[object]] = [
            ("NAME", "STATE", "PORT", "SERVER", "PROCESSES", "MEMORY", "CAPACITY", "ITEMS")
        ]
        for about in stores:
            if "memory" not in about:
                rows.append((about["name"], about["state"], *"------"))
                continue
            alive = [each for each in about["processes"] if each["alive"]]
            server = [each["pid"] for each in alive if each["number"] == 0]
            rows.append(
                (
                    about["name"],
                    about["state"],
                    about["port"] or "-",
                    server[0] if server else "-",
                    len(alive),
                    size(about["memory"]["committed_bytes"]),
                    size(about["memory"]["capacity_bytes"]),
                    sum(table["size"] for table in about["tables"]),
                )
            )
        say(columns(rows))
    return PROBLEM if any(problems_of(about) for about in stores) else OK
