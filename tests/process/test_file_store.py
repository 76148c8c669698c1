"""Stores in a file on disk: the same in all but where they lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import Server, cli, errors, recovery
from tests.process.servants import MIB, Other, make_tables, rows, wait_until


def entries(name: str) -> list[str]:
    return sorted(entry for entry in os.listdir("/dev/shm") if f".{name}" in entry)


def table(max_size: int = 1000) -> reverb.Table:
    return reverb.Table(
        "t",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        max_size,
        reverb.rate_limiters.MinSize(1),
    )


def test_it_is_used_as_any_other_and_leaves_nothing(
    make_server: Callable[..., Server], store_name: str, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    server = make_server([table()], name=store_name, path=path)
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600
    # Its length is addresses; blocks of the disk come as they are needed.
    assert 512 * status.st_blocks < 8 * MIB < 32 * MIB < status.st_size
    assert entries(store_name) == [
        f"shmreplay.{os.geteuid()}.{store_name}.{what}" for what in ("lease", "path")
    ]
    for address in (f"file://{path}", f"shm://{store_name}", f"localhost:{server.port}"):
        with reverb.Client(address) as client:
            client.insert_batch("t", {"x": np.arange(100)})
            assert set(client.sample_batch("t", 20).data["x"]) <= set(range(100))
            client.check()
    server.stop()
    assert not path.exists() and not entries(store_name)


def test_another_process_attaches(
    make_server: Callable[..., Server],
    others: Callable[[], Other],
    store_name: str,
    tmp_path: Path,
) -> None:
    server = make_server(make_tables(), name=store_name, path=tmp_path / "store")
    other = others()
    other.call("connect", f"file://{tmp_path}/store")
    other.call("insert", "replay", 1.0, 2.0)
    with server.localhost_client() as client:
        assert client.server_info()["replay"].current_size == 2


def test_a_killed_server_is_taken_over_with_all_that_was_in_it(
    make_server: Callable[..., Server],
    others: Callable[[], Other],
    store_name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(tmp_path / "store")
    other = others()
    other.call("serve", store_name, path=path)
    with reverb.Client(f"shm://{store_name}") as client:
        client.insert_batch("replay", rows(1, 2, 3))
    other.kill()
    wait_until(lambda: not _served(store_name), "the end of the server")
    assert cli.main(["info", store_name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["path"]) == ("dead", path)
    assert cli.main(["check", store_name]) == 0
    assert cli.main(["dump", store_name, "-o", str(tmp_path / "out"), "--table", "replay"]) == 0
    assert len(np.load(tmp_path / "out" / "replay.npz")["key"]) == 3
    with pytest.raises(errors.InvalidArgumentError, match="which is at"):
        reverb.Server(name=store_name, path=tmp_path / "other", recover=True)
    server = make_server(None, name=None, path=path, recover=True, capacity=None)
    assert server.name == store_name
    with server.localhost_client() as client:
        assert sorted(set(client.sample_batch("replay", 50).data["x"])) == [1, 2, 3]
        client.check()


def _served(name: str) -> bool:
    with recovery.look(name) as found:
        return found.state == recovery.SERVED


def test_a_dead_one_is_cleaned_away(
    others: Callable[[], Other], store_name: str, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    other = others()
    other.call("serve", store_name, path=str(path))
    assert recovery.clean([store_name]) == ([], [])
    other.kill()
    wait_until(lambda: not _served(store_name), "the end of the server")
    (removed,), problems = recovery.clean([store_name])
    assert removed.name == store_name and removed.nbytes > 0 and not problems
    assert not path.exists() and not entries(store_name)


def test_a_dead_one_is_replaced_under_its_name_and_under_another(
    make_server: Callable[..., Server],
    others: Callable[[], Other],
    store_name: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    other = others()
    other.call("serve", store_name, path=str(path))
    other.kill()
    wait_until(lambda: not _served(store_name), "the end of the server")
    second = make_server([table()], path=path)
    with reverb.Client(f"file://{path}") as client:
        assert client.server_info()["t"].current_size == 0
    second.stop()
    # The name still says where the dead one was; nothing is there any more.
    third = make_server([table()], name=store_name, path=path)
    assert reverb.Client(f"file://{path}").server_info().keys() == {"t"}
    third.stop()
    assert not entries(store_name)


def test_what_is_in_the_way_stays(make_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "store"
    make_server([table()], path=path)
    with pytest.raises(errors.StoreExistsError, match="living processes use"):
        make_server([table()], path=path)
    text = tmp_path / "text"
    text.write_text("of somebody")
    text.chmod(0o600)
    with pytest.raises(errors.StoreExistsError, match="not a store"):
        make_server([table()], path=text)
    assert text.read_text() == "of somebody"
    text.chmod(0o644)
    with pytest.raises(errors.StorePermissionError, match="mode"):
        make_server([table()], path=text)
    link = tmp_path / "link"
    link.symlink_to(text)
    with pytest.raises(errors.StorePermissionError):
        make_server([table()], path=link)
    assert link.is_symlink()


@pytest.mark.parametrize(
    "path", ["/proc/shmreplay-none", "", "/", "/nowhere/at/all/store", "a\nb", 3]
)
def test_a_path_that_cannot_be_is_refused(path: Any) -> None:
    with pytest.raises((errors.InvalidArgumentError, errors.ArgumentTypeError)):
        reverb.Server([table()], path=path)


def test_an_address_without_a_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreNotFoundError, match="has no store"):
        reverb.Client(f"file://{tmp_path}/store").server_info()


def test_a_pointer_of_others_is_not_followed(store_name: str, tmp_path: Path) -> None:
    pointer = Path(f"/dev/shm/shmreplay.{os.geteuid()}.{store_name}.path")
    pointer.write_text(str(tmp_path / "store"))
    pointer.chmod(0o644)
    try:
        with pytest.raises(errors.StorePermissionError):
            reverb.Server([table()], name=store_name, capacity=8 * MIB)
    finally:
        pointer.unlink()


@pytest.mark.parametrize("text", ["", "not absolute", "/nowhere/at/all/store"])
def test_a_pointer_that_leads_nowhere_is_cleaned(
    make_server: Callable[..., Server], store_name: str, text: str, tmp_path: Path
) -> None:
    # Left by whoever was killed between making and writing it, after its lease had gone.
    pointer = Path(f"/dev/shm/shmreplay.{os.geteuid()}.{store_name}.path")
    pointer.touch(0o600)
    pointer.write_text(text)
    with recovery.look(store_name) as found:
        assert found.state == recovery.DEAD
    removed, problems = recovery.clean([store_name])
    assert [each.name for each in removed] == [store_name] and not problems
    assert not entries(store_name)
    pointer.touch(0o600)
    make_server([table()], name=store_name, path=tmp_path / "store").stop()
    assert not entries(store_name)


HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_pointer_that_is_being_written_stays(store_name: str) -> None:
    # Its writer has the whole lease.
    pointer = Path(f"/dev/shm/shmreplay.{os.geteuid()}.{store_name}.path")
    command = [sys.executable, "-c", HOLD, str(pointer.with_suffix(".lease"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"held\n"
        pointer.touch(0o600)
        assert recovery.clean([store_name]) == ([], [])
        assert pointer.exists()
        writer.kill()
    assert recovery.clean([store_name])[0]
    assert not entries(store_name)
