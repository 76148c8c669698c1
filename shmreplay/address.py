"""Addresses: which store, or which bridge to one on another host.

`'shm://NAME'` names a store of this machine, `'tcp://HOST:PORT'` a bridge, and `'HOST:PORT'` the
store of the server with this port if it is on this machine, else its bridge.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
from typing import Any, NamedTuple

from shmreplay import errors, limits
from shmreplay.segment import DIRECTORY, check_name, name_at, store_names
from shmreplay.store import Store
from shmreplay.store_file import checked_path

__all__ = ["Address", "RemoteOptions", "is_local", "parse", "resolve"]

_log = logging.getLogger(__name__)

_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1
# Seconds after which a port of this machine that answers, and is no store of this user's, is taken
# for a bridge: of another user's server, or of one in a container.
_FOREIGN_S = 1.0
_ANSWER_S = 0.2


class Address(NamedTuple):
    """A parsed address: a store's name, or host and port."""

    name: str | None
    host: str = ""
    port: int = 0
    is_bridge: bool = False
    """Whether the bridge is to be used in any case."""
    path: str | None = None
    """Of a store's file."""

    @property
    def endpoint(self) -> str:
        """`'tcp://HOST:PORT'`."""
        return f"tcp://{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True)
class RemoteOptions:
    """How a client uses a bridge. Of no meaning where it is on the server's machine."""

    timeout: float = limits.REMOTE_WAIT_S
    """Seconds that the server may be out of reach before calls fail; within, they wait."""

    keys: Any = None
    """A `bridge.auth.ClientKeys`, where the server demands keys."""

    compress: bool | None = None
    """Compress data where that makes it smaller. None: unless both are on this machine."""

    def __post_init__(self) -> None:
        """Refuses what a connection could not use.

        Raises:
            ArgumentTypeError: Something is of another type.
            InvalidArgumentError: `timeout` is not a number of seconds.
        """
        if limits.checked_timeout(self.timeout) is None:
            raise errors.InvalidArgumentError(
                "Got timeout None for a bridge; expected seconds. Give many to wait for long."
            )
        if not (self.compress is None or isinstance(self.compress, bool)):
            raise errors.ArgumentTypeError(
                f"Got compress {self.compress!r}; expected True, False or None. Leave it out to"
                " compress what goes to other hosts."
            )


def parse(text: object) -> Address:
    """Takes an address apart.

    Raises:
        ArgumentTypeError: It is not a string.
        InvalidArgumentError: It is not an address.
    """
    if not isinstance(text, str):
        raise errors.ArgumentTypeError(
            f"a server address must be a str like 'localhost:8000' or 'shm://name', got {text!r}. "
            f"Use server.address, or f'localhost:{{port}}' for a port."
        )
    if text.startswith("shm://"):
        name = text.removeprefix("shm://")
        check_name(name)
        return Address(name)
    if text.startswith("file:///"):
        return Address(None, path=checked_path(text.removeprefix("file://")))
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if (
        "://" in host
        or not host.isprintable()
        or not host
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise errors.InvalidArgumentError(
            "expected an address like 'localhost:8000', 'tcp://host:8000', 'shm://name' or "
            f"'file:///disk/store', got {text!r}. Use f'localhost:{{server.port}}' on the server's"
            " machine."
        )
    return Address(None, host, int(port), text.startswith("tcp://"))


def is_local(host: str) -> bool:
    """Whether a host is this machine: whether one can listen on its address."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return True
    return False


def resolve(text: str, timeout: float | None = None) -> Address:
    """What to attach or connect to: a store of this machine, else a bridge.

    Waits for a server of this machine that is not up yet.

    Args:
        text: The address.
        timeout: Seconds to wait at most; 0 looks once.

    Raises:
        DeadlineExceededError: No server of that port of this machine was up within the timeout.
        StoreNotFoundError: Nor within `limits.SERVER_WAIT_S`; says what was looked for, and where.
    """
    parsed = parse(text)
    if parsed.path is not None:
        return Address(_name_of(parsed.path))
    if parsed.name is not None or parsed.is_bridge or not is_local(parsed.host):
        return parsed
    limit = limits.SERVER_WAIT_S if timeout is None else timeout
    began, pause, log_after = time.monotonic(), _FIRST_POLL_S, limits.WAIT_LOG_AFTER_S
    while (name := Store.find_by_port(parsed.port)) is None:
        waited = time.monotonic() - began
        if waited >= min(_FOREIGN_S, limit) and _answers(parsed):
            return parsed
        if waited >= limit:
            kind = errors.StoreNotFoundError if timeout is None else errors.DeadlineExceededError
            raise kind(_nobody_there(text, parsed.port, limit))
        if waited >= log_after:
            log_after = waited + limits.WAIT_LOG_EVERY_S
            _log.warning("waiting for %.1f s: %s", waited, _nobody_there(text, parsed.port, waited))
        time.sleep(min(pause, max(limit - waited, 0.0)))
        pause = min(2 * pause, _LAST_POLL_S)
    return Address(name)


def _name_of(path: str) -> str:
    name = name_at(path)
    if name is None:
        raise errors.StoreNotFoundError(
            f"Got {path!r}, where user {os.geteuid()} has no store; expected the path of one that a"
            f" server of this machine serves. Give one of them, or start its server; there are"
            f" {', '.join(map(repr, store_names())) or 'none'}."
        )
    return name


def _nobody_there(text: str, port: int, waited: float) -> str:
    return (
        f"no server is reachable at {text!r}: looked for {waited:.3g} s for a store of user "
        f"{os.geteuid()} in {DIRECTORY} that a living process uses and that has port {port}. "
        f"Stores there: {', '.join(map(repr, store_names())) or 'none'}. Start the server on this "
        "machine with this port and as this user, or see what there is with `shmreplay ls`."
    )


def _answers(address: Address) -> bool:
    try:
        socket.create_connection((address.host.strip("[]"), address.port), _ANSWER_S).close()
    except OSError:
        return False
    return True
