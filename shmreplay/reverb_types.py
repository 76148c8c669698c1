"""What a table tells about itself.

In Reverb the parts of ``TableInfo`` are protocol buffers. Here they are plain values that answer
the same attributes, ``HasField`` and ``WhichOneof``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from shmreplay import protobuf, selectors
from shmreplay.errors import InvalidArgumentError

__all__ = [
    "Fifo",
    "Heap",
    "HeapOptions",
    "KeyDistributionOptions",
    "Lifo",
    "Prioritized",
    "PrioritizedOptions",
    "RateLimiterCallStats",
    "RateLimiterInfo",
    "SelectorType",
    "SpecNest",
    "TableCounts",
    "TableInfo",
    "TableWorkerTime",
    "Uniform",
    "insert_blocked_by",
    "sample_blocked_by",
    "selector_from_proto",
]

SelectorType: TypeAlias = selectors.Selector
"""A sampler or a remover."""

# Reverb has the selectors here as well.
Fifo = selectors.Fifo
Heap = selectors.Heap
Lifo = selectors.Lifo
Prioritized = selectors.Prioritized
Uniform = selectors.Uniform

SpecNest: TypeAlias = Any
"""A signature: a structure of ``spec.TensorSpec``, or of what ``spec.as_signature`` takes."""


@dataclasses.dataclass(frozen=True)
class PrioritizedOptions:
    """The settings of a prioritized selector."""

    priority_exponent: float = 0.0
    """The exponent that makes weights of priorities."""


@dataclasses.dataclass(frozen=True)
class HeapOptions:
    """The settings of a heap selector."""

    min_heap: bool = False
    """True for the lowest priority first, False for the highest."""


_DISTRIBUTIONS = ("fifo", "lifo", "uniform", "prioritized", "heap", "epoch")


@dataclasses.dataclass(frozen=True)
class KeyDistributionOptions:
    """How a selector selects. The options of the kinds that it is not have default values."""

    kind: str
    """One of ``selectors.KINDS``."""

    priority_exponent: float = 0.0
    """The exponent of a prioritized selector, else 0.0."""

    @property
    def fifo(self) -> bool:
        """Whether it selects the item inserted first."""
        return self.kind == "fifo"

    @property
    def lifo(self) -> bool:
        """Whether it selects the item inserted last."""
        return self.kind == "lifo"

    @property
    def uniform(self) -> bool:
        """Whether all items are equally likely."""
        return self.kind == "uniform"

    @property
    def epoch(self) -> bool:
        """Whether every item is selected once before any is selected again."""
        return self.kind == "epoch"

    @property
    def prioritized(self) -> PrioritizedOptions:
        """The settings if it selects by weight, else default values."""
        return PrioritizedOptions(self.priority_exponent)

    @property
    def heap(self) -> HeapOptions:
        """The settings if it selects by highest or lowest priority, else default values."""
        return HeapOptions(self.kind == "min_heap")

    @property
    def is_deterministic(self) -> bool:
        """Whether the same operations always select the same items."""
        return selectors.from_kind(self.kind, self.priority_exponent).is_deterministic

    def HasField(self, name: str) -> bool:
        """Returns whether the selector is of the named kind: fifo, lifo, uniform and so on.

        Args:
            name: Of the kind.

        Raises:
            ValueError: There is no such kind.
        """
        if name not in _DISTRIBUTIONS:
            raise ValueError(
                f"Got the field {name!r}; expected one of {list(_DISTRIBUTIONS)}. Use one of them."
            )
        return self.WhichOneof("distribution") == name

    def WhichOneof(self, group: str) -> str:
        """Returns the kind's name for the group ``'distribution'``: both heaps are ``'heap'``.

        Args:
            group: ``'distribution'``.

        Raises:
            ValueError: There is no such group.
        """
        if group != "distribution":
            raise ValueError(f"Got the group {group!r}; expected 'distribution'. Use that.")
        return "heap" if self.kind in ("min_heap", "max_heap") else self.kind


def selector_from_proto(s: Any) -> selectors.Selector:
    """Returns the selector of a message.

    Args:
        s: `KeyDistributionOptions`: of an info, Reverb's own, or of ``cc``.

    Raises:
        InvalidArgumentError: It is of no kind.
    """
    kind = s.WhichOneof("distribution")
    if kind == "heap":
        kind = "min_heap" if s.heap.min_heap else "max_heap"
    if kind not in selectors.KINDS:
        raise InvalidArgumentError(
            f"Got a selector of the kind {kind!r}; expected one of {list(selectors.KINDS)}. Set it."
        )
    exponent = s.prioritized.priority_exponent if kind == "prioritized" else 0.0
    return selectors.from_kind(kind, exponent)


@dataclasses.dataclass(frozen=True)
class RateLimiterCallStats:
    """How often calls of one kind passed the limiter."""

    completed: int = 0
    """Calls that passed since the table was made or reset."""


@dataclasses.dataclass(frozen=True)
class RateLimiterInfo:
    """The settings and counters of a table's limiter; see ``rate_limiters``."""

    samples_per_insert: float
    min_size_to_sample: int
    min_diff: float
    max_diff: float
    insert_stats: RateLimiterCallStats = RateLimiterCallStats()
    sample_stats: RateLimiterCallStats = RateLimiterCallStats()


@dataclasses.dataclass(frozen=True)
class TableWorkerTime:
    """Milliseconds that Reverb's worker thread spent; all zero, since tables here have none."""

    running_ms: int = 0
    sampling_ms: int = 0
    inserting_ms: int = 0
    sleeping_ms: int = 0
    waiting_for_sampling_ms: int = 0
    waiting_for_inserts_ms: int = 0


@dataclasses.dataclass(frozen=True)
class TableCounts:
    """The counters of a table at one moment."""

    inserts: int = 0
    """Items inserted since the table was made or reset."""

    samples: int = 0
    """Items sampled since the table was made or reset."""

    current_size: int = 0
    """Items in the table."""

    num_episodes: int = 0
    """Episodes that items in the table refer to."""

    num_deleted_episodes: int = 0
    """Episodes of which the last item was removed."""

    num_unique_samples: int = 0
    """Items that were sampled at least once."""

    sampling_mass: float = 0.0
    """The sum of the sampler's weights; see ``TableInfo``."""

    current_bytes: int = 0
    """Bytes that its items keep in memory; 0 for a table without ``max_bytes``."""


@dataclasses.dataclass
class TableInfo:
    """The settings and counters of a table at one moment."""

    name: str
    sampler_options: KeyDistributionOptions
    remover_options: KeyDistributionOptions
    max_size: int
    max_times_sampled: int
    rate_limiter_info: RateLimiterInfo
    signature: Any
    current_size: int
    num_episodes: int
    num_deleted_episodes: int
    num_unique_samples: int
    table_worker_time: TableWorkerTime

    insert_blocked_by: str = ""
    """Why the limiter would not let one more item in, and what would change that; else empty."""

    sample_blocked_by: str = ""
    """Why the limiter would not let one more sample be taken, and what would change that; else
    empty."""

    sampling_mass: float = 0.0
    """The sum of the sampler's weights over all items: of ``priority ** exponent`` if it is a
    prioritized one, else their number. By it `ShardedClient` splits a batch."""

    max_bytes: int = 0
    """Bound on ``current_bytes``; 0: none."""

    current_bytes: int = 0
    """Bytes that the items keep in memory, see ``Table``; 0 where there is no bound."""

    @classmethod
    def from_serialized_proto(cls, proto_string: bytes) -> TableInfo:
        """Reads a ``TableInfo`` of Reverb in its binary form.

        Args:
            proto_string: The message.

        Raises:
            InvalidArgumentError: It is none, or its signature has types that cannot be stored.
        """
        proto = protobuf.Message(proto_string)
        limiter, times = proto.message(5), proto.message(12)
        info = RateLimiterInfo(
            samples_per_insert=limiter.double(1),
            min_size_to_sample=limiter.integer(4),
            min_diff=limiter.double(2),
            max_diff=limiter.double(3),
            insert_stats=RateLimiterCallStats(limiter.message(5).integer(2)),
            sample_stats=RateLimiterCallStats(limiter.message(6).integer(2)),
        )
        size = proto.integer(7)
        return cls(
            name=proto.text(8),
            sampler_options=_options_of(proto.message(1)),
            remover_options=_options_of(proto.message(2)),
            max_size=proto.integer(3),
            max_times_sampled=proto.integer(4),
            rate_limiter_info=info,
            signature=protobuf.signature_of(proto.message(6)),
            current_size=size,
            num_episodes=proto.integer(9),
            num_deleted_episodes=proto.integer(10),
            num_unique_samples=proto.integer(11),
            table_worker_time=TableWorkerTime(*(times.integer(n) for n in range(1, 7))),
            insert_blocked_by=insert_blocked_by(info, size),
            sample_blocked_by=sample_blocked_by(info, size),
        )


def _options_of(proto: protobuf.Message) -> KeyDistributionOptions:
    """How a selector selects, as Reverb tells it."""
    for number, kind in ((1, "fifo"), (2, "uniform"), (6, "lifo")):
        if number in proto:
            return KeyDistributionOptions(kind)
    if 3 in proto:
        return KeyDistributionOptions("prioritized", proto.message(3).double(1))
    if 4 in proto:
        return KeyDistributionOptions("min_heap" if proto.message(4).integer(1) else "max_heap")
    raise InvalidArgumentError(
        "Got a TableInfo whose sampler or remover is of no known kind; expected fifo, lifo, "
        "uniform, prioritized or heap. Use one as server_info() gives."
    )


def insert_blocked_by(limiter: RateLimiterInfo, size: int) -> str:
    """Says why a limiter would not let one more item into a table of `size` items, if so.

    Args:
        limiter: With its counters.
        size: Items in the table.
    """
    diff = _diff(limiter)
    after = diff + limiter.samples_per_insert
    if size + 1 <= limiter.min_size_to_sample or after <= limiter.max_diff:
        return ""
    return (
        f"an insert would bring inserts * samples_per_insert - samples from {diff:g} to {after:g}, "
        f"above max_diff={limiter.max_diff:g}; sampling lets it go on"
    )


def sample_blocked_by(limiter: RateLimiterInfo, size: int) -> str:
    """Says why a limiter would not let one more sample be taken of `size` items, if so.

    Args:
        limiter: With its counters.
        size: Items in the table.
    """
    if size < limiter.min_size_to_sample:
        return (
            f"the table holds {size} items, below min_size_to_sample={limiter.min_size_to_sample}; "
            "inserting lets it go on"
        )
    diff = _diff(limiter)
    if diff - 1 >= limiter.min_diff:
        return ""
    return (
        f"a sample would bring inserts * samples_per_insert - samples from {diff:g} to "
        f"{diff - 1:g}, below min_diff={limiter.min_diff:g}; inserting lets it go on"
    )


def _diff(limiter: RateLimiterInfo) -> float:
    inserts, samples = limiter.insert_stats.completed, limiter.sample_stats.completed
    return inserts * limiter.samples_per_insert - samples
