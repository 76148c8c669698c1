"""Forks, closing, signals and deadlines: what becomes of handles, of waiting calls and of data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits, rate_limiters, selectors

ROOT = Path(__file__).resolve().parents[2]
# Seconds after which something is taken to hang; nothing comes near it.
DEADLINE = 60.0

MakeServer = Callable[..., reverb.Server]
RunProcesses = Callable[[str, Sequence[tuple[Callable[..., None], tuple[Any, ...]]]], list[Any]]

# Newer versions of Python warn of forking where there are threads: that is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def make_tables() -> list[reverb.Table]:
    return [
        reverb.Table(
            "t", selectors.Uniform(), selectors.Fifo(), 1000, rate_limiters.MinSize(1), stripes=1
        ),
        reverb.Table.queue("queue", 4),
    ]


def rows(*values: float) -> dict[str, Any]:
    return {"x": np.array(values)}


def values_of(sample: Any) -> list[float]:
    return [float(value) for value in sample.data["x"].ravel()]


def wait_until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE} s"
        time.sleep(0.002)


def counters(client: reverb.Client) -> dict[str, float]:
    """Of stats() what says something of tables, sessions and allocations, but not who waited."""
    waits = ("_refused", "_wait_s")
    return {
        key: value
        for key, value in client.stats().items()
        if ("/" in key and not key.endswith(waits)) or key in ("sessions", "arena_used_bytes")
    }


@pytest.fixture
def server(make_server: MakeServer) -> reverb.Server:
    return make_server(make_tables(), capacity=16 << 20)


@pytest.fixture
def client(server: reverb.Server) -> Iterator[reverb.Client]:
    with server.localhost_client() as client:
        yield client


# --- fork ---------------------------------------------------------------------------------------


@pytest.fixture
def in_child(run_processes: RunProcesses) -> Callable[[Callable[[], Any]], Any]:
    """Runs a function in a forked child, which then ends by `os._exit`; gives its result."""

    def call(function: Callable[[], Any]) -> Any:
        def job(sender: Connection) -> None:
            sender.send(function())

        return run_processes("fork", [(job, ())])[0]

    return call


InChild = Callable[[Callable[[], Any]], Any]


def refused(calls: dict[str, Callable[[], Any]]) -> list[str]:
    """The names of those calls that raise ForkedHandleError, as all of them should."""
    names = []
    for name, call in calls.items():
        try:
            call()
        except errors.ForkedHandleError as error:
            assert "fork" in str(error), error
            assert "make a new" in str(error) or "Make a new" in str(error), error
            names.append(name)
    return names


def test_an_inherited_client_attaches_anew(client: reverb.Client, in_child: InChild) -> None:
    client.insert_batch("t", rows(1, 2, 3))
    client.insert({"y": 1}, {"t": 1.0})
    generator = client.sample("t", 10, emit_timesteps=False)
    next(generator)

    def child() -> list[Any]:
        client.check()
        client.insert_batch("queue", rows(7, 8))
        client.insert({"y": 2}, {"t": 1.0})
        with client.trajectory_writer(1) as writer:
            writer.append({"z": 3})
            writer.create_item("t", 1.0, writer.history["z"][:])
        writer.close()
        info = next(generator).info
        participants = client.stats()["participants"]
        return [info.table_size, participants, client.server_info()["t"].current_size]

    assert in_child(child) == [6, 2, 6]
    assert values_of(client.sample_batch("queue", 2)) == [7, 8]
    assert client.server_info()["t"].current_size == 6
    client.insert({"y": 3}, {"t": 1.0})
    next(generator)
    client.check()


def test_a_grandchild_attaches_too(
    client: reverb.Client, in_child: InChild, run_processes: RunProcesses
) -> None:
    def child() -> float:
        client.insert_batch("queue", rows(1))

        def grandchild(sender: Connection) -> None:
            client.insert_batch("queue", rows(2))
            sender.send(client.stats()["participants"])

        (participants,) = run_processes("fork", [(grandchild, ())])
        client.insert_batch("queue", rows(3))
        return float(participants)

    assert in_child(child) == 3
    assert values_of(client.sample_batch("queue", 3)) == [1, 2, 3]


def test_inherited_writers_samplers_and_borrowers_are_refused(
    server: reverb.Server, client: reverb.Client, in_child: InChild
) -> None:
    client.insert_batch("t", rows(1, 2, 3))
    writer = client.trajectory_writer(4)
    for number in range(3):
        writer.append({"a": number})
    column = writer.history["a"][-1:]
    samplers = [client.sampler("t", 2, prefetch=prefetch) for prefetch in (0, 2)]
    for sampler in samplers:
        next(sampler)
    borrowed = client.borrow("t", 2)
    with client.borrow("t", 2) as items:
        views = [item.data["x"] for item in items]
    table = make_tables()[0]

    def child() -> list[Any]:
        calls: dict[str, Callable[[], Any]] = {
            "append": lambda: writer.append({"a": 9}),
            "create_item": lambda: writer.create_item("t", 1.0, column),
            "flush": lambda: writer.flush(),
            "end_episode": lambda: writer.end_episode(),
            "next_step": lambda: writer.next_step().__enter__(),
            "configure": lambda: writer.configure(
                ("a",), num_keep_alive_refs=1, max_chunk_length=None
            ),
            "numpy": lambda: column.numpy(),
            "exit of a writer": lambda: writer.__exit__(None, None, None),
            "sampler": lambda: next(samplers[0]),
            "sampler with a thread": lambda: next(samplers[1]),
            "borrow": lambda: borrowed.__enter__(),
            "server.stats": lambda: server.stats(),
            "server.check": lambda: server.check(),
        }
        missing = set(calls) - set(refused(calls))
        # To let go of them is no error, and does nothing to the parent.
        writer.close()
        writer.close()
        left = [sampler.close() for sampler in samplers]
        server.stop()
        return [sorted(missing), left, [float(view) for view in views]]

    seen = [float(view) for view in views]
    assert in_child(child) == [[], [[], []], seen]

    writer.append({"a": 3})
    writer.create_item("queue", 1.0, {"x": writer.history["a"][-4:]})
    writer.close()
    for sampler in samplers:
        assert len(next(sampler).info.key) == 2
        sampler.close()
    with borrowed as items:
        assert len(items) == 2
    assert [float(view) for view in views] == seen
    assert table.info.current_size == 0  # a table that no server runs, in either process
    server.check()


def test_pins_of_the_parent_outlast_a_child(client: reverb.Client, in_child: InChild) -> None:
    client.insert_batch("t", {"x": np.full((1, 1000), 5.0)})
    with client.borrow("t") as items:
        view = items[0].data["x"]
    del items

    def child() -> float:
        # Dropped in the child, like everything else, when it ends.
        return float(view.sum())

    assert in_child(child) == 5000
    client.reset("t")
    for number in range(20):
        client.insert_batch("t", {"x": np.full((50, 1000), number)})
        client.reset("t")
    assert float(view.sum()) == 5000
    client.check()


@pytest.mark.parametrize("state", ["sampling", "inserting", "held back", "prefetching"])
def test_forking_while_another_thread_waits(
    server: reverb.Server, client: reverb.Client, in_child: InChild, state: str
) -> None:
    """A child has only the thread that forked: what the others held must not stop it."""
    results: list[Any] = []
    threads: list[threading.Thread] = []
    writer = client.trajectory_writer(1)
    sampler = None
    writer.append({"x": 1.0})
    item = {"x": writer.history["x"][-1]}

    def in_thread(function: Callable[[], Any]) -> None:
        threads.append(threading.Thread(target=lambda: results.append(function())))
        threads[-1].start()

    if state == "sampling":
        in_thread(lambda: values_of(client.sample_batch("queue", 2)))
    elif state == "inserting":
        in_thread(lambda: len(client.insert_batch("queue", rows(1, 2, 3, 4, 5))))
    elif state == "held back":
        for _ in range(6):
            writer.create_item("queue", 1.0, item)
        in_thread(lambda: writer.flush())
    else:
        sampler = client.sampler("queue", 2)
    word = "sample" if state in ("sampling", "prefetching") else "insert"
    wait_until(lambda: server.stats()[f"queue/{word}_waiters"] > 0, state)

    def child() -> list[str]:
        client.insert_batch("t", rows(1))
        client.sample_batch("t", 1)
        calls: dict[str, Callable[[], Any]] = {
            "append": lambda: writer.append({"x": 2.0}),
            "flush": lambda: writer.flush(),
        }
        writer.close()
        if sampler is not None:
            calls["sampler"] = lambda: next(sampler)
        return refused(calls)

    assert in_child(child)[:2] == ["append", "flush"]
    assert client.server_info()["t"].current_size == 1

    if word == "sample":
        client.insert_batch("queue", rows(1, 2))
    else:
        assert len(client.sample_batch("queue", 4).info.key) == 4
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    if sampler is not None:
        assert values_of(next(sampler)) == [1, 2]
        sampler.close()
    assert results == {"sampling": [[1, 2]], "inserting": [5], "held back": [None]}.get(state, [])
    writer.close()
    client.check()


def test_a_child_that_ends_normally(server: reverb.Server) -> None:
    """Its interpreter takes everything down, inherited handles too: none of it is its own."""
    code = """
        import os, sys
        import numpy as np
        import shmreplay as reverb
        from shmreplay import rate_limiters, selectors

        limiter = rate_limiters.MinSize(1)
        table = reverb.Table("t", selectors.Uniform(), selectors.Fifo(), 100, limiter)
        server = reverb.Server([table], capacity=8 << 20)
        client = server.localhost_client()
        writer = client.trajectory_writer(3)
        writer.append({"x": 1.0})
        writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
        client.insert({"x": 2.0}, {"t": 1.0})
        sampler = client.sampler("t", 2) if "sampler" in sys.argv else None
        borrowed = client.borrow("t")
        items = borrowed.__enter__()

        child = os.fork()
        if child == 0:
            client.insert({"x": 3.0}, {"t": 1.0})
            sys.exit(7)  # all the way through the interpreter's end
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert server.stats()["t/size"] == 3
        assert os.path.exists(f"/dev/shm/shmreplay.{os.geteuid()}.{server.name}")
        writer.append({"x": 4.0})
        writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
        items[0].data["x"].sum()
        del items
        borrowed.__exit__(None, None, None)
        if sampler is not None:
            sampler.close()
        writer.close()
        client.check()
        server.stop()
        print("done")
    """
    for arguments in ([], ["sampler"]):
        done = run_python(code, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "done\n"
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "ending",
    [
        "os._exit(7)",
        "os.execv('/bin/sh', ['sh', '-c', 'exit 7'])",
        "sys.exit(7)",
        "atexit.register(client.insert, {'x': 1.0}, {'t': 1.0}); sys.exit(7)",
        "os.kill(os.getpid(), 9)",
        "raise KeyError",
        "del writer, items, borrowed, client, server; gc.collect(); os._exit(7)",
        "server.stop(); writer.close(); client.close(); server.__exit__(None, None, None)",
    ],
)
def test_a_parent_is_untouched_whatever_its_child_does(ending: str) -> None:
    code = f"""
        import atexit, gc, os, subprocess, sys
        import numpy as np
        import shmreplay as reverb
        from shmreplay import rate_limiters, selectors

        limiter = rate_limiters.MinSize(1)
        table = reverb.Table("t", selectors.Uniform(), selectors.Fifo(), 100, limiter)
        server = reverb.Server([table], capacity=8 << 20)
        client = server.localhost_client()
        client.insert_batch("t", {{"x": np.arange(4.0)}})
        writer = client.trajectory_writer(3)
        writer.append({{"x": 1.0}})
        borrowed = client.borrow("t", 3)
        items = borrowed.__enter__()
        seen = [float(item.data["x"]) for item in items]
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            {ending}
        os.waitpid(child, 0)
        # Also one that was not forked by Python.
        subprocess.run(["/bin/true"], check=True)
        server._connection.store.reclaim_dead()
        (me,) = server._connection.store.participants()
        assert me.alive and me.pid == os.getpid()
        # Others see it as alive.
        look = "import sys; from shmreplay import recovery, cli; sys.exit(cli.main(['check', "
        subprocess.run([sys.executable, "-c", look + repr(server.name) + "]))"], check=True)
        assert [float(item.data["x"]) for item in items] == seen
        assert server.stats()["borrowed_items"] == 3
        del items
        borrowed.__exit__(None, None, None)
        writer.append({{"x": 4.0}})
        writer.create_item("t", 1.0, {{"x": writer.history["x"][-1]}})
        assert len(list(client.sample("t", 5, emit_timesteps=False))) == 5
        writer.close()
        client.check()
        assert os.path.exists(f"/dev/shm/shmreplay.{{os.geteuid()}}.{{server.name}}.lease")
        server.stop()
        print("done")
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            textwrap.dedent(code),
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


# --- closing ------------------------------------------------------------------------------------


def hold_back(client: reverb.Client, items: int) -> reverb.TrajectoryWriter:
    writer = client.trajectory_writer(1)
    writer.append({"x": 1.0})
    for _ in range(items):
        writer.create_item("queue", 1.0, {"x": writer.history["x"][-1]})
    return writer


def fill_window(client: reverb.Client) -> None:
    writer = hold_back(client, 4 + limits.WRITER_WINDOW_ITEMS)
    writer.create_item("queue", 1.0, {"x": writer.history["x"][-1]})


def insert_five(client: reverb.Client) -> None:
    for number in range(5):
        client.insert({"x": float(number)}, {"queue": 1.0})


WAITS_FOR_ITEMS: dict[str, Callable[[reverb.Client], Any]] = {
    "sample": lambda c: next(c.sample("queue", 1)),
    "sample_batch": lambda c: c.sample_batch("queue", 2),
    "sample_batch with a timeout": lambda c: c.sample_batch("queue", 2, timeout=DEADLINE),
    "borrow": lambda c: c.borrow("queue").__enter__(),
    "sampler": lambda c: next(c.sampler("queue", 2)),
    "sampler without a thread": lambda c: next(c.sampler("queue", 2, prefetch=0)),
}
WAITS_FOR_ROOM: dict[str, Callable[[reverb.Client], Any]] = {
    "insert": insert_five,
    "insert_batch": lambda c: c.insert_batch("queue", rows(1, 2, 3, 4, 5)),
    "flush": lambda c: hold_back(c, 6).flush(),
    "flush with a timeout": lambda c: hold_back(c, 6).flush(timeout_ms=int(1000 * DEADLINE)),
    "end_episode": lambda c: hold_back(c, 6).end_episode(),
    "create_item": fill_window,
    "exit of a writer": lambda c: hold_back(c, 6).__exit__(None, None, None),
}
WAITS = {**WAITS_FOR_ITEMS, **WAITS_FOR_ROOM}


def waiters(server: reverb.Server, call: str) -> float:
    word = "sample" if call in WAITS_FOR_ITEMS else "insert"
    return server.stats()[f"queue/{word}_waiters"]


def how_it_ends(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


def test_every_call_of_a_writer_says_that_the_server_was_stopped() -> None:
    table = reverb.Table.queue("q", 1)
    with reverb.Server([table], capacity=8 << 20) as server:
        writer = server.localhost_client().trajectory_writer(4)
        for step in range(3):  # the first fits, the others are held back
            writer.append({"x": step})
            writer.create_item("q", 1.0, {"x": writer.history["x"][-1:]})
        held = {"x": writer.history["x"][-1:]}
        server.stop()
        calls: list[Callable[[], object]] = [
            lambda: writer.append({"x": 3}),
            lambda: writer.create_item("q", 1.0, held),
            writer.flush,
            writer.end_episode,
        ]
        for call in calls:
            with pytest.raises(reverb.errors.ServerClosedError):
                call()


@pytest.mark.parametrize("n_before", [0, 1, 4])
@pytest.mark.parametrize("ended", [False, True])
def test_a_structured_writer_says_that_the_server_was_stopped(n_before: int, ended: bool) -> None:
    """Also of a step that completes no item."""
    table = reverb.Table.queue("q", 10)
    field = reverb.structured_writer.create_reference_step({"x": None})["x"]
    config = reverb.structured_writer.create_config({"x": field[-2:]}, table="q")
    with reverb.Server([table], capacity=8 << 20) as server:
        writer = server.localhost_client().structured_writer([config])
        for step in range(n_before):
            writer.append({"x": step})
        if ended:
            writer.end_episode()
        server.stop()
        for _ in range(3):
            with pytest.raises(reverb.errors.ServerClosedError):
                writer.append({"x": 9})


@pytest.mark.parametrize("call", WAITS)
def test_stopping_the_server_wakes_a_thread(server: reverb.Server, call: str) -> None:
    client = server.localhost_client()
    client.server_info()
    ends: list[str] = []
    thread = threading.Thread(target=lambda: ends.append(how_it_ends(lambda: WAITS[call](client))))
    thread.start()
    wait_until(lambda: waiters(server, call) > 0, call)
    server.stop()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert ends[0].startswith("ServerClosedError: ")
    assert "server has closed this store" in ends[0]
    again = how_it_ends(lambda: client.sample_batch("t", 1))
    assert again.startswith("ServerClosedError")
    client.close()


def wait_elsewhere(sender: Connection, address: str, call: str) -> None:
    with reverb.Client(address) as client:
        sender.send(how_it_ends(lambda: WAITS[call](client)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_stopping_the_server_wakes_other_processes(
    server: reverb.Server, run_processes: RunProcesses, method: str
) -> None:
    # Those that wait for room find none, those that wait for items find none: the one kind each
    # has a queue of its own.
    kinds = [WAITS_FOR_ITEMS] if method == "spawn" else [WAITS_FOR_ROOM]
    calls = [call for kind in kinds for call in kind]
    address = server.address

    def stop() -> None:
        wait_until(lambda: waiters(server, calls[0]) >= len(calls), "all are waiting")
        server.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    ends = run_processes(method, [(wait_elsewhere, (address, call)) for call in calls])
    stopper.join(DEADLINE)
    assert not stopper.is_alive()
    for call, end in zip(calls, ends, strict=True):
        assert end.startswith("ServerClosedError: "), call


def test_stopping_the_server_under_load(make_server: MakeServer) -> None:
    """Every thread gets the error, none crashes or hangs, whatever it is in the middle of."""
    server = make_server(make_tables(), capacity=16 << 20)
    client = server.localhost_client()
    client.insert_batch("t", rows(1, 2, 3))
    busy = threading.Barrier(7)
    ends: list[str] = []

    def hammer(call: Callable[[], Any]) -> None:
        def forever() -> None:
            call()
            busy.wait(DEADLINE)
            while True:
                call()

        ends.append(how_it_ends(forever))

    writer = client.trajectory_writer(2)

    def write() -> None:
        writer.append({"x": np.zeros(100)})
        writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})

    def borrow() -> None:
        with client.borrow("t", 3):
            pass

    calls: list[Callable[[], Any]] = [
        write,
        borrow,
        lambda: client.insert_batch("t", rows(1, 2)),
        lambda: client.sample_batch("t", 1),
        lambda: client.update_priorities("t", [1], [1.0]),
        lambda: client.insert({"x": 1.0}, {"t": 1.0}),
    ]
    threads = [threading.Thread(target=hammer, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    busy.wait(DEADLINE)
    server.stop()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert [end.split(":")[0] for end in ends] == ["ServerClosedError"] * len(calls)
    writer.close()
    client.close()


def test_closing_a_client_in_use(server: reverb.Server, client: reverb.Client) -> None:
    """The call that waits keeps what it needs, and ends well; later ones say that it is closed."""
    other = server.localhost_client()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(other.sample_batch("queue", 2)))
    thread.start()
    wait_until(lambda: server.stats()["queue/sample_waiters"] > 0, "waiting")
    other.close()
    client.insert_batch("queue", rows(1, 2))
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert values_of(results[0]) == [1, 2]
    with pytest.raises(errors.ServerClosedError):
        other.server_info()
    wait_until(lambda: server.stats()["sessions"] <= 1, "all sessions are given back")
    client.check()


def test_closing_a_writer_from_another_thread(
    server: reverb.Server, client: reverb.Client, caplog: pytest.LogCaptureFixture
) -> None:
    writer = hold_back(client, 6)
    ends: list[str] = []
    thread = threading.Thread(target=lambda: ends.append(how_it_ends(lambda: writer.flush())))
    thread.start()
    wait_until(lambda: server.stats()["queue/insert_waiters"] > 0, "held back")
    writer.close()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert "2 items" in caplog.text
    assert len(client.sample_batch("queue", 4).info.key) == 4
    with pytest.raises(errors.DeadlineExceededError):
        client.sample_batch("queue", 1, timeout=0)
    client.check()


def test_closing_everything_in_use(server: reverb.Server) -> None:
    """Each call that meets the closing raises an error of ours or ends well; none crashes."""
    for _ in range(20):
        client = server.localhost_client()
        client.insert_batch("t", rows(1, 2, 3))
        writer = client.trajectory_writer(2)
        sampler = client.sampler("t", 2)
        busy = threading.Barrier(8)

        def hammer(call: Callable[[], Any], ends: list[str], busy: threading.Barrier) -> None:
            def forever() -> None:
                try:
                    call()
                except BaseException:
                    busy.abort()
                    raise
                busy.wait(DEADLINE)
                while True:
                    call()

            ends.append(how_it_ends(forever))

        def write(writer: reverb.TrajectoryWriter) -> None:
            writer.append({"x": 1})
            writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})

        def borrow_some(client: reverb.Client) -> None:
            with client.borrow("t", 3) as items:
                items[0].data["x"].sum()

        calls: list[Callable[[], Any]] = [
            lambda: write(writer),  # noqa: B023 - ends before the next round
            lambda: next(sampler),  # noqa: B023
            lambda: borrow_some(client),  # noqa: B023
            lambda: client.insert_batch("t", rows(1, 2)),  # noqa: B023
            lambda: client.mutate_priorities("t", {1: 1.0}, [1]),  # noqa: B023
            lambda: list(client.sample("t", 2, emit_timesteps=False)),  # noqa: B023
            lambda: client.stats(),  # noqa: B023
        ]
        ends: list[str] = []
        threads = [
            threading.Thread(target=hammer, args=(call, ends, busy), daemon=True) for call in calls
        ]
        for thread in threads:
            thread.start()
        try:
            busy.wait(DEADLINE)
        except threading.BrokenBarrierError:
            pytest.fail(f"a call failed before anything was closed: {ends}")
        writer.close()
        sampler.close()
        client.close()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        assert len(ends) == len(calls)
        assert {end.split(":")[0] for end in ends} <= {"ServerClosedError", "WriterClosedError"}, (
            ends
        )
    wait_until(lambda: server.stats()["sessions"] == 0, "all sessions are given back")
    server.check()


# --- signals ------------------------------------------------------------------------------------

PROLOGUE = """
    import json, os, signal, sys, threading
    import numpy as np
    import shmreplay as reverb
    from shmreplay import errors

    client = reverb.Client(sys.argv[1])
    client.server_info()

    def rows(*values):
        return {"x": np.array(values, np.float64)}

    def held_back(items):
        writer = client.trajectory_writer(1)
        for number in range(items):
            writer.append({"x": float(number)})
            writer.create_item("queue", 1.0, {"x": writer.history["x"][-1]})
        return writer

    def report(*values):
        print(json.dumps(values), flush=True)

    def interrupted(call):
        try:
            report("begin")
            call()
        except KeyboardInterrupt:
            report("interrupted")
        else:
            report("not interrupted")
"""


class Program:
    """A program in another process, which reports line by line what it does."""

    def __init__(self, server: reverb.Server, code: str) -> None:
        text = textwrap.dedent(PROLOGUE) + textwrap.dedent(code)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, server.address],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def next(self) -> list[Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait(DEADLINE)}"
        result: list[Any] = json.loads(line)
        return result

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        assert self.process.wait(DEADLINE) == 0


@contextmanager
def program(server: reverb.Server, code: str) -> Iterator[Program]:
    running = Program(server, code)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        for stream in (running.process.stdin, running.process.stdout):
            assert stream is not None
            stream.close()


def test_ctrl_c_while_sampling(server: reverb.Server, client: reverb.Client) -> None:
    client.insert_batch("queue", rows(1, 2))
    code = """
        interrupted(lambda: client.sample_batch("queue", 4))
        input()
        report(client.sample_batch("queue", 1, timeout=0).data["x"].tolist())
        report(client.sample_batch("queue", 3, timeout=20).data["x"].tolist())
        client.check()
        client.close()
    """
    with program(server, code) as running:
        assert running.next() == ["begin"]
        # It has drawn the two that there are, and waits for two more.
        wait_until(lambda: server.stats()["queue/samples"] == 2, "two are drawn")
        wait_until(lambda: server.stats()["queue/sample_waiters"] > 0, "it waits")
        running.signal(signal.SIGINT)
        assert running.next() == ["interrupted"]
        client.insert_batch("queue", rows(3, 4))
        running.go_on()
        # Nothing is lost, and the order is kept.
        assert running.next() == [[1.0]]
        assert running.next() == [[2.0, 3.0, 4.0]]
        running.end()
    client.check()


@pytest.mark.parametrize(
    "call",
    [
        "next(client.sample('queue', 1))",
        "client.borrow('queue').__enter__()",
        "next(client.sampler('queue', 1))",
        "next(client.sampler('queue', 1, prefetch=0))",
    ],
)
def test_ctrl_c_while_waiting_for_items(
    server: reverb.Server, client: reverb.Client, call: str
) -> None:
    code = f"""
        interrupted(lambda: {call})
        client.insert_batch("t", rows(5))
        report(client.sample_batch("t", 1).data["x"].tolist())
        os._exit(0)
    """
    with program(server, code) as running:
        assert running.next() == ["begin"]
        wait_until(lambda: server.stats()["queue/sample_waiters"] > 0, "it waits")
        running.signal(signal.SIGINT)
        assert running.next() == ["interrupted"]
        assert running.next() == [[5.0]]
        running.end()
    client.check()


def test_ctrl_c_while_inserting(server: reverb.Server, client: reverb.Client) -> None:
    code = """
        interrupted(lambda: client.insert_batch("queue", rows(1, 2, 3, 4, 5, 6)))
        input()
        client.insert_batch("queue", rows(5, 6))
        interrupted(lambda: [client.insert({"x": float(i)}, {"queue": 1.0}) for i in range(9)])
        input()
        client.insert({"x": 8.0}, {"queue": 1.0})
        client.check()
        report("done")
        client.close()
    """
    with program(server, code) as running:
        assert running.next() == ["begin"]
        wait_until(lambda: server.stats()["queue/insert_waiters"] > 0, "it waits")
        running.signal(signal.SIGINT)
        assert running.next() == ["interrupted"]
        # The first four are in, in order and whole; the others are not in at all.
        assert client.stats()["queue/inserts"] == 4
        assert values_of(client.sample_batch("queue", 4)) == [1, 2, 3, 4]
        client.check()
        running.go_on()
        assert running.next() == ["begin"]
        wait_until(lambda: server.stats()["queue/size"] == 4, "it is full")
        wait_until(lambda: server.stats()["queue/insert_waiters"] > 0, "it waits")
        running.signal(signal.SIGINT)
        assert running.next() == ["interrupted"]
        items = [float(item.data["x"].item()) for item in borrow(client, 4)]
        assert items == [5, 6, 0, 1]
        running.go_on()
        assert running.next() == ["done"]
        running.end()
    assert [float(item.data["x"].item()) for item in borrow(client, 1)] == [8]
    client.check()


def borrow(client: reverb.Client, number: int) -> list[Any]:
    with client.borrow("queue", number, timeout=DEADLINE) as items:
        return items


def test_ctrl_c_while_flushing(server: reverb.Server, client: reverb.Client) -> None:
    code = """
        writer = held_back(7)
        interrupted(writer.flush)
        report(len(writer.pending))
        interrupted(writer.end_episode)
        report(len(writer.pending), writer.episode_steps)
        writer.flush(timeout_ms=20000)
        report(len(writer.pending))
        writer.close()
        client.close()
    """
    with program(server, code) as running:
        for expected in ([3], [3, 7]):
            assert running.next() == ["begin"]
            wait_until(lambda: server.stats()["queue/insert_waiters"] > 0, "it waits")
            running.signal(signal.SIGINT)
            assert running.next() == ["interrupted"]
            assert running.next() == expected
        # What was held back is still in line, and goes in as soon as it may.
        assert values_of(client.sample_batch("queue", 4)) == [0, 1, 2, 3]
        assert running.next() == [0]
        running.end()
    assert values_of(client.sample_batch("queue", 3)) == [4, 5, 6]
    client.check()


@pytest.mark.parametrize(
    "call",
    [
        "full.create_item('queue', 1.0, {'x': full.history['x'][-1]})",
        "full.__exit__(None, None, None)",
        "full.flush(timeout_ms=100_000)",
        "full.end_episode(timeout_ms=100_000)",
        "client.insert_batch('queue', rows(1), timeout=100)",
        "client.insert({'x': 1.0}, {'queue': 1.0}, timeout=100)",
    ],
)
def test_ctrl_c_while_waiting_for_room(
    server: reverb.Server, client: reverb.Client, call: str
) -> None:
    client.insert_batch("queue", rows(1, 2, 3, 4))
    code = f"""
        from shmreplay import limits
        full = held_back(limits.WRITER_WINDOW_ITEMS)
        interrupted(lambda: {call})
        report(len(full.pending))
        full.close()
        client.check()
        client.close()
    """
    with program(server, code) as running:
        assert running.next() == ["begin"]
        wait_until(lambda: server.stats()["queue/insert_waiters"] > 0, "it waits")
        running.signal(signal.SIGINT)
        assert running.next() == ["interrupted"]
        assert running.next() == [limits.WRITER_WINDOW_ITEMS]
        running.end()
    client.check()


@pytest.mark.parametrize(
    "call",
    [
        "reverb.Client('localhost:1').server_info()",
        "reverb.Client('localhost:1').sample_batch('t', 1)",
        "Store.open(being_made, timeout=None)",
        "own.wait()",
        "sampler.close()",
    ],
)
def test_ctrl_c_in_other_calls_that_wait(server: reverb.Server, call: str) -> None:
    """A moment after they have begun, as nothing tells that they wait."""
    code = f"""
        import time
        from contextlib import ExitStack
        from shmreplay import lease, segment
        from shmreplay.store import Store

        table = reverb.Table.queue("q", 1)
        own = reverb.Server([table], capacity=4 << 20)
        being_made = own.name + "-2"
        maker = os.fork()
        if maker == 0:
            held = lease.lock_new(being_made, ExitStack())
            signal.pause()
        while not os.path.exists(f"/dev/shm/shmreplay.{{os.geteuid()}}.{{being_made}}.lease"):
            time.sleep(0.001)
        sampler = own.localhost_client().sampler("q", 1)
        if "sampler" in {call!r}:
            stuck = threading.Event()
            draw = sampler._ahead.draw
            sampler._ahead.draw = lambda ended: stuck.wait()
            own.localhost_client().insert({{"x": 1}}, {{"q": 1.0}})
            next(sampler)
        soon = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        interrupted(lambda: (soon.start(), {call}))
        report(handlers == [signal.getsignal(number) for number in signal.valid_signals()])
        report(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        own.stop()
        os.kill(maker, signal.SIGKILL)
        os.waitpid(maker, 0)
        for suffix in ("", ".lease"):
            path = f"/dev/shm/shmreplay.{{os.geteuid()}}.{{being_made}}{{suffix}}"
            if os.path.exists(path):
                os.unlink(path)
        report("cleared")
        os._exit(0)
    """
    with program(server, code) as running:
        for expected in (["begin"], ["interrupted"], [True], [True], ["cleared"]):
            assert running.next() == expected
        running.end()


def test_signals_with_handlers_do_not_disturb(server: reverb.Server, client: reverb.Client) -> None:
    """A storm of signals whose handlers return: calls go on waiting, and end as they should."""
    code = """
        caught = []
        signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        report("begin")
        report(client.sample_batch("queue", 4).data["x"].tolist())
        client.insert_batch("queue", rows(5, 6, 7, 8, 9, 10))
        try:
            client.sample_batch("t", 1, timeout=0.3)
        except errors.DeadlineExceededError:
            report("deadline", len(caught) > 5)
        client.insert_batch("t", {"x": np.zeros((4000, 200))})  # commits memory meanwhile
        report(client.server_info()["t"].current_size)
        client.check()
        signal.setitimer(signal.ITIMER_REAL, 0)
        client.close()
    """
    with program(server, code) as running:
        assert running.next() == ["begin"]
        wait_until(lambda: server.stats()["queue/sample_waiters"] > 0, "it waits")
        client.insert_batch("queue", rows(1, 2, 3, 4))
        assert running.next() == [[1.0, 2.0, 3.0, 4.0]]
        wait_until(lambda: server.stats()["queue/insert_waiters"] > 0, "it waits for room")
        assert values_of(client.sample_batch("queue", 4)) == [5, 6, 7, 8]
        assert running.next() == ["deadline", True]
        assert running.next() == [1000]
        running.end()
    client.check()


# --- a client that is killed --------------------------------------------------------------------

HOLD_THINGS = """
    writer = client.trajectory_writer(10**6)
    for number in range(200):
        writer.append({"x": np.full(1000, number, np.float64)})
    items = [writer.history["x"][[-1, -3]], writer.history["x"][[-2, -4]]]
    for item in items:
        writer.create_item("t", 1.0, item)
    borrowed = client.borrow("t", 2)
    pinned = borrowed.__enter__()
    other = held_back(6)
"""


@pytest.mark.parametrize("waiting", ["", "sample_batch", "insert_batch", "flush"])
def test_memory_of_a_killed_client_comes_back(
    server: reverb.Server, client: reverb.Client, waiting: str
) -> None:
    client.insert_batch("t", rows(1, 2))
    client.sample_batch("t", 2)
    client.reset("t")
    client.insert_batch("queue", rows(1))
    client.sample_batch("queue", 1)
    before = client.stats()
    end = {
        "": "report('holds'); input()",
        "sample_batch": "client.reset('t'); report('holds'); client.sample_batch('t', 1)",
        "insert_batch": "report('holds'); client.insert_batch('queue', rows(1, 2))",
        "flush": "report('holds'); other.flush()",
    }[waiting]
    with program(server, f"{HOLD_THINGS}    {end}\n") as running:
        assert running.next() == ["holds"]
        word = "sample" if waiting == "sample_batch" else "insert"
        table = "t" if waiting == "sample_batch" else "queue"
        # Where it inserts a batch, what is held back waits, too.
        n = 2 if waiting == "insert_batch" else 1
        wait_until(lambda: server.stats()[f"{table}/{word}_waiters"] >= n, "it waits")
        during = client.stats()
        assert during["participants"] == before["participants"] + 1
        assert during["arena_used_bytes"] > before["arena_used_bytes"] + 200 * 8000
        running.signal(signal.SIGKILL)
        running.process.wait(DEADLINE)
        # The others go on at once, and do not wait for anything of the dead.
        client.insert_batch("t", rows(1, 2, 3))
        with client.borrow("t", 64) as items:
            assert len(items) == 64
        del items
        assert len(client.sample_batch("queue", 4).info.key) == 4  # those that were let in
        client.insert_batch("queue", rows(9))
        assert values_of(client.sample_batch("queue", 1)) == [9]
        client.reset("t")
        wait_until(
            lambda: client.stats()["participants"] == before["participants"], "it is cleared away"
        )
    # Structures of items are kept for as long as the store; these have less than 128 bytes each.
    after = client.stats()
    assert after["arena_used_bytes"] <= before["arena_used_bytes"] + 4 * 192
    assert after["sessions"] == before["sessions"]
    assert after["repairs"] <= 1  # it may just have looked whether it still has to wait
    client.check()


def test_many_clients_that_are_killed(server: reverb.Server, client: reverb.Client) -> None:
    client.insert_batch("t", rows(1, 2, 3))
    before = client.stats()
    code = "client.borrow('t', 3).__enter__(); w = held_back(9); report('holds'); input()"
    for _ in range(3):
        with program(server, code) as one, program(server, code) as two:
            assert one.next() == two.next() == ["holds"]
            one.signal(signal.SIGKILL)
            two.signal(signal.SIGKILL)
        client.reset("queue")
    wait_until(lambda: client.stats()["participants"] == 1, "they are cleared away")
    after = client.stats()
    assert after["arena_allocations"] <= before["arena_allocations"] + 2
    assert after["sessions"] == before["sessions"]
    client.check()


# --- deadlines ----------------------------------------------------------------------------------

TIMED: dict[str, Callable[[reverb.Client, float], Any]] = {
    "sample": lambda c, t: next(c.sample("queue", 1, timeout=t)),
    "sample_batch": lambda c, t: c.sample_batch("queue", 2, timeout=t),
    "borrow": lambda c, t: c.borrow("queue", timeout=t).__enter__(),
    "sampler without a thread": lambda c, t: next(c.sampler("queue", 2, prefetch=0, timeout=t)),
}


@pytest.mark.parametrize("call", TIMED)
def test_deadlines_of_sampling(client: reverb.Client, call: str) -> None:
    client.insert_batch("t", rows(1))
    for timeout in (0, 0.0, 0.05, 0.25):
        before = counters(client)
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceededError, match=r"'queue'.*rate limiter") as caught:
            TIMED[call](client, timeout)
        assert time.monotonic() - started >= timeout
        assert str(timeout) in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
        assert counters(client) == before
    client.insert_batch("queue", rows(1, 2))
    TIMED[call](client, DEADLINE)
    client.check()


def test_deadline_of_a_sampler(client: reverb.Client) -> None:
    with client.sampler("queue", 2, timeout=0.1) as sampler:
        for _ in range(2):
            with pytest.raises(errors.DeadlineExceededError, match=r"0\.1 s.*'queue'"):
                next(sampler)
        client.insert_batch("queue", rows(1, 2))
        assert values_of(next(sampler)) == [1, 2]


def test_a_sampler_without_deadline_gives_whole_batches(client: reverb.Client) -> None:
    """However slowly the items come; what it has drawn when it is closed is not lost."""
    with client.sampler("queue", 3, prefetch=1) as sampler:
        for number in range(7):
            client.insert_batch("queue", rows(number), timeout=DEADLINE)
            if number < 6:
                wait_until(lambda: client.stats()["queue/samples"] > number, "it is drawn")  # noqa: B023
            if number % 3 == 2:
                wanted = [number - 2, number - 1, number]
                assert values_of(next(sampler)) == wanted
        wait_until(lambda: client.stats()["queue/samples"] == 7, "the last is drawn")
        left = sampler.close()
    assert [values_of(batch) for batch in left] == [[6]]


def test_a_batch_that_is_short_at_its_deadline(client: reverb.Client) -> None:
    client.insert_batch("queue", rows(1, 2, 3))
    for timeout in (0, 0.1):
        sample = client.sample_batch("queue", 2 if timeout == 0 else 5, timeout=timeout)
        assert values_of(sample) == ([1, 2] if timeout == 0 else [3])
        assert sample.info.key.shape == sample.data["x"].shape
    client.check()


def test_deadlines_of_inserting(client: reverb.Client) -> None:
    client.insert_batch("queue", rows(1, 2, 3))
    for timeout in (0, 0.1):
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceededError, match=r"1 items inserted.*'queue'"):
            client.insert_batch("queue", rows(4, 5), timeout=timeout)
        assert time.monotonic() - started >= timeout
        assert client.stats()["queue/inserts"] == 4
        client.check()
        client.mutate_priorities("queue", deletes=client.sample_batch("queue", 1).info.key)
        client.insert_batch("queue", rows(6), timeout=0)
        assert values_of(client.sample_batch("queue", 4)) == [2, 3, 4, 6]
        client.reset("queue")
        client.insert_batch("queue", rows(1, 2, 3))
    client.insert_batch("queue", rows(4))
    started = time.monotonic()
    with pytest.raises(errors.DeadlineExceededError, match="held back") as caught:
        client.insert({"x": 1.0}, {"t": 1.0, "queue": 1.0}, timeout=0.1)
    assert time.monotonic() - started >= 0.1
    assert caught.value.__notes__ == ["inserted into: ['t']"]
    assert client.stats()["t/size"] == 1
    client.check()


def test_deadlines_of_a_writer(client: reverb.Client) -> None:
    writer = hold_back(client, 6)
    for call in (writer.flush, writer.end_episode):
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceededError, match=r"2 items held back.*'queue'"):
            call(timeout_ms=100)
        assert time.monotonic() - started >= 0.1
        assert writer.episode_steps == 1
        assert client.stats()["queue/inserts"] == 4
    writer.flush(2, timeout_ms=int(1000 * DEADLINE))
    with pytest.raises(errors.DeadlineExceededError):
        writer.end_episode(timeout_ms=0)
    assert len(client.sample_batch("queue", 4).info.key) == 4
    writer.end_episode(timeout_ms=int(1000 * DEADLINE))
    assert client.stats()["queue/inserts"] == 6
    writer.close()
    client.check()
