"""Reverb's TensorFlow parts: real `tf.data.Dataset`s and operations. Skipped without TensorFlow."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay.replay_sample import INFO_DTYPES
from tests.conftest import free_port

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

# TensorFlow and what it brings raise warnings of their own when they are imported.
pytestmark = pytest.mark.filterwarnings("default")

TABLE = "table"
MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]


@pytest.fixture(scope="module")
def tf() -> Any:
    import tensorflow

    tensorflow.get_logger().setLevel("ERROR")
    return tensorflow


@pytest.fixture
def client(make_client: MakeClient, tf: Any) -> reverb.Client:
    """A client of a table with a signature of TensorFlow and four items of three steps."""
    signature = {
        "a": tf.TensorSpec([3, 2], tf.float32, "a"),
        "b": tf.TensorSpec([None], tf.int64, "b"),
    }
    tables = [
        reverb.Table(
            name,
            reverb.selectors.Fifo(),
            reverb.selectors.Fifo(),
            100,
            reverb.rate_limiters.MinSize(1),
            max_times_sampled=1 if name == TABLE else 0,
            signature=signature if name == TABLE else None,
        )
        for name in (TABLE, "free")
    ]
    _, client = make_client(tables)
    with client.trajectory_writer(3) as writer:
        for t in range(6):
            writer.append({"a": np.full(2, t, np.float32), "b": t})
            if t >= 2:
                columns = {name: column[-3:] for name, column in writer.history.items()}
                writer.create_item(TABLE, 1.0, columns)
                writer.create_item("free", 1.0, columns)
    return client


def test_signature_of_tensorflow_is_kept(client: reverb.Client) -> None:
    signature = client.server_info()[TABLE].signature
    assert signature["a"] == reverb.TensorSpec((3, 2), np.float32, "a")
    assert signature["b"] == reverb.TensorSpec((None,), np.int64, "b")


def test_bounded_specs_are_accepted(tf: Any) -> None:
    from tensorflow.python.framework import tensor_spec

    bounded = tensor_spec.BoundedTensorSpec([2], tf.uint8, 0, 9)
    assert reverb.spec.as_spec(bounded) == reverb.TensorSpec((2,), np.uint8)


def test_dtypes_and_shapes_of_the_info(tf: Any) -> None:
    assert reverb.SampleInfo.tf_dtypes() == (tf.uint64, tf.float64, tf.int64, tf.float64, tf.int32)
    assert all(shape == tf.TensorShape([]) for shape in reverb.SampleInfo.tf_shapes())


def test_trajectory_dataset_is_a_tf_data_dataset(client: reverb.Client, tf: Any) -> None:
    made: Any = reverb.TrajectoryDataset.from_table_signature(
        client.server_address, TABLE, 10, rate_limiter_timeout_ms=0
    )
    assert isinstance(made, tf.data.Dataset)
    spec = made.element_spec
    assert isinstance(spec, reverb.ReplaySample)
    assert spec.data["a"] == tf.TensorSpec([3, 2], tf.float32)
    assert spec.data["b"] == tf.TensorSpec([None], tf.int64)
    assert [each.dtype.as_numpy_dtype for each in spec.info] == [d.type for d in INFO_DTYPES]
    (batch,) = list(made.batch(4, drop_remainder=True).prefetch(1).as_numpy_iterator())
    assert batch.data["b"].tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert batch.data["a"].shape == (4, 3, 2)
    assert batch.info.probability.tolist() == [1.0] * 4
    assert len(set(batch.info.key.tolist())) == 4


def test_timestep_dataset_gives_steps(client: reverb.Client, tf: Any) -> None:
    made: Any = reverb.TimestepDataset(
        client.server_address,
        TABLE,
        {"a": tf.float32, "b": tf.int64},
        {"a": tf.TensorShape([2]), "b": tf.TensorShape([])},
        10,
        max_samples=2,
    )
    assert isinstance(made, tf.data.Dataset)
    steps = list(made)
    assert [int(step.data["b"]) for step in steps] == [0, 1, 2, 1, 2, 3]
    assert steps[0].info.key == steps[2].info.key != steps[3].info.key


def test_datasets_are_made_within_other_datasets(client: reverb.Client, tf: Any) -> None:
    def make(_: Any) -> Any:
        return reverb.TrajectoryDataset.from_table_signature(
            server_address=client.server_address,
            table=TABLE,
            max_in_flight_samples_per_worker=4,
            rate_limiter_timeout_ms=0,
        ).map(lambda sample: sample.data["b"])

    joined = tf.data.Dataset.range(2).interleave(
        make, cycle_length=2, num_parallel_calls=2, deterministic=False
    )
    assert sorted(int(b[0]) for b in joined) == [0, 1, 2, 3]


def test_names_may_be_tensors_and_ranks_unknown(client: reverb.Client, tf: Any) -> None:
    made: Any = reverb.TrajectoryDataset(
        tf.constant(client.server_address),
        tf.constant("free"),
        [tf.float32, tf.int64],
        [tf.TensorShape(None), tf.TensorShape([3])],
        10,
        max_samples=1,
    )
    (element,) = list(made)
    assert isinstance(element.data, tuple)
    assert element.data[0].shape == (3, 2) and element.data[1].numpy().tolist() == [0, 1, 2]


def test_an_iteration_that_waits_can_be_given_up(client: reverb.Client, tf: Any) -> None:
    made: Any = reverb.TrajectoryDataset.from_table_signature(client.server_address, TABLE, 10)
    ahead = iter(made.prefetch(8))
    assert [int(next(ahead).data["b"][0]) for _ in range(4)] == [0, 1, 2, 3]
    del ahead  # which waits for the thread that waits for the fifth


def test_an_iteration_that_waits_for_a_server_can_be_given_up(tf: Any) -> None:
    address = f"localhost:{free_port()}"
    made = reverb.TrajectoryDataset(address, TABLE, tf.int64, tf.TensorShape([2]), 10)
    ahead = iter(made.prefetch(1))
    del ahead  # which waits for the thread that waits for a server, and would do so for minutes


def test_errors_of_datasets(client: reverb.Client, tf: Any) -> None:
    dtypes, shapes = {"a": tf.float32, "b": tf.int64}, {"a": [3, 3], "b": [3]}
    for table, fragment in ((TABLE, "Requested incompatible"), ("free", "Received incompatible")):
        made: Any = reverb.TrajectoryDataset(client.server_address, table, dtypes, shapes, 1)
        with pytest.raises(tf.errors.InvalidArgumentError, match=fragment):
            next(iter(made))
    missing: Any = reverb.TrajectoryDataset(client.server_address, "nope", dtypes, shapes, 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="nope was not found"):
        next(iter(missing))
    with pytest.raises(ValueError, match="max_samples"):
        reverb.TrajectoryDataset(client.server_address, TABLE, dtypes, shapes, 1, max_samples=0)
    with pytest.raises(ValueError, match="does not have a signature"):
        reverb.TrajectoryDataset.from_table_signature(client.server_address, "free", 1)
    with pytest.raises(ValueError, match="does not contain any table"):
        reverb.TimestepDataset.from_table_signature(client.server_address, "nope", 1)


# ------------------------------------------------------------------------------ TFClient


@pytest.mark.parametrize("within_function", [False, True])
def test_insert_sample_and_update(client: reverb.Client, tf: Any, within_function: bool) -> None:
    tf_client = reverb.TFClient(client.server_address)
    client.reset("free")
    wrap = tf.function if within_function else lambda function: function

    @wrap  # type: ignore[untyped-decorator]
    def insert(value: Any) -> Any:
        tf_client.insert(
            [value, tf.constant([1, 2])],
            tf.constant(["free"]),
            tf.constant([3.0], tf.float64),
        )
        return value

    @wrap  # type: ignore[untyped-decorator]
    def sample() -> Any:
        return tf_client.sample("free", {"x": tf.float32, "y": tf.int32})

    insert(tf.constant(5.0))
    key = int(sample().info.key)
    tf_client.update_priorities(
        "free", tf.constant([key, 1], tf.uint64), tf.constant([7.0, 7.0], tf.float64)
    )
    info, data = sample()
    assert isinstance(info, reverb.SampleInfo)
    assert int(info.key) == key and float(info.priority) == 7.0
    assert float(data["x"]) == 5.0 and data["y"].numpy().tolist() == [1, 2]
    assert client.server_info()["free"].num_unique_samples == 1


def test_arguments_of_insert_are_checked(client: reverb.Client, tf: Any) -> None:
    tf_client = reverb.TFClient(client.server_address)
    data = [tf.constant(1.0)]
    bad: list[tuple[Any, Any, str]] = [
        (tf.constant("free"), tf.constant([1.0], tf.float64), "tables must be a string tensor"),
        (tf.constant([1]), tf.constant([1.0], tf.float64), "tables must be a string tensor"),
        (tf.constant(["free"]), tf.constant([1.0]), "priorities must be a float64 tensor"),
        (tf.constant(["free"]), tf.constant(1.0, tf.float64), "priorities must be a float64"),
        (tf.constant(["free"]), tf.constant([1.0, 2.0], tf.float64), "must have the same shape"),
    ]
    for tables, priorities, fragment in bad:
        with pytest.raises(ValueError, match=fragment):
            tf_client.insert(data, tables, priorities)


def test_sampling_with_wrong_dtypes(client: reverb.Client, tf: Any) -> None:
    tf_client = reverb.TFClient(client.server_address)
    for dtypes in ([tf.float32], [tf.float32, tf.float32]):
        with pytest.raises(Exception, match=r"float32.*int64"):
            tf_client.sample("free", dtypes)
    with pytest.raises(Exception, match="nope was not found"):
        tf_client.sample("nope", [tf.float32])


# ------------------------------------------------------------------ text


def test_text_is_of_strings(make_client: MakeClient, tf: Any) -> None:
    signature = {"s": reverb.TensorSpec((1, 2), "S3"), "u": reverb.TensorSpec((1,), "U5")}
    tables = [
        reverb.Table(
            name,
            reverb.selectors.Fifo(),
            reverb.selectors.Fifo(),
            100,
            reverb.rate_limiters.MinSize(1),
            signature=signature if name == TABLE else None,
        )
        for name in (TABLE, "free")
    ]
    _, client = make_client(tables)
    client.insert({"s": np.array([b"x", b"yy"]), "u": "\u0394x"}, {TABLE: 1.0})
    address, count = client.server_address, {"max_samples": 1}
    by_signature = reverb.TrajectoryDataset.from_table_signature(address, TABLE, 1, **count)
    by_dtypes = reverb.TrajectoryDataset(
        address,
        TABLE,
        {"s": tf.string, "u": tf.string},
        {"s": (1, 2), "u": (1,)},
        max_in_flight_samples_per_worker=1,
        **count,
    )
    for dataset in (by_signature, by_dtypes):
        assert dataset.element_spec.data["u"] == tf.TensorSpec((1,), tf.string)
        (sample,) = list(dataset)
        assert sample.data["s"].numpy().tolist() == [[b"x", b"yy"]]
        assert sample.data["u"].numpy().tolist() == ["\u0394x".encode()]
    tf_client = reverb.TFClient(address)
    _, data = tf_client.sample(TABLE, [tf.string, tf.string])
    assert data[0].numpy().tolist() == [b"x", b"yy"]
    strings = [tf.constant("word"), tf.constant(["a", "bc"])]
    tf_client.insert(strings, tf.constant(["free"]), tf.constant([1.0], tf.float64))
    (item,) = client.fetch("free", client.keys("free"))
    assert item.data[0].tolist() == [b"word"] and item.data[1].tolist() == [[b"a", b"bc"]]
