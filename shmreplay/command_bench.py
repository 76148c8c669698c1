"""``shmreplay bench``: how fast a few operations are on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shmreplay import quick_bench
from shmreplay.command_support import (
    OK,
    Commands,
    add_command,
    columns,
    say,
    say_json,
    seconds_of,
)
from shmreplay.wording import rate, size

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "bench",
        run,
        "Measure insert, insert_batch, sample_batch and borrow on this machine, beside numpy. The"
        " full benchmark is `python -m bench` in a checkout.",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="for each repetition; 0.2 without it"
    )


def run(options: argparse.Namespace) -> int:
    """Does it and returns the exit code."""
    seconds = seconds_of("--seconds", options.seconds, least=0.001)
    results = list(quick_bench.measure_all(seconds))
    if options.json:
        say_json([each._asdict() for each in results])
        return OK
    rows: list[Sequence[object]] = [("WHAT", "ITEMS/S", "EACH", "BYTES/S", "BESIDE", "ITEMS/S")]
    rows += [
        (
            each.what,
            rate(each.items_per_s),
            f"{1e6 / each.items_per_s:.3g} us",
            f"{size(each.bytes_per_s)}",
            each.beside,
            rate(each.beside_items_per_s),
        )
        for each in results
    ]
    say(columns(rows))
    say("One process, one thread, warm; medians of 5. A ring of numpy cannot be shared.")
    return OK
