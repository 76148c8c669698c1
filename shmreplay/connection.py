"""One process's connection to one store: tables by name, sessions at rest, schemas read.

What server, clients, writers and samplers of a process have in common. Thread-safe.
"""

from __future__ import annotations

import atexit
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmreplay import (
    _native,
    errors,
    item_schema,
    lease,
    limits,
    overview,
    recovery,
    reverb_types,
    tree,
)
from shmreplay.binding_support import table_not_found
from shmreplay.checkpoint import Saved, save
from shmreplay.checkpointers import CheckpointSettings
from shmreplay.item_schema import ItemSchema, Leaf
from shmreplay.spec import fit_text
from shmreplay.store import Store
from shmreplay.table import Changeable, TableConfig
from shmreplay.table_checks import checked_compress

# As the core writes it (sr_listed).
LISTED: Final = np.dtype(
    [
        ("key", np.uint64),
        ("seq", np.uint64),
        ("inserted_ns", np.uint64),
        ("priority", np.float64),
        ("times_sampled", np.uint32),
        ("pad", np.uint32),
    ]
)
# Slots looked through at a time: others work on the table in between.
_SLOTS_AT_ONCE: Final = 4096

Limiter = tuple[float, int, float, float]
"""The numbers of a rate limiter, in the order of its arguments."""


class _Hold:
    """Keeps this process attached to the store as long as anything refers to it.

    The connection does, and each of its sessions: a writer or a borrowed view may outlive the
    client that it came from, and its memory must not go to others meanwhile.
    """

    def __init__(self, store: Store) -> None:
        # Not at exit: a store that is still attached then is left as it is.
        weakref.finalize(self, store.release).atexit = False


class _IdleSessions(list[_native.Session]):
    """Sessions at rest. After the connection was closed, those that come back are closed too."""

    closed = False

    def append(self, session: _native.Session) -> None:
        if self.closed:
            session.close()
        else:
            super().append(session)


def stopped(address: str) -> errors.ServerClosedError:
    """The error for work on a store that its server closed."""
    return errors.ServerClosedError(
        f"Got work for {address!r}; expected an open store, but the server has closed this store: "
        "its memory and its items"
        " are gone. Start it again; a Client then goes on with its next call, and writers and"
        " samplers are to be made anew of it."
    )


class WaitLog:
    """Says in the log, once a wait has lasted, what it waits for; and again from time to time."""

    def __init__(self, describe: Callable[[], str]) -> None:
        """Takes what says what is waited for; the wait begins now."""
        self._describe = describe
        self._started = time.monotonic()
        self._next = self._started + limits.WAIT_LOG_AFTER_S

    def tick(self) -> None:
        """Called between two slices of the wait."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + limits.WAIT_LOG_EVERY_S
            _native.logger.warning("waiting for %.1f s: %s", now - self._started, self._describe())


class Connection:
    """A hold on a `Store` and what is known about it. Closed once; forked copies refuse to work."""

    make_writer: Callable[..., Any] | None = None
    """Makes trajectory writers where a `TrajectoryWriter` will not do."""

    make_sampler: Callable[..., Any] | None = None
    """Makes samplers where a `Sampler` will not do."""

    def __init__(self, store: Store) -> None:
        """Takes over one reference to the store."""
        self.store = store
        self._hold: _Hold | None = _Hold(store)
        self.native = store.native
        self.configs: list[TableConfig] = list(store.tables)
        self.tables: dict[str, int] = {c.name: i for i, c in enumerate(self.configs)}
        self.episode_base = secrets.randbits(62)
        self._idle = _IdleSessions()
        self._schemas: dict[int, ItemSchema] = {}
        self._checks: dict[int, Callable[[Sequence[Leaf]], list[int | None] | None] | None] = {}
        # Of flat dicts only: keys and columns say everything about such a structure.
        self._interned: dict[tuple[Any, ...], int] = {}
        self._lock = threading.Lock()
        self._closed = False
        _connections.add(self)

    # ------------------------------------------------------------------ sessions

    def take_session(self) -> _native.Session:
        """A session for one operation; give it back with `give_session`."""
        try:
            return self._idle.pop()
        except IndexError:
            return self.new_session(_native.SESSION_CLIENT)

    def new_session(self, kind: int) -> _native.Session:
        """A session of its own, which keeps the process attached until it is closed."""
        self.check_open()
        session = _native.Session(self.store.native, kind)
        session.hold = self._hold
        return session

    def give_session(self, session: _native.Session) -> None:
        """Returns a session that holds nothing."""
        self._idle.append(session)

    @property
    def idle(self) -> list[_native.Session]:
        """Sessions at rest; a batch that is lent appends its session here when it ends."""
        return self._idle

    @property
    def unusable(self) -> bool:
        """Closed, inherited through a fork, or of a store whose server was stopped."""
        return self._closed or self.store.forked or self.native.closed

    @property
    def reachable(self) -> bool:
        """Whether a request would be on its way at once: a store of this machine always is."""
        return not self.unusable

    def check_open(self) -> None:
        """Refuses work on a connection that cannot be used.

        Raises:
            ForkedHandleError: This process got it from its parent.
            ServerClosedError: It was closed, or the server was stopped.
        """
        self.store.check_fork()
        if self.native.closed:
            raise stopped(self.store.address)
        if self._closed:
            raise errors.ServerClosedError(
                f"Got a call on a client of {self.store.address!r} that is closed; expected an "
                "open one; make a new Client to go on working with the store."
            )

    def close(self) -> None:
        """Gives sessions and store back. Idempotent. What is borrowed stays valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.close_idle()
        self._hold = None

    def close_idle(self) -> None:
        """Gives back the sessions at rest, and from now on each one when it comes to rest."""
        self._idle.closed = True
        while self._idle:
            self._idle.pop().close()

    def next_episode(self) -> int:
        """Number of a new episode."""
        with self._lock:
            self.episode_base += 1 << 32
            return self.episode_base

    # ------------------------------------------------------------------ tables

    def number(self, table: str) -> int:
        """Number of the table of this name.

        Raises:
            TableNotFoundError: There is none; names those that there are.
            ArgumentTypeError: The name is not a string.
        """
        number = self.tables.get(table) if isinstance(table, str) else None
        if number is None:
            raise table_not_found(table, self.tables)
        return number

    def info(self, number: int) -> reverb_types.TableInfo:
        """Settings and counters of a table at this moment."""
        self.check_open()
        i = self.native.table_info(number)
        return self.configs[number].info(
            reverb_types.TableCounts(
                inserts=i["inserts"],
                samples=i["samples"],
                current_size=i["size"],
                num_episodes=i["num_episodes"],
                num_deleted_episodes=i["num_deleted_episodes"],
                num_unique_samples=i["num_unique_samples"],
                sampling_mass=i["mass"],
                current_bytes=i["data_bytes"],
            ),
            Changeable(**{name: i[name] for name in Changeable._fields}),
        )

    def max_priority(self, number: int) -> float:
        """The largest priority that a table has seen since it was made or reset."""
        return float(self.native.table_info(number)["max_priority"])

    def consumes(self, number: int, batch: Any) -> bool:
        """Whether the items of a batch are not drawn again: where that fails, they must be kept."""
        return self.native.consumes(number)

    def list_some(self, number: int, cursor: int) -> tuple[int | None, npt.NDArray[Any]]:
        """Some of a table's items, of dtype `LISTED`, and from where to go on (None: the end).

        0 begins.
        """
        part = np.empty(_SLOTS_AT_ONCE, LISTED)
        after, n = self.native.list_some(number, cursor, part)
        return after, part[:n]

    def configure(
        self,
        number: int,
        max_size: int | None,
        max_times_sampled: int | None,
        limiter: Limiter | None,
        max_bytes: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Gives a table those settings that are not None.

        Args:
            number: Of the table.
            max_size: Checked, but for how far this table can grow.
            max_times_sampled: Checked.
            limiter: Checked.
            max_bytes: Checked.
            timeout: Seconds to wait where the table's extensions are behind; None: for ever.

        Raises:
            InvalidArgumentError: The table cannot grow so far.
            DeadlineExceededError: Its extensions are behind still. No setting was changed.
        """
        limit = self.native.table_info(number)["max_size_limit"]
        if max_size is not None and max_size > limit:
            raise errors.InvalidArgumentError(
                f"Got max_size {max_size} for table {self.configs[number].name!r}; expected at most"
                f" {limit}. A table's address space is reserved when its server starts, for eight"
                " times the max_size that it was declared with, or for what the server's capacity"
                " can hold. Declare a larger max_size (memory is taken only as items come), or a"
                " larger capacity."
            )
        session = self.take_session()
        try:
            session.configure(number, max_size, max_times_sampled, limiter, max_bytes, timeout)
        finally:
            self.give_session(session)

    def check(self, number: int | None) -> None:
        """Walks all invariants of a table, or of the whole store.

        Raises:
            TableCorruptedError: One does not hold; says which.
            ServerClosedError: The server was stopped.
        """
        self.check_open()
        self.native.check(number)

    def describe_wait(self, number: int, what: str) -> Callable[[], str]:
        """A function that says what a call waits for, with table, limiter and counts."""

        def describe() -> str:
            i = self.native.table_info(number)
            name = self.configs[number].name
            if self.native.events_behind(number):
                return (
                    f"{what} on table {name!r} waits: its extensions are behind, as "
                    f"{i['events']} changes wait for them (at most {i['events_capacity']}); make "
                    "them faster, or make fewer changes"
                )
            diff = i["inserts"] * i["samples_per_insert"] - i["samples"]
            return (
                f"{what} on table {name!r} is held back by its rate limiter: "
                f"samples_per_insert={i['samples_per_insert']:g}, "
                f"min_size_to_sample={i['min_size_to_sample']}, min_diff={i['min_diff']:g}, "
                f"max_diff={i['max_diff']:g}; now size={i['size']}, inserts={i['inserts']}, "
                f"samples={i['samples']}, deletes={i['deletes']}, inserts * samples_per_insert "
                f"- samples = {diff:g}{_what_helps(i, diff)}; "
                f"{lease.describe(self.store.participants())}"
            )

        return describe

    def compresses(self, asked: str | None) -> bool:
        """Whether a writer that was told this compresses: by default, if a table wants it."""
        if checked_compress(asked) is None:
            return any(config.compress == "lz4" for config in self.configs)
        return asked == "lz4"

    # ------------------------------------------------------------------ schemas

    def schema(self, number: int) -> ItemSchema:
        """The item structure of this number."""
        found = self._schemas.get(number)
        if found is None:
            found = item_schema.decode(self.native.schema_text(number))
            self._schemas[number] = found
        return found

    def intern(self, structure: Any, leaves: Sequence[Leaf]) -> int:
        """Number of an item structure, recorded in the store if it is new."""
        flat = type(structure) is dict and not any(map(tree.is_nested, structure.values()))
        key = (tuple(structure), tuple(leaves)) if flat else None
        if key is not None and key in self._interned:
            return self._interned[key]
        number = self.native.schema_intern(item_schema.encode(structure, leaves))
        if key is not None:
            self._interned[key] = number
        return number

    def check_signature(self, number: int, leaves: Sequence[Leaf]) -> list[int | None] | None:
        """Checks an item's columns against the table's signature, if it has one."""
        if number not in self._checks:
            config = self.configs[number]
            signature = config.signature()
            self._checks[number] = (
                None
                if signature is None
                else item_schema.make_signature_check(config.name, signature)
            )
        check = self._checks[number]
        return None if check is None else check(leaves)

    def fit_texts(self, number: int, columns: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Pads the columns of text to the widths of the table's signature, if it has one.

        Args:
            number: Of the table.
            columns: Of an item, or of a batch of them, in the order of the signature's leaves.

        Raises:
            SignatureError: A text is longer.
        """
        if not any(column.dtype.kind in "SU" for column in columns):
            return columns
        signature = self.configs[number].signature()
        specs = [] if signature is None else tree.flatten_with_path(signature)
        if len(specs) != len(columns):
            return columns  # which check_signature says better
        return [
            fit_text(column, spec.dtype, path)
            for column, (path, spec) in zip(columns, specs, strict=True)
        ]

    def text_dtype(self, path: tree.Path, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of a writer's column of text.

        Args:
            path: Of the column.
            dtype: Of its first value.

        Returns:
            What the signatures of the tables have at this path, if they have text of this kind, of
            one width that is enough; else that of the first value.
        """
        found = set()
        for config in self.configs:
            for where, spec in tree.flatten_with_path(config.signature()):
                if where == path and spec is not None and spec.dtype.kind == dtype.kind:
                    found.add(spec.dtype)
        wanted = found.pop() if len(found) == 1 else dtype
        return wanted if wanted.itemsize >= dtype.itemsize else dtype

    def checkpoint(self) -> str:
        """Writes a checkpoint as the store's server was told to, and returns its path.

        Raises:
            InvalidArgumentError: A group is to own it.
            CheckpointError: It could not be written.
        """
        return self.save().path

    def save(self) -> Saved:
        """The same, and says what it took."""
        self.check_open()
        text = _native.checkpointer(self.native)
        settings = CheckpointSettings("") if text is None else CheckpointSettings.from_json(text)
        return save(self.native, self.configs, settings, self.store.reclaim_dead, self._hold)

    def stats(self) -> dict[str, float]:
        """Counters of the store and of each table: a flat dict of numbers, units in the names.

        See `counters` for what each of them means.
        Every byte that the store has committed is in one of ``fixed_bytes``, each table's
        ``TABLE/index_bytes`` (slots and selectors), ``block_bytes`` and ``trajectory_bytes`` (of
        items), ``pinned_bytes`` (the same where only sessions refer to them: samples that are in
        use, and steps that no item has yet), ``episode_bytes``, ``ledger_bytes`` (notes of who
        refers to what), ``schema_bytes``, ``margin_bytes``, ``fragmented_bytes`` (free between
        others) and ``free_bytes``: they add up to ``committed_bytes``, at one moment.
        ``TABLE/data_bytes`` is what the items of a table keep that has ``max_bytes``.

        ``borrowed_batches`` are lent just now, with ``borrowed_items``; the oldest for
        ``oldest_borrow_s`` by process ``oldest_borrow_pid`` (0: none).
        """
        self.check_open()
        stats = self.native.stats()
        by_table = stats.pop("table_index_bytes")
        out: dict[str, float] = dict(stats)
        lent = _native.borrowers(self.native)
        out["borrowed_batches"] = len(lent)
        out["borrowed_items"] = sum(items for _, _, items, _ in lent)
        out["oldest_borrow_s"] = max(time.time_ns() - lent[0][3], 0) / 1e9 if lent else 0.0
        out["oldest_borrow_pid"] = lent[0][0] if lent else 0
        for name, number in self.tables.items():
            for key, value in self.native.table_info(number).items():
                out[f"{name}/{key}"] = value
            out[f"{name}/index_bytes"] = by_table[number]
        return out

    def overview(self) -> dict[str, Any]:
        """What is going on in the store: see `overview.overview`."""
        self.check_open()
        name = self.store.name
        about: dict[str, Any] = {"name": name, "address": f"shm://{name}"}
        participants = self.store.participants()
        served = any(each.number == 0 and each.alive for each in participants)
        about["state"] = recovery.SERVED if served else recovery.CLIENTS_ONLY
        return about | overview.overview(self.native, self.configs, participants)


# Those of this process, for its end.
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _at_exit() -> None:
    """Gives back what is at rest, so that a process that holds nothing can leave its stores."""
    for connection in list(_connections):
        if not connection.store.forked:
            connection.close_idle()


atexit.register(_at_exit)


def _what_helps(info: dict[str, Any], diff: float) -> str:
    """What would let the calls go on that a table's rate limiter holds back."""
    too_few = info["size"] < info["min_size_to_sample"]
    found = ""
    if too_few or diff - 1 < info["min_diff"]:
        found += ", insert more to let samples go on"
    if not too_few and diff + info["samples_per_insert"] > info["max_diff"]:
        found += ", sample more to let inserts go on"
    return found
