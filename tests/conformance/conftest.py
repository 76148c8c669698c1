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
def transport(request: pytest.FixtureRequest) -> str:
    """The way at hand."""
    return str(request.param)


@pytest.fixture
def serve(transport: str, make_server: Callable[..., Server]) -> Callable[..., Server]:
    """Makes a server of the given tables that is reached over the transport at hand."""

    def make(tables: Sequence[Table], **options: Any) -> Server:
        if transport == "tcp":
            options = {"port": free_port(), **options}
        return make_server(tables, **options)

    return make


@pytest.fixture
def connect(transport: str) -> Iterator[Callable[[Server], Client]]:
    """Makes clients of a server that `serve` made."""
    import shmreplay

    with ExitStack() as stack:

        def make(server: Server) -> Client:
            addresses = {"shm": server.address, "tcp": f"tcp://127.0.0.1:{server.port}"}
            return stack.enter_context(shmreplay.Client(addresses[transport]))

        yield make


@pytest.fixture
def make_client(
    serve: Callable[..., Server], connect: Callable[[Server], Client]
) -> Callable[..., tuple[Server, Client]]:
    """Makes a server of the given tables and a client of it, over the transport at hand."""

    def make(tables: Sequence[Table], **options: Any) -> tuple[Server, Client]:
        server = serve(tables, **options)
        return server, connect(server)

    return make
