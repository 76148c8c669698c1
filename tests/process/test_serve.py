"""`shmreplay serve`: what its file may say, what it says of one that is wrong, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import cli, serve_config
from shmreplay.address import RemoteOptions
from shmreplay.bridge.auth import ClientKeys
from shmreplay.checkpointers import DefaultCheckpointer
from tests.conftest import SHARED_MEMORY, free_port

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 60.0

GOOD = """
[server]
name = "NAME"
capacity = "16MiB"

[[table]]
name = "replay"
max_size = 1000
sampler = { kind = "prioritized", priority_exponent = 0.6 }
remover = "fifo"
seed = 7
stripes = 2
[table.limiter]
kind = "sample_to_insert_ratio"
samples_per_insert = 4.0
min_size_to_sample = 10
error_buffer = 100.0
[table.signature]
action = { dtype = "int32" }
obs.pixels = { dtype = "uint8", shape = [-1, 84] }

[[table]]
name = "queue"
max_size = 5
sampler = "fifo"
remover = "fifo"
max_times_sampled = 1
limiter = { kind = "queue", size = 5 }
"""

TABLE = """
[[table]]
name = "t"
max_size = 10
sampler = "uniform"
remover = "fifo"
limiter = { kind = "min_size", min_size_to_sample = 1 }
"""


def written(folder: Path, text: str) -> str:
    path = folder / "config.toml"
    path.write_text(text)
    return str(path)


def test_what_the_file_says(tmp_path: Path) -> None:
    config = serve_config.read(written(tmp_path, GOOD))
    assert config.options == {"name": "NAME", "capacity": 16 << 20}
    replay, queue = config.tables
    declared = reverb.Table(
        "replay",
        reverb.selectors.Prioritized(0.6),
        reverb.selectors.Fifo(),
        1000,
        reverb.rate_limiters.SampleToInsertRatio(4.0, 10, 100.0),
        signature={
            "action": reverb.TensorSpec((), np.int32),
            "obs": {"pixels": reverb.TensorSpec((None, 84), np.uint8)},
        },
        seed=7,
        stripes=2,
    )
    assert replay.config() == declared.config()
    assert queue.config() == reverb.Table.queue("queue", 5).config()


def test_where_checkpoints_go(tmp_path: Path) -> None:
    text = "[server]\ncheckpoint = 'saved'\nbridge_workers = 2\npath = 'disk'\n" + TABLE
    text += "compress = 'lz4'\nmax_bytes = '2MiB'\n"
    config = serve_config.read(written(tmp_path, text))
    made = config.options.pop("checkpointer").internal_checkpointer()
    assert made == DefaultCheckpointer(tmp_path / "saved").internal_checkpointer()
    assert config.options == {"bridge_workers": 2, "path": str(tmp_path / "disk")}
    assert config.tables[0].config().max_bytes == 2 << 20
    assert config.tables[0].config().compress == "lz4"
    text = """
        [server.checkpoint]
        path = "/data/saved"
        every_seconds = 300
        every_inserts = 50_000
        keep = 3
        bandwidth = 1e8
        settings = "saved"
        reset_limiters = true
        fallback_checkpoint_path = "first"
        """
    config = serve_config.read(written(tmp_path, text + TABLE))
    declared = DefaultCheckpointer(
        "/data/saved",
        fallback_checkpoint_path=tmp_path / "first",
        keep=3,
        bandwidth=1e8,
        every_seconds=300,
        every_inserts=50_000,
        settings="saved",
        reset_limiters=True,
    )
    made = config.options["checkpointer"].internal_checkpointer()
    assert made == declared.internal_checkpointer()


CHECKPOINT = "[server.checkpoint]\npath = 'saved'\n"
WRONG = [
    ("server = 3" + TABLE, "top level: got server = 3; expected a table [server]"),
    ("x = 1" + TABLE, "top level: got x = 1; expected no key but server, table"),
    ("", "top level: got no table; expected one or more"),
    ("table = [3]", "[[table]] number 1: got table = 3; expected"),
    ("[server]\nport = 'a'" + TABLE, "[server]: got port = 'a'; expected a port"),
    ("[server]\nport = 70000" + TABLE, "[server]: got port = 70000; expected a port"),
    ("[server]\nport = true" + TABLE, "[server]: got port = True; expected a port"),
    ("[server]\ncapacity = '4 GB'" + TABLE, "got capacity = '4 GB'; expected bytes, or a number"),
    ("[server]\nprot = 8" + TABLE, "[server]: got prot = 8; expected no key but name, port"),
    ("[server]\ncheckpoint = 3" + TABLE, "got checkpoint = 3; expected a directory, or a table"),
    ("[server.checkpoint]\nkeep = 1" + TABLE, "[server.checkpoint]: got no path; expected the"),
    (CHECKPOINT + "keep = 'all'" + TABLE, "[server.checkpoint]: got keep = 'all'; expected a n"),
    (CHECKPOINT + "keep = 0" + TABLE, "[server.checkpoint]: Got keep 0; expected at least 1"),
    (CHECKPOINT + "every_seconds = -1" + TABLE, "Got every_seconds -1; expected seconds above 0"),
    (CHECKPOINT + "every_inserts = 0.5" + TABLE, "got every_inserts = 0.5; expected a number of"),
    (CHECKPOINT + "settings = 'new'" + TABLE, "Got settings 'new' for a checkpointer; expected"),
    (CHECKPOINT + "evry = 1" + TABLE, "got evry = 1; expected no key but path, every_seconds"),
    (TABLE + "max_bytes = 'much'", "[[table]] 't': got max_bytes = 'much'; expected bytes, or a n"),
    (TABLE + "max_bytes = -5", "[[table]] 't': "),
    (TABLE + "compress = 'zip'", "[[table]] 't': "),
    (TABLE + "compress = true", "[[table]] 't': got compress = True; expected 'lz4' or 'none'"),
    ("[server.auth]\nsecret = 's'" + TABLE, "[server.auth]: got no clients; expected"),
    (TABLE.replace("max_size = 10", "max_size = 1.5"), "[[table]] 't': got max_size = 1.5; exp"),
    (TABLE.replace("max_size = 10", "max_size = 0"), "[[table]] 't': "),
    (TABLE.replace('"uniform"', '"unifrom"'), "'t': sampler: got kind = 'unifrom'; expected one"),
    (TABLE.replace('"uniform"', '"prioritized"'), "got no priority_exponent; expected a number"),
    (
        TABLE.replace(", min_size_to_sample = 1 ", ""),
        "limiter: got no min_size_to_sample; exp",
    ),
    (TABLE.replace('"min_size"', '"max_size"'), "limiter: got kind = 'max_size'; expected one of"),
    (TABLE.replace("sample = 1 }", "sample = 0 }"), "[[table]] 't': limiter: "),
    (TABLE + "signature = { x = 3 }", "'t': got signature.x = 3; expected { dtype"),
    (TABLE + "signature = { x = { dtype = 'f99' } }", "'t': signature.x: "),
    (TABLE + "[table.signature.x]\ndtype = 'f4'\nshape = ['a']", "'t': signature.x: "),
    (TABLE + TABLE, "[[table]] number 2: got name = 't' again; expected names that differ"),
    ("[server", "got what is not TOML; expected TOML"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_is_wrong_is_named(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text)
    assert cli.main(["serve", path, "--check"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"shmreplay: {path}: ")
    assert said in shown


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(tmp_path / "none.toml")]) == 2
    assert "none.toml', which cannot be read (No such file" in capsys.readouterr().err


def test_checking_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, GOOD)
    assert cli.main(["serve", path, "--check"]) == 0
    assert capsys.readouterr().out == f"{path}: good, with the tables replay, queue\n"
    assert cli.main(["serve", path, "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"] == ["replay", "queue"]


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shmreplay", "serve", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_serving_until_a_signal(
    number: int, tmp_path: Path, unique_name: Callable[[], str]
) -> None:
    name = unique_name()
    process = started(written(tmp_path, GOOD.replace("NAME", name)))
    try:
        line = next_line(process)
        assert line.startswith(f"serving shm://{name}, port ")
        with reverb.Client(f"shm://{name}") as client:
            client.insert_batch("queue", {"x": np.arange(3.0)})
            assert client.sample_batch("queue", 3).data["x"].tolist() == [0, 1, 2]
        process.send_signal(number)
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "stopped, and the store is removed\n", "")
    assert not [entry.name for entry in SHARED_MEMORY.iterdir() if name in entry.name]


def test_under_nohup_it_outlives_its_terminal(
    tmp_path: Path, unique_name: Callable[[], str]
) -> None:
    name = unique_name()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = started(written(tmp_path, GOOD.replace("NAME", name)))
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        next_line(process)
        process.send_signal(signal.SIGHUP)
        with reverb.Client(f"shm://{name}") as client:
            client.insert_batch("queue", {"x": np.arange(3.0)})
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.communicate()


def test_what_a_server_saves_the_next_one_has(
    tmp_path: Path, unique_name: Callable[[], str]
) -> None:
    name = unique_name()
    text = f"[server]\nname = '{name}'\ncheckpoint = 'saved'\ncapacity = '16MiB'\n" + TABLE
    for expected in (0, 3):
        process = started(written(tmp_path, text))
        try:
            assert next_line(process).startswith("serving ")
            with reverb.Client(f"shm://{name}") as client:
                assert client.server_info()["t"].current_size == expected
                client.insert_batch("t", {"x": np.arange(3.0)})
                assert Path(client.checkpoint()).parent == tmp_path / "saved"
            process.terminate()
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
            process.communicate()


def test_serving_to_other_hosts_with_keys(tmp_path: Path, unique_name: Callable[[], str]) -> None:
    (tmp_path / "clients").mkdir()
    assert cli.main(["keygen", str(tmp_path), "server"]) == 0
    assert cli.main(["keygen", str(tmp_path / "clients"), "one"]) == 0
    port, name = free_port(), unique_name()
    auth = '[server.auth]\nsecret = "server.key_secret"\nclients = "clients"\n'
    server = f'[server]\nname = "{name}"\nport = {port}\ncapacity = "16MiB"\n'
    process = started(written(tmp_path, server + auth + TABLE), "--json")
    secret = str(tmp_path / "clients" / "one.key_secret")
    public = str(tmp_path / "server.key")
    try:
        text = ""
        while not text.endswith("}\n"):
            text += next_line(process)
        assert json.loads(text)["port"] == port
        remote = RemoteOptions(keys=ClientKeys(secret=secret, server=public))
        with reverb.Client(f"tcp://localhost:{port}", remote) as client:
            client.insert({"x": 1.0}, {"t": 1.0})
        keys = ["--secret", secret, "--server-key", public]
        assert cli.main(["info", f"tcp://localhost:{port}", "--json", *keys]) == 0
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_name_that_is_taken(
    make_server: Callable[..., reverb.Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server([reverb.Table.queue("queue", 5)])
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["serve", written(tmp_path, GOOD.replace("NAME", server.name))]) == 1
    assert server.name in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
