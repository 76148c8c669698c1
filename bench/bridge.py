"""What does a client on another host get, over the bridge?

Over the loopback, server and client in processes of their own, beside the same bytes sent by bare
pyzmq in the same pattern. The figures are those of one client, but for the last case: how the sum
holds as more clients come than there are processors for.
"""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import statistics
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import zmq

from bench import library
from bench.harness import Bench, Contender, Measure, Reading, TimedLoop
from bench.processes import Work, context, crew_measure

NAME = "bridge"
QUESTION = "What does a client on another host get, over the bridge?"
SIZES = (400, 4_000, 40_000, 400_000)
QUICK_SIZES = (400, 400_000)
TABLE_BYTES = 256 << 20
MOST_ITEMS = 100_000
AHEAD = 4
"""Requests and batches on their way."""
BATCH_BYTES = 4_000_000
"""At most: ten of the largest items, so that a batch of any size is one."""
INSERT_ONE = "shmreplay, item by item, each confirmed"
INSERT_STREAM = "shmreplay, item by item, confirmed together"
INSERT_BATCH = "shmreplay insert_batch"
SAMPLE_ONE = "shmreplay sample_batch, one after the other"
SAMPLE_AHEAD = "shmreplay sampler"
RAW_PUSH = "bare pyzmq, the same bytes pushed"
RAW_PUSH_ONE = "bare pyzmq, the same bytes pushed one after the other"
RAW_PULL = "bare pyzmq, the same bytes pulled"
READY_SECONDS = 60.0
SAMPLE_MEDIAN = "shmreplay sample_batch, the median"
SAMPLE_P99 = "shmreplay sample_batch, the 99th percentile"
CLIENTS = (1, 4, 16, 64, 200)
CLIENT_PROCESSES = 4
LOAD_BYTES = 400
LOAD_ITEMS = 32
"""Items that a client of many writes, and then samples, before the next one's turn."""
STREAM = 64
"""Items between two calls of `flush`, in the case that has one at all."""


def batch_of(size: int) -> int:
    """Items of this size in a batch."""
    return max(1, min(256, BATCH_BYTES // size))


def rows_of(size: int) -> int:
    """Items of this size in the table."""
    return min(MOST_ITEMS, TABLE_BYTES // size)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_table(ready: Any, stop: Any, port: int, size: int) -> None:
    """Body of the server's process: a full table, and a bridge."""
    reverb = library.require()
    rows = rows_of(size)
    table = reverb.Table(
        library.TABLE,
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=rows,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    capacity = 2 * rows * (size + 512) + library.SPARE_BYTES
    with reverb.Server([table], port=port, capacity=capacity) as server:
        with reverb.Client(server.address) as client:
            for start in range(0, rows, batch_of(size)):
                count = min(batch_of(size), rows - start)
                client.insert_batch(library.TABLE, {"x": np.zeros((count, size), np.uint8)})
        ready.set()
        stop.wait()


def echo(ready: Any, stop: Any, port: int, size: int) -> None:
    """Body of the bare server's process: a byte as the answer to a push, data to a pull.

    Data to pull are sent from where they are, each time others of as many as the table has: the
    same ones each time would be read from the processor's cache, as those of no table are.
    """
    places = max(1, min(MOST_ITEMS, TABLE_BYTES // size))
    data = np.random.default_rng(0).integers(0, 256, (places, size), np.uint8)
    order = itertools.cycle(np.random.default_rng(1).permutation(places).tolist())
    zmq_context: zmq.Context[Any] = zmq.Context()
    router = zmq_context.socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{port}")
    ready.set()
    while not stop.is_set():
        while router.poll(50):
            peer, body = router.recv_multipart(copy=False)
            answer = data[next(order)] if len(body) == 1 else b"k"
            router.send_multipart([peer, answer], copy=False)
    router.close(0)
    zmq_context.term()


def _start(stack: ExitStack, body: Any, size: int) -> int:
    """Starts a server's process; gives its port."""
    ctx = context()
    ready, stop, port = ctx.Event(), ctx.Event(), free_port()
    process: multiprocessing.process.BaseProcess = ctx.Process(
        target=body, args=(ready, stop, port, size)
    )
    process.start()
    stack.callback(process.join)
    stack.callback(stop.set)
    if not ready.wait(READY_SECONDS):
        raise RuntimeError(f"the server's process is not ready after {READY_SECONDS:g} s")
    return port


def _client(stack: ExitStack, size: int) -> Any:
    port = _start(stack, serve_table, size)
    return stack.enter_context(library.require().Client(f"tcp://127.0.0.1:{port}"))


def _items(stack: ExitStack, size: int, confirm: bool) -> Measure:
    client = _client(stack, size)
    writer = client.trajectory_writer(1, confirm=confirm)
    stack.callback(writer.close)
    step = {"x": np.random.default_rng(0).integers(0, 256, size, np.uint8)}

    def loop(calls: int) -> None:
        for _ in range(calls):
            for _ in range(STREAM):
                writer.append(step)
                writer.create_item(library.TABLE, 1.0, {"x": writer.history["x"][-1]})
            writer.flush()

    return TimedLoop(loop)


def _batches(stack: ExitStack, size: int) -> Measure:
    client, n = _client(stack, size), batch_of(size)
    batch = {"x": np.random.default_rng(0).integers(0, 256, (n, size), np.uint8)}

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.insert_batch(library.TABLE, batch)

    return TimedLoop(loop)


def _samples(stack: ExitStack, size: int, n: int) -> Measure:
    client = _client(stack, size)

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.sample_batch(library.TABLE, n)

    return TimedLoop(loop)


def _percentile(stack: ExitStack, size: int, percent: int) -> Measure:
    """So long takes a sample of one item, in so many of a hundred calls at most."""
    client = _client(stack, size)

    def measure(seconds: float) -> Reading:
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < 2 or time.perf_counter() < start + seconds:
            before = time.perf_counter()
            client.sample_batch(library.TABLE, 1)
            times.append(time.perf_counter() - before)
        return Reading(1, statistics.quantiles(times, n=100)[percent - 1])

    return measure


def write_and_sample(stack: ExitStack, port: int, clients: int) -> Work:
    """Work of a process with so many clients, whose turns it is one after the other."""
    reverb = library.require()
    step = {"x": np.random.default_rng(0).integers(0, 256, LOAD_BYTES, np.uint8)}
    ends: list[tuple[Any, Any]] = []
    for _ in range(clients):
        client = stack.enter_context(reverb.Client(f"tcp://127.0.0.1:{port}"))
        writer = client.trajectory_writer(1, confirm=False)
        stack.callback(writer.close)
        sampler = client.sampler(library.TABLE, LOAD_ITEMS, prefetch=1)
        ends.append((writer, stack.enter_context(sampler)))
    turn = 0

    def loop(calls: int) -> None:
        nonlocal turn
        for _ in range(calls):
            writer, sampler = ends[turn % clients]
            turn += 1
            for _ in range(LOAD_ITEMS):
                writer.append(step)
                writer.create_item(library.TABLE, 1.0, {"x": writer.history["x"][-1]})
            next(sampler)

    loop(clients)
    return Work(loop, 1)


def _many(stack: ExitStack, clients: int) -> Measure:
    port = _start(stack, serve_table, LOAD_BYTES)
    processes = min(clients, CLIENT_PROCESSES)
    return crew_measure(stack, write_and_sample, [(port, clients // processes)] * processes)


def _sampler(stack: ExitStack, size: int) -> Measure:
    client = _client(stack, size)
    sampler = stack.enter_context(client.sampler(library.TABLE, batch_of(size), prefetch=AHEAD))

    def loop(calls: int) -> None:
        for _ in range(calls):
            next(sampler)

    return TimedLoop(loop)


def _raw(stack: ExitStack, size: int, request_bytes: int, ahead: int, n: int = 1) -> Measure:
    """Requests of so many bytes to the bare server, so many ahead of their answers, n a call."""
    port = _start(stack, echo, size)
    zmq_context: zmq.Context[Any] = zmq.Context()
    dealer = zmq_context.socket(zmq.DEALER)
    stack.callback(zmq_context.term)
    stack.callback(dealer.close, 0)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    # As the others' items: of zeros that nobody wrote, all would be read from one page.
    request = np.random.default_rng(0).integers(0, 256, request_bytes, np.uint8)

    def loop(calls: int) -> None:
        open_requests = 0
        for _ in range(calls * n):
            dealer.send(request, copy=False)
            open_requests += 1
            if open_requests == ahead:
                dealer.recv(copy=False)
                open_requests -= 1
        for _ in range(open_requests):
            dealer.recv(copy=False)

    return TimedLoop(loop)


def run(bench: Bench) -> None:
    """Measures this question."""
    for size in QUICK_SIZES if bench.settings.quick else SIZES:
        n = batch_of(size)
        bench.compare(
            NAME,
            f"insert {STREAM} of {size} B, one by one",
            [
                Contender(INSERT_ONE, partial(_items, size=size, confirm=True), ours=True),
                Contender(INSERT_STREAM, partial(_items, size=size, confirm=False), ours=True),
                Contender(
                    RAW_PUSH, partial(_raw, size=1, request_bytes=size, ahead=AHEAD, n=STREAM)
                ),
                Contender(
                    RAW_PUSH_ONE, partial(_raw, size=1, request_bytes=size, ahead=1, n=STREAM)
                ),
            ],
            bytes_per_item=size,
            items_per_call=STREAM,
        )
        bench.compare(
            NAME,
            f"insert {n} of {size} B",
            [
                Contender(INSERT_BATCH, partial(_batches, size=size), ours=True),
                Contender(RAW_PUSH, partial(_raw, size=1, request_bytes=n * size, ahead=1)),
            ],
            bytes_per_item=size,
            items_per_call=n,
        )
        bench.compare(
            NAME,
            f"sample one of {size} B",
            [
                Contender(SAMPLE_ONE, partial(_samples, size=size, n=1), ours=True),
                Contender(RAW_PULL, partial(_raw, size=size, request_bytes=1, ahead=1)),
            ],
            bytes_per_item=size,
        )
        bench.compare(
            NAME,
            f"sample {n} of {size} B",
            [
                Contender(SAMPLE_AHEAD, partial(_sampler, size=size), ours=True),
                Contender(RAW_PULL, partial(_raw, size=n * size, request_bytes=1, ahead=AHEAD)),
            ],
            bytes_per_item=size,
            items_per_call=n,
        )
    for size in QUICK_SIZES if bench.settings.quick else SIZES:
        bench.compare(
            NAME,
            f"how long a sample of one of {size} B takes",
            [
                Contender(SAMPLE_MEDIAN, partial(_percentile, size=size, percent=50), ours=True),
                Contender(SAMPLE_P99, partial(_percentile, size=size, percent=99), ours=True),
            ],
            bytes_per_item=size,
        )
    bench.compare(
        NAME,
        f"clients that each write {LOAD_ITEMS} of {LOAD_BYTES} B and sample as many",
        [
            Contender(f"shmreplay, {n} clients", partial(_many, clients=n), ours=True)
            for n in CLIENTS
        ],
        bytes_per_item=LOAD_BYTES,
        items_per_call=2 * LOAD_ITEMS,
    )
