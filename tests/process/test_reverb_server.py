"""The command `reverb_server`, and the text that configures it."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

import shmreplay as reverb
from shmreplay import errors, reverb_server, textproto
from tests.conftest import free_port

CONFIG = """
port: %d  # a comment
tables: {
  table_name: "replay" 'of text'
  sampler: { prioritized { priority_exponent: 0.8 } is_deterministic: false }
  remover < heap: { min_heap: true } >;
  max_size: 100,
  max_times_sampled: 3
  rate_limiter: {
    samples_per_insert: 2 min_size_to_sample: 1 min_diff: -1e3, max_diff: inf
  }
}
tables [
  { table_name: "queue" sampler { fifo: true } remover { fifo: true } max_size: 0x10
    max_times_sampled: 1
    rate_limiter { samples_per_insert: 1. min_size_to_sample: 1 min_diff: 0 max_diff: 16 } }
]
"""

TABLE = (
    'table_name: "t" sampler { uniform: true } remover { lifo: true } max_size: 5 '
    "rate_limiter { samples_per_insert: 1 min_size_to_sample: 1 min_diff: -1 max_diff: 9 }"
)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shmreplay.reverb_server", "--capacity", str(1 << 22), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_tables_are_those_of_the_text() -> None:
    tables, port = reverb_server.parse_config(CONFIG % 8000)
    assert port == 8000
    info, queue = (table.info for table in tables)
    assert (info.name, info.max_size, info.max_times_sampled) == ("replayof text", 100, 3)
    assert info.sampler_options.prioritized.priority_exponent == 0.8
    assert info.remover_options.heap.min_heap
    limiter = info.rate_limiter_info
    assert (limiter.samples_per_insert, limiter.min_diff) == (2.0, -1000.0)
    assert limiter.max_diff == sys.float_info.max
    assert (queue.name, queue.max_size, queue.rate_limiter_info.max_diff) == ("queue", 16, 16.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(number: int) -> None:
    port = free_port()
    process = start("--config", CONFIG % port)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert f"serving 'replayof text', 'queue' at port {port}, shm://" in line
        with reverb.Client(f"tcp://localhost:{port}") as client:
            client.insert({"x": 1}, {"queue": 1.0})
            assert client.sample_batch("queue", 1).data["x"].tolist() == [[1]]
        process.send_signal(number)
        _, complaints = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, complaints) == (0, "")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("", "Got a config without tables"),
        (f"tables {{ {TABLE} }}", "Got no port; expected the number of a port"),
        (f'port: "8000" tables {{ {TABLE} }}', "Got port: '8000'; expected the number of a port"),
        ("port: 1 tables: 3", "Got tables[0]: 3; expected a message in braces"),
        (f"port: 1 tables {{ {TABLE} max_size: 6 }}", "Got tables[0].max_size 2 times"),
        (f"port: 1 tables {{ {TABLE} signature {{}} }}", "with the field 'signature'"),
        (f"port: 1 tables {{ {TABLE.replace('max_size', 'max')} }}", "with the field 'max'"),
        (f"port: 1 tables {{ {TABLE.replace('5', '0')} }}", "tables[0]: "),
        (f"port: 1 tables {{ {TABLE.replace('uniform', 'heap')} }}", "Got tables[0].sampler.heap"),
        (f"port: 1 tables {{ {TABLE.replace('uniform: true', '')} }}", "sampler with no kind"),
        (
            f"port: 1 tables {{ {TABLE.replace('uniform: true', 'fifo: true lifo: true')} }}",
            "sampler with fifo, lifo; expected one",
        ),
        (
            f"port: 1 tables {{ {TABLE.replace('min_diff: -1', '')} }}",
            "Got no tables[0].rate_limiter.min_diff; expected a number",
        ),
        (f"port: 1 tables {{ {TABLE.split('rate')[0]} }}", "Got no tables[0].rate_limiter"),
        (f"port: 99999999 tables {{ {TABLE} }}", "99999999"),
        ("port 8000", "Got '8000' in line 1, column 6 of a text of a message; expected ':'"),
        ("port:\n  }", "Got '}' in line 2, column 3"),
        ("tables {", "Got the end of the text in line 1, column 9"),
        ("port: 1 !", "Got '!' in line 1, column 9"),
        ("port: [1 2]", "expected ',' or ']'"),
        ("a {" * 200, "messages within each other"),
    ],
)
def test_a_bad_config_is_refused_with_what_is_wrong(
    config: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    assert reverb_server.main(["--config", config]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x: -7", -7),
        ("x: 0x1F", 31),
        ("x: 1.5e-3", 0.0015),
        ("x: 2.5f", 2.5),
        ("x: -inf", float("-inf")),
        ("x: true", True),
        ("x: NAME", "NAME"),
        (r"""x: "a\"b\n" 'c'""", 'a"b\nc'),
        ("x {}", {}),
        ("x: < y: 1; >", {"y": [1]}),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert textproto.parse(text) == {"x": [value]}


def test_repeated_fields() -> None:
    assert textproto.parse("x: [1, 2] x: 3 x: []") == {"x": [1, 2, 3]}


def test_texts_that_are_none_are_errors_and_nothing_else() -> None:
    import random

    random_ = random.Random(3)
    for _ in range(2000):
        text = list(CONFIG % 8000)
        for _ in range(random_.randint(1, 4)):
            text[random_.randrange(len(text))] = random_.choice("{}<>[]:;,\"'x1.-# \n\\")
        try:
            reverb_server.parse_config("".join(text))
        except errors.ReverbError:
            continue
