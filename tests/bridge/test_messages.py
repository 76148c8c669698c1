"""How many messages a remote writer sends, and what memory they take."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits
from shmreplay._native import append_elsewhere
from shmreplay.bridge import writer as writer_module
from shmreplay.bridge.link import Link
from shmreplay.bridge.protocol import Header, Kind
from shmreplay.bridge.wire import Reader, Writer
from tests.bridge.proxy import Proxy
from tests.bridge.test_client import DEADLINE, TABLE, Connect, Serve, table


@contextmanager
def link_held_up(client: reverb.Client) -> Iterator[Callable[[], int]]:
    """Keeps the thread that sends from running; gives the number of writers' messages since."""
    link: Any = client._connected().link  # type: ignore[attr-defined]
    reached, release = threading.Event(), threading.Event()

    def stand() -> None:
        reached.set()
        release.wait(DEADLINE)

    link.soon(stand)
    assert reached.wait(DEADLINE)
    before = link._messages
    try:
        yield lambda: link._messages - before
    finally:
        release.set()


def write(writer: Any, value: int, size: int = 1) -> None:
    writer.append({"x": np.full(size, value, np.int64)})
    writer.create_item(TABLE, 1.0, {"x": writer.history["x"][-1]})


def stored(client: reverb.Client, n: int) -> list[int]:
    return [int(client.sample_batch(TABLE, 1, DEADLINE).data["x"][0, 0]) for _ in range(n)]


def test_what_is_created_before_the_first_item_is_sent_goes_with_it(
    serve: Serve, connect: Connect
) -> None:
    client = connect(serve(table(max_times_sampled=1)))
    writer = client.trajectory_writer(1, confirm=False)
    with link_held_up(client) as messages:
        for value in range(10):
            write(writer, value)
        assert messages() == 0
    assert stored(client, 10) == list(range(10))  # nobody has asked for a flush
    assert messages() == 1
    writer.close()


def test_several_large_steps_share_a_message_while_others_are_on_their_way(
    serve: Serve, connect: Connect
) -> None:
    client = connect(serve(table(max_times_sampled=1), capacity=64 << 20))
    writer = client.trajectory_writer(1, confirm=False)
    size = limits.BRIDGE_RUN_BYTES // 8
    alone = limits.BRIDGE_PIPELINE
    together = limits.BRIDGE_GATHER_BYTES // limits.BRIDGE_RUN_BYTES
    with link_held_up(client) as messages:
        for value in range(alone + 2 * together):
            write(writer, value, size)
        assert alone < messages() <= alone + 2
    writer.flush()
    assert stored(client, alone + 2 * together) == list(range(alone + 2 * together))
    writer.close()


def test_an_item_that_was_to_be_sent_soon_is_sent_before_the_client_is_closed(
    serve: Serve, connect: Connect
) -> None:
    server = serve(table(max_times_sampled=1))
    client = connect(server)
    writer = client.trajectory_writer(1, confirm=False)
    link: Any = client._connected().link  # type: ignore[attr-defined]
    with link_held_up(client):
        write(writer, 7)
        link._closing = True
    link._thread.join(DEADLINE)
    assert not link._thread.is_alive()
    assert stored(connect(server), 1) == [7]
    with pytest.raises(errors.ServerClosedError):
        write(writer, 8)


def test_what_the_link_could_not_send_goes_with_the_next_item(
    serve: Serve, connect: Connect
) -> None:
    client = connect(serve(table(max_times_sampled=1)))
    writer: Any = client.trajectory_writer(1, confirm=False)
    with writer._order:
        writer._stream.asked = True
        refused = threading.Thread(target=writer._push_asked)
        refused.start()
        refused.join(DEADLINE)
        assert writer._stream.missed
    write(writer, 2)
    assert stored(client, 1) == [2]
    writer.close()


def test_a_flush_of_items_that_get_in_asks_for_nothing_more(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_SOON_S", DEADLINE)
    client = connect(serve(table(max_times_sampled=1)))
    writer = client.trajectory_writer(1, confirm=False)
    link: Any = client._connected().link  # type: ignore[attr-defined]
    before = link._sequence
    with link_held_up(client):
        for value in range(10):
            write(writer, value)
        flushing = threading.Thread(target=writer.flush)
        flushing.start()
    flushing.join(DEADLINE)
    assert not flushing.is_alive()
    assert link._sequence - before == 1
    assert stored(client, 10) == list(range(10))
    writer.close()


def test_large_steps_alike_are_not_copied_into_the_private_store(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike: list[Any] = []

    def counted(writer: Any, numbers: tuple[int, ...]) -> bool:
        alike.append(writer)
        return append_elsewhere(writer, numbers)

    monkeypatch.setattr(writer_module, "append_elsewhere", counted)
    client = connect(serve(table(max_times_sampled=1), capacity=64 << 20))
    writer = client.trajectory_writer(1, confirm=False)
    for value in range(5):
        write(writer, value, limits.BRIDGE_RUN_BYTES // 8 + 1)
    writer.flush()
    assert len(alike) == 4  # all but the first
    assert stored(client, 5) == list(range(5))
    writer.close()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries do it otherwise")
def test_what_the_link_could_not_send_during_a_call_that_fails_is_sent_after_it(
    serve: Serve, connect: Connect
) -> None:
    client = connect(serve(table(max_times_sampled=1)))
    link: Any = client._connected().link  # type: ignore[attr-defined]
    writer = client.trajectory_writer(1, confirm=False)
    held_up = ExitStack()

    class Unfit:
        def __array__(self, *args: Any, **options: Any) -> Any:
            held_up.close()  # the link's thread runs now, and finds the writer at work
            passed = threading.Event()
            link.soon(passed.set)
            assert passed.wait(DEADLINE)
            raise ValueError("no array")

    with held_up:
        held_up.enter_context(link_held_up(client))
        write(writer, 1)
        with pytest.raises(ValueError, match="no array"):
            writer.append({"x": Unfit()})
    assert stored(client, 1) == [1]  # nobody has asked for a flush
    writer.close()


def test_who_waits_for_an_answer_that_cannot_be_read_is_told() -> None:
    link: Any = Link("tcp://127.0.0.1:1", 20.0)  # its thread does not run
    pending = link.post(Kind.STATS, Writer())
    link._number_it(link._outbox.popleft())
    with pytest.raises(errors.ProtocolError) as unreadable:
        link._take(Header(Kind.FAILURE, 0, pending.sequence, 0, 0), Reader(b"", []))
    link._lose(unreadable.value)
    assert pending.done
    with pytest.raises(errors.ProtocolError, match="ends after 0 bytes"):
        link.answer(pending)
    link._line.end()


def test_rows_of_a_call_that_was_given_up_may_be_changed(serve: Serve, connect: Connect) -> None:
    client = connect(serve(table(max_times_sampled=1)))
    rows = np.zeros((2, 100_000), np.int64)
    link: Any = client._connected().link  # type: ignore[attr-defined]

    def give_up() -> None:
        raise KeyboardInterrupt

    with link_held_up(client):
        look, link.look = link.look, give_up
        with pytest.raises(KeyboardInterrupt):
            client.insert_batch(TABLE, {"x": rows}, 1.0)
        link.look = look
        rows[:] = 7
    assert stored(client, 2) == [0, 0]  # it was on its way


@pytest.mark.parametrize("goes_on", ["at once", "later"])
def test_rows_that_libzmq_has_may_be_changed(
    serve: Serve, connect: Connect, make_proxy: Callable[..., Proxy], goes_on: str
) -> None:
    """A call is given up in the middle of its message; then its arrays are changed."""
    server = serve(table(max_times_sampled=1), capacity=200 << 20)
    proxy = make_proxy(server)
    client = connect(proxy)
    client.insert_batch(TABLE, {"x": np.zeros((1, 4_000_000), np.int64)}, 1.0)
    assert stored(client, 1) == [0]
    link: Any = client._connected().link  # type: ignore[attr-defined]
    rows = np.full((2, 4_000_000), 3, np.int64)  # more than sockets hold

    def give_up() -> None:
        if not proxy.holds_requests:
            return
        if goes_on == "at once":
            proxy.take_requests()
        raise KeyboardInterrupt

    proxy.hold_requests(after=1 << 20)
    look, link.look = link.look, give_up
    with pytest.raises(KeyboardInterrupt):
        client.insert_batch(TABLE, {"x": rows}, 1.0)
    link.look = look
    rows[:] = 7
    proxy.take_requests()
    for _ in range(2):
        found = client.sample_batch(TABLE, 1, DEADLINE).data["x"]
        assert (found.min(), found.max()) == (3, 3)
    assert (proxy.connections == 1) == (goes_on == "at once")


@pytest.mark.parametrize("timeout", [1e10, 1e300, float("inf")])
def test_an_item_may_take_as_long_as_it_likes(
    serve: Serve, connect: Connect, timeout: float
) -> None:
    client = connect(serve(table(max_times_sampled=1)))
    with client.trajectory_writer(1) as writer:
        for value in range(5):
            writer.append({"x": np.full(1, value, np.int64)})
            writer.create_item(TABLE, 1.0, {"x": writer.history["x"][-1]}, timeout=timeout)
    assert stored(client, 5) == list(range(5))


def test_memory_of_large_messages_is_kept_for_those_that_come() -> None:
    body = """
import ctypes, resource, zmq
from shmreplay.bridge import sockets
PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0  # a huge page is one fault
sockets.keep_memory()
data, faults = memoryview(bytearray(400_000)), []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    frames = [zmq.Frame(data, copy=True) for _ in range(40)]
    del frames
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
assert faults[0] > 3000, faults
assert faults[2] < 300, faults
"""
    subprocess.run([sys.executable, "-c", body], check=True, timeout=DEADLINE)
