"""Finding a store by the port that its server has: the stores' headers record it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from shmreplay import lease, segment
from shmreplay.errors import ReverbError

__all__ = ["stores_on"]

_log = logging.getLogger(__name__)

Known = Callable[[str], tuple[int, bool] | None]


def stores_on(port: int, known: Known) -> list[tuple[str, bool]]:
    """Returns name of each store in use that has this port, and whether its server lives.

    Args:
        port: The port.
        known: Port, and whether the server lives, of a store that this process is attached to;
            None for others.
    """
    found: list[tuple[str, bool]] = []
    for name in segment.store_names():
        try:
            ours = known(name) or _port_of(name)
        except (ReverbError, OSError) as error:
            # Not ours, of another version, damaged, or going away: none that we could attach to.
            _log.debug("passed over store %r while looking for port %d: %s", name, port, error)
            continue
        if ours is not None and ours[0] == port:
            found.append((name, ours[1]))
    return found


def _port_of(name: str) -> tuple[int, bool] | None:
    """Port of a store that is in use, and whether its server lives; None if it is not in use."""
    with ExitStack() as undo:
        opened = segment.open_segment(name, undo)
        if opened is None or opened[1].closed or opened[1].port == 0:
            return None
        return opened[1].port, lease.open_living(name, undo).holder(0) is not None
