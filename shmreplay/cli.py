"""The command ``shmreplay``: which stores there are, what is in them, and what became of them.

Exit codes: 0 all is well, 1 a problem was found, 2 the command was not understood.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from shmreplay import recovery, segment
from shmreplay._native import borrowers, peek_store, peek_table, sessions
from shmreplay.dump import dump_table
from shmreplay.errors import InvalidArgumentError, ReverbError
from shmreplay.recovery import Look

__all__ = ["main"]

OK: Final = 0
PROBLEM: Final = 1
USAGE: Final = 2

_SESSION_KINDS: Final = {1: "clients", 2: "writers", 3: "samplers"}


class _Usage(Exception):
    """The command line asks for what cannot be done."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    Args:
        arguments: Without the program's name; None takes those of the process.
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:  # argparse has said what was wrong, or given the help
        return OK if end.code in (0, None) else USAGE
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (_Usage, InvalidArgumentError) as error:
        _complain(str(error))
        return USAGE
    except (ReverbError, OSError) as error:
        _complain(str(error))
        return PROBLEM


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shmreplay",
        description="Looks after the replay stores of this user in shared memory.",
        epilog="Exit codes: 0 all is well, 1 a problem was found, 2 bad usage.",
    )
    commands = parser.add_subparsers(title="commands", required=True)

    def add(name: str, command: Callable[[argparse.Namespace], int], about: str) -> Any:
        sub = commands.add_parser(name, help=about, description=about)
        sub.add_argument("--json", action="store_true", help="write JSON instead of text")
        sub.set_defaults(command=command)
        return sub

    add("ls", _ls, "List the stores, the dead ones included.")
    info = add("info", _info, "Show a store's tables, processes and memory.")
    info.add_argument("name", nargs="?", help="name of the store; all of them without it")
    check = add("check", _check, "Check every invariant of a store, under its locks.")
    check.add_argument("name", help="name of the store")
    clean = add("clean", _clean, "Remove the stores that no living process uses, and no others.")
    clean.add_argument("names", nargs="*", help="look only at these stores")
    dump = add("dump", _dump, "Read out what a store holds, also a damaged or unserved one.")
    dump.add_argument("name", help="name of the store")
    dump.add_argument("--table", help="only this table")
    dump.add_argument("--limit", type=int, help="items of a table at most, the oldest first")
    dump.add_argument(
        "-o", "--output", required=True, help="directory for one .npz a table, or one .npz file"
    )
    keygen = add("keygen", _keygen, "Make a pair of keys for a bridge or one of its clients.")
    keygen.add_argument("directory", help="where to; made if it is not there")
    keygen.add_argument("name", help="of the pair: NAME.key is public, NAME.key_secret is not")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _say_json(value: Any) -> None:
    _say(json.dumps(value, indent=2))


def _complain(text: str) -> None:
    sys.stderr.write(f"shmreplay: {text}\n")


def _size(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes} B"


def _rows(rows: Sequence[Sequence[object]]) -> str:
    """Columns side by side, the first row being their titles."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    )


# --- ls and info --------------------------------------------------------------------------------


def _describe(found: Look) -> dict[str, Any]:
    """All that is known of a store, as JSON has it."""
    about: dict[str, Any] = {"name": found.name, "address": f"shm://{found.name}"}
    about["state"] = found.state
    if found.problem:
        about["problem"] = found.problem
    native = found.native
    if native is None:
        return about
    now = time.time_ns()
    about |= {"port": native.port or None, "generation": f"{native.generation:016x}"}
    about |= {"server_pid": native.creator_pid, "memory": peek_store(native)}
    about["tables"] = [
        {"name": config.name, "max_size": config.max_size, **peek_table(native, number)}
        | {"sampler": config.sampler_kind, "remover": config.remover_kind}
        for number, config in enumerate(found.tables)
    ]
    held: dict[int, dict[str, int]] = {}
    for number, kind, _, references, _ in sessions(native):
        counts = held.setdefault(number, {"references": 0})
        counts["references"] += references
        name = _SESSION_KINDS.get(kind, "others")
        counts[name] = counts.get(name, 0) + 1
    about["processes"] = [
        {"number": each.number, "pid": each.pid, "pid_namespace": each.pid_namespace}
        | {"role": each.role, "alive": each.alive, "sessions": held.get(each.number, {})}
        | {"attached_s": max(now - each.attached_ns, 0) / 1e9}
        for each in found.participants
    ]
    about["borrowed"] = [
        {"pid": pid, "role": role, "items": items, "age_s": max(now - since, 0) / 1e9}
        for pid, role, items, since in borrowers(native)
    ]
    return about


def _problems_of(about: dict[str, Any]) -> list[str]:
    """What is wrong with a store, in words."""
    problems = [about["problem"]] if about["state"] == recovery.DAMAGED else []
    problems += [
        f"table {table['name']!r} is shut: a repair failed. `shmreplay dump` reads it out."
        for table in about.get("tables", [])
        if table["poisoned"]
    ]
    return problems


def _all() -> list[dict[str, Any]]:
    stores = []
    for name in recovery.names():
        with recovery.look(name) as found:
            stores.append(_describe(found))
    return stores


def _ls(options: argparse.Namespace) -> int:
    stores = _all()
    if options.json:
        _say_json(stores)
    elif not stores:
        _say(f"no stores of user {os.geteuid()} in {segment.DIRECTORY}")
    else:
        rows: list[Sequence[object]] = [
            ("NAME", "STATE", "PORT", "SERVER", "PROCESSES", "MEMORY", "CAPACITY", "ITEMS")
        ]
        for about in stores:
            if "memory" not in about:
                rows.append((about["name"], about["state"], *"------"))
                continue
            alive = [each for each in about["processes"] if each["alive"]]
            server = [each["pid"] for each in alive if each["number"] == 0]
            rows.append(
                (
                    about["name"],
                    about["state"],
                    about["port"] or "-",
                    server[0] if server else "-",
                    len(alive),
                    _size(about["memory"]["committed_bytes"]),
                    _size(about["memory"]["capacity_bytes"]),
                    sum(table["size"] for table in about["tables"]),
                )
            )
        _say(_rows(rows))
    return PROBLEM if any(_problems_of(about) for about in stores) else OK


def _info(options: argparse.Namespace) -> int:
    if options.name is None:
        stores = _all()
    else:
        _check_there(options.name)
        with recovery.look(options.name) as found:
            stores = [_describe(found)]
    if options.json:
        _say_json(stores if options.name is None else stores[0])
    elif not stores:
        _say(f"no stores of user {os.geteuid()} in {segment.DIRECTORY}")
    else:
        _say("\n\n".join(map(_info_text, stores)))
    problems = [problem for about in stores for problem in _problems_of(about)]
    for problem in problems:
        _complain(problem)
    return PROBLEM if problems else OK


def _check_there(name: str) -> None:
    segment.check_name(name)
    names = recovery.names()
    if name not in names:
        there = ", ".join(names) or "none"
        raise _Usage(f"there is no store {name!r} of user {os.geteuid()}; there are: {there}")


def _info_text(about: dict[str, Any]) -> str:
    lines = [f"{about['name']}: {about['state']}"]
    if "memory" not in about:
        return lines[0]
    memory = about["memory"]
    lines += [
        f"  port {about['port'] or '-'}, server process {about['server_pid']}",
        f"  generation {about['generation']}",
        f"  committed {_size(memory['committed_bytes'])} of {_size(memory['capacity_bytes'])}",
        f"  in use {_size(memory['arena_used_bytes'])}, {memory['arena_allocations']} allocations",
    ]
    tables: list[Sequence[object]] = [
        ("  TABLE", "ITEMS", "OF", "INSERTS", "SAMPLES", "DELETES", "SAMPLER", "REMOVER", "STATE")
    ]
    for each in about["tables"]:
        numbers = (each["size"], each["max_size"], each["inserts"], each["samples"])
        state = "shut" if each["poisoned"] else "ok"
        kinds = (each["sampler"], each["remover"], state)
        tables.append((f"  {each['name']}", *numbers, each["deletes"], *kinds))
    processes: list[Sequence[object]] = [
        ("  PROCESS", "ROLE", "LIVES", "ATTACHED", "HOLDS"),
    ]
    for each in about["processes"]:
        held = ", ".join(f"{count} {what}" for what, count in each["sessions"].items())
        lives = "yes" if each["alive"] else "no"
        attached = f"{each['attached_s']:.0f} s"
        processes.append((f"  {each['pid']}", each["role"], lives, attached, held or "nothing"))
    lines += [_rows(tables), _rows(processes)]
    lines += [
        f"  process {each['pid']} ({each['role']}) has borrowed {each['items']} items for"
        f" {each['age_s']:.1f} s"
        for each in about["borrowed"]
    ]
    return "\n".join(lines)


# --- check, clean, dump -------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    _check_there(options.name)
    problem = ""
    try:
        recovery.check(options.name)
    except ReverbError as error:
        problem = str(error)
    if options.json:
        _say_json({"name": options.name, "ok": not problem, "problem": problem or None})
    elif not problem:
        _say(f"{options.name}: all invariants hold")
    if problem:
        _complain(f"{options.name}: {problem}")
    return PROBLEM if problem else OK


def _clean(options: argparse.Namespace) -> int:
    for name in options.names:
        _check_there(name)
    removed, problems = recovery.clean(options.names or None)
    if options.json:
        _say_json({"removed": [each._asdict() for each in removed], "problems": problems})
    elif not removed:
        _say("nothing to remove")
    else:
        for each in removed:
            _say(f"removed {each.name} ({_size(each.nbytes)})")
    if not options.json and not problems:
        gone = {each.name for each in removed}
        for name in [name for name in options.names if name not in gone]:
            _say(f"{name} is in use and stays; `shmreplay info {name}` says who uses it")
    for problem in problems:
        _complain(problem)
    return PROBLEM if problems else OK


def _keygen(options: argparse.Namespace) -> int:
    from shmreplay.bridge.auth import keygen  # no other command needs ZeroMQ

    public, secret = keygen(options.directory, options.name)
    if options.json:
        _say_json({"public": public, "secret": secret})
    else:
        _say(f"{public}: public, for the other side\n{secret}: secret, stays here")
    return OK


def _dump(options: argparse.Namespace) -> int:
    _check_there(options.name)
    if options.limit is not None and options.limit < 0:
        raise _Usage(f"--limit {options.limit}: expected 0 or more")
    with recovery.look(options.name) as found:
        if found.native is None:
            _complain(f"{options.name} is {found.state}: {found.problem or 'nothing to read'}")
            return PROBLEM
        paths = _paths_of(options, [config.name for config in found.tables])
        written = []
        for table, path in paths.items():
            number = [config.name for config in found.tables].index(table)
            result = dump_table(found.native, number, options.limit)
            arrays: dict[str, Any] = dict(result.arrays)
            with path.open("wb") as file:
                np.savez(file, **arrays)
            about = {"table": table, "items": result.n_items, "unreadable": result.n_unreadable}
            written.append({**about, "path": str(path)})
        about = {**_describe(found), "dumped": written}
    if not options.output.endswith(".npz"):
        (Path(options.output) / "store.json").write_text(json.dumps(about, indent=2))
    if options.json:
        _say_json(written)
    else:
        for each in written:
            lost = f", {each['unreadable']} unreadable" if each["unreadable"] else ""
            _say(f"{each['table']}: {each['items']} items{lost} -> {each['path']}")
    return PROBLEM if any(each["unreadable"] for each in written) else OK


def _paths_of(options: argparse.Namespace, tables: Sequence[str]) -> dict[str, Path]:
    """Where each table goes; makes the directory."""
    wanted = list(tables) if options.table is None else [options.table]
    if not set(wanted) <= set(tables):
        raise _Usage(f"there is no table {options.table!r}; there are: {', '.join(tables)}")
    if options.output.endswith(".npz"):
        if len(wanted) != 1:
            raise _Usage(
                f"one file cannot hold the tables {', '.join(wanted)}: choose one with --table, or"
                " give a directory"
            )
        return {wanted[0]: Path(options.output)}
    directory = Path(options.output)
    directory.mkdir(parents=True, exist_ok=True)
    return {table: directory / f"{quote(table, safe=' ')}.npz" for table in wanted}
