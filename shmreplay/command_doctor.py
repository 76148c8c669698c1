"""``shmreplay doctor``: whether this machine has what stores stand on, and what to do if not."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from shmreplay import doctor
from shmreplay.command_support import OK, PROBLEM, Commands, add_command, say, say_json

__all__ = ["add"]

_COLORS: Final = {doctor.OK: "32", doctor.HINT: "33", doctor.PROBLEM: "31;1"}


def add(commands: Commands) -> None:
    """Adds the command."""
    add_command(
        commands,
        "doctor",
        run,
        "Look at Python, C library, kernel, shared memory, limits, locks, packages and leftover"
        " stores, and say what to do about each problem.",
    )


def run(options: argparse.Namespace) -> int:
    """Does it and returns the exit code."""
    findings = list(doctor.examine())
    if options.json:
        say_json([each._asdict() for each in findings])
    else:
        width = max(len(each.topic) for each in findings)
        for each in findings:
            say(f"{_mark(each.level)}  {each.topic.ljust(width)}  {each.found}")
            if each.remedy:
                say(f"{'':7}  {'':{width}}  -> {each.remedy}")
        problems = sum(each.level == doctor.PROBLEM for each in findings)
        hints = sum(each.level == doctor.HINT for each in findings)
        say(
            f"{problems or 'no'} problem{'s' * (problems != 1)}, {hints or 'no'} hint"
            f"{'s' * (hints != 1)}"
        )
    return PROBLEM if any(each.level == doctor.PROBLEM for each in findings) else OK


def _mark(level: str) -> str:
    text = level.ljust(7)
    return f"\x1b[{_COLORS[level]}m{text}\x1b[0m" if sys.stdout.isatty() else text
