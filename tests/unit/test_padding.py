"""Batches of items of different length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors
from shmreplay.padding import mask, pad_batch
from shmreplay.replay_sample import INFO_DTYPES, ReplaySample, SampleInfo

TABLE = "episodes"


@pytest.fixture
def client(make_server: Callable[..., reverb.Server]) -> reverb.Client:
    table = reverb.Table(
        TABLE,
        reverb.selectors.Fifo(),
        reverb.selectors.Fifo(),
        100,
        reverb.rate_limiters.MinSize(1),
        max_times_sampled=1,
    )
    client = make_server([table]).localhost_client()
    with client.trajectory_writer(10) as writer:
        for length in (3, 1, 5):
            for t in range(length):
                writer.append({"obs": np.full(2, 10 * length + t, np.float32), "done": t == 9})
            history = writer.history
            item = {"obs": history["obs"][:], "done": history["done"][:], "n": history["done"][-1]}
            writer.create_item(TABLE, float(length), item)
            writer.end_episode()
    return client


def test_items_of_different_length_are_padded_to_the_longest(client: reverb.Client) -> None:
    with client.borrow(TABLE, 3) as items:
        batch = pad_batch(items, value=-1)
    assert batch.data["obs"].shape == (3, 5, 2) and batch.data["obs"].dtype == np.float32
    assert batch.data["done"].shape == (3, 5) and batch.data["done"].dtype == np.bool_
    np.testing.assert_array_equal(batch.data["obs"][1], [[10, 10], *([[-1, -1]] * 4)])
    np.testing.assert_array_equal(batch.data["obs"][2, :, 0], [50, 51, 52, 53, 54])
    assert batch.lengths["obs"].tolist() == batch.lengths["done"].tolist() == [3, 1, 5]
    assert batch.lengths["n"] is None and batch.data["n"].shape == (3,)
    assert batch.info.priority.tolist() == [3.0, 1.0, 5.0]
    assert [column.dtype for column in batch.info] == list(INFO_DTYPES)
    assert batch.info.inserted_ns.shape == (3,)
    np.testing.assert_array_equal(
        mask(batch.lengths["obs"], 5).astype(int),
        [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    )


def test_items_as_sample_yields_them(client: reverb.Client) -> None:
    samples = client.sample(TABLE, 3, emit_timesteps=False)
    batch = pad_batch(samples)
    done, n, obs = batch.data
    assert obs.shape == (3, 5, 2) and done.shape == (3, 5) and n.shape == (3,)
    assert batch.lengths[0].tolist() == [3, 1, 5] and batch.lengths[1] is None


def test_a_fixed_length_gives_every_batch_one_shape(client: reverb.Client) -> None:
    with client.borrow(TABLE, 1) as items:
        batch = pad_batch(items, length=8)
        assert batch.data["obs"].shape == (1, 8, 2)
        assert batch.lengths["obs"].tolist() == [3]
        with pytest.raises(errors.InvalidArgumentError, match=r"'done'.*3 entries.*length=2"):
            pad_batch(items, length=2)


def sample(data: Any) -> ReplaySample:
    return ReplaySample(SampleInfo.zeros(), data)


def test_items_of_one_length_are_stacked_as_they_are() -> None:
    batch = pad_batch([sample({"x": np.zeros((4, 2))}), sample({"x": np.ones((4, 2))})])
    assert batch.data["x"].shape == (2, 4, 2) and batch.lengths == {"x": None}
    assert batch.info.inserted_ns is None


@pytest.mark.parametrize(
    ("first", "second", "fragment"),
    [
        ({"x": np.zeros((4, 2))}, {"x": np.zeros((4, 3))}, r"\('x',\).*item 1"),
        ({"x": np.zeros(4)}, {"x": np.zeros(4, np.float32)}, "float32"),
        ({"x": np.zeros(4)}, {"x": np.zeros(())}, "item 1"),
        ({"x": np.zeros(4)}, {"y": np.zeros(4)}, "y"),
        ([np.zeros(4)], [np.zeros(4)] * 2, "2"),
    ],
)
def test_items_that_do_not_go_together(first: Any, second: Any, fragment: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=fragment):
        pad_batch([sample(first), sample(second)])


def test_no_items() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="no samples"):
        pad_batch([])


@pytest.mark.parametrize("samples", [3, None, [1, 2], [{"x": 1}]])
def test_what_are_no_samples_is_refused(samples: Any) -> None:
    with pytest.raises(errors.ArgumentTypeError, match="samples must be"):
        pad_batch(samples)


@pytest.mark.parametrize(
    ("lengths", "size", "match"),
    [
        ([1, 4], 3, "in \\[0, size=3\\]"),
        ([-1, 2], 3, "in \\[0, size=3\\]"),
        ([[1]], 3, "shape"),
        (2, 3, "shape"),
        ([0.5], 3, "integers"),
        (None, 3, "integers"),
        ([], -1, "in \\[0, size=-1\\]"),
    ],
)
def test_a_mask_of_bad_lengths_is_refused(lengths: Any, size: int, match: str) -> None:
    with pytest.raises(errors.ReverbError, match=match):
        mask(lengths, size)


def test_a_mask_of_no_items_is_empty() -> None:
    assert mask([], 3).shape == (0, 3)
