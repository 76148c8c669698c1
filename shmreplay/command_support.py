"""What the commands share: exit codes, what they write, and how they name a store."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from shmreplay import monitor, recovery, segment
from shmreplay.address import RemoteOptions
from shmreplay.monitor import Source
from shmreplay.overview import describe
from shmreplay.wording import size

__all__ = [
    "OK",
    "PROBLEM",
    "USAGE",
    "Commands",
    "Usage",
    "add_command",
    "add_where",
    "all_stores",
    "check_there",
    "columns",
    "complain",
    "count",
    "private_file",
    "remote_of",
    "say",
    "say_json",
    "seconds_of",
    "size",
    "source_of",
]

OK: Final = 0
PROBLEM: Final = 1
USAGE: Final = 2

Commands = Any
"""What `argparse` gives for subcommands; it has no public name."""


# Seconds for which a server on another host may be out of reach.
_PATIENCE_S: Final = 5.0


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
    if sys.stderr is not None:  # as it is after `2>&-`
        sys.stderr.write(f"shmreplay: {text}\n")


def count(inserts: int, samples: int) -> str:
    """How many threads wait, of the two kinds; `-`: none."""
    found = [f"{n} to {what}" for n, what in ((inserts, "insert"), (samples, "sample")) if n > 0]
    return ", ".join(found) or "-"


def add_where(parser: argparse.ArgumentParser, without: str) -> None:
    """The argument that says which store, here or on another host, and the keys for that.

    Args:
        parser: Of the command.
        without: What happens where it is left out.
    """
    parser.add_argument(
        "where",
        nargs="?",
        help=f"name of a store, or address of a server like tcp://host:8000; {without}",
    )
    parser.add_argument("--secret", help="of another host: this client's NAME.key_secret")
    parser.add_argument("--server-key", help="of another host: the server's NAME.key")


def remote_of(options: argparse.Namespace) -> RemoteOptions:
    """How to reach a server on another host, as the options of `add_where` say."""
    if (options.secret is None) != (options.server_key is None):
        raise Usage(
            f"got --secret {options.secret} and --server-key {options.server_key}; expected both"
            " or neither: `shmreplay keygen` makes them"
        )
    if options.secret is None:
        return RemoteOptions(timeout=_PATIENCE_S)
    from shmreplay.bridge.auth import ClientKeys  # nothing here needs ZeroMQ

    return RemoteOptions(
        timeout=_PATIENCE_S, keys=ClientKeys(secret=options.secret, server=options.server_key)
    )


def source_of(where: str, remote: RemoteOptions) -> Source:
    """What gives snapshots of the store that the command line names."""
    if ":" not in where:
        check_there(where)
    return monitor.source(where, remote)


def seconds_of(option: str, value: float, least: float) -> float:
    """A number of seconds from the command line."""
    if not least <= value < 86400:
        raise Usage(f"{option} {value:g}: expected seconds from {least:g} to a day")
    return value


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


@contextmanager
def private_file(path: Path, replace: bool) -> Iterator[IO[bytes]]:
    """A new file that only this user can read, as the stores are that it comes from.

    It is there whole or not at all: what was begun goes when the block fails.

    Args:
        path: Of the file.
        replace: Whether it may take the place of another one, which stays until this one is whole.

    Raises:
        OSError: It cannot be made; ``FileExistsError``, also for a link that leads nowhere, where
            it may not replace what is there.
    """
    made = path.with_name(f".{path.name}.{os.getpid()}") if replace else path
    how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(made, how, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        if replace:
            os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise
