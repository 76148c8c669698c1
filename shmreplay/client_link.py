"""How a client reaches its server: by the store itself or a bridge, and again after a restart."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

from shmreplay import address, errors, limits
from shmreplay.connection import Connection, stopped
from shmreplay.drawing import Drawing
from shmreplay.inserting import Inserter
from shmreplay.store import Store
from shmreplay.trajectory_writer import TrajectoryWriter

__all__ = ["ClientLink"]

# Seconds that attaching to a store takes at most where its server is up.
_ATTACH_S = 0.05


class ClientLink:
    """An address, and what is open over it at the moment.

    Cheap to make, safe to share between threads, picklable by address. After a fork it attaches
    anew by itself in the child.
    """

    def __init__(self, server_address: str, remote: address.RemoteOptions | None = None) -> None:
        """Does not connect: the first call does, and waits for a server that is not up yet.

        Args:
            server_address: `'HOST:PORT'` as from `Server.port`: the server's store itself where it
                is on this machine, else its bridge. `'tcp://HOST:PORT'`: the bridge in any case.
                `'shm://NAME'`: the store, which is not waited for.
            remote: How to use a bridge.

        Raises:
            ArgumentTypeError: The address is not a string, or `remote` no `RemoteOptions`.
            InvalidArgumentError: It is not such an address.
        """
        address.parse(server_address)
        if not (remote is None or isinstance(remote, address.RemoteOptions)):
            raise errors.ArgumentTypeError(
                f"Got remote {remote!r} of type {type(remote).__name__}; expected"
                " shmreplay.RemoteOptions. Make it with RemoteOptions(...), or leave it out."
            )
        self._server_address = server_address
        self._remote = address.RemoteOptions() if remote is None else remote
        self._connection: Connection | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._drawing: Drawing | None = None
        self._inserter: Inserter | None = None

    @property
    def server_address(self) -> str:
        """The address that the client was made with."""
        return self._server_address

    def __reduce__(self) -> tuple[type[Self], tuple[str, address.RemoteOptions]]:
        """Pickles by address."""
        return type(self), (self._server_address, self._remote)

    def __repr__(self) -> str:
        """Names the address."""
        return f"Client, server_address={self._server_address}"

    def _connected(self) -> Connection:
        connection = self._connection
        if connection is None or connection.unusable:
            return self._connect()
        return connection

    def _reach(self, timeout: float | None) -> tuple[Connection, float | None]:
        """The connection, and the seconds of the timeout that waiting for it has left."""
        seconds = limits.checked_timeout(timeout)
        connection = self._connection
        if connection is not None and not connection.unusable:
            return connection, seconds
        began = time.monotonic()
        connection = self._connect(seconds)
        waited = time.monotonic() - began
        # Just to attach takes no time worth counting, and messages then name what was given.
        if seconds is None or waited < _ATTACH_S:
            return connection, seconds
        return connection, max(seconds - waited, 0.0)

    def _connect(self, timeout: float | None = None) -> Connection:
        if self._connection is not None and self._connection.store.forked:
            # In a forked child: what was inherited belongs to the parent, the lock included.
            self._lock = threading.RLock()
            self._connection = None
            self._drawing = None
            self._inserter = None
        made: Connection | None = None
        while True:
            with self._lock:
                if not self._closed and self._connection is None and made is not None:
                    self._connection, made = made, None
                elif self._connection is not None and self._connection.unusable:
                    self._connect_again(self._connection)
                connection, closed = self._connection, self._closed
            if made is not None and (closed or connection is not None):
                made.close()  # another call was faster
            if closed:
                raise errors.ServerClosedError(
                    f"Got a call on a client of {self._server_address!r} that is closed; expected "
                    "an open one; make a new Client."
                )
            if connection is not None:
                return connection
            # Without the lock: other calls may have shorter timeouts, or close the client.
            made = self._attach(timeout)

    def _attach(self, timeout: float | None) -> Connection:
        """Attaches to the store, or connects to the bridge: the one place that decides."""
        target = address.resolve(self._server_address, timeout)
        if target.name is not None:
            return Connection(Store.open(target.name))
        from shmreplay.bridge.client import RemoteConnection

        remote, compress = self._remote, self._remote.compress
        if compress is None:
            compress = not address.is_local(target.host)
        return RemoteConnection(target.endpoint, remote.timeout, remote.keys, compress, timeout)

    def _connect_again(self, old: Connection) -> None:
        """Attaches to the store of a server that was started after the old one had been stopped."""
        try:
            connection = self._attach(0.0)
        except (errors.StoreNotFoundError, errors.DeadlineExceededError) as error:
            raise stopped(self._server_address) from error
        if connection.native.closed:  # its server is about to remove it
            connection.close()
            raise stopped(self._server_address)
        self._connection = connection
        self._drawing = None
        inserter, self._inserter = self._inserter, None
        if inserter is not None:
            inserter.close()
        old.close()

    def _open_writer(
        self,
        connection: Connection,
        num_keep_alive_refs: int,
        validate_items: bool = True,
        confirm: bool = True,
        compress: str | None = None,
    ) -> TrajectoryWriter:
        make: Any = connection.make_writer or TrajectoryWriter
        writer: TrajectoryWriter = make(
            connection,
            num_keep_alive_refs,
            validate_items=validate_items,
            confirm=confirm,
            compress=compress,
        )
        return writer

    def close(self) -> None:
        """Leaves the store. Idempotent. Borrowed views stay valid until they are dropped."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
            inserter, self._inserter = self._inserter, None
            drawing, self._drawing = self._drawing, None
        if connection is not None and not connection.store.forked:
            if inserter is not None:
                inserter.close()
            if drawing is not None:
                drawing.drop()
            connection.close()

    def __enter__(self) -> Self:
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

    def _new_inserter(self, connection: Connection) -> Inserter:
        with self._lock:
            inserter = self._inserter
            if inserter is None or inserter.connection is not connection:
                # Once closed, the client keeps none: this one closes its writers after the call.
                inserter = Inserter(connection, self._open_writer, self._closed)
                if not self._closed:
                    self._inserter = inserter
            return inserter

    def _drawing_over(self, connection: Connection) -> Drawing:
        """What draws over the connection: one for all calls of the client."""
        drawing = self._drawing
        if drawing is not None and drawing.connection is connection:
            return drawing
        with self._lock:
            drawing = self._drawing
            if drawing is None or drawing.connection is not connection:
                drawing = Drawing(connection)
                if connection is self._connection:
                    self._drawing = drawing
            return drawing
