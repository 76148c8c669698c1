"""What the commands share: exit codes, what they write, and how they name a store."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from shmreplay import recovery, segment
from shmreplay.overview import describe

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
    "say",
    "say_json",
    "size",
]

OK: Final = 0
PROBLEM: Final = 1
USAGE: Final = 2

Commands = Any
"""What `argparse` gives for subcommands; it has no public name."""


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
