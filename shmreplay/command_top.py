"""``shmreplay top``: a store's tables and processes, looked at again and again."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import sys
import time

from shmreplay import monitor, recovery
from shmreplay.command_support import (
    OK,
    PROBLEM,
    USAGE,
    Commands,
    Usage,
    add_command,
    add_where,
    complain,
    remote_of,
    say,
    seconds_of,
    source_of,
)
from shmreplay.monitor import Snapshot

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "top", run, "Watch a store's tables, limiters, memory and processes."
    )
    add_where(parser, "the only store that there is without it")
    parser.add_argument(
        "--interval", type=float, default=1.0, help="seconds between two looks; 1 without it"
    )
    parser.add_argument(
        "--count", type=int, help="with --json: lines to write; without it until Ctrl-C"
    )


def run(options: argparse.Namespace) -> int:
    """Does it and returns the exit code."""
    interval = seconds_of("--interval", options.interval, least=0.05)
    if options.count is not None and (options.count < 1 or not options.json):
        raise Usage(f"--count {options.count}: expected 1 or more, together with --json")
    where = options.where if options.where is not None else _the_only_one()
    look = source_of(where, remote_of(options))
    if options.json:
        return _lines(look, interval, options.count)
    if importlib.util.find_spec("textual") is None:
        complain(
            "top needs the package textual: pip install 'shmreplay[cli]'. `shmreplay info` shows"
            " the same once, without it."
        )
        return USAGE
    if not sys.stdout.isatty():
        complain(
            "top needs a terminal; `shmreplay info` shows the same once, and `shmreplay top"
            " --json` writes a line of JSON an interval"
        )
        return USAGE
    from shmreplay.top import TopApp  # nothing else needs textual

    app = TopApp(look, interval)
    app.run()
    return app.return_code or OK


def _the_only_one() -> str:
    names = recovery.names()
    if len(names) != 1:
        there = ", ".join(names) or "none"
        raise Usage(f"which store? Expected its name or address; there are: {there}")
    return names[0]


def _lines(look: monitor.Source, interval: float, count: int | None) -> int:
    """Writes what there is to see, a line of JSON an interval."""
    before: Snapshot | None = None
    found = OK
    for number in itertools.count(1):
        now = look()
        shown = monitor.view(now, before)
        say(json.dumps(dataclasses.asdict(shown)))
        sys.stdout.flush()
        before = now
        found = PROBLEM if shown.problems else OK
        if number == count:
            break
        time.sleep(interval)
    return found
