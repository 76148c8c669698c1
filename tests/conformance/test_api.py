"""Names, parameters, defaults and kinds of exceptions that programs written for Reverb rely on."""

from __future__ import annotations

import importlib
import inspect
import logging
import operator
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import address, compat, limits
from shmreplay.bridge import link
from tests.conftest import free_port

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]
# Seconds after which a call that should go on at once is taken to hang.
DEADLINE = 30.0
# The time of insertion is that of the last tick of the clock.
COARSE_NS = 10**8


def table(name: str = "table", **options: Any) -> reverb.Table:
    usual: dict[str, Any] = {
        "name": name,
        "sampler": reverb.selectors.Uniform(),
        "remover": reverb.selectors.Fifo(),
        "max_size": 1000,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
    }
    return reverb.Table(**{**usual, **options})


# ------------------------------------------------------------------------------ names

TOP_LEVEL = [
    *("Client", "Server", "Table", "TFClient", "TimestepDataset", "TrajectoryDataset"),
    *("TrajectoryWriter", "TrajectoryColumn", "ReplaySample", "SampleInfo", "ReverbError"),
    *("DeadlineExceededError", "selectors", "rate_limiters", "checkpointers"),
    *("client", "errors", "item_selectors", "pybind", "replay_sample", "reverb_types", "server"),
    *("Writer", "PatternDataset", "structured", "structured_writer", "pattern_dataset"),
    *("tf_client", "timestep_dataset", "trajectory_dataset", "trajectory_writer", "distributions"),
]

BY_MODULE = {
    "client": ["Client", "Writer"],
    "pattern_dataset": ["PatternDataset", "pattern_dataset_with_info"],
    "structured_writer": [
        *("Condition", "Config", "ConditionProto", "Pattern", "PatternTransform", "ReferenceStep"),
        *("StructuredWriter", "constant_priority_fn", "create_config", "create_reference_step"),
        *("infer_signature", "pattern_from_transform", "td_error", "unpack_pattern"),
    ],
    "errors": ["DeadlineExceededError", "ReverbError"],
    "checkpointers": [
        *("CheckpointerBase", "DefaultCheckpointer", "TempDirCheckpointer", "default_checkpointer"),
    ],
    "item_selectors": ["Fifo", "Lifo", "Uniform", "Prioritized", "MinHeap", "MaxHeap"],
    "pybind": [
        *("ItemSelector", "FifoSelector", "LifoSelector", "UniformSelector", "HeapSelector"),
        *("PrioritizedSelector", "RateLimiter", "Table", "Server", "Client", "TrajectoryWriter"),
        *(
            "Writer",
            "StructuredWriter",
            "Sampler",
            "Checkpointer",
            "WeakCellRef",
            "create_default_checkpointer",
        ),
    ],
    "platform.checkpointers_lib": ["CheckpointerBase", "DefaultCheckpointer"],
    "platform.default.checkpointers": ["CheckpointerBase", "default_checkpointer"],
    "rate_limiters": ["RateLimiter", "MinSize", "SampleToInsertRatio", "Queue", "Stack"],
    "replay_sample": ["ReplaySample", "SampleInfo"],
    "reverb_types": ["TableInfo", "SelectorType", "SpecNest"],
    "server": ["Server", "Table"],
    "tf_client": ["TFClient"],
    "timestep_dataset": ["TimestepDataset"],
    "trajectory_dataset": ["TrajectoryDataset"],
    "trajectory_writer": ["TrajectoryWriter", "TrajectoryColumn"],
}


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_name_is_there(name: str) -> None:
    assert hasattr(reverb, name)


@pytest.mark.parametrize(("module", "names"), BY_MODULE.items(), ids=list(BY_MODULE))
def test_names_of_modules(module: str, names: list[str]) -> None:
    found = importlib.import_module(f"shmreplay.{module}")
    assert operator.attrgetter(module)(reverb) is found
    assert [name for name in names if not hasattr(found, name)] == []


def test_all_that_is_exported_is_there() -> None:
    assert [name for name in reverb.__all__ if not hasattr(reverb, name)] == []
    assert reverb.__version__.count(".") == 2


def test_selectors_are_those_of_item_selectors() -> None:
    for name in BY_MODULE["item_selectors"]:
        assert getattr(reverb.selectors, name) is getattr(reverb.item_selectors, name)
        assert getattr(reverb.distributions, name) is getattr(reverb.item_selectors, name)
    assert isinstance(reverb.selectors.Fifo(), reverb.pybind.FifoSelector)
    assert isinstance(reverb.selectors.MinHeap(), reverb.pybind.HeapSelector)
    assert reverb.pybind.HeapSelector(min_heap=True) == reverb.selectors.MinHeap()


# ------------------------------------------------------------------------------ parameters

NEEDED = inspect.Parameter.empty
TABLE = {"extensions": (), "signature": None}
DATASET = {
    "num_workers_per_iterator": -1,
    "max_samples_per_stream": -1,
    "rate_limiter_timeout_ms": -1,
}
# Of each callable: the parameters that Reverb has, in its order, with its defaults.
PARAMETERS: dict[str, dict[str, Any]] = {
    "Table": {
        **dict.fromkeys(["name", "sampler", "remover", "max_size", "rate_limiter"], NEEDED),
        "max_times_sampled": 0,
        **TABLE,
    },
    "Table.queue": {"name": NEEDED, "max_size": NEEDED, **TABLE},
    "Table.stack": {"name": NEEDED, "max_size": NEEDED, **TABLE},
    "Table.can_sample": {"num_samples": NEEDED},
    "Table.can_insert": {"num_inserts": NEEDED},
    "Table.replace": dict.fromkeys(
        [
            *("name", "sampler", "remover", "max_size", "rate_limiter", "max_times_sampled"),
            *("extensions", "signature"),
        ]
    ),
    "Server": {"tables": None, "port": None, "checkpointer": None},
    "Server.wait": {},
    "Server.stop": {},
    "Server.localhost_client": {},
    "Client": {"server_address": NEEDED},
    "Client.insert": {"data": NEEDED, "priorities": NEEDED},
    "Client.sample": {
        "table": NEEDED,
        "num_samples": 1,
        "emit_timesteps": True,
        "unpack_as_table_signature": False,
    },
    "Client.mutate_priorities": {"table": NEEDED, "updates": None, "deletes": None},
    "Client.reset": {"table": NEEDED},
    "Client.server_info": {"timeout": None},
    "Client.checkpoint": {},
    "Client.trajectory_writer": {"num_keep_alive_refs": NEEDED, "validate_items": True},
    "Client.writer": {
        "max_sequence_length": NEEDED,
        "delta_encoded": False,
        "chunk_length": None,
        "max_in_flight_items": 25,
    },
    "Client.structured_writer": {"configs": NEEDED},
    "Writer.append": {"data": NEEDED},
    "Writer.append_sequence": {"sequence": NEEDED},
    "Writer.create_item": {"table": NEEDED, "num_timesteps": NEEDED, "priority": NEEDED},
    "Writer.flush": {},
    "Writer.close": {"retry_on_unavailable": True},
    "structured.StructuredWriter.append": {"data": NEEDED, "partial_step": False},
    "structured.StructuredWriter.flush": {"block_until_num_items": 0, "timeout_ms": None},
    "structured.StructuredWriter.end_episode": {"clear_buffers": True, "timeout_ms": None},
    "structured.create_config": {
        "pattern": NEEDED,
        "table": NEEDED,
        "conditions": (),
        "priority": None,
    },
    "structured.infer_signature": {"configs": NEEDED, "step_spec": NEEDED},
    "structured.td_error": {
        "max_priority_weight": NEEDED,
        "step_structure": NEEDED,
        "get_field_from_step_fn": NEEDED,
    },
    "structured.constant_priority_fn": {"value": NEEDED},
    "dataset.NumpyTimestepDataset": {
        **dict.fromkeys(["server_address", "table", "dtypes", "shapes"], NEEDED),
        "max_in_flight_samples_per_worker": NEEDED,
        **DATASET,
        "max_samples": -1,
    },
    "pattern_dataset.NumpyPatternDataset": dict.fromkeys(
        ["input_dataset", "configs", "respect_episode_boundaries", "is_end_of_episode"], NEEDED
    ),
    "pattern_dataset.pattern_dataset_with_info": dict.fromkeys(
        ["input_dataset", "configs", "respect_episode_boundaries", "is_end_of_episode"], NEEDED
    ),
    "TrajectoryWriter.append": {"data": NEEDED, "partial_step": False},
    "TrajectoryWriter.create_item": {"table": NEEDED, "priority": NEEDED, "trajectory": NEEDED},
    "TrajectoryWriter.configure": {
        "path": NEEDED,
        "num_keep_alive_refs": NEEDED,
        "max_chunk_length": NEEDED,
    },
    "TrajectoryWriter.flush": {"block_until_num_items": 0, "timeout_ms": None},
    "TrajectoryWriter.end_episode": {"clear_buffers": True, "timeout_ms": None},
    "TrajectoryWriter.close": {},
    "rate_limiters.RateLimiter": dict.fromkeys(
        ["samples_per_insert", "min_size_to_sample", "min_diff", "max_diff"], NEEDED
    ),
    "rate_limiters.MinSize": {"min_size_to_sample": NEEDED},
    "rate_limiters.SampleToInsertRatio": dict.fromkeys(
        ["samples_per_insert", "min_size_to_sample", "error_buffer"], NEEDED
    ),
    "rate_limiters.Queue": {"size": NEEDED},
    "rate_limiters.Stack": {"size": NEEDED},
    "selectors.Prioritized": {"priority_exponent": NEEDED},
    "checkpointers.DefaultCheckpointer": {
        "path": NEEDED,
        "group": "",
        "fallback_checkpoint_path": None,
    },
    "checkpointers.default_checkpointer": {"group": None},
    "dataset.NumpyTrajectoryDataset": {
        **dict.fromkeys(["server_address", "table", "dtypes", "shapes"], NEEDED),
        "max_in_flight_samples_per_worker": NEEDED,
        **DATASET,
        "max_samples": -1,
    },
    "dataset.NumpyTimestepDataset.from_table_signature": {
        **dict.fromkeys(["server_address", "table", "max_in_flight_samples_per_worker"], NEEDED),
        **DATASET,
        "get_signature_timeout_secs": None,
        "max_samples": -1,
    },
    "TFClient": {"server_address": NEEDED, "shared_name": None, "name": "reverb"},
    "TFClient.sample": {"table": NEEDED, "data_dtypes": NEEDED, "name": None},
    "TFClient.insert": {"data": NEEDED, "tables": NEEDED, "priorities": NEEDED, "name": None},
    "TFClient.update_priorities": {
        **dict.fromkeys(["table", "keys", "priorities"], NEEDED),
        "name": None,
    },
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    function: Any = reverb
    for part in name.split("."):
        function = getattr(function, part)
    signature = inspect.signature(function)
    ours = [p for p in signature.parameters.values() if p.name != "self"]
    wanted = PARAMETERS[name]
    assert {p.name: p.default for p in ours[: len(wanted)]} == wanted
    assert [p.name for p in ours[: len(wanted)]] == list(wanted)
    # What is ours alone comes after, and nobody has to give it.
    assert all(p.default is not NEEDED for p in ours[len(wanted) :])


def test_parameters_by_position_where_reverb_has_them() -> None:
    made = reverb.Table(
        "a",
        reverb.selectors.Lifo(),
        reverb.selectors.Fifo(),
        5,
        reverb.rate_limiters.MinSize(2),
        3,
        (),
        {"x": reverb.TensorSpec((None,), np.float32)},
    )
    info = made.info
    assert (info.name, info.max_size, info.max_times_sampled) == ("a", 5, 3)
    other = made.replace("b", None, reverb.selectors.Lifo(), 6)
    assert other.info.name == "b" and other.info.remover_options.lifo
    assert (other.info.max_size, other.info.max_times_sampled) == (6, 3)
    assert other.signature == made.signature


# ------------------------------------------------------------------------------ results


@pytest.mark.parametrize(
    ("selector", "kind", "deterministic"),
    [
        (reverb.selectors.Fifo(), "fifo", True),
        (reverb.selectors.Lifo(), "lifo", True),
        (reverb.selectors.Uniform(), "uniform", False),
        (reverb.selectors.Prioritized(0.7), "prioritized", False),
        (reverb.selectors.MinHeap(), "heap", True),
        (reverb.selectors.MaxHeap(), "heap", True),
    ],
    ids=["fifo", "lifo", "uniform", "prioritized", "min_heap", "max_heap"],
)
def test_options_answer_as_messages_do(
    make_client: MakeClient, selector: Any, kind: str, deterministic: bool
) -> None:
    _, client = make_client([table(sampler=selector, remover=selector, stripes=1)])
    info = client.server_info()["table"]
    for options in (info.sampler_options, info.remover_options):
        assert options.WhichOneof("distribution") == kind
        assert options.HasField(kind)
        others = {"fifo", "lifo", "uniform", "prioritized", "heap"} - {kind}
        assert not any(options.HasField(other) for other in others)
        assert options.is_deterministic is deterministic
        assert (options.fifo, options.lifo, options.uniform) == (
            kind == "fifo",
            kind == "lifo",
            kind == "uniform",
        )
        with pytest.raises(ValueError):
            options.HasField("random")
        with pytest.raises(ValueError):
            options.WhichOneof("sampler")
    if kind == "prioritized":
        assert info.sampler_options.prioritized.priority_exponent == 0.7
    if kind == "heap":
        assert info.sampler_options.heap.min_heap == (selector == reverb.selectors.MinHeap())


def test_info_has_what_makes_the_table_again(make_client: MakeClient) -> None:
    ratio = reverb.rate_limiters.SampleToInsertRatio(4, 10, 20)
    signature = {"x": reverb.TensorSpec((3,), np.float32, "x")}
    made = table(rate_limiter=ratio, max_times_sampled=7, signature=signature)
    _, client = make_client([made])
    info = client.server_info()["table"]
    limiter = info.rate_limiter_info
    again = reverb.Table(
        info.name,
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        info.max_size,
        reverb.rate_limiters.RateLimiter(
            limiter.samples_per_insert,
            limiter.min_size_to_sample,
            limiter.min_diff,
            limiter.max_diff,
        ),
        info.max_times_sampled,
        signature=info.signature,
    )
    assert again.info == info == made.info
    assert info.table_worker_time.sleeping_ms == 0


def test_sample_info_unpacks_as_reverbs(make_client: MakeClient) -> None:
    _, client = make_client([table()])
    client.insert({"x": 1}, {"table": 2.0})
    ((info, data),) = next(client.sample("table"))
    key, probability, table_size, priority, times_sampled = info
    kinds = [type(field) for field in info]
    assert kinds == [int, float, int, float, int]
    assert (probability, table_size, priority, times_sampled) == (1.0, 1, 2.0, 1)
    assert data == [1]
    assert client.update_priorities("table", [key], [3.0]) == 1
    assert reverb.SampleInfo.zeros() == (0, 0.0, 0, 0.0, 0)


def test_sample_says_how_old_it_is(make_client: MakeClient) -> None:
    _, client = make_client([table()])
    before = time.time_ns() - COARSE_NS
    client.insert_batch("table", {"x": np.arange(3)})
    after = time.time_ns()
    batch = client.sample_batch("table", 8).info
    assert batch.inserted_ns.dtype == np.uint64 and batch.inserted_ns.shape == (8,)
    assert (before <= batch.inserted_ns).all() and (batch.inserted_ns <= after).all()
    assert batch.age().shape == (8,)
    (step,) = next(client.sample("table"))
    assert before <= step.info.inserted_ns <= after
    with client.borrow("table") as [item]:
        assert before <= item.info.inserted_ns <= after
        assert isinstance(item.info.age(), float)
    assert reverb.SampleInfo.zeros().age() is None
    assert pickle.loads(pickle.dumps(step.info)).inserted_ns == step.info.inserted_ns


def test_info_says_why_the_limiter_blocks(make_client: MakeClient) -> None:
    server_tables = [
        table("fresh", rate_limiter=reverb.rate_limiters.MinSize(3)),
        reverb.Table.queue("queue", 2),
    ]
    _, client = make_client(server_tables)
    fresh, queue = client.server_info()["fresh"], client.server_info()["queue"]
    assert "holds 0 items, below min_size_to_sample=3" in fresh.sample_blocked_by
    assert fresh.insert_blocked_by == queue.insert_blocked_by == ""
    client.insert_batch("queue", {"x": np.arange(2)})
    client.insert_batch("fresh", {"x": np.arange(3)})
    fresh, queue = client.server_info()["fresh"], client.server_info()["queue"]
    assert fresh.sample_blocked_by == queue.sample_blocked_by == ""
    assert "from 2 to 3, above max_diff=2" in queue.insert_blocked_by
    assert queue.insert_blocked_by in repr(queue)
    for info, live in zip((fresh, queue), server_tables, strict=True):
        assert live.can_insert(1) == (info.insert_blocked_by == "")
        assert live.can_sample(1) == (info.sample_blocked_by == "")


@pytest.mark.parametrize("name", ["ratio", "queue"])
def test_reasons_agree_with_what_the_limiter_allows(make_client: MakeClient, name: str) -> None:
    ratio = reverb.rate_limiters.SampleToInsertRatio(2, 2, 4)
    made = {"ratio": table("ratio", rate_limiter=ratio), "queue": reverb.Table.queue("queue", 3)}
    _, client = make_client([made[name]])
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        info = made[name].info
        allowed = made[name].can_insert(1), made[name].can_sample(1)
        assert allowed == (info.insert_blocked_by == "", info.sample_blocked_by == "")
        seen.add(allowed)
        if rng.random() < 0.5 and allowed[0]:
            client.insert({"x": 1}, {name: 1.0}, timeout=DEADLINE)
        elif allowed[1]:
            client.sample_batch(name, 1, timeout=DEADLINE)
    assert {(True, False), (False, True), (True, True)} <= seen


# ------------------------------------------------------------------------------ exceptions


def test_exceptions_are_of_reverbs_types_and_of_one_root(make_client: MakeClient) -> None:
    signature = {"x": reverb.TensorSpec((), np.float32)}
    prioritized = table("prioritized", sampler=reverb.selectors.Prioritized(1.0))
    _, client = make_client([table(signature=signature), prioritized])
    nan = float("nan")
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (RuntimeError, "Priority table nope was not found", lambda: next(client.sample("nope"))),
        (RuntimeError, "Priority table nope was not found", lambda: client.reset("nope")),
        (RuntimeError, "was not found", lambda: client.mutate_priorities("nope", {1: 1.0})),
        (ValueError, "nope", lambda: client.insert({"x": 1}, {"nope": 1.0})),
        (ValueError, "priorities", lambda: client.insert({"x": 1}, {})),
        (ValueError, "inconsistent", lambda: client.insert({"x": 1}, {"table": 1.0})),
        (ValueError, "NaN", lambda: client.insert({"x": np.float32(1)}, {"table": nan})),
        (TypeError, "None", lambda: client.insert({"x": None}, {"table": 1.0})),
        (ValueError, "num_samples", lambda: next(client.sample("table", 0))),
        (ValueError, "num_samples", lambda: next(client.sample("table", -2))),
        (TypeError, "key", lambda: client.mutate_priorities("table", {-1: 1.0})),
        (TypeError, "key", lambda: client.mutate_priorities("table", {1.5: 1.0})),  # type: ignore[dict-item]
        (TypeError, "deletes", lambda: client.mutate_priorities("table", None, {1})),  # type: ignore[arg-type]
        (
            ValueError,
            "must not be negative",
            lambda: client.mutate_priorities("prioritized", {1: -1.0}),
        ),
        (ValueError, "NaN", lambda: client.mutate_priorities("prioritized", {1: nan})),
        (ValueError, "num_keep_alive_refs", lambda: client.trajectory_writer(0)),
        (TypeError, "str", lambda: reverb.Client(8000)),  # type: ignore[arg-type]
        (ValueError, "table", lambda: reverb.Server([])),
        (ValueError, "name", lambda: table("")),
        (ValueError, "max_size", lambda: table(max_size=0)),
        (TypeError, "max_size", lambda: table(max_size=2**31)),
        (TypeError, "max_size", lambda: table(max_size=1.5)),
        (ValueError, "signature", lambda: table(signature={"x": "float"})),
    ]
    for kind, fragment, call in calls:
        with pytest.raises(kind, match=fragment) as caught:
            call()
        assert isinstance(caught.value, reverb.ReverbError), caught.value
    assert list(client.sample("table", -1)) == []


def test_clients_pickle_by_address_and_show_it(make_client: MakeClient) -> None:
    _, client = make_client([table()])
    again = pickle.loads(pickle.dumps(client))
    with again:
        assert again.server_address == client.server_address
        assert again._server_address == client._server_address
        assert list(again.server_info()) == ["table"]
    assert repr(client) == f"Client, server_address={client.server_address}"


def test_a_checkpointer_says_where_checkpoints_go(make_client: MakeClient, tmp_path: Path) -> None:
    wanted = reverb.checkpointers.DefaultCheckpointer(
        str(tmp_path / "here"), fallback_checkpoint_path="x"
    )
    assert (wanted.path, wanted.group) == (str(tmp_path / "here"), "")
    assert wanted.fallback_checkpoint_path == "x"
    assert wanted.internal_checkpointer()[:3] == (wanted.path, "", "x")
    _, client = make_client([table()], checkpointer=wanted)
    path = Path(client.checkpoint())
    assert path.is_absolute() and path.is_dir() and path.parent == tmp_path / "here"
    with pytest.raises(TypeError, match="checkpointer"):
        reverb.Server([table()], None, "directory")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        reverb.checkpointers.CheckpointerBase()  # type: ignore[abstract]


def test_a_group_is_refused_when_a_checkpoint_is_written(
    make_client: MakeClient, tmp_path: Path
) -> None:
    checkpointer = reverb.checkpointers.DefaultCheckpointer(str(tmp_path), group="users")
    _, client = make_client([table()], checkpointer=checkpointer)
    with pytest.raises(ValueError, match="group 'users'"):
        client.checkpoint()


def test_default_checkpointers_have_directories_of_their_own() -> None:
    made = [reverb.checkpointers.default_checkpointer(), reverb.checkpointers.TempDirCheckpointer()]
    paths = [Path(each.internal_checkpointer().path) for each in made]
    try:
        assert paths[0] != paths[1] and all(path.is_dir() for path in paths)
    finally:
        for path in paths:
            path.rmdir()


def test_arguments_of_earlier_releases_are_ignored_with_one_warning(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    compat.ignored_argument.cache_clear()
    _, client = make_client([table()])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            client.trajectory_writer(2, get_signature_timeout_ms=3000).close()
    said = [r for r in caplog.records if "get_signature_timeout_ms" in r.getMessage()]
    assert len(said) == 1


# ------------------------------------------------------------------------------ better than Reverb


def test_one_limiter_and_one_selector_in_many_tables_are_many(make_client: MakeClient) -> None:
    limiter = reverb.rate_limiters.Queue(2)
    selector = reverb.selectors.Fifo()
    tables = [
        reverb.Table(name, selector, selector, 10, limiter, max_times_sampled=1) for name in "ab"
    ]
    _, client = make_client(tables)
    client.insert_batch("a", {"x": np.arange(2)})
    with pytest.raises(reverb.DeadlineExceededError, match=r"within 0\.03 s"):
        client.insert({"x": 2}, {"a": 1.0}, timeout=0.03)
    client.insert_batch("b", {"x": np.arange(2, 4)}, timeout=0)
    assert client.sample_batch("b", 2, timeout=0).data["x"].tolist() == [2, 3]
    assert client.sample_batch("a", 2, timeout=0).data["x"].tolist() == [0, 1]


def test_every_call_raises_after_the_server_stopped(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_LEAST_S", 0.05)  # each call looks whether it runs again
    server, client = make_client([table()])
    client.insert({"x": 1}, {"table": 1.0})
    writer = client.trajectory_writer(1)
    writer.append({"x": 1})
    samples = client.sample("table", 10)
    next(samples)
    server.stop()
    calls: list[Callable[[], Any]] = [
        lambda: client.insert({"x": 1}, {"table": 1.0}),
        lambda: client.insert_batch("table", {"x": np.arange(2)}),
        lambda: next(samples),
        lambda: next(client.sample("table")),
        lambda: client.sample_batch("table", 1),
        lambda: client.borrow("table").__enter__(),
        lambda: next(client.sampler("table", 1, prefetch=0)),
        lambda: client.mutate_priorities("table", {1: 1.0}),
        lambda: client.update_priorities("table", [1], [1.0]),
        lambda: client.reset("table"),
        lambda: writer.create_item("table", 1.0, {"x": writer.history["x"][-1:]}),
        writer.flush,
        writer.end_episode,
        lambda: client.trajectory_writer(1),
        client.server_info,
        client.check,
        server.check,
    ]
    for call in calls:
        with pytest.raises(reverb.errors.ServerClosedError):
            call()


def test_every_call_that_may_wait_takes_a_timeout(make_client: MakeClient) -> None:
    queue = reverb.Table.queue("queue", 1)
    empty = table("empty")
    server, client = make_client([queue, empty])
    client.insert({"x": 1}, {"queue": 1.0})
    writer = client.writer(1, max_in_flight_items=1)
    writer.append({"x": 1})
    writer.create_item("queue", 1, 1.0)  # held back, as the queue is full
    calls: list[Callable[[float], Any]] = [
        lambda t: writer.create_item("queue", 1, 1.0, timeout=t),
        lambda t: writer.flush(timeout=t),
        lambda t: client.insert({"x": 1}, {"queue": 1.0}, timeout=t),
        lambda t: client.insert_batch("queue", {"x": np.arange(1)}, timeout=t),
        lambda t: next(client.sample("empty", timeout=t)),
        lambda t: client.sample_batch("empty", 1, timeout=t),
        lambda t: client.borrow("empty", timeout=t).__enter__(),
        lambda t: next(client.sampler("empty", 1, timeout=t)),
        lambda t: server.wait(timeout=t),
    ]
    for call in calls:
        for seconds in (0, 0.02):
            with pytest.raises(reverb.DeadlineExceededError) as caught:
                call(seconds)
            assert isinstance(caught.value, TimeoutError)
    assert client.sample_batch("queue", 1, timeout=DEADLINE).data["x"].tolist() == [[1]]
    writer.close()


def test_wait_ends_when_another_thread_stops_the_server(make_client: MakeClient) -> None:
    server, _ = make_client([table()])
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()

        def wait() -> None:
            begun.set()
            server.wait()

        waiting = pool.submit(wait)
        assert begun.wait(DEADLINE)
        server.stop()
        waiting.result(DEADLINE)
    server.wait()


# ------------------------------------------------------------------------------ before the server


def test_a_client_made_before_its_server_waits_for_it(
    make_server: Callable[..., reverb.Server],
) -> None:
    port = free_port()
    client = reverb.Client(f"localhost:{port}")
    with ThreadPoolExecutor(3) as pool, client:
        calls: list[Future[Any]] = [
            pool.submit(client.insert, {"x": 1}, {"table": 1.0}),
            pool.submit(client.sample_batch, "table", 1, timeout=DEADLINE),
            pool.submit(client.trajectory_writer, 1),
        ]
        assert not any(call.done() for call in calls)
        make_server([table()], port=port)
        for call in calls:
            call.result(DEADLINE)


class Clock:
    """The part of `time` that who waits needs; it goes on while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_waiting_for_a_server_ends_at_its_deadline_and_says_for_what(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    client = reverb.Client(f"localhost:{port}")
    with pytest.raises(reverb.DeadlineExceededError, match="ServerInfo call did not complete"):
        client.server_info(timeout=0.01)
    for call in (client.sample_batch, client.sampler):
        with pytest.raises(reverb.DeadlineExceededError, match=f"localhost:{port}"):
            call("table", 1, timeout=0.01)
    clock = Clock()
    monkeypatch.setattr(address, "time", clock)
    monkeypatch.setattr(limits, "SERVER_WAIT_S", 10.0)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(reverb.errors.StoreNotFoundError, match=f"localhost:{port}"),
    ):
        client.reset("table")
    assert f"s: no server is reachable at 'localhost:{port}'" in caplog.text
    assert limits.WAIT_LOG_AFTER_S < 10.0 <= clock.now


# ------------------------------------------------------------------------------ importing

HEAVY = ["tensorflow", "torch", "jax", "keras", "gymnasium", "matplotlib", "rich", "zmq", "scipy"]
IMPORT = """
import sys
before = set(sys.modules)  # a system may load modules of its own into each interpreter
import shmreplay
from shmreplay import trajectory_dataset, timestep_dataset, tf_client, padding
print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_importing_brings_in_no_framework() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True, timeout=DEADLINE
    )
    loaded = set(eval(done.stdout))
    assert {"shmreplay", "numpy"} <= loaded
    assert loaded & set(HEAVY) == set()
    third_party = {name for name in loaded if not name.startswith("_")} - sys.stdlib_module_names
    assert third_party <= {"shmreplay", "numpy", "posix_ipc", "lz4", "cython_runtime"}
