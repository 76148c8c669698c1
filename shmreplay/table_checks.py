"""What each setting of a table may be."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from shmreplay import rate_limiters, selectors
from shmreplay.errors import ArgumentTypeError, InvalidArgumentError
from shmreplay.extensions import TableExtension
from shmreplay.limits import (
    DEFAULT_MAX_STRIPES,
    EXTENSION_EVENTS_MAX,
    EXTENSION_EVENTS_MIN,
    MAX_BYTES,
    MAX_SEED,
    MAX_TABLE_NAME_BYTES,
    MAX_TABLE_SIZE,
    MAX_TIMES_SAMPLED,
    checked_int,
)

__all__ = [
    "check_bytes",
    "check_events",
    "check_limiter",
    "check_name",
    "check_parts",
    "check_seed",
    "check_sizes",
    "checked_compress",
    "checked_extensions",
    "checked_sizes",
    "default_stripes",
    "needs_order",
]

# Selectors that need one order over all items of the table, and so a single stripe. A fifo remover
# is not among them: the oldest of the stripes' oldest items is found by insertion number.
_ORDERED_SAMPLERS = frozenset({"fifo", "lifo", "min_heap", "max_heap", "epoch"})
_ORDERED_REMOVERS = frozenset({"lifo", "min_heap", "max_heap"})


def needs_order(sampler_kind: str, remover_kind: str) -> bool:
    """Returns whether these selectors need one order over all items, and so a single stripe."""
    return sampler_kind in _ORDERED_SAMPLERS or remover_kind in _ORDERED_REMOVERS


def default_stripes(sampler: str, remover: str, max_size: int) -> int:
    """Returns the stripes of a table for which none are asked for."""
    if needs_order(sampler, remover):
        return 1
    return min(DEFAULT_MAX_STRIPES, os.cpu_count() or 1, max_size)


def check_name(name: Any) -> None:
    """Checks a table's name.

    Raises:
        InvalidArgumentError: It is empty or too long, or has characters that no name has.
        ArgumentTypeError: It is not a str.
    """
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


def checked_sizes(max_size: Any, max_times_sampled: Any) -> tuple[int, int]:
    """Returns both as integers, checked by ``check_sizes``."""
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


def check_seed(seed: int | None) -> None:
    """Checks a seed.

    Raises:
        InvalidArgumentError: It does not fit 64 bits.
    """
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


def check_parts(sampler: Any, remover: Any, limiter: Any) -> None:
    """Checks that these are two selectors and a rate limiter.

    Raises:
        ArgumentTypeError: One is something else.
    """
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


def checked_extensions(extensions: Any) -> tuple[TableExtension, ...]:
    """Returns the extensions of a table; None stands for none.

    Raises:
        ArgumentTypeError: They are not a list of ``TableExtension``.
    """
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


def check_events(events: int, stripes: int) -> None:
    """Checks the room for changes that a table's extensions may be behind.

    Raises:
        InvalidArgumentError: It is out of range, or the table has several stripes.
    """
    if events and not (stripes == 1 and EXTENSION_EVENTS_MIN <= events <= EXTENSION_EVENTS_MAX):
        raise InvalidArgumentError(
            f"Got {stripes} stripes and room for {events} changes for a table with extensions;"
            " expected 1 stripe, as they are told of all changes in one order, and room for"
            f" {EXTENSION_EVENTS_MIN} to {EXTENSION_EVENTS_MAX}. Leave stripes out."
        )
