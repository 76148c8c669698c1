"""Addresses: `'shm://NAME'` names a store, `'HOST:PORT'` the store that a server on HOST serves."""

from __future__ import annotations

import os
import socket
import time
from typing import NamedTuple

from shmreplay import errors
from shmreplay.segment import DIRECTORY, check_name, store_names
from shmreplay.store import OPEN_TIMEOUT_S, Store

_POLL_S = 0.02
_LOCAL = {"localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0"}


class Address(NamedTuple):
    """A parsed address: a store's name, or host and port."""

    name: str | None
    host: str = ""
    port: int = 0


def parse(text: object) -> Address:
    """Takes an address apart.

    Raises:
        ArgumentTypeError: It is not a string.
        InvalidArgumentError: It is not an address.
    """
    if not isinstance(text, str):
        raise errors.ArgumentTypeError(
            f"a server address is a str like 'localhost:8000' or 'shm://name', got {text!r}"
        )
    if text.startswith("shm://"):
        name = text.removeprefix("shm://")
        check_name(name)
        return Address(name)
    host, _, port = text.rpartition(":")
    if "://" in text or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise errors.InvalidArgumentError(
            f"expected an address like 'localhost:8000' or 'shm://name', got {text!r}"
        )
    return Address(None, host, int(port))


def find_store(text: str, timeout: float = OPEN_TIMEOUT_S) -> str:
    """Name of the store behind an address, waiting for a server that is starting.

    Args:
        text: The address.
        timeout: Seconds to wait at most; 0 looks once.

    Raises:
        StoreNotFoundError: There is none on this machine; says what was looked for, and where.
    """
    parsed = parse(text)
    if parsed.name is not None:
        return parsed.name
    if parsed.host not in _LOCAL and parsed.host != socket.gethostname():
        raise errors.StoreNotFoundError(
            f"{text!r} is on another machine; this version reaches stores of this machine "
            "('localhost:PORT' or 'shm://NAME')"
        )
    end = time.monotonic() + timeout
    name = Store.find_by_port(parsed.port)
    while name is None and time.monotonic() < end:
        time.sleep(_POLL_S)
        name = Store.find_by_port(parsed.port)
    if name is None:
        raise errors.StoreNotFoundError(
            f"no server is reachable at {text!r}: looked for {timeout:g} s for a store of user "
            f"{os.geteuid()} in {DIRECTORY} that a living process uses and that has port "
            f"{parsed.port}. Stores there: {', '.join(map(repr, store_names())) or 'none'}. Start "
            "the server on this machine with this port and as this user, or see what there is with "
            "`shmreplay ls`."
        )
    return name
