"""Changes by key of several shards: each key's to the shard that it names."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import errors
from shmreplay.binding_support import bad_priority
from shmreplay.client import Client
from shmreplay.inserting import checked_priorities
from shmreplay.shard import Shard
from shmreplay.shard_batch import checked_keys
from shmreplay.shard_group import ShardGroup

__all__ = ["mutate", "update"]


def update(
    group: ShardGroup, table: str, keys: Any, priorities: npt.ArrayLike, seconds: float | None
) -> int:
    """See `ShardedClient.update_priorities`."""
    array = checked_keys(keys, len(group.shards))
    values = checked_priorities(priorities, len(array))
    calls = {}
    for shard in _ready(group, table, values):
        mine = array["shard"] == shard.number
        if mine.any():
            calls[shard] = functools.partial(
                Client.update_priorities,
                table=table,
                keys=array["key"][mine],
                priorities=values[mine],
                timeout=seconds,
            )
    return sum(group.on_some(calls, _at_once(calls, table)))


def mutate(
    group: ShardGroup,
    table: str,
    updates: Mapping[Any, float] | None,
    deletes: Any,
    seconds: float | None,
) -> None:
    """See `ShardedClient.mutate_priorities`."""
    if updates is not None and not isinstance(updates, Mapping):
        raise errors.ArgumentTypeError(
            f"updates must be a dict, got {updates!r}. Use {{(shard, key): priority}}."
        )
    items = {} if updates is None else updates
    gone = checked_keys([] if deletes is None else deletes, len(group.shards))
    keys = checked_keys(list(items), len(group.shards))
    values = checked_priorities(list(items.values()), len(keys))
    calls = {}
    for shard in _ready(group, table, values):
        mine, going = keys["shard"] == shard.number, gone["shard"] == shard.number
        if mine.any() or going.any():
            pairs = zip(keys["key"][mine].tolist(), values[mine].tolist(), strict=True)
            calls[shard] = functools.partial(
                Client.mutate_priorities,
                table=table,
                updates=dict(pairs),
                deletes=gone["key"][going].tolist(),
                timeout=seconds,
            )
    group.on_some(calls, _at_once(calls, table))


def _at_once(shards: Iterable[Shard], table: str) -> list[Shard]:
    """Those that need no other thread to be waited for."""
    return [shard for shard in shards if shard.changes_at_once(table)]


def _ready(group: ShardGroup, table: str, values: npt.NDArray[np.float64]) -> list[Shard]:
    """The shards that are up, once it is sure that none of them refuses a priority.

    Raises:
        TableNotFoundError: One has no such table.
        PriorityError: One refuses one.
    """
    up = group.up()
    bad = np.isnan(values)
    for info in group.of_table(table, up):
        if "prioritized" in (info.sampler_options.kind, info.remover_options.kind):
            bad |= ~((values >= 0) & (values < math.inf))
    if bad.any():
        raise bad_priority(table, float(values[np.argmax(bad)]))
    return up
