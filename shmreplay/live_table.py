"""What is done to a table in use beside inserting and sampling: settings, listing, fetching."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmreplay.batches import item_arrays
from shmreplay.connection import Connection
from shmreplay.errors import InvalidArgumentError
from shmreplay.limits import checked_int
from shmreplay.rate_limiters import RateLimiter
from shmreplay.replay_sample import ItemInfo, ReplaySample, SampleInfo
from shmreplay.table import check_limiter, check_sizes

# As the core writes it (sr_listed).
_LISTED: Final = np.dtype(
    [
        ("key", np.uint64),
        ("seq", np.uint64),
        ("inserted_ns", np.uint64),
        ("priority", np.float64),
        ("times_sampled", np.uint32),
        ("pad", np.uint32),
    ]
)
# Slots looked through, and items pinned, at a time: others work on the table in between.
_SLOTS_AT_ONCE: Final = 4096
_PINS_AT_ONCE: Final = 256


def configure(
    connection: Connection,
    table: str,
    max_size: Any,
    max_times_sampled: Any,
    rate_limiter: RateLimiter | None,
) -> None:
    """See `Client.configure_table`."""
    number = connection.number(table)
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
    limit = connection.native.table_info(number)["max_size_limit"]
    if size is not None and size > limit:
        raise InvalidArgumentError(
            f"Got max_size {size} for table {table!r}; expected at most {limit}. A table's address"
            " space is reserved when its server starts, for eight times the max_size that it was"
            " declared with, or for what the server's capacity can hold. Declare a larger max_size"
            " (memory is taken only as items come), or a larger capacity."
        )
    session = connection.take_session()
    try:
        session.configure(number, size, times, limiter)
    finally:
        connection.give_session(session)


def list_items(connection: Connection, table: str) -> ItemInfo:
    """See `Client.items`."""
    number = connection.number(table)
    parts: list[npt.NDArray[Any]] = []
    cursor: int | None = 0
    while cursor is not None:
        part = np.empty(_SLOTS_AT_ONCE, _LISTED)
        cursor, n = connection.native.list_some(number, cursor, part)
        parts.append(part[:n])
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
        for at in range(0, len(keys), _PINS_AT_ONCE):
            batch = session.pin(number, keys[at : at + _PINS_AT_ONCE])
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
