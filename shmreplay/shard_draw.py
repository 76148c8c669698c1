"""Draws from several shards as from one table: split by mass, asked at once, joined."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import numpy as np

from shmreplay import errors, limits, shard_batch, shard_near
from shmreplay.replay_sample import ReplaySample, SampleInfo
from shmreplay.reverb_types import TableInfo
from shmreplay.shard import Shard
from shmreplay.shard_group import ShardGroup

__all__ = ["Draw", "Stash", "draw", "draw_batch", "nothing_drawn"]

_SLICE_S = limits.WAIT_SLICE_MS / 1000

Ask = Callable[[Shard, int, float], tuple[int, Any]]
"""Asks a shard for n items, waiting so many seconds; gives how many it got, and the items."""


class Draw(NamedTuple):
    """What is asked of one shard."""

    shard: Shard

    n: int
    """Items."""

    share: float
    """The probability with which each of them was given to this shard."""

    others: int
    """Items in the tables of the other shards."""

    def info(self, info: SampleInfo) -> SampleInfo:
        """The info of a sample of the shard as that of all shards together."""
        return shard_batch.of_whole(info, self.shard.number, self.share, self.others)

    def whole(self, sample: ReplaySample) -> ReplaySample:
        """The same of a sample."""
        return ReplaySample(self.info(sample.info), sample.data)


def _split(
    shards: Sequence[Shard],
    infos: Sequence[TableInfo],
    held: set[int],
    n: int,
    random: np.random.Generator,
) -> list[Draw]:
    """Gives n draws to shards by mass; nothing where no shard but those in `held` has any."""
    weights = shard_near.weights(infos)
    weights[[shard.number in held for shard in shards]] = 0.0
    total = float(weights.sum())
    if not total > 0:
        return []
    shares = weights / total
    size = sum(info.current_size for info in infos)
    return [
        Draw(shard, int(count), float(share), size - info.current_size)
        for shard, info, share, count in zip(
            shards, infos, shares, random.multinomial(n, shares), strict=True
        )
        if count > 0
    ]


def ask_batch(table: str) -> Ask:
    """Asks for batches."""

    def ask(shard: Shard, n: int, left: float) -> tuple[int, Any]:
        batch = shard.draw(table, n, left)
        return (0, None) if batch is None else (shard_batch.length(batch), batch)

    return ask


def draw(
    group: ShardGroup,
    table: str,
    n: int,
    seconds: float | None,
    ask: Ask,
    keep: Callable[[Draw, Any], None],
    ended: Callable[[], bool],
) -> list[tuple[Draw, Any]]:
    """Draws n items, fewer or none where the time is over.

    Shards that have less than was asked of them, or are held back by their limiter, are passed
    over while others have something: what is left of the batch is split anew over those, and its
    probabilities are among them. Only then are they waited for.

    Args:
        group: The shards.
        table: Name of the table.
        n: Items.
        seconds: To wait; None: for ever.
        ask: Asks one shard.
        keep: Is given what was drawn, should the call fail.
        ended: Says whether to end early.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    got: list[tuple[Draw, Any]] = []
    held: set[int] | None = None
    tried = False
    try:
        while n > 0:
            shards = group.fresh(table)
            infos = group.of_table(table, shards)
            if held is None:
                held = {s.number for s, i in zip(shards, infos, strict=True) if i.sample_blocked_by}
            with group.lock:
                draws = _split(shards, infos, held, n, group.random)
            over = time.monotonic() >= end or ended()
            left = 0.0 if over else min(end - time.monotonic(), _SLICE_S)
            if draws:
                for each, (count, result) in _ask(group, draws, ask, left, keep):
                    n -= count
                    if count < each.n:
                        held.add(each.shard.number)
                    if count > 0:
                        got.append((each, result))
            elif over and tried:
                break
            elif any(info.current_size for info in infos):
                held = set()  # now wait for those
                continue
            else:
                time.sleep(min(left, limits.SHARD_POLL_S))  # others are to insert something
                group.look(shards)
            tried = True
    except BaseException:
        for each, result in got:
            keep(each, result)
        raise
    return got


def _ask(
    group: ShardGroup,
    draws: Sequence[Draw],
    ask: Ask,
    left: float,
    keep: Callable[[Draw, Any], None],
) -> list[tuple[Draw, tuple[int, Any]]]:
    """Asks shards at once, and waits for all."""
    # The last one in this thread: to hand work over and wait for it costs more than a local draw.
    *others, mine = draws
    futures = [group.submit(ask, each.shard, each.n, left) for each in others]
    result: tuple[int, Any] = (0, None)
    try:
        result = ask(mine.shard, mine.n, left)
        wait(futures)
        return [*zip(others, [future.result() for future in futures], strict=True), (mine, result)]
    except BaseException:
        # What the others give is not lost, be it there already or not.
        for each, future in zip(others, futures, strict=True):
            future.add_done_callback(functools.partial(_keep_late, keep, each))
        if result[0] > 0:
            keep(mine, result[1])
        raise


def _keep_late(
    keep: Callable[[Draw, Any], None], each: Draw, future: Future[tuple[int, Any]]
) -> None:
    if not future.cancelled() and future.exception() is None and future.result()[0] > 0:
        keep(each, future.result()[1])


def nothing_drawn(
    group: ShardGroup, table: str, seconds: float | None
) -> errors.DeadlineExceededError:
    """The error of a call that got nothing in time: says of each shard why."""
    reasons = []
    for shard in group.shards:
        info = shard.tables.get(table)
        if not shard.up:
            reason = f"is down: {shard.status.problem}"
        elif info is None or info.current_size == 0:
            reason = "has no items"
        else:
            reason = info.sample_blocked_by or f"has {info.current_size} items"
        reasons.append(f"{shard.name} {reason}")
    return errors.DeadlineExceededError(
        f"no sample of table {table!r} within {seconds} s: {'; '.join(reasons)};"
        " expected items that may be sampled. Insert more, or give a longer timeout."
    )


class Stash:
    """Batches that were drawn and not delivered, of tables whose items are not drawn again."""

    def __init__(self) -> None:
        """An empty one. Thread-safe."""
        self._waiting: dict[str, deque[ReplaySample]] = {}
        self._lock = threading.Lock()

    def keep(self, group: ShardGroup, table: str, batch: ReplaySample) -> None:
        """Puts a batch first, if its items are not drawn again."""
        infos = [shard.tables[table] for shard in group.shards if table in shard.tables]
        if any(i.max_times_sampled > 0 or i.sampler_options.epoch for i in infos):
            with self._lock:
                self._waiting.setdefault(table, deque()).appendleft(batch)

    def take(self, table: str, n: int) -> list[ReplaySample]:
        """At most n items, in their order."""
        parts: list[ReplaySample] = []
        with self._lock:
            waiting = self._waiting.get(table)
            while waiting and n > 0:
                batch = waiting.popleft()
                if (have := shard_batch.length(batch)) > n:
                    waiting.appendleft(shard_batch.rows(batch, slice(n, None)))
                    batch = shard_batch.rows(batch, slice(n))
                parts.append(batch)
                n -= have
        return parts

    def drop(self, table: str) -> None:
        """The table was emptied: nobody gets what was drawn before."""
        with self._lock:
            self._waiting.pop(table, None)


def draw_batch(
    group: ShardGroup,
    stash: Stash,
    table: str,
    n: int,
    seconds: float | None,
    out: Any,
    ended: Callable[[], bool],
) -> ReplaySample:
    """A batch of n items of all shards; short where the time is over.

    Raises:
        DeadlineExceededError: Nothing was drawn.
    """
    parts = stash.take(table, n)

    def keep(each: Draw, batch: Any) -> None:
        stash.keep(group, table, each.whole(batch))

    try:
        near = None if parts else shard_near.draw(group, table, n)
        if near is not None:
            batch = near.joined(group, out)
            if batch is not None:
                return batch
            near.deliver(parts)
        left = n - sum(map(shard_batch.length, parts))
        drawn = draw(group, table, left, seconds, ask_batch(table), keep, ended)
        parts += [each.whole(batch) for each, batch in drawn]
        if not parts:
            raise nothing_drawn(group, table, seconds)
        with group.lock:
            return shard_batch.join(parts, out, group.random)
    except BaseException:
        for part in reversed(parts):
            stash.keep(group, table, part)
        raise
