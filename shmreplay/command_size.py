"""``shmreplay size``: how much memory a table will need."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shmreplay import rate_limiters, selectors
from shmreplay.command_support import OK, Commands, Usage, add_command, columns, say, say_json, size
from shmreplay.sizes import TableSize, table_size
from shmreplay.spec import TensorSpec
from shmreplay.table import Table

__all__ = ["add"]

_NUMBERS: Final = (
    ("max_size", "items that the table holds"),
    ("steps_per_item", "steps in an item (default 1)"),
    ("overlap", "steps that an item shares with the next (default 0)"),
    ("steps_per_episode", "steps in an episode (default 1000)"),
    ("max_chunk_length", "as given to the writer, if it is"),
    ("tables", "tables of the server (default 1)"),
)
_OTHERS: Final = ("columns", "batch", "sampler", "remover")


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "size", run, "Compute how much memory a table will need, before there is one."
    )
    parser.add_argument(
        "file",
        nargs="?",
        help="TOML or JSON with any of the settings below as keys, with _ for -, and `columns`:"
        " from names to dtype and shape, as in columns.obs = {dtype = 'uint8', shape = [84, 84]}",
    )
    parser.add_argument(
        "--column",
        action="append",
        metavar="NAME:DTYPE[:SIZE,...]",
        help="a column of a step, as in obs:uint8:84,84,4 or reward:float32; once for each",
    )
    for name, about in _NUMBERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=about)
    kinds = [kind for kind in selectors.KINDS if kind != "epoch"]
    parser.add_argument("--sampler", choices=selectors.KINDS, help="default uniform")
    parser.add_argument("--remover", choices=kinds, help="default fifo")
    parser.add_argument(
        "--batch", action="store_true", default=None, help="items come by Client.insert_batch"
    )


def run(options: argparse.Namespace) -> int:
    settings = {} if options.file is None else _read(Path(options.file))
    for name in (*dict(_NUMBERS), "sampler", "remover", "batch"):
        if getattr(options, name) is not None:
            settings[name] = getattr(options, name)
    signature = _signature(settings.pop("columns", {}), options.column or [])
    if "max_size" not in settings:
        raise Usage("how many items? expected --max-size, or max_size in the file")
    table = Table(
        "table",
        _selector(settings.pop("sampler", "uniform")),
        _selector(settings.pop("remover", "fifo")),
        settings.pop("max_size"),
        rate_limiters.MinSize(1),
        stripes=1,
    )
    found = table_size(table, signature, **settings)
    if options.json:
        say_json(found._asdict())
    else:
        say(_text(found))
    return OK


def _read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise Usage(f"{path} is not {kind}: {error}") from error
    known = {*dict(_NUMBERS), *_OTHERS}
    if not isinstance(found, dict) or not found.keys() <= known:
        raise Usage(f"{path} has other keys than {', '.join(sorted(known))}")
    return found


def _signature(described: Any, texts: list[str]) -> dict[str, TensorSpec]:
    """Columns of a file, then those of the command line."""
    if not isinstance(described, Mapping):
        raise Usage("columns of a file: expected names, each with dtype and shape")
    signature = {}
    for name, about in described.items():
        if not isinstance(about, Mapping) or not about.keys() <= {"dtype", "shape"}:
            raise Usage(f"column {name!r} of the file: expected dtype and shape")
        signature[str(name)] = TensorSpec(about.get("shape", ()), about.get("dtype", "float32"))
    for text in texts:
        name, _, rest = text.partition(":")
        dtype, _, sizes = rest.partition(":")
        if not name or not dtype:
            raise Usage(f"--column {text}: expected NAME:DTYPE or NAME:DTYPE:SIZE,SIZE,...")
        try:
            shape = [int(part) for part in sizes.split(",")] if sizes else []
        except ValueError as error:
            raise Usage(f"--column {text}: expected sizes as 84,84,4") from error
        signature[name] = TensorSpec(shape, dtype)
    if not signature:
        raise Usage("what is in a step? expected --column, or columns in the file")
    return signature


def _selector(kind: Any) -> selectors.Selector:
    if kind not in selectors.KINDS:
        raise Usage(f"there is no selector {kind!r}; there are: {', '.join(selectors.KINDS)}")
    return selectors.from_kind(kind, 1.0 if kind == "prioritized" else 0.0)


def _text(found: TableSize) -> str:
    each = f"of {found.step_bytes} B, {found.steps_per_block} a block"
    rows = [
        ("data", size(found.data_bytes), "for max_bytes, if the table is to have it"),
        (
            "  steps",
            size(found.block_bytes),
            f"{found.steps} {each}",
        ),
        ("  records of items", size(found.trajectory_bytes), ""),
        ("  episodes", size(found.episode_bytes), ""),
        ("index", size(found.index_bytes), "slots and selectors"),
        ("table", size(found.total_bytes), ""),
        ("capacity", size(found.capacity_bytes), "for a server with this table alone"),
    ]
    return columns(rows)
