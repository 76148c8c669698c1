"""What Reverb's own tests pin of its first writer, one test for each behaviour."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay.spec import TensorSpec

TABLE = "table"
DEADLINE = 30.0  # seconds after which a call that should go on at once is taken to hang

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]


def a_table(**options: Any) -> reverb.Table:
    usual: dict[str, Any] = {
        "name": TABLE,
        "sampler": reverb.selectors.Fifo(),
        "remover": reverb.selectors.Fifo(),
        "max_size": 100,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
        "max_times_sampled": 1,
    }
    return reverb.Table(**{**usual, **options})


@pytest.fixture
def client(make_client: MakeClient) -> reverb.Client:
    return make_client([a_table()])[1]


def taken(client: reverb.Client, table: str = TABLE) -> list[Any]:
    """The items in the order of insertion: their columns in the order of leaves."""
    count = int(client.server_info()[table].current_size)
    samples = client.sample(table, count, emit_timesteps=False) if count else []
    return [[column.tolist() for column in sample.data] for sample in samples]


# ------------------------------------------------------------------ making one


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"max_sequence_length": 0}, r"max_sequence_length \(0\) must be a positive integer"),
        ({"max_sequence_length": -1}, r"max_sequence_length \(-1\)"),
        ({"max_sequence_length": 2, "chunk_length": 3}, r"chunk_length \(3\) must be"),
        ({"max_sequence_length": 2, "chunk_length": 0}, r"chunk_length \(0\) must be"),
        ({"max_sequence_length": 2, "max_in_flight_items": 0}, r"max_in_flight_items \(0\)"),
    ],
)
def test_settings_are_checked(client: reverb.Client, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        client.writer(**arguments)


def test_settings_that_are_taken(client: reverb.Client) -> None:
    with client.writer(20, delta_encoded=True, max_in_flight_items=None) as writer:
        writer.append([1])
        text = repr(writer)
    assert "chunk_length=10" in text and "max_timesteps=20" in text and "closed: False" in text
    assert "max_in_flight_items=1000000" in text
    assert "closed: True" in repr(writer)
    client.writer(3, chunk_length=1).close()
    for bad in ("a", 2.5):
        with pytest.raises(TypeError):
            client.writer(bad)  # type: ignore[arg-type]


# ------------------------------------------------------------------ steps and items


def test_items_are_the_newest_steps(client: reverb.Client) -> None:
    with client.writer(4) as writer:
        for i in range(10):
            writer.append({"b": np.full(2, i, np.float32), "a": i})
            if i >= 3:
                writer.create_item(TABLE, 1 + i % 4, float(i))
    count = int(client.server_info()[TABLE].current_size)
    for i, sample in enumerate(client.sample(TABLE, count, emit_timesteps=False), start=3):
        steps = np.arange(i - i % 4, i + 1)
        np.testing.assert_array_equal(sample.data[0], steps)
        np.testing.assert_array_equal(sample.data[1], np.stack([steps, steps], axis=1))
        assert sample.data[1].dtype == np.float32
        assert sample.info.priority == i


def test_items_have_the_structure_of_the_steps(client: reverb.Client) -> None:
    with client.writer(2) as writer:
        writer.append({"x": (1, [2.0]), "y": 3})
        writer.create_item(TABLE, 1, 1.0)
    data = client.sample_batch(TABLE, 1, timeout=0).data
    assert type(data["x"]) is tuple and type(data["x"][1]) is list
    assert (data["x"][0].tolist(), data["x"][1][0].tolist(), data["y"].tolist()) == (
        [[1]],
        [[2.0]],
        [[3]],
    )


@pytest.mark.parametrize("delta_encoded", [False, True])
def test_items_over_several_chunks_are_correct(client: reverb.Client, delta_encoded: bool) -> None:
    with client.writer(50, delta_encoded, chunk_length=3) as writer:
        for i in range(60):
            writer.append([i, np.full(1000, i)])
            if i >= 49:
                writer.create_item(TABLE, 50, 1.0)
    for i, (steps, rows) in enumerate(taken(client)):
        assert steps == list(range(i, i + 50))
        assert [row[999] for row in rows] == steps


def test_several_tables_share_the_steps(make_client: MakeClient) -> None:
    server, client = make_client([a_table(), a_table(name="other")])
    with client.writer(3) as writer:
        before = server.stats()["arena_used_bytes"]
        for _ in range(10):
            writer.append(np.zeros(10_000))
            writer.create_item(TABLE, 1, 1.0)
            writer.create_item("other", 1, 1.0)
        # 80 kB a step; twice would be 1.6 MB.
        assert server.stats()["arena_used_bytes"] - before < 1.2e6
    assert len(taken(client)) == len(taken(client, "other")) == 10


def test_steps_that_no_item_uses_are_not_kept(make_client: MakeClient) -> None:
    server, client = make_client([a_table()])
    before = server.stats()["arena_used_bytes"]
    with client.writer(3) as writer:
        for _ in range(100):
            writer.append(np.zeros(10_000))
        assert server.stats()["arena_used_bytes"] - before < 1e6
    assert int(client.server_info()[TABLE].current_size) == 0


def test_steps_must_stay_the_same(client: reverb.Client) -> None:
    writer = client.writer(3)
    writer.append({"a": 1, "b": 2.0})
    for bad, why in (
        ({"a": 1}, "inconsistent. Previously it was 2, but is now 1"),
        ({"a": 1, "b": 2}, "wrong dtype provided for column 1 .*'b'"),
        ({"a": 1, "b": np.ones(2)}, "incompatible shape provided for column 1 .*'b'"),
        ({}, "no leaves"),
    ):
        with pytest.raises(ValueError, match=why):
            writer.append(bad)
    with pytest.raises(TypeError, match="None"):
        writer.append({"a": None, "b": 2.0})
    # The bad step is dropped, and the writer goes on.
    writer.append({"a": 3, "b": 4.0})
    writer.create_item(TABLE, 2, 1.0)
    writer.close()
    assert taken(client) == [[[1, 3], [2.0, 4.0]]]


def test_create_item_checks_its_arguments(client: reverb.Client) -> None:
    writer = client.writer(3)
    with pytest.raises(ValueError, match="larger than number of buffered timesteps"):
        writer.create_item(TABLE, 1, 1.0)
    for i in range(5):
        writer.append([i])
    for count, why in ((0, "positive"), (-1, "positive"), (4, "larger than number of buffered")):
        with pytest.raises(ValueError, match=why):
            writer.create_item(TABLE, count, 1.0)
    with pytest.raises(ValueError, match="NaN"):
        writer.create_item(TABLE, 1, math.nan)
    with pytest.raises(ValueError, match=r"table 'nope'.*'table'"):
        writer.create_item("nope", 1, 1.0)
    for bad in ((TABLE, 1, "high"), (TABLE, 1.5, 1.0), (3, 1, 1.0)):
        with pytest.raises(TypeError):
            writer.create_item(*bad)
    writer.close()
    assert taken(client) == []


# ------------------------------------------------------------------ sequences


def test_append_sequence_equals_single_appends(client: reverb.Client) -> None:
    data = {"a": np.arange(5), "b": np.arange(10.0).reshape(5, 2)}
    with client.writer(5) as writer:
        writer.append_sequence(data)
        writer.create_item(TABLE, 5, 1.0)
    with client.writer(5) as writer:
        for i in range(5):
            writer.append({"a": data["a"][i], "b": data["b"][i]})
        writer.create_item(TABLE, 5, 1.0)
    one, other = taken(client)
    assert one == other == [data["a"].tolist(), data["b"].tolist()]


def test_append_sequence_refuses(client: reverb.Client) -> None:
    with client.writer(5) as writer:
        for bad, why in (
            ([1, 2], "scalar tensor at index 0"),
            ([np.arange(2), 2], "scalar tensor at index 1"),
            ([], "empty data"),
            ([np.arange(2), np.arange(3)], "non equal batch dimension"),
        ):
            with pytest.raises(ValueError, match=why):
                writer.append_sequence(bad)
        writer.append_sequence([np.arange(0), np.arange(0)])
        with pytest.raises(ValueError, match="buffered"):
            writer.create_item(TABLE, 1, 1.0)


# ------------------------------------------------------------------ signatures


@pytest.mark.parametrize(
    ("shape", "good"),
    [((), {1, 2, 3}), ((None,), {1, 2, 3}), ((2,), {2}), ((2, 2), set())],
    ids=repr,
)
def test_signature_is_that_of_a_step_or_of_the_whole_item(
    make_client: MakeClient, shape: tuple[int | None, ...], good: set[int]
) -> None:
    _, client = make_client([a_table(signature={"a": TensorSpec(shape, np.int64)})])
    writer = client.writer(3)
    for i in range(3):
        writer.append({"a": i})
    for count in (1, 2, 3):
        if count in good:
            writer.create_item(TABLE, count, 1.0)
        else:
            with pytest.raises(ValueError, match="inconsistent with the table signature"):
                writer.create_item(TABLE, count, 1.0)
    writer.close()
    assert [len(item[0]) for item in taken(client)] == sorted(good)


def test_signature_checks_count_dtype_and_shape(make_client: MakeClient) -> None:
    _, client = make_client([a_table(signature={"a": TensorSpec((2,), np.float32)})])
    for bad in (
        {"a": np.ones(2)},
        {"a": np.ones(3, np.float32)},
        {"a": np.ones(2, np.float32), "b": 1},
    ):
        with client.writer(3) as writer:
            writer.append(bad)
            with pytest.raises(ValueError) as error:
                writer.create_item(TABLE, 1, 1.0)
            assert "table signature: 0: Tensor<dtype: float, shape: [2]>" in str(error.value)
            assert "data signature: 0: Tensor<" in str(error.value)
    assert taken(client) == []


# ------------------------------------------------------------------ limiters, closing


def test_flush_waits_until_the_items_are_in(make_client: MakeClient) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 1)])
    writer = client.writer(1)
    for i in range(3):
        writer.append([i])
        writer.create_item(TABLE, 1, 1.0)
    with ThreadPoolExecutor(max_workers=1) as pool:
        flushed = pool.submit(writer.flush)
        got = [int(client.sample_batch(TABLE, 1, DEADLINE).data[0][0, 0]) for _ in range(2)]
        flushed.result(DEADLINE)
    got.append(int(client.sample_batch(TABLE, 1, timeout=0).data[0][0, 0]))
    assert got == [0, 1, 2]
    writer.close()


def test_max_in_flight_items_blocks(make_client: MakeClient) -> None:
    _, client = make_client([reverb.Table.queue(TABLE, 1)])
    writer = client.writer(1, max_in_flight_items=1)
    with ThreadPoolExecutor(max_workers=1) as pool:

        def write() -> list[int]:
            seen = []
            for i in range(4):
                writer.append([i])
                writer.create_item(TABLE, 1, 1.0)
                seen.append(i)
            return seen

        written = pool.submit(write)
        for i in range(3):
            assert int(client.sample_batch(TABLE, 1, DEADLINE).data[0][0, 0]) == i
        # With one in the table and one in flight, there is none that it could not have written.
        assert written.result(DEADLINE) == [0, 1, 2, 3]
    assert int(client.sample_batch(TABLE, 1, DEADLINE).data[0][0, 0]) == 3
    writer.close()


def test_calls_after_close_fail(client: reverb.Client) -> None:
    writer = client.writer(2)
    writer.append([1])
    writer.create_item(TABLE, 1, 1.0)
    writer.close()
    assert taken(client) == [[[1]]]
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: writer.append([1]), "Append"),
        (lambda: writer.append_sequence([np.arange(1)]), "Append"),
        (lambda: writer.create_item(TABLE, 1, 1.0), "CreateItem"),
        (writer.flush, "Flush"),
    ]
    for call, name in calls:
        with pytest.raises(RuntimeError, match=f"Calling method {name} after Close"):
            call()
    with pytest.raises(ValueError, match=r"close\(\) has already been called"):
        writer.close()
    with pytest.raises(ValueError, match="Cannot reuse already closed Writer"), writer:
        pass


def test_leaving_the_context_flushes_and_closes(client: reverb.Client) -> None:
    with pytest.raises(ZeroDivisionError), client.writer(2) as writer:
        writer.append([1])
        writer.create_item(TABLE, 1, 1.0)
        raise ZeroDivisionError
    assert taken(client) == [[[1]]]
    assert "closed: True" in repr(writer)
    with client.writer(2) as writer:
        writer.close()


def test_a_writer_that_goes_unclosed_says_so(
    client: reverb.Client, caplog: pytest.LogCaptureFixture
) -> None:
    writer = client.writer(2)
    writer.append([1])
    writer.create_item(TABLE, 1, 1.0)
    with caplog.at_level(logging.WARNING, logger="shmreplay"):
        del writer
        gc.collect()
    assert "without calling .close" in caplog.text
    assert taken(client) == [[[1]]]


def test_close_when_the_server_is_gone(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = make_client([reverb.Table.queue(TABLE, 1)])
    writers = [client.writer(1) for _ in range(2)]
    for writer in writers:
        for i in range(2):
            writer.append([i])
            writer.create_item(TABLE, 1, 1.0)
    server.stop()
    with pytest.raises(reverb.errors.ServerClosedError):
        writers[0].close()
    with caplog.at_level(logging.WARNING, logger="shmreplay"):
        writers[1].close(retry_on_unavailable=False)
    assert "before all its items got in" in caplog.text
    for writer in writers:
        with pytest.raises(RuntimeError, match="after Close"):
            writer.flush()


@pytest.mark.parametrize("other", [{"b": 3, "c": 4}, [3, 4]])
def test_leaves_that_stand_elsewhere_than_before_are_refused(
    client: reverb.Client, other: Any
) -> None:
    with client.writer(2) as writer:
        writer.append({"a": 1, "b": 2})
        with pytest.raises(reverb.errors.SignatureError, match="known by their place"):
            writer.append(other)
        writer.append({"a": 5, "b": 6})
        writer.create_item(TABLE, 2, 1.0)
    assert taken(client) == [[[1, 5], [2, 6]]]
