"""The settings of tables as messages, under Reverb's names.

Of Reverb's fields those that configure a table; what a checkpoint says of its items is in none of
them here (see FORMAT.md).
"""

from __future__ import annotations

from typing import Any, ClassVar

from shmreplay.cc.schema_pb2 import KeyDistributionOptions
from shmreplay.patterns import Message

__all__ = ["PriorityTableCheckpoint", "RateLimiterCheckpoint"]


class RateLimiterCheckpoint(Message):
    """The settings of a rate limiter."""

    samples_per_insert: float
    min_diff: float
    max_diff: float
    min_size_to_sample: int
    _FIELDS: ClassVar[dict[str, Any]] = {
        "samples_per_insert": float,
        "min_diff": float,
        "max_diff": float,
        "min_size_to_sample": int,
    }


class PriorityTableCheckpoint(Message):
    """The settings of a table."""

    table_name: str
    max_size: int
    max_times_sampled: int
    rate_limiter: RateLimiterCheckpoint
    sampler: KeyDistributionOptions
    remover: KeyDistributionOptions
    _FIELDS: ClassVar[dict[str, Any]] = {
        "table_name": str,
        "max_size": int,
        "max_times_sampled": int,
        "rate_limiter": RateLimiterCheckpoint,
        "sampler": KeyDistributionOptions,
        "remover": KeyDistributionOptions,
    }
