"""``shmreplay dump``: reads out what a store holds, whatever its state."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from shmreplay import recovery
from shmreplay.command_support import (
    OK,
    PROBLEM,
    Commands,
    Usage,
    add_command,
    check_there,
    complain,
    say,
    say_json,
)
from shmreplay.dump import dump_table
from shmreplay.overview import describe

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "dump", run, "Read out what a store holds, also a damaged or unserved one."
    )
    parser.add_argument("name", help="name of the store")
    parser.add_argument("--table", help="only this table")
    parser.add_argument("--limit", type=int, help="items of a table at most, the oldest first")
    parser.add_argument(
        "-o", "--output", required=True, help="directory for one .npz a table, or one .npz file"
    )


def run(options: argparse.Namespace) -> int:
    check_there(options.name)
    if options.limit is not None and options.limit < 0:
        raise Usage(f"--limit {options.limit}: expected 0 or more")
    with recovery.look(options.name) as found:
        if found.native is None:
            complain(f"{options.name} is {found.state}: {found.problem or 'nothing to read'}")
            return PROBLEM
        paths = _paths_of(options, [config.name for config in found.tables])
        written = []
        for table, path in paths.items():
            number = [config.name for config in found.tables].index(table)
            result = dump_table(found.native, number, options.limit)
            arrays: dict[str, Any] = dict(result.arrays)
            try:
                with path.open("wb") as file:
                    np.savez(file, **arrays)
            except OSError as error:
                complain(
                    f"{path} cannot be written: {error.strerror}. Make its directory, or choose"
                    " another place with -o"
                )
                return PROBLEM
            about = {"table": table, "items": result.n_items, "unreadable": result.n_unreadable}
            written.append({**about, "path": str(path)})
        about = {**describe(found), "dumped": written}
    if not options.output.endswith(".npz"):
        (Path(options.output) / "store.json").write_text(json.dumps(about, indent=2))
    if options.json:
        say_json(written)
    else:
        for each in written:
            lost = f", {each['unreadable']} unreadable" if each["unreadable"] else ""
            say(f"{each['table']}: {each['items']} items{lost} -> {each['path']}")
    return PROBLEM if any(each["unreadable"] for each in written) else OK


def _paths_of(options: argparse.Namespace, tables: Sequence[str]) -> dict[str, Path]:
    """Where each table goes; makes the directory."""
    wanted = list(tables) if options.table is None else [options.table]
    if not set(wanted) <= set(tables):
        raise Usage(f"there is no table {options.table!r}; there are: {', '.join(tables)}")
    if options.output.endswith(".npz"):
        if len(wanted) != 1:
            raise Usage(
                f"one file cannot hold the tables {', '.join(wanted)}: choose one with --table, or"
                " give a directory"
            )
        return {wanted[0]: Path(options.output)}
    directory = Path(options.output)
    directory.mkdir(parents=True, exist_ok=True)
    return {table: directory / f"{quote(table, safe=' ')}.npz" for table in wanted}
