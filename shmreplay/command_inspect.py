"""``shmreplay inspect``: what a checkpoint holds, without a server; and whether it is whole."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from typing import Any

from shmreplay import checkpoint_files
from shmreplay.checkpoint_check import Contents, load
from shmreplay.checkpoint_format import MANIFEST, Reader
from shmreplay.command_support import (
    OK,
    PROBLEM,
    Commands,
    Usage,
    add_command,
    columns,
    complain,
    say,
    say_json,
    size,
)
from shmreplay.errors import CheckpointError

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "inspect", run, "Show what a checkpoint holds, without starting a server."
    )
    parser.add_argument("path", help="a checkpoint, or a directory of them: its newest")
    parser.add_argument("--verify", action="store_true", help="read and check all of its data")


def run(options: argparse.Namespace) -> int:
    """Does it; a damaged checkpoint is a problem that is named with file and offset."""
    path = _checkpoint_at(options.path)
    try:
        contents = load(Reader(path))
        if options.verify:
            _read_all(contents)
    except CheckpointError as error:
        if options.json:
            say_json({"path": path, "ok": False, "problem": str(error)})
        complain(str(error))
        return PROBLEM
    described = _describe(path, contents, options.verify)
    if options.json:
        say_json(described)
    else:
        _show(described)
    return OK


def _checkpoint_at(path: str) -> str:
    if os.path.lexists(os.path.join(path, MANIFEST)):
        return os.path.abspath(path)
    found = checkpoint_files.latest(path)
    if found is None:
        raise Usage(
            f"Got {path!r}, in which there is no checkpoint; expected a directory with a"
            f" {MANIFEST}, or one that holds such directories."
        )
    return os.path.abspath(found)


def _read_all(contents: Contents) -> None:
    for number in range(len(contents.reader.files)):
        for _ in contents.reader.chunks_of(number):
            pass


def _describe(path: str, contents: Contents, verified: bool) -> dict[str, Any]:
    manifest = contents.reader.manifest
    return {
        "path": path,
        "ok": True,
        "verified": verified,
        "created_ns": manifest.get("created_ns"),
        "layout_version": manifest.get("layout_version"),
        "tables": [
            {
                "name": table.config.name,
                "items": table.size,
                "max_size": table.config.max_size,
                "sampler": table.config.sampler_kind,
                "remover": table.config.remover_kind,
                "inserts": table.counts["inserts"],
                "samples": table.counts["samples"],
                "deletes": table.counts["deletes"],
            }
            for table in contents.tables
        ],
        "items": sum(table.size for table in contents.tables),
        "trajectories": len(contents.trajectories),
        "blocks": len(contents.blocks),
        "episodes": len(contents.episodes),
        "data_bytes": contents.data_bytes,
        "files": [{"file": name, "bytes": n} for name, n in contents.reader.files],
    }


def _show(described: dict[str, Any]) -> None:
    say(described["path"])
    if isinstance(described["created_ns"], int):
        moment = datetime.fromtimestamp(described["created_ns"] / 1e9, UTC)
        say(f"written {moment:%Y-%m-%d %H:%M:%S} UTC")
    keys = ("name", "items", "max_size", "sampler", "remover", "inserts", "samples", "deletes")
    rows = [[str(table[key]) for key in keys] for table in described["tables"]]
    say(columns([[key.replace("_", " ") for key in keys], *rows]))
    say(
        f"{described['items']} items, {described['trajectories']} trajectories,"
        f" {described['blocks']} blocks, {described['episodes']} episodes,"
        f" {size(described['data_bytes'])} of steps in {len(described['files'])} files"
    )
    say(
        "all of it was read and is whole"
        if described["verified"]
        else "its index is whole; --verify reads the steps, too"
    )
