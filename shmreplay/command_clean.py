"""``shmreplay clean``: removes the stores that no living process uses."""

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
    size,
)

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "clean", run, "Remove the stores that no living process uses, and no others."
    )
    parser.add_argument("names", nargs="*", help="look only at these stores")


def run(options: argparse.Namespace) -> int:
    for name in options.names:
        check_there(name)
    removed, problems = recovery.clean(options.names or None)
    gone = {each.name for each in removed}
    # Where there are problems these are among what is left, and each says why.
    in_use = [] if problems else [name for name in options.names if name not in gone]
    if options.json:
        about = {"removed": [each._asdict() for each in removed], "in_use": in_use}
        say_json({**about, "problems": problems})
    elif not removed:
        say("nothing to remove")
    else:
        for each in removed:
            say(f"removed {each.name} ({size(each.nbytes)})")
    if not options.json:
        for name in in_use:
            say(f"{name} is in use and stays; `shmreplay info {name}` says who uses it")
    for problem in problems:
        complain(problem)
    return PROBLEM if problems else OK
