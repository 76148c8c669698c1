"""History and columns index like lists.

Reverb differs from a list in several corners, where it gives other rows than were asked for. There
we give those that were asked for, or an error.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, trajectory_writer

TABLE = "table"

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]
WriterOf = Callable[[int, int], reverb.TrajectoryWriter]


@pytest.fixture
def client(make_client: MakeClient) -> reverb.Client:
    table = reverb.Table(
        TABLE,
        reverb.selectors.Fifo(),
        reverb.selectors.Fifo(),
        100,
        reverb.rate_limiters.MinSize(1),
        max_times_sampled=1,
    )
    return make_client([table])[1]


def write(client: reverb.Client, steps: int, keep: int) -> reverb.TrajectoryWriter:
    writer = client.trajectory_writer(num_keep_alive_refs=keep)
    for i in range(steps):
        writer.append({"a": i, "b": {"c": np.full(2, i, np.float32)}})
    return writer


@pytest.fixture
def writer_of(client: reverb.Client) -> Iterator[WriterOf]:
    """Makes writers with so many steps, which stay while the test runs: histories need them."""
    writers: list[reverb.TrajectoryWriter] = []

    def make(steps: int, keep: int) -> reverb.TrajectoryWriter:
        writers.append(write(client, steps, keep))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


def test_names() -> None:
    assert trajectory_writer.TrajectoryColumn is reverb.TrajectoryColumn
    assert trajectory_writer.TrajectoryWriter is reverb.TrajectoryWriter


# ------------------------------------------------------------------ history


@pytest.mark.parametrize(
    "index",
    [
        *(slice(3, None), slice(None, 3), slice(-3, 3), slice(None, 2), slice(1, None)),
        *(slice(None), slice(None, None, 2), slice(-3, None, 2), slice(None, None, -1)),
        *(slice(-1, None, -1), slice(2, 0, -1), slice(-2, -1), slice(2, 1), [0, -1], [1, 0, 2]),
        [],
    ],
    ids=repr,
)
def test_history_is_indexed_like_a_list(writer_of: WriterOf, index: Any) -> None:
    column = writer_of(3, 3).history["a"][index]
    expected = np.arange(3)[index]
    assert len(column) == len(expected)
    assert not column.is_squeezed
    assert column.shape == expected.shape
    np.testing.assert_array_equal(column.numpy(), expected)


@pytest.mark.parametrize("index", [0, 2, -1, -3, True], ids=repr)
def test_one_step_of_the_history_has_no_time_dimension(writer_of: WriterOf, index: int) -> None:
    history = writer_of(3, 3).history
    assert history["a"][index].is_squeezed
    assert history["a"][index].shape == ()
    assert history["b"]["c"][index].shape == (2,)
    np.testing.assert_array_equal(history["b"]["c"][index].numpy(), [range(3)[index]] * 2)


@pytest.mark.parametrize("index", [3, 4, -4, [0, 3], [-4]], ids=repr)
def test_steps_that_are_not_there(writer_of: WriterOf, index: Any) -> None:
    with pytest.raises(IndexError, match="3 steps"):
        writer_of(3, 3).history["a"][index]


@pytest.mark.parametrize(
    "index", [slice(4, None), slice(None, 5), slice(-5, None), slice(None, -4)], ids=repr
)
def test_slices_that_reach_beyond_the_history_are_not_cut_short(
    writer_of: WriterOf, index: slice
) -> None:
    with pytest.raises(ValueError, match="cannot contain any None"):
        writer_of(3, 3).history["a"][index]


@pytest.mark.parametrize(
    "index", [0, 2, -4, slice(None, 4), slice(None, None), slice(-4, None), [2, 5]], ids=repr
)
def test_steps_that_are_forgotten(writer_of: WriterOf, index: Any) -> None:
    with pytest.raises(ValueError, match="cannot contain any None"):
        writer_of(6, 3).history["a"][index]


def test_length_and_iteration(writer_of: WriterOf) -> None:
    writer = writer_of(3, 3)
    assert len(writer.history["a"]) == 3
    assert [column.numpy().tolist() for column in writer.history["a"]] == [0, 1, 2]
    assert all(column.is_squeezed for column in writer.history["a"])


@pytest.mark.parametrize("index", [np.int64(0), (0,), 1.0, "a", None, [0.5]], ids=repr)
def test_indices_of_other_types(writer_of: WriterOf, index: Any) -> None:
    history = writer_of(3, 3).history["a"]
    with pytest.raises(TypeError):
        history[index]
    with pytest.raises(TypeError):
        history[:][index]


# ------------------------------------------------------------------ columns


@pytest.mark.parametrize(
    "index", [slice(1, None), slice(None, None, 2), slice(None, None, -1), [0, 2], [2, 2, 0], []]
)
def test_parts_of_a_column(writer_of: WriterOf, index: Any) -> None:
    column = writer_of(5, 5).history["b"]["c"][::2]
    expected = np.array([0, 2, 4])[index]
    np.testing.assert_array_equal(column[index].numpy()[:, 1], expected)
    assert column[index].shape == (len(expected), 2)
    assert column[index].dtype == np.float32


def test_one_value_of_a_column(writer_of: WriterOf) -> None:
    column = writer_of(5, 5).history["a"][[4, 1]]
    assert (column[0].numpy(), column[-1].numpy()) == (4, 1)
    assert column[0].is_squeezed and not column[:1].is_squeezed
    for index in (2, -3, [0, 2]):
        with pytest.raises(IndexError, match="2 references"):
            column[index]
    with pytest.raises(ValueError, match="zero"):
        column[::0]


def test_columns_made_of_references(client: reverb.Client, writer_of: WriterOf) -> None:
    writer = writer_of(5, 5)
    history = writer.history["b"]["c"]
    picked = reverb.TrajectoryColumn([*history[3:], history[0], *history[[2, 1]]])
    np.testing.assert_array_equal(picked.numpy()[:, 0], [3, 4, 0, 2, 1])
    single = reverb.TrajectoryColumn(list(history[-1:]), squeeze=True, path=("b", "c"))
    assert single.is_squeezed and single.shape == (2,)
    writer.create_item(TABLE, 1.0, {"many": picked, "one": single})
    data = client.sample_batch(TABLE, 1, timeout=0).data
    np.testing.assert_array_equal(data["many"][0, :, 1], [3, 4, 0, 2, 1])
    np.testing.assert_array_equal(data["one"], [[4, 4]])


def test_columns_that_are_refused(writer_of: WriterOf) -> None:
    history = writer_of(3, 3).history
    with pytest.raises(ValueError, match=r"cannot contain any None.*\('a',\)"):
        reverb.TrajectoryColumn([history["a"][0], None], path=("a",))  # type: ignore[list-item]
    for count in (0, 2, 3):
        with pytest.raises(ValueError):
            reverb.TrajectoryColumn(list(history["a"][:count]), squeeze=True)
    with pytest.raises(ValueError, match="columns"):
        reverb.TrajectoryColumn([history["a"][0], history["b"]["c"][0]])
    with pytest.raises(TypeError):
        reverb.TrajectoryColumn([1, 2])  # type: ignore[list-item]


def test_values_of_references_that_have_expired(client: reverb.Client, writer_of: WriterOf) -> None:
    writer = writer_of(3, 3)
    column = writer.history["a"][:2]
    writer.append({"a": 3})
    with pytest.raises(RuntimeError, match=r"\('a',\)"):
        column.numpy()
    newest = writer.history["a"][-1:]
    assert newest.numpy().tolist() == [3]
    writer.end_episode()
    with pytest.raises(RuntimeError):
        newest.numpy()
    with pytest.raises(ValueError, match="Error in column 0"):
        writer.create_item(TABLE, 1.0, [newest])


def test_a_column_keeps_its_writer_and_a_history_does_not(client: reverb.Client) -> None:
    writer = write(client, 3, 3)
    history, column = writer.history["a"], writer.history["a"][-2:]
    del writer
    gc.collect()
    assert column.numpy().tolist() == [1, 2]
    del column
    gc.collect()
    with pytest.raises(errors.WriterClosedError, match="gone"):
        history[-1]


def test_references_of_another_writer(client: reverb.Client, writer_of: WriterOf) -> None:
    one, other = writer_of(3, 3), writer_of(5, 5)
    one.create_item(TABLE, 1.0, {"x": one.history["a"][-2:], "y": other.history["a"][::2]})
    data = client.sample_batch(TABLE, 1, timeout=0).data
    assert (data["x"].tolist(), data["y"].tolist()) == ([[1, 2]], [[0, 2, 4]])
