"""Addresses: `'shm://NAME'` names a store, `'HOST:PORT'` the store that a server on HOST serves."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import NamedTuple

from shmreplay import errors, limits
from shmreplay.segment import DIRECTORY, check_name, store_names
from shmreplay.store import Store

_log = logging.getLogger(__name__)

_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1
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


def find_store(text: str, timeout: float | None = None) -> str:
    """Name of the store behind an address, waiting for a server that is not up yet.

    Args:
        text: The address.
        timeout: Seconds to wait at most; 0 looks once.

    Raises:
        DeadlineExceededError: No server of that port was up within the timeout.
        StoreNotFoundError: Nor within `limits.SERVER_WAIT_S`, or it is not on this machine; says
            what was looked for, and where.
    """
    parsed = parse(text)
    if parsed.name is not None:
        return parsed.name
    if parsed.host not in _LOCAL and parsed.host != socket.gethostname():
        raise errors.StoreNotFoundError(
            f"{text!r} is on another machine; this version reaches stores of this machine "
            "('localhost:PORT' or 'shm://NAME')"
        )
    limit = limits.SERVER_WAIT_S if timeout is None else timeout
    began, pause, log_after = time.monotonic(), _FIRST_POLL_S, limits.WAIT_LOG_AFTER_S
    while (name := Store.find_by_port(parsed.port)) is None:
        waited = time.monotonic() - began
        if waited >= limit:
            kind = errors.StoreNotFoundError if timeout is None else errors.DeadlineExceededError
            raise kind(_nobody_there(text, parsed.port, limit))
        if waited >= log_after:
            log_after = waited + limits.WAIT_LOG_EVERY_S
            _log.warning("waiting for %.1f s: %s", waited, _nobody_there(text, parsed.port, waited))
        time.sleep(min(pause, max(limit - waited, 0.0)))
        pause = min(2 * pause, _LAST_POLL_S)
    return name


def _nobody_there(text: str, port: int, waited: float) -> str:
    return (
        f"no server is reachable at {text!r}: looked for {waited:.3g} s for a store of user "
        f"{os.geteuid()} in {DIRECTORY} that a living process uses and that has port {port}. "
        f"Stores there: {', '.join(map(repr, store_names())) or 'none'}. Start the server on this "
        "machine with this port and as this user, or see what there is with `shmreplay ls`."
    )
