"""The shards of a `ShardedClient` in one process: which are up, and calls on one or some."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, TypeVar

import numpy as np

from shmreplay import address, errors, limits
from shmreplay.client import Client
from shmreplay.reverb_types import RateLimiterCallStats, TableInfo
from shmreplay.shard import Shard

__all__ = ["ShardGroup", "checked_addresses", "merged"]

_Result = TypeVar("_Result")


class ShardGroup:
    """Several servers, and threads to call them at once. Thread-safe; not usable after a fork."""

    def __init__(
        self,
        addresses: Sequence[str],
        remotes: Sequence[address.RemoteOptions],
        random: np.random.Generator,
    ) -> None:
        """Does not connect.

        Args:
            addresses: Of the servers.
            remotes: How to use the bridge of each.
            random: For all that is drawn here; used under `lock`.
        """
        self.pid = os.getpid()
        self.lock: Final = threading.Lock()
        self.random = random
        self.shards = [
            Shard(i, *each) for i, each in enumerate(zip(addresses, remotes, strict=True))
        ]
        self.splits: dict[str, Any] = {}
        """By table, how `shard_near` splits its batches by the masses of the last look."""
        self.alike: tuple[Any, ...] = ()
        """Structures of items of several shards that `shard_near` found to be the same."""
        self._pool = ThreadPoolExecutor(
            min(4 * len(self.shards), limits.SHARD_THREADS), "shmreplay-shards"
        )
        # Each process begins elsewhere, so that many with few inserts spread them as well.
        self._turn = itertools.count(int(random.integers(len(self.shards))))
        self._closed = False
        self._connected = False
        self._connecting = threading.Lock()

    def close(self) -> None:
        """Leaves all servers. Idempotent."""
        self._closed = True
        if self.pid == os.getpid():
            for shard in self.shards:
                shard.close()
            self._pool.shutdown(wait=False)

    def submit(self, call: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Has another thread call something."""
        try:
            return self._pool.submit(call, *arguments)
        except RuntimeError:  # it was shut down meanwhile
            raise errors.ServerClosedError(
                "Got a call on a closed client; expected an open one: make a new ShardedClient"
            ) from None

    # ------------------------------------------------------------------ which are up

    def reach(self) -> list[Shard]:
        """The shards that are up. The first call connects to all, and waits for those to come."""
        if self._closed:
            raise errors.ServerClosedError(
                "Got a call on a closed client; expected an open one: make a new ShardedClient"
            )
        if not self._connected:
            with self._connecting:
                if not self._connected:
                    wait([self.submit(shard.look) for shard in self.shards])
                    self._connected = True
        return [shard for shard in self.shards if shard.up]

    def up(self) -> list[Shard]:
        """As `reach`.

        Raises:
            ServerClosedError: None is up; says of each why not.
        """
        up = self.reach()
        if not up:
            wait([self.submit(shard.look, limits.SHARD_RETRY_S) for shard in self.shards])
            up = self.reach()
        if not up:
            why = "; ".join(f"{s.name}: {s.status.problem}" for s in self.shards)
            raise errors.ServerClosedError(
                f"none of the {len(self.shards)} shards can be used, and nothing was done; expected"
                f" one at least. Start them again; they are found by themselves. {why}"
            )
        return up

    def fresh(self, table: str) -> list[Shard]:
        """The shards that are up, with masses that are not too old."""
        up = self.up()
        oldest = time.monotonic() - limits.SHARD_STALE_S
        old = [shard for shard in up if shard.looked_at < oldest or not shard.watched]
        if not old:
            return up
        self.look(old)
        for shard in old:
            shard.watch()
        return self.up()

    def look(self, shards: Sequence[Shard]) -> None:
        """Looks at the masses of some shards; does not wait long for those that do not answer."""
        wait([self.submit(shard.look) for shard in shards], limits.SHARD_STALE_S)

    def of_table(self, table: str, shards: Sequence[Shard]) -> list[TableInfo]:
        """What each of some shards knows of a table.

        Raises:
            TableNotFoundError: One has no such table.
        """
        infos = []
        for shard in shards:
            info = shard.tables.get(table) if isinstance(table, str) else None
            if info is None:
                raise errors.TableNotFoundError(
                    f"Got the table {table!r}, which is not on {shard.name}; use one of those"
                    " that there are,"
                    f" {sorted(shard.tables)}. A table of a ShardedClient must be on every shard."
                )
            infos.append(info)
        return infos

    # ------------------------------------------------------------------ calls

    def on_one(self, call: Callable[[Shard, float | None], _Result], timeout: Any) -> _Result:
        """Calls something of the next shard in turn, or of one after it where that is gone.

        The call is given the shard and the seconds that are left.
        """
        seconds = limits.checked_timeout(timeout)
        end = math.inf if seconds is None else time.monotonic() + seconds
        tried = False
        while True:
            up = self.up()
            shard = up[next(self._turn) % len(up)]
            # What was given, at first: messages name it.
            left = max(end - time.monotonic(), 0.0) if tried and seconds is not None else seconds
            result = shard.attempt(functools.partial(_in_list, call, shard, left))
            if result is not None:
                return result[0]
            tried = True

    def on_some(
        self, calls: Mapping[Shard, Callable[[Client], _Result]], at_once: Collection[Shard] = ()
    ) -> list[_Result]:
        """Calls something of some shards, at once; what a shard that is gone would give is missing.

        An error is raised once all have ended.

        Args:
            calls: What to call of each.
            at_once: Those that answer without waiting: in turn, in this thread.
        """
        if not calls:
            return []
        # The last one in this thread, which has to wait in any case.
        here = [shard for shard in calls if shard in at_once] or list(calls)[-1:]
        futures = {
            shard: self.submit(shard.attempt, call)
            for shard, call in calls.items()
            if shard not in here
        }
        results: dict[Shard, _Result | None] = {}
        failed: errors.ReverbError | None = None
        try:
            for shard in here:
                try:
                    results[shard] = shard.attempt(calls[shard])
                except errors.ReverbError as error:
                    failed = failed or error
        finally:
            wait(futures.values())
        if failed is not None:
            raise failed
        results |= {shard: future.result() for shard, future in futures.items()}
        found = [results[shard] for shard in calls]
        return [each for each in found if each is not None]


def _in_list(
    call: Callable[[Shard, float | None], _Result], shard: Shard, left: float | None, _: Client
) -> list[_Result]:
    """So that None for a shard that is gone is not taken for a result that is None."""
    return [call(shard, left)]


def checked_addresses(addresses: Any) -> list[str]:
    """Addresses of servers as a list.

    Raises:
        ArgumentTypeError: It is no list of strings.
        InvalidArgumentError: There are none, one is no address, or is there twice.
    """
    if isinstance(addresses, str) or not isinstance(addresses, Iterable):
        raise errors.ArgumentTypeError(
            f"Got the addresses {addresses!r}; expected a list of server addresses. Use [address]"
            " for one."
        )
    checked: list[str] = list(addresses)
    for each in checked:
        address.parse(each)
        if checked.count(each) > 1:
            raise errors.InvalidArgumentError(
                f"Got the address {each!r} twice; expected each once, as its items would count"
                " twice. Leave one out."
            )
    if not checked:
        raise errors.InvalidArgumentError(
            "Got no addresses; expected at least one server. Give server.address of each."
        )
    return checked


def merged(infos: Sequence[TableInfo]) -> TableInfo:
    """One table of several shards: sizes and counters of all, other settings of the first."""
    limiters = [info.rate_limiter_info for info in infos]
    limiter = dataclasses.replace(
        limiters[0],
        insert_stats=RateLimiterCallStats(sum(x.insert_stats.completed for x in limiters)),
        sample_stats=RateLimiterCallStats(sum(x.sample_stats.completed for x in limiters)),
    )

    def blocked(reasons: Sequence[str]) -> str:
        return "; ".join(reasons) if all(reasons) else ""

    return dataclasses.replace(
        infos[0],
        max_size=sum(x.max_size for x in infos),
        current_size=sum(x.current_size for x in infos),
        num_episodes=sum(x.num_episodes for x in infos),
        num_deleted_episodes=sum(x.num_deleted_episodes for x in infos),
        num_unique_samples=sum(x.num_unique_samples for x in infos),
        sampling_mass=sum(x.sampling_mass for x in infos),
        rate_limiter_info=limiter,
        insert_blocked_by=blocked([x.insert_blocked_by for x in infos]),
        sample_blocked_by=blocked([x.sample_blocked_by for x in infos]),
    )
