"""``shmreplay info``: what is in a store, who uses it, and what is wrong with it."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from functools import partial

from shmreplay import monitor, recovery, segment
from shmreplay.command_support import (
    OK,
    PROBLEM,
    Commands,
    add_command,
    add_where,
    columns,
    complain,
    count,
    remote_of,
    say,
    say_json,
    seconds_of,
    size,
    source_of,
)
from shmreplay.monitor import Snapshot, Source, StoreView
from shmreplay.wording import age, rate

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "info", run, "Show a store's tables, limiters, memory and processes, once."
    )
    add_where(parser, "all stores of this user without it")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="look twice, so long apart, and show rates"
    )


def run(options: argparse.Namespace) -> int:
    """Does it and returns the exit code."""
    seconds = seconds_of("--seconds", options.seconds, least=0.0)
    if options.where is None:
        sources: list[Source] = [partial(monitor.look, name) for name in recovery.names()]
    else:
        sources = [source_of(options.where, remote_of(options))]
    before: list[Snapshot | None] = [None] * len(sources)
    if seconds > 0:
        before = [look() for look in sources]
        time.sleep(seconds)
    found = [look() for look in sources]
    views = [monitor.view(now, old) for now, old in zip(found, before, strict=True)]
    if options.json:
        stores = [each.about for each in found]
        say_json(stores if options.where is None else stores[0])
    elif not views:
        say(f"no stores of user {os.geteuid()} in {segment.DIRECTORY}")
    else:
        say("\n\n".join(map(_text, views)))
    problems = [problem for view in views for problem in view.problems]
    for problem in problems:
        complain(problem)
    return PROBLEM if problems else OK


def _text(view: StoreView) -> str:
    lines = [f"{view.name}: {view.state}"]
    if not view.readable:
        return lines[0]
    by_use = ", ".join(f"{use} {size(nbytes)}" for use, nbytes in view.memory.items())
    lines += [
        f"  port {view.port or '-'}, server process {view.server_pid}",
        f"  generation {view.generation}",
        f"  memory {size(view.committed_bytes)} of {size(view.capacity_bytes)}: {by_use}",
    ]
    raw, stored = view.compressed
    if raw:
        lines.append(f"  compressed {size(raw)} of steps to {size(stored)}")
    lines += [_tables(view), _processes(view)]
    for table in view.tables:
        lines += [
            f"  {table.name}: {why}"
            for why in (table.insert_blocked_by, table.sample_blocked_by)
            if why
        ]
    lines += [
        f"  process {each.pid} ({each.role}) has borrowed {each.borrowed_items} items for"
        f" {each.oldest_pin_s:.1f} s"
        for each in view.processes
        if each.oldest_pin_s is not None
    ]
    return "\n".join(lines)


def _tables(view: StoreView) -> str:
    titles = ["  TABLE", "ITEMS", "OF", "INSERTS", "SAMPLES", "DELETES", "SAMPLES/INSERT", "TARGET"]
    titles += ["WAITING", "SAMPLER", "REMOVER", "STATE"]
    with_rates = view.rates is not None
    rows: list[Sequence[object]] = [[*titles, "INSERTS/S", "SAMPLES/S"] if with_rates else titles]
    for each in view.tables:
        row: list[object] = [f"  {each.name}", each.size, each.max_size, each.inserts]
        row += [each.samples, each.deletes]
        row += ["-" if x is None else f"{x:.4g}" for x in (each.ratio, each.target)]
        row += [count(each.insert_waiters, each.sample_waiters), each.sampler, each.remover]
        row += ["shut" if each.poisoned else "ok"]
        if each.rates is not None:
            row += [rate(each.rates.inserts), rate(each.rates.samples)]
        rows.append(row)
    return columns(rows)


def _processes(view: StoreView) -> str:
    titles = ["  PROCESS", "ROLE", "LIVES", "ATTACHED", "HOLDS"]
    with_rates = view.rates is not None
    rows: list[Sequence[object]] = [
        [*titles, "INSERTS/S", "SAMPLES/S", "WRITTEN/S"] if with_rates else titles
    ]
    for each in view.processes:
        row: list[object] = [f"  {each.pid}", each.role, "yes" if each.alive else "no"]
        row += [age(each.attached_s), each.holds]
        if each.rates is not None:
            row += [rate(each.rates.inserts), rate(each.rates.samples)]
            row += [size(round(each.rates.written_bytes))]
        rows.append(row)
    return columns(rows)
