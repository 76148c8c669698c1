"""The command `shmreplay`: what it shows, reads out and removes of stores in any state."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import cli, command_support, errors, recovery
from tests.process.servants import DEADLINE, MIB, Other, make_tables, rows

Others = Callable[[], Other]
ROOT = Path(__file__).resolve().parents[2]

# Newer versions of Python warn of forking where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Command:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.errors = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        assert cli.main(arguments) == code, self.capsys.readouterr()
        shown = self.capsys.readouterr()
        self.errors = shown.err
        assert "\x1b" not in shown.out + shown.err
        return shown.out

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))

    def about(self, name: str) -> Any:
        cli.main(["ls", "--json"])  # others of this user may have damaged stores
        (found,) = [e for e in json.loads(self.capsys.readouterr().out) if e["name"] == name]
        return found


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def file_of(name: str) -> Path:
    return Path(f"/dev/shm/shmreplay.{os.geteuid()}.{name}")


def poison(name: str, table: int = 0) -> None:
    """Shuts a table as a repair does that failed."""
    with file_of(name).open("r+b") as file:
        file.seek(88)  # header: tables_off
        tables = int.from_bytes(file.read(8), "little")
        file.seek(tables + 512 * table + 352)  # poisoned
        file.write((1).to_bytes(4, "little"))


def test_who_reads_may_stop_reading(store_name: str) -> None:
    top = [sys.executable, "-m", "shmreplay", "top", store_name, "--json", "--interval", "0.05"]
    with reverb.Server(make_tables(), name=store_name, capacity=16 * MIB):
        process = subprocess.Popen(
            top,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["name"] == store_name
        process.stdout.close()
        with process.stderr:
            assert process.stderr.read() == b""
        assert process.wait(DEADLINE) == 0


def test_a_closed_standard_output_is_a_problem() -> None:
    for closed, said in (
        (">&-", "shmreplay: standard output is closed\n"),
        (">&- 2>&-", ""),
    ):
        done = subprocess.run(
            ["sh", "-c", f'"$0" -m shmreplay ls {closed}', sys.executable],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=DEADLINE,
        )
        assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["ls", "doctor"])
def test_what_cannot_be_written_is_a_problem(command: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shmreplay", command],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=DEADLINE,
        )
    assert done.returncode == 1
    assert done.stderr == "shmreplay: [Errno 28] No space left on device\n"


# --- looking ------------------------------------------------------------------------------------


def test_states_of_a_store(store_name: str, others: Others, command: Command) -> None:
    server, client = others(), others()
    port = server.call("serve", store_name)
    client.call("connect", f"shm://{store_name}")
    client.call("insert", "replay", 1, 2, 3)
    about = command.about(store_name)
    assert (about["state"], about["port"], about["server_pid"]) == ("served", port, server.pid)
    assert about["address"] == f"shm://{store_name}"
    assert about["memory"]["capacity_bytes"] == 16 * MIB
    assert [table["size"] for table in about["tables"]] == [3, 0]
    processes = [(p["pid"], p["role"], p["alive"]) for p in about["processes"]]
    assert processes == [(server.pid, "server", True), (client.pid, "client", True)]
    text = command("info", store_name)
    for word in (store_name, "served", str(port), f"{server.pid}", "replay", "queue", "16.0 MiB"):
        assert word in text
    cli.main(["ls"])
    shown = command.capsys.readouterr().out.splitlines()
    line = next(line for line in shown if line.startswith(f"{store_name} "))
    assert line.split()[1:5] == ["served", str(port), str(server.pid), "2"]

    server.kill()
    about = command.about(store_name)
    assert about["state"] == "clients only"
    assert [p["alive"] for p in about["processes"]] == [False, True]
    client.kill()
    about = command.about(store_name)
    assert about["state"] == "dead"
    assert [p["alive"] for p in about["processes"]] == [False, False]
    # Looking changed nothing: it can still be taken over.
    with reverb.Server(None, name=store_name, recover=True) as taken:
        assert command.about(store_name)["state"] == "served"  # by the process that looks
        assert taken.stats()["replay/size"] == 3


def test_other_states(store_name: str, command: Command) -> None:
    path = file_of(store_name)
    path.touch(0o600)
    os.truncate(path, MIB)
    assert command.about(store_name)["state"] == "dead"
    path.write_bytes(b"nonsense" * 1000)
    path.chmod(0o600)
    found = command.about(store_name)
    assert found["state"] == "damaged"
    assert "magic word" in found["problem"]
    command("info", store_name, code=1)
    assert "magic word" in command.errors
    command("check", store_name, code=1)
    command("dump", store_name, "-o", "/nonexistent/x.npz", code=1)
    path.chmod(0o644)
    command("info", store_name, code=1)
    assert "mode" in command.errors


def test_bad_usage(store_name: str, command: Command, tmp_path: Path) -> None:
    for arguments in ([], ["fly"], ["ls", "--fast"], ["dump", store_name], ["check"]):
        command(*arguments, code=2)
    for arguments in (["info", store_name], ["check", store_name], ["clean", store_name]):
        command(*arguments, code=2)
        assert f"no store '{store_name}'" in command.errors
    with reverb.Server(make_tables(), name=store_name, capacity=16 * MIB):
        command("dump", store_name, "--table", "nope", "-o", str(tmp_path), code=2)
        assert "there are: replay, queue" in command.errors
        command("dump", store_name, "-o", str(tmp_path / "all.npz"), code=2)
        command("dump", store_name, "--limit", "-3", "-o", str(tmp_path), code=2)
    command("info", "no/such", code=2)
    assert "usage: shmreplay" in command("--help")
    assert command("--version") == f"shmreplay {reverb.__version__}\n"


def test_the_module_is_the_command(store_name: str) -> None:
    run = [sys.executable, "-m", "shmreplay"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with reverb.Server(make_tables(), name=store_name, capacity=16 * MIB):
        done = subprocess.run([*run, "check", store_name], env=environment, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.decode() == f"{store_name}: all invariants hold\n"
    done = subprocess.run([*run, "check", store_name], env=environment, capture_output=True)
    assert done.returncode == 2


# --- check --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["served", "clients only", "dead"])
def test_check(store_name: str, others: Others, command: Command, state: str) -> None:
    server, client = others(), others()
    server.call("serve", store_name)
    client.call("connect", f"shm://{store_name}")
    client.call("insert", "replay", *range(100))
    client.call("borrow", "replay", 9)
    if state != "served":
        server.kill()
    if state == "dead":
        client.kill()
    assert command.json("check", store_name) == {"name": store_name, "ok": True, "problem": None}
    # A number of inserts that was never counted.
    with file_of(store_name).open("r+b") as file:
        file.seek(88)
        file.seek(int.from_bytes(file.read(8), "little") + 64)
        inserts = int.from_bytes(file.read(8), "little")
        assert inserts == 100
        file.seek(-8, os.SEEK_CUR)
        file.write((inserts + 1).to_bytes(8, "little"))
    found = command.json("check", store_name, code=1)
    assert not found["ok"]
    assert "consistency check failed" in found["problem"]
    assert found["problem"] in command.errors


def test_a_shut_table(store_name: str, others: Others, command: Command, tmp_path: Path) -> None:
    server = others()
    server.call("serve", store_name)
    client = reverb.Client(f"shm://{store_name}")
    client.insert_batch("replay", rows(1, 2, 3))
    client.insert_batch("queue", rows(4))
    poison(store_name)
    with pytest.raises(errors.TableCorruptedError):
        client.sample_batch("replay", 1)
    assert len(client.sample_batch("queue", 1).info.key) == 1
    command("info", store_name, code=1)
    assert "'replay' is shut" in command.errors
    command("check", store_name, code=1)
    assert "replay" in command.errors
    client.close()
    server.kill()
    command("check", store_name, code=1)
    command("dump", store_name, "-o", str(tmp_path))
    with np.load(tmp_path / "replay.npz") as found:
        assert found["data/0/x"].tolist() == [1, 2, 3]


# --- dump ---------------------------------------------------------------------------------------


def fill(client: reverb.Client) -> np.ndarray[Any, Any]:
    """Items of several structures, some of them made of rows that lie apart."""
    keys = client.insert_batch("replay", {"x": np.arange(40.0).reshape(20, 2)}, np.arange(20) / 4)
    client.insert({"n": {"a": np.int32(7), "b": [True, np.uint8(3)]}}, {"replay": 2.0})
    with client.trajectory_writer(6) as writer:
        for number in range(6):
            writer.append({"o": np.full((2, 3), number, np.float32), "r": number})
        history = writer.history
        for take in (slice(None), slice(None, None, -1), slice(1, None, 2)):
            writer.create_item("replay", 1.0, {"o": history["o"][take], "r": history["r"][-1]})
    writer.close()
    return keys


@pytest.mark.parametrize("state", ["served", "clients only", "dead"])
def test_dump(
    store_name: str, others: Others, command: Command, tmp_path: Path, state: str
) -> None:
    server = others()
    server.call("serve", store_name)
    client = reverb.Client(f"shm://{store_name}")
    keys = fill(client)
    client.update_priorities("replay", keys[:1], [9.0])
    client.mutate_priorities("replay", deletes=[int(keys[1])])
    if state != "served":
        server.kill()
    if state == "dead":
        client.close()
    out = tmp_path / "deep" / "out"
    written = command.json("dump", store_name, "-o", str(out))
    assert [(each["table"], each["items"], each["unreadable"]) for each in written] == [
        ("replay", 23, 0),
        ("queue", 0, 0),
    ]
    about = json.loads((out / "store.json").read_text())
    assert (about["name"], about["state"]) == (store_name, state)
    with np.load(out / "replay.npz", allow_pickle=False) as found:
        assert found["key"][:19].tolist() == [int(key) for key in np.delete(keys, 1)]
        priorities = [9.0, *(np.arange(2, 20) / 4), 2.0, 1.0, 1.0, 1.0]
        assert found["priority"].tolist() == priorities
        assert found["schema"].tolist() == [0] * 19 + [1] + [2] * 3
        x = np.delete(np.arange(40.0).reshape(20, 2), 1, 0)
        assert found["data/0/x"].tolist() == x.tolist()
        assert bool(found["squeezed/0/x"])
        assert found["data/1/n/a"].tolist() == [7]
        assert found["data/1/n/b/0"].dtype == bool
        assert found["data/1/n/b/1"].tolist() == [3]
        assert found["length/2/o"].tolist() == [6, 6, 3]
        order = [*range(6), *range(5, -1, -1), 1, 3, 5]
        assert found["data/2/o"].shape == (15, 2, 3)
        assert found["data/2/o"][:, 0, 0].tolist() == order
        assert found["data/2/r"].tolist() == [5, 5, 5]
        assert (found["inserted_ns"] > 1.6e18).all()
        assert json.loads(str(found["structure/2"]))
    one = tmp_path / "one.npz"
    command("dump", store_name, "--table", "replay", "--limit", "4", "-o", str(one))
    with np.load(one) as found:
        assert found["key"].tolist() == [int(key) for key in keys[[0, 2, 3, 4]]]
    client.close()

    command("dump", store_name, "--table", "replay", "-o", str(tmp_path / "no/x.npz"), code=1)
    assert "no/x.npz cannot be written: No such file or directory. Make its" in command.errors


def test_a_dump_holds_columns_of_any_name(
    store_name: str, command: Command, tmp_path: Path
) -> None:
    data = {"a": {"b": 1}, "a/b": 2, "a%2Fb": 3, "a\0b": 4, "\ud800": 5, "\N{SNOWMAN}": 6}
    queue = reverb.Table.queue("queue", 3)
    with reverb.Server([queue], name=store_name, capacity=16 * MIB) as server:
        server.localhost_client().insert(data, {"queue": 1.0})
        command("dump", store_name, "-o", str(tmp_path))
    names = ["a/b", "a%2Fb", "a%252Fb", "a%00b", "%ED%A0%80", "\N{SNOWMAN}"]
    with np.load(tmp_path / "queue.npz", allow_pickle=False) as found:
        assert [found[f"data/0/{name}"].tolist() for name in names] == [[n] for n in range(1, 7)]


def test_a_dump_is_private_and_replaces_nothing_unasked(
    store_name: str, others: Others, command: Command, tmp_path: Path
) -> None:
    others().call("serve", store_name)
    out = tmp_path / "out"
    old = os.umask(0)
    try:
        command("dump", store_name, "-o", str(out))
    finally:
        os.umask(old)
    assert out.stat().st_mode & 0o777 == 0o700
    files = sorted(out.iterdir())
    assert [path.name for path in files] == ["queue.npz", "replay.npz", "store.json"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}

    files[1].write_text("mine")
    files[0].unlink()
    command("dump", store_name, "-o", str(out), code=2)
    assert f"{files[1]}, {files[2]} is there already: choose another place" in command.errors
    assert files[1].read_text() == "mine"
    assert not files[0].exists()
    link = tmp_path / "link.npz"
    link.symlink_to(tmp_path / "elsewhere")
    command("dump", store_name, "--table", "replay", "-o", str(link), code=2)
    assert not (tmp_path / "elsewhere").exists()

    files[1].chmod(0o644)
    command("dump", store_name, "--force", "-o", str(out))
    assert sorted(out.iterdir()) == files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    with np.load(files[1]) as found:
        assert found["key"].shape == (0,)


def test_a_file_that_fails_half_way_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for replace in (False, True):
        with (
            pytest.raises(KeyboardInterrupt),
            command_support.private_file(path, replace) as file,
        ):
            file.write(b"half")
            raise KeyboardInterrupt
        assert [each.read_text() for each in tmp_path.iterdir()] == (["old"] if replace else [])
        path.write_text("old")


def test_dump_under_load(store_name: str, others: Others, tmp_path: Path, command: Command) -> None:
    """What is read while items come and go is whole, item by item."""
    server = others()
    limiter = reverb.rate_limiters.MinSize(1)
    select = reverb.selectors
    table = reverb.Table("t", select.Uniform(), select.Fifo(), 50, limiter)
    server.call("serve", store_name, [table])
    pid = os.fork()
    if pid == 0:
        with reverb.Client(f"shm://{store_name}") as client:
            for number in range(10**9):
                client.insert({"x": np.full(500, number)}, {"t": 1.0})
    try:
        seen = 0
        out = tmp_path / "t.npz"
        while seen < 1000:
            command("dump", store_name, "--force", "-o", str(out))
            with np.load(out) as found:
                if "data/0/x" in found:
                    data = found["data/0/x"]
                    assert (data == data[:, :1]).all()
                    assert (np.diff(data[:, 0]) > 0).all()
                    seen += len(data)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_dump_of_a_damaged_store(store_name: str, others: Others, tmp_path: Path) -> None:
    """Bytes flipped anywhere: an error or what can be read, and never a crash or a hang."""
    server = others()
    server.call("serve", store_name, capacity=MIB)
    client = reverb.Client(f"shm://{store_name}")
    fill(client)
    client.close()
    server.kill()
    path = file_of(store_name)
    good = [(number, page) for number, page in pages(path) if any(page)]
    choose = random.Random(7)
    outcomes = set()
    for _ in range(60):
        for number, page in good:
            write(path, number * 4096, page)
        for _ in range(choose.choice([1, 20, 200])):
            number, _ = choose.choice(good)
            write(path, number * 4096 + choose.randrange(4096), choose.randbytes(1))
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(DEADLINE))
            code = 99
            try:
                code = cli.main(["dump", store_name, "--force", "-o", str(tmp_path)])
            finally:
                os._exit(code)
        outcomes.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert outcomes == {0, 1}


def pages(path: Path) -> list[tuple[int, bytes]]:
    """The pages that have memory: the file is far larger than that."""
    found: list[tuple[int, bytes]] = []
    with path.open("rb") as file:
        end = 0
        while True:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing more
                return found
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found += [
                (at // 4096, os.pread(file.fileno(), 4096, at)) for at in range(start, end, 4096)
            ]


def write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# --- clean --------------------------------------------------------------------------------------


def test_clean_takes_the_dead_and_no_others(
    store_name: str, others: Others, command: Command
) -> None:
    server, client = others(), others()
    server.call("serve", store_name)
    client.call("connect", f"shm://{store_name}")
    client.call("insert", "replay", 1)
    assert f"nothing to remove\n{store_name} is in use" in command("clean", store_name)
    server.kill()
    assert command.json("clean", store_name) == {
        "removed": [],
        "in_use": [store_name],
        "problems": [],
    }
    assert client.call("sample", "replay", 1) == [1]
    client.kill()
    taken = file_of(store_name).stat().st_blocks * 512
    assert command.json("clean", store_name) == {
        "removed": [{"name": store_name, "nbytes": taken}],
        "in_use": [],
        "problems": [],
    }
    assert store_name not in recovery.names()
    # A lease alone, a segment alone, and one of which this process is a participant.
    for suffix in ("", ".lease"):
        file_of(store_name + suffix).touch(0o600)
        assert f"removed {store_name}" in command("clean", store_name)
        assert store_name not in recovery.names()
    with reverb.Server(make_tables(), name=store_name, capacity=16 * MIB) as own:
        assert "nothing to remove" in command("clean", store_name)
        own.check()
    # Not what others could have written.
    file_of(store_name).touch(0o666)
    file_of(store_name).chmod(0o666)
    command("clean", store_name, code=1)
    assert "mode" in command.errors
    assert file_of(store_name).exists()


def clean_at_once(name: str) -> int:
    removed, problems = recovery.clean([name])
    assert not problems
    # A lease alone is of a server that gives up starting, as somebody else has it just now.
    return sum(one.nbytes > 0 for one in removed)


def test_cleaners_may_race(store_name: str, others: Others) -> None:
    """Each dead store is removed once, and a server that starts meanwhile is left alone."""
    server = others()
    server.call("serve", store_name)
    for _ in range(15):
        server.kill()
        server = others()  # before the pipe, of which it would keep an end
        read, write_end = os.pipe()
        cleaners = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                os.close(write_end)
                os.read(read, 1)  # until all of them are there
                try:
                    os._exit(clean_at_once(store_name))
                finally:
                    os._exit(99)
            cleaners.append(pid)
        os.close(read)
        os.close(write_end)
        made = False
        while not made:
            try:
                server.call("serve", store_name)
                made = True
            except errors.StoreExistsError:
                continue  # a cleaner has it just now
        removed = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in cleaners]
        assert sum(removed) <= 1
        server.call("connect", f"shm://{store_name}")
        server.call("insert", "replay", 1)
        assert recovery.clean([store_name]) == ([], [])
    with recovery.look(store_name) as found:
        assert found.state == recovery.SERVED


ALONE = """
    import os, signal, sys
    import shmreplay as reverb
    from shmreplay import cli
    from tests.process.servants import make_tables

    def serve(name):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            server = reverb.Server(make_tables(), name=name, capacity=4 << 20)
            os.write(write, b"x")
            signal.pause()
        os.read(read, 1)
        return pid

    dead, alive = [serve("one"), serve("two")], serve("three")
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    open("/dev/shm/shmreplay.12345.theirs", "w").close()
    open("/dev/shm/other", "w").close()
    assert cli.main(["clean"]) == 0
    assert cli.main(["ls"]) == 0
    left = sorted(os.listdir("/dev/shm"))
    own = f"shmreplay.{os.geteuid()}.three"
    assert left == ["other", own, own + ".lease", "shmreplay.12345.theirs"], left
    os.kill(alive, signal.SIGKILL)
    os.waitpid(alive, 0)
    assert cli.main(["clean"]) == 0
    assert sorted(os.listdir("/dev/shm")) == ["other", "shmreplay.12345.theirs"]
    assert cli.main(["ls"]) == 0
"""


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs to mount a file system"
)
def test_clean_of_all() -> None:
    """In a /dev/shm of its own, as it looks at every store of this user."""
    mount = 'mount -t tmpfs -o size=32m tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", textwrap.dedent(ALONE)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" (")[0] for line in lines[:2]] == ["removed one", "removed two"]
    assert "three" in done.stdout
    assert lines[-1] == "no stores of user 0 in /dev/shm"


# --- keygen -------------------------------------------------------------------------------------


def test_keygen_makes_a_pair_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keygen", "--json", str(tmp_path / "keys"), "actor"]) == command_support.OK
    paths = json.loads(capsys.readouterr().out)
    assert Path(paths["secret"]).stat().st_mode & 0o777 == 0o600
    assert Path(paths["public"]).read_text() != Path(paths["secret"]).read_text()
    assert cli.main(["keygen", str(tmp_path / "keys"), "actor"]) == command_support.USAGE
    assert "actor.key_secret, which is there already" in capsys.readouterr().err
    # Nor is another's public key of that name lost.
    public = tmp_path / "keys" / "other.key"
    public.write_text("theirs")
    assert cli.main(["keygen", str(tmp_path / "keys"), "other"]) == command_support.USAGE
    assert "other.key, which is there already" in capsys.readouterr().err
    assert public.read_text() == "theirs"
    assert not public.with_suffix(".key_secret").exists()
