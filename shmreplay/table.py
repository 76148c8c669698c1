"""Tables: what a user asks a server to hold.

A ``Table`` is a description, checked when it is made. A server builds the real table in shared
memory from ``Table.config()`` and then binds the object to it, so that ``info`` and the other
questions answer for the real one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from shmreplay import rate_limiters, reverb_types, selectors, spec
from shmreplay.errors import ArgumentTypeError, InvalidArgumentError
from shmreplay.extensions import TableExtension
from shmreplay.limits import (
    DEFAULT_MAX_STRIPES,
    EXTENSION_EVENTS,
    EXTENSION_EVENTS_MAX,
    EXTENSION_EVENTS_MIN,
    MAX_BYTES,
    MAX_CONFIG_JSON_BYTES,
    MAX_SEED,
    MAX_STRIPES,
    MAX_TABLE_NAME_BYTES,
    MAX_TABLE_SIZE,
    MAX_TABLES,
    MAX_TIMES_SAMPLED,
    checked_int,
)

__all__ = [
    "Changeable",
    "Table",
    "TableConfig",
    "TableHandle",
    "check_bytes",
    "check_limiter",
    "check_sizes",
    "checked_compress",
    "checked_tables",
]

# Selectors that need one order over all items of the table, and so a single stripe. A fifo remover
# is not among them: the oldest of the stripes' oldest items is found by insertion number.
_ORDERED_SAMPLERS = frozenset({"fifo", "lifo", "min_heap", "max_heap", "epoch"})
_ORDERED_REMOVERS = frozenset({"lifo", "min_heap", "max_heap"})


class TableHandle(Protocol):
    """What a running server offers for one of its tables."""

    def info(self) -> reverb_types.TableInfo:
        """Returns settings and counters at this moment."""

    def check(self) -> None:
        """Checks every structure of the table; raises TableCorruptedError if one is damaged."""

    def can_sample(self, num_samples: int) -> bool:
        """Returns whether the limiter lets so many samples pass now."""

    def can_insert(self, num_inserts: int) -> bool:
        """Returns whether the limiter lets so many inserts pass now."""


class Changeable(NamedTuple):
    """The settings that a table in use may be given anew: ``Client.configure_table``."""

    max_size: int
    max_times_sampled: int
    samples_per_insert: float
    min_size_to_sample: int
    min_diff: float
    max_diff: float
    max_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """A table's settings as plain numbers and strings: what the store and checkpoints hold.

    Making one checks every setting and raises InvalidArgumentError or ArgumentTypeError.
    """

    name: str
    sampler_kind: str
    sampler_exponent: float
    remover_kind: str
    remover_exponent: float
    max_size: int
    max_times_sampled: int
    samples_per_insert: float
    min_size_to_sample: int
    min_diff: float
    max_diff: float
    stripes: int
    seed: int | None
    signature_json: str
    """A signature as ``spec.signature_to_json`` writes it; ``'null'`` for none."""
    events: int = 0
    """Changes that its extensions may be behind; 0 for a table without extensions."""
    compress: str = "none"
    """How the steps of its items are compressed: ``'lz4'``, or ``'none'``: not."""
    max_bytes: int = 0
    """Bound on the bytes that its items keep in memory; 0: none."""

    def __post_init__(self) -> None:
        """Checks the settings, as the class says."""
        _check_name(self.name)
        check_sizes(self.max_size, self.max_times_sampled)
        check_bytes(self.max_bytes)
        _check_seed(self.seed)
        selectors.from_kind(self.sampler_kind, self.sampler_exponent)
        selectors.from_kind(self.remover_kind, self.remover_exponent)
        if self.remover_kind == "epoch":
            raise InvalidArgumentError(
                f"Got an epoch remover for table {self.name!r}; expected another selector: an item"
                " is removed once, so passes mean nothing there. Use Uniform()."
            )
        self._check_stripes()
        _check_events(self.events, self.stripes)
        checked_compress(self.compress)

    def _check_stripes(self) -> None:
        stripes, hint = self.stripes, "Leave stripes out for a default that fits."
        if not 1 <= stripes <= min(MAX_STRIPES, self.max_size):
            raise InvalidArgumentError(
                f"Got {stripes} stripes for table {self.name!r} of max_size {self.max_size};"
                f" expected 1 to {min(MAX_STRIPES, self.max_size)}. {hint}"
            )
        if stripes > 1 and _needs_order(self.sampler_kind, self.remover_kind):
            raise InvalidArgumentError(
                f"Got {stripes} stripes for table {self.name!r} with a {self.sampler_kind} sampler"
                f" and a {self.remover_kind} remover; expected 1, as samplers other than uniform"
                " and prioritized, and lifo and heap removers, need one order over all items."
                f" {hint}"
            )

    def rate_limiter(self) -> rate_limiters.RateLimiter:
        """Returns the limiter."""
        return rate_limiters.RateLimiter(
            self.samples_per_insert, self.min_size_to_sample, self.min_diff, self.max_diff
        )

    def sampler(self) -> selectors.Selector:
        """Returns the sampler."""
        return selectors.from_kind(self.sampler_kind, self.sampler_exponent)

    def remover(self) -> selectors.Selector:
        """Returns the remover."""
        return selectors.from_kind(self.remover_kind, self.remover_exponent)

    def signature(self) -> Any:
        """Returns the signature, a structure of ``TensorSpec``, or None."""
        return spec.signature_from_json(self.signature_json)

    def changeable(self) -> Changeable:
        """Returns those settings that a table in use may be given anew."""
        return Changeable(**{name: getattr(self, name) for name in Changeable._fields})

    def info(
        self, counts: reverb_types.TableCounts, now: Changeable | None = None
    ) -> reverb_types.TableInfo:
        """Returns these settings with ``counts`` as Reverb's ``TableInfo``.

        Args:
            counts: The counters.
            now: What holds in place of the declared settings, if that was changed.
        """
        if now is None:
            now = self.changeable()
        limiter = reverb_types.RateLimiterInfo(
            samples_per_insert=now.samples_per_insert,
            min_size_to_sample=now.min_size_to_sample,
            min_diff=now.min_diff,
            max_diff=now.max_diff,
            insert_stats=reverb_types.RateLimiterCallStats(counts.inserts),
            sample_stats=reverb_types.RateLimiterCallStats(counts.samples),
        )
        return reverb_types.TableInfo(
            name=self.name,
            sampler_options=reverb_types.KeyDistributionOptions(
                self.sampler_kind, self.sampler_exponent
            ),
            remover_options=reverb_types.KeyDistributionOptions(
                self.remover_kind, self.remover_exponent
            ),
            max_size=now.max_size,
            max_times_sampled=now.max_times_sampled,
            rate_limiter_info=limiter,
            signature=self.signature(),
            current_size=counts.current_size,
            num_episodes=counts.num_episodes,
            num_deleted_episodes=counts.num_deleted_episodes,
            num_unique_samples=counts.num_unique_samples,
            table_worker_time=reverb_types.TableWorkerTime(),
            insert_blocked_by=reverb_types.insert_blocked_by(limiter, counts.current_size),
            sample_blocked_by=reverb_types.sample_blocked_by(limiter, counts.current_size),
            sampling_mass=counts.sampling_mass,
            max_bytes=now.max_bytes,
            current_bytes=counts.current_bytes,
        )

    def to_json(self) -> str:
        """Returns the settings as JSON text."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TableConfig:
        """Returns the settings that ``to_json`` wrote; the text is not trusted.

        Raises:
            InvalidArgumentError: It is not such a text, or a setting is out of its range.
        """
        if len(text) > MAX_CONFIG_JSON_BYTES:
            raise _malformed(f"{len(text)} bytes, more than {MAX_CONFIG_JSON_BYTES}")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _malformed(f"text that is not JSON ({error})") from error
        if not isinstance(values, dict) or set(values) != set(_FIELD_TYPES):
            raise _malformed(f"other fields than {', '.join(_FIELD_TYPES)}")
        for field, types in _FIELD_TYPES.items():
            if type(values[field]) not in types:
                raise _malformed(f"{field} {values[field]!r}")
            if type(values[field]) is float and not math.isfinite(values[field]):
                raise _malformed(f"{field} {values[field]!r}")
        try:
            config = cls(**values)
            config.rate_limiter()
        except ArgumentTypeError as error:  # numbers that do not fit Reverb's C types
            raise InvalidArgumentError(f"Got damaged settings of a table. {error}") from error
        config.signature()
        return config


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    field.name: {
        "str": (str,),
        "int": (int,),
        "float": (float,),
        "int | None": (int, type(None)),
    }[str(field.type)]
    for field in dataclasses.fields(TableConfig)
}


class Table:
    """A table: items with priorities, a sampler, a remover and a rate limiter.

    With ``compress='lz4'`` many more steps fit into memory, and reading them takes longer. A block
    of steps belongs to its writer, and may serve several tables: writers of a server that has such
    a table compress all that they write, unless they are told otherwise (``compress='none'``);
    ``Client.insert_batch`` goes by its table alone. Nobody who reads notices.

    With ``max_bytes`` inserting evicts by the remover until the items keep no more than that in
    memory: each block of steps that one refers to, whole and once however many share it, the record
    of which steps an item has, and those of episodes. An item that has more by itself is an error.
    """

    def __init__(
        self,
        name: str,
        sampler: selectors.Selector,
        remover: selectors.Selector,
        max_size: int,
        rate_limiter: rate_limiters.RateLimiter,
        max_times_sampled: int = 0,
        extensions: Sequence[TableExtension] | None = (),
        signature: Any = None,
        *,
        seed: int | None = None,
        stripes: int | None = None,
        compress: str | None = None,
        max_bytes: int = 0,
    ) -> None:
        """Describes a table.

        Args:
            name: 1 to 63 bytes in UTF-8; no two tables of a server may have the same.
            sampler: Selects the items to sample.
            remover: Selects the item to remove when the table has more than ``max_size``.
            max_size: Items that the table holds, 1 to 2**31 - 1.
            rate_limiter: Says how far inserting and sampling may run ahead of each other.
            max_times_sampled: An item is removed once it was sampled so often; below 1, never.
            extensions: Told of every change of the table, in order; see ``TableExtension``.
            signature: Shape and dtype of each column of an item, in the structure that items have;
                see ``spec.as_signature``. None takes any data.
            seed: 0 to 2**64 - 1; makes what a single client samples repeat exactly, given the same
                number of stripes. None seeds from the operating system.
            stripes: Shares of the table with a lock of their own. By default 1 where sampler or
                remover need one order over all items, or ``max_times_sampled`` or extensions are
                set, else the number of processors, at most 16.
            compress: ``'lz4'``: full blocks of steps are kept compressed. See the class.
            max_bytes: Bytes that the items may keep in memory; 0: no bound. See the class.

        Raises:
            InvalidArgumentError: A value is out of its range.
            ArgumentTypeError: A value has the wrong type, or ``max_size`` is 2**31 or more.
            SignatureError: The signature has a leaf that cannot be stored.
        """
        _check_parts(sampler, remover, rate_limiter)
        self._extensions = _checked_extensions(extensions)
        max_size, max_times_sampled = _checked_sizes(max_size, max_times_sampled)
        self._signature = None if signature is None else spec.as_signature(signature)
        self._requested_stripes = None if stripes is None else checked_int("stripes", stripes)
        resolved = self._requested_stripes
        if resolved is None:
            most = 1 if max_times_sampled > 0 or self._extensions else max_size
            resolved = _default_stripes(sampler.kind, remover.kind, most)
        self._config = TableConfig(
            name=name,
            sampler_kind=sampler.kind,
            sampler_exponent=sampler.priority_exponent,
            remover_kind=remover.kind,
            remover_exponent=remover.priority_exponent,
            max_size=max_size,
            max_times_sampled=max_times_sampled,
            **_numbers_of(rate_limiter),
            stripes=resolved,
            seed=None if seed is None else checked_int("seed", seed),
            signature_json=spec.signature_to_json(self._signature),
            events=EXTENSION_EVENTS if self._extensions else 0,
            compress=checked_compress(compress) or "none",
            max_bytes=checked_int("max_bytes", max_bytes),
        )
        self._sampler = sampler
        self._remover = remover
        self._rate_limiter = rate_limiter
        self._handle: TableHandle | None = None

    @classmethod
    def queue(
        cls,
        name: str,
        max_size: int,
        extensions: Sequence[TableExtension] | None = (),
        signature: Any = None,
        *,
        seed: int | None = None,
    ) -> Table:
        """Describes a queue: items are sampled once each, in the order of their insertion.

        Args:
            name: See the constructor, as for the other arguments.
            max_size: Items that may wait in the queue; then inserts wait.
            extensions: Told of every change.
            signature: Shape and dtype of each column, or None.
            seed: As for other tables; a queue draws no random numbers.

        Raises:
            InvalidArgumentError: A value is out of its range.
            ArgumentTypeError: A value has the wrong type.
        """
        return cls(
            name=name,
            sampler=selectors.Fifo(),
            remover=selectors.Fifo(),
            max_size=max_size,
            rate_limiter=rate_limiters.Queue(max_size),
            max_times_sampled=1,
            extensions=extensions,
            signature=signature,
            seed=seed,
        )

    @classmethod
    def stack(
        cls,
        name: str,
        max_size: int,
        extensions: Sequence[TableExtension] | None = (),
        signature: Any = None,
        *,
        seed: int | None = None,
    ) -> Table:
        """Describes a stack: items are sampled once each, the last inserted first.

        Args:
            name: See the constructor, as for the other arguments.
            max_size: Items that may lie on the stack; then inserts wait.
            extensions: Told of every change.
            signature: Shape and dtype of each column, or None.
            seed: As for other tables; a stack draws no random numbers.

        Raises:
            InvalidArgumentError: A value is out of its range.
            ArgumentTypeError: A value has the wrong type.
        """
        return cls(
            name=name,
            sampler=selectors.Lifo(),
            remover=selectors.Lifo(),
            max_size=max_size,
            rate_limiter=rate_limiters.Stack(max_size),
            max_times_sampled=1,
            extensions=extensions,
            signature=signature,
            seed=seed,
        )

    @classmethod
    def from_config(cls, config: TableConfig) -> Table:
        """Describes the table that ``config`` came from.

        Raises:
            InvalidArgumentError: The limiter or the signature in ``config`` cannot be used.
        """
        return cls(
            name=config.name,
            sampler=config.sampler(),
            remover=config.remover(),
            max_size=config.max_size,
            rate_limiter=config.rate_limiter(),
            max_times_sampled=config.max_times_sampled,
            signature=config.signature(),
            seed=config.seed,
            stripes=config.stripes,
            compress=config.compress,
            max_bytes=config.max_bytes,
        )

    def replace(
        self,
        name: str | None = None,
        sampler: selectors.Selector | None = None,
        remover: selectors.Selector | None = None,
        max_size: int | None = None,
        rate_limiter: rate_limiters.RateLimiter | None = None,
        max_times_sampled: int | None = None,
        extensions: Sequence[TableExtension] | None = None,
        signature: Any = None,
        *,
        seed: int | None = None,
        stripes: int | None = None,
        compress: str | None = None,
        max_bytes: int | None = None,
    ) -> Table:
        """Describes another, empty table with some settings changed.

        Args:
            name: None keeps this table's setting, here and below.
            sampler: See the constructor, as for the other arguments.
            remover: Selects the item to remove.
            max_size: Items that the table holds.
            rate_limiter: Says how far inserting and sampling may run ahead of each other.
            max_times_sampled: How often an item is sampled before it is removed.
            extensions: Told of every change.
            signature: Shape and dtype of each column; it cannot be removed.
            seed: Of the random numbers.
            stripes: Where none were asked for, the default for the new settings.
            compress: ``'lz4'`` or ``'none'``.
            max_bytes: Bound on the bytes that the items keep in memory.

        Raises:
            InvalidArgumentError: A value is out of its range.
            ArgumentTypeError: A value has the wrong type.
        """
        config = self._config
        return Table(
            name=config.name if name is None else name,
            sampler=self._sampler if sampler is None else sampler,
            remover=self._remover if remover is None else remover,
            max_size=config.max_size if max_size is None else max_size,
            rate_limiter=self._rate_limiter if rate_limiter is None else rate_limiter,
            max_times_sampled=(
                config.max_times_sampled if max_times_sampled is None else max_times_sampled
            ),
            extensions=self._extensions if extensions is None else extensions,
            signature=self._signature if signature is None else signature,
            seed=config.seed if seed is None else seed,
            stripes=self._requested_stripes if stripes is None else stripes,
            compress=config.compress if compress is None else compress,
            max_bytes=config.max_bytes if max_bytes is None else max_bytes,
        )

    @property
    def name(self) -> str:
        """The name."""
        return self._config.name

    @property
    def signature(self) -> Any:
        """The signature, a structure of ``TensorSpec``, or None."""
        return self._signature

    @property
    def extensions(self) -> tuple[TableExtension, ...]:
        """What is told of every change of the table."""
        return self._extensions

    @property
    def info(self) -> reverb_types.TableInfo:
        """Settings and counters at this moment; the counters are 0 before a server runs it."""
        if self._handle is not None:
            return self._handle.info()
        return self._config.info(reverb_types.TableCounts())

    @property
    def requested_stripes(self) -> int | None:
        """The number of stripes that was asked for; None where the default was taken."""
        return self._requested_stripes

    def config(self) -> TableConfig:
        """Returns the settings as plain numbers and strings."""
        return self._config

    def check(self) -> None:
        """Checks every structure of the table in shared memory; nothing before a server runs it.

        Raises:
            TableCorruptedError: One is damaged.
        """
        if self._handle is not None:
            self._handle.check()

    def can_sample(self, num_samples: int) -> bool:
        """Returns whether the rate limiter lets so many samples pass now.

        As in Reverb, only the limiter is asked: ``max_times_sampled`` may end it earlier.

        Raises:
            InvalidArgumentError: ``num_samples`` is below 1.
            ArgumentTypeError: ``num_samples`` is not an int.
        """
        allowed = self._rate_limiter.can_sample(num_samples)  # checks the argument in any case
        return allowed if self._handle is None else self._handle.can_sample(int(num_samples))

    def can_insert(self, num_inserts: int) -> bool:
        """Returns whether the rate limiter lets so many inserts pass now.

        As in Reverb, only the limiter is asked: ``max_size`` plays no part.

        Raises:
            InvalidArgumentError: ``num_inserts`` is below 1.
            ArgumentTypeError: ``num_inserts`` is not an int.
        """
        allowed = self._rate_limiter.can_insert(num_inserts)  # checks the argument in any case
        return allowed if self._handle is None else self._handle.can_insert(int(num_inserts))

    def _bind(self, handle: TableHandle) -> None:
        """Makes this object answer for a running table; where there are several, for the last."""
        self._handle = handle

    def __repr__(self) -> str:
        """Returns the settings as Reverb prints them."""
        signature = "nullptr" if self._signature is None else repr(self._signature)
        return (
            f"Table(sampler={self._sampler!r}, remover={self._remover!r},"
            f" max_size={self._config.max_size},"
            f" max_times_sampled={self._config.max_times_sampled}, name={self._config.name},"
            f" rate_limiter={self._rate_limiter!r}, signature={signature})"
        )


def checked_tables(tables: Iterable[Table] | None) -> tuple[Table, ...]:
    """Returns the tables of one server, having checked that they can be together.

    Raises:
        InvalidArgumentError: There are none or too many, or two have the same name.
        ArgumentTypeError: One is not a ``Table``.
    """
    if isinstance(tables, Table) or not isinstance(tables, Iterable):
        raise InvalidArgumentError(
            f"Got {tables!r} for the tables of a server; expected a list of at least one Table. "
            "Make one with shmreplay.Table(...)."
        )
    result = tuple(tables)
    for table in result:
        if not isinstance(table, Table):
            raise ArgumentTypeError(
                f"Got {table!r} of type {type(table).__name__} in the tables of a server; expected"
                " shmreplay.Table. Make it with shmreplay.Table(...)."
            )
    if not 1 <= len(result) <= MAX_TABLES:
        raise InvalidArgumentError(
            f"Got {len(result)} tables for a server; expected 1 to {MAX_TABLES}. Give at least one,"
            " and spread more than that over several servers."
        )
    names = [table.name for table in result]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(
            f"Got several tables named {twice} for a server; expected each name once. Rename all"
            " but one of each."
        )
    return result


def _needs_order(sampler_kind: str, remover_kind: str) -> bool:
    return sampler_kind in _ORDERED_SAMPLERS or remover_kind in _ORDERED_REMOVERS


def _default_stripes(sampler: str, remover: str, max_size: int) -> int:
    if _needs_order(sampler, remover):
        return 1
    return min(DEFAULT_MAX_STRIPES, os.cpu_count() or 1, max_size)


def _numbers_of(limiter: rate_limiters.RateLimiter) -> dict[str, Any]:
    names = ("samples_per_insert", "min_size_to_sample", "min_diff", "max_diff")
    return {name: getattr(limiter, name) for name in names}


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"Got the table name {name!r} of type {type(name).__name__}; expected a str. Give its "
            "name as text."
        )
    # Lone surrogates cannot be encoded; they count as one byte here and are refused below.
    size = len(name.encode("utf-8", "replace"))
    if not 1 <= size <= MAX_TABLE_NAME_BYTES:
        raise InvalidArgumentError(
            f"Got the table name {name!r} of {size} bytes in UTF-8; expected 1 to"
            f" {MAX_TABLE_NAME_BYTES} bytes. Choose a {'longer' if size < 1 else 'shorter'} one."
        )
    if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise InvalidArgumentError(
            f"Got the table name {name!r}; expected text without zero characters and lone"
            " surrogates. Choose another name."
        )


def checked_compress(compress: Any) -> str | None:
    """Returns how steps are to be compressed: ``'lz4'``, ``'none'``, or None where nothing is said.

    Raises:
        InvalidArgumentError: It is something else.
    """
    if compress is not None and compress not in ("lz4", "none"):
        raise InvalidArgumentError(
            f"Got compress {compress!r}; expected 'lz4', 'none', or None for the default."
        )
    return None if compress is None else str(compress)


def _checked_sizes(max_size: Any, max_times_sampled: Any) -> tuple[int, int]:
    sizes = checked_int("max_size", max_size), checked_int("max_times_sampled", max_times_sampled)
    check_sizes(*sizes)
    return sizes


def check_sizes(max_size: int, max_times_sampled: int) -> None:
    """Checks two bounds of a table.

    Raises:
        InvalidArgumentError: ``max_size`` is below 1.
        ArgumentTypeError: One is beyond 32 bits.
    """
    if max_size <= 0:
        raise InvalidArgumentError(
            f"Got max_size {max_size}; expected 1 to {MAX_TABLE_SIZE}. Give the number of items"
            " that the table may hold."
        )
    # Too large a number is a TypeError in Reverb, where it does not fit the argument's C type.
    if max_size > MAX_TABLE_SIZE:
        raise ArgumentTypeError(
            f"Got max_size {max_size}; expected an int of at most {MAX_TABLE_SIZE}. Give a smaller"
            " one, or use several tables."
        )
    if not -MAX_TIMES_SAMPLED - 1 <= max_times_sampled <= MAX_TIMES_SAMPLED:
        raise ArgumentTypeError(
            f"Got max_times_sampled {max_times_sampled}; expected an int of at most"
            f" {MAX_TIMES_SAMPLED}. Give 0 for no limit."
        )


def check_bytes(max_bytes: int) -> None:
    """Checks a bound on the bytes of a table.

    Raises:
        InvalidArgumentError: It is negative, or beyond any memory.
    """
    if not 0 <= max_bytes <= MAX_BYTES:
        raise InvalidArgumentError(
            f"Got max_bytes {max_bytes}; expected 0 to {MAX_BYTES}. Give 0 for no bound."
        )


def _check_seed(seed: int | None) -> None:
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise InvalidArgumentError(
            f"Got the seed {seed}; expected 0 to 2**64 - 1, or None for one from the operating"
            " system."
        )


def _check_selector(role: str, selector: Any) -> None:
    if not isinstance(selector, selectors.Selector) or selector.kind not in selectors.KINDS:
        raise ArgumentTypeError(
            f"Got the {role} {selector!r}; expected a selector. Make one of shmreplay.selectors,"
            " for instance shmreplay.selectors.Uniform()."
        )


def _check_parts(sampler: Any, remover: Any, limiter: Any) -> None:
    _check_selector("sampler", sampler)
    _check_selector("remover", remover)
    check_limiter(limiter)


def check_limiter(limiter: Any) -> None:
    """Checks that this is a rate limiter.

    Raises:
        ArgumentTypeError: It is not.
    """
    if not isinstance(limiter, rate_limiters.RateLimiter):
        raise ArgumentTypeError(
            f"Got the rate_limiter {limiter!r}; expected a rate limiter. Make one of"
            " shmreplay.rate_limiters, for instance shmreplay.rate_limiters.MinSize(1)."
        )


def _checked_extensions(extensions: Any) -> tuple[TableExtension, ...]:
    if extensions is None:
        return ()
    if isinstance(extensions, TableExtension | str) or not isinstance(extensions, Iterable):
        raise ArgumentTypeError(
            f"Got the table extensions {extensions!r}; expected a list of objects that derive from"
            " shmreplay.TableExtension. Give an empty list for none."
        )
    result = tuple(extensions)
    for extension in result:
        if not isinstance(extension, TableExtension):
            raise ArgumentTypeError(
                f"Got the table extension {extension!r} of type {type(extension).__name__};"
                " expected an object that derives from shmreplay.TableExtension. Derive a class"
                " from it, and give an instance of that."
            )
    return result


def _check_events(events: int, stripes: int) -> None:
    if events and not (stripes == 1 and EXTENSION_EVENTS_MIN <= events <= EXTENSION_EVENTS_MAX):
        raise InvalidArgumentError(
            f"Got {stripes} stripes and room for {events} changes for a table with extensions;"
            " expected 1 stripe, as they are told of all changes in one order, and room for"
            f" {EXTENSION_EVENTS_MIN} to {EXTENSION_EVENTS_MAX}. Leave stripes out."
        )


def _malformed(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Got the settings of a table with {what}; expected what TableConfig.to_json() returns."
        " They were damaged, or written by another version."
    )
