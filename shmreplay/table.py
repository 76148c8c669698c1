"""Tables: what a user asks a server to hold.

A ``Table`` is a description, checked when it is made. A server builds the real table in shared
memory from ``Table.config()`` and then binds the object to it, so that ``info`` and the other
questions answer for the real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from shmreplay import rate_limiters, reverb_types, selectors, spec
from shmreplay.errors import ArgumentTypeError, InvalidArgumentError
from shmreplay.extensions import TableExtension
from shmreplay.limits import EXTENSION_EVENTS, MAX_TABLES, checked_int
from shmreplay.table_checks import (
    check_parts,
    checked_compress,
    checked_extensions,
    checked_sizes,
    default_stripes,
)
from shmreplay.table_config import Changeable, TableConfig

__all__ = ["Changeable", "Table", "TableConfig", "TableHandle", "checked_tables"]


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
        check_parts(sampler, remover, rate_limiter)
        self._extensions = checked_extensions(extensions)
        max_size, max_times_sampled = checked_sizes(max_size, max_times_sampled)
        self._signature = None if signature is None else spec.as_signature(signature)
        self._requested_stripes = None if stripes is None else checked_int("stripes", stripes)
        resolved = self._requested_stripes
        if resolved is None:
            most = 1 if max_times_sampled > 0 or self._extensions else max_size
            resolved = default_stripes(sampler.kind, remover.kind, most)
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

        Args:
            config: What `config` returned.

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

        Args:
            num_samples: How many.

        Raises:
            InvalidArgumentError: ``num_samples`` is below 1.
            ArgumentTypeError: ``num_samples`` is not an int.
        """
        allowed = self._rate_limiter.can_sample(num_samples)  # checks the argument in any case
        return allowed if self._handle is None else self._handle.can_sample(int(num_samples))

    def can_insert(self, num_inserts: int) -> bool:
        """Returns whether the rate limiter lets so many inserts pass now.

        As in Reverb, only the limiter is asked: ``max_size`` plays no part.

        Args:
            num_inserts: How many.

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


def _numbers_of(limiter: rate_limiters.RateLimiter) -> dict[str, Any]:
    names = ("samples_per_insert", "min_size_to_sample", "min_diff", "max_diff")
    return {name: getattr(limiter, name) for name in names}
