"""Several servers as one: inserts are spread over them, and samples drawn from all by mass."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import address, errors, limits, shard_batch, shard_changes, shard_draw
from shmreplay.client import Client, checked_batch_size, checked_num_samples
from shmreplay.replay_sample import ReplaySample
from shmreplay.reverb_types import TableInfo
from shmreplay.sampler import Prefetched, Sampler
from shmreplay.shard import Shard, ShardStatus
from shmreplay.shard_group import ShardGroup, checked_addresses, merged
from shmreplay.structured_writer import Config, StructuredWriter
from shmreplay.trajectory_writer import TrajectoryWriter

__all__ = ["ShardedClient"]


class ShardedClient:
    """A way to several servers with the same tables, as if they were one.

    Thread-safe, picklable by addresses, usable after a fork, as `Client`.

    Inserts go to the shards in turn; a writer stays with one, so that its steps are stored once.
    A batch is split over the shards at random by the mass of the table on each (the sum of
    ``priority ** exponent``, or its size), so that every item is as likely as in one large table.
    `info.probability` is the share of the item's shard, by the masses that the batch was split by,
    times the probability within the shard: that with which the item really was selected, however
    old the masses were. Masses are asked for four times a second, and at most about
    `limits.SHARD_STALE_S` old; what ages with them is how close the split is to proportional: if
    no shard's mass has changed by more than a fraction e since, no item was more likely than
    (1 + e) / (1 - e) times what it should have been, nor less likely than the inverse.

    Keys are (shard, key): `info.key` of a batch is an array of dtype `shard_batch.KEY_DTYPE`, of a
    single sample a tuple. Each shard has its own rate limiter; where it holds samples back, the
    others give the rest of the batch, with probabilities among themselves.

    A shard that fails is left out, with a warning in the log, until it is back; `shards` tells.
    A call fails only where all are down. A process that dies is noticed at once, a host that falls
    silent after `limits.BRIDGE_LOST_S`; calls that are with it then wait as long.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        remote: address.RemoteOptions | Sequence[address.RemoteOptions] | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        """Does not connect: the first call does, and waits for servers that are not up yet.

        Args:
            addresses: Of the servers, as for `Client`. Their order numbers the shards, so keep it
                where keys go from one process to another.
            remote: How to use their bridges; one for all, or one each. Its `timeout` is how long a
                shard may be out of reach before calls on it fail, and how long the first call
                waits for one; by default `limits.SHARD_LOST_S`.
            seed: Of how batches are split over the shards. None: from the system.

        Raises:
            ArgumentTypeError: An address is not a string.
            InvalidArgumentError: An address is none or is there twice, there are none, or there
                are not as many `remote` as addresses.
        """
        self._addresses = checked_addresses(addresses)
        if remote is None:
            remote = address.RemoteOptions(timeout=limits.SHARD_LOST_S)
        if isinstance(remote, address.RemoteOptions):
            remote = [remote] * len(self._addresses)
        self._remotes = list(remote)
        if len(self._remotes) != len(self._addresses):
            raise errors.InvalidArgumentError(
                f"Got {len(self._remotes)} RemoteOptions for {len(self._addresses)} servers;"
                " expected as many. Give one for each, or one for all."
            )
        self._seed = seed
        self._closed = False
        self._begin(np.random.default_rng(seed))

    def _begin(self, random: np.random.Generator) -> None:
        """All that is of this process alone."""
        self._group = ShardGroup(self._addresses, self._remotes, random)
        self._stash = shard_draw.Stash()

    def _shards(self) -> ShardGroup:
        """The shards, for this process."""
        if self._group.pid != os.getpid():
            # In a forked child: what was inherited belongs to the parent. Other draws than there.
            entropy = None if self._seed is None else (self._seed, os.getpid())
            self._begin(np.random.default_rng(entropy))
            if self._closed:
                self._group.close()
        return self._group

    def __reduce__(self) -> tuple[Callable[..., ShardedClient], tuple[Any, ...]]:
        """Pickles by addresses."""
        make = functools.partial(type(self), seed=self._seed)
        return make, (self._addresses, self._remotes)

    def __repr__(self) -> str:
        """Names the addresses."""
        return f"ShardedClient({self._addresses})"

    def __enter__(self) -> ShardedClient:
        """Returns the client."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the client."""
        self.close()

    def close(self) -> None:
        """Leaves all servers. Idempotent."""
        self._closed = True
        self._group.close()

    @property
    def server_addresses(self) -> list[str]:
        """The addresses that the client was made with."""
        return list(self._addresses)

    @property
    def shards(self) -> list[ShardStatus]:
        """How each shard is, as known at this moment; connects where nobody has yet."""
        group = self._shards()
        group.reach()
        return [shard.status for shard in group.shards]

    # ------------------------------------------------------------------ inserting

    def insert(
        self, data: Any, priorities: Mapping[str, float | None], timeout: float | None = None
    ) -> None:
        """Inserts one step as an item into each of some tables of one shard; see `Client.insert`.

        If the shard dies meanwhile, the step goes to another one. Should the first be recovered
        with what it had, the step may then be there twice.

        Args:
            data: The step: a structure of arrays.
            priorities: Table name to priority; None: the largest so far.
            timeout: Seconds to wait at most; None: for ever.

        Raises:
            ServerClosedError: All shards are down.
        """
        self._shards().on_one(
            lambda shard, left: shard.client.insert(data, priorities, left), timeout
        )

    def insert_batch(
        self,
        table: str,
        data: Any,
        priorities: float | npt.ArrayLike | None = 1.0,
        timeout: float | None = None,
    ) -> npt.NDArray[Any]:
        """Inserts N items at once into one shard; see `Client.insert_batch` and `insert`.

        Args:
            table: Its name.
            data: A structure of arrays [N, ...].
            priorities: One for all, or [N]; None: the largest so far.
            timeout: Seconds to wait at most; None: for ever.

        Returns:
            Keys, [N] of `shard_batch.KEY_DTYPE`.

        Raises:
            ServerClosedError: All shards are down.
        """

        def insert(shard: Shard, left: float | None) -> npt.NDArray[Any]:
            return shard_batch.keys_of(
                shard.number, shard.client.insert_batch(table, data, priorities, left)
            )

        return self._shards().on_one(insert, timeout)

    def trajectory_writer(self, num_keep_alive_refs: int, **options: Any) -> TrajectoryWriter:
        """A writer to the next shard in turn; see `Client.trajectory_writer`.

        It stays with its shard, and fails with it: make a new one then, which goes to another. The
        keys that it returns are of that shard alone, those of samples say which it is.

        Args:
            num_keep_alive_refs: Steps that items may reach back.
            **options: Further ones of `Client.trajectory_writer`.

        Raises:
            ServerClosedError: All shards are down.
        """
        return self._shards().on_one(
            lambda shard, _: shard.client.trajectory_writer(num_keep_alive_refs, **options), None
        )

    def structured_writer(self, configs: Sequence[Config]) -> StructuredWriter:
        """A writer by patterns to the next shard in turn; see `Client.structured_writer`.

        Args:
            configs: As `structured.create_config` makes them.

        Raises:
            ServerClosedError: All shards are down.
        """
        return self._shards().on_one(lambda shard, _: shard.client.structured_writer(configs), None)

    # ------------------------------------------------------------------ sampling

    def sample(
        self,
        table: str,
        num_samples: int = 1,
        *,
        emit_timesteps: bool = True,
        unpack_as_table_signature: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Any]:
        """Samples items one by one; see `Client.sample`.

        Args:
            table: Its name.
            num_samples: Items to draw.
            emit_timesteps: Give each item as a list of its steps.
            unpack_as_table_signature: Give data the structure of the signature, not flat.
            timeout: Seconds to wait at most; None: for ever.

        Raises:
            ServerClosedError: All shards are down.
        """
        n = checked_num_samples(num_samples)
        seconds = limits.checked_timeout(timeout)
        group = self._shards()
        group.of_table(table, group.up())

        def ask(shard: Shard, n: int, left: float) -> tuple[int, Any]:
            def one(client: Client) -> list[Any]:
                return list(
                    client.sample(
                        table,
                        emit_timesteps=emit_timesteps,
                        unpack_as_table_signature=unpack_as_table_signature,
                        timeout=left,
                    )
                )

            try:
                items = shard.attempt(one) or []
            except errors.DeadlineExceededError:
                items = []
            return len(items), items

        return self._samples(table, n, seconds, emit_timesteps, ask)

    def _samples(
        self, table: str, n: int, seconds: float | None, in_steps: bool, ask: shard_draw.Ask
    ) -> Iterator[Any]:
        for _ in range(n):
            group = self._shards()
            drawn = shard_draw.draw(group, table, 1, seconds, ask, _not_kept, _never)
            if not drawn:
                raise shard_draw.nothing_drawn(group, table, seconds)
            ((each, (item,)),) = drawn
            yield [each.whole(step) for step in item] if in_steps else each.whole(item)

    def sample_batch(
        self, table: str, batch_size: int, timeout: float | None = None, out: Any = None
    ) -> ReplaySample:
        """Samples a batch as stacked arrays, of all shards; see `Client.sample_batch`.

        Its rows are mixed, whatever shard they come from; those of one shard are in its order.

        Args:
            table: Its name.
            batch_size: Items to draw.
            timeout: Seconds to wait at most; None: for ever.
            out: Structure of arrays to write to; None: new ones.

        Raises:
            ServerClosedError: All shards are down.
        """
        n, seconds = checked_batch_size(batch_size), limits.checked_timeout(timeout)
        return shard_draw.draw_batch(self._shards(), self._stash, table, n, seconds, out, _never)

    def sampler(
        self, table: str, batch_size: int, prefetch: int = 2, timeout: float | None = None
    ) -> Sampler:
        """An iterator of batches of all shards, gathered ahead by a thread; see `Client.sampler`.

        Args:
            table: Its name.
            batch_size: Items of a batch.
            prefetch: Batches to gather ahead.
            timeout: Seconds to wait at most; None: for ever.

        Raises:
            ServerClosedError: All shards are down.
        """
        n, seconds = checked_batch_size(batch_size), limits.checked_timeout(timeout)
        group, stash = self._shards(), self._stash
        group.of_table(table, group.up())

        def draw(ended: Callable[[], bool]) -> Prefetched | None:
            try:
                batch = shard_draw.draw_batch(group, stash, table, n, seconds, None, ended)
            except errors.DeadlineExceededError:
                if ended():
                    return None
                raise
            return Prefetched(batch, _nothing, lambda: stash.keep(group, table, batch))

        return Sampler(draw, prefetch)

    # ------------------------------------------------------------------ changing by key

    def update_priorities(
        self, table: str, keys: Any, priorities: npt.ArrayLike, timeout: float | None = None
    ) -> int:
        """Sets new priorities, each on the shard that its key is of; see `Client`.

        Keys of shards that are down are skipped, as are those that are not there any more.

        Args:
            table: Name of the table.
            keys: `info.key`, [N] of `shard_batch.KEY_DTYPE`, or a list of (shard, key).
            priorities: float[N], or one for all.
            timeout: Seconds to wait where the table's extensions are behind; None: for ever.

        Returns:
            Number of keys that were found.

        Raises:
            ArgumentTypeError: Keys do not name their shard.
            PriorityError: A priority is bad. Nothing was changed.
            ServerClosedError: All shards are down.
        """
        seconds = limits.checked_timeout(timeout)
        return shard_changes.update(self._shards(), table, keys, priorities, seconds)

    def mutate_priorities(
        self,
        table: str,
        updates: Mapping[Any, float] | None = None,
        deletes: Sequence[Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Deletes items, then updates priorities; see `Client.mutate_priorities`.

        Args:
            table: Name of the table.
            updates: (shard, key) -> new priority.
            deletes: Keys, as for `update_priorities`.
            timeout: Seconds to wait where the table's extensions are behind; None: for ever.

        Raises:
            ArgumentTypeError: Keys do not name their shard.
            PriorityError: A priority is bad. Nothing was changed.
            ServerClosedError: All shards are down.
        """
        seconds = limits.checked_timeout(timeout)
        shard_changes.mutate(self._shards(), table, updates, deletes, seconds)

    def reset(self, table: str, timeout: float | None = None) -> None:
        """Empties the table on the shards that are up; one that is down keeps its items.

        Args:
            table: Its name.
            timeout: Seconds to wait at most; None: for ever.

        Raises:
            TableNotFoundError: A shard has no such table. Nothing was changed.
            DeadlineExceededError: The table's extensions are behind.
            ServerClosedError: All shards are down.
        """
        seconds = limits.checked_timeout(timeout)
        group = self._shards()
        up = group.up()
        group.of_table(table, up)
        reset = functools.partial(Client.reset, table=table, timeout=seconds)
        group.on_some(dict.fromkeys(up, reset))
        self._stash.drop(table)
        group.look(up)

    # ------------------------------------------------------------------ looking

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """Settings and counters of every table that is on all shards that are up.

        Sizes, bounds of sizes and counters are those of all together, other settings those of the
        first.

        Args:
            timeout: Seconds to wait at most; None: for ever.

        Raises:
            ServerClosedError: All shards are down.
        """
        seconds = limits.checked_timeout(timeout)
        info = functools.partial(Client.server_info, timeout=seconds)
        group = self._shards()
        infos: list[dict[str, TableInfo]] = []
        while not infos:  # until `up` raises, where those that were up have failed just now
            infos = group.on_some(dict.fromkeys(group.up(), info))
        names = [name for name in infos[0] if all(name in each for each in infos)]
        return {name: merged([each[name] for each in infos]) for name in names}

    def checkpoint(self) -> list[str]:
        """Saves the tables of each shard that is up; see `Client.checkpoint`.

        Returns:
            Where each shard that is up has saved them, in the order of the shards.

        Raises:
            InvalidArgumentError: A server has no checkpointer.
            ServerClosedError: All shards are down.
        """
        group = self._shards()
        return group.on_some(dict.fromkeys(group.up(), Client.checkpoint))


def _nothing() -> None:
    """Delivering a batch asks for nothing: it is the caller's already."""


def _never() -> bool:
    """Such a call ends when it is done, or its time is over."""
    return False


def _not_kept(each: shard_draw.Draw, items: Any) -> None:
    """A call for one item fails before it has any."""
