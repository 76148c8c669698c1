"""A store of this process alone, in which remote writers keep the steps within reach.

A remote writer is a local writer on such a store whose steps are sent on: so its checks, its
history and its errors are those of a local one. The store has the server's tables, of one item
each, for their settings; no item ever enters them. Its memory has no name and goes with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence

from shmreplay import errors, limits
from shmreplay._native import Store as NativeStore
from shmreplay._native import store_bytes
from shmreplay.store import Store
from shmreplay.table import TableConfig

__all__ = ["ScratchStore"]

_SESSIONS = limits.BRIDGE_WRITERS + 64
_PARTICIPANTS = 2


class ScratchStore(Store):
    """As a `Store`, but private and without files."""

    def __init__(self, address: str, tables: Sequence[TableConfig]) -> None:
        """Lays the store out.

        Args:
            address: Of the server, for messages.
            tables: Its tables.
        """
        small = [dataclasses.replace(table, max_size=1, stripes=1, max_bytes=0) for table in tables]
        config = json.dumps([table.to_json() for table in small]).encode()
        shape = (limits.BRIDGE_WINDOW_BYTES, 1, _PARTICIPANTS, _SESSIONS)
        nbytes = store_bytes(*shape, len(config), small)
        self._fd = os.memfd_create("shmreplay-remote", os.MFD_CLOEXEC)
        # One byte at the end makes the file as long; the core commits what it uses before it does.
        os.pwrite(self._fd, b"\0", nbytes - 1)
        self._native = NativeStore(self._fd, nbytes)
        self._native.format(1, *shape, config, small, [0] * len(small))
        self._tables = list(tables)
        self._address = address
        self._pid = os.getpid()
        self._released_once = False

    @property
    def native(self) -> NativeStore:
        """The store in memory."""
        self.check_fork()
        return self._native

    @property
    def address(self) -> str:
        """The server's address."""
        return self._address

    @property
    def forked(self) -> bool:
        """Whether this process got the store from its parent."""
        return self._pid != os.getpid()

    def check_fork(self) -> None:
        """Refuses work in a process that got the store from its parent.

        Raises:
            ForkedHandleError: It did.
        """
        if self.forked:
            raise errors.ForkedHandleError(
                f"Got a handle to {self._address} that process {self._pid} opened before it forked"
                f" process {os.getpid()}; expected one that was opened in this process. Make a new"
                f" Client({self._address!r}) here."
            )

    def release(self) -> None:
        """Lets the file go; its memory stays as long as anything refers to it."""
        if not self._released_once:
            self._released_once = True
            os.close(self._fd)

    def __repr__(self) -> str:
        """Names the server."""
        return f"ScratchStore({self._address!r})"
