"""What Reverb's own tests pin of the trajectory writer, one test for each behaviour.

Where Reverb stores the wrong rows (references that are not adjacent), we ask for the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import rate_limiters, selectors
from shmreplay.spec import TensorSpec

TABLE = "table"
# Seconds after which a call that should go on at once is taken to hang.
DEADLINE = 30.0

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]


def fifo_table(**options: Any) -> reverb.Table:
    """A table that gives each item once, in the order of insertion."""
    usual: dict[str, Any] = {
        "name": TABLE,
        "sampler": selectors.Fifo(),
        "remover": selectors.Fifo(),
        "max_size": 100,
        "rate_limiter": rate_limiters.MinSize(1),
        "max_times_sampled": 1,
    }
    return reverb.Table(**{**usual, **options})


def next_item(client: reverb.Client) -> dict[str, Any]:
    """The columns of the next item."""
    data = client.sample_batch(TABLE, 1, timeout=0).data
    return {name: column[0] for name, column in data.items()}


def size_of(client: reverb.Client) -> int:
    return int(client.server_info()[TABLE].current_size)


def last(writer: Any, name: str = "a") -> dict[str, Any]:
    """A trajectory of the newest cell of one column."""
    return {name: writer.history[name][-1:]}


def write_items(writer: Any, count: int, start: int = 0) -> list[Any]:
    """Appends steps {'a': start}, ... and makes an item of each; returns what create_item did."""
    keys = []
    for value in range(start, start + count):
        writer.append({"a": value})
        keys.append(writer.create_item(TABLE, 1.0, last(writer)))
    return keys


# ------------------------------------------------------------------------------ append


def test_append_checks_dtype(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    writer.append({"a": 1, "b": 2})
    with pytest.raises(ValueError) as error:
        writer.append({"b": 5, "a": 1.5})
    assert "Tensor of wrong dtype provided for column ('a',)." in str(error.value)
    assert "Got double but expected int64." in str(error.value)
    # The step was refused as a whole.
    assert writer.episode_steps == 1
    writer.append({"a": 3, "b": 4})
    writer.create_item(TABLE, 1.0, {name: writer.history[name][-2:] for name in "ab"})
    item = next_item(client)
    assert item["a"].tolist() == [1, 3]
    assert item["b"].tolist() == [2, 4]


def test_append_checks_shape(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    pair = np.array([1.0, 2.0])
    writer.append({"a": 1, "b": pair})
    with pytest.raises(ValueError) as error:
        writer.append({"a": np.array([1, 2]), "b": pair})
    assert "Tensor of incompatible shape provided for column ('a',)." in str(error.value)
    assert "Got [2] which is incompatible with []." in str(error.value)
    with pytest.raises(ValueError, match="incompatible shape"):
        writer.append({"a": 1, "b": np.array([1.0, 2.0, 3.0])})
    assert writer.episode_steps == 1


def test_step_may_leave_columns_out(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    writer.append({"a": 1, "b": 2})
    writer.append({"a": 3})
    writer.append({"a": None, "b": 4, "c": 5})
    history = writer.history
    trajectory = {"a": history["a"][:2], "b": history["b"][[0, 2]], "c": history["c"][2]}
    writer.create_item(TABLE, 1.0, trajectory)
    item = next_item(client)
    assert item["a"].tolist() == [1, 3]
    assert item["b"].tolist() == [2, 4]
    assert item["c"] == 5
    for missing in (("a", slice(-2, None)), ("b", 1), ("c", slice(0, 3))):
        with pytest.raises(ValueError, match="cannot contain any None"):
            writer.create_item(TABLE, 1.0, {"x": history[missing[0]][missing[1]]})


def test_column_twice_in_one_step_through_two_partial_appends_is_refused(
    make_client: MakeClient,
) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    writer.append({"x": 3}, partial_step=True)
    with pytest.raises(ValueError) as error:
        writer.append({"x": 4, "y": 5}, partial_step=True)
    assert "Field ('x',) has already been set in the active step" in str(error.value)
    # Nothing of the refused part was kept.
    writer.append({"x": None, "y": 6})
    writer.create_item(TABLE, 1.0, {name: writer.history[name][-1] for name in "xy"})
    assert next_item(client) == {"x": 3, "y": 6}


def test_column_in_a_partial_append_and_again_in_the_closing_append_is_refused(
    make_client: MakeClient,
) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    writer.append({"x": 3}, partial_step=True)
    with pytest.raises(ValueError) as error:
        writer.append({"x": 4})
    assert "Field ('x',) has already been set in the active step" in str(error.value)
    writer.append({"y": 1})
    assert writer.episode_steps == 1


def test_partial_append_does_not_advance_the_step_number(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    writer.append({"a": 1}, partial_step=True)
    writer.append({"b": 2}, partial_step=True)
    assert writer.episode_steps == 0
    assert len(writer.history["a"]) == len(writer.history["b"]) == 1
    # An item may be made while the step is open.
    writer.create_item(TABLE, 1.0, {name: writer.history[name][-1] for name in "ab"})
    assert next_item(client) == {"a": 1, "b": 2}
    writer.append({"c": 3})
    assert writer.episode_steps == 1
    writer.append({"a": 4, "b": 5, "c": 6})
    assert writer.episode_steps == 2


# ------------------------------------------------------------------------------ configure


def assert_keeps_one_and_three(client: reverb.Client, writer: Any) -> None:
    """Of five steps the writer keeps one of column `a` and three of column `b`."""
    history = writer.history
    writer.create_item(TABLE, 1.0, {"a": history["a"][-1:], "b": history["b"][-3:]})
    item = next_item(client)
    assert (item["a"].tolist(), item["b"].tolist()) == ([5], [3, 4, 5])
    for name, count in (("a", 2), ("b", 4)):
        with pytest.raises(ValueError):
            writer.create_item(TABLE, 1.0, {name: history[name][-count:]})


def test_configuring_an_existing_column_takes_effect(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    writer.append({"a": 1, "b": 1})
    writer.flush()
    writer.configure(("a",), num_keep_alive_refs=1, max_chunk_length=1)
    for value in range(2, 6):
        writer.append({"a": value, "b": value})
    assert_keeps_one_and_three(client, writer)


def test_configuring_a_column_before_it_exists_takes_effect(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    writer.configure(("a",), num_keep_alive_refs=1, max_chunk_length=1)
    for value in range(1, 6):
        writer.append({"a": value, "b": value})
    assert_keeps_one_and_three(client, writer)


@pytest.mark.parametrize(("refs", "length"), [(0, None), (-1, None), (2, 0), (2, -1), (2, 3)])
def test_configure_refuses_bad_numbers(
    make_client: MakeClient, refs: int, length: int | None
) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    with pytest.raises(ValueError):
        writer.configure(("a",), num_keep_alive_refs=refs, max_chunk_length=length)


def test_configuring_while_a_step_is_open_is_refused(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    writer.append({"a": 1, "b": 1}, partial_step=True)
    with pytest.raises(RuntimeError, match="Flush must be called"):
        writer.configure(("a",), num_keep_alive_refs=1, max_chunk_length=1)
    writer.append({"c": 1})
    writer.configure(("a",), num_keep_alive_refs=1, max_chunk_length=1)
    for value in range(2, 6):
        writer.append({"a": value, "b": value})
    assert_keeps_one_and_three(client, writer)


def test_a_new_configuration_changes_the_length_of_blocks(make_client: MakeClient) -> None:
    server, client = make_client([fifo_table()])

    def allocations(length: int) -> float:
        """How many an item of 16 steps takes in blocks of so many."""
        before = server.stats()["arena_allocations"]
        writer = client.trajectory_writer(num_keep_alive_refs=16)
        writer.append({"a": 0})
        writer.flush()
        writer.configure(("a",), num_keep_alive_refs=16, max_chunk_length=length)
        for value in range(1, 17):
            writer.append({"a": value})
        writer.create_item(TABLE, 1.0, {"a": writer.history["a"][-16:]})
        taken = server.stats()["arena_allocations"] - before
        assert next_item(client)["a"].tolist() == list(range(1, 17))
        writer.close()
        return taken

    assert allocations(2) - allocations(16) >= 6


def test_values_are_read_from_blocks_that_are_open_and_that_are_closed(
    make_client: MakeClient,
) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=9)
    writer.configure(("a",), num_keep_alive_refs=9, max_chunk_length=4)
    for value in range(6):
        writer.append({"a": np.full(3, value, np.float32)})
        # The newest is in a block that is being filled, the oldest in one that is full.
        column = writer.history["a"]
        assert column[-1].numpy().tolist() == [value] * 3
        assert column[0].numpy().tolist() == [0] * 3
        assert column[:].numpy()[:, 1].tolist() == list(range(value + 1))
    writer.end_episode(clear_buffers=False)  # which ends the block too
    assert writer.history["a"][[5, 0, 3]].numpy()[:, 2].tolist() == [5, 0, 3]


# ------------------------------------------------------------------------------ sending


def test_flush_sends_pending_items(make_client: MakeClient) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 2)])
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        keys = write_items(writer, 5)
        # The limiter lets two pass; the others wait in the writer.
        assert [key is None for key in keys] == [False, False, True, True, True]
        with ThreadPoolExecutor(max_workers=1) as pool:
            flushed = pool.submit(writer.flush, timeout_ms=int(1000 * DEADLINE))
            ids = [int(client.sample_batch(TABLE, 1, DEADLINE).data["a"][0, 0]) for _ in range(3)]
            flushed.result(2 * DEADLINE)
        ids += [int(next_item(client)["a"][0]) for _ in range(2)]
        assert ids == [0, 1, 2, 3, 4]


def test_item_can_be_sampled_as_soon_as_it_was_created(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=5)
    (key,) = write_items(writer, 1, start=7)
    info, data = client.sample_batch(TABLE, 1, timeout=0)
    assert info.key.tolist() == [key]
    assert data["a"].tolist() == [[7]]


def test_flush_gives_up_at_its_timeout(make_client: MakeClient) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 1)])
    writer = client.trajectory_writer(num_keep_alive_refs=1)
    write_items(writer, 2)
    with pytest.raises(reverb.DeadlineExceededError):
        writer.flush(timeout_ms=20)
    # The item still waits, and goes in once there is room.
    assert next_item(client)["a"].tolist() == [0]
    writer.flush(timeout_ms=int(1000 * DEADLINE))
    assert next_item(client)["a"].tolist() == [1]


def test_flush_can_leave_the_last_n_items(make_client: MakeClient) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 1)])
    writer = client.trajectory_writer(num_keep_alive_refs=1)
    write_items(writer, 3)
    writer.flush(block_until_num_items=2, timeout_ms=int(1000 * DEADLINE))
    with pytest.raises(reverb.DeadlineExceededError):
        writer.flush(block_until_num_items=1, timeout_ms=20)
    next_item(client)
    writer.flush(block_until_num_items=1, timeout_ms=int(1000 * DEADLINE))
    with pytest.raises(ValueError):
        writer.flush(block_until_num_items=-1)


def test_end_episode_gives_up_at_its_timeout(make_client: MakeClient) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 1)])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    write_items(writer, 2)
    with pytest.raises(reverb.DeadlineExceededError):
        writer.end_episode(timeout_ms=20)
    # Nothing was reset.
    assert writer.episode_steps == 2
    assert len(writer.history["a"]) == 2
    next_item(client)
    writer.end_episode(timeout_ms=int(1000 * DEADLINE))
    assert writer.episode_steps == 0
    assert next_item(client)["a"].tolist() == [1]


def test_leaving_the_context_flushes(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        write_items(writer, 3)
    assert size_of(client) == 3
    # It does not close.
    write_items(writer, 1)
    assert size_of(client) == 4


def test_close_ends_the_writer(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=1)
    write_items(writer, 1)
    column = last(writer)
    writer.close()
    writer.close()
    calls: list[Callable[[], Any]] = [
        lambda: writer.append({"a": 1}),
        lambda: writer.create_item(TABLE, 1.0, column),
        writer.flush,
        writer.end_episode,
    ]
    for call in calls:
        with pytest.raises(reverb.errors.WriterClosedError):
            call()
    assert size_of(client) == 1


# ------------------------------------------------------------------------------ create_item


def test_expired_references_are_refused(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": 0, "b": 0})
    old = {name: writer.history[name][-1:] for name in "ab"}
    for value in range(1, 3):
        writer.append({"a": value, "b": value})
    with pytest.raises(ValueError, match="Error in column"):
        writer.create_item(TABLE, 1.0, old)
    # The column that is to blame is named, not the first.
    mixed = {"a": writer.history["a"][-1:], "b": old["b"]}
    with pytest.raises(ValueError, match="Error in column 1"):
        writer.create_item(TABLE, 1.0, mixed)
    assert size_of(client) == 0


def test_mixed_dtypes_in_a_column_are_refused(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": np.int32(1), "b": np.float32(1)})
    references = [*writer.history["a"][-1:], *writer.history["b"][-1:]]
    with pytest.raises(ValueError):
        writer.create_item(TABLE, 1.0, {"x": reverb.TrajectoryColumn(references)})
    assert size_of(client) == 0


def test_mixed_shapes_in_a_column_are_refused(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": np.zeros(2), "b": np.zeros((2, 1))})
    references = [*writer.history["a"][-1:], *writer.history["b"][-1:]]
    with pytest.raises(ValueError):
        writer.create_item(TABLE, 1.0, {"x": reverb.TrajectoryColumn(references)})
    assert size_of(client) == 0


def test_empty_trajectory_or_only_empty_columns_are_refused(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": 1})
    with pytest.raises(ValueError, match="must not be empty"):
        writer.create_item(TABLE, 1.0, {})
    with pytest.raises(ValueError, match="must not be empty"):
        writer.create_item(TABLE, 1.0, {"a": reverb.TrajectoryColumn([])})
    assert size_of(client) == 0


def test_leaf_that_is_not_a_column_is_refused(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": 1, "b": 2})
    with pytest.raises(TypeError):
        writer.create_item(TABLE, 1.0, {"a": writer.history["a"][-1:], "b": np.int64(2)})


def test_squeezed_column_with_two_references_is_refused(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": 1})
    writer.append({"a": 2})
    with pytest.raises(ValueError):
        reverb.TrajectoryColumn(list(writer.history["a"][-2:]), squeeze=True)


def test_nan_priority_is_refused(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": 1})
    with pytest.raises(reverb.errors.PriorityError):
        writer.create_item(TABLE, math.nan, last(writer))
    # A negative one is fine where nothing is drawn by priority.
    writer.create_item(TABLE, -1.0, last(writer))
    assert client.sample_batch(TABLE, 1, timeout=0).info.priority.tolist() == [-1.0]


def test_text_as_priority_is_refused(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": 1})
    priorities: list[Any] = ["high", b"1"]
    for priority in priorities:
        with pytest.raises(TypeError):
            writer.create_item(TABLE, priority, last(writer))
    assert size_of(client) == 0


# ------------------------------------------------------------------------------ signature


def signed_writer(make_client: MakeClient, signature: Any) -> tuple[reverb.Client, Any]:
    """A client of a table with a signature, and a writer with three steps {'a': [1., 2.], 'b'}."""
    _, client = make_client([fifo_table(signature=signature)])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    for value in range(3):
        writer.append({"a": np.full(2, value, np.float32), "b": value})
    return client, writer


def test_signature_that_matches_is_accepted(make_client: MakeClient) -> None:
    signature = {
        "a": TensorSpec((None, 2), np.float32),
        "b": TensorSpec((2,), np.int64),
        "c": TensorSpec((), np.int64),
    }
    client, writer = signed_writer(make_client, signature)
    history = writer.history
    for length in (1, 3):
        trajectory = {"a": history["a"][-length:], "b": history["b"][:2], "c": history["b"][-1]}
        writer.create_item(TABLE, 1.0, trajectory)
    assert next_item(client)["a"].tolist() == [[2.0, 2.0]]
    assert next_item(client)["a"].shape == (3, 2)
    writer.close()


SIGNATURE = {"a": TensorSpec((2, 2), np.float32), "b": TensorSpec((2,), np.int64)}


def refusal(client: reverb.Client, writer: Any, trajectory: Any) -> str:
    """The text of the error that the trajectory must meet; checks that nothing was inserted."""
    with pytest.raises(ValueError) as error:
        writer.create_item(TABLE, 1.0, trajectory)
    assert size_of(client) == 0
    # The writer goes on.
    history = writer.history
    writer.create_item(TABLE, 1.0, {"a": history["a"][-2:], "b": history["b"][-2:]})
    assert size_of(client) == 1
    return str(error.value)


def test_signature_with_another_number_of_columns_is_refused(make_client: MakeClient) -> None:
    client, writer = signed_writer(make_client, SIGNATURE)
    refusal(client, writer, {"a": writer.history["a"][-2:]})


def test_table_that_is_not_there_is_refused(make_client: MakeClient) -> None:
    client, writer = signed_writer(make_client, SIGNATURE)
    trajectory = {"a": writer.history["a"][-2:], "b": writer.history["b"][-2:]}
    with pytest.raises(reverb.errors.TableNotFoundError) as error:
        writer.create_item("nope", 1.0, trajectory)
    assert "Unable to create item in table 'nope' since the table could not be found." in str(
        error.value
    )
    # It says what there is.
    assert TABLE in str(error.value).replace("in table", "")
    assert size_of(client) == 0


def test_signature_with_another_dtype_is_refused(make_client: MakeClient) -> None:
    client, writer = signed_writer(make_client, SIGNATURE)
    refusal(client, writer, {"a": writer.history["a"][-2:], "b": writer.history["a"][-2:]})


def test_signature_with_another_leading_dimension_is_refused(make_client: MakeClient) -> None:
    client, writer = signed_writer(make_client, SIGNATURE)
    refusal(client, writer, {"a": writer.history["a"][-3:], "b": writer.history["b"][-2:]})


def test_signature_squeezed_column_has_no_leading_dimension(make_client: MakeClient) -> None:
    client, writer = signed_writer(make_client, SIGNATURE)
    refusal(client, writer, {"a": writer.history["a"][-2:], "b": writer.history["b"][-1]})


def test_signature_with_another_element_shape_is_refused(make_client: MakeClient) -> None:
    client, writer = signed_writer(make_client, SIGNATURE)
    writer.append({"a": np.zeros(2, np.float32), "b": 3, "wide": np.zeros(3, np.float32)})
    writer.append({"a": np.zeros(2, np.float32), "b": 3, "wide": np.zeros(3, np.float32)})
    refusal(client, writer, {"a": writer.history["wide"][-2:], "b": writer.history["b"][-2:]})


def test_signature_error_shows_the_signatures_of_table_and_trajectory(
    make_client: MakeClient,
) -> None:
    client, writer = signed_writer(make_client, SIGNATURE)
    text = refusal(client, writer, {"a": writer.history["a"][-3:], "b": writer.history["b"][-2:]})
    assert TABLE in text
    # Of the table: two rows of two; of the trajectory: three rows of two.
    assert "[2,2]" in text
    assert "[3,2]" in text
    assert "float" in text


# ------------------------------------------------------------------------------ episodes


def test_end_episode_keeps_or_clears_references_as_told(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": 1})
    kept = last(writer)
    writer.end_episode(clear_buffers=False)
    writer.create_item(TABLE, 1.0, kept)
    assert next_item(client)["a"].tolist() == [1]
    assert len(writer.history["a"]) == 1
    writer.end_episode(clear_buffers=True)
    with pytest.raises(ValueError):
        writer.create_item(TABLE, 1.0, kept)
    assert size_of(client) == 0


def test_end_episode_gives_a_new_episode_and_step_zero(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    for episode in range(1, 4):
        write_items(writer, 2)
        assert client.server_info()[TABLE].num_episodes == episode
        assert writer.episode_steps == 2
        writer.end_episode()
        assert writer.episode_steps == 0


def test_episode_steps_grow_by_one_an_append(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    steps = []
    for value in range(5):
        steps.append(writer.episode_steps)
        writer.append({"a": value})
    assert steps == [0, 1, 2, 3, 4]


def test_episode_steps_do_not_grow_on_a_partial_append(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": 1}, partial_step=True)
    assert writer.episode_steps == 0
    writer.append({"b": 1})
    assert writer.episode_steps == 1
    writer.append({"a": 1}, partial_step=True)
    assert writer.episode_steps == 1


@pytest.mark.parametrize("clear_buffers", [True, False])
def test_episode_steps_are_zero_after_end_episode(
    make_client: MakeClient, clear_buffers: bool
) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    for value in range(3):
        writer.append({"a": value})
    writer.end_episode(clear_buffers=clear_buffers)
    assert writer.episode_steps == 0
    writer.append({"a": 3})
    assert writer.episode_steps == 1


def test_end_episode_closes_an_open_step(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    writer.append({"a": 1}, partial_step=True)
    writer.end_episode()
    writer.append({"a": 2})
    assert writer.episode_steps == 1
    writer.create_item(TABLE, 1.0, last(writer))
    assert next_item(client)["a"].tolist() == [2]


# ------------------------------------------------------------------------------ which rows


@pytest.mark.parametrize(
    "index",
    [
        slice(None, None, 2),
        slice(-7, None, 2),
        slice(None, None, -1),
        slice(-1, -4, -1),
        slice(6, 2, -2),
        [0, 2, 3],
        [5, 1, 1, 7, 0],
        [4],
    ],
    ids=str,
)
def test_rows_in_any_order_are_stored_as_they_were_asked_for(
    make_client: MakeClient, index: Any
) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=8)
    for value in range(8):
        writer.append({"a": value, "b": np.full((2, 3), value, np.float32)})
    writer.create_item(TABLE, 1.0, {name: writer.history[name][index] for name in "ab"})
    expected = np.arange(8)[index]
    item = next_item(client)
    np.testing.assert_array_equal(item["a"], expected)
    np.testing.assert_array_equal(item["b"][:, 1, 2], expected)


def test_rows_of_two_episodes_may_be_mixed(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    writer = client.trajectory_writer(num_keep_alive_refs=4)
    for value in range(2):
        writer.append({"a": value})
    writer.end_episode(clear_buffers=False)
    for value in range(2, 4):
        writer.append({"a": value})
    writer.create_item(TABLE, 1.0, {"a": writer.history["a"][[3, 0, 2]]})
    assert next_item(client)["a"].tolist() == [3, 0, 2]


def test_items_share_steps_across_tables_and_outlive_the_writer(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(), fifo_table(name="other")])
    writer = client.trajectory_writer(num_keep_alive_refs=3)
    for value in range(10):
        writer.append({"a": np.full(100, value)})
        if value >= 2:
            writer.create_item(TABLE, 1.0, {"a": writer.history["a"][-3:]})
            writer.create_item("other", 2.0, {"last": writer.history["a"][-1]})
    writer.close()
    client.check()
    for value in range(2, 10):
        rows = next_item(client)["a"]
        np.testing.assert_array_equal(rows[:, 0], [value - 2, value - 1, value])
        assert (rows == rows[:, :1]).all()
        info, data = client.sample_batch("other", 1, timeout=0)
        assert (data["last"] == value).all()
        assert info.priority.tolist() == [2.0]
    client.check()
