"""A TCP proxy that delays what passes, and cuts connections in the middle of a message."""

from __future__ import annotations

import random
import select
import socket
import threading
import time


class Proxy:
    """Forwards connections to a port of this machine, each until its number of bytes is used up.

    Args:
        port: Where to.
        seed: Of the numbers of bytes.
        least: Bytes, both ways, that a connection gets at least.
        most: And at most; None never cuts.
        delay: Seconds that each piece waits.
        rate: Bytes a second that pass; None: as many as can.
    """

    def __init__(
        self,
        port: int,
        *,
        seed: int = 0,
        least: int = 1500,
        most: int | None = None,
        delay: float = 0.0,
        rate: float | None = None,
    ) -> None:
        self._target = port
        self._random = random.Random(seed)
        self._least, self.most, self._delay, self._rate = least, most, delay, rate
        self.cuts = 0
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        if rate is not None:  # and little is between the ends
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.port = int(self._listener.getsockname()[1])
        self._stopping = threading.Event()
        self._refusing = threading.Event()
        self._cut_now = threading.Event()
        self._holding = threading.Event()
        self._stalling = threading.Event()
        self._left_to_pass = 0  # until requests are held; 0: as they are
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self, refuse: bool = False) -> None:
        """Cuts what is connected now; with `refuse`, what connects later as well."""
        if refuse:
            self._refusing.set()
        self._cut_now.set()

    def hold_answers(self) -> None:
        """From now on what servers say waits."""
        self._holding.set()

    def hold_requests(self, after: int) -> None:
        """What clients say waits, on the connections that there are, once so many bytes passed."""
        self._left_to_pass = after

    @property
    def holds_requests(self) -> bool:
        return self._stalling.is_set()

    def take_requests(self) -> None:
        """And now goes on."""
        self._stalling.clear()

    def let_go(self) -> None:
        """Cuts the connections whose answers wait, and holds no more."""
        self.cut()
        self._holding.clear()

    def accept_again(self) -> None:
        self._refusing.clear()

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            if self._refusing.is_set():
                near.close()
                continue
            # In this order: who sees the number may cut at once.
            self._cut_now.clear()
            self.connections += 1
            budget = None if self.most is None else self._random.randint(self._least, self.most)
            thread = threading.Thread(target=self._forward, args=(near, budget), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, near: socket.socket, budget: int | None) -> None:
        with near:
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            with far:
                if self._rate is not None:
                    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                try:
                    self._pump(near, far, budget)
                except OSError:
                    return

    def _pump(self, near: socket.socket, far: socket.socket, budget: int | None) -> None:
        while not self._stopping.is_set():
            sources = [near] if self._holding.is_set() else [near, far]
            if self._stalling.is_set():
                sources.remove(near)
            ready, _, _ = select.select(sources, [], [], 0.05)
            if self._cut_now.is_set():
                self.cuts += 1
                return
            for source in ready:
                data = source.recv(65536)
                if not data:
                    return
                if self._delay:
                    time.sleep(self._delay)
                if self._rate is not None:
                    time.sleep(len(data) / self._rate)
                if budget is not None:
                    data, budget = data[:budget], budget - len(data)
                (far if source is near else near).sendall(data)
                if source is near and self._left_to_pass > 0:
                    self._left_to_pass -= len(data)
                    if self._left_to_pass <= 0:
                        self._stalling.set()
                if budget is not None and budget <= 0:
                    self.cuts += 1
                    return
