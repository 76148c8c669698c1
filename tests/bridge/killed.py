"""Servers that are killed and taken over again, while clients go on."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import shmreplay as reverb
from shmreplay import rate_limiters, selectors

TABLE = "table"
DEADLINE = 60.0


def in_order(size: int) -> reverb.Table:
    """A table that keeps everything in order of insertion and gives each item once."""
    return reverb.Table(
        TABLE,
        selectors.Fifo(),
        selectors.Fifo(),
        size,
        rate_limiters.MinSize(1),
        max_times_sampled=1,
    )


def serve(sender: Any, name: str, port: int, options: dict[str, Any]) -> None:
    """Body of a server's process: makes the store or takes it over."""
    tables = [in_order(1_000_000), reverb.Table.queue("narrow", 3)]
    server = reverb.Server(
        tables, name=name, port=port, capacity=256 << 20, recover=True, **options
    )
    sender.send(os.getpid())
    server.wait()


class KilledServer:
    """A server in a process of its own."""

    def __init__(self, name: str, port: int, **options: Any) -> None:
        self.name, self.port, self.options = name, port, options
        self.kills = 0
        self._context = multiprocessing.get_context("spawn")
        self.start()

    def start(self) -> None:
        receiver, sender = self._context.Pipe(duplex=False)
        arguments = (sender, self.name, self.port, self.options)
        self.process = self._context.Process(target=serve, args=arguments)
        self.process.start()
        sender.close()
        assert receiver.poll(DEADLINE), "the server did not start"
        receiver.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.kills += 1

    def replace(self) -> None:
        """Kills it, and starts one that takes its store over."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """Ends it in order, so that the store goes."""
        self.kill()
        reverb.Server(None, name=self.name, recover=True).stop()


class Killer:
    """Replaces something now and then: after so many steps that somebody else has made."""

    def __init__(self, replace: Callable[[], None], times: int, seed: int) -> None:
        self._replace, self._times = replace, times
        self._random = random.Random(seed)
        self._steps = threading.Semaphore(0)
        self._over = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def step(self) -> None:
        self._steps.release()

    def _run(self) -> None:
        try:
            for _ in range(self._times):
                for _ in range(self._random.randrange(2, 12)):
                    assert self._steps.acquire(timeout=DEADLINE), "no progress"
                # Anywhere in what is going on now.
                threading.Event().wait(self._random.random() * 0.02)
                self._replace()
        except BaseException as error:
            self.error = error
        finally:
            self._over.set()

    def join(self) -> None:
        self._thread.join(10 * DEADLINE)
        if self.error is not None:
            raise self.error
