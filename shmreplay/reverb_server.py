"""The command `reverb_server`: a server of the tables that a text configures, until it is stopped.

    reverb_server --config='
      port: 8000
      tables: {
        table_name: "replay"
        sampler: { prioritized: { priority_exponent: 0.8 } }
        remover: { fifo: true }
        max_size: 1000000
        rate_limiter: {
          samples_per_insert: 1 min_size_to_sample: 1000 min_diff: -1e9 max_diff: 1e9
        }
      }'

The text is Reverb's `ReverbServerConfig`. Tables made so have no signature.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from shmreplay import selectors
from shmreplay.errors import InvalidArgumentError, ReverbError
from shmreplay.rate_limiters import RateLimiter
from shmreplay.server import Server
from shmreplay.table import Table
from shmreplay.textproto import Message, parse

__all__ = ["main", "parse_config"]

_LIMITER = ("samples_per_insert", "min_size_to_sample", "min_diff", "max_diff")


class _Fields:
    """The fields of a message, each at most once, and where it stands."""

    def __init__(self, message: Any, where: str, known: Sequence[str]) -> None:
        if not isinstance(message, dict):
            raise InvalidArgumentError(
                f"Got {where}: {message!r}; expected a message in braces. Write {{ ... }}."
            )
        unknown = sorted(set(message) - set(known))
        if unknown:
            raise InvalidArgumentError(
                f"Got {where or 'a config'} with the field {unknown[0]!r}; expected of"
                f" {', '.join(known)}. Use one of them."
            )
        self._message: Message = message
        self._where = where

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def has(self, name: str) -> bool:
        return name in self._message

    def all(self, name: str) -> list[Any]:
        return self._message.get(name, [])

    def get(self, name: str, kind: type, what: str, default: Any = None) -> Any:
        """The value; without a default it must be there."""
        values = self.all(name)
        if not values:
            if default is None:
                raise InvalidArgumentError(f"Got no {self.path(name)}; expected {what}. Add one.")
            return default
        value = values[-1]
        if len(values) > 1:
            raise InvalidArgumentError(
                f"Got {self.path(name)} {len(values)} times; expected once. Leave the others out."
            )
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InvalidArgumentError(
                f"Got {self.path(name)}: {value!r}; expected {what}. Write such a value there."
            )
        return value


def parse_config(text: str) -> tuple[list[Table], int]:
    """Makes the tables of a `ReverbServerConfig` in text form.

    Returns:
        The tables, and the port.

    Raises:
        InvalidArgumentError: It is no such text, or a setting is missing or out of range; says
            which.
    """
    config = _Fields(parse(text), "", ("port", "tables"))
    if not config.has("tables"):
        raise InvalidArgumentError(
            "Got a config without tables; expected one at least. Add tables { ... } to it."
        )
    tables = [_table(each, f"tables[{i}]") for i, each in enumerate(config.all("tables"))]
    return tables, config.get("port", int, "the number of a port")


def _table(message: Any, where: str) -> Table:
    known = ("table_name", "sampler", "remover", "max_size", "max_times_sampled", "rate_limiter")
    fields = _Fields(message, where, known)
    for name in ("sampler", "remover", "rate_limiter"):
        if not fields.has(name):
            raise InvalidArgumentError(
                f"Got no {fields.path(name)}; expected a message in braces. Add {name} {{ ... }}."
            )
    numbers = _Fields(
        fields.get("rate_limiter", dict, "a message"), f"{where}.rate_limiter", _LIMITER
    )
    samples_per_insert, min_size, *bounds = (
        numbers.get(name, int if "size" in name else float, "a number") for name in _LIMITER
    )
    try:
        return Table(
            name=fields.get("table_name", str, "a name in quotes"),
            sampler=_selector(fields.get("sampler", dict, "a message"), f"{where}.sampler"),
            remover=_selector(fields.get("remover", dict, "a message"), f"{where}.remover"),
            max_size=fields.get("max_size", int, "a number of items"),
            max_times_sampled=fields.get("max_times_sampled", int, "a number", 0),
            rate_limiter=RateLimiter(samples_per_insert, min_size, *bounds),
        )
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error}") from None


def _selector(message: Any, where: str) -> selectors.Selector:
    kinds = ("fifo", "lifo", "uniform", "prioritized", "heap")
    fields = _Fields(message, where, (*kinds, "is_deterministic"))
    given = [kind for kind in kinds if fields.has(kind)]
    if len(given) != 1:
        raise InvalidArgumentError(
            f"Got {where} with {', '.join(given) or 'no kind'}; expected one of {', '.join(kinds)}."
            " Give exactly one."
        )
    if given[0] == "prioritized":
        inner = _Fields(
            fields.get("prioritized", dict, "a message"),
            f"{where}.prioritized",
            ("priority_exponent",),
        )
        return selectors.Prioritized(inner.get("priority_exponent", float, "a number", 0.0))
    if given[0] == "heap":
        inner = _Fields(fields.get("heap", dict, "a message"), f"{where}.heap", ("min_heap",))
        lowest = inner.get("min_heap", bool, "true or false", False)
        return selectors.MinHeap() if lowest else selectors.MaxHeap()
    fields.get(given[0], bool, "true")
    simple: dict[str, Callable[[], selectors.Selector]] = {
        "fifo": selectors.Fifo,
        "lifo": selectors.Lifo,
        "uniform": selectors.Uniform,
    }
    return simple[given[0]]()


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "reverb_server", description="Serve the tables that a config in text form names."
    )
    parser.add_argument("--config", required=True, help="a ReverbServerConfig as text")
    parser.add_argument("--name", help="of the store, shm://NAME; made up if it is not given")
    parser.add_argument("--capacity", type=int, help="bytes that the store may use")
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--insecure", action="store_true", help="let other hosts in, without keys")
    return parser


def _end(number: int, frame: Any) -> None:
    sys.exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or Ctrl-C.

    Returns:
        0; 2 where the config or the server is refused.
    """
    options = _arguments().parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        tables, port = parse_config(options.config)
        server = Server(
            tables,
            port,
            name=options.name,
            capacity=options.capacity,
            bind=options.bind,
            insecure=options.insecure,
        )
    except ReverbError as error:
        sys.stderr.write(f"reverb_server: {error}\n")
        return 2
    with server:
        names = ", ".join(repr(table.name) for table in tables)
        sys.stdout.write(f"serving {names} at port {server.port}, {server.address}\n")
        sys.stdout.flush()
        try:
            server.wait()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
