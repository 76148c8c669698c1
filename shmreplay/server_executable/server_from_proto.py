"""Tables, selectors and limiters of messages: those of `cc`, or others of the same fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shmreplay.rate_limiters import RateLimiter
from shmreplay.reverb_types import selector_from_proto
from shmreplay.table import Table

__all__ = ["rate_limiter_from_proto", "selector_from_proto", "tables_from_proto"]


def rate_limiter_from_proto(proto: Any) -> RateLimiter:
    """Returns the limiter of a `RateLimiterCheckpoint` or a `RateLimiterInfo`.

    Raises:
        InvalidArgumentError: A number is out of range.
    """
    return RateLimiter(
        samples_per_insert=proto.samples_per_insert,
        min_size_to_sample=proto.min_size_to_sample,
        min_diff=proto.min_diff,
        max_diff=proto.max_diff,
    )


def tables_from_proto(configs: Iterable[Any]) -> list[Table]:
    """Returns a table, without a signature, for each `PriorityTableCheckpoint`.

    Raises:
        InvalidArgumentError: A setting is out of range, or a selector is of no kind.
    """
    return [
        Table(
            name=config.table_name,
            sampler=selector_from_proto(config.sampler),
            remover=selector_from_proto(config.remover),
            max_size=config.max_size,
            max_times_sampled=config.max_times_sampled,
            rate_limiter=rate_limiter_from_proto(config.rate_limiter),
        )
        for config in configs
    ]
