"""What is done to a table in use beside inserting and sampling: other settings."""

from __future__ import annotations

from typing import Any

from shmreplay.connection import Connection
from shmreplay.errors import InvalidArgumentError
from shmreplay.limits import checked_int
from shmreplay.rate_limiters import RateLimiter
from shmreplay.table import check_limiter, check_sizes


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
