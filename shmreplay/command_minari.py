"""``shmreplay export`` and ``shmreplay import``: episodes between tables and Minari datasets."""

from __future__ import annotations

import argparse
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shmreplay.client import Client
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

__all__ = ["add"]

_PACKAGES = {"minari": "minari", "h5py": "h5py", "PIL": "pillow"}


def add(commands: Commands) -> None:
    """Adds the commands."""
    export = _add(
        commands,
        "export",
        _export,
        "Write a table of episodes to a new dataset, which only this user can read.",
    )
    export.add_argument("--env", help="id of the Gymnasium environment that it comes from")
    for name in ("author", "description", "algorithm-name", "code-permalink"):
        export.add_argument(f"--{name}", help="of the dataset")
    _add(commands, "import", _import, "Insert the episodes of a dataset into a table.")


def _add(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    parser = add_command(commands, name, run, about)
    parser.add_argument(
        "--minari", required=True, metavar="ID", help="of the Minari dataset, on this machine"
    )
    parser.add_argument("--limit", type=int, help="episodes at most, the first ones")
    parser.add_argument("store", help="name of the store, or address of a server")
    parser.add_argument("table", help="name of the table")
    return parser


def _export(options: argparse.Namespace) -> int:
    about = {
        name: getattr(options, name)
        for name in ("env", "author", "description", "algorithm_name", "code_permalink")
        if getattr(options, name) is not None
    }
    with _client(options) as client:
        if not _packages_are_there():
            return PROBLEM
        from shmreplay.integrations.minari import export_table

        mask = os.umask(0o077)  # for this user alone, as the store is
        try:
            with warnings.catch_warnings():
                # Minari warns of each of these options that is not given.
                warnings.simplefilter("ignore", UserWarning)
                dataset = export_table(
                    client, options.table, options.minari, limit=options.limit, **about
                )
        finally:
            os.umask(mask)
    _report(options, int(dataset.total_episodes), int(dataset.total_steps))
    return OK


def _import(options: argparse.Namespace) -> int:
    with _client(options) as client:
        if not _packages_are_there():
            return PROBLEM
        from shmreplay.integrations.minari import import_dataset

        episodes = import_dataset(client, options.table, options.minari, limit=options.limit)
    _report(options, episodes, None)
    return OK


@contextmanager
def _client(options: argparse.Namespace) -> Iterator[Client]:
    if options.limit is not None and options.limit < 1:
        raise Usage(f"--limit {options.limit}: expected 1 or more")
    address = options.store
    if ":" not in address:
        check_there(address)
        address = f"shm://{address}"
    with Client(address) as client:
        tables = sorted(client.server_info(timeout=10.0))
        if options.table not in tables:
            raise Usage(f"there is no table {options.table!r}; there are: {', '.join(tables)}")
        yield client


def _packages_are_there() -> bool:
    missing = [pip for name, pip in _PACKAGES.items() if importlib.util.find_spec(name) is None]
    if missing:
        complain(f"{', '.join(missing)} not installed: pip install 'shmreplay[minari]'")
    return not missing


def _report(options: argparse.Namespace, episodes: int, steps: int | None) -> None:
    if options.json:
        about = {"dataset": options.minari, "table": options.table, "episodes": episodes}
        say_json(about if steps is None else {**about, "steps": steps})
    elif steps is None:
        say(f"{options.minari}: {episodes} episodes -> {options.table}")
    else:
        say(f"{options.table}: {episodes} episodes, {steps} steps -> {options.minari}")
