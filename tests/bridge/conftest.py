"""What the tests of the bridge share: a server with a bridge, a proxy before it, a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import shmreplay as reverb
from tests.bridge.proxy import Proxy
from tests.conftest import free_port


@pytest.fixture
def serve(make_server: Callable[..., reverb.Server]) -> Callable[..., reverb.Server]:
    """Makes a server with a bridge."""

    def make(*tables: reverb.Table, **options: Any) -> reverb.Server:
        return make_server(tables, **{"port": free_port(), **options})

    return make


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what is entered when the test is over, before the servers are stopped."""
    with ExitStack() as exits:
        yield exits


@pytest.fixture
def connect(stack: ExitStack) -> Callable[..., reverb.Client]:
    """Makes clients that use the bridge of a server, or the proxy before it."""

    def make(target: reverb.Server | Proxy, **options: Any) -> reverb.Client:
        remote = reverb.RemoteOptions(**{"timeout": 20.0, **options})
        return stack.enter_context(reverb.Client(f"tcp://127.0.0.1:{target.port}", remote))

    return make


@pytest.fixture
def make_proxy(stack: ExitStack) -> Callable[..., Proxy]:
    """Makes proxies before a server."""

    def make(server: reverb.Server, **options: Any) -> Proxy:
        proxy = Proxy(server.port, **options)
        stack.callback(proxy.close)
        return proxy

    return make
