"""``shmreplay check``: whether everything in a store holds together."""

from __future__ import annotations

import argparse

from shmreplay import recovery
from shmreplay.command_support import (
    OK,
    PROBLEM,
    Commands,
    add_command,
    check_there,
    complain,
    say,
    say_json,
)
from shmreplay.errors import ReverbError

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "check", run, "Check every invariant of a store, under its locks."
    )
    parser.add_argument("name", help="name of the store")


def run(options: argparse.Namespace) -> int:
    check_there(options.name)
    problem = ""
    try:
        recovery.check(options.name)
    except ReverbError as error:
        problem = str(error)
    if options.json:
        say_json({"name": options.name, "ok": not problem, "problem": problem or None})
    elif not problem:
        say(f"{options.name}: all invariants hold")
    if problem:
        complain(f"{options.name}: {problem}")
    return PROBLEM if problem else OK
