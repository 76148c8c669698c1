"""Stores between processes: who lives, who died, forks, exits, and files that cannot be trusted."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import posix_ipc
import pytest

from shmreplay import _native, attachment, lease, rate_limiters, segment, selectors
from shmreplay._native import LAYOUT_VERSION
from shmreplay.errors import (
    ArenaFullError,
    DeadlineExceededError,
    ForkedHandleError,
    InvalidArgumentError,
    ReverbError,
    ServerClosedError,
    StoreExistsError,
    StoreNotFoundError,
    StorePermissionError,
    TableCorruptedError,
    VersionMismatchError,
)
from shmreplay.store import Store
from shmreplay.table import Table
from tests.conftest import free_port
from tests.process.servants import Asked, obey

MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
# Seconds after which a process that does not answer is taken to hang.
DEADLINE = 120.0
PORT = free_port()

# Newer versions of Python warn of forking where there are threads, such as those of numpy's BLAS.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

TABLES = [
    Table("replay", selectors.Uniform(), selectors.Fifo(), 100, rate_limiters.MinSize(1)).config(),
    Table.queue("queue", 10, seed=3).config(),
]


def files_of(name: str) -> tuple[Path, Path]:
    """The paths of a store's segment and lease."""
    path = SHARED_MEMORY / f"shmreplay.{os.geteuid()}.{name}"
    return path, path.with_name(path.name + ".lease")


def there_is(name: str) -> bool:
    return any(path.exists() for path in files_of(name))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# What another process does not let go of before it ends.
STILL_OPEN: list[Any] = []


class Puppet:
    """What happens in another process: its methods are called from the test by `Other`."""

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}
        self.held: dict[str, lease.Lease] = {}

    def create(self, name: str, **options: Any) -> int:
        self.stores[name] = Store.create(name, TABLES, **{"capacity": 2 * MIB, **options})
        return int(self.stores[name].native.generation)

    def open(self, name: str, **options: Any) -> int:
        self.stores[name] = Store.open(name, **options)
        return self.stores[name].participant

    def open_session(self, name: str) -> None:
        native = self.stores[name].native
        STILL_OPEN.append(_native.Session(native, _native.SESSION_WRITER))

    def release(self, name: str) -> None:
        self.stores.pop(name).release()

    def unlink(self, name: str) -> None:
        self.stores[name].unlink()

    def alive(self, name: str) -> dict[int, bool]:
        return {each.number: each.alive for each in self.stores[name].participants()}

    def reclaim_dead(self, name: str) -> int:
        return self.stores[name].reclaim_dead()

    def begin(self, name: str, size: int) -> None:
        """The first steps of creating a store, and no more."""
        self.held[name] = lease.lock_new(name, ExitStack())
        if size:
            segment.open_shared(segment.segment_name(name), posix_ipc.O_CREX, size)

    def give_way(self, name: str) -> None:
        """Lets others join after a `begin`."""
        self.held[name].unlock_all_but_first()

    def finish(self, name: str) -> None:
        """The other steps, after a `begin` of size 0."""
        _, native = segment.lay_out(name, TABLES, 2 * MIB, ExitStack())
        native.participant_set(0, *lease.identity(), "server")
        self.held[name].unlock_all_but_first()

    def lock(self, name: str, numbers: range) -> None:
        self.held[name] = lease.Lease.open(name)
        assert all(self.held[name].try_lock(number) for number in numbers)

    def unlock(self, name: str, number: int) -> None:
        self.held[name].unlock(number)


class Other(Asked):
    """Another process, with a `Puppet` in it."""

    patience = DEADLINE

    def __init__(self, start_method: str = "fork") -> None:
        super().__init__(obey, Puppet(), start_method=start_method)

    def kill_unreaped(self) -> None:
        """Kills it; it is a zombie when this returns."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        """Lets it exit; if it was spawned, as a program does that has come to its end."""
        self.connection.send(None)
        self.process.join(DEADLINE)
        assert self.process.exitcode == 0


@pytest.fixture
def name(unique_name: Callable[[], str]) -> Iterator[str]:
    """A store's name; whatever a killed process left of it is removed."""
    name = unique_name()
    yield name
    for each in [each for each in attachment._attached if each.name.startswith(name)]:
        while each in attachment._attached:
            each.release()
    for path in files_of(name):
        path.unlink(missing_ok=True)


@pytest.fixture
def others() -> Iterator[Callable[..., Other]]:
    """Starts other processes, which are killed when the test is over."""
    started: list[Other] = []

    def start(start_method: str = "fork") -> Other:
        started.append(Other(start_method))
        return started[-1]

    yield start
    for other in started:
        other.kill()
        other.connection.close()


@pytest.fixture
def other(others: Callable[[], Other]) -> Other:
    return others()


def in_child(work: Callable[[], Any]) -> None:
    """Runs `work` in a forked child, which must not fail."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- attaching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_attach_and_leave(name: str, others: Callable[..., Other], start_method: str) -> None:
    other = others(start_method)
    generation = other.call("create", name, role="learner")
    opened = Store.open(name, role="actor")
    assert (opened.is_creator, opened.participant) == (False, 1)
    assert opened.tables == TABLES
    assert (opened.native.generation, opened.native.creator_pid) == (generation, other.pid)
    server, me = opened.participants()
    assert (server.number, server.pid, server.role, server.alive) == (0, other.pid, "learner", True)
    assert (me.number, me.pid, me.role, me.alive) == (1, os.getpid(), "actor", True)
    assert other.call("alive", name) == {0: True, 1: True}
    opened.release()
    assert other.call("alive", name) == {0: True}
    assert there_is(name)
    other.call("release", name)
    assert not there_is(name)


def test_a_name_that_is_taken(name: str, other: Other) -> None:
    other.call("create", name)
    with pytest.raises(StoreExistsError, match=rf"\(server {other.pid}\).*another name"):
        Store.create(name, TABLES, capacity=2 * MIB)
    opened = Store.open(name)
    with pytest.raises(StoreExistsError, match=rf"this one, {os.getpid()}"):
        Store.create(name, TABLES, capacity=2 * MIB)
    assert not opened.native.closed
    assert other.call("alive", name) == {0: True, 1: True}


def test_only_the_creator_may_unlink(name: str, other: Other) -> None:
    other.call("create", name)
    opened = Store.open(name)
    with pytest.raises(InvalidArgumentError, match="did not create it"):
        opened.unlink()
    assert there_is(name)
    assert not opened.native.closed


def test_a_server_that_stops_frees_the_name(name: str, others: Callable[[], Other]) -> None:
    first, second = others(), others()
    first.call("create", name)
    opened = Store.open(name)
    first.call("release", name)
    assert opened.native.closed
    with pytest.raises(StoreNotFoundError):
        Store.open(name)
    generation = second.call("create", name)
    again = Store.open(name)
    assert again is not opened
    assert again.native.generation == generation
    opened.release()
    assert second.call("alive", name) == {0: True, 1: True}
    assert there_is(name)


@pytest.mark.parametrize("step", ["unlink", "release"])
def test_a_name_that_becomes_free_while_we_create(
    name: str, other: Other, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    other.call("create", name)
    try_lock_all = lease.Lease.try_lock_all

    def late_try(held: lease.Lease) -> bool:
        monkeypatch.undo()
        other.call(step, name)  # removes the file that we have open; releasing also unlocks it
        return try_lock_all(held)

    monkeypatch.setattr(lease.Lease, "try_lock_all", late_try)
    created = Store.create(name, TABLES, capacity=2 * MIB)
    assert all(path.exists() for path in files_of(name))
    assert other.call("open", name) == 1
    assert [each.alive for each in created.participants()] == [True, True]


def test_a_store_whose_server_is_stopping(name: str, other: Other) -> None:
    created = Store.create(name, TABLES, capacity=2 * MIB)
    created.native.close_server()
    with pytest.raises(ServerClosedError, match="was stopped"):
        other.call("open", name)
    assert [each.number for each in created.participants()] == [0]


def test_waiting_for_a_store_that_is_being_laid_out(name: str, other: Other) -> None:
    other.call("begin", name, 0)
    opened: list[Store] = []
    opener = threading.Thread(target=lambda: opened.append(Store.open(name, timeout=None)))
    opener.start()
    other.call("finish", name)
    opener.join(DEADLINE)
    assert [each.participant for each in opened] == [1]


@pytest.mark.parametrize("timeout", [0, 0.01])
@pytest.mark.parametrize("size", [0, MIB])
def test_a_store_that_is_never_laid_out(name: str, other: Other, size: int, timeout: float) -> None:
    other.call("begin", name, size)
    with pytest.raises(DeadlineExceededError, match=rf"not laid out within {timeout} s"):
        Store.open(name, timeout=timeout)
    with pytest.raises(StoreExistsError, match=rf"\(server {other.pid}\)"):
        Store.create(name, TABLES, capacity=2 * MIB)
    other.kill()
    with pytest.raises(StoreNotFoundError, match="have died"):
        Store.open(name)
    Store.create(name, TABLES, capacity=2 * MIB).release()
    assert not there_is(name)


def test_looking_at_an_unfinished_segment_takes_no_memory(name: str, other: Other) -> None:
    # It would be a bus error where /dev/shm is full.
    other.call("begin", name, MIB)
    other.call("give_way", name)
    with pytest.raises(DeadlineExceededError):
        Store.open(name, timeout=0)
    status = files_of(name)[0].stat()
    assert (status.st_size, status.st_blocks) == (MIB, 0)


def test_a_store_that_is_being_replaced(name: str, others: Callable[[], Other]) -> None:
    dead, heir = others(), others()
    dead.call("create", name)
    dead.kill()
    heir.call("begin", name, 0)
    overwrite(files_of(name)[0], 8, (77).to_bytes(4, "little"))  # no matter what is replaced
    with pytest.raises(DeadlineExceededError):
        Store.open(name, timeout=0)


def test_a_store_that_begins_to_be_replaced_while_we_join(
    name: str, others: Callable[[], Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = others(), others()
    first.call("create", name)
    join = lease.join

    def late_join(*arguments: Any) -> int | None:
        monkeypatch.undo()
        first.kill()
        second.call("begin", name, 0)
        number = join(*arguments)
        segment.remove(segment.segment_name(name))
        second.call("finish", name)
        return number

    monkeypatch.setattr(lease, "join", late_join)
    opened = Store.open(name)
    assert [each.pid for each in opened.participants()] == [second.pid, os.getpid()]


def test_a_store_that_is_exchanged_while_we_join(
    name: str, others: Callable[[], Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = others(), others()
    first.call("create", name)
    generations = []
    join = lease.join

    def late_join(*arguments: Any) -> int | None:
        monkeypatch.undo()
        first.call("release", name)
        generations.append(second.call("create", name))
        return join(*arguments)

    monkeypatch.setattr(lease, "join", late_join)
    opened = Store.open(name)
    assert [opened.native.generation] == generations
    assert second.call("alive", name) == {0: True, 1: True}


def test_all_places_taken(name: str, others: Callable[[], Other]) -> None:
    server, crowd = others(), others()
    server.call("create", name, capacity=MIB)
    crowd.call("lock", name, range(1, 32))
    with pytest.raises(ArenaFullError, match=rf"'{name}' with all of its 31 places"):
        Store.open(name)
    crowd.call("unlock", name, 17)
    assert Store.open(name).participant == 17


# --- files that cannot be trusted -----------------------------------------------------------------


def test_another_layout_version(name: str, other: Other) -> None:
    other.call("create", name)
    overwrite(files_of(name)[0], 8, (77).to_bytes(4, "little"))
    with pytest.raises(VersionMismatchError, match=rf"version 77\b.*version {LAYOUT_VERSION}\b"):
        Store.open(name)
    assert other.call("alive", name) == {0: True}


def test_another_layout_signature(name: str, other: Other) -> None:
    other.call("create", name)
    overwrite(files_of(name)[0], 16, (0xABCDEF).to_bytes(8, "little"))
    with pytest.raises(
        VersionMismatchError, match=f"{0xABCDEF:016x}.*{_native.layout_signature():016x}"
    ):
        Store.open(name)
    assert other.call("alive", name) == {0: True}


def test_another_magic_word(name: str, other: Other) -> None:
    other.call("create", name)
    overwrite(files_of(name)[0], 0, b"garbage!")
    with pytest.raises(TableCorruptedError, match="expected the magic word"):
        Store.open(name)


def test_a_segment_that_was_cut_short(name: str, other: Other) -> None:
    other.call("create", name)
    os.truncate(files_of(name)[0], 2 * 4096)
    with pytest.raises(TableCorruptedError):
        Store.open(name)
    os.truncate(files_of(name)[0], 8)
    with pytest.raises((TableCorruptedError, DeadlineExceededError)):
        Store.open(name, timeout=0)
    other.kill()  # it could not even clear its entry


@pytest.mark.parametrize("text", [b"{]", b'[1, "x"]', b'["{}"]', b'"x"', b"\xff\xfe"])
def test_damaged_settings(name: str, other: Other, text: bytes) -> None:
    other.call("create", name)
    path = files_of(name)[0]
    with path.open("rb") as file:
        start = file.read(4 * MIB)
    offset, size = (
        start.index(b'["{\\"name\\"'),
        start.index(b'}"]') + 3 - start.index(b'["{\\"name'),
    )
    overwrite(path, offset, text.ljust(size))
    with pytest.raises(TableCorruptedError, match=r"damaged settings|contradicts itself"):
        Store.open(name)
    assert other.call("alive", name) == {0: True}


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602, 0o640])
@pytest.mark.parametrize("which", [0, 1])
def test_files_that_others_can_use(name: str, other: Other, which: int, mode: int) -> None:
    other.call("create", name)
    files_of(name)[which].chmod(mode)
    expected = rf"user {os.geteuid()} and has mode -rw.*\({mode:#o}\); expected .* mode 0o600"
    with pytest.raises(StorePermissionError, match=expected):
        Store.open(name)
    assert Store.find_by_port(PORT) is None
    files_of(name)[which].chmod(0o600)
    assert Store.open(name).participant == 1


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", [0, 1])
def test_files_of_another_user(name: str, other: Other, which: int) -> None:
    other.call("create", name, port=PORT)
    os.chown(files_of(name)[which], 65534, 65534)
    with pytest.raises(StorePermissionError, match=r"belongs to user 65534.*of user 0"):
        Store.open(name)
    assert Store.find_by_port(PORT) is None
    assert other.call("alive", name) == {0: True}


def test_a_link_in_place_of_the_segment(name: str, other: Other) -> None:
    other.call("create", name)
    path = files_of(name)[0]
    real = path.with_name(path.name + ".real")
    path.rename(real)
    path.symlink_to(real)
    try:
        with pytest.raises(StorePermissionError, match=r"has mode l.*expected a regular file"):
            Store.open(name)
    finally:
        real.unlink()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_attach(name: str) -> None:
    created = Store.create(name, TABLES, capacity=2 * MIB)

    def work() -> None:
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(StoreNotFoundError, match="of user 65534"):
            Store.open(name)
        for path in files_of_user(name, 0):
            with pytest.raises(StorePermissionError, match="belongs to user 0"):
                segment.open_shared(path)

    in_child(work)
    assert not created.native.closed


def files_of_user(name: str, uid: int) -> list[str]:
    return [f"/shmreplay.{uid}.{name}", f"/shmreplay.{uid}.{name}.lease"]


# --- death ----------------------------------------------------------------------------------------


def test_a_killed_server(name: str, other: Other, caplog: pytest.LogCaptureFixture) -> None:
    generation = other.call("create", name, port=PORT)
    other.kill()
    assert all(path.exists() for path in files_of(name))
    assert Store.find_by_port(PORT) is None
    with pytest.raises(StoreNotFoundError, match="all processes that used it have died"):
        Store.open(name)
    with caplog.at_level(logging.INFO, "shmreplay"):
        created = Store.create(name, TABLES, capacity=2 * MIB, port=PORT)
    assert f"replacing store '{name}'" in caplog.text
    assert created.native.generation != generation
    assert Store.find_by_port(PORT) == name


def test_a_killed_server_whose_clients_live(name: str, others: Callable[[], Other]) -> None:
    server, client, late = others(), others(), others()
    server.call("create", name, port=PORT)
    client.call("open", name)
    server.kill_unreaped()
    assert client.call("alive", name) == {0: False, 1: True}
    assert late.call("open", name) == 2  # clients go on, and may join
    assert Store.find_by_port(PORT) == name
    expected = rf"\(client {min(client.pid, late.pid)}, client {max(client.pid, late.pid)}\)"
    with pytest.raises(StoreExistsError, match=expected):
        Store.create(name, TABLES, capacity=2 * MIB)
    assert client.call("alive", name) == {0: False, 1: True, 2: True}
    late.call("release", name)
    client.kill()
    Store.create(name, TABLES, capacity=2 * MIB, port=PORT)
    assert late.call("open", name) == 1


def test_find_by_port_prefers_a_living_server(name: str, others: Callable[[], Other]) -> None:
    first, second = others(), others()
    first.call("create", name, port=PORT)
    Store.open(name)
    first.kill()
    assert Store.find_by_port(PORT) == name
    # A name after and a name before the first in the alphabet.
    for other_name in (f"z{name}", f"a{name}"):
        second.call("create", other_name, port=PORT)
        assert Store.find_by_port(PORT) == other_name
        second.call("release", other_name)
    assert Store.find_by_port(PORT) == name


def test_a_taken_port_leaves_a_dead_store_of_the_name(
    name: str, others: Callable[[], Other]
) -> None:
    dead, alive = others(), others()
    dead.call("create", name)
    inodes = [path.stat().st_ino for path in files_of(name)]
    dead.kill()
    Store.create(f"{name}-2", TABLES, capacity=2 * MIB, port=PORT)
    try:
        with pytest.raises(StoreExistsError, match=f"Got port {PORT}"):
            alive.call("create", name, port=PORT)
        assert [path.stat().st_ino for path in files_of(name)] == inodes
    finally:
        Store.open(f"{name}-2").unlink()  # the fixture releases it


def test_two_choose_one_port_at_the_same_time(
    name: str, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out = segment.lay_out

    def slow_lay_out(*arguments: Any) -> Any:
        other.call("create", f"{name}-2", port=PORT)
        return lay_out(*arguments)

    monkeypatch.setattr(segment, "lay_out", slow_lay_out)
    with pytest.raises(StoreExistsError, match=f"Got port {PORT} .*'{name}-2'"):
        Store.create(name, TABLES, capacity=2 * MIB, port=PORT)
    assert not there_is(name)
    assert Store.find_by_port(PORT) == f"{name}-2"
    other.call("release", f"{name}-2")


def test_find_by_port_does_not_attach(name: str, others: Callable[[], Other]) -> None:
    first, second = others(), others()
    first.call("create", name, port=PORT)
    assert Store.find_by_port(PORT) == name
    assert first.call("alive", name) == {0: True}
    opened = Store.open(name)
    assert Store.find_by_port(PORT) == name
    assert second.call("open", name) == 2
    assert second.call("alive", name) == {0: True, 1: True, 2: True}
    with pytest.raises(StoreExistsError, match=f"port {PORT} .*'{name}'"):
        second.call("create", f"{name}-2", port=PORT)
    assert not there_is(f"{name}-2")
    assert not opened.native.closed


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_client_is_reclaimed(name: str, others: Callable[[], Other], reaped: bool) -> None:
    created = Store.create(name, TABLES, capacity=2 * MIB)
    dead, alive = others(), others()
    assert [each.call("open", name) for each in (dead, alive)] == [1, 2]
    dead.kill() if reaped else dead.kill_unreaped()
    (_, entry, _) = created.participants()
    assert (entry.number, entry.pid, entry.alive) == (1, dead.pid, False)
    assert alive.call("alive", name) == {0: True, 1: False, 2: True}
    created.reclaim_dead()
    assert alive.call("alive", name) == {0: True, 2: True}


def test_a_dead_entry_is_used_again(name: str, others: Callable[[], Other]) -> None:
    created = Store.create(name, TABLES, capacity=2 * MIB)
    first, second, third = others(), others(), others()
    assert [each.call("open", name) for each in (first, second)] == [1, 2]
    first.kill()
    assert third.call("open", name) == 1
    assert [each.pid for each in created.participants()] == [os.getpid(), third.pid, second.pid]


def test_any_participant_may_reclaim(name: str, others: Callable[[], Other]) -> None:
    server, dead, alive = others(), others(), others()
    server.call("create", name)
    assert [each.call("open", name) for each in (dead, alive)] == [1, 2]
    dead.kill()
    server.kill()
    alive.call("reclaim_dead", name)
    assert alive.call("alive", name) == {2: True}


def test_one_of_several_takes_over(name: str, others: Callable[[], Other]) -> None:
    first, *rivals = others(), others(), others(), others()
    for _ in range(5):
        first.call("create", name)
        first.kill()
        for rival in rivals:
            rival.ask("create", name)
        answers = []
        for rival in rivals:
            try:
                answers.append((rival, rival.answer()))
            except StoreExistsError as error:
                assert "in use by living processes" in str(error)
        ((winner, generation),) = answers
        opened = Store.open(name)
        assert opened.native.generation == generation
        opened.release()
        first = winner
        rivals = [*(rival for rival in rivals if rival is not winner), others()]
        first.call("release", name)
        assert not there_is(name)


def open_soon(name: str) -> Store:
    """Opens a store that is about to be created."""
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            return Store.open(name)
        except (StoreNotFoundError, ServerClosedError):
            assert time.monotonic() < deadline, "the store was not created"


def test_joining_while_servers_come_and_go(name: str, others: Callable[[], Other]) -> None:
    server = others()
    for _ in range(100):
        server.ask("create", name)
        opened = open_soon(name)
        assert opened.native.generation == server.answer()
        server.ask("release", name)
        opened.release()
        server.answer()
    assert not there_is(name)


# --- forking --------------------------------------------------------------------------------------


def test_a_forked_handle_is_refused_and_harmless(name: str, other: Other) -> None:
    created = Store.create(name, TABLES, capacity=2 * MIB)

    def work() -> None:
        assert created.forked
        assert not created.is_creator
        for call in (
            created.check_fork,
            created.participants,
            created.reclaim_dead,
            created.retain,
            lambda: created.native,
        ):
            with pytest.raises(ForkedHandleError, match=rf"'{name}' that process {os.getppid()} "):
                call()
        created.unlink()
        created.release()
        created.release()
        attachment._at_exit()

    in_child(work)
    assert not created.forked
    assert not created.native.closed
    assert all(path.exists() for path in files_of(name))
    assert other.call("open", name) == 1
    assert other.call("alive", name) == {0: True, 1: True}


@pytest.mark.parametrize("creator", [True, False])
def test_a_forked_child_attaches_anew(name: str, other: Other, creator: bool) -> None:
    if creator:
        inherited = Store.create(name, TABLES, capacity=2 * MIB)
    else:
        other.call("create", name)
        inherited = Store.open(name)

    def work() -> None:
        opened = Store.open(name)
        assert opened is not inherited
        assert opened.participant == inherited._number + 1
        assert [each.alive for each in opened.participants()] == [True] * (2 if creator else 3)
        opened.native.stats()
        opened.release()
        # A second time, so that the parent's lock has outlived that a descriptor was closed.
        opened = Store.open(name)
        assert [each.alive for each in opened.participants()] == [True] * (2 if creator else 3)
        opened.release()

    in_child(work)
    assert [each.alive for each in inherited.participants()] == [True] * (1 if creator else 2)
    inherited.native.stats()


def test_a_child_outlives_its_parent(name: str, other: Other) -> None:
    # The child runs on with all that it inherited, and still its parent counts as dead.
    other.call("create", name)
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        opened = Store.open(name)
        if os.fork() == 0:
            os.close(write)
            os.read(read, 1)  # until the test closes the other end
        os._exit(opened.participant)
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1]) == 1
    assert other.call("alive", name) == {0: True, 1: False}
    os.close(write)


def test_forking_while_another_thread_holds_the_lock(name: str, other: Other) -> None:
    other.call("create", name)
    Store.open(name)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with attachment.guard():
            held.set()
            done.wait(DEADLINE)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(DEADLINE)
    try:
        in_child(lambda: Store.open(name).release())
    finally:
        done.set()
        holder.join()


# --- exiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("sys.exit(3)", 3), ("raise KeyError('x')", 1)]
)
def test_a_program_that_does_not_stop_its_server(name: str, ending: str, code: int) -> None:
    program = f"""
import os, sys
from shmreplay import rate_limiters, selectors
from shmreplay.store import Store
from shmreplay.table import Table
table = Table("t", selectors.Uniform(), selectors.Fifo(), 9, rate_limiters.MinSize(1))
store = Store.create({name!r}, [table.config()], capacity={2 * MIB})
assert os.path.exists({str(files_of(name)[0])!r})
pid = os.fork()
if pid == 0:
    sys.exit(0)  # the child's exit handlers run, too, and must leave the store alone
os.waitpid(pid, 0)
assert os.path.exists({str(files_of(name)[0])!r}) and not store.native.closed
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == code, done.stderr
    assert ("KeyError" in done.stderr) == (code == 1)
    assert not there_is(name)


def test_a_client_that_does_not_close(name: str, others: Callable[..., Other]) -> None:
    other = others("spawn")
    created = Store.create(name, TABLES, capacity=2 * MIB)
    other.call("open", name)
    assert [each.alive for each in created.participants()] == [True, True]
    other.end()
    # It had no sessions, so that its exit could clear its entry.
    assert [each.number for each in created.participants()] == [0]


def test_a_client_that_exits_with_a_session(name: str, others: Callable[..., Other]) -> None:
    other = others("spawn")
    created = Store.create(name, TABLES, capacity=2 * MIB)
    other.call("open", name)
    other.call("open_session", name)
    other.end()
    # A thread of it might still have worked in the session: it is left to whoever cleans up.
    assert [each.alive for each in created.participants()] == [True, False]
    created.reclaim_dead()
    assert [each.number for each in created.participants()] == [0]


def test_a_server_that_exits_wakes_its_clients(name: str, others: Callable[..., Other]) -> None:
    other = others("spawn")
    other.call("create", name)
    opened = Store.open(name)
    other.end()
    assert opened.native.closed
    assert not there_is(name)


# --- no room --------------------------------------------------------------------------------------

IN_A_SMALL_SHARED_MEMORY = """
import os, sys
from shmreplay.errors import ArenaFullError
from shmreplay import rate_limiters, selectors
from shmreplay.store import Store
from shmreplay.table import Table
tables = [Table("t", selectors.Uniform(), selectors.Fifo(), 9, rate_limiters.MinSize(1)).config()]
for capacity in (None, 8 << 20, 1 << 40):
    try:
        Store.create("small", tables, capacity=capacity)
    except ArenaFullError as error:
        for expected in ("'small'", "/dev/shm has", "bytes free", "asked", "--shm-size"):
            assert expected in str(error), error
    else:
        sys.exit("created")
    assert os.listdir("/dev/shm") == [], os.listdir("/dev/shm")
os.system("mount -o remount,size=8m /dev/shm")
Store.create("small", tables, capacity=8 << 20).release()
assert os.listdir("/dev/shm") == []
"""


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs to mount a file system"
)
def test_a_shared_memory_that_is_full(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(IN_A_SMALL_SHARED_MEMORY)
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && exec '{sys.executable}' '{program}'"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr


def test_a_limit_on_the_size_of_files(name: str) -> None:
    def work() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        with pytest.raises(InvalidArgumentError, match=r"ulimit -f"):
            Store.create(name, TABLES, capacity=8 * MIB)
        assert not there_is(name)

    in_child(work)


def test_errors_have_one_root() -> None:
    for error in (StoreExistsError, StoreNotFoundError, StorePermissionError, ForkedHandleError):
        assert issubclass(error, ReverbError)


# --- a killed process that is not quite gone ----------------------------------------------------


def leave_the_main_thread(name: str, gate: Connection, ready: Connection) -> None:
    """Creates a store; then only a second thread goes on, until the gate is closed.

    So it looks from outside while the threads of a killed server end one after the other.
    """
    store = Store.create(name, TABLES, capacity=2 * MIB)

    def linger() -> None:
        gate.poll(None)
        os._exit(store.participant)

    threading.Thread(target=linger).start()
    ready.send(True)
    end_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]  # the system call exit
    ctypes.CDLL(None).syscall(end_thread, 0)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="number of a call")
def test_who_makes_a_store_anew_waits_for_the_last_thread_of_the_dead(name: str) -> None:
    context = multiprocessing.get_context("fork")
    gate, far_gate = context.Pipe()
    ready, far_ready = context.Pipe()
    process = context.Process(target=leave_the_main_thread, args=(name, far_gate, far_ready))
    process.start()
    assert ready.poll(DEADLINE)
    stat = Path(f"/proc/{process.pid}/stat")
    end = time.monotonic() + DEADLINE
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.001)  # between two looks at a condition with a deadline
    opened = threading.Timer(0.2, gate.send, args=(True,))
    opened.start()
    store = Store.create(name, TABLES, capacity=2 * MIB)
    assert store.participant == 0
    opened.join()
    process.join(DEADLINE)
    store.release()
