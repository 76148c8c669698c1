"""Containers that share /dev/shm, process ids that are used again: life is what the lease says."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import shmreplay as reverb
from shmreplay import errors
from tests.process.servants import DEADLINE, MIB, Other, make_tables, rows, wait_until

Others = Callable[[], Other]
ROOT = Path(__file__).resolve().parents[2]

# Newer versions of Python warn of forking where there are threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

# Namespaces of its own for mounts and processes, with /proc of its own, as a container has; and the
# /dev/shm of all.
CONTAINER = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def can_unshare() -> bool:
    try:
        done = subprocess.run([*CONTAINER, "/bin/true"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="needs namespaces of its own")


class Container:
    """A program in a container; it reports by lines and goes on at a line."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*CONTAINER, sys.executable, "-c", textwrap.dedent(code), *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def next(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait(DEADLINE)}"
        return line.strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


CLIENT = """
    import os, sys
    import shmreplay as reverb
    client = reverb.Client(sys.argv[1])
    client.insert({"x": 1.0}, {"replay": 1.0})
    borrowed = client.borrow("replay", 1)
    items = borrowed.__enter__()
    print(os.getpid(), flush=True)
    input()
    client.insert({"x": 2.0}, {"replay": 1.0})
    print("inserted", flush=True)
    input()
    print("unreachable")
"""


@needs_namespaces
def test_a_client_in_another_container(store_name: str) -> None:
    """Process ids mean nothing there, and still everybody knows who lives."""
    with reverb.Server(make_tables(), name=store_name, capacity=16 * MIB) as server:
        client = server.localhost_client()
        with Container(CLIENT, server.address) as container:
            pid = int(container.next())
            assert pid < 100  # a number of its own
            me, other = server._connection.store.participants()
            assert (other.pid, other.alive) == (pid, True)
            assert other.pid_namespace not in (0, me.pid_namespace)
            server._connection.store.reclaim_dead()
            assert server.stats()["borrowed_items"] == 1
            with pytest.raises(errors.DeadlineExceededError) as caught:
                client.sample_batch("queue", 1, timeout=0)
            assert f"{pid} (client, in another pid namespace)" in str(caught.value)
            container.go_on()
            assert container.next() == "inserted"
            assert server.stats()["replay/size"] == 2
        wait_until(lambda: server.stats()["participants"] == 1, "it is cleared away")
        assert server.stats()["borrowed_items"] == 0
        server.check()


SERVER = """
    import os, sys
    import shmreplay as reverb
    from tests.process.servants import make_tables
    server = reverb.Server(make_tables(), name=sys.argv[1], capacity=16 << 20)
    print(os.getpid(), flush=True)
    input()
"""


@needs_namespaces
def test_a_server_in_another_container(store_name: str) -> None:
    """It is seen to live, and to die, and its store can be taken over from outside."""
    with Container(SERVER, store_name) as container:
        container.next()
        client = reverb.Client(f"shm://{store_name}")
        client.insert_batch("replay", rows(1, 2))
        with pytest.raises(errors.StoreExistsError, match="server"):
            reverb.Server(make_tables(), name=store_name, recover=True)
    participants = client._connected().store.participants
    wait_until(lambda: not participants()[0].alive, "it is dead")
    with pytest.raises(errors.DeadlineExceededError, match="the server is dead"):
        client.sample_batch("queue", 1, timeout=0)
    with reverb.Server(make_tables(), name=store_name, recover=True) as taken:
        assert taken.stats()["replay/size"] == 2
        client.check()
        client.close()


USED_AGAIN = """
    import os, signal, sys
    import shmreplay as reverb
    from tests.process.servants import make_tables, Other, wait_until

    server = reverb.Server(make_tables(), name=sys.argv[1], capacity=16 << 20)
    client = server.localhost_client()
    client.insert({"x": 1.0}, {"replay": 1.0})
    other = Other()
    other.call("connect", server.address)
    other.call("borrow", "replay", 1)
    used = other.pid
    other.kill()
    # The next process gets the same number.
    for _ in range(20):
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(used - 1))
        pid = os.fork()
        if pid == 0:
            signal.pause()
        if pid == used:
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print("same" if pid == used else "not the same", flush=True)
    os.kill(pid, 0)  # somebody of this number lives
    wait_until(lambda: server.stats()["participants"] == 1, "it is cleared away")
    print(int(server.stats()["borrowed_items"]), flush=True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    server.check()
    server.stop()
    print("done", flush=True)
"""


@needs_namespaces
def test_a_process_id_that_is_used_again(store_name: str) -> None:
    with Container(USED_AGAIN, store_name) as container:
        if container.next() != "same":
            pytest.skip("process ids cannot be chosen here")
        assert container.next() == "0"
        assert container.next() == "done"
