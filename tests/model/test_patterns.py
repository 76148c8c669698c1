"""The native core does with patterns what the evaluator in Python says.

Random configs and random steps, given to both: items, their order, their priorities and the errors
must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmreplay as reverb
from shmreplay import structured, tree
from shmreplay.patterns import Config
from shmreplay.structured import Condition, create_config

TABLES = ("native", "evaluator")
FIELDS = ("f", "g", "h", "i")
DTYPES = {"f": np.float64, "g": np.int32, "h": np.uint8, "i": np.float32}
SHAPES: dict[str, tuple[int, ...]] = {"f": (), "g": (), "h": (), "i": (2,)}

STEP = dict.fromkeys(FIELDS)
REFERENCE = structured.create_reference_step(STEP)

indices = st.integers(-5, -1)
slices = st.tuples(indices, st.integers(-4, 0), st.sampled_from([None, 1, 2, 3])).filter(
    lambda bounds: bounds[0] < bounds[1]
)
columns = st.tuples(st.sampled_from(FIELDS), st.one_of(indices, slices))
operands = st.sampled_from(["step_index", "steps_since_applied", "buffer_length", *FIELDS])
comparisons = st.tuples(
    operands, st.sampled_from(["==", "!=", ">=", "<", "%", "%!"]), st.integers(1, 4)
)
conditions = st.one_of(comparisons, comparisons, st.just(("is_end_episode", "", 0)))
# Whole steps as numpy arrays more often than not: the fast path wants them.
kinds = st.sampled_from(["array", "python", "nested"])
step_masks = st.one_of(st.just((True,) * 4), st.tuples(*[st.booleans()] * 4))
steps = st.one_of(
    st.tuples(st.just("step"), step_masks, st.booleans(), kinds),
    st.tuples(st.just("step"), st.just((True,) * 4), st.just(False), st.just("array")),
    st.tuples(st.just("place"), st.booleans()),
    st.tuples(st.just("end"), st.booleans()),
)
configs = st.tuples(
    st.one_of(
        st.lists(columns, min_size=1, max_size=3),
        # Just what one block has: the fast path wants it.
        st.tuples(slices, st.sampled_from([1, 2, 4])).map(
            lambda drawn: [(field, drawn[0]) for field in FIELDS[: drawn[1]]]
        ),
    ),
    st.one_of(st.just([]), st.lists(conditions, min_size=1, max_size=2)),
    st.sampled_from([None, *FIELDS[:2]]),
)


def make_condition(operand: str, comparison: str, number: int) -> Any:
    if operand == "is_end_episode":
        return Condition.is_end_episode()
    if operand in FIELDS:
        left = Condition.data(STEP)[operand]
    else:
        left = getattr(Condition, operand)()
    return {
        "==": lambda: left == number,
        "!=": lambda: left != number,
        ">=": lambda: left >= number,
        "<": lambda: left < number,
        "%": lambda: left % (number + 1) == 1,
        "%!": lambda: left % (number + 1) != 0,
    }[comparison]()


def make_config(drawn: Any, table: str) -> Config:
    columns, conditions, td = drawn
    pattern = []
    for field, index in columns:
        pattern.append(REFERENCE[field][slice(*index) if isinstance(index, tuple) else index])
    priority = structured.td_error(0.6, STEP, lambda s: s[td]) if td else None
    return create_config(pattern, table, [make_condition(*c) for c in conditions], priority)


def make_step(number: int, mask: tuple[bool, ...], kind: str) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for field, there in zip(FIELDS, mask, strict=True):
        value = np.full(SHAPES[field], number % 7, DTYPES[field])
        plain = kind != "python" or field == "i"
        data[field] = (value if plain else value[()]) if there else None
    if kind == "nested":  # another structure of the same leaves
        return {"f": data["f"], "rest": [data["g"], (data["h"], data["i"])]}
    return data


class OtherWriter:
    """A writer of trajectories that is not the native one, so that the evaluator is used."""

    def __init__(self, writer: reverb.TrajectoryWriter) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


@pytest.fixture
def client(make_server: Callable[..., reverb.Server]) -> Iterator[reverb.Client]:
    tables = [
        reverb.Table(
            name,
            reverb.selectors.Fifo(),
            reverb.selectors.Fifo(),
            10_000,
            reverb.rate_limiters.MinSize(1),
            max_times_sampled=1,
        )
        for name in TABLES
    ]
    with reverb.Client(make_server(tables).address) as client:
        yield client


def outcome(writer: reverb.StructuredWriter, number: int, event: Any) -> str:
    """What a step or an end of the episode gives: the error's text, if any."""
    try:
        if event[0] == "end":
            writer.end_episode(clear_buffers=event[1])
        elif event[0] == "place":
            return place(writer, number, event[1])
        else:
            _, mask, partial, kind = event
            writer.append(make_step(number, mask, kind), partial_step=partial)
    except reverb.ReverbError as error:
        return f"{type(error).__name__}: {error}".replace(TABLES[1], TABLES[0])
    return "done"


def place(writer: reverb.StructuredWriter, number: int, keep: bool) -> str:
    """Writes a step in place; without `keep` the block raises, and there is none."""
    written: list[Any] = []
    try:
        with writer.next_step() as step:
            for array in tree.flatten(step):
                if array is not None:
                    assert not array.any()
                    array[...] = number % 7
                    written.append((array.dtype, array.shape))
            if not keep:
                raise KeyError(number)
    except KeyError:
        written.append("dropped")
    return str(written)


def items(client: reverb.Client, table: str) -> list[Any]:
    count = int(client.server_info()[table].current_size)
    if count == 0:
        return []
    return [
        (sample.info.priority, [(c.dtype, c.tolist()) for c in sample.data])
        for sample in client.sample(table, count, emit_timesteps=False)
    ]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(configs, min_size=1, max_size=3),
    st.lists(steps, min_size=4, max_size=30),
    st.sampled_from([None, 1, 3]),
)
def test_the_native_core_does_what_the_evaluator_says(
    client: reverb.Client, drawn: list[Any], events: list[Any], block_rows: int | None
) -> None:
    def make_writer(keep: int) -> reverb.TrajectoryWriter:
        writer = client.trajectory_writer(keep)
        if block_rows is not None:  # so that items lie in several blocks
            for i in range(len(FIELDS)):
                rows = min(block_rows, keep)
                writer.configure((i,), num_keep_alive_refs=keep, max_chunk_length=rows)
        return writer

    native = structured.StructuredWriter(make_writer, [make_config(d, TABLES[0]) for d in drawn])
    defined = structured.StructuredWriter(
        lambda keep: OtherWriter(make_writer(keep)), [make_config(d, TABLES[1]) for d in drawn]
    )
    assert native.evaluator is None and defined.evaluator is not None
    try:
        for number, event in enumerate(events):
            got = [outcome(writer, number, event) for writer in (native, defined)]
            assert got[0] == got[1]
            assert native.step_is_open == defined.step_is_open
            assert items(client, TABLES[0]) == items(client, TABLES[1])
    finally:
        native.close()
        defined.close()
        for table in TABLES:
            client.reset(table)
