"""The server: makes the store, keeps memory committed ahead, cleans up after the dead."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from shmreplay import (
    _native,
    checkpoint,
    checkpoint_restore,
    errors,
    limits,
    live_table,
    recovery,
    reverb_types,
    segment,
    store_file,
)
from shmreplay.checkpoint_thread import CheckpointThread
from shmreplay.checkpointers import CheckpointerBase, CheckpointSettings
from shmreplay.client import Client
from shmreplay.connection import Connection
from shmreplay.extension_thread import ExtensionThread
from shmreplay.extensions import TableExtension as TableExtensionBase
from shmreplay.rate_limiters import RateLimiter
from shmreplay.store import Store
from shmreplay.table import Table, checked_tables

__all__ = ["Server", "Table", "TableExtensionBase"]

_log = logging.getLogger(__name__)


class _Handle:
    """What a `Table` asks its server."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number

    def info(self) -> reverb_types.TableInfo:
        return self._connection.info(self._number)

    def check(self) -> None:
        self._connection.check(self._number)

    def can_sample(self, num_samples: int) -> bool:
        return bool(self._connection.native.can_sample(self._number, num_samples))

    def can_insert(self, num_inserts: int) -> bool:
        return bool(self._connection.native.can_insert(self._number, num_inserts))


class Server:
    """Owns a store with its tables. Local clients work on the store itself, not through the server.

    Use it as a context manager or call `stop()`: that removes the store from /dev/shm. A server
    that is killed leaves its store, in which attached clients go on. The next server of the same
    name takes it over with `recover=True`; without, it replaces it once no process uses it.

    Args:
        tables: Its tables; names must differ.
        port: Of the bridge, by which clients on other hosts reach the tables; clients on this
            machine find the store itself by it: `'localhost:PORT'`. None: no bridge, and a
            free number is picked for clients on this machine.
        checkpointer: One of `checkpointers`: the newest checkpoint there is loaded. None: none
            is, and `Client.checkpoint` writes where the system keeps temporary files.
        name: Name of the store: `'shm://NAME'`. None: one is made up.
        capacity: Bytes that the store may use. None: half of what is free where it is to lie.
        path: A file of a local disk for the store, which may then be larger than memory, at the
            speed of that disk. It is removed with the store: no checkpoint. None: /dev/shm.
        recover: Take the store of this name over if there is one whose server died: with all
            its items, keys, priorities and counters, its capacity and, if `port` is None, its
            port. `tables` must then be the same, or None for those that there are. Where there
            is none it is made.
        bind: Address that the bridge listens on; `'0.0.0.0'` for all of this machine's.
        auth: `bridge.auth.ServerKeys`: encrypt, and let only clients with known keys in. Needed
            where other hosts reach `bind`.
        insecure: Let other hosts in without keys, on a network that is trusted.
        compress: Compress what is sent to clients that ask for it, where that makes it smaller.
        bridge_workers: Processes that serve remote clients, each at a port of its own: `port`,
            `port + 1`, ..., all of which clients must be able to reach. One that dies is started
            anew, and its clients go on. 0: a thread of this process serves them, whose memory a
            peer that means harm can use up. None: 1 where other hosts reach `bind`, else 0.

    Raises:
        InvalidArgumentError: No tables, equal names, a port or capacity out of range; what only
            a bridge uses (`bind`, `auth`, `insecure`, `bridge_workers`) without `port`; tables
            that differ from those of the store to recover; `bind` cannot be used, or not
            without keys.
        ArgumentTypeError: The checkpointer is none.
        CheckpointError: The checkpoint to load is damaged; says where.
        AuthenticationError: The keys cannot be used.
        StoreExistsError: A store of this name is in use.
        StoreNotFoundError: There is nothing to recover, and no tables were given.
        ArenaFullError: /dev/shm has no room.
    """

    def __init__(
        self,
        tables: Sequence[Table] | None = None,
        port: int | None = None,
        checkpointer: CheckpointerBase | None = None,
        *,
        name: str | None = None,
        capacity: int | None = None,
        path: str | os.PathLike[str] | None = None,
        recover: bool = False,
        bind: str = "127.0.0.1",
        auth: Any = None,
        insecure: bool = False,
        compress: bool = True,
        bridge_workers: int | None = None,
    ) -> None:
        """Makes the store, or takes it over."""
        path = None if path is None else store_file.checked_path(path)
        self._name = _name_of(name, recover, path)
        self._bridge: Any = None
        checked = None if recover and tables is None else checked_tables(tables)
        settings = _checkpoint_settings(checkpointer)
        _prepare_extensions(checked or ())
        workers = _checked_workers(bridge_workers)
        if port is None:
            _refuse_without_bridge(bind, auth, insecure, workers or 0)
        known = self._take_port(port, recover)
        options = (workers, bind, auth, insecure, compress) if port is not None else None
        store, recovered = self._make_store(checked, (capacity, path), recover, options, settings)
        if known not in (None, self._port):
            _log.warning("port %d of store %r is taken: it has %d now", known, name, self._port)
        self._pid = os.getpid()
        self._connection = Connection(store)
        self._stopped = threading.Event()
        for table in checked or ():
            table._bind(_Handle(self._connection, self._connection.number(table.name)))
        self._threads: list[threading.Thread] = []
        self._extensions: ExtensionThread | None = None
        self._checkpoints: CheckpointThread | None = None
        self._start(checked or (), recovered, settings)

    def _take_port(self, port: Any, recover: bool) -> int | None:
        """Binds a port: of a server that died its own, once nobody serves it there any more.

        Says which it had, where none is asked for.
        """
        if recover:
            recovery.wait_for_bridge(self._name)
        known = recovery.port_of(self._name) if recover and port is None else None
        self._socket, self._port = _reserve_port(port) if known is None else _reserve_again(known)
        return known

    def _make_store(
        self,
        tables: Sequence[Table] | None,
        place: tuple[int | None, str | None],
        recover: bool,
        bridge: tuple[int | None, str, Any, bool, bool] | None,
        settings: CheckpointSettings,
    ) -> tuple[Store, bool]:
        """Makes or takes over the store, once the bridge, if there is to be one, listens.

        Also says whether it took it over.
        """
        try:
            if bridge is not None:
                self._socket.close()  # the bridge listens there itself
                self._bridge = _bind_bridge(self._port, *bridge)
            store = recovery.take_over(self._name, tables, self._port) if recover else None
            if store is not None:
                return store, True
            return _create(self._name, tables, place, self._port, settings), False
        except BaseException:
            self._socket.close()
            if self._bridge is not None:
                self._bridge.stop()
            raise

    def _start(
        self, tables: Sequence[Table], recovered: bool, settings: CheckpointSettings
    ) -> None:
        try:
            self._start_threads(tables, settings)
        except BaseException:  # no memory for a thread: no server, and no store of its making
            if recovered:
                self._connection.store.resign()
            self.stop()
            raise

    def _start_threads(self, tables: Sequence[Table], settings: CheckpointSettings) -> None:
        arguments = (weakref.ref(self), self._connection.native, self._stopped)
        for target, label in ((_commit, "shmreplay-commit"), (_sweep, "shmreplay-janitor")):
            thread = threading.Thread(target=target, args=arguments, name=label, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._extensions = ExtensionThread.make(self._connection, tables)
        if self._extensions is not None:
            self._threads.append(self._extensions.start(self._stopped))
        self._checkpoints = CheckpointThread(self._connection, settings)
        self._threads += self._checkpoints.start(self._stopped)
        if self._bridge is not None:
            self._bridge.start(self.address)
        _mention_the_dead()

    @property
    def port(self) -> int:
        """Number by which clients on this machine find the store."""
        return self._port

    @property
    def name(self) -> str:
        """Name of the store."""
        return self._name

    @property
    def address(self) -> str:
        """`'shm://NAME'`."""
        return f"shm://{self._name}"

    def localhost_client(self) -> Client:
        """A client of this server."""
        return Client(f"localhost:{self._port}")

    def stats(self) -> dict[str, float]:
        """Counters of the store and of each table: a flat dict of numbers, units in the names.

        Keys of the store stand alone, those of a table come as ``TABLE/KEY``; `counters` says what
        each of them means. Ready for TensorBoard, W&B or a log line.
        """
        stats = self._connection.stats()
        if self._extensions is not None:
            stats.update(self._extensions.stats())
        if self._checkpoints is not None:
            stats.update(self._checkpoints.stats())
        return stats

    def checkpoint(self) -> checkpoint.Saved:
        """Writes a checkpoint now: as `Client.checkpoint`, and says what it took.

        Raises:
            CheckpointError: It could not be written; the last one stays as it was.
        """
        return self._connection.save()

    def configure_table(
        self,
        table: str,
        *,
        max_size: int | None = None,
        max_times_sampled: int | None = None,
        rate_limiter: RateLimiter | None = None,
        max_bytes: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Gives a table in use other settings: see `Client.configure_table`.

        Args:
            table: Its name.
            max_size: Items it may hold; None, here as below: as it is.
            max_times_sampled: After how many samples an item goes; 0: never.
            rate_limiter: The new one.
            max_bytes: Bytes that its items may keep in memory; 0: any number.
            timeout: Seconds to wait for the table's extensions; None: for ever.
        """
        seconds = limits.checked_timeout(timeout)
        change = (max_size, max_times_sampled, rate_limiter, max_bytes)
        live_table.configure(self._connection, table, *change, timeout=seconds)

    def check(self) -> None:
        """Walks all invariants of the store.

        Raises:
            TableCorruptedError: One does not hold; says which.
            ServerClosedError: The server was stopped.
        """
        self._connection.check(None)

    def stop(self) -> None:
        """Closes the store and removes it. Waiting calls end with ServerClosedError. Idempotent."""
        if self._stopped.is_set() or os.getpid() != self._pid:
            return
        self._stopped.set()
        if self._bridge is not None:
            self._bridge.stop()
        store = self._connection.store
        if store.is_creator:  # not where it has resigned
            store.unlink()
        for thread in self._threads:
            if thread is not threading.current_thread():
                # An extension's method may hang; its thread then keeps what it needs of the store.
                thread.join(2 * limits.EXTENSION_STOP_S)
                if thread.is_alive():
                    _log.warning("thread %s still runs after the server stopped", thread.name)
        self._connection.close()
        self._socket.close()

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until another thread stops the server, or until Ctrl-C (KeyboardInterrupt).

        Args:
            timeout: Seconds to wait at most; None: for ever.

        Raises:
            DeadlineExceededError: The server still runs.
        """
        seconds = limits.checked_timeout(timeout)
        end = math.inf if seconds is None else time.monotonic() + seconds
        while not self._stopped.wait(
            max(min(end - time.monotonic(), limits.WAIT_SLICE_MS / 1000), 0.0)
        ):
            if time.monotonic() >= end:
                raise errors.DeadlineExceededError(
                    f"the server {self._name!r} was not stopped within {timeout} s; expected "
                    "another thread to call stop(). Give a longer timeout, or None to wait for "
                    "ever."
                )

    def __enter__(self) -> Server:
        """Returns the server."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops the server."""
        self.stop()

    def __del__(self) -> None:
        """Stops a server that nobody refers to any more."""
        if hasattr(self, "_threads"):
            self.stop()

    def __repr__(self) -> str:
        """Names port and store."""
        return f"Server(port={self._port}, name={self._name!r})"


def _checkpoint_settings(checkpointer: Any) -> CheckpointSettings:
    if checkpointer is None:
        return CheckpointSettings("")
    if not isinstance(checkpointer, CheckpointerBase):
        raise errors.ArgumentTypeError(
            f"Got the checkpointer {checkpointer!r}; expected one of shmreplay.checkpointers. "
            "Leave it out to have none."
        )
    return checkpointer.internal_checkpointer()


def _prepare_extensions(tables: Sequence[Table]) -> None:
    names = [table.name for table in tables]
    for table in tables:
        for extension in table.extensions:
            extension.prepare(table.name, names)


def _reserve_port(port: Any) -> tuple[socket.socket, int]:
    """Binds the port on the loopback, so that no other program takes the number meanwhile."""
    number = 0 if port is None else limits.checked_int("port", port)
    if not 0 <= number < 65536 or (port is not None and number == 0):
        raise errors.InvalidArgumentError(
            f"port must be in [1, 65535] or None, got {port}. Leave it out where all clients are "
            "on this machine."
        )
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if port is not None:
        # Connections of a server that had the port before may still be fading away.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind(("127.0.0.1", number))
    except OSError as e:
        reserved.close()
        raise errors.InvalidArgumentError(
            f"port {number} cannot be used ({e.strerror}); expected a free one: choose another or"
            " leave it out"
        ) from e
    return reserved, reserved.getsockname()[1]


_MENTIONED_SHARE: Final = 0.05
_mentioned: set[str] = set()


def _mention_the_dead() -> None:
    """Says, once, what killed servers left, if it is a good part of the memory that there is.

    No more: only who ran them knows that nobody wants to take it over.
    """
    dead = [each for each in recovery.left_behind() if each.name not in _mentioned]
    nbytes = sum(each.nbytes for each in dead)
    status = os.statvfs(segment.DIRECTORY)
    if dead and nbytes >= _MENTIONED_SHARE * status.f_blocks * status.f_frsize:
        _mentioned.update(each.name for each in dead)
        _log.warning(
            "%d bytes are taken by stores in which no process lives, as their servers were killed:"
            " %s. `shmreplay clean` removes them; Server(name=..., recover=True) takes one over",
            *(nbytes, ", ".join(each.name for each in dead)),
        )


def _name_of(name: str | None, recover: bool, path: str | None) -> str:
    if recover:
        return _to_recover(name, path)
    return f"{os.getpid()}-{secrets.token_hex(4)}" if name is None else name


def _refuse_without_bridge(bind: str, auth: Any, insecure: bool, workers: int) -> None:
    """Refuses what only a bridge has a use for: who gives it believes that there is one."""
    given = {"bind": bind, "auth": auth, "insecure": insecure, "bridge_workers": workers}
    defaults = {"bind": "127.0.0.1", "auth": None, "insecure": False, "bridge_workers": 0}
    without_use = [f"{name}={value!r}" for name, value in given.items() if value != defaults[name]]
    if without_use:
        raise errors.InvalidArgumentError(
            f"Got {', '.join(without_use)} without port=; expected a port: without one there is no"
            " bridge, and no other host reaches the tables. Give port=, or leave the rest out."
        )


def _checked_workers(value: Any) -> int | None:
    if value is None:
        return None
    workers = limits.checked_int("bridge_workers", value)
    if not 0 <= workers <= limits.BRIDGE_PROCESSES:
        raise errors.InvalidArgumentError(
            f"Got bridge_workers {value}; expected 0 to {limits.BRIDGE_PROCESSES}. Give the number"
            " of processes that serve remote clients; 0: a thread of this process does."
        )
    return workers


def _bind_bridge(
    port: int, workers: int | None, bind: str, auth: Any, insecure: bool, compress: bool
) -> Any:
    """A bridge that listens already. Imported here: a server without one does not need ZeroMQ.

    Nothing bounds what libzmq gathers of a message without end but the memory of its process: that
    should not be the server's where others than this machine's processes can send one.
    """
    from shmreplay.bridge.server import BridgeServer, check_address, is_loopback

    options: Any = {"bind": bind, "keys": auth, "insecure": insecure, "compress": compress}
    check_address(bind, auth, insecure)
    if workers is None:
        workers = 0 if is_loopback(bind) else 1
    if workers == 0:
        return BridgeServer(port, **options)
    from shmreplay.bridge.workers import BridgeWorkers

    return BridgeWorkers(port, workers, **options)


def _reserve_again(port: int) -> tuple[socket.socket, int]:
    """Binds the port of a server that died, or another if somebody else has it now."""
    try:
        return _reserve_port(port)
    except errors.InvalidArgumentError:
        return _reserve_port(None)


def _to_recover(name: str | None, path: str | None) -> str:
    """The name of the store to take over."""
    if name is None and path is not None:
        name = segment.name_at(path) or os.path.basename(path)
    if name is None:
        raise errors.InvalidArgumentError(
            "Got recover=True without a name; expected name=: give that of a store that there is."
        )
    segment.check_name(name)
    there = segment.file_of(segment.segment_name(name))
    if path is not None and there not in (None, path):
        raise errors.InvalidArgumentError(
            f"Got recover=True and path={path!r} for store {name!r}, which is at {there!r};"
            " expected that path, or none."
        )
    return name


def _create(
    name: str,
    tables: Sequence[Table] | None,
    place: tuple[int | None, str | None],
    port: int,
    settings: CheckpointSettings,
) -> Store:
    if tables is None:
        raise errors.StoreNotFoundError(
            f"Got recover=True without tables for store {name!r}, but there is nothing to recover "
            "under this name; expected tables to make it with. See `shmreplay ls`."
        )
    capacity, path = place
    saved = checkpoint_restore.choose(settings)
    if saved is None:
        configs = [t.config() for t in tables]
        return Store.create(name, configs, capacity=capacity, port=port, path=path)
    nbytes = segment.checked_capacity(capacity, path)
    plan = checkpoint_restore.plan(saved, tables, settings, nbytes)
    return Store.create(
        name,
        plan.configs,
        capacity=nbytes,
        port=port,
        path=path,
        keys=plan.keys,
        fill=lambda native: checkpoint_restore.fill(native, plan),
    )


def _commit(ref: weakref.ref[Server], native: _native.Store, stopped: threading.Event) -> None:
    """Commits memory ahead of demand, so that actors do not wait for pages."""
    reported = False
    while not stopped.is_set() and ref() is not None:
        try:
            native.committer_step()
        except (errors.ReverbError, OSError) as e:
            # Actors then commit for themselves. Said once; tried again after a pause.
            if not reported:
                _log.warning("memory cannot be committed ahead: %s", e)
            reported = True
            stopped.wait(limits.SWEEP_EVERY_S)


def _sweep(ref: weakref.ref[Server], native: _native.Store, stopped: threading.Event) -> None:
    """Each second: gives back what dead participants held."""
    next_at = time.monotonic() + limits.SWEEP_EVERY_S
    reported = False
    while not stopped.wait(limits.WAIT_SLICE_MS / 1000):
        server = ref()
        if server is None:
            return
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + limits.SWEEP_EVERY_S
            try:
                server._connection.store.reclaim_dead()
            except (errors.ReverbError, OSError) as e:
                # What it held stays out of use until the server is started anew. Said once.
                if not reported:
                    _log.warning("a dead process held what cannot be given back: %s", e)
                reported = True
        del server
