"""The file that ``shmreplay serve`` reads: TOML. Every error names file, key, value, and what fits.

``[server]`` takes what `Server` takes: ``name``, ``port``, ``capacity`` (bytes, or text like
``"4GiB"``), ``bind``, ``recover``, ``insecure``, ``compress``, ``bridge_workers``, ``path`` (a
file of a local disk, relative to this file); and
``[server.auth]`` the key files ``secret`` and ``clients``, relative to this file. Each
``[[table]]`` has ``name``, ``max_size``, ``sampler``, ``remover``, ``limiter``, and may have
``max_times_sampled``, ``max_bytes``, ``seed``, ``stripes``, ``compress`` and
``[table.signature]``.

``checkpoint`` is the directory of the server's checkpoints, relative to this file, of which it
loads the newest; or ``[server.checkpoint]`` with ``path`` and the other arguments of
`DefaultCheckpointer`: ``every_seconds``, ``every_inserts``, ``keep``, ``bandwidth``,
``settings``, ``reset_limiters``, ``verify``, ``fallback_checkpoint_path``.

A selector is the name of its kind, or ``{ kind = "prioritized", priority_exponent = 0.6 }``. A
limiter is ``{ kind = ..., ... }`` with the arguments of ``min_size``, ``sample_to_insert_ratio``,
``queue``, ``stack`` or ``rate_limiter``. A leaf of a signature is ``{ dtype = "float32", shape =
[84] }``, where -1 is a size that is not known; nested tables are nested dicts.
"""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from shmreplay import rate_limiters, selectors
from shmreplay.checkpointers import DefaultCheckpointer
from shmreplay.errors import InvalidArgumentError, ReverbError
from shmreplay.spec import TensorSpec
from shmreplay.table import Table

__all__ = ["ServeConfig", "read"]

_UNITS: Final = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_LIMITERS: Final[dict[str, Callable[..., rate_limiters.RateLimiter]]] = {
    "min_size": rate_limiters.MinSize,
    "sample_to_insert_ratio": rate_limiters.SampleToInsertRatio,
    "queue": rate_limiters.Queue,
    "stack": rate_limiters.Stack,
    "rate_limiter": rate_limiters.RateLimiter,
}
_CHECKPOINT: Final = {
    "every_seconds": ((int, float), "seconds"),
    "every_inserts": (int, "a number of inserts"),
    "keep": (int, "a number of checkpoints"),
    "bandwidth": ((int, float), "bytes a second"),
    "settings": (str, "'declared' or 'saved'"),
    "reset_limiters": (bool, "true or false"),
    "verify": (bool, "true or false"),
    "fallback_checkpoint_path": (str, "a checkpoint's directory"),
}
_REQUIRED: Final = object()

_SERVER: Final = {
    "name": (str, "a store's name"),
    "port": (int, "a port from 1 to 65535"),
    "capacity": ((int, str), 'bytes, or text like "4GiB"'),
    "bind": (str, "an address of this machine"),
    "recover": (bool, "true or false"),
    "insecure": (bool, "true or false"),
    "compress": (bool, "true or false"),
    "path": (str, "a file of a local disk"),
    "bridge_workers": (int, "a number of processes"),
    "checkpoint": ((str, dict), "a directory, or a table [server.checkpoint]"),
    "auth": (dict, "a table [server.auth]"),
}


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """What the file asks for."""

    tables: list[Table]
    options: dict[str, Any]
    """Keyword arguments of `Server`, but for ``auth``."""
    auth: tuple[str, str] | None
    """Paths of the server's secret key, and of the directory of the clients' keys."""


class _Section:
    """A table of the file, of which values are taken; what is left over is an error."""

    def __init__(self, file: str, where: str, values: Mapping[str, Any]) -> None:
        self.file = file
        self.where = where
        self._left = dict(values)
        self._known: list[str] = []

    def wrong(self, key: str, value: Any, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self.file}: {self.where}: got {key} = {value!r}; expected {expected}."
        )

    def take(self, key: str, kind: Any, expected: str, default: Any = _REQUIRED) -> Any:
        """The value of a key, of the type that it must have."""
        self._known.append(key)
        if key not in self._left:
            if default is _REQUIRED:
                raise InvalidArgumentError(
                    f"{self.file}: {self.where}: got no {key}; expected {expected}. Add"
                    f" `{key} = ...`."
                )
            return default
        value = self._left.pop(key)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # True is an int for Python, and not for people.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.wrong(key, value, expected)
        return value

    def finish(self) -> None:
        """Refuses keys that nobody has taken."""
        for key, value in self._left.items():
            raise self.wrong(key, value, f"no key but {', '.join(self._known)}")


def read(path: str) -> ServeConfig:
    """Reads a file.

    Args:
        path: Of the file.

    Raises:
        InvalidArgumentError: It cannot be read, is not TOML, or asks for what cannot be.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise InvalidArgumentError(
            f"Got the file {path!r}, which cannot be read ({error.strerror}); expected a TOML file"
            " with [server] and [[table]]."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"{path}: got what is not TOML; expected TOML: {error}"
        ) from None
    whole = _Section(path, "top level", values)
    server = _Section(path, "[server]", whole.take("server", dict, "a table [server]", {}))
    entries = whole.take("table", list, "one or more tables [[table]]")
    whole.finish()
    options = {
        key: server.take(key, kind, expected, None) for key, (kind, expected) in _SERVER.items()
    }
    server.finish()
    options = {key: value for key, value in options.items() if value is not None}
    if "port" in options and not 0 < options["port"] < 65536:
        raise server.wrong("port", options["port"], _SERVER["port"][1])
    if "capacity" in options:
        options["capacity"] = _nbytes(server, "capacity", options["capacity"])
    if "path" in options:
        options["path"] = str(Path(path).parent / options["path"])
    if "checkpoint" in options:
        options["checkpointer"] = _checkpointer(path, options.pop("checkpoint"))
    auth = _auth(path, options.pop("auth", None))
    tables: list[Table] = []
    for number, entry in enumerate(entries, 1):
        where = f"[[table]] number {number}"
        if not isinstance(entry, dict):
            raise _Section(path, where, {}).wrong("table", entry, "a table [[table]]")
        table = _table(_Section(path, where, entry))
        if table.name in [each.name for each in tables]:
            raise InvalidArgumentError(
                f"{path}: {where}: got name = {table.name!r} again; expected names that differ."
            )
        tables.append(table)
    return ServeConfig(tables, options, auth)


def _nbytes(section: _Section, key: str, value: int | str) -> int:
    if isinstance(value, int):
        return value
    for unit, shift in _UNITS.items():
        number = value.removesuffix(unit).strip()
        if value.endswith(unit) and number.replace(".", "", 1).isdecimal():
            return int(float(number) * (1 << shift))
    expected = f"bytes, or a number and one of {', '.join(_UNITS)}"
    raise section.wrong(key, value, expected)


def _auth(path: str, values: dict[str, Any] | None) -> tuple[str, str] | None:
    if values is None:
        return None
    section = _Section(path, "[server.auth]", values)
    folder = Path(path).parent
    secret = section.take("secret", str, "the file of the server's NAME.key_secret")
    clients = section.take("clients", str, "the directory of the clients' NAME.key files")
    section.finish()
    return str(folder / secret), str(folder / clients)


def _checkpointer(path: str, value: str | dict[str, Any]) -> DefaultCheckpointer:
    values = {"path": value} if isinstance(value, str) else value
    section = _Section(path, "[server.checkpoint]", values)
    root = section.take("path", str, "the directory of the checkpoints")
    options = {
        key: section.take(key, kind, expected, None)
        for key, (kind, expected) in _CHECKPOINT.items()
    }
    section.finish()
    options = {key: value for key, value in options.items() if value is not None}
    folder = Path(path).parent
    if "fallback_checkpoint_path" in options:
        options["fallback_checkpoint_path"] = folder / options["fallback_checkpoint_path"]
    made: DefaultCheckpointer = _made(
        section, lambda: DefaultCheckpointer(folder / root, **options)
    )
    return made


def _table(section: _Section) -> Table:
    name = section.take("name", str, "the table's name")
    section.where = f"[[table]] {name!r}"
    arguments: dict[str, Any] = {
        "sampler": _selector(section, "sampler"),
        "remover": _selector(section, "remover"),
        "max_size": section.take("max_size", int, "items that the table holds"),
        "rate_limiter": _limiter(section),
        "max_times_sampled": section.take("max_times_sampled", int, "a number of samples", 0),
        "seed": section.take("seed", int, "a number", None),
        "stripes": section.take("stripes", int, "a number of stripes", None),
        "compress": section.take("compress", str, "'lz4' or 'none'", None),
    }
    most = section.take("max_bytes", (int, str), 'bytes, or text like "4GiB"', None)
    if most is not None:
        arguments["max_bytes"] = _nbytes(section, "max_bytes", most)
    signature = section.take("signature", dict, "a table [table.signature]", None)
    section.finish()
    if signature is not None:
        arguments["signature"] = _signature(section, "signature", signature)
    made: Table = _made(section, lambda: Table(name, **arguments))
    return made


def _made(section: _Section, make: Callable[[], Any]) -> Any:
    """What is made of values that have the right types; they may still be out of range."""
    try:
        return make()
    except (ReverbError, ValueError, TypeError) as error:
        raise InvalidArgumentError(f"{section.file}: {section.where}: {error}") from error


def _selector(section: _Section, key: str) -> selectors.Selector:
    kinds = ", ".join(selectors.KINDS)
    value = section.take(key, (str, dict), f"one of {kinds}")
    inner = _Section(
        section.file,
        f"{section.where}: {key}",
        {"kind": value} if isinstance(value, str) else value,
    )
    kind = inner.take("kind", str, f"one of {kinds}")
    if kind not in selectors.KINDS:
        raise inner.wrong("kind", kind, f"one of {kinds}")
    exponent = 0.0
    if kind == "prioritized":
        exponent = inner.take(
            "priority_exponent",
            (int, float),
            f'a number: {key} = {{ kind = "prioritized", priority_exponent = 0.6 }}',
        )
    inner.finish()
    made: selectors.Selector = _made(inner, lambda: selectors.from_kind(kind, exponent))
    return made


def _limiter(section: _Section) -> rate_limiters.RateLimiter:
    kinds = ", ".join(_LIMITERS)
    value = section.take("limiter", dict, f"a table with kind, one of {kinds}")
    inner = _Section(section.file, f"{section.where}: limiter", value)
    kind = inner.take("kind", str, f"one of {kinds}")
    if kind not in _LIMITERS:
        raise inner.wrong("kind", kind, f"one of {kinds}")
    arguments: dict[str, Any] = {}
    for name in inspect.signature(_LIMITERS[kind]).parameters:
        if name == "error_buffer":
            types: Any = (int, float, list)
            expected = "a number, or [lowest, highest]"
        else:
            whole = name in ("size", "min_size_to_sample")
            types, expected = (int, "a whole number") if whole else ((int, float), "a number")
        arguments[name] = inner.take(name, types, expected)
    inner.finish()
    made: rate_limiters.RateLimiter = _made(inner, lambda: _LIMITERS[kind](**arguments))
    return made


def _signature(section: _Section, path: str, values: dict[str, Any]) -> Any:
    if isinstance(values.get("dtype"), str):
        leaf = _Section(section.file, f"{section.where}: {path}", values)
        dtype = leaf.take("dtype", str, "a dtype of numpy")
        shape = leaf.take("shape", list, "a list of sizes", [])
        leaf.finish()
        sizes = [None if size == -1 else size for size in shape]
        return _made(leaf, lambda: TensorSpec(sizes, dtype))
    found = {}
    for key, value in values.items():
        if not isinstance(value, dict):
            expected = '{ dtype = "float32", shape = [84] }, or a table of such'
            raise section.wrong(f"{path}.{key}", value, expected)
        found[key] = _signature(section, f"{path}.{key}", value)
    return found
