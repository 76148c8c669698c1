"""Several processes that serve one store to remote clients, and what keeps them alive."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shmreplay
from shmreplay import errors, limits
from shmreplay.bridge import auth
from shmreplay.bridge.protocol import decode_error
from shmreplay.bridge.wire import Reader

__all__ = ["BridgeWorkers"]

_log = logging.getLogger(__name__)

# Seconds between two looks at the processes, and before another try to start one.
_LOOK_EVERY_S = 0.05
_TRY_AGAIN_S = 0.5

_DIED = "Got a process of the bridge that died while it started; expected an answer. See its log."


class _Worker:
    """One process."""

    def __init__(self, how: dict[str, Any], stopping: Callable[[], bool]) -> None:
        """Starts it; `bound` waits for it to listen, until `stopping` says that it need not."""
        self._stopping = stopping
        path = [str(Path(shmreplay.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        # A session of its own: Ctrl-C at the server's terminal is the server's matter.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shmreplay.bridge.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            start_new_session=True,
        )
        try:
            self._say(how)
        except errors.ReverbError:
            self.kill()
            raise

    def bound(self) -> None:
        """Waits until it listens.

        Raises:
            ReverbError: It cannot.
        """
        self._check_answer()

    def start(self, address: str) -> None:
        """Lets it serve a store.

        Raises:
            ReverbError: It cannot.
        """
        self._say(address)
        self._check_answer()

    def _say(self, what: Any) -> None:
        assert self.process.stdin is not None
        self._answer_by = time.monotonic() + limits.BRIDGE_START_S
        try:
            self.process.stdin.write(json.dumps(what).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise errors.ReverbError(_DIED) from None

    def _check_answer(self) -> None:
        answer = json.loads(self._answer())
        if answer is not None:
            raise decode_error(Reader(bytes.fromhex(answer)))

    def _answer(self) -> bytes:
        """The next line that it says; one that hangs says nothing, and is not waited for."""
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            if self._stopping():
                raise errors.ReverbError(
                    "Got stop() of the bridge while a process of it started; expected it to run."
                    " Make the server again."
                )
            if time.monotonic() > self._answer_by:
                raise errors.ReverbError(
                    f"a process of the bridge did not start within {limits.BRIDGE_START_S} s, as it"
                    " must. See its log, or give fewer bridge_workers."
                )
            if not select.select([self.process.stdout], [], [], _LOOK_EVERY_S)[0]:
                continue
            # It says a line, and then nothing before it is spoken to.
            part = os.read(self.process.stdout.fileno(), 65536)
            if not part:
                raise errors.ReverbError(_DIED)
            line += part
        return line

    def ask_to_stop(self) -> None:
        """Lets it take leave of its clients and end."""
        assert self.process.stdin is not None
        if self.process.stdin.closed:
            return  # it was killed, and none took its place
        try:
            self.process.stdin.write(b"stop\n")
            self.process.stdin.close()
        except BrokenPipeError:
            return  # it is dead already

    def join(self, end: float) -> None:
        """Waits for its end, for which it has until then."""
        try:
            self.process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            _log.warning("process %d of the bridge does not end, and is killed", self.process.pid)
        self.kill()

    def kill(self) -> None:
        """Ends it if it is not dead, and gives back what it had. Idempotent."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # what it did not read any more


class BridgeWorkers:
    """As `BridgeServer`, with processes in place of a thread, each at a port of its own.

    Process i listens on `port + i`. The first one tells new clients where to go. One that dies is
    started anew, and its clients go on with the new one.
    """

    def __init__(
        self,
        port: int,
        workers: int,
        *,
        bind: str = "127.0.0.1",
        keys: auth.ServerKeys | None = None,
        insecure: bool = False,
        compress: bool = True,
    ) -> None:
        """Starts the processes, and waits until they listen. For the rest see `BridgeServer`.

        Raises:
            InvalidArgumentError: One of the ports cannot be used, or the address needs keys.
            ArgumentTypeError: The keys are something else.
            AuthenticationError: The keys cannot be used.
        """
        auth.check_type(keys, auth.ServerKeys)
        if port + workers > 65536:
            raise errors.InvalidArgumentError(
                f"Got port {port} and bridge_workers={workers}, which need ports up to"
                f" {port + workers - 1}; there are none beyond 65535. Choose a lower port."
            )
        self._how = {
            "ports": [port + i for i in range(workers)],
            "bind": bind,
            "keys": None if keys is None else dataclasses.asdict(keys),
            "insecure": insecure,
            "compress": compress,
        }
        self._address: str | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._workers: list[_Worker] = []
        try:
            for i in range(workers):
                self._workers.append(self._new(i))
            for worker in self._workers:
                worker.bound()
        except BaseException:
            self.stop()
            raise

    def _new(self, number: int) -> _Worker:
        return _Worker({**self._how, "number": number}, self._stopping.is_set)

    @property
    def pids(self) -> list[int]:
        """The processes as they are now."""
        return [worker.process.pid for worker in self._workers]

    def start(self, store_address: str) -> None:
        """Serves the store at `'shm://NAME'`."""
        self._address = store_address
        for worker in self._workers:
            worker.start(store_address)
        self._thread = threading.Thread(target=self._watch, name="shmreplay-bridge", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Takes leave of all clients and ends the processes, also those that hang. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        for worker in self._workers:
            if self._address is None:
                worker.kill()
            else:
                worker.ask_to_stop()
        end = time.monotonic() + limits.BRIDGE_CLOSE_S
        for worker in self._workers:
            worker.join(end)
        self._workers = []

    def _watch(self) -> None:
        pause = _LOOK_EVERY_S
        while not self._stopping.wait(pause):
            pause = _LOOK_EVERY_S
            for number, worker in enumerate(self._workers):
                status = worker.process.poll()
                if status is not None and not self._replace(number, worker, status):
                    pause = _TRY_AGAIN_S

    def _replace(self, number: int, dead: _Worker, status: int) -> bool:
        """Puts a process in the place of one that died. False where that did not work."""
        _log.warning("process %d of the bridge died (%d): another one", dead.process.pid, status)
        dead.kill()
        assert self._address is not None
        try:
            worker = self._new(number)
            self._workers[number] = worker  # also one that fails: it is tried again
            worker.bound()
            worker.start(self._address)
        except (errors.ReverbError, OSError) as error:
            self._workers[number].kill()
            _log.warning("a process of the bridge could not be started: %s", error)
            return False
        return True
