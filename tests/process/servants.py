"""Servers and clients in processes of their own, which a test may kill at any moment."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import shmreplay as reverb
from shmreplay import rate_limiters, selectors

# Seconds after which something is taken to hang; nothing comes near it.
DEADLINE = 60.0
MIB = 1 << 20


def make_tables() -> list[reverb.Table]:
    return [
        reverb.Table(
            "replay", selectors.Prioritized(0.8), selectors.Fifo(), 1000, rate_limiters.MinSize(1)
        ),
        reverb.Table.queue("queue", 4),
    ]


def rows(*values: float) -> dict[str, Any]:
    return {"x": np.array(values, np.float64)}


def values_of(sample: Any) -> list[float]:
    return [float(value) for value in sample.data["x"].ravel()]


def wait_until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE} s"
        time.sleep(0.002)  # between two looks at a condition with a deadline


def obey(connection: Any, servant: Any) -> None:
    """Calls what the other end asks for, and sends what comes of it, until it sends None."""
    while True:
        request = connection.recv()
        if request is None:
            return
        method, arguments, options = request
        try:
            connection.send(getattr(servant, method)(*arguments, **options))
        except Exception as error:
            connection.send(error)


class Servant:
    """What happens in the other process: `Other` calls these methods."""

    def __init__(self) -> None:
        self.server: reverb.Server | None = None
        self.clients: list[reverb.Client] = []
        self.kept: list[Any] = []

    def serve(self, name: str, tables: Sequence[reverb.Table] | None = None, **options: Any) -> int:
        """Starts a server; gives its port."""
        options = {"capacity": 16 * MIB, **options}
        chosen = make_tables() if tables is None else tables
        self.server = reverb.Server(chosen, name=name, **options)
        return self.server.port

    def stop(self) -> None:
        assert self.server is not None
        self.server.stop()

    def connect(self, address: str) -> int:
        self.clients.append(reverb.Client(address))
        self.clients[-1].server_info()
        return os.getpid()

    def insert(self, table: str, *values: float) -> list[int]:
        return [int(key) for key in self.clients[-1].insert_batch(table, rows(*values))]

    def sample(self, table: str, n: int) -> list[float]:
        return values_of(self.clients[-1].sample_batch(table, n))

    def wait_for_items(self, table: str, n: int) -> list[float]:
        return self.sample(table, n)

    def borrow(self, table: str, n: int) -> int:
        """Samples without copying and never gives it back."""
        borrowed = self.clients[-1].borrow(table, n)
        self.kept.append((borrowed, borrowed.__enter__()))
        return os.getpid()

    def give_back(self) -> None:
        borrowed, _ = self.kept.pop()
        borrowed.__exit__(None, None, None)

    def hold_steps(self, n: int, size: int) -> None:
        """Appends steps that no item refers to, and keeps all of them within reach."""
        writer = self.clients[-1].trajectory_writer(n)
        self.kept.append(writer)
        for number in range(n):
            writer.append({"x": np.full(size, number, np.float64)})


class Asked:
    """Another process, which does what it is asked for, one call after the other."""

    # Seconds after which it is taken to hang.
    patience = DEADLINE

    def __init__(self, work: Callable[..., None], *given: Any, start_method: str = "fork") -> None:
        """`work` gets the end of a pipe that the calls come through, and what is given."""
        context = multiprocessing.get_context(start_method)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(  # type: ignore[attr-defined]
            target=work, args=(theirs, *given)
        )
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def ask(self, method: str, *arguments: Any, **options: Any) -> None:
        self.connection.send((method, arguments, options))

    def answer(self) -> Any:
        assert self.connection.poll(self.patience), "the other process hangs"
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self.ask(method, *arguments, **options)
        return self.answer()

    def kill(self) -> None:
        """Kills it; it is dead when this returns, and no zombie."""
        self.process.kill()
        self.process.join()


class Other(Asked):
    """Another process, with a `Servant` in it."""

    def __init__(self) -> None:
        super().__init__(obey, Servant())

    def close(self) -> None:
        self.kill()
        self.connection.close()
