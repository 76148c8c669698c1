"""Reverb's modules and the names in them: all that a program may import is where it is in Reverb.

`golden/reverb_modules.json` has what dm-reverb 0.14 has; where that is installed, the file is
compared with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shmreplay as reverb
from shmreplay.cc import schema_pb2
from shmreplay.cc.checkpointing import checkpoint_pb2
from shmreplay.server_executable import reverb_config_pb2, server_from_proto, server_main
from tests.golden.reverb_modules import LEFT_OUT, golden, parameters

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = golden()

NOT_THERE = {
    **dict.fromkeys(
        [
            *("ChunkData", "FlatTrajectory", "KeyWithPriority", "PrioritizedItem", "SampleInfo"),
            *("SequenceRange", "SliceRange", "TableInfo", "Timeout", "Uint128"),
        ],
        "reverb.cc.schema_pb2",
    ),
    **dict.fromkeys(
        ["AutoTunedChunkerOptions", "ChunkerOptions", "ConstantChunkerOptions"], "reverb.pybind"
    ),
    "TableExtensionBase.build_internal_extensions": "reverb.server",
    "PatternDataset.element_spec": "TensorFlow",
    "TimestepDataset.element_spec": "TensorFlow",
    "TrajectoryDataset.element_spec": "TensorFlow",
}
"""Names that are not there: what Reverb's client and server say to each other, settings of its
chunks, how its extensions are made in C++, and what datasets have with TensorFlow alone."""

OF_OUR_OWN = {"Writer", "TrajectoryWriter", "StructuredWriter", "ReferenceStep"}
"""Classes that a program does not make by itself; their constructors take what they like."""


def test_reverbs_modules_are_as_the_golden_file_says() -> None:
    if importlib.util.find_spec("reverb") is None:
        pytest.skip("dm-reverb is not installed")
    program = "import json; from tests.golden import reverb_modules as modules\n"
    program += "print(json.dumps(modules.described()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == GOLDEN


@pytest.mark.parametrize("module_name", GOLDEN)
def test_a_module_of_reverbs(module_name: str) -> None:
    ours = importlib.import_module(module_name.replace("reverb", "shmreplay", 1))
    for name, wanted in GOLDEN[module_name].items():
        if NOT_THERE.get(name) in (module_name, "TensorFlow"):
            continue
        found: Any = ours
        for part in name.split("."):
            assert hasattr(found, part), f"{module_name} has no {name}"
            if part == "from_table_signature":  # which passes its arguments on
                found = found.__mro__[1]
            found = getattr(found, part)
        given = parameters(found)
        if wanted is not None and given is not None and name not in OF_OUR_OWN:
            assert given[: len(wanted)] == wanted, f"{module_name}.{name} takes {given}"


def test_what_is_left_out_is_not_there_or_says_what_to_use() -> None:
    with pytest.raises(ImportError, match="TrajectoryDataset"):
        importlib.import_module("shmreplay.cc.ops")
    for name in LEFT_OUT:
        if name not in ("reverb.lib", "reverb.cc.ops"):
            assert importlib.util.find_spec(name.replace("reverb", "shmreplay", 1)) is None


def test_programs_import_them_by_reverbs_name() -> None:
    program = """
import sys, shmreplay
sys.modules["reverb"] = shmreplay
from reverb import server_executable
from reverb.cc import schema_pb2, patterns_pb2
from reverb.cc.checkpointing import checkpoint_pb2
from reverb.server_executable import server_from_proto
from reverb.server import TableExtensionBase
import reverb.platform.default.checkpointers
print(server_from_proto.tables_from_proto([]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# ------------------------------------------------------------------ what they do


def options(**fields: Any) -> schema_pb2.KeyDistributionOptions:
    return schema_pb2.KeyDistributionOptions(**fields)


Options = schema_pb2.KeyDistributionOptions

SELECTORS = [
    (options(fifo=True), reverb.selectors.Fifo()),
    (options(lifo=True), reverb.selectors.Lifo()),
    (options(uniform=True), reverb.selectors.Uniform()),
    (options(heap=Options.Heap(min_heap=True)), reverb.selectors.MinHeap()),
    (options(heap=Options.Heap()), reverb.selectors.MaxHeap()),
    (
        options(prioritized=Options.Prioritized(priority_exponent=0.5)),
        reverb.selectors.Prioritized(0.5),
    ),
]


@pytest.mark.parametrize(("message", "selector"), SELECTORS)
def test_selectors_of_messages(message: Options, selector: reverb.selectors.Selector) -> None:
    assert server_from_proto.selector_from_proto(message) == selector
    assert reverb.pybind.selector_from_proto(message) == selector
    table = reverb.Table("t", selector, selector, 5, reverb.rate_limiters.MinSize(1))
    info = table.info
    assert server_from_proto.selector_from_proto(info.sampler_options) == selector
    limiter = server_from_proto.rate_limiter_from_proto(info.rate_limiter_info)
    again = reverb.Table("t", selector, selector, 5, limiter)
    assert again.info.rate_limiter_info == info.rate_limiter_info


def test_a_message_of_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind None; expected one of"):
        server_from_proto.selector_from_proto(options())


def test_tables_of_a_configuration() -> None:
    config = reverb_config_pb2.ReverbServerConfig(
        port=8000,
        tables=[
            checkpoint_pb2.PriorityTableCheckpoint(
                table_name="replay",
                sampler=options(prioritized=Options.Prioritized(priority_exponent=0.8)),
                remover=options(fifo=True),
                max_size=100,
                max_times_sampled=3,
                rate_limiter=checkpoint_pb2.RateLimiterCheckpoint(
                    samples_per_insert=2.0, min_size_to_sample=4, min_diff=-8.0, max_diff=16.0
                ),
            )
        ],
    )
    (table,) = server_from_proto.tables_from_proto(config.tables)
    wanted = reverb.Table(
        "replay",
        reverb.selectors.Prioritized(0.8),
        reverb.selectors.Fifo(),
        100,
        reverb.rate_limiters.RateLimiter(2.0, 4, -8.0, 16.0),
        3,
    )
    assert table.info == wanted.info
    with pytest.raises(reverb.errors.InvalidArgumentError):
        server_from_proto.tables_from_proto([checkpoint_pb2.PriorityTableCheckpoint()])


def test_the_command_under_its_module_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["server_main", "--config=port: nowhere"])
    with pytest.raises(SystemExit, match="2"):
        server_main.app_run_main()
    assert "reverb_server: " in capsys.readouterr().err
