"""Memory that is full, and memory that comes back.

A store that has no room says so by `ArenaFullError`, has changed nothing, and goes on as soon as
there is room again: after a reset, after deletes, after a writer let go of its history. What
nothing refers to any more is free again, however long a program runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shmreplay as reverb
from shmreplay import errors, rate_limiters, selectors

MIB = 1 << 20
CAPACITY = 8 * MIB
ROOT = Path(__file__).resolve().parents[2]

# What stats() tells besides content, see test_bad_input.py.
AMBIENT = {
    "committed_bytes",
    "arena_committed_bytes",
    "arena_free_bytes",
    "index_bytes",
    "sessions",
}


def table(name: str, max_size: int = 10**6, **options: Any) -> reverb.Table:
    limiter = options.pop("rate_limiter", rate_limiters.MinSize(1))
    sampler = options.pop("sampler", selectors.Uniform())
    options.setdefault("stripes", 1)  # so that it is known which slots there are
    return reverb.Table(name, sampler, selectors.Fifo(), max_size, limiter, **options)


def frame(number: int, size: int = 1000) -> dict[str, npt.NDArray[np.float64]]:
    return {"x": np.full(size, number, np.float64)}


class Full:
    """A store of 8 MiB, its client, and ways to fill it until it says that it is full."""

    def __init__(self, server: reverb.Server) -> None:
        self.server = server
        self.client = server.localhost_client()
        self.writers: list[reverb.TrajectoryWriter] = []
        # Each table gets its first slots while there is room.
        for name in self.client.server_info():
            self.client.insert_batch(name, {"x": np.zeros(1)})
            self.client.reset(name)

    def writer(self, keep: int) -> reverb.TrajectoryWriter:
        self.writers.append(self.client.trajectory_writer(keep))
        return self.writers[-1]

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.client.close()

    def until_full(self, call: Callable[[int], Any], bound: int = 10**6) -> int:
        """How often the call works before it says that the store is full."""
        for number in range(bound):
            try:
                call(number)
            except errors.ArenaFullError:
                return number
        raise AssertionError(f"not full after {bound} calls")

    def to_the_byte(self) -> None:
        """Fills every gap: with large steps, with small ones, with records of items."""
        writer, small = self.writer(keep=10**6), self.writer(keep=10**6)
        for number in range(100):
            small.append({"a": number})
        picked = [small.history["a"][[-1, -3]]]
        for _ in range(200):
            small.create_item("other", 1.0, picked)
        self.until_full(lambda i: writer.append(frame(i)))
        self.until_full(lambda i: small.append({"a": i}))
        self.until_full(lambda i: small.create_item("other", 1.0, picked))

    def content(self) -> dict[str, float]:
        return {
            name: value
            for name, value in self.client.stats().items()
            if name not in AMBIENT and not name.endswith("_waiters")
        }

    @contextmanager
    def refuses(self, *fragments: str) -> Iterator[None]:
        """The block must find the store full, and leave everything as it was."""
        before = self.content()
        with pytest.raises(errors.ArenaFullError) as caught:
            yield
        message = str(caught.value)
        for fragment in ("the store is full", "bytes asked for", "capacity=", *fragments):
            assert fragment in message
        assert isinstance(caught.value, MemoryError)
        assert self.content() == before
        self.client.check()


@pytest.fixture
def full(make_server: Callable[..., reverb.Server]) -> Iterator[Full]:
    tables = [table("t"), table("other"), reverb.Table.queue("queue", 1000)]
    full = Full(make_server(tables, capacity=CAPACITY))
    yield full
    full.close()
    full.server.check()


# --- full, for each call that writes ------------------------------------------------------------


def test_append(full: Full) -> None:
    writer = full.writer(keep=10**6)
    steps = full.until_full(lambda i: writer.append(frame(i)))
    assert steps > CAPACITY / 8000 * 0.8  # most of it was used before it was said to be full
    for _ in range(3):
        with full.refuses("append"):
            writer.append(frame(-1))
        assert writer.episode_steps == steps
    # Items of steps that are there need hardly anything, and read right.
    assert writer.history["x"][-1].numpy().tolist() == [steps - 1] * 1000
    writer.create_item("queue", 1.0, {"x": writer.history["x"][0:1]})
    assert full.client.sample_batch("queue", 1).data["x"][0, 0, 0] == 0
    writer.end_episode()
    assert full.until_full(lambda i: writer.append(frame(i))) > steps * 0.9


def test_append_of_more_than_there_will_ever_be(full: Full) -> None:
    writer = full.writer(keep=2)
    writer.append({"y": 1})
    with full.refuses("append"):
        writer.append({"y": 1, "huge": np.zeros(2 * CAPACITY, np.uint8)})
    writer.append({"y": 2})
    assert sorted(writer.history) == ["y"]
    huge = {"huge": np.zeros((1, 2 * CAPACITY), np.uint8)}
    with pytest.raises(errors.ArenaFullError):
        full.client.insert_batch("t", huge)  # records the structure, and no more than that
    with full.refuses("insert_batch"):
        full.client.insert_batch("t", huge)
    full.client.insert_batch("t", {"huge": np.zeros((1, CAPACITY // 2), np.uint8)})


def test_next_step(full: Full) -> None:
    writer = full.writer(keep=10**6)

    def in_place(number: int) -> None:
        with writer.next_step({"x": reverb.TensorSpec([1000], np.float64)}) as step:
            step["x"][...] = number

    steps = full.until_full(in_place)
    with full.refuses("append"):
        in_place(-1)
    assert writer.episode_steps == steps
    assert writer.history["x"][-1].numpy()[0] == steps - 1
    writer.end_episode()
    in_place(7)
    assert writer.history["x"][-1].numpy()[0] == 7


def test_create_item(full: Full) -> None:
    full.to_the_byte()
    small = full.writers[-1]
    history = small.history["a"]
    for _ in range(3):
        with full.refuses("create_item"):
            small.create_item("other", 1.0, [history[[-1, -5]]])
    # Rows that lie together need no memory of their own, and so go in.
    assert small.create_item("other", 1.0, [history[-1:]]) is not None
    full.client.reset("other")
    assert small.create_item("other", 1.0, [history[[-1, -5]]]) is not None


@pytest.mark.parametrize("room", ["reset", "delete", "evict"])
def test_insert_batch(full: Full, room: str) -> None:
    client = full.client
    keys: list[np.uint64] = []
    batch = {"x": np.zeros((64, 1000))}
    one = {"x": np.ones((1, 30000))}
    client.insert_batch("other", one)
    client.reset("other")
    while True:
        inserts = client.stats()["t/inserts"]
        try:
            keys.extend(client.insert_batch("t", batch))
        except errors.ArenaFullError as error:
            added = client.stats()["t/inserts"] - inserts
            # A part may be in: then the message says how many, and they are whole.
            assert (f"after {added:g} rows" in str(error)) == (added > 0)
            break
    client.check()
    with full.refuses("insert_batch"):
        client.insert_batch("t", one)
    held = int(client.stats()["t/size"])
    assert held > CAPACITY / 8000 * 0.8
    assert client.update_priorities("t", keys, 0.5) == len(keys)  # what needs no memory works
    if room == "reset":
        client.reset("t")
    elif room == "delete":
        client.mutate_priorities("t", deletes=keys[: held // 2])  # type: ignore[arg-type]
        assert client.stats()["t/size"] == held - held // 2
    else:
        small = table("t", max_size=64)
        with reverb.Server([small], capacity=CAPACITY) as server:
            other = server.localhost_client()
            for _ in range(200):  # three times the capacity, through a table that evicts
                other.insert_batch("t", batch)
            assert other.server_info()["t"].current_size == 64
            other.check()
            other.close()
        return
    assert len(client.insert_batch("t", one)) == 1
    client.check()


def test_insert(full: Full) -> None:
    client = full.client
    items = full.until_full(lambda i: client.insert(frame(i), {"t": 1.0, "other": 1.0}))
    assert items > CAPACITY / 8000 * 0.7
    for _ in range(3):
        with full.refuses():
            client.insert(frame(-1), {"t": 1.0, "other": 1.0})
    assert client.stats()["other/size"] == client.stats()["t/size"]
    client.reset("t")
    with full.refuses():  # the steps are still the other table's
        client.insert(frame(-1), {"t": 1.0})
    client.reset("other")
    for number in range(items // 2):
        client.insert(frame(number), {"t": 1.0})
    (sample,) = next(client.sample("t", 1))
    assert sample.data[0].shape == (1000,)


def test_tables_that_grow(full: Full) -> None:
    """Slots and selectors need memory as well: the last of it may go to either."""
    client = full.client
    rows = {"x": np.zeros(4096, np.int8)}
    inserted = 4096 * full.until_full(lambda i: client.insert_batch("t", rows))
    size = int(client.stats()["t/size"])
    assert inserted <= size <= inserted + 4096
    before = full.content()
    with pytest.raises(errors.ArenaFullError, match="the store is full"):
        client.insert_batch("t", rows)
    after = full.content()
    assert after["t/size"] == after["t/inserts"] >= before["t/size"]
    client.check()
    assert len(client.sample_batch("t", 64).info.key) == 64
    client.reset("t")
    for _ in range(size // 4096):
        client.insert_batch("t", rows)
    assert client.stats()["t/size"] == size // 4096 * 4096
    client.check()


def test_memory_of_steps_may_become_memory_of_tables(full: Full) -> None:
    client = full.client
    writer = full.writer(keep=10**6)
    full.until_full(lambda i: writer.append(frame(i)))
    room = full.until_full(lambda i: client.insert_batch("t", {"x": np.zeros(1)}))
    assert room <= 1024  # the slots that the table had from the beginning
    with full.refuses():
        client.insert_batch("t", {"x": np.zeros(1)})
    writer.end_episode()  # now the steps have gone, and all of their memory lies idle
    client.reset("t")
    full.writer(keep=1).append({"y": 1})
    for name in ("t", "other", "queue"):
        client.insert_batch(name, {"x": np.zeros(1000)})
        client.check()
    for _ in range(20):
        client.insert_batch("t", {"x": np.zeros(1000)})
    assert client.stats()["t/size"] == 21 * 1000
    stats = client.stats()
    assert stats["committed_bytes"] <= stats["capacity_bytes"]


def test_a_new_process_can_make_room(full: Full) -> None:
    """Whoever comes to a store that is full to the byte can still look, draw, delete and reset."""
    full.client.insert_batch("queue", {"x": np.arange(10.0)})
    full.to_the_byte()
    assert full.client.stats()["other/size"] > 100
    code = f"""
        import shmreplay as reverb
        from shmreplay import errors
        with reverb.Client({full.server.address!r}) as client:
            client.check()
            sample = client.sample_batch("queue", 10, timeout=10)
            assert sample.data["x"].tolist() == list(range(10))
            keys = client.sample_batch("other", 8, timeout=10).info.key
            client.update_priorities("other", keys, 2.0)
            size = client.server_info()["other"].current_size
            client.mutate_priorities("other", deletes=keys[:1])
            assert client.server_info()["other"].current_size == size - 1
            client.reset("other")
            client.insert_batch("other", {{"z": __import__("numpy").zeros(2)}})
            client.check()
    """
    run_python(code)
    full.client.check()


# --- items that the limiter holds back ----------------------------------------------------------


def test_a_held_back_item_waits_for_memory(make_server: Callable[..., reverb.Server]) -> None:
    """The thread that inserts it meets a full store; the item stays in line until it fits."""
    limiter = rate_limiters.RateLimiter(1.0, 1, -1e9, 1024.0)
    tables = [table("t", rate_limiter=limiter, sampler=selectors.Fifo(), stripes=1), table("other")]
    full = Full(make_server(tables, capacity=CAPACITY))
    client = full.client
    client.insert_batch("t", {"x": np.zeros(1024)})  # as many as slots are made at first
    writer = full.writer(keep=1)
    writer.append({"x": 5.0})
    assert writer.create_item("t", 1.0, {"x": writer.history["x"][-1]}) is None
    full.to_the_byte()
    client.sample_batch("t", 1)  # the limiter now lets the item in, which needs another slot
    for _ in range(2):
        with pytest.raises(errors.ArenaFullError, match=r"held-back item.*the store is full"):
            writer.flush()
        assert client.stats()["t/inserts"] == 1024
        client.check()
    client.reset("other")
    for other in full.writers[1:]:
        other.close()
    writer.flush()
    assert client.stats()["t/inserts"] == 1025
    writer.append({"x": 6.0})
    full.close()
    full.server.check()


# --- a file system that is full -----------------------------------------------------------------


def run_python(code: str, prefix: tuple[str, ...] = ()) -> str:
    """Runs a program, which must end by itself and well, and gives what it wrote."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # A SIGBUS would show as a negative code, or as 135 from a shell.
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def can_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    mount = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


def in_small_shared_memory(size: str) -> tuple[str, ...]:
    """What to put before a command so that it sees a /dev/shm of this size, its own."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ("unshare", "-m", "sh", "-c", mount, "sh")


needs_mount = pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")

FILL_FILE_SYSTEM = """
    import os
    import numpy as np
    import shmreplay as reverb
    from shmreplay import errors, rate_limiters, selectors

    def table(name, max_size=10**6):
        limiter = rate_limiters.MinSize(1)
        return reverb.Table(name, selectors.Uniform(), selectors.Fifo(), max_size, limiter)

    def fill():
        # All of the file system, to the last page.
        file = os.open("/dev/shm/ballast", os.O_CREAT | os.O_RDWR)
        for size in (1 << 20, 1 << 16, 1 << 12):
            try:
                while True:
                    os.posix_fallocate(file, os.fstat(file).st_size, size)
            except OSError:
                pass
        os.close(file)

    def refused(call):
        before = {k: v for k, v in client.stats().items() if k.endswith(("size", "inserts"))}
        try:
            call()
        except errors.ArenaFullError as error:
            assert "/dev/shm" in str(error) and "--shm-size" in str(error), error
        else:
            raise AssertionError("not refused")
        after = {k: v for k, v in client.stats().items() if k.endswith(("size", "inserts"))}
        assert after == before, (before, after)
        client.check()

    def until_full(call):
        for number in range(10**6):
            try:
                call(number)
            except errors.ArenaFullError as error:
                assert "/dev/shm" in str(error) and "--shm-size" in str(error), error
                return number
"""


@needs_mount
@pytest.mark.root
def test_a_file_system_that_is_smaller_than_the_capacity() -> None:
    code = """
    with reverb.Server([table("t"), table("other")], capacity=256 << 20) as server:
        client = server.localhost_client()
        writer = client.trajectory_writer(10**6)
        steps = until_full(lambda i: writer.append({"x": np.full(1000, i, np.float64)}))
        assert 500 < steps < 1100, steps
        refused(lambda: writer.append({"x": np.zeros(1000)}))
        refused(lambda: client.insert_batch("t", {"x": np.zeros((64, 1000))}))
        refused(lambda: client.insert({"y": np.zeros(100000)}, {"other": 1.0}))
        assert writer.history["x"][-1].numpy()[0] == steps - 1
        writer.end_episode()
        again = until_full(lambda i: writer.append({"x": np.full(1000, i, np.float64)}))
        assert again > steps * 0.9, (again, steps)
        writer.end_episode()
        client.insert_batch("t", {"x": np.zeros(5000)})
        client.insert_batch("other", {"x": np.zeros((500, 1000))})
        until_full(lambda i: client.insert_batch("t", {"x": np.zeros(1000)}))
        client.check()
        client.reset("t")
        client.reset("other")
        client.insert_batch("t", {"x": np.zeros((100, 1000))})
        client.sample_batch("t", 256)
        client.check()
        client.close()
    print("done")
    """
    program = textwrap.dedent(FILL_FILE_SYSTEM) + textwrap.dedent(code)
    assert run_python(program, in_small_shared_memory("8m")).endswith("done\n")


@needs_mount
@pytest.mark.root
def test_a_file_system_that_others_fill_to_the_last_page() -> None:
    code = """
    with reverb.Server([table("t"), table("other"), table("bound", 100)]) as server:
        client = server.localhost_client()
        rows = {"x": np.zeros((100, 100))}
        for name in ("t", "bound"):
            client.insert_batch(name, rows)
        writer = client.trajectory_writer(4)
        writer.append({"y": 1})
        fill()
        # What is there can be read, changed and replaced.
        for number in range(300):
            assert client.sample_batch("t", 8).data["x"].shape == (8, 100)
            with client.borrow("t", 4) as items:
                client.update_priorities("t", [item.info.key for item in items], 1.0)
            client.insert_batch("bound", {"x": np.full((1, 100), number, np.float64)})
        until_full(lambda i: client.insert_batch("t", {"x": np.zeros((1000, 100))}))
        refused(lambda: client.insert_batch("t", {"x": np.zeros((1000, 100))}))
        until_full(lambda i: client.insert_batch("other", {"x": np.zeros((2000, 10))}))
        refused(lambda: client.insert_batch("other", {"x": np.zeros((2000, 10))}))
        refused(lambda: writer.append({"y": 1, "z": np.zeros(1 << 16)}))
        writer.append({"y": 2})
        newest = client.sample_batch("bound", 200).data["x"]
        assert newest.min() >= 200 and newest.max() <= 299
        client.check()
        os.unlink("/dev/shm/ballast")
        client.insert_batch("t", {"x": np.zeros((1000, 100))})
        client.insert_batch("other", {"x": np.zeros((2000, 10))})
        client.check()
        client.close()
    assert os.listdir("/dev/shm") == []
    print("done")
    """
    program = textwrap.dedent(FILL_FILE_SYSTEM) + textwrap.dedent(code)
    assert run_python(program, in_small_shared_memory("8m")).endswith("done\n")


@needs_mount
@pytest.mark.root
def test_a_file_system_that_others_fill_meanwhile() -> None:
    # Room comes and goes between the look for it and the taking: nothing is a bus error, which
    # would end the program without "done".
    code = """
    import threading

    def come_and_go():
        file = os.open("/dev/shm/come-and-go", os.O_CREAT | os.O_RDWR)
        while not over.is_set():
            for size in (24 << 20, 40 << 20, 52 << 20, 60 << 20):
                try:
                    os.posix_fallocate(file, 0, size)
                except OSError:
                    pass
                os.ftruncate(file, size // 3)
        os.close(file)
        os.unlink("/dev/shm/come-and-go")

    over = threading.Event()
    thread = threading.Thread(target=come_and_go)
    with reverb.Server([table("t"), table("other")], capacity=1 << 30) as server:
        client = server.localhost_client()
        thread.start()
        try:
            for number in range(40):
                rows = np.full((256, 4096), number, np.float32)  # 4 MiB: whole huge pages
                in_table = until_full(lambda i: client.insert_batch("t", {"x": rows}))
                until_full(lambda i: client.insert_batch("other", {"n": np.arange(20000)}))
                if in_table:
                    assert (client.sample_batch("t", 4).data["x"] == number).all()
                client.reset("t")
                client.reset("other")
        finally:
            over.set()
            thread.join()
        client.check()
        client.close()
    assert os.listdir("/dev/shm") == []
    print("done")
    """
    program = textwrap.dedent(FILL_FILE_SYSTEM) + textwrap.dedent(code)
    assert run_python(program, in_small_shared_memory("64m")).endswith("done\n")


@needs_mount
@pytest.mark.root
def test_a_file_system_with_no_room_for_a_store() -> None:
    code = """
    for options in ({}, {"capacity": 4 << 20}):
        try:
            reverb.Server([table("t")], **options)
        except errors.ArenaFullError as error:
            assert "/dev/shm" in str(error) and "--shm-size" in str(error), error
        else:
            raise AssertionError("not refused")
        assert os.listdir("/dev/shm") == [], os.listdir("/dev/shm")
    print("done")
    """
    program = textwrap.dedent(FILL_FILE_SYSTEM) + textwrap.dedent(code)
    assert run_python(program, in_small_shared_memory("32k")).endswith("done\n")


# --- memory that comes back ---------------------------------------------------------------------


def test_a_long_run_of_trajectories_keeps_to_its_memory(
    make_server: Callable[..., reverb.Server],
) -> None:
    server = make_server([table("t", max_size=50), table("other", max_size=20)], capacity=CAPACITY)
    client = server.localhost_client()
    writer = client.trajectory_writer(num_keep_alive_refs=8)
    used: list[float] = []
    for number in range(6000):
        writer.append({"obs": np.full(50, number, np.float32), "act": number})
        history = writer.history
        if number % 100 >= 8:
            item = {"obs": history["obs"][-8:], "act": history["act"][[-1, -3]]}
            writer.create_item("t", 1.0, item)
            writer.create_item("other", 1.0, history["obs"][-4::2])
        if number % 100 == 99:
            writer.end_episode(clear_buffers=number % 200 == 199)
        if number >= 1000 and number % 50 == 0:
            used.append(client.stats()["arena_used_bytes"])
    # 50 items refer to no more than the blocks of two episodes; a leak would show twentyfold.
    assert max(used) <= 2 * min(used)
    assert max(used) < MIB
    assert client.stats()["t/num_episodes"] <= 2
    client.check()
    client.close()
    writer.close()


def test_a_long_run_of_batches_keeps_to_its_memory(
    make_server: Callable[..., reverb.Server],
) -> None:
    tables = [
        table("t", max_size=500, sampler=selectors.Prioritized(0.6)),
        table("steps", max_size=20),
        reverb.Table.queue("queue", 100),
    ]
    server = make_server(tables, capacity=CAPACITY)
    client = server.localhost_client()
    used: list[float] = []
    for number in range(1500):
        client.insert_batch("t", {"x": np.zeros((32, 20)), "n": np.arange(32)})
        sample = client.sample_batch("t", 16)
        client.update_priorities("t", sample.info.key, np.arange(16.0))
        client.insert({"x": np.float64(number)}, {"queue": 1.0, "steps": 1.0})
        assert client.sample_batch("queue", 1).data["x"].tolist() == [[number]]
        if number % 9 == 0:
            client.mutate_priorities("t", deletes=sample.info.key.tolist())
        if number >= 100:
            used.append(client.stats()["arena_used_bytes"])
    assert max(used) <= 3 * min(used)
    client.check()
    client.close()


def test_a_long_run_of_writers_keeps_to_its_memory(full: Full) -> None:
    """Writers that come and go, closed or dropped, and samplers and borrowers too."""
    client = full.client

    def one_round(number: int) -> None:
        writer = client.trajectory_writer(4)
        writer.append(frame(number, 100))
        writer.create_item("queue", 1.0, writer.history["x"][-1:])
        if number % 2:
            writer.close()
        del writer
        with client.borrow("queue", 1) as items:
            value = float(items[0].data[0, 0])
            del items
        assert value == number

    one_round(0)
    before = full.content()
    for number in range(1, 300):
        one_round(number)
    after = full.content()
    for name in ("arena_used_bytes", "arena_allocations"):
        assert after[name] == before[name]
    assert client.stats()["sessions"] <= 3


def test_a_view_keeps_its_memory_and_no_other(full: Full) -> None:
    client = full.client
    client.insert_batch("t", {"x": np.arange(10.0)})
    with client.borrow("t", 1) as items:
        view = items[0].data["x"]
        value = float(view)
    del items
    client.reset("t")
    client.check()
    held = client.stats()["arena_used_bytes"]
    assert held > 0
    for number in range(50):
        client.insert_batch("t", {"x": np.full((50, 1000), number)})
        client.reset("t")
    assert float(view) == value
    with pytest.raises(ValueError, match="read-only"):
        view[...] = 0
    del view
    client.check()
    assert client.stats()["arena_used_bytes"] < held


def test_at_the_end_only_structures_are_left(make_server: Callable[..., reverb.Server]) -> None:
    server = make_server([table("t"), table("other", 10)], capacity=CAPACITY)
    client = server.localhost_client()
    writer = client.trajectory_writer(5)
    for number in range(500):
        writer.append({"x": float(number), "y": np.zeros(300, np.uint8)})
        writer.create_item("t", 1.0, {"x": writer.history["x"][-1:]})  # structure 1
        if number > 5:
            writer.create_item("other", 1.0, [writer.history["y"][[-1, -3, -5]]])  # structure 2
    client.insert({"z": 1}, {"t": 1.0, "other": 1.0})  # structure 3
    client.insert_batch("t", {"z": np.arange(100)})  # structure 4: no time dimension
    borrowed = client.borrow("t", 3)
    items = borrowed.__enter__()
    client.sample_batch("other", 1)
    client.mutate_priorities("t", deletes=[items[0].info.key])
    assert server.stats()["arena_allocations"] > 20
    for name in ("t", "other"):
        client.reset(name)
    del items
    borrowed.__exit__(None, None, None)
    client.check()
    writer.close()
    client.close()
    stats = server.stats()
    assert stats["sessions"] == 0
    assert stats["arena_allocations"] == 4
    assert stats["arena_used_bytes"] < 4 * 512
    server.check()
