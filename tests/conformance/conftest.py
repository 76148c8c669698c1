"""Runs the conformance tests over each way in which a client reaches a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import free_port

if TYPE_CHECKING:
    from shmreplay import Client, Server, Table

TRANSPORTS = ("shm", "tcp")


@pytest.fixture(params=TRANSPORTS)
def make_client(
    request: pytest.FixtureRequest, make_server: Callable[..., Server]
) -> Iterator[Callable[..., tuple[Server, Client]]]:
    """Makes a server of the given tables and a client of it, over the transport at hand."""
    import shmreplay

    with ExitStack() as stack:

        def make(tables: Sequence[Table], **options: Any) -> tuple[Server, Client]:
            if request.param == "tcp":
                options = {"port": free_port(), **options}
            server = make_server(tables, **options)
            address = {"shm": server.address, "tcp": f"tcp://127.0.0.1:{server.port}"}[
                request.param
            ]
            return server, stack.enter_context(shmreplay.Client(address))

        yield make
