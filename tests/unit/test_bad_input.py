"""Bad input: each call refuses it with an error that says what was given and what was expected.

After a refusal nothing is changed: no counter of any table, no byte in the store, no step of a
writer's history, and the next correct call works.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits, rate_limiters, selectors

# Of what stats() tells, these are no content: who is attached, what is waiting, and memory that is
# committed ahead in the background, or taken where the thread came to run on another core.
AMBIENT = {
    "committed_bytes",
    "arena_committed_bytes",
    "arena_free_bytes",
    "free_bytes",
    "margin_bytes",
    "index_bytes",
    "sessions",
    "participants",
}

SIGNATURE = {
    "obs": reverb.TensorSpec([None, 2], np.float32, name="obs"),
    "act": reverb.TensorSpec([3], np.int64, name="act"),
}

NAN, INF = float("nan"), float("inf")
HUGE = 10**400


def make_tables() -> list[reverb.Table]:
    def table(name: str, sampler: Any, remover: Any, **options: Any) -> reverb.Table:
        return reverb.Table(name, sampler, remover, 50, rate_limiters.MinSize(1), **options)

    return [
        table("uniform", selectors.Uniform(), selectors.Fifo()),
        table("prioritized", selectors.Prioritized(0.5), selectors.Fifo()),
        table("weighed_out", selectors.Uniform(), selectors.Prioritized(1.0)),
        table("signed", selectors.Uniform(), selectors.Fifo(), signature=SIGNATURE),
        reverb.Table.queue("queue", 50),
    ]


TABLES = sorted(table.name for table in make_tables())


class World:
    """A server, a client that has used every table, and a writer with three steps of history."""

    def __init__(self, server: reverb.Server, client: reverb.Client) -> None:
        self.server = server
        self.client = client
        for name in ("uniform", "prioritized", "weighed_out", "queue"):
            client.insert_batch(name, {"x": np.arange(4.0)}, [1.0, 2.0, 3.0, 4.0])
            client.sample_batch(name, 1)
        self.key = int(client.sample_batch("prioritized", 1).info.key[0])
        self.writer = client.trajectory_writer(num_keep_alive_refs=3)
        for i in range(3):
            self.writer.append(step(i))
        self.writer.create_item("uniform", 1.0, self.trajectory())

    def trajectory(self) -> dict[str, Any]:
        return {"a": self.writer.history["a"][-2:], "v": self.writer.history["n"]["v"][-1]}

    def state(self) -> dict[str, Any]:
        stats = self.client.stats()
        content: dict[str, Any] = {
            name: value
            for name, value in stats.items()
            if name not in AMBIENT and not name.endswith("_waiters")
        }
        history = self.writer.history
        content["history"] = recalled(history["a"])
        content["history of v"] = recalled(history["n"]["v"])
        content["structure"] = sorted(history)
        content["episode_steps"] = self.writer.episode_steps
        return content

    @contextmanager
    def refuses(self, error: type[Exception], *fragments: str) -> Iterator[None]:
        """The block must raise this error, naming all of this, and leave everything as it was."""
        before = self.state()
        with pytest.raises(error) as caught:
            yield
        assert isinstance(caught.value, errors.ReverbError)
        message = str(caught.value)
        for fragment in fragments:
            assert fragment in message
        assert self.state() == before
        self.client.check()

    def goes_on(self) -> None:
        """Correct calls work."""
        steps = self.writer.episode_steps
        self.writer.append(step(7))
        assert self.writer.episode_steps == steps + 1
        assert self.writer.history["a"][-1].numpy() == 7
        assert self.writer.create_item("uniform", 1.0, self.trajectory()) is not None
        self.client.reset("uniform")
        self.client.insert({"x": 5.0}, {"uniform": 1.0, "prioritized": 1.0})
        (key,) = self.client.insert_batch("uniform", {"y": np.array([5.0])})
        self.client.mutate_priorities("uniform", {int(key): 2.0}, [int(key)])
        sample = self.client.sample_batch("uniform", 1)
        assert sample.data["x"].tolist() == [[5.0]]
        self.client.check()


def step(i: int) -> dict[str, Any]:
    return {"a": i, "n": {"v": np.full(2, i, np.float32)}}


def recalled(column: Any) -> list[Any]:
    """The values that a column's history still gives, None for those it does not."""
    values: list[Any] = []
    for i in range(len(column)):
        try:
            values.append(column[i].numpy().tolist())
        except errors.InvalidArgumentError:
            values.append(None)
    return values


@pytest.fixture
def world(make_server: Callable[..., reverb.Server]) -> Iterator[World]:
    server = make_server(make_tables(), capacity=16 << 20)
    with server.localhost_client() as client:
        world = World(server, client)
        yield world
        if not world.writer.closed:
            world.goes_on()
            world.writer.close()


# --- what is appended ---------------------------------------------------------------------------

WRONG_DTYPES: list[tuple[dict[str, Any], str]] = [
    ({"a": 1.5}, "column ('a',). Got double but expected int64."),
    ({"a": True}, "column ('a',). Got bool but expected int64."),
    ({"a": np.int32(1)}, "column ('a',). Got int32 but expected int64."),
    ({"a": np.uint64(1)}, "column ('a',). Got uint64 but expected int64."),
    ({"a": np.float32(1)}, "column ('a',). Got float but expected int64."),
    ({"a": 1 + 2j}, "column ('a',). Got complex128 but expected int64."),
    ({"n": {"v": np.zeros(2)}}, "column ('n', 'v'). Got double but expected float."),
    ({"n": {"v": np.zeros(2, np.float16)}}, "column ('n', 'v'). Got half but expected float."),
    ({"n": {"v": np.zeros(2, ">f8")}}, "column ('n', 'v'). Got double but expected float."),
    ({"n": {"v": np.zeros(4)[::2]}}, "column ('n', 'v'). Got double but expected float."),
]


@pytest.mark.parametrize(("change", "message"), WRONG_DTYPES)
def test_a_wrong_dtype(world: World, change: dict[str, Any], message: str) -> None:
    with world.refuses(errors.SignatureError, f"Tensor of wrong dtype provided for {message}"):
        world.writer.append({**step(3), **change})


WRONG_SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"a": np.array([1])}, "column ('a',). Got [1] which is incompatible with []."),
    ({"a": np.zeros((2, 3), np.int64)}, "column ('a',). Got [2,3] which is incompatible with []."),
    (
        {"n": {"v": np.float32(1)}},
        "column ('n', 'v'). Got [] which is incompatible with [2].",
    ),
    (
        {"n": {"v": np.zeros(3, np.float32)}},
        "column ('n', 'v'). Got [3] which is incompatible with [2].",
    ),
    (
        {"n": {"v": np.zeros((1, 2), np.float32)}},
        "column ('n', 'v'). Got [1,2] which is incompatible with [2].",
    ),
    (
        {"n": {"v": np.zeros((2, 2), np.float32)[:, 0:0]}},
        "column ('n', 'v'). Got [2,0] which is incompatible with [2].",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG_SHAPES)
def test_a_wrong_shape(world: World, change: dict[str, Any], message: str) -> None:
    prefix = "Tensor of incompatible shape provided for "
    with world.refuses(errors.SignatureError, prefix + message):
        world.writer.append({**step(3), **change})


def test_an_int_beyond_its_column(world: World) -> None:
    with world.refuses(errors.SignatureError, "('a',)", str(2**63), "int64"):
        world.writer.append({**step(3), "a": 2**63})


def test_a_new_column_beside_a_wrong_one_is_forgotten(world: World) -> None:
    with world.refuses(errors.SignatureError, "('n', 'v')"):
        world.writer.append({"a": 3, "b": 1, "n": {"v": 0.0}})
    world.writer.append({**step(3), "b": 1.5})  # the refused int did not fix b's dtype
    assert world.writer.history["b"][-1].numpy() == 1.5


UNSUPPORTED: list[tuple[Any, str, str]] = [
    (np.array([{}, None]), "object", "Convert it to numbers"),
    (np.zeros(2, [("x", "S0")])["x"], "S0", "Text takes a width of 1 to"),
    (np.array(["a", "b"], object), "object", 'np.array(x, "U16")'),
    (np.array(["2020-01-01", "NaT"], "datetime64[D]"), "datetime64[D]", "np.int64"),
    (np.array([1, 2], "timedelta64[s]"), "timedelta64[s]", "np.int64"),
    (np.zeros(2, np.longdouble), "float128", "np.float64"),
    (np.zeros(2, np.clongdouble), "complex256", "np.complex128"),
    (np.zeros(2, [("x", np.int32), ("y", np.int32)]), "('x'", "Give each field"),
]


@pytest.mark.parametrize(("value", "name", "hint"), UNSUPPORTED)
def test_a_dtype_that_cannot_be_stored(world: World, value: Any, name: str, hint: str) -> None:
    client, writer = world.client, world.writer
    expected = (name, "uint8-64", hint)
    for leaf in (value, value[0:1], value[::-1]):
        with world.refuses(errors.ArgumentTypeError, *expected, "('new', 0)"):
            writer.append({**step(3), "new": [leaf]})
        with world.refuses(errors.ArgumentTypeError, *expected, "('a',)"):
            writer.append({**step(3), "a": leaf})
        with world.refuses(errors.ArgumentTypeError, *expected, "('x',)"):
            client.insert({"x": leaf}, {"uniform": 1.0})
        with world.refuses(errors.ArgumentTypeError, *expected, "('x',)"):
            client.insert_batch("uniform", {"x": leaf, "y": np.arange(len(leaf))})


@pytest.mark.parametrize("leaf", [{1, 2}, object(), 2**70, slice(1)], ids=repr)
def test_a_leaf_that_is_no_number(world: World, leaf: Any) -> None:
    with world.refuses(errors.ArgumentTypeError, "('n', 'w')"):
        world.writer.append({"a": 1, "n": {"w": leaf}})
    with world.refuses(errors.ArgumentTypeError, "('w',)"):
        world.client.insert({"w": leaf}, {"uniform": 1.0})
    with world.refuses(errors.ArgumentTypeError, "('w',)"):
        world.client.insert_batch("uniform", {"w": leaf})


def test_too_many_dimensions(world: World) -> None:
    client = world.client
    most = limits.MAX_DIMS
    for leaf in (np.zeros((1,) * (most + 1)), np.zeros((1,) * (most + 1), ">f8")):
        expected = (f"{most + 1} dimensions", f"at most {most}", "('x',)", "reshape")
        with world.refuses(errors.SignatureError, *expected):
            world.writer.append({**step(3), "x": leaf})
        with world.refuses(errors.SignatureError, *expected):
            client.insert({"x": leaf}, {"queue": 1.0})
        with world.refuses(errors.SignatureError, f"{most + 2} dimensions", f"at most {most + 1}"):
            client.insert_batch("queue", {"x": leaf[None]})
    client.reset("queue")
    client.insert({"x": np.zeros((1,) * most)}, {"queue": 1.0})
    client.insert_batch("queue", {"x": np.zeros((1,) * (most + 1))})
    assert client.sample_batch("queue", 1).data["x"].ndim == most + 2
    assert client.sample_batch("queue", 1).data["x"].ndim == most + 1


def _unaligned() -> np.ndarray[Any, Any]:
    raw = np.zeros(1 + 48, np.uint8)
    unaligned = raw[1:].view(np.float64).reshape(2, 3)
    unaligned[...] = np.arange(6).reshape(2, 3)
    assert not unaligned.flags.aligned
    return unaligned


def _read_only() -> np.ndarray[Any, Any]:
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    return array


LAYOUTS: dict[str, Callable[[], Any]] = {
    "every other row": lambda: np.arange(12.0).reshape(4, 3)[::2],
    "every other column": lambda: np.arange(12.0).reshape(2, 6)[:, ::2],
    "Fortran order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "transposed": lambda: np.arange(6.0).reshape(3, 2).T,
    "reversed": lambda: np.arange(6.0).reshape(2, 3)[::-1, ::-1],
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (2, 3)),
    "broadcast scalar": lambda: np.broadcast_to(np.float64(4), (2, 3)),
    "big-endian": lambda: np.arange(6, dtype=">f8").reshape(2, 3),
    "big-endian and strided": lambda: np.arange(12, dtype=">i4").reshape(4, 3)[::-2],
    "big-endian half": lambda: np.arange(6, dtype=">f2").reshape(2, 3),
    "big-endian complex": lambda: np.arange(6, dtype=">c8").reshape(2, 3).T,
    "unaligned": _unaligned,
    "read-only": _read_only,
    "part of a struct": lambda: np.ones((2, 3), [("x", np.int8), ("y", np.float32)])["y"],
    "bools, strided": lambda: np.array([[True, False, True, True]] * 2)[:, ::3],
    "memoryview": lambda: np.arange(6, dtype=np.int16).reshape(2, 3).data,
    "strided memoryview": lambda: np.arange(6, dtype=np.int16).data[::2],
    "no elements": lambda: np.zeros((3, 0), np.int32),
    "a matrix of no rows": lambda: np.zeros((2, 0, 3), np.float32)[::-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_any_layout_are_copied(world: World, layout: str) -> None:
    given = LAYOUTS[layout]()
    wanted = np.array(given).astype(np.asarray(given).dtype.newbyteorder("="))
    client = world.client
    for table in ("uniform", "queue"):
        client.reset(table)
    writer = client.trajectory_writer(2)
    for _ in range(2):  # the second append takes the short way
        writer.append({"x": given})
    writer.create_item("uniform", 1.0, {"x": writer.history["x"][:]})
    two = client.sample_batch("uniform", 1).data["x"]
    assert two.dtype == wanted.dtype
    np.testing.assert_array_equal(two, [[wanted, wanted]])

    client.insert({"x": given}, {"queue": 1.0})
    np.testing.assert_array_equal(client.sample_batch("queue", 1).data["x"], [[wanted]])

    client.insert_batch("queue", {"x": given})
    batch = client.sample_batch("queue", len(wanted)).data["x"]
    assert batch.dtype == wanted.dtype
    np.testing.assert_array_equal(batch, wanted)
    writer.close()


# --- the structure of what is appended ----------------------------------------------------------

OTHER_STRUCTURES: list[tuple[Any, tuple[str, ...]]] = [
    ({"a": {"deeper": 1}}, ("('a',)", "('a', 'deeper')", "a leaf cannot become a nest")),
    ({"a": [1]}, ("('a',)", "('a', 0)", "a leaf cannot become a nest")),
    ({"n": 1.0}, ("('n', 'v')", "('n',)", "a leaf cannot become a nest")),
    ({"a": 1, "n": [np.zeros(2, np.float32)]}, ("('n',)", "dict", "list")),
    ({"a": 1, "n": ()}, ()),  # nothing in it: no conflict
    ([1, 2], ("()", "dict", "list")),
    (1, ("('a',)", "()")),
]


@pytest.mark.parametrize(("data", "fragments"), OTHER_STRUCTURES)
def test_a_structure_that_does_not_fit(world: World, data: Any, fragments: tuple[str, ...]) -> None:
    if not fragments:
        world.writer.append(data)
        return
    with world.refuses(errors.SignatureError, *fragments):
        world.writer.append(data)


def test_a_column_that_was_none_may_become_a_nest(world: World) -> None:
    world.writer.append({**step(3), "late": None, "nest": {"x": None}})
    world.writer.append({**step(4), "late": {"x": 1}, "nest": 2.5})
    assert world.writer.history["late"]["x"][-1].numpy() == 1
    assert world.writer.history["nest"][-1].numpy() == 2.5


def test_a_column_twice_in_a_partial_step(world: World) -> None:
    writer = world.writer
    writer.append({"a": 3}, partial_step=True)
    for final in (True, False):
        with world.refuses(
            errors.SignatureError,
            "Field ('a',) has already been set in the active step by previous (partial) append "
            "call and thus must be omitted or set to None but got: 4",
        ):
            writer.append(step(4), partial_step=not final)
    writer.append({"a": None, "n": {"v": np.full(2, 3, np.float32)}})
    assert writer.history["a"][-1].numpy() == 3
    assert writer.history["n"]["v"][-1].numpy().tolist() == [3, 3]
    assert writer.episode_steps == 4


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"x": leaf}
    return leaf


def test_nesting_that_is_too_deep(world: World) -> None:
    client, writer = world.client, world.writer
    itself: dict[str, Any] = {}
    itself["x"] = itself
    most = str(limits.MAX_NESTING)
    for data in (nested(limits.MAX_NESTING + 1, 1), nested(5000, 1), itself):
        with world.refuses(errors.InvalidArgumentError, most, "Flatten it"):
            writer.append(data)
        with world.refuses(errors.InvalidArgumentError, most):
            client.insert(data, {"uniform": 1.0})
        with world.refuses(errors.InvalidArgumentError, most):
            client.insert_batch("uniform", data)
        with world.refuses(errors.InvalidArgumentError, most):
            writer.create_item("uniform", 1.0, data)
    client.insert(nested(limits.MAX_NESTING, 1), {"uniform": 1.0})


def test_too_many_columns(world: World) -> None:
    client, writer = world.client, world.writer
    many = {f"c{i:03d}": np.zeros(2) for i in range(limits.MAX_COLUMNS + 1)}
    most = str(limits.MAX_COLUMNS)
    with world.refuses(errors.SignatureError, most):
        client.insert_batch("uniform", many)
    with world.refuses(errors.SignatureError, most):
        client.insert(many, {"uniform": 1.0})
    with world.refuses(errors.SignatureError, most):
        writer.append(many)
    column = writer.history["a"][-1:]
    with world.refuses(errors.InvalidArgumentError, str(len(many)), most):
        writer.create_item("uniform", 1.0, dict.fromkeys(many, column))
    del many["c000"]
    client.reset("queue")
    client.insert_batch("queue", many)
    assert len(client.sample_batch("queue", 2).data) == limits.MAX_COLUMNS


def test_keys_that_cannot_be_sorted_or_stored(world: World) -> None:
    client, writer = world.client, world.writer
    mixed = {"a": np.zeros(1), 1: np.zeros(1)}
    with world.refuses(errors.ArgumentTypeError, "int, str"):
        writer.append(mixed)
    with world.refuses(errors.ArgumentTypeError, "int, str"):
        client.insert(mixed, {"uniform": 1.0})
    with world.refuses(errors.ArgumentTypeError, "int, str"):
        client.insert_batch("uniform", mixed)
    with world.refuses(errors.ArgumentTypeError, "1.5", "str or int"):
        client.insert_batch("uniform", {1.5: np.zeros(1)})
    with world.refuses(errors.ArgumentTypeError, "1.5", "str or int"):
        writer.create_item("uniform", 1.0, {1.5: writer.history["a"][-1:]})


def test_equal_keys_do_not_make_equal_structures(world: World) -> None:
    client = world.client
    client.reset("queue")
    leaf = np.arange(1.0)
    client.insert_batch("queue", {"a": leaf, "b": leaf})
    client.insert_batch("queue", {"a": [leaf], "b": leaf})
    assert client.sample_batch("queue", 1).data == {"a": [0.0], "b": [0.0]}
    assert client.sample_batch("queue", 1).data == {"a": [[0.0]], "b": [0.0]}


# --- history ------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [3, -4, 100, 10**30, -(10**30)])
def test_an_index_outside_the_history(world: World, index: int) -> None:
    history = world.writer.history["a"]
    expected = (str(index), "('a',)", "3 steps")
    with world.refuses(errors.HistoryIndexError, *expected):
        history[index]
    with world.refuses(errors.HistoryIndexError, *expected):
        history[[0, index]]
    with pytest.raises(IndexError):
        history[index]


@pytest.mark.parametrize(
    "index", [slice(-4, None), slice(0, 4), slice(4, None), slice(None, -5), slice(7, 2, -1)]
)
def test_a_slice_that_reaches_beyond_the_history(world: World, index: slice) -> None:
    with world.refuses(errors.InvalidArgumentError, "None data references", "3 steps", "('a',)"):
        world.writer.history["a"][index]


WRONG_INDICES: list[Any] = [1.0, "1", None, (0, 1), np.int64(1), [1.5], ["x"], slice("a", None)]


@pytest.mark.parametrize("index", WRONG_INDICES, ids=repr)
def test_an_index_of_a_wrong_type(world: World, index: Any) -> None:
    with world.refuses(errors.ArgumentTypeError, "('a',)"):
        world.writer.history["a"][index]


def test_a_slice_of_step_zero(world: World) -> None:
    with world.refuses(errors.InvalidArgumentError, "zero"):
        world.writer.history["a"][::0]


def test_history_before_the_first_step(world: World) -> None:
    writer = world.client.trajectory_writer(1)
    with world.refuses(errors.WriterStateError, "append"):
        _ = writer.history
    writer.close()


def test_values_that_were_never_given(world: World) -> None:
    world.writer.append({"n": {"v": np.full(2, 3, np.float32)}})
    history = world.writer.history["a"]
    for index in (-1, slice(-2, None), [-2, -1]):
        with pytest.raises(errors.InvalidArgumentError, match="None data references"):
            history[index]
    world.writer.append(step(4))
    world.writer.append(step(5))


def test_values_that_have_expired(world: World) -> None:
    writer = world.writer
    old = writer.history["a"][:]
    forgotten = [writer.history["a"][-3:], writer.history["a"][0], writer.history["a"][[0, 2]]]
    writer.append(step(3))  # of three that are kept, the oldest goes
    for column in forgotten:
        with world.refuses(errors.ExpiredReferenceError, "('a',)", "num_keep_alive_refs"):
            writer.create_item("uniform", 1.0, [column])
        with world.refuses(errors.ExpiredReferenceError, "('a',)"):
            column.numpy()
    with pytest.raises(errors.InvalidArgumentError, match="forgotten"):
        writer.history["a"][0]
    writer.end_episode()
    for error in (ValueError, RuntimeError):  # as in Reverb: the one or the other
        with pytest.raises(error, match="expired"):
            writer.create_item("uniform", 1.0, [old])
    with pytest.raises(errors.HistoryIndexError, match="0 steps"):
        writer.history["a"][-1]
    world.client.check()
    writer.append(step(4))


# --- items --------------------------------------------------------------------------------------


def test_an_empty_trajectory(world: World) -> None:
    writer = world.writer
    nothing_in_it: list[Any] = [{}, [], (), {"x": {}, "y": []}]
    for trajectory in nothing_in_it:
        with world.refuses(errors.InvalidArgumentError, "trajectory must not be empty"):
            writer.create_item("uniform", 1.0, trajectory)
    nothing = writer.history["a"][1:1]
    with world.refuses(errors.InvalidArgumentError, "trajectory must not be empty"):
        writer.create_item("uniform", 1.0, {"x": nothing, "y": writer.history["a"][[]]})


def test_an_empty_column_beside_a_full_one(world: World) -> None:
    history = world.writer.history
    trajectory = {"full": history["n"]["v"][:], "empty": history["a"][2:1]}
    with world.refuses(errors.InvalidArgumentError, "('a',)", "empty", "at least"):
        world.writer.create_item("uniform", 1.0, trajectory)


@pytest.mark.parametrize("leaf", [1, None, "a", np.zeros(2)], ids=repr)
def test_a_leaf_that_is_no_column(world: World, leaf: Any) -> None:
    trajectory = {"x": world.writer.history["a"][-1:], "y": leaf}
    with world.refuses(errors.ArgumentTypeError, type(leaf).__name__, "TrajectoryColumn"):
        world.writer.create_item("uniform", 1.0, trajectory)
    with world.refuses(errors.ArgumentTypeError, "TrajectoryColumn"):
        world.writer.create_item("uniform", 1.0, {"x": world.writer.history["a"]})


def test_references_of_another_store(
    world: World, make_server: Callable[..., reverb.Server]
) -> None:
    elsewhere = make_server(make_tables(), capacity=4 << 20)
    with elsewhere.localhost_client() as client:
        writer = client.trajectory_writer(1)
        writer.append(step(9))
        with world.refuses(errors.InvalidArgumentError, "('a',)", "another store"):
            world.writer.create_item("uniform", 1.0, {"x": writer.history["a"][-1:]})
        used = client.stats()["arena_used_bytes"]
        with pytest.raises(errors.InvalidArgumentError, match="another store"):
            writer.create_item("uniform", 1.0, world.trajectory())
        assert client.stats()["arena_used_bytes"] == used
        writer.close()


def test_a_structure_whose_recording_failed_is_not_taken_for_recorded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, client = world.writer, world.client
    client.reset("queue")
    columns = [writer.history["a"][-1:], writer.history["n"]["v"][-1:]]
    writer.create_item("queue", 1.0, [columns[0]])

    def refuse(*_: Any) -> int:
        raise errors.ArenaFullError("no room for the structure")

    # A structure of the same make as the last one, with a column of another type in its place.
    with monkeypatch.context() as patch:
        patch.setattr(writer._connection, "intern", refuse)
        with world.refuses(errors.ArenaFullError, "no room"):
            writer.create_item("queue", 1.0, [columns[1]])
    writer.create_item("queue", 1.0, [columns[1]])
    assert client.sample_batch("queue", 1).data[0].dtype == np.int64
    (values,) = client.sample_batch("queue", 1).data
    assert values.dtype == np.float32
    assert values.tolist() == [[[2.0, 2.0]]]


# --- signatures ---------------------------------------------------------------------------------

TABLE_SIGNATURE = "0: int64 [3], 1: float [?,2]"

BAD_FOR_SIGNATURE: list[tuple[dict[str, Any], str, str]] = [
    (
        {"obs": np.zeros(2, np.float64), "act": 0},
        "column 1 (obs) to be a float [?,2] tensor but got a double [3,2] tensor",
        "0: int64 [3], 1: double [3,2]",
    ),
    (
        {"obs": np.zeros(3, np.float32), "act": 0},
        "column 1 (obs) to be a float [?,2] tensor but got a float [3,3] tensor",
        "0: int64 [3], 1: float [3,3]",
    ),
    (
        {"obs": np.zeros(2, np.float32), "act": 0.0},
        "column 0 (act) to be a int64 [3] tensor but got a double [3] tensor",
        "0: double [3], 1: float [3,2]",
    ),
    (
        {"obs": np.zeros(2, np.float32)},
        "The trajectory has 1 columns but the table signature has 2 columns",
        "0: float [3,2]",
    ),
    (
        {"obs": np.zeros(2, np.float32), "act": 0, "zoo": 1},
        "The trajectory has 3 columns but the table signature has 2 columns",
        "0: int64 [3], 1: float [3,2], 2: int64 [3]",
    ),
]


@pytest.mark.parametrize(("data", "what", "got"), BAD_FOR_SIGNATURE)
def test_an_item_that_does_not_match_the_signature(
    world: World, data: dict[str, Any], what: str, got: str
) -> None:
    writer = world.client.trajectory_writer(4)
    for _ in range(4):
        writer.append(data)
    trajectory = {name: writer.history[name][-3:] for name in data}
    with world.refuses(errors.SignatureError, "'signed'", what, TABLE_SIGNATURE, got):
        writer.create_item("signed", 1.0, trajectory)
    writer.close()


def test_an_item_whose_length_does_not_match_the_signature(world: World) -> None:
    writer = world.client.trajectory_writer(4)
    for _ in range(4):
        writer.append({"obs": np.zeros(2, np.float32), "act": 0})
    history = writer.history

    def item(length: int) -> dict[str, Any]:
        return {"obs": history["obs"][-2:], "act": history["act"][-length:]}

    writer.create_item("signed", 1.0, item(3))
    # The same structure again: the check may not rest on the first answer.
    for length in (2, 4, 1):
        wanted = f"column 0 (act) to be a int64 [3] tensor but got a int64 [{length}] tensor"
        with world.refuses(errors.SignatureError, wanted, TABLE_SIGNATURE, f"int64 [{length}]"):
            writer.create_item("signed", 1.0, item(length))
        writer.create_item("signed", 1.0, item(3))
    squeezed = {"obs": history["obs"][-2:], "act": history["act"][-1]}
    with world.refuses(errors.SignatureError, "int64 [3]", "int64 []"):
        writer.create_item("signed", 1.0, squeezed)
    assert world.client.server_info()["signed"].current_size == 4
    writer.close()


def test_inserts_that_do_not_match_the_signature(world: World) -> None:
    client = world.client
    good = {"obs": np.zeros((1, 3, 2), np.float32), "act": np.zeros((1, 3), np.int64)}
    client.insert_batch("signed", good)
    with world.refuses(errors.SignatureError, "'signed'", TABLE_SIGNATURE, "double [3,2]"):
        client.insert_batch("signed", {**good, "obs": np.zeros((1, 3, 2))})
    with world.refuses(errors.SignatureError, TABLE_SIGNATURE, "int64 [4]"):
        client.insert_batch("signed", {**good, "act": np.zeros((1, 4), np.int64)})
    with world.refuses(errors.SignatureError, "1 columns", "2 columns"):
        client.insert_batch("signed", good["obs"])
    # The one table fits and the other does not: neither gets the item.
    with world.refuses(errors.SignatureError, "'signed'", TABLE_SIGNATURE, "int64 [1]"):
        client.insert({"obs": np.zeros(2, np.float32), "act": 0}, {"uniform": 1.0, "signed": 1.0})


# --- priorities ---------------------------------------------------------------------------------


def calls_with_priority(world: World, table: str, priority: Any) -> dict[str, Callable[[], Any]]:
    client, writer = world.client, world.writer
    key = world.key
    return {
        "insert": lambda: client.insert({"x": 1.0}, {"queue": 1.0, table: priority}),
        "insert_batch": lambda: client.insert_batch(table, {"x": np.zeros(2)}, priority),
        "insert_batch, one of many": lambda: client.insert_batch(
            table, {"x": np.zeros(3)}, [1.0, priority, 1.0]
        ),
        "create_item": lambda: writer.create_item(table, priority, world.trajectory()),
        "update_priorities": lambda: client.update_priorities(table, [key, key], priority),
        "update_priorities, one of many": lambda: client.update_priorities(
            table, [key, key], [1.0, priority]
        ),
        "mutate_priorities": lambda: client.mutate_priorities(
            table, {key: 1.0, 7: priority}, deletes=[key]
        ),
    }


PRIORITY_CALLS = [
    "insert",
    "insert_batch",
    "insert_batch, one of many",
    "create_item",
    "update_priorities",
    "update_priorities, one of many",
    "mutate_priorities",
]


@pytest.mark.parametrize("call", PRIORITY_CALLS)
def test_bad_priorities(world: World, call: str) -> None:
    for table in ("uniform", "prioritized", "weighed_out", "queue"):
        with world.refuses(errors.PriorityError, "must not be NaN", repr(table), "nan"):
            calls_with_priority(world, table, NAN)[call]()
    for table in ("prioritized", "weighed_out"):
        with world.refuses(errors.PriorityError, "must not be negative", repr(table), "-0.5"):
            calls_with_priority(world, table, -0.5)[call]()
        with world.refuses(errors.PriorityError, "must not be negative", repr(table), "-inf"):
            calls_with_priority(world, table, -INF)[call]()
        with world.refuses(errors.PriorityError, "must be finite", repr(table), "inf"):
            calls_with_priority(world, table, INF)[call]()
    with world.refuses(errors.PriorityError, "priority ** priority_exponent", "1e+300"):
        calls_with_priority(world, "weighed_out", 1e300)[call]()
    with world.refuses(errors.PriorityError, "float64"):
        calls_with_priority(world, "prioritized", HUGE)[call]()


@pytest.mark.parametrize("call", PRIORITY_CALLS)
@pytest.mark.parametrize("priority", ["1.0", None, 1j, [[1.0]], b"1", object()], ids=repr)
def test_priorities_that_are_no_numbers(world: World, call: str, priority: Any) -> None:
    if priority is None and call in ("insert", "insert_batch", "create_item"):
        calls_with_priority(world, "uniform", priority)[call]()  # the largest seen
        return
    with world.refuses((errors.ArgumentTypeError, errors.InvalidArgumentError)):  # type: ignore[arg-type]
        calls_with_priority(world, "uniform", priority)[call]()


def test_priorities_that_fit(world: World) -> None:
    for call in PRIORITY_CALLS[:-1]:
        for priority in (0, 0.0, 3, np.float32(2), np.int64(1), True):
            calls_with_priority(world, "prioritized", priority)[call]()
        for priority in (-1.0, INF, -INF):
            calls_with_priority(world, "uniform", priority)[call]()
    world.client.check()


def test_priorities_of_a_wrong_number(world: World) -> None:
    client = world.client
    with world.refuses(errors.InvalidArgumentError, "[2]", "[3]"):
        client.insert_batch("uniform", {"x": np.zeros(2)}, [1.0, 1.0, 1.0])
    with world.refuses(errors.InvalidArgumentError, "[2]", "[2, 1]"):
        client.insert_batch("uniform", {"x": np.zeros(2)}, [[1.0], [1.0]])
    with world.refuses(errors.InvalidArgumentError, "[1]", "[2]"):
        client.update_priorities("uniform", [world.key], [1.0, 2.0])


# --- tables that are not there ------------------------------------------------------------------

TABLE_CALLS: dict[str, Callable[[World, Any], Any]] = {
    "insert": lambda w, t: w.client.insert({"x": 1.0}, {"queue": 1.0, t: 1.0}),
    "insert_batch": lambda w, t: w.client.insert_batch(t, {"x": np.zeros(1)}),
    "create_item": lambda w, t: w.writer.create_item(t, 1.0, w.trajectory()),
    "sample": lambda w, t: w.client.sample(t),
    "sample_batch": lambda w, t: w.client.sample_batch(t, 1),
    "borrow": lambda w, t: w.client.borrow(t),
    "sampler": lambda w, t: w.client.sampler(t, 1),
    "update_priorities": lambda w, t: w.client.update_priorities(t, [1], [1.0]),
    "mutate_priorities": lambda w, t: w.client.mutate_priorities(t, {1: 1.0}),
    "reset": lambda w, t: w.client.reset(t),
    "check": lambda w, t: w.client.check(t),
}


@pytest.mark.parametrize("call", TABLE_CALLS)
def test_a_table_that_is_not_there(world: World, call: str) -> None:
    there = ", ".join(map(repr, TABLES))
    with world.refuses(errors.TableNotFoundError, "nope", "not found", there):
        TABLE_CALLS[call](world, "nope")
    with world.refuses(errors.TableNotFoundError, there):
        TABLE_CALLS[call](world, "")
    with pytest.raises(ValueError, match="nope"):  # what Reverb raises on inserting
        TABLE_CALLS[call](world, "nope")
    with pytest.raises(RuntimeError, match="nope"):  # and on sampling
        TABLE_CALLS[call](world, "nope")


@pytest.mark.parametrize("call", [name for name in TABLE_CALLS if name != "check"])
@pytest.mark.parametrize("table", [3, None, b"uniform", ("uniform",)], ids=repr)
def test_a_table_named_by_no_str(world: World, call: str, table: Any) -> None:
    with world.refuses(errors.ArgumentTypeError, type(table).__name__, "str", "'uniform'"):
        TABLE_CALLS[call](world, table)


# --- numbers of items ---------------------------------------------------------------------------

SIZE_CALLS: dict[str, Callable[[World, Any], Any]] = {
    "sample_batch": lambda w, n: w.client.sample_batch("uniform", n),
    "borrow": lambda w, n: w.client.borrow("uniform", n),
    "sampler": lambda w, n: w.client.sampler("uniform", n),
}
NOT_INTS: list[Any] = [1.0, True, "1", None, [1], np.float64(2), np.array([1, 2])]


@pytest.mark.parametrize("call", SIZE_CALLS)
def test_batch_sizes(world: World, call: str) -> None:
    for size in (0, -1, limits.MAX_BATCH + 1, 2**70, -(2**70)):
        with world.refuses(errors.InvalidArgumentError, str(size), str(limits.MAX_BATCH)):
            SIZE_CALLS[call](world, size)
    for value in NOT_INTS:
        with world.refuses(errors.ArgumentTypeError, type(value).__name__, "int"):
            SIZE_CALLS[call](world, value)


def test_numbers_of_samples(world: World) -> None:
    for number in (0, -2, -(2**70)):
        with world.refuses(errors.InvalidArgumentError, str(number), "at least 1"):
            world.client.sample("uniform", number)
    for value in NOT_INTS:
        with world.refuses(errors.ArgumentTypeError, type(value).__name__, "int"):
            world.client.sample("uniform", value)
    assert list(world.client.sample("uniform", -1)) == []


def test_numbers_of_batches_ahead(world: World) -> None:
    for number in (-1, limits.MAX_PREFETCH + 1, 2**70):
        with world.refuses(errors.InvalidArgumentError, str(number), str(limits.MAX_PREFETCH)):
            world.client.sampler("uniform", 1, prefetch=number)
    for value in NOT_INTS:
        with world.refuses(errors.ArgumentTypeError, type(value).__name__, "int"):
            world.client.sampler("uniform", 1, prefetch=value)


def test_numbers_of_steps_to_keep(world: World) -> None:
    client, writer = world.client, world.writer
    for number in (0, -1, limits.MAX_KEEP_ALIVE_REFS + 1, 2**70):
        with world.refuses(errors.InvalidArgumentError, "num_keep_alive_refs", str(number)):
            client.trajectory_writer(number)
        with world.refuses(errors.InvalidArgumentError, "num_keep_alive_refs", str(number)):
            writer.configure(("a",), num_keep_alive_refs=number, max_chunk_length=1)
    for number in (0, -1, 4):
        with world.refuses(errors.InvalidArgumentError, "max_chunk_length", str(number), "=3"):
            writer.configure(("a",), num_keep_alive_refs=3, max_chunk_length=number)
    for value in NOT_INTS:
        with world.refuses(errors.ArgumentTypeError, "num_keep_alive_refs"):
            client.trajectory_writer(value)
    with world.refuses(errors.ArgumentTypeError, "path", "'a'"):
        writer.configure("a", num_keep_alive_refs=3, max_chunk_length=1)


def test_numbers_of_items_to_wait_for(world: World) -> None:
    with world.refuses(errors.InvalidArgumentError, "block_until_num_items", "-1"):
        world.writer.flush(-1)
    with world.refuses(errors.ArgumentTypeError, "block_until_num_items"):
        world.writer.flush(1.5)  # type: ignore[arg-type]


TIMED_CALLS: dict[str, Callable[[World, Any], Any]] = {
    "insert": lambda w, t: w.client.insert({"x": 1.0}, {"uniform": 1.0}, timeout=t),
    "insert_batch": lambda w, t: w.client.insert_batch("uniform", {"x": np.zeros(1)}, timeout=t),
    "sample": lambda w, t: w.client.sample("uniform", timeout=t),
    "sample_batch": lambda w, t: w.client.sample_batch("uniform", 1, timeout=t),
    "borrow": lambda w, t: w.client.borrow("uniform", timeout=t),
    "sampler": lambda w, t: w.client.sampler("uniform", 1, timeout=t),
}


@pytest.mark.parametrize("call", TIMED_CALLS)
def test_timeouts(world: World, call: str) -> None:
    for value in ("1", True, [1.0], 1j):
        with world.refuses(errors.ArgumentTypeError, "timeout", type(value).__name__):
            TIMED_CALLS[call](world, value)
    with world.refuses(errors.InvalidArgumentError, "timeout", "nan"):
        TIMED_CALLS[call](world, NAN)


# --- keys ---------------------------------------------------------------------------------------

BAD_KEYS: list[tuple[Any, type[Exception], str]] = [
    ([1.0], errors.ArgumentTypeError, "float"),
    (np.array([1.5]), errors.ArgumentTypeError, "float64"),
    (["1"], errors.ArgumentTypeError, "'1'"),
    ("12", errors.ArgumentTypeError, "12"),
    ([None], errors.ArgumentTypeError, "None"),
    ([True], errors.ArgumentTypeError, "True"),
    ([-1], errors.ArgumentTypeError, "-1"),
    ([2**64], errors.ArgumentTypeError, str(2**64)),
    (np.array([3, -7]), errors.ArgumentTypeError, "-7"),
    ({1, 2}, errors.ArgumentTypeError, "{1, 2}"),
    (frozenset({1}), errors.ArgumentTypeError, "1"),
    ([[1, 2], [3, 4]], errors.ArgumentTypeError, "[1, 2]"),
    (np.zeros((2, 2), np.uint64), errors.InvalidArgumentError, "[2, 2]"),
    (np.uint64(3), errors.InvalidArgumentError, "[]"),
]


@pytest.mark.parametrize(("keys", "error", "fragment"), BAD_KEYS)
def test_bad_keys(world: World, keys: Any, error: type[Exception], fragment: str) -> None:
    client = world.client
    with world.refuses(error, fragment):
        client.update_priorities("prioritized", keys, 1.0)
    # The update is fine, and must not happen either.
    with world.refuses(error, fragment):
        client.mutate_priorities("prioritized", {world.key: 9.0}, deletes=keys)
    if isinstance(keys, list) and not isinstance(keys[0], list):
        with world.refuses(error, fragment):
            client.mutate_priorities("prioritized", dict.fromkeys(keys, 1.0), deletes=[world.key])


def test_updates_that_are_no_dict(world: World) -> None:
    for updates in ([(1, 1.0)], {1}, 5):
        with world.refuses(errors.ArgumentTypeError, "updates", "dict"):
            world.client.mutate_priorities("prioritized", updates, deletes=[world.key])  # type: ignore[arg-type]


def test_keys_of_every_integer_type(world: World) -> None:
    client, key = world.client, world.key
    key_types: list[Any] = [
        [key],
        (key,),
        [np.uint64(key)],
        np.array([key], np.uint64),
        np.array([key, 2**64 - 1], np.uint64),
        [key, 2**64 - 1],
        np.array([0, key], np.uint64)[1:][::-1],
    ]
    for keys in key_types:
        assert client.update_priorities("prioritized", keys, 3.0) == 1
    client.mutate_priorities("prioritized", {np.uint64(key): 4.0})  # type: ignore[dict-item]
    assert client.update_priorities("prioritized", [], []) == 0


# --- out ----------------------------------------------------------------------------------------


class Out(NamedTuple):
    out: Any
    error: type[Exception]
    fragments: tuple[str, ...]


def bad_outs() -> list[Out]:
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    expected = "float64[2]"
    return [
        Out({"x": np.zeros(2, np.float32)}, errors.InvalidArgumentError, ("float32", expected)),
        Out({"x": np.zeros(2, ">f8")}, errors.InvalidArgumentError, (">f8", expected)),
        Out({"x": np.zeros(1)}, errors.InvalidArgumentError, ("float64[1]", expected)),
        Out({"x": np.zeros((2, 1))}, errors.InvalidArgumentError, ("float64[2, 1]", expected)),
        Out({"x": np.zeros(())}, errors.InvalidArgumentError, ("float64[]", expected)),
        Out({"x": np.zeros(4)[::2]}, errors.InvalidArgumentError, ("C-contiguous", expected)),
        Out({"x": read_only}, errors.InvalidArgumentError, ("writable", expected)),
        Out({"x": [0.0, 0.0]}, errors.InvalidArgumentError, ("2 arrays", "1 columns")),
        Out({"x": 1.0}, errors.ArgumentTypeError, ("('x',)", "float")),
        Out({"x": None}, errors.ArgumentTypeError, ("('x',)", "NoneType")),
        Out({}, errors.InvalidArgumentError, ("0 arrays", "1 columns")),
        Out({"y": np.zeros(2)}, errors.InvalidArgumentError, ("structure", "'x'", "'y'")),
        Out([np.zeros(2)], errors.InvalidArgumentError, ("structure", "dict", "list")),
        Out(np.zeros(2), errors.InvalidArgumentError, ("structure", "dict", "leaf")),
        Out({"x": np.zeros(2), "y": np.zeros(2)}, errors.InvalidArgumentError, ("2 arrays",)),
    ]


@pytest.mark.parametrize("number", range(len(bad_outs())))
def test_out_that_does_not_fit(world: World, number: int) -> None:
    bad = bad_outs()[number]
    client = world.client
    client.reset("queue")
    client.insert_batch("queue", {"x": np.arange(5.0)})
    with pytest.raises(bad.error) as caught:
        client.sample_batch("queue", 2, out=bad.out)
    assert all(fragment in str(caught.value) for fragment in bad.fragments)
    client.check()
    # Drawn they were: the next calls get them first, in their order, however they ask.
    assert client.sample_batch("queue", 1).data["x"].tolist() == [0.0]
    assert client.sample_batch("queue", 2).data["x"].tolist() == [1.0, 2.0]
    out = {"x": np.zeros(2)}
    assert client.sample_batch("queue", 2, out=out).data["x"] is out["x"]
    assert out["x"].tolist() == [3.0, 4.0]
    assert client.server_info()["queue"].current_size == 0


# --- items that do not go together --------------------------------------------------------------


def fill_queue(world: World, items: list[dict[str, Any]]) -> None:
    world.client.reset("queue")
    for item in items:
        world.writer.create_item("queue", 1.0, item)


@pytest.mark.parametrize("kind", ["length", "structure", "column"])
def test_items_that_cannot_be_stacked(world: World, kind: str) -> None:
    client, history = world.client, world.writer.history
    one = {"a": history["a"][-1:]}
    other = {
        "length": {"a": history["a"][-2:]},
        "structure": [history["a"][-1:]],
        "column": {"a": history["n"]["v"][-1:]},
    }[kind]
    fill_queue(world, [one, one, other, one])  # type: ignore[list-item]
    with pytest.raises(errors.InvalidArgumentError, match="cannot be stacked") as caught:
        client.sample_batch("queue", 4)
    assert "emit_timesteps=False" in str(caught.value)
    # As the message says, they can be had one by one; none is lost, and their order is kept.
    lengths = [len(item.data[0]) for item in client.sample("queue", 2, emit_timesteps=False)]
    with client.borrow("queue", 2) as items:
        lengths += [len(items[0].data["a" if kind != "structure" else 0]), len(items[1].data["a"])]
    assert lengths == [1, 1, 2 if kind == "length" else 1, 1]
    assert client.stats()["queue/samples"] == 4
    client.check()


def test_timesteps_of_columns_of_different_length(world: World) -> None:
    client, history = world.client, world.writer.history
    item = {"a": history["a"][-2:], "v": history["n"]["v"][-3:]}
    fill_queue(world, [item])
    with pytest.raises(errors.InvalidArgumentError, match="Can't split non timestep") as caught:
        next(client.sample("queue", 1))
    assert "(2,)" in str(caught.value)
    assert "(3, 2)" in str(caught.value)
    (whole,) = client.sample("queue", 1, emit_timesteps=False)
    assert [len(column) for column in whole.data] == [2, 3]
    client.check()


# --- insert and insert_batch --------------------------------------------------------------------


def test_insert_of_nothing(world: World) -> None:
    client = world.client
    no_leaves: list[Any] = [{}, [], {"x": {}}]
    for data in no_leaves:
        with world.refuses(errors.InvalidArgumentError, "no leaves"):
            client.insert(data, {"uniform": 1.0})
        with world.refuses(errors.InvalidArgumentError, "no leaves"):
            client.insert_batch("uniform", data)
    no_values: list[Any] = [None, {"x": None, "y": 1.0}]
    for data in no_values:
        path = "()" if data is None else "('x',)"
        with world.refuses(errors.ArgumentTypeError, path, "None"):
            client.insert(data, {"uniform": 1.0})
        with world.refuses(errors.ArgumentTypeError, path, "None"):
            client.insert_batch("uniform", data)
    no_priorities: list[Any] = [{}, None, ["uniform"], "uniform", 1.0]
    for priorities in no_priorities:
        with world.refuses(errors.InvalidArgumentError, "non-empty dict", repr(priorities)):
            client.insert({"x": 1.0}, priorities)


def test_insert_batch_of_ragged_arrays(world: World) -> None:
    client = world.client
    ragged = {"x": np.zeros(3), "y": {"z": np.zeros((2, 4))}}
    with world.refuses(errors.SignatureError, "('y', 'z')", "2 rows", "('x',)", "3"):
        client.insert_batch("uniform", ragged)
    with world.refuses(errors.SignatureError, "('x',)", "scalar"):
        client.insert_batch("uniform", {"x": 1.0, "y": np.zeros(1)})
    with world.refuses(errors.SignatureError, "('y',)", "scalar"):
        client.insert_batch("uniform", {"x": np.zeros(1), "y": np.float64(1)})
    # Lists are nests, not arrays: each number in them is a leaf.
    with world.refuses(errors.SignatureError, "('x', 0)", "scalar"):
        client.insert_batch("uniform", {"x": [1.0, 2.0]})


def test_insert_batch_of_no_rows(world: World) -> None:
    before = world.client.stats()["uniform/inserts"]
    keys = world.client.insert_batch("uniform", {"x": np.zeros((0, 3))}, [])
    assert keys.dtype == np.uint64
    assert keys.shape == (0,)
    assert world.client.stats()["uniform/inserts"] == before


# --- writing in place ---------------------------------------------------------------------------


def test_a_step_in_place_of_unknown_columns(world: World) -> None:
    writer = world.client.trajectory_writer(2)
    with world.refuses(errors.WriterStateError, "spec="), writer.next_step():
        pass
    writer.append({"a": 1, "b": None})
    with world.refuses(errors.WriterStateError, "('b',)", "spec="), writer.next_step():
        pass
    writer.append({"a": 2, "b": 1.0})
    with writer.next_step() as place:
        place["a"][...] = 3
    assert writer.history["a"][-1].numpy() == 3
    writer.close()


def test_a_step_in_place_of_a_spec_that_does_not_fit(world: World) -> None:
    writer = world.writer
    spec = reverb.TensorSpec
    bad: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
        ({"a": spec([], np.float32)}, errors.SignatureError, ("('a',)", "int64", "float")),
        ({"a": spec([2], np.int64)}, errors.SignatureError, ("('a',)", "[]", "[2]")),
        ({"b": spec([None], np.int64)}, errors.SignatureError, ("('b',)", "full shape")),
        ({"a": {"x": spec([], np.int64)}}, errors.SignatureError, ("('a',)", "('a', 'x')")),
        ({"b": np.array(["x"], object)}, errors.SignatureError, ("('b',)", "object")),
    ]
    for value, error, fragments in bad:
        with world.refuses(error, *fragments), writer.next_step(value):
            pass


def test_a_step_in_place_that_is_given_up(world: World) -> None:
    writer = world.writer
    with world.refuses(errors.InvalidArgumentError, "changed my mind"), writer.next_step() as place:
        place["a"][...] = 9
        raise errors.InvalidArgumentError("changed my mind")
    kept = None
    with writer.next_step() as place:
        assert place["a"] == 0  # what was given up is not there
        place["a"][...] = 5
        kept = place["a"]
    assert writer.history["a"][-1].numpy() == 5
    with pytest.raises(ValueError, match="read-only"):
        kept[...] = 6


def test_calls_that_do_not_fit_an_open_step_in_place(world: World) -> None:
    writer = world.writer
    calls: list[Callable[[], Any]] = [
        lambda: writer.append(step(3)),
        lambda: writer.next_step().__enter__(),
        lambda: writer.end_episode(),
        lambda: writer.configure(("a",), num_keep_alive_refs=5, max_chunk_length=1),
        lambda: writer.close(),
    ]
    with writer.next_step() as place:
        for call in calls:
            place["a"][...] = 4
            with world.refuses(errors.WriterStateError, "next_step()"):
                call()
    assert writer.history["a"][-1].numpy() == 4
    writer.append({"a": 5}, partial_step=True)
    with pytest.raises(errors.WriterStateError, match="open already"), writer.next_step():
        pass
    writer.append({"n": {"v": np.zeros(2, np.float32)}})


# --- what is closed -----------------------------------------------------------------------------


def test_a_closed_writer(world: World) -> None:
    writer = world.writer
    trajectory = world.trajectory()
    writer.close()
    writer.close()
    calls: list[Callable[[], Any]] = [
        lambda: writer.append(step(3)),
        lambda: writer.create_item("uniform", 1.0, trajectory),
        lambda: writer.flush(),
        lambda: writer.end_episode(),
        lambda: writer.configure(("a",), num_keep_alive_refs=1, max_chunk_length=None),
        lambda: writer.next_step().__enter__(),
        lambda: trajectory["a"].numpy(),
        lambda: writer.__exit__(None, None, None),
    ]
    before = world.client.stats()["arena_used_bytes"]
    for call in calls:
        with pytest.raises(errors.WriterClosedError, match=r"[Cc]lose.*make a new one"):
            call()
    assert world.client.stats()["arena_used_bytes"] == before
    world.client.check()


def test_a_closed_client(world: World) -> None:
    client = reverb.Client(world.server.address)
    assert client.server_info()
    sampler = client.sampler("uniform", 1)
    generator = client.sample("prioritized", 5)
    next(generator)
    borrowed = client.borrow("uniform")
    writer = client.trajectory_writer(1)
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: client.insert({"x": 1.0}, {"uniform": 1.0}),
        lambda: client.insert_batch("uniform", {"x": np.zeros(1)}),
        lambda: client.sample("uniform"),
        lambda: next(generator),
        lambda: client.sample_batch("uniform", 1),
        lambda: client.borrow("uniform"),
        lambda: borrowed.__enter__(),
        lambda: client.sampler("uniform", 1),
        lambda: client.trajectory_writer(1),
        lambda: client.update_priorities("uniform", [1], 1.0),
        lambda: client.mutate_priorities("uniform", {1: 1.0}),
        lambda: client.reset("uniform"),
        lambda: client.server_info(),
        lambda: client.stats(),
        lambda: client.check(),
    ]
    for call in calls:
        with pytest.raises(errors.ServerClosedError, match="make a new Client"):
            call()
    sampler.close()
    # A writer does not need the client that it came from.
    writer.append({"x": 6.0})
    writer.create_item("uniform", 1.0, {"x": writer.history["x"][-1:]})
    writer.close()
    world.client.check()


def test_a_writer_goes_on_after_its_client_was_closed(
    make_server: Callable[..., reverb.Server],
) -> None:
    """Also where it is the last thing of its store in this process, and needs more memory."""
    # In this process the server keeps the store attached as well: hence the count of references.
    server = make_server(make_tables(), capacity=32 << 20)
    client = server.localhost_client()
    writer = client.trajectory_writer(2)
    writer.append({"x": np.zeros(1000)})
    store = writer._connection.store
    held = store._references
    client.close()
    assert store._references == held
    for i in range(200):
        writer.append({"x": np.full(1000, i, np.float64)})
        writer.create_item("uniform", 1.0, {"x": writer.history["x"][-1:]})
    writer.close()
    assert store._references == held - 1
    server.check()


def test_a_closed_sampler(world: World) -> None:
    for prefetch in (0, 2):
        with world.client.sampler("prioritized", 2, prefetch=prefetch) as sampler:
            assert len(next(sampler).info.key) == 2
        sampler.close()
        with pytest.raises(errors.ServerClosedError, match="make a new one"):
            next(sampler)
    world.client.check()


# --- servers and addresses ----------------------------------------------------------------------


def test_tables_of_a_server(unique_name: Callable[[], str]) -> None:
    table = make_tables()[0]
    bad: list[tuple[Any, type[Exception], str]] = [
        ([], errors.InvalidArgumentError, "table"),
        (None, errors.InvalidArgumentError, "table"),
        ([table, make_tables()[1], make_tables()[0]], errors.InvalidArgumentError, "'uniform'"),
        ([table, "uniform"], errors.ArgumentTypeError, "Table"),
        (table, errors.InvalidArgumentError, "list of at least one Table"),
    ]
    for tables, error, fragment in bad:
        name = unique_name()
        with pytest.raises(error, match=fragment):
            reverb.Server(tables, name=name)
        with pytest.raises(errors.StoreNotFoundError, match=name):
            reverb.Client(f"shm://{name}").server_info()
    with reverb.Server([table], name=unique_name(), capacity=1 << 20) as server:
        assert list(server.localhost_client().server_info()) == ["uniform"]


def test_settings_of_a_server(world: World, unique_name: Callable[[], str]) -> None:
    taken = world.server
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"name": taken.name}, errors.StoreExistsError, taken.name),
        ({"port": taken.port}, errors.InvalidArgumentError, str(taken.port)),
        ({"port": 0}, errors.InvalidArgumentError, "port"),
        ({"port": 65536}, errors.InvalidArgumentError, "65536"),
        ({"port": "8000"}, errors.ArgumentTypeError, "port"),
        ({"name": "a/b"}, errors.InvalidArgumentError, "a/b"),
        ({"name": 5}, errors.ArgumentTypeError, "5"),
        ({"capacity": 1000}, errors.InvalidArgumentError, "1000"),
        ({"capacity": 1e9}, errors.ArgumentTypeError, "float"),
    ]
    for settings, error, fragment in bad:
        options = {"name": unique_name(), "capacity": 4 << 20, **settings}
        with world.refuses(error, fragment):
            reverb.Server(make_tables(), **options)


BAD_ADDRESSES: list[Any] = [
    "",
    "localhost",
    "localhost:",
    "localhost:0",
    "localhost:65536",
    "localhost:-1",
    "localhost:http",
    ":8000",
    "tcp://localhost",
    "tcp://localhost:0",
    "shm://",
    "shm://a/b",
    "shm://../x",
    "http://localhost:80",
]


@pytest.mark.parametrize("text", BAD_ADDRESSES)
def test_addresses(text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        reverb.Client(text)
    assert repr(text.removeprefix("shm://")) in str(caught.value)


@pytest.mark.parametrize("value", [8000, None, b"localhost:8000", ("localhost", 8000)])
def test_addresses_of_a_wrong_type(value: Any) -> None:
    with pytest.raises(errors.ArgumentTypeError, match="'localhost:8000' or 'shm://name'"):
        reverb.Client(value)


def test_servers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SERVER_WAIT_S", 0.05)
    server = reverb.Server(make_tables(), capacity=4 << 20)
    by_port, by_name = f"localhost:{server.port}", server.address
    server.stop()
    for text in (by_port, by_name):
        client = reverb.Client(text)
        for call in (client.server_info, lambda c=client: c.sample_batch("uniform", 1)):
            with pytest.raises(errors.StoreNotFoundError) as caught:
                call()
            assert text.removeprefix("shm://") in str(caught.value)
    remote = reverb.RemoteOptions(timeout=0.05)
    with pytest.raises(errors.StoreNotFoundError, match=r"elsewhere\.invalid:8000"):
        reverb.Client("elsewhere.invalid:8000", remote).server_info()


# --- all together -------------------------------------------------------------------------------


def test_many_refusals_leak_nothing(world: World) -> None:
    """What is refused a thousand times costs what it costs once: nothing."""
    client, writer = world.client, world.writer
    rounds: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: writer.append({**step(1), "a": 0.5}), errors.SignatureError),
        (lambda: writer.create_item("uniform", NAN, world.trajectory()), errors.PriorityError),
        (lambda: writer.create_item("signed", 1.0, world.trajectory()), errors.SignatureError),
        (lambda: client.insert({"x": None}, {"uniform": 1.0}), errors.ArgumentTypeError),
        (lambda: client.insert({"x": 1.0}, {"signed": 1.0}), errors.SignatureError),
        (lambda: client.insert_batch("uniform", {"x": np.zeros(2)}, [1, NAN]), ValueError),
        (lambda: client.sample_batch("uniform", 1, out={}), errors.InvalidArgumentError),
    ]
    for call, error in rounds:
        with pytest.raises(error):
            call()
    before = world.client.stats()
    for call, error in itertools.chain.from_iterable(itertools.repeat(rounds, 200)):
        with pytest.raises(error):
            call()
    after = world.client.stats()
    for name in ("arena_used_bytes", "arena_allocations", "sessions", "uniform/inserts"):
        assert after[name] == before[name]
    world.client.check()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"timeout": "1"}, errors.ArgumentTypeError, "Got timeout '1'"),
        ({"timeout": float("nan")}, errors.InvalidArgumentError, "Got timeout nan"),
        ({"timeout": None}, errors.InvalidArgumentError, "Got timeout None for a bridge"),
        ({"compress": "lz4"}, errors.ArgumentTypeError, "Got compress 'lz4'"),
    ],
)
def test_remote_options_that_no_connection_could_use(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        reverb.RemoteOptions(**options)


def test_a_client_with_options_of_a_wrong_type() -> None:
    with pytest.raises(errors.ArgumentTypeError, match="of type float"):
        reverb.Client("tcp://localhost:1", 5.0)  # type: ignore[arg-type]
    options = reverb.RemoteOptions(keys="me.key_secret")
    with reverb.Client("tcp://localhost:1", options) as client:
        with pytest.raises(errors.ArgumentTypeError, match=r"ClientKeys\(secret, server\)"):
            client.server_info()
