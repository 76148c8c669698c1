"""Tables as descriptions: settings, defaults, refusals, JSON, info, and binding to a server."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np
import pytest

from shmreplay import rate_limiters, selectors
from shmreplay.errors import ArgumentTypeError, InvalidArgumentError, SignatureError
from shmreplay.extensions import TableExtension
from shmreplay.limits import MAX_CONFIG_JSON_BYTES, MAX_STRIPES, MAX_TABLES
from shmreplay.replay_sample import INFO_DTYPES, ReplaySample, SampleInfo
from shmreplay.reverb_types import KeyDistributionOptions, TableCounts, TableInfo
from shmreplay.spec import TensorSpec
from shmreplay.table import Table, TableConfig, checked_tables


def make(**changes: Any) -> Table:
    """Makes a uniform table of 100 items with some arguments changed."""
    arguments: dict[str, Any] = {
        "name": "replay",
        "sampler": selectors.Uniform(),
        "remover": selectors.Fifo(),
        "max_size": 100,
        "rate_limiter": rate_limiters.MinSize(1),
    }
    return Table(**{**arguments, **changes})


class Handle:
    """Stands for a running table and notes what it is asked."""

    def __init__(self, info: TableInfo) -> None:
        self._info = info
        self.asked: list[Any] = []

    def info(self) -> TableInfo:
        return self._info

    def check(self) -> None:
        self.asked.append("check")

    def can_sample(self, num_samples: int) -> bool:
        self.asked.append(("sample", num_samples))
        return True

    def can_insert(self, num_inserts: int) -> bool:
        self.asked.append(("insert", num_inserts))
        return False


# --- settings -----------------------------------------------------------------------------------


def test_config_has_every_setting() -> None:
    table = Table(
        "replay",
        selectors.Prioritized(0.6),
        selectors.MinHeap(),
        np.int64(1000),  # type: ignore[arg-type]
        rate_limiters.SampleToInsertRatio(4, 10, 8),
        -1,
        None,
        {"x": np.zeros((2,), np.float32)},
        seed=2**64 - 1,
        stripes=1,
    )
    config = table.config()
    assert config == TableConfig(
        name="replay",
        sampler_kind="prioritized",
        sampler_exponent=0.6,
        remover_kind="min_heap",
        remover_exponent=0.0,
        max_size=1000,
        max_times_sampled=-1,
        samples_per_insert=4.0,
        min_size_to_sample=10,
        min_diff=32.0,
        max_diff=48.0,
        stripes=1,
        seed=2**64 - 1,
        signature_json='["dict",[["x",["leaf",[[2],"float32",null]]]]]',
    )
    assert type(config.max_size) is int
    assert table.signature == {"x": TensorSpec((2,), np.float32)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_size = 1  # type: ignore[misc]


@pytest.mark.parametrize("make_table", [Table.queue, Table.stack])
def test_queue_and_stack(make_table: Any) -> None:
    table = make_table("q", 3, signature=np.zeros(2), seed=5)
    kind = "fifo" if make_table == Table.queue else "lifo"
    config = table.config()
    assert (config.sampler_kind, config.remover_kind) == (kind, kind)
    assert (config.max_size, config.max_times_sampled, config.stripes) == (3, 1, 1)
    assert config.rate_limiter() == rate_limiters.Queue(3)
    assert config.seed == 5
    assert table.signature == TensorSpec((2,), np.float64)
    assert [table.can_insert(n) for n in (1, 2, 3, 4)] == [True, True, True, False]


def test_one_selector_and_limiter_may_serve_several_tables() -> None:
    selector, limiter = selectors.Fifo(), rate_limiters.MinSize(2)
    tables = [Table(name, selector, selector, 5, limiter) for name in "ab"]
    assert [table.config().sampler_kind for table in checked_tables(tables)] == ["fifo", "fifo"]


def test_repr() -> None:
    limiter = rate_limiters.MinSize(1)
    assert repr(make()) == (
        "Table(sampler=UniformSelector, remover=FifoSelector, max_size=100, max_times_sampled=0,"
        f" name=replay, rate_limiter={limiter!r}, signature=nullptr)"
    )
    assert repr(make(signature=np.zeros(1))).endswith(
        ", signature=TensorSpec(shape=(1,), dtype=float64))"
    )


# --- stripes ------------------------------------------------------------------------------------

ORDERED = [selectors.Fifo(), selectors.Lifo(), selectors.MinHeap(), selectors.MaxHeap()]
UNORDERED = [selectors.Uniform(), selectors.Prioritized(1.0)]


@pytest.mark.parametrize("cpus", [None, 1, 4, 64])
def test_default_stripes(monkeypatch: pytest.MonkeyPatch, cpus: int | None) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    many = min(16, cpus or 1)
    for sampler in UNORDERED:
        for remover in [selectors.Fifo(), *UNORDERED]:
            table = make(sampler=sampler, remover=remover)
            assert table.config().stripes == many
            assert make(sampler=sampler, max_times_sampled=1).config().stripes == 1
            assert make(sampler=sampler, max_times_sampled=-1).config().stripes == many
            assert make(sampler=sampler, max_size=3).config().stripes == min(3, many)
        for remover in ORDERED[1:]:
            assert make(sampler=sampler, remover=remover).config().stripes == 1
    for sampler in ORDERED:
        assert make(sampler=sampler).config().stripes == 1


def test_stripes_that_are_given() -> None:
    assert make(stripes=5).config().stripes == 5
    assert make(stripes=2, max_times_sampled=3).config().stripes == 2
    for ordered in ORDERED:
        with pytest.raises(InvalidArgumentError, match=r"2 stripes .*expected 1, as"):
            make(sampler=ordered, stripes=2)
        assert make(sampler=ordered, stripes=1).config().stripes == 1
    for ordered in ORDERED[1:]:
        with pytest.raises(InvalidArgumentError, match=r"2 stripes .*expected 1, as"):
            make(remover=ordered, stripes=2)


@pytest.mark.parametrize("stripes", [0, -1, MAX_STRIPES + 1])
def test_stripes_out_of_range(stripes: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{stripes} stripes .*1 to {MAX_STRIPES}"):
        make(stripes=stripes)


def test_no_more_stripes_than_slots() -> None:
    with pytest.raises(InvalidArgumentError, match="expected 1 to 3"):
        make(max_size=3, stripes=4)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "x" * 64, "\u00e9" * 32, "a\0b", "a\ud800"])
def test_bad_names(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="Got the table name"):
        make(name=name)


def test_longest_name() -> None:
    assert make(name="\u00e9" * 31 + "x").name == "\u00e9" * 31 + "x"


@pytest.mark.parametrize("size", [0, -1])
def test_max_size_must_be_positive(size: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"max_size {size}; expected 1 to"):
        make(max_size=size)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": 3}, "table name 3"),
        ({"name": None}, "table name None"),
        ({"max_size": 1.0}, "max_size 1.0"),
        ({"max_size": "1"}, "max_size '1'"),
        ({"max_size": True}, "max_size True"),
        ({"max_size": 2**31}, "max_size 2147483648"),
        ({"max_times_sampled": 1.5}, "max_times_sampled 1.5"),
        ({"max_times_sampled": 2**31}, "max_times_sampled 2147483648"),
        ({"max_times_sampled": -(2**31) - 1}, "max_times_sampled -2147483649"),
        ({"sampler": "uniform"}, "sampler 'uniform'; expected a selector"),
        ({"sampler": selectors.Uniform}, "sampler <class"),
        ({"sampler": selectors.Selector()}, "sampler SelectorSelector"),
        ({"remover": None}, "remover None; expected a selector"),
        ({"rate_limiter": 1}, "rate_limiter 1; expected a rate limiter"),
        ({"rate_limiter": rate_limiters.MinSize}, "rate_limiter <class"),
        ({"stripes": 1.0}, "stripes 1.0"),
        ({"seed": 1.0}, "seed 1.0"),
        ({"seed": "1"}, "seed '1'"),
    ],
)
def test_wrong_types(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError) as raised:
        make(**changes)
    assert text in str(raised.value)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_out_of_range(seed: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"seed {seed}; expected 0 to"):
        make(seed=seed)


def test_extensions() -> None:
    assert make(extensions=[]).config().events == make(extensions=None).config().events == 0
    extension = TableExtension()
    table = make(extensions=[extension])
    assert table.extensions == (extension,)
    assert table.config().stripes == 1
    assert table.config().events > 0
    assert table.replace(name="other").extensions == (extension,)
    assert table.replace(extensions=[]).config().events == 0
    with pytest.raises(InvalidArgumentError, match="expected 1 stripe"):
        make(extensions=[extension], stripes=2)


@pytest.mark.parametrize("extensions", [[object()], [TableExtension], TableExtension(), "on", 3])
def test_what_is_no_extension_is_refused(extensions: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="Got the table extension"):
        make(extensions=extensions)


def test_bad_signature() -> None:
    with pytest.raises(SignatureError, match=r"Got 3 of type int at \('x',\)"):
        make(signature={"x": 3})


# --- several tables -----------------------------------------------------------------------------


def test_checked_tables() -> None:
    tables = [make(name=str(number)) for number in range(MAX_TABLES)]
    assert checked_tables(iter(tables)) == tuple(tables)
    with pytest.raises(InvalidArgumentError, match=f"expected 1 to {MAX_TABLES}"):
        checked_tables([*tables, make()])
    with pytest.raises(InvalidArgumentError, match=r"named \['a'\]"):
        checked_tables([make(name="a"), make(name="b"), make(name="a")])
    with pytest.raises(InvalidArgumentError, match="at least one"):
        checked_tables(None)
    with pytest.raises(InvalidArgumentError, match="at least one"):
        checked_tables([])
    with pytest.raises(InvalidArgumentError, match="expected a list"):
        checked_tables(make())  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"expected shmreplay\.Table"):
        checked_tables([make(), "table"])  # type: ignore[list-item]


# --- replace ------------------------------------------------------------------------------------


def test_replace_keeps_what_is_not_given() -> None:
    table = make(
        sampler=selectors.Prioritized(0.5),
        max_times_sampled=7,
        signature={"a": np.zeros(1)},
        seed=3,
        stripes=2,
    )
    assert table.replace().config() == table.config()
    assert table.replace() is not table
    other = table.replace(name="other", max_size=50, max_times_sampled=0)
    expected = dataclasses.replace(table.config(), name="other", max_size=50, max_times_sampled=0)
    assert other.config() == expected
    changed = table.replace(
        sampler=selectors.Uniform(),
        remover=selectors.Uniform(),
        rate_limiter=rate_limiters.Queue(4),
        signature=np.zeros(2),
        seed=0,
        stripes=1,
    )
    config = changed.config()
    assert (config.sampler_kind, config.remover_kind) == ("uniform", "uniform")
    assert config.rate_limiter() == rate_limiters.Queue(4)
    assert (config.seed, config.stripes) == (0, 1)
    assert changed.signature == TensorSpec((2,), np.float64)


def test_replace_chooses_stripes_anew_unless_they_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert make().config().stripes == 8
    assert make().replace(sampler=selectors.Fifo()).config().stripes == 1
    assert make(sampler=selectors.Fifo()).replace(sampler=selectors.Uniform()).config().stripes == 8
    with pytest.raises(InvalidArgumentError, match="4 stripes"):
        make(stripes=4).replace(sampler=selectors.Fifo())


# --- JSON ---------------------------------------------------------------------------------------

TABLES = [
    make(),
    make(name="\u00e9\U0001f600", seed=2**64 - 1, signature={"a": [np.zeros((3, 4), bool)]}),
    make(sampler=selectors.Prioritized(-0.1), remover=selectors.MaxHeap()),
    make(rate_limiter=rate_limiters.SampleToInsertRatio(0.3, 7, 1.1), max_times_sampled=-3),
    Table.queue("q", 5),
]


@pytest.mark.parametrize("table", TABLES)
def test_json_round_trip(table: Table) -> None:
    text = table.config().to_json()
    assert text.isascii()
    config = TableConfig.from_json(text)
    assert config == table.config()
    again = Table.from_config(config)
    assert again.config() == config
    assert again.signature == table.signature
    assert repr(again) == repr(table)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "{", "[" * 10_000])
def test_text_that_is_no_config(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="damaged, or written by another version"):
        TableConfig.from_json(text)


def test_config_text_is_bounded() -> None:
    with pytest.raises(InvalidArgumentError, match=f"more than {MAX_CONFIG_JSON_BYTES}"):
        TableConfig.from_json(" " * (MAX_CONFIG_JSON_BYTES + 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", 3),
        ("sampler_kind", "heap"),
        ("sampler_kind", "lifo"),  # needs one stripe
        ("sampler_exponent", float("nan")),
        ("sampler_exponent", "1"),
        ("remover_kind", None),
        ("max_size", 0),
        ("max_size", 2**31),
        ("max_size", 5.0),
        ("max_size", True),
        ("max_times_sampled", 2**31),
        ("samples_per_insert", 0.0),
        ("samples_per_insert", float("inf")),
        ("min_size_to_sample", 0),
        ("min_diff", float("-inf")),
        ("max_diff", None),
        ("stripes", 0),
        ("stripes", MAX_STRIPES + 1),
        ("seed", -1),
        ("seed", 1.0),
        ("signature_json", None),
        ("signature_json", "{}"),
        ("signature_json", '["dict",[["a",["leaf",[[1],"object",null]]]]]'),
        ("unknown", 1),
    ],
)
def test_damaged_config(field: str, value: Any) -> None:
    values = json.loads(make(stripes=2).config().to_json())
    values[field] = value
    with pytest.raises(InvalidArgumentError):
        TableConfig.from_json(json.dumps(values))


def test_config_without_a_field() -> None:
    values = json.loads(make().config().to_json())
    del values["seed"]
    with pytest.raises(InvalidArgumentError, match="other fields"):
        TableConfig.from_json(json.dumps(values))


# --- info and binding ---------------------------------------------------------------------------


def test_info_before_a_server_runs_it() -> None:
    table = make(
        sampler=selectors.Prioritized(0.6),
        remover=selectors.MinHeap(),
        max_times_sampled=2,
        rate_limiter=rate_limiters.RateLimiter(2, 3, 2, 10),
        signature={"a": np.zeros(1, np.int8)},
    )
    info = table.info
    assert (info.name, info.max_size, info.max_times_sampled) == ("replay", 100, 2)
    assert info.sampler_options.WhichOneof("distribution") == "prioritized"
    assert info.sampler_options.prioritized.priority_exponent == 0.6
    assert info.remover_options.heap.min_heap
    assert info.signature == {"a": TensorSpec((1,), np.int8)}
    assert info.current_size == info.num_episodes == info.num_deleted_episodes == 0
    assert info.num_unique_samples == 0
    assert info.table_worker_time.sleeping_ms == 0
    limiter = info.rate_limiter_info
    assert limiter.insert_stats.completed == limiter.sample_stats.completed == 0
    again = rate_limiters.RateLimiter(
        samples_per_insert=limiter.samples_per_insert,
        min_size_to_sample=limiter.min_size_to_sample,
        min_diff=limiter.min_diff,
        max_diff=limiter.max_diff,
    )
    assert again == rate_limiters.RateLimiter(2, 3, 2, 10)
    assert table.check() is None  # type: ignore[func-returns-value]


def test_info_of_counts() -> None:
    counts = TableCounts(
        inserts=9,
        samples=8,
        current_size=7,
        num_episodes=6,
        num_deleted_episodes=5,
        num_unique_samples=4,
    )
    info = make().config().info(counts)
    assert info.rate_limiter_info.insert_stats.completed == 9
    assert info.rate_limiter_info.sample_stats.completed == 8
    assert (info.current_size, info.num_episodes) == (7, 6)
    assert (info.num_deleted_episodes, info.num_unique_samples) == (5, 4)
    assert info.signature is None
    assert info == make().config().info(counts)


FIELDS = ("fifo", "lifo", "uniform", "prioritized", "heap", "epoch")


@pytest.mark.parametrize("kind", selectors.KINDS)
def test_options(kind: str) -> None:
    options = KeyDistributionOptions(kind, 0.5 if kind == "prioritized" else 0.0)
    field = "heap" if kind.endswith("heap") else kind
    assert options.WhichOneof("distribution") == field
    assert [name for name in FIELDS if options.HasField(name)] == [field]
    assert (options.fifo, options.lifo, options.uniform) == tuple(
        kind == name for name in ("fifo", "lifo", "uniform")
    )
    assert options.prioritized.priority_exponent == (0.5 if kind == "prioritized" else 0.0)
    assert options.heap.min_heap is (kind == "min_heap")
    assert options.is_deterministic is (kind not in ("uniform", "prioritized", "epoch"))
    with pytest.raises(ValueError, match="no_such"):
        options.HasField("no_such")
    with pytest.raises(ValueError, match="no_such"):
        options.WhichOneof("no_such")


def test_can_sample_and_insert_before_a_server_runs_it() -> None:
    table = make(rate_limiter=rate_limiters.RateLimiter(1.5, 2, -10, 5))
    assert [table.can_insert(n) for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert not table.can_sample(1)


@pytest.mark.parametrize("bound", [False, True])
def test_counts_that_are_refused(bound: bool) -> None:
    table = make()
    handle = Handle(table.info)
    if bound:
        table._bind(handle)
    for ask in (table.can_sample, table.can_insert):
        with pytest.raises(InvalidArgumentError, match="expected at least 1"):
            ask(0)
        with pytest.raises(ArgumentTypeError, match="expected an int"):
            ask(1.0)  # type: ignore[arg-type]
    assert not handle.asked


def test_a_bound_table_asks_its_server() -> None:
    table = make()
    first, second = (Handle(table.config().info(TableCounts(current_size=size))) for size in (1, 2))
    table._bind(first)
    assert table.info.current_size == 1
    table._bind(second)
    assert table.info.current_size == 2
    table.check()
    assert table.can_sample(np.int64(3))  # type: ignore[arg-type]
    assert not table.can_insert(4)
    assert first.asked == []
    assert second.asked == ["check", ("sample", 3), ("insert", 4)]
    assert table.replace().info.current_size == 0


# --- samples ------------------------------------------------------------------------------------


def test_sample_info() -> None:
    assert SampleInfo._fields == (
        "key",
        "probability",
        "table_size",
        "priority",
        "times_sampled",
    )
    zeros = SampleInfo.zeros()
    assert tuple(zeros) == (0, 0.0, 0, 0.0, 0)
    assert [type(value) for value in zeros] == [int, float, int, float, int]
    batch = SampleInfo.zeros(3)
    assert [array.dtype.name for array in batch] == [
        "uint64",
        "float64",
        "int64",
        "float64",
        "int32",
    ]
    assert [array.dtype for array in batch] == list(INFO_DTYPES)
    assert all(array.shape == (3,) and not array.any() for array in batch)
    info, data = ReplaySample(info=zeros, data=[1])
    assert (info, data) == (zeros, [1])
