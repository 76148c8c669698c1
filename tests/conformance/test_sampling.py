"""What Reverb's own tests pin of samplers, of the service, and of datasets, as far as they can be
seen from outside; a test for each fact.
"""

from __future__ import annotations

import collections
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay.dataset import NumpyTimestepDataset, NumpyTrajectoryDataset
from shmreplay.replay_sample import INFO_DTYPES
from shmreplay.spec import DTYPE_CODES

TABLE = "table"
# Seconds after which a call that should go on at once is taken to hang.
DEADLINE = 30.0

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]
Point = collections.namedtuple("Point", ["x", "y"])


def fifo_table(**options: Any) -> reverb.Table:
    usual: dict[str, Any] = {
        "name": TABLE,
        "sampler": reverb.selectors.Fifo(),
        "remover": reverb.selectors.Fifo(),
        "max_size": 100_000,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
    }
    return reverb.Table(**{**usual, **options})


def write(client: reverb.Client, length: int, make: Callable[[Any], Any], steps: int = 6) -> None:
    """Writes items of the last `length` steps, as `make` makes them of the history."""
    with client.trajectory_writer(length) as writer:
        for t in range(steps):
            writer.append({"a": np.full(2, t, np.float32), "b": t})
            if t >= length - 1:
                writer.create_item(TABLE, 1.0, make(writer.history))


def last(n: int) -> Callable[[Any], Any]:
    return lambda history: {name: column[-n:] for name, column in history.items()}


def samples_taken(client: reverb.Client) -> int:
    return int(client.server_info()[TABLE].rate_limiter_info.sample_stats.completed)


SIGNATURE = {
    "a": reverb.TensorSpec((3, 2), np.float32, "a"),
    "b": reverb.TensorSpec((3,), np.int64, "b"),
}


def dataset(client: reverb.Client, kind: Any = NumpyTrajectoryDataset, **options: Any) -> Any:
    usual: dict[str, Any] = {
        "server_address": client.server_address,
        "table": TABLE,
        "dtypes": {"a": np.float32, "b": np.int64},
        "shapes": {"a": (3, 2), "b": (3,)},
        "max_in_flight_samples_per_worker": 11,
        "rate_limiter_timeout_ms": 0,
    }
    if kind is NumpyTimestepDataset:
        usual["shapes"] = {"a": (2,), "b": ()}
    return kind(**{**usual, **options})


# ------------------------------------------------------------------------------ sampler


def test_columns_of_equal_length_are_split_into_timesteps(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    write(client, 3, last(3))
    (steps,) = client.sample(TABLE)
    assert [int(step.data[1]) for step in steps] == [0, 1, 2]
    assert [step.data[0].tolist() for step in steps] == [[0, 0], [1, 1], [2, 2]]
    assert len({step.info.key for step in steps}) == 1
    assert {step.info.times_sampled for step in steps} == {1}
    (whole,) = client.sample(TABLE, emit_timesteps=False)
    assert whole.data[0].shape == (3, 2) and whole.data[1].tolist() == [0, 1, 2]


def test_columns_of_unequal_length_are_not(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1)])
    write(client, 3, lambda h: {"a": h["a"][-3:], "b": h["b"][-1:]}, steps=3)
    with pytest.raises(ValueError, match="Can't split non timestep trajectory into timesteps"):
        next(client.sample(TABLE))
    # The sample that could not be split is not lost.
    (whole,) = client.sample(TABLE, emit_timesteps=False, timeout=0)
    assert [len(column) for column in whole.data] == [3, 1]


def test_squeezed_columns_lose_their_time_dimension(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    write(client, 3, lambda h: {"a": h["a"][-2], "b": h["b"][-3:]}, steps=3)
    (whole,) = client.sample(TABLE, emit_timesteps=False)
    assert whole.data[0].tolist() == [1, 1]
    assert whole.data[1].tolist() == [0, 1, 2]


def test_end_of_an_item_is_the_end_of_its_list_of_steps(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1)])
    for length in (1, 3, 2):
        write(client, length, last(length), steps=length)
    assert [len(steps) for steps in client.sample(TABLE, 3)] == [1, 3, 2]


def test_nothing_is_drawn_ahead_of_the_reader(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1)])
    client.insert_batch(TABLE, {"b": np.arange(30)})
    samples = client.sample(TABLE, 20)
    assert samples_taken(client) == 0
    for n in range(1, 6):
        next(samples)
        assert samples_taken(client) == n
    del samples
    assert client.sample_batch(TABLE, 25, timeout=0).data["b"].tolist() == list(range(5, 30))


def test_no_more_than_max_samples_are_asked_for(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    write(client, 3, last(3))
    for kind in (NumpyTrajectoryDataset, NumpyTimestepDataset):
        before = samples_taken(client)
        elements = list(dataset(client, kind, max_samples=20))
        assert len(elements) == (20 if kind is NumpyTrajectoryDataset else 60)
        assert samples_taken(client) - before == 20
    samples = client.sample(TABLE, 7)
    assert len(list(samples)) == 7
    assert next(samples, None) is None
    assert samples_taken(client) == 47


def test_after_close_every_call_fails(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    client.insert({"b": 1}, {TABLE: 1.0})
    samples = client.sample(TABLE, 5)
    sampler = client.sampler(TABLE, 1)
    next(samples)
    sampler.close()
    client.close()
    for call in (
        lambda: next(samples),
        lambda: next(sampler),
        lambda: next(client.sample(TABLE)),
        client.server_info,
    ):
        with pytest.raises(reverb.errors.ServerClosedError):
            call()


@pytest.mark.parametrize("emit_timesteps", [True, False])
def test_an_error_of_the_server_reaches_the_caller(
    make_client: MakeClient, emit_timesteps: bool
) -> None:
    server, client = make_client([fifo_table(max_times_sampled=1)])
    client.insert({"b": 1}, {TABLE: 1.0})
    samples = client.sample(TABLE, 5, emit_timesteps=emit_timesteps)
    next(samples)
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()

        def wait() -> Any:
            begun.set()
            return next(samples)

        waiting = pool.submit(wait)
        assert begun.wait(DEADLINE)
        server.stop()
        with pytest.raises(reverb.errors.ServerClosedError):
            waiting.result(DEADLINE)


def test_a_hundred_readers_get_all_of_ten_thousand_samples(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1)], capacity=64 << 20)
    client.insert_batch(TABLE, {"b": np.arange(10_000)})

    def read(_: int) -> list[int]:
        return [int(step.data[0]) for (step,) in client.sample(TABLE, 100, timeout=DEADLINE)]

    with ThreadPoolExecutor(100) as pool:
        got = [value for values in pool.map(read, range(100)) for value in values]
    assert sorted(got) == list(range(10_000))
    with pytest.raises(reverb.DeadlineExceededError):
        next(client.sample(TABLE, timeout=0))


# ------------------------------------------------------------------------------ service


def test_unknown_table_fails_insert_sample_mutate_and_reset(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    calls: list[Callable[[], Any]] = [
        lambda: client.insert({"b": 1}, {TABLE: 1.0, "nope": 1.0}),
        lambda: next(client.sample("nope")),
        lambda: client.mutate_priorities("nope", {}, []),
        lambda: client.reset("nope"),
    ]
    for call in calls:
        with pytest.raises(reverb.errors.TableNotFoundError, match=r"nope.*'table'"):
            call()
    assert client.server_info()[TABLE].current_size == 0


def test_sample_waits_for_enough_inserts(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(rate_limiter=reverb.rate_limiters.MinSize(3))])
    client.insert_batch(TABLE, {"b": np.arange(2)})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: next(client.sample(TABLE, timeout=DEADLINE)))
        with pytest.raises(reverb.DeadlineExceededError, match="min_size_to_sample=3"):
            next(client.sample(TABLE, timeout=0.01))
        assert not waiting.done()
        client.insert({"b": 2}, {TABLE: 1.0})
        ((step),) = waiting.result(DEADLINE)
    assert step.data[0] == 0


def test_reset_info_and_delete(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(), fifo_table(name="other")])
    keys = client.insert_batch(TABLE, {"b": np.arange(3)})
    client.insert_batch("other", {"b": np.arange(2)})
    client.mutate_priorities(TABLE, deletes=[int(keys[0])])
    assert {name: i.current_size for name, i in client.server_info().items()} == {
        TABLE: 2,
        "other": 2,
    }
    client.reset(TABLE)
    infos = client.server_info()
    assert infos[TABLE].current_size == 0
    assert infos[TABLE].rate_limiter_info.insert_stats.completed == 0
    assert infos["other"].current_size == 2
    after = client.insert_batch(TABLE, {"b": np.arange(3)})
    assert set(after.tolist()).isdisjoint(keys.tolist())


def test_checkpoint_without_a_checkpointer_goes_where_temporary_files_do(
    make_client: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, client = make_client([fifo_table()])
    first, second = Path(client.checkpoint()), Path(client.checkpoint())
    assert second.is_dir() and first.parent == second.parent and not first.exists()
    assert second.parent.parent == tmp_path


@pytest.mark.parametrize("dtype", list(DTYPE_CODES), ids=str)
def test_every_dtype_comes_back_as_it_was(make_client: MakeClient, dtype: Any) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1)])
    values = np.random.default_rng(0).integers(0, 256, (5, 3 * dtype.itemsize), np.uint8)
    data = (values % 2).astype(bool) if dtype == np.bool_ else values.view(dtype)
    client.insert(data, {TABLE: 1.0})
    client.insert_batch(TABLE, data)
    (sample,) = client.sample(TABLE, 1, emit_timesteps=False)
    batch = client.sample_batch(TABLE, 5, timeout=0)
    for got in (sample.data[0][0], batch.data):
        assert got.dtype == data.dtype and got.shape == data.shape
        assert got.tobytes() == data.tobytes()


# ------------------------------------------------------------------------------ structures


def test_structure_comes_back_with_and_without_a_signature(make_client: MakeClient) -> None:
    data = {"p": Point(np.float32(1), [2, 3]), "q": (np.array([4, 5]), {"r": True}), "e": ()}
    signature = {
        "p": Point(
            reverb.TensorSpec((None,), np.float32), [reverb.TensorSpec((None,), np.int64)] * 2
        ),
        "q": (
            reverb.TensorSpec((None, 2), np.int64),
            {"r": reverb.TensorSpec((None,), np.bool_)},
        ),
        "e": (),
    }
    _, client = make_client([fifo_table(), fifo_table(name="signed", signature=signature)])
    client.insert(data, {TABLE: 1.0, "signed": 1.0})
    with client.borrow(TABLE) as [item]:
        borrowed = item.data
    (unpacked,) = client.sample("signed", emit_timesteps=False, unpack_as_table_signature=True)
    for got in (client.sample_batch(TABLE, 1).data, borrowed, unpacked.data):
        assert isinstance(got["p"], Point) and isinstance(got["p"].y, list)
        assert isinstance(got["q"], tuple) and got["e"] == ()
        assert got["p"].x.dtype == np.float32 and got["q"][1]["r"].dtype == np.bool_
        assert got["q"][0].reshape(-1).tolist() == [4, 5]
    (flat,) = client.sample(TABLE, emit_timesteps=False)
    assert [leaf.reshape(-1).tolist() for leaf in flat.data] == [[1.0], [2], [3], [4, 5], [True]]


def test_items_of_different_structure_share_a_table(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1)])
    client.insert({"x": 1}, {TABLE: 1.0})
    client.insert([np.zeros(3), "ab" == "ab"], {TABLE: 1.0})
    with client.borrow(TABLE, 2) as items:
        assert [type(item.data) for item in items] == [dict, list]


# ------------------------------------------------------------------------------ datasets


def test_elements_of_a_trajectory_dataset(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1, signature=SIGNATURE)])
    write(client, 3, last(3))
    made = NumpyTrajectoryDataset.from_table_signature(
        client.server_address, TABLE, 10, rate_limiter_timeout_ms=0
    )
    elements = list(made)
    assert [element.data["b"].tolist() for element in elements] == [
        [t, t + 1, t + 2] for t in range(4)
    ]
    first = elements[0]
    assert isinstance(first, reverb.ReplaySample) and isinstance(first.info, reverb.SampleInfo)
    assert [field.dtype for field in first.info] == list(INFO_DTYPES)
    assert first.data["a"].shape == (3, 2) and first.data["a"].dtype == np.float32
    assert first.info.age() is not None
    assert list(made) == []  # each iteration begins anew: the table is empty by now


def test_elements_of_a_timestep_dataset(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1, signature=SIGNATURE)])
    write(client, 3, last(3), steps=4)
    elements = list(dataset(client, NumpyTimestepDataset))
    assert [int(element.data["b"]) for element in elements] == [0, 1, 2, 1, 2, 3]
    assert [element.data["a"].shape for element in elements] == [(2,)] * 6
    keys = [int(element.info.key) for element in elements]
    assert keys[0] == keys[1] == keys[2] != keys[3] == keys[5]


def test_an_iteration_that_is_given_up_loses_nothing(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1)])
    write(client, 3, last(3))
    it: Iterator[Any] = iter(dataset(client))
    assert next(it).data["b"].tolist() == [0, 1, 2]
    del it
    assert [element.data["b"][0] for element in dataset(client)] == [1, 2, 3]


def test_a_dataset_ends_when_the_limiter_blocks_for_so_long(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1)])
    assert list(dataset(client, rate_limiter_timeout_ms=1)) == []
    write(client, 3, last(3))
    assert len(list(dataset(client, rate_limiter_timeout_ms=1))) == 4
    # Without a timeout it waits.
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: next(iter(dataset(client, rate_limiter_timeout_ms=-1))))
        assert not waiting.done()
        write(client, 3, last(3))
        assert waiting.result(DEADLINE).data["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [NumpyTrajectoryDataset, NumpyTimestepDataset])
@pytest.mark.parametrize("drop", [False, True])
def test_batches_of_a_dataset_are_its_elements_stacked(
    make_client: MakeClient, kind: Any, drop: bool
) -> None:
    _, client = make_client([fifo_table()])
    write(client, 3, last(3), steps=3)
    made = dataset(client, kind, max_samples=7)
    single = list(made)
    batches = list(made.batch(4, drop_remainder=drop))
    sizes = [4] * (len(single) // 4) + [len(single) % 4] * (not drop)
    assert [len(batch.info.key) for batch in batches] == [size for size in sizes if size]
    at = 0
    for batch in batches:
        assert isinstance(batch, reverb.ReplaySample) and list(batch.data) == ["a", "b"]
        assert [field.dtype for field in batch.info] == list(INFO_DTYPES)
        for row, element in enumerate(single[at : at + len(batch.info.key)]):
            assert batch.info.key[row] == element.info.key
            assert batch.info.inserted_ns[row] == element.info.inserted_ns
            for name in ("a", "b"):
                assert batch.data[name].dtype == element.data[name].dtype
                np.testing.assert_array_equal(batch.data[name][row], element.data[name])
        at += len(batch.info.key)


def test_a_batch_of_a_dataset_ends_where_the_limiter_blocks(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1)])
    made = dataset(client, rate_limiter_timeout_ms=1)
    assert list(made.batch(3)) == []
    write(client, 3, last(3))  # four items
    assert [len(batch.info.key) for batch in made.batch(3)] == [3, 1]
    with pytest.raises(reverb.errors.InvalidArgumentError, match="batch_size must be in"):
        made.batch(0)
    write(client, 3, last(3))
    with pytest.raises(ValueError, match=r"flattened index 0 .* expects"):
        list(dataset(client, shapes={"a": (2, 2), "b": (2,)}).batch(3))


def test_lists_become_tuples_and_unknown_sizes_are_taken(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table()])
    write(client, 3, lambda h: [h["a"][-3:], {"b": h["b"][-2:]}])
    (element,) = dataset(
        client, dtypes=[np.float32, {"b": "int64"}], shapes=[(None, 2), {"b": None}], max_samples=1
    )
    assert isinstance(element.data, tuple) and isinstance(element.data[1], dict)
    assert [element.data[0].shape, element.data[1]["b"].shape] == [(3, 2), (2,)]


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("max_in_flight_samples_per_worker", [0, -1]),
        ("num_workers_per_iterator", [0, -2]),
        ("max_samples_per_stream", [0, -2]),
        ("max_samples", [0, -2]),
        ("rate_limiter_timeout_ms", [-2]),
    ],
)
def test_options_are_checked(make_client: MakeClient, option: str, bad: list[int]) -> None:
    _, client = make_client([fifo_table()])
    for kind in (NumpyTrajectoryDataset, NumpyTimestepDataset):
        for value in bad:
            with pytest.raises(ValueError, match=option):
                dataset(client, kind, **{option: value})
        with pytest.raises(TypeError, match=option):
            dataset(client, kind, **{option: 1.5})


@pytest.mark.parametrize(
    ("dtypes", "shapes"),
    [
        ({"a": np.float32}, {"b": ()}),
        ({"a": np.float32}, {"a": (), "b": ()}),
        ([np.float32], [(), ()]),
        ([np.float32, np.int64], {"a": (), "b": ()}),
        ({"a": np.float32}, {"a": (-1,)}),
        ({"a": np.float32}, {"a": "3"}),
        ({"a": "datetime64[s]"}, {"a": ()}),
    ],
)
def test_dtypes_and_shapes_must_go_together(dtypes: Any, shapes: Any) -> None:
    with pytest.raises(ValueError):
        NumpyTrajectoryDataset("localhost:1", TABLE, dtypes, shapes, 1)


def test_signature_is_checked_when_an_iteration_begins(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(signature=SIGNATURE)])
    bad: list[tuple[dict[str, Any], int]] = [
        ({"shapes": {"a": (3, 3), "b": (3,)}}, 0),
        ({"shapes": {"a": (3, 2), "b": (2,)}}, 1),
        ({"dtypes": {"a": np.float32, "b": np.int32}}, 1),
    ]
    for options, index in bad:
        with pytest.raises(ValueError, match=f"incompatible tensor at flattened index {index} "):
            next(iter(dataset(client, rate_limiter_timeout_ms=-1, **options)))
    with pytest.raises(ValueError, match="2"):
        next(iter(dataset(client, dtypes={"a": np.float32}, shapes={"a": (3, 2)})))


def test_every_item_is_checked_where_there_is_no_signature(make_client: MakeClient) -> None:
    _, client = make_client([fifo_table(max_times_sampled=1)])
    write(client, 3, last(3), steps=3)
    write(client, 2, last(2), steps=2)
    it = iter(dataset(client))
    assert len(next(it).data["b"]) == 3
    with pytest.raises(
        ValueError,
        match=r"Received incompatible tensor at flattened index 0 from table 'table'.*\[2,2\]",
    ):
        next(it)
    write(client, 3, lambda h: [h["a"][-1:]], steps=3)
    with pytest.raises(ValueError, match="1 columns"):
        next(iter(dataset(client)))


def test_from_table_signature_needs_table_signature_and_server(make_client: MakeClient) -> None:
    server, client = make_client([fifo_table()])
    for kind in (NumpyTrajectoryDataset, NumpyTimestepDataset):
        with pytest.raises(ValueError, match="does not contain any table named nope"):
            kind.from_table_signature(client.server_address, "nope", 1)
        with pytest.raises(ValueError, match="does not have a signature"):
            kind.from_table_signature(client.server_address, TABLE, 1)
    with pytest.raises(reverb.errors.TableNotFoundError):
        next(iter(dataset(client, table="nope")))
    server.stop()
    with pytest.raises(reverb.DeadlineExceededError):
        NumpyTrajectoryDataset.from_table_signature(
            f"localhost:{server.port}", TABLE, 1, get_signature_timeout_secs=0.01
        )


def test_without_tensorflow_the_datasets_are_of_numpy(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("trajectory_dataset", "timestep_dataset", "tf_client"):
        monkeypatch.setattr(f"shmreplay.{module}.tensorflow_is_installed", lambda: False)
    _, client = make_client([fifo_table(signature=SIGNATURE)])
    write(client, 3, last(3))
    made: Any = reverb.TrajectoryDataset.from_table_signature(
        client.server_address, TABLE, 10, max_samples=2
    )
    assert isinstance(made, reverb.TrajectoryDataset) and len(list(made)) == 2
    steps: Any = reverb.TimestepDataset(
        client.server_address,
        TABLE,
        {"a": np.float32, "b": np.int64},
        {"a": (2,), "b": ()},
        10,
        max_samples=2,
    )
    assert isinstance(steps, reverb.TimestepDataset) and len(list(steps)) == 6
    with pytest.raises(ImportError, match=r"shmreplay\[tf\]"):
        reverb.TFClient(client.server_address)


@pytest.mark.parametrize("rows_at_once", [300, 7])
@pytest.mark.parametrize(
    "width", [1, 3, 4, 8, 31, 32, 33, 63, 64, 127, 128, 129, 336, 2047, 2048, 5000]
)
def test_batches_of_rows_of_any_width(
    make_client: MakeClient, width: int, rows_at_once: int
) -> None:
    _, client = make_client([fifo_table(sampler=reverb.selectors.Uniform())])
    rng = np.random.default_rng(width)
    rows = rng.integers(0, 256, (300, width), np.uint8)
    for k in range(0, 300, rows_at_once):
        some = np.arange(k, min(k + rows_at_once, 300))
        client.insert_batch(TABLE, {"n": some, "x": rows[some]})
    for batch_size in (1, 256, 700):
        data = client.sample_batch(TABLE, batch_size).data
        np.testing.assert_array_equal(data["x"], rows[data["n"]])


def test_batches_of_items_that_lie_in_different_ways(make_client: MakeClient) -> None:
    """Whole rows of one block, and trajectories of several, in every order."""
    _, client = make_client([fifo_table(sampler=reverb.selectors.Uniform())])
    with client.trajectory_writer(40) as writer:
        for t in range(40):
            writer.append({"a": np.full(40, t, np.float32), "b": np.int64(t)})
            if t >= 3:
                step = 1 if t % 2 else -1
                writer.create_item(
                    TABLE, 1.0, {name: c[-3:][::step] for name, c in writer.history.items()}
                )
    data = client.sample_batch(TABLE, 600).data
    assert data["a"].shape == (600, 3, 40)
    np.testing.assert_array_equal(data["a"], np.repeat(data["b"][..., None], 40, 2))
    assert {-1, 1} == set(np.unique(np.diff(data["b"], axis=1)))
