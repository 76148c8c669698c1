"""``shmreplay dump``: reads out what a store holds, whatever its state."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
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
    private_file,
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
    parser.add_argument("--force", action="store_true", help="replace files that are there already")


def run(options: argparse.Namespace) -> int:
    check_there(options.name)
    if options.limit is not None and options.limit < 0:
        raise Usage(f"--limit {options.limit}: expected 0 or more")
    written = []
    with recovery.look(options.name) as found:
        if found.native is None:
            complain(f"{options.name} is {found.state}: {found.problem or 'nothing to read'}")
            return PROBLEM
        tables = [config.name for config in found.tables]
        paths = _paths_of(options, tables)
        store = None if options.output.endswith(".npz") else Path(options.output) / "store.json"
        if not options.force:
            _refuse_to_replace([*paths.values(), *([store] if store else [])])
        try:
            if store is not None:
                store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for table, path in paths.items():
                result = dump_table(found.native, tables.index(table), options.limit)
                arrays: dict[str, Any] = dict(result.arrays)
                with private_file(path, options.force) as file:
                    np.savez(file, **arrays)
                about = {"table": table, "items": result.n_items, "unreadable": result.n_unreadable}
                written.append({**about, "path": str(path)})
            if store is not None:
                about = {**describe(found), "dumped": written}
                with private_file(store, options.force) as file:
                    file.write(json.dumps(about, indent=2).encode())
        except OSError as error:
            complain(
                f"{error.filename or options.output} cannot be written: {error.strerror}. Make its"
                " directory, or choose another place with -o"
            )
            return PROBLEM
    if options.json:
        say_json(written)
    else:
        for each in written:
            lost = f", {each['unreadable']} unreadable" if each["unreadable"] else ""
            say(f"{each['table']}: {each['items']} items{lost} -> {each['path']}")
    return PROBLEM if any(each["unreadable"] for each in written) else OK


def _refuse_to_replace(paths: Iterable[Path]) -> None:
    """Raises what explains the usage where one of the files is there already."""
    there = [str(path) for path in paths if os.path.lexists(path)]
    if there:
        raise Usage(
            f"{', '.join(there)} is there already: choose another place with -o, or give --force to"
            " replace it"
        )


def _paths_of(options: argparse.Namespace, tables: Sequence[str]) -> dict[str, Path]:
    """Where each table goes."""
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
    return {table: directory / f"{quote(table, safe=' ')}.npz" for table in wanted}
