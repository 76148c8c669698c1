"""A process of the bridge: `python -m shmreplay.bridge.worker`, started by `workers`.

On its standard input come two lines, each JSON: how to listen, then the address of the store; on
its standard output it answers each with a line: null, or an error. A last line "stop" ends it in
order, and takes leave of the clients. If the input ends without it, the server is dead: so is this
process then, at once, so that the next server's can take its place.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from typing import Any

from shmreplay import errors, limits
from shmreplay.bridge.auth import ServerKeys
from shmreplay.bridge.protocol import encode_error
from shmreplay.bridge.server import BridgeServer
from shmreplay.bridge.wire import Writer
from shmreplay.recovery import BRIDGE_ROLE
from shmreplay.store import Store

__all__ = ["main"]

_LOOK_EVERY_S = 0.1


def _follow(parent: int) -> None:
    """Ends this process when its parent has died, whoever else holds the pipe."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def _bound_memory() -> None:
    """Bounds what this process can take; what is shared, as the store, does not count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [limits.BRIDGE_PROCESS_BYTES, *(n for n in (soft, hard) if n >= 0)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))


def _say(error: BaseException | None) -> None:
    text = None
    if error is not None:
        body = Writer()
        encode_error(body, error)
        text = body.meta.hex()
    try:
        sys.stdout.write(json.dumps(text) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)  # the server died while this process started


def _listen(how: dict[str, Any]) -> BridgeServer:
    keys = how["keys"]
    return BridgeServer(
        how["ports"][how["number"]],
        bind=how["bind"],
        keys=None if keys is None else ServerKeys(**keys),
        insecure=how["insecure"],
        compress=how["compress"],
        ports=how["ports"],
        worker=how["number"],
    )


def main() -> int:
    """Serves until it is told to stop."""
    _bound_memory()
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    try:
        bridge = _listen(json.loads(sys.stdin.readline()))
    except errors.ReverbError as error:
        _say(error)
        return 1
    _say(None)
    line = sys.stdin.readline()
    if not line:
        bridge.stop()
        return 1
    address: str = json.loads(line)
    try:
        store = Store.open(address.removeprefix("shm://"), role=BRIDGE_ROLE)
        bridge.start(address)
    except errors.ReverbError as error:
        _say(error)
        bridge.stop()
        return 1
    _say(None)
    if sys.stdin.readline() != "stop\n":
        os._exit(1)
    bridge.stop()
    store.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
