"""What is done to a table in use beside inserting and sampling: settings, listing, fetching."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmreplay.batches import item_arrays
from shmreplay.connection import Connection, Limiter
from shmreplay.limits import checked_int
from shmreplay.rate_limiters import RateLimiter
from shmreplay.replay_sample import ItemInfo, ReplaySample, SampleInfo
from shmreplay.table_checks import check_bytes, check_limiter, check_sizes

PINS_AT_ONCE: Final = 256
"""Items that are pinned together while they are fetched."""


def configure(
    connection: Connection,
    table: str,
    max_size: Any,
    max_times_sampled: Any,
    rate_limiter: RateLimiter | None,
    max_bytes: Any = None,
    timeout: float | None = None,
) -> None:
    """See `Client.configure_table`."""
    number = connection.number(table)
    change = checked_change(max_size, max_times_sampled, rate_limiter, max_bytes)
    connection.configure(number, *change, timeout)


def checked_change(
    max_size: Any, max_times_sampled: Any, rate_limiter: RateLimiter | None, max_bytes: Any = None
) -> tuple[int | None, int | None, Limiter | None, int | None]:
    """Other settings for a table, as `Connection.configure` takes them.

    Raises:
        InvalidArgumentError, ArgumentTypeError: A setting is out of its range or of the wrong type.
    """
    size = None if max_size is None else checked_int("max_size", max_size)
    times = None
    if max_times_sampled is not None:
        times = checked_int("max_times_sampled", max_times_sampled)
    check_sizes(1 if size is None else size, times or 0)
    limiter = None
    if rate_limiter is not None:
        check_limiter(rate_limiter)
        limiter = (
            rate_limiter.samples_per_insert,
            rate_limiter.min_size_to_sample,
            rate_limiter.min_diff,
            rate_limiter.max_diff,
        )
    nbytes = None if max_bytes is None else checked_int("max_bytes", max_bytes)
    check_bytes(nbytes or 0)
    return size, times, limiter, nbytes


def list_items(connection: Connection, table: str) -> ItemInfo:
    """See `Client.items`."""
    number = connection.number(table)
    parts: list[npt.NDArray[Any]] = []
    cursor: int | None = 0
    while cursor is not None:
        cursor, part = connection.list_some(number, cursor)
        parts.append(part)
    listed = np.concatenate(parts)
    listed = listed[np.argsort(listed["seq"])]
    return ItemInfo(
        key=np.ascontiguousarray(listed["key"]),
        priority=np.ascontiguousarray(listed["priority"]),
        times_sampled=listed["times_sampled"].astype(np.int32),
        inserted=listed["inserted_ns"] * 1e-9,
    )


def fetch(connection: Connection, table: str, keys: npt.NDArray[np.uint64]) -> list[ReplaySample]:
    """See `Client.fetch`."""
    number = connection.number(table)
    found: list[ReplaySample] = []
    session = connection.take_session()
    try:
        for at in range(0, len(keys), PINS_AT_ONCE):
            batch = session.pin(number, keys[at : at + PINS_AT_ONCE])
            try:
                for i in range(len(batch)):
                    schema, arrays = item_arrays(connection, batch, i)
                    info = SampleInfo(*batch.info_of(i))
                    found.append(ReplaySample(info, schema.unflatten(arrays)))
            finally:
                batch.release()
    finally:
        connection.give_session(session)
    return found
