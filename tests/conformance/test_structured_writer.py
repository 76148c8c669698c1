"""What Reverb's own tests pin of the structured writer, one test for each behaviour.

Each runs with the native core and with the evaluator that defines what patterns mean.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import structured, structured_writer, tree
from shmreplay.patterns import ConditionProto, Config, ModuloEq, PatternNode, Priority
from shmreplay.spec import TensorSpec
from shmreplay.structured import Condition, create_config, td_error

TABLE = "table"
DEADLINE_MS = 30_000

STEP = {"a": None, "b": {"c": None}}
A = structured.create_reference_step(STEP)["a"]
C = structured.create_reference_step(STEP)["b"]["c"]
DATA = Condition.data(STEP)

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]
Writers = Callable[..., reverb.StructuredWriter]


class OtherWriter:
    """A writer of trajectories that is not the native one, so that the evaluator is used."""

    def __init__(self, writer: reverb.TrajectoryWriter) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def a_table(**options: Any) -> reverb.Table:
    usual: dict[str, Any] = {
        "name": TABLE,
        "sampler": reverb.selectors.Fifo(),
        "remover": reverb.selectors.Fifo(),
        "max_size": 1000,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
        "max_times_sampled": 1,
    }
    return reverb.Table(**{**usual, **options})


@pytest.fixture
def client(make_client: MakeClient) -> reverb.Client:
    return make_client([a_table()])[1]


@pytest.fixture(params=["native", "evaluator"])
def make_writer(request: pytest.FixtureRequest) -> Iterator[Writers]:
    """Makes structured writers of a client, which are closed in the end."""
    with ExitStack() as stack:

        def make(client: reverb.Client, *configs: Config) -> reverb.StructuredWriter:
            if request.param == "native":
                writer = client.structured_writer(configs)
            else:
                writer = structured.StructuredWriter(
                    lambda keep: OtherWriter(client.trajectory_writer(keep)), configs
                )
            stack.callback(writer.close)
            return writer

        yield make


def config(
    pattern: Any,
    *conditions: ConditionProto,
    table: str = TABLE,
    priority: Priority | None = None,
) -> Config:
    return create_config(pattern, table, conditions, priority)


def step(a: Any, c: Any = None) -> dict[str, Any]:
    return {"a": a, "b": {"c": c}}


class Part(NamedTuple):
    """A step that stays open."""

    data: Any


END, END_AND_KEEP = object(), object()


def write(writer: reverb.StructuredWriter, steps: Sequence[Any]) -> None:
    for data in steps:
        if data is END:
            writer.end_episode()
        elif data is END_AND_KEEP:
            writer.end_episode(clear_buffers=False)
        elif isinstance(data, Part):
            writer.append(data.data, partial_step=True)
        else:
            writer.append(data)
    writer.flush(timeout_ms=DEADLINE_MS)


def taken(client: reverb.Client) -> list[Any]:
    """The items, in the order in which they were made: their columns in the order of leaves."""
    count = int(client.server_info()[TABLE].current_size)
    samples = list(client.sample(TABLE, count, emit_timesteps=False)) if count else []
    return [[column.tolist() for column in sample.data] for sample in samples]


def first_columns(client: reverb.Client) -> list[Any]:
    return [columns[0] for columns in taken(client)]


def count_up(count: int, start: int = 0) -> list[Any]:
    return [step(start + i, 10 * i) for i in range(count)]


# ------------------------------------------------------------------ configs


def node(**fields: int) -> PatternNode:
    return PatternNode(**{"flat_source_index": 0, **fields})


@pytest.mark.parametrize(
    "good",
    [node(stop=-2), node(start=-3, stop=-1), node(start=-2), node(start=-2, stop=0)],
    ids=repr,
)
def test_valid_nodes(client: reverb.Client, make_writer: Writers, good: PatternNode) -> None:
    make_writer(client, config({"x": good}))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (node(), "At least one of `start` and `stop` must be specified."),
        (node(flat_source_index=-1, stop=-1), "`flat_source_index` must be >= 0 but got -1."),
        (node(start=0), "`start` must be < 0 but got 0."),
        (node(start=2), "`start` must be < 0 but got 2."),
        (node(stop=1), "`stop` must be <= 0 but got 1."),
        (node(start=-2, stop=1), "`stop` must be <= 0 but got 1."),
        (node(start=-2, stop=-2), r"`stop` \(-2\) must be > `start` \(-2\) when both"),
        (node(start=-2, stop=-3), r"`stop` \(-3\) must be > `start` \(-2\) when both"),
        (node(stop=0), "`stop` must be < 0 when `start` isn't set but got 0."),
        (node(stop=-1, step=1), "`step` must only be set when `start` is set."),
        (node(start=-3, step=0), "`step` must be > 0 but got 0."),
        (node(start=-3, step=-1), "`step` must be > 0 but got -1."),
    ],
    ids=repr,
)
def test_invalid_nodes(
    client: reverb.Client, make_writer: Writers, bad: PatternNode, why: str
) -> None:
    with pytest.raises(ValueError, match=f"Invalid configuration at position 1: {why}"):
        make_writer(client, config({"x": A[-1]}), config({"x": A[-1], "y": bad}))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (ConditionProto(eq=1), "left side"),
        (ConditionProto(step_index=True), "comparison"),
        (Condition.step_index() % 0 == 1, "`mod_eq.mod` must be > 0 but got 0."),
        (Condition.step_index() % -2 == 1, "`mod_eq.mod` must be > 0 but got -2."),
        (Condition.step_index() % 2 == -1, "`mod_eq.eq` must be >= 0 but got -1."),
        (ConditionProto(flat_source_index=-1, eq=1), "`flat_source_index` must be >= 0"),
        (ConditionProto(is_end_episode=True, eq=0), "`is_end_episode` must be `eq` 1"),
        (ConditionProto(is_end_episode=True, ge=1), "`is_end_episode` must be `eq` 1"),
        (ConditionProto(is_end_episode=True, eq=1, inverse=True), "must be `eq` 1"),
        (ConditionProto(is_end_episode=True, mod_eq=ModuloEq(mod=2, eq=1)), "must be `eq` 1"),
        (Condition.step_index() >= 2**63, "must fit int64"),
    ],
    ids=repr,
)
def test_invalid_conditions(
    client: reverb.Client, make_writer: Writers, bad: ConditionProto, why: str
) -> None:
    with pytest.raises(ValueError, match="Invalid configuration at position 0") as error:
        make_writer(client, config({"x": A[-1]}, bad))
    assert why in str(error.value)


@pytest.mark.parametrize(
    "good",
    [Condition.is_end_episode(), DATA["a"] == 1, DATA["b"]["c"] % 3 != 2, DATA["a"] <= -4],
    ids=repr,
)
def test_valid_conditions(
    client: reverb.Client, make_writer: Writers, good: ConditionProto
) -> None:
    make_writer(client, config({"x": A[-1]}, good))


def test_configs_without_pattern_table_or_priority(
    client: reverb.Client, make_writer: Writers
) -> None:
    with pytest.raises(ValueError, match="At least one config must be provided"):
        make_writer(client)
    for bad, why in (
        (config({}), "`flat` must not be empty."),
        (config({"x": A[-1]}, table=""), "`table` must not be empty."),
        (config([A[-1]] * 257), "at most 256 columns but got 257"),
        (config({"x": A[-1]}, priority=structured.constant_priority_fn(math.nan)), "nan"),
        (config({"x": A[-1]}, priority=td_error(math.inf, STEP, lambda s: s["a"])), "finite"),
        (config({"x": A[-1]}, priority=Priority()), "`priority`"),
    ):
        with pytest.raises(ValueError, match=f"Invalid configuration at position 0: .*{why}"):
            make_writer(client, bad)
    with pytest.raises(TypeError, match="position 0"):
        make_writer(client, {"x": A[-1]})


def test_leaves_of_patterns_and_conditions_must_be_such() -> None:
    with pytest.raises(TypeError, match=r"\('x',\)"):
        create_config({"x": A}, TABLE)
    with pytest.raises(TypeError, match="comparison"):
        create_config({"x": A[-1]}, TABLE, [Condition.step_index()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="Key must be int or slice"):
        A["x"]
    with pytest.raises(TypeError):
        Condition.step_index() >= 1.5  # type: ignore[operator]  # noqa: B015


@pytest.mark.parametrize("value", [1.5, "1", None])
def test_conditions_compare_with_ints(value: Any) -> None:
    index = Condition.step_index()
    comparisons: list[Callable[[], Any]] = [
        lambda: index > value,
        lambda: index >= value,
        lambda: index < value,
        lambda: index <= value,
        lambda: index == value,
        lambda: index != value,
        lambda: index % value == 1,
        lambda: index % 2 == value,
    ]
    for compare in comparisons:
        with pytest.raises(reverb.errors.ArgumentTypeError):
            compare()


@pytest.mark.parametrize("configs", [None, 3])
def test_configs_must_be_a_list(client: reverb.Client, configs: Any) -> None:
    with pytest.raises(reverb.errors.ArgumentTypeError, match="configs must be a list of Config"):
        client.structured_writer(configs)


def test_what_create_config_makes() -> None:
    pattern = {"x": A[-3:-1], "y": [C[-2], C[-4::3]]}
    made = create_config(pattern, TABLE, [Condition.step_index() > 3])
    assert made.table == TABLE
    assert made.flat == [
        node(start=-3, stop=-1),
        PatternNode(flat_source_index=1, stop=-2),
        PatternNode(flat_source_index=1, start=-4, step=3),
    ]
    assert not made.flat[0].HasField("step")
    assert made.flat[0].step == 0
    (condition,) = made.conditions
    assert condition.WhichOneof("left") == "step_index"
    assert (condition.WhichOneof("cmp"), condition.ge) == ("ge", 4)
    assert made.priority.WhichOneof("priority") == "constant_fn"
    assert made.priority.constant_fn.value == 1.0
    assert structured.unpack_pattern(made) == pattern
    again = create_config(pattern, TABLE, [Condition.step_index() > 3])
    assert made == again and made.SerializeToString() == again.SerializeToString()
    again.table = "other"
    assert made != again and made.SerializeToString() != again.SerializeToString()
    # It travels to other processes.
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    with pytest.raises(AttributeError):
        again.tabel = TABLE
    with pytest.raises(TypeError):
        again.table = 3  # type: ignore[assignment]
    with pytest.raises(ValueError):
        again.HasField("tabel")


def test_pattern_from_transform() -> None:
    made = structured.pattern_from_transform(STEP, lambda s: {"x": s["b"]["c"][-2:]})
    assert made == {"x": PatternNode(flat_source_index=1, start=-2)}


def test_tables_are_looked_up_when_the_writer_is_made(make_client: MakeClient) -> None:
    _, client = make_client([a_table(sampler=reverb.selectors.Prioritized(1.0))])
    with pytest.raises(RuntimeError, match="Priority table nope was not found"):
        client.structured_writer([config({"x": A[-1]}, table="nope")])
    with pytest.raises(ValueError, match="negative"):
        client.structured_writer(
            [config({"x": A[-1]}, priority=structured.constant_priority_fn(-1.0))]
        )


# ------------------------------------------------------------------ which cells


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (A[-1], [0, 1, 2, 3, 4]),
        (A[-2], [0, 1, 2, 3]),
        (A[:-2], [0, 1, 2, 3]),
        (A[-2:], [[0, 1], [1, 2], [2, 3], [3, 4]]),
        (A[-3:-1], [[0, 1], [1, 2], [2, 3]]),
        (A[-3:-2], [[0], [1], [2]]),
        (A[-3:], [[0, 1, 2], [1, 2, 3], [2, 3, 4]]),
        (A[-3::2], [[0, 2], [1, 3], [2, 4]]),
        (A[-4::3], [[0, 3], [1, 4]]),
        (A[-4:-1:2], [[0, 2], [1, 3]]),
        (A[-6:], []),
    ],
    ids=repr,
)
def test_cells(
    client: reverb.Client, make_writer: Writers, pattern: PatternNode, expected: list[Any]
) -> None:
    write(make_writer(client, config({"x": pattern})), [*count_up(5), END])
    assert first_columns(client) == expected


def test_slices_and_squeezed_cells_together(client: reverb.Client, make_writer: Writers) -> None:
    pattern = {"x": A[-3:], "y": (C[-1], A[-2]), "z": C[-2::1]}
    write(make_writer(client, config(pattern)), count_up(5))
    assert taken(client) == [
        [[i, i + 1, i + 2], 10 * (i + 2), i + 1, [10 * (i + 1), 10 * (i + 2)]] for i in range(3)
    ]


def test_items_have_the_structure_of_the_pattern(
    client: reverb.Client, make_writer: Writers
) -> None:
    write(make_writer(client, config({"x": [A[-2:], (C[-1],)]})), count_up(2))
    data = client.sample_batch(TABLE, 1, timeout=0).data
    assert type(data["x"]) is list and type(data["x"][1]) is tuple
    np.testing.assert_array_equal(data["x"][0], [[0, 1]])
    np.testing.assert_array_equal(data["x"][1][0], [10])


def test_rows_are_those_asked_for_over_many_blocks(
    client: reverb.Client, make_writer: Writers
) -> None:
    """Where Reverb stores consecutive rows of a chunk whatever the stride."""
    writer = make_writer(client, config({"x": A[-9::2], "y": A[-1:], "z": C[-4:]}))
    for i in range(100):
        writer.append(step(np.full(300, i), np.float32(i)))
        if i >= 8:
            x, y, z = next(iter(client.sample(TABLE, emit_timesteps=False, timeout=10))).data
            np.testing.assert_array_equal(x[:, 7], np.arange(i - 8, i + 1, 2))
            np.testing.assert_array_equal(y[:, 299], [i])
            np.testing.assert_array_equal(z, np.arange(i - 3, i + 1))


class Pair(NamedTuple):
    """A step whose fields stand where those of the usual step of two leaves do."""

    a: Any
    b: Any


def test_steps_of_other_containers_with_the_same_names_will_do(
    client: reverb.Client, make_writer: Writers
) -> None:
    steps = [{"b": 2, "a": 1}, Pair(3, 4), {"a": 5, "b": None}, {"a": 7, "b": 8}]
    reference = structured.create_reference_step(Pair(None, None))
    write(make_writer(client, config({"x": reference.a[-1], "y": reference.b[-1]})), steps)
    assert taken(client) == [[1, 2], [3, 4], [7, 8]]
    write(make_writer(client, config({"x": reference.a[-1]})), [[1, 2], (3, 4)])
    assert taken(client) == [[1], [3]]


@pytest.mark.parametrize("other", [{"a": 3, "c": 4}, [3, 4], {"a": None, "c": 4}, ((3,), 4)])
def test_leaves_that_stand_elsewhere_than_before_are_refused(
    client: reverb.Client, make_writer: Writers, other: Any
) -> None:
    reference = structured.create_reference_step(Pair(None, None))
    writer = make_writer(client, config({"x": reference.a[-2:], "y": reference.b[-1]}))
    writer.append({"a": 1, "b": 2})
    with pytest.raises(reverb.errors.SignatureError, match="known by their place"):
        writer.append(other)
    write(writer, [{"a": 5, "b": 6}])
    assert taken(client) == [[[1, 5], 6]]


@pytest.mark.parametrize("first", [{"a": 1, "d": 2}, {"b": 1, "c": 2}, {"a": {"b": 1}, "c": 2}])
def test_a_first_step_with_other_names_than_the_reference_step_is_refused(
    client: reverb.Client, make_writer: Writers, first: Any
) -> None:
    reference = structured.create_reference_step(Pair(None, None))
    by_pattern = config({"x": reference.a[-1], "y": reference.b[-1]})
    places = structured.create_reference_step([None, None])
    data = structured.Condition.data(Pair(None, None))
    by_condition = config({"x": places[0][-1]}, data.a >= 0, data.b >= 0)
    td = td_error(0.5, Pair(None, None), lambda step: step.b)
    by_priority = config({"x": places[1][-1]}, priority=td)
    for made in (by_pattern, by_condition, by_priority):
        writer = make_writer(client, made)
        with pytest.raises(reverb.errors.SignatureError, match="the reference step of the"):
            writer.append(first)
        writer.append({"a": 1, "b": 2})
    spec = {name: reverb.TensorSpec((), np.int64) for name in first}
    with pytest.raises(reverb.errors.SignatureError, match="the reference step of the"):
        structured.infer_signature([by_pattern], spec)


@pytest.mark.parametrize(
    ("usual", "others"),
    [
        ({3: 1, 5: 2}, [{3: 1, 4: 2}, {5: 1, 6: 2}, [1, 2], {0: 1, 1: 2}]),
        ({0: 1, 1: 2}, [{1: 1, 2: 2}, {0: 1, 2: 2}]),
        ([[1], {"n": {7: 2}}], [[[1], {"n": {8: 2}}], [[1], {"n": [2]}]]),
    ],
)
def test_keys_that_are_numbers_are_names(
    client: reverb.Client, make_writer: Writers, usual: Any, others: list[Any]
) -> None:
    reference = structured.create_reference_step(usual)
    writer = make_writer(client, config(tree.map_structure(lambda leaf: leaf[-1], reference)))
    for other in others:
        with pytest.raises(reverb.errors.SignatureError, match="the reference step of the"):
            writer.append(other)
    write(writer, [usual])
    for other in others:
        with pytest.raises(reverb.errors.SignatureError, match="known by their place"):
            writer.append(other)
    assert taken(client) == [[1, 2]]


def test_a_step_may_be_one_leaf(client: reverb.Client, make_writer: Writers) -> None:
    write(make_writer(client, config(structured.create_reference_step(None)[-2:])), [1, 2, 3])
    assert first_columns(client) == [[1, 2], [2, 3]]


# ------------------------------------------------------------------ missing cells, partial steps


def test_steps_that_lack_a_needed_cell_give_no_item(
    client: reverb.Client, make_writer: Writers
) -> None:
    steps = [step(0), step(1), step(None, 1), step(3), step(4), step(5, 5), step(6)]
    write(make_writer(client, config({"x": A[-2:]}), config({"y": C[-2:]})), steps)
    assert taken(client) == [[[0, 1]], [[3, 4]], [[4, 5]], [[5, 6]]]


def test_strides_may_step_over_steps_that_lack_the_cell(
    client: reverb.Client, make_writer: Writers
) -> None:
    steps = [step(0, 0), step(None, 1), step(2, 2), step(None, 3), step(4, 4), step(5, 5)]
    write(make_writer(client, config({"x": A[-5::2], "y": C[-1]})), steps)
    assert taken(client) == [[[0, 2, 4], 4]]


def test_an_item_is_made_within_a_step_once_it_is_complete_and_only_once(
    client: reverb.Client, make_writer: Writers
) -> None:
    writer = make_writer(client, config({"x": A[-1], "y": C[-1]}), config({"y": C[-2:]}))
    writer.append(step(1), partial_step=True)
    assert taken(client) == []
    writer.append(step(None, 2), partial_step=True)
    assert taken(client) == [[1, 2]]
    writer.append(step(None, None))
    assert taken(client) == []
    writer.append(step(None, 3), partial_step=True)
    assert taken(client) == [[[2, 3]]]
    writer.append(step(4))
    assert taken(client) == [[4, 3]]


def test_step_is_open(client: reverb.Client, make_writer: Writers) -> None:
    writer = make_writer(client, config({"x": A[-1], "y": C[-1]}))
    seen = [writer.step_is_open]
    writer.append(step(1, 2))
    seen.append(writer.step_is_open)
    writer.append(step(1), partial_step=True)
    seen.append(writer.step_is_open)
    writer.append(step(None, 2), partial_step=True)
    seen.append(writer.step_is_open)
    writer.append(step(None, None))
    seen.append(writer.step_is_open)
    writer.append(step(1), partial_step=True)
    writer.end_episode()
    seen.append(writer.step_is_open)
    assert seen == [False, False, True, True, False, False]


def test_end_of_the_episode_closes_an_open_step(
    client: reverb.Client, make_writer: Writers
) -> None:
    writer = make_writer(client, config({"x": A[-2], "y": C[-1]}), config({"z": [A[-1], C[-1]]}))
    write(writer, [Part(step(1)), END_AND_KEEP, step(None, 3), step(4, 4)])
    assert taken(client) == [[1, 3], [4, 4]]


def test_a_value_twice_in_one_step_is_refused(client: reverb.Client, make_writer: Writers) -> None:
    writer = make_writer(client, config({"x": A[-1], "y": C[-1]}))
    writer.append(step(1), partial_step=True)
    for partial in (True, False):
        with pytest.raises(RuntimeError, match="by multiple Append/AppendPartial calls"):
            writer.append(step(5, 2), partial_step=partial)
    assert writer.step_is_open
    writer.append(step(None, 3))
    assert taken(client) == [[1, 3]]


# ------------------------------------------------------------------ used and unused columns


def test_unused_columns_are_not_written(make_client: MakeClient, make_writer: Writers) -> None:
    server, client = make_client([a_table()])
    writer = make_writer(client, config({"x": A[-1]}))
    before = server.stats()["arena_used_bytes"]
    for i in range(100):
        writer.append(step(i, np.zeros(10_000)))
    # They would take 8 MB.
    assert server.stats()["arena_used_bytes"] - before < 1 << 20
    # What they hold does not matter either.
    writer.append(step(100, "text"))
    assert len(taken(client)) == 101


def test_a_column_that_only_a_condition_uses_is_written(
    client: reverb.Client, make_writer: Writers
) -> None:
    write(make_writer(client, config({"x": A[-2]}, DATA["b"]["c"] >= 0)), count_up(3))
    assert first_columns(client) == [0, 1]


def test_steps_of_only_unused_columns_advance_the_step_index(
    client: reverb.Client, make_writer: Writers
) -> None:
    writer = make_writer(client, config({"x": A[-1]}, Condition.step_index() % 2 == 0))
    write(writer, [step(0), step(None, 1), step(2), step(None, 3), step(None, 4), step(5), step(6)])
    assert first_columns(client) == [0, 2, 6]


def test_steps_of_only_unused_columns_are_no_newest_steps(
    client: reverb.Client, make_writer: Writers
) -> None:
    writer = make_writer(
        client,
        config({"x": A[-2:-1]}),
        config({"end": A[-2]}, Condition.is_end_episode()),
        config({"since": A[-1]}, Condition.steps_since_applied() >= 3),
    )
    write(writer, [step(0), step(1), step(None, 1), END])
    assert taken(client) == [[[0]]]
    write(writer, [step(2), step(None, 9), step(3), step(4)])
    # Three steps with a value since the first: 0, 1, 2; then 3 and 4 are two.
    assert taken(client) == [[2], [[3]]]


def test_number_of_leaves_must_stay_the_same(client: reverb.Client, make_writer: Writers) -> None:
    writer = make_writer(client, config({"x": C[-1]}))
    with pytest.raises(ValueError, match="unexpected length, got 1 but wanted 2"):
        writer.append({"a": 1})
    writer.append(step(1, 2))
    with pytest.raises(ValueError, match="unexpected length, got 4 but wanted 2"):
        writer.append({"a": 1, "b": 2, "c": 3, "d": 4})
    writer.append(step(1, 3))
    assert first_columns(client) == [2, 3]


def test_dtype_and_shape_must_stay_the_same(client: reverb.Client, make_writer: Writers) -> None:
    writer = make_writer(client, config({"x": A[-1], "y": C[-2:]}))
    writer.append(step(1, 2))
    with pytest.raises(ValueError) as error:
        writer.append(step(1, 2.5))
    assert (
        "wrong dtype provided for column 1 (path=('b', 'c')). Got double but expected int64."
        in (str(error.value))
    )
    with pytest.raises(ValueError) as error:
        writer.append(step(1, np.zeros(2, np.int64)))
    assert "incompatible shape provided for column 1 (path=('b', 'c'))." in str(error.value)
    with pytest.raises(ValueError, match="for column 0"):
        writer.append(step(1.0, None), partial_step=True)
    assert not writer.step_is_open
    writer.append(step(5, 6))
    assert taken(client) == [[5, [2, 6]]]


# ------------------------------------------------------------------ conditions


INDEX = Condition.step_index()


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (INDEX % 2 == 0, [0, 2, 4, 6]),
        (INDEX % 3 == 1, [1, 4]),
        (INDEX % 3 == 2, [2, 5]),
        (INDEX % 3 != 0, [1, 2, 4, 5]),
        (INDEX == 2, [2]),
        (INDEX != 2, [0, 1, 3, 4, 5, 6]),
        (INDEX >= 3, [3, 4, 5, 6]),
        (INDEX < 3, [0, 1, 2]),
        (INDEX > 3, [4, 5, 6]),
        (INDEX <= 3, [0, 1, 2, 3]),
        (Condition.steps_since_applied() >= 2, [1, 3, 5]),
        (Condition.steps_since_applied() >= 3, [2, 5]),
        (Condition.buffer_length() >= 5, [4, 5, 6]),
        (Condition.is_end_episode(), [6]),
    ],
    ids=repr,
)
def test_conditions(
    client: reverb.Client, make_writer: Writers, condition: ConditionProto, expected: list[int]
) -> None:
    write(make_writer(client, config({"x": A[-1]}, condition)), [*count_up(7), END])
    assert first_columns(client) == expected


def test_all_conditions_must_hold(client: reverb.Client, make_writer: Writers) -> None:
    conditions = (INDEX >= 2, INDEX % 2 == 0, DATA["b"]["c"] != 40)
    write(make_writer(client, config({"x": A[-1]}, *conditions)), count_up(8))
    assert first_columns(client) == [2, 6]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (DATA["b"]["c"] >= 20, [2, 3]),
        (DATA["b"]["c"] == 20, [2]),
        (DATA["b"]["c"] % 20 == 10, [1, 3]),
        (DATA["b"]["c"] < 20, [0, 1]),
        (DATA["b"]["c"] != 20, [0, 1, 3]),
    ],
    ids=repr,
)
def test_conditions_on_another_column(
    client: reverb.Client, make_writer: Writers, condition: ConditionProto, expected: list[int]
) -> None:
    # The last step lacks the value: no comparison holds, an inverse one no more than another.
    write(make_writer(client, config({"x": A[-1]}, condition)), [*count_up(4), step(9)])
    assert first_columns(client) == expected


@pytest.mark.parametrize(
    ("values", "condition", "expected"),
    [
        ([True, False], DATA["b"]["c"] == 1, [0]),
        ([np.bool_(False), np.bool_(True)], DATA["b"]["c"] == 1, [1]),
        ([np.uint8(200), np.uint8(3)], DATA["b"]["c"] > 100, [0]),
        ([np.int8(-3), np.int8(3)], DATA["b"]["c"] < 0, [0]),
        ([np.int16(-300), np.int16(300)], DATA["b"]["c"] <= -300, [0]),
        ([np.int32(-70000), np.int32(5)], DATA["b"]["c"] == -70000, [0]),
        ([np.uint16(60000), np.uint16(5)], DATA["b"]["c"] == 60000, [0]),
        ([np.uint32(2**32 - 1), np.uint32(5)], DATA["b"]["c"] == 2**32 - 1, [0]),
        ([np.uint64(2**63 + 5), np.uint64(5)], DATA["b"]["c"] >= 6, [0]),
        ([np.uint64(2**63 + 5), np.uint64(5)], DATA["b"]["c"] == 5, [1]),
        ([np.uint64(2**63 + 5), np.uint64(6)], DATA["b"]["c"] % 7 == (2**63 + 5) % 7, [0, 1]),
        ([-3, -2, 3], DATA["b"]["c"] % 2 == 1, [2]),
        ([np.array([[3]]), np.array([[4]])], DATA["b"]["c"] == 4, [1]),
    ],
    ids=repr,
)
def test_conditions_on_values_of_all_types(
    client: reverb.Client,
    make_writer: Writers,
    values: list[Any],
    condition: ConditionProto,
    expected: list[int],
) -> None:
    steps = [step(i, value) for i, value in enumerate(values)]
    write(make_writer(client, config({"x": A[-1]}, condition)), steps)
    assert first_columns(client) == expected


@pytest.mark.parametrize("value", [1.5, np.array([1, 1])], ids=repr)
def test_condition_on_what_is_no_integer_is_false_and_says_so(
    client: reverb.Client, make_writer: Writers, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    writer = make_writer(client, config({"x": A[-1]}, DATA["b"]["c"] != 5))
    with caplog.at_level(logging.ERROR, logger="shmreplay"):
        write(writer, [step(1, value), step(2, value)])
    assert taken(client) == []
    assert [r.message for r in caplog.records if "never true" in r.message] != []


def test_steps_since_applied_goes_on_over_episodes(
    client: reverb.Client, make_writer: Writers
) -> None:
    writer = make_writer(client, config({"x": A[-1]}, Condition.steps_since_applied() >= 3))
    write(writer, [*count_up(4), END, *count_up(4, 100), END_AND_KEEP, *count_up(3, 200)])
    assert first_columns(client) == [2, 101, 200]


def test_steps_since_applied_counts_steps_and_not_appends(
    client: reverb.Client, make_writer: Writers
) -> None:
    writer = make_writer(client, config({"x": A[-1]}, Condition.steps_since_applied() >= 2))
    for i in range(4):
        writer.append(step(i), partial_step=True)
        writer.append(step(None, i))
    assert first_columns(client) == [1, 3]


def test_end_of_episode_fires_once_and_on_the_last_step(
    client: reverb.Client, make_writer: Writers
) -> None:
    writer = make_writer(client, config({"x": A[-2:]}, Condition.is_end_episode()))
    write(writer, [*count_up(3), END, *count_up(1, 100), END, *count_up(2, 200), END_AND_KEEP])
    assert first_columns(client) == [[1, 2], [200, 201]]
    write(writer, [END_AND_KEEP, END, END])
    assert taken(client) == []


def test_what_fired_in_the_last_step_does_not_fire_at_its_end(
    client: reverb.Client, make_writer: Writers
) -> None:
    write(make_writer(client, config({"x": A[-1]})), [END, *count_up(2), END_AND_KEEP, END])
    assert first_columns(client) == [0, 1]


def test_end_of_episode_within_an_open_step(client: reverb.Client, make_writer: Writers) -> None:
    writer = make_writer(client, config({"x": A[-1]}, Condition.is_end_episode(), INDEX == 1))
    write(writer, [step(1, 1), Part(step(2)), END])
    assert first_columns(client) == [2]


def test_buffers_are_cleared_or_kept(client: reverb.Client, make_writer: Writers) -> None:
    writer = make_writer(client, config({"x": A[-3:]}), config({"y": A[-2:]}, INDEX % 2 == 0))
    write(writer, [step(1), step(2), END_AND_KEEP, step(3), END, step(4), step(5), step(6)])
    assert taken(client) == [[[1, 2, 3]], [[2, 3]], [[4, 5, 6]], [[5, 6]]]


# ------------------------------------------------------------------ priorities


def priorities(client: reverb.Client) -> list[float]:
    count = int(client.server_info()[TABLE].current_size)
    return [s.info.priority for s in client.sample(TABLE, count, emit_timesteps=False)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_priority_made_of_td_errors(
    client: reverb.Client, make_writer: Writers, dtype: type[np.generic]
) -> None:
    priority = td_error(0.8, STEP, lambda s: s["b"]["c"])
    writer = make_writer(client, config({"x": A[-1], "td": C[-3:]}, priority=priority))
    values = [1, -5, 3, 2]
    write(writer, [step(0, dtype(value)) for value in values])
    expected = [0.8 * 5 + 0.2 * 9 / 3, 0.8 * 5 + 0.2 * 10 / 3]
    assert priorities(client) == pytest.approx(expected, rel=1e-12)


def test_priority_made_of_strided_and_squeezed_td_errors(
    client: reverb.Client, make_writer: Writers
) -> None:
    priority = td_error(0.5, STEP, lambda s: s["b"]["c"])
    pattern = {"x": C[-4::3], "y": C[-2]}
    writer = make_writer(client, config(pattern, priority=priority))
    write(writer, [step(0, value) for value in (1.0, 9.0, 3.0, -4.0)])
    assert priorities(client) == [0.5 * 4 + 0.5 * (1 + 4 + 3) / 3]


def test_priority_made_of_a_field_that_no_pattern_has_is_zero(
    client: reverb.Client, make_writer: Writers
) -> None:
    priority = td_error(0.5, STEP, lambda s: s["b"]["c"])
    writer = make_writer(client, config({"x": A[-1]}, priority=priority))
    write(writer, [step(1, "not looked at")])
    assert priorities(client) == [0.0]


def test_constant_priorities(client: reverb.Client, make_writer: Writers) -> None:
    three = structured.constant_priority_fn(3.0)
    writer = make_writer(client, config({"x": A[-1]}), config({"x": C[-1]}, priority=three))
    write(writer, count_up(2))
    assert priorities(client) == [1.0, 3.0, 1.0, 3.0]


def test_td_errors_must_be_numbers(client: reverb.Client, make_writer: Writers) -> None:
    made = config({"x": C[-2:]}, priority=td_error(0.8, STEP, lambda s: s["b"]["c"]))
    for bad, why in ((np.ones(2), "scalar"), (np.int8(1), "double/float/int"), (1j, "double")):
        writer = make_writer(client, made)
        with pytest.raises(ValueError, match=f"TD Error expects a .*{why}"):
            writer.append(step(0, bad))
        # Nothing was written: the column may still become another.
        write(writer, [step(0, 1.0), step(0, 2.0)])
        assert taken(client) == [[[1.0, 2.0]]]
    with pytest.raises(TypeError, match="one field"):
        td_error(0.5, STEP, lambda s: s)


def test_a_td_error_that_is_not_a_number_is_refused_and_the_writer_goes_on(
    client: reverb.Client, make_writer: Writers
) -> None:
    made = config({"x": C[-1:]}, priority=td_error(0.8, STEP, lambda s: s["b"]["c"]))
    writer = make_writer(client, made, config({"y": A[-2:]}))
    writer.append(step(0, 1.0))
    with pytest.raises(ValueError, match="NaN"):
        writer.append(step(1, math.nan))
    assert not writer.step_is_open
    write(writer, [step(2, 2.0)])
    assert taken(client) == [[[1.0]], [[2.0]], [[1, 2]]]


# ------------------------------------------------------------------ tables and limiters


def test_signatures_are_checked(make_client: MakeClient, make_writer: Writers) -> None:
    signature = {"x": TensorSpec((3,), np.int64), "y": TensorSpec((), np.int64)}
    _, client = make_client([a_table(signature=signature)])
    write(make_writer(client, config({"x": A[-3:], "y": C[-1]})), count_up(4))
    assert len(taken(client)) == 2
    for pattern in ({"x": A[-2:], "y": C[-1]}, {"x": A[-3:]}, {"x": A[-3:], "y": C[-1:]}):
        writer = make_writer(client, config(pattern))
        with pytest.raises(ValueError, match="signature"):
            write(writer, count_up(4))
    assert taken(client) == []


def test_several_tables(make_client: MakeClient, make_writer: Writers) -> None:
    _, client = make_client([a_table(), a_table(name="other")])
    writer = make_writer(client, config({"x": A[-1]}), config({"y": A[-2:]}, table="other"))
    write(writer, count_up(4))
    assert first_columns(client) == [0, 1, 2, 3]
    data = client.sample_batch("other", 3, timeout=0).data
    np.testing.assert_array_equal(data["y"], [[0, 1], [1, 2], [2, 3]])


def test_items_wait_in_order_for_the_limiter(make_client: MakeClient, make_writer: Writers) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 2)])
    writer = make_writer(client, config({"x": A[-2:]}), config({"y": C[-1]}))
    for data in count_up(3):
        writer.append(data)
    with pytest.raises(reverb.DeadlineExceededError):
        writer.flush(timeout_ms=20)
    with pytest.raises(reverb.DeadlineExceededError):
        writer.flush(timeout_ms=0)
    with pytest.raises(reverb.DeadlineExceededError):
        writer.end_episode(timeout_ms=20)
    writer.flush(block_until_num_items=3, timeout_ms=DEADLINE_MS)
    got = [
        client.sample_batch(TABLE, 1, timeout=DEADLINE_MS / 1000).data.popitem()[1][0].tolist()
        for _ in range(5)
    ]
    assert got == [0, [0, 1], 10, [1, 2], 20]
    writer.end_episode(timeout_ms=DEADLINE_MS)
    with pytest.raises(ValueError):
        writer.flush(block_until_num_items=-1)


def test_items_made_before_the_end_gave_up_are_not_made_again(
    make_client: MakeClient, make_writer: Writers
) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 1)])
    at_end = config({"end": A[-1]}, Condition.is_end_episode())
    writer = make_writer(client, config({"x": A[-1]}), at_end)
    writer.append(step(1))
    for _ in range(2):
        with pytest.raises(reverb.DeadlineExceededError):
            writer.end_episode(timeout_ms=20)
    assert client.sample_batch(TABLE, 1, timeout=0).data["x"].tolist() == [1]
    writer.end_episode(timeout_ms=DEADLINE_MS)
    assert client.sample_batch(TABLE, 1, timeout=0).data["end"].tolist() == [1]
    assert int(client.server_info()[TABLE].current_size) == 0


def test_a_writer_that_goes_lets_its_items_in(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    _, client = make_client([a_table(), reverb.Table.queue("queue", 1)])
    writer = client.structured_writer([config({"x": A[-1]})])
    writer.append(step(1))
    del writer
    gc.collect()
    assert first_columns(client) == [1]
    with client.structured_writer([config({"x": A[-1]}, table="queue")]) as writer:
        writer.append(step(2))
    writer.close()
    with pytest.raises(reverb.errors.WriterClosedError):
        writer.append(step(1))
    with pytest.raises(reverb.errors.WriterClosedError):
        writer.end_episode()
    with caplog.at_level(logging.WARNING, logger="shmreplay"):
        del writer
        gc.collect()
    assert not caplog.records


def test_a_writer_that_goes_says_what_did_not_get_in(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_writer, "_FLUSH_BEFORE_GONE_MS", 20)
    _, client = make_client([reverb.Table.queue(TABLE, 1)])
    writer = client.structured_writer([config({"x": A[-1]})])
    writer.append(step(0))
    writer.append(step(1))
    with caplog.at_level(logging.WARNING, logger="shmreplay"):
        del writer
        gc.collect()
    assert "1 items held back" in caplog.text


# ------------------------------------------------------------------ signatures


SPEC = {"a": TensorSpec((5,), np.float32), "b": {"c": TensorSpec((), np.int32)}}


def test_infer_signature() -> None:
    pattern = {"x": A[-7::2], "y": [A[-1], C[-3:-1]]}
    assert structured.infer_signature([config(pattern)], SPEC) == {
        "x": TensorSpec((4, 5), np.float32, "x"),
        "y": [TensorSpec((5,), np.float32, "y/0"), TensorSpec((2,), np.int32, "y/1")],
    }
    several = [config({"x": A[-3:]}), config({"x": A[-2:]}), config({"x": A[-3:]})]
    assert structured.infer_signature(several, SPEC) == {
        "x": TensorSpec((None, 5), np.float32, "x")
    }


@pytest.mark.parametrize(
    ("configs", "why"),
    [
        ([], "At least one config"),
        ([config({"x": A[-1]}), config({"y": A[-1]})], "same pattern_structure"),
        ([config({"x": A[-1]}), config({"x": A[-1]}, table="other")], "included other, table"),
        ([config({"x": A[-1:]}), config({"x": C[-1:]})], r"multiple dtypes at \('x',\)"),
        ([config({"x": A[-1:]}), config({"x": A[-1]})], r"incompatible shapes at \('x',\)"),
        ([config({"x": node(flat_source_index=2, stop=-1)})], "has 2 fields"),
    ],
)
def test_infer_signature_refuses(configs: list[Config], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        structured.infer_signature(configs, SPEC)


def test_inferred_signature_takes_the_items(make_client: MakeClient, make_writer: Writers) -> None:
    made = config({"x": A[-7::2], "y": [A[-1], C[-3:-1]]})
    _, client = make_client([a_table(signature=structured.infer_signature([made], SPEC))])
    writer = make_writer(client, made)
    write(writer, [step(np.full(5, i, np.float32), np.int32(i)) for i in range(8)])
    x, y, z = next(iter(client.sample(TABLE, emit_timesteps=False))).data
    assert (x[:, 0].tolist(), y[0], z.tolist()) == ([0, 2, 4, 6], 6, [4, 5])


def test_waiting_after_the_server_was_stopped_ends(
    make_client: MakeClient, make_writer: Writers
) -> None:
    server, client = make_client([reverb.Table.queue(TABLE, 1)])
    writer = make_writer(client, config({"x": A[-1]}))
    for data in count_up(2):
        writer.append(data)
    server.stop()
    for wait in (writer.flush, writer.end_episode, writer.flush):
        with pytest.raises(reverb.errors.ServerClosedError):
            wait()
