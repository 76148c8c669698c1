"""Trajectories that patterns make of a stream of steps, without a table."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import structured_writer as sw
from shmreplay.pattern_dataset import pattern_dataset_with_info

STEPS = [
    {"id": np.int64(t), "x": np.full(2, t, np.float32), "last": np.bool_(t in (3, 6))}
    for t in range(9)
]
STEP = sw.create_reference_step(STEPS[0])

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]


def config(pattern: Any, *conditions: Any) -> sw.Config:
    return sw.create_config({"id": pattern}, "table", conditions)


def made(*configs: sw.Config, respect: bool = True, steps: Any = STEPS) -> list[list[int]]:
    dataset: Any = reverb.PatternDataset(steps, configs, respect, lambda step: step["last"])
    return [np.atleast_1d(element["id"]).tolist() for element in dataset]


def test_patterns_respect_the_ends_of_episodes_or_not() -> None:
    pairs = config(STEP["id"][-2:])
    assert made(pairs) == [[0, 1], [1, 2], [2, 3], [4, 5], [5, 6], [7, 8]]
    assert made(pairs, respect=False) == [[t, t + 1] for t in range(8)]


def test_squeezed_and_strided_columns() -> None:
    assert made(config(STEP["id"][-2])) == [[0], [1], [2], [4], [5], [7]]
    assert made(config(STEP["id"][-3::2])) == [[0, 2], [1, 3], [4, 6]]


def test_conditions() -> None:
    last = STEP["id"][-1]
    assert made(config(last, sw.Condition.is_end_episode())) == [[3], [6]]
    assert made(config(last, sw.Condition.step_index() >= 2)) == [[2], [3], [6]]
    assert made(config(last, sw.Condition.steps_since_applied() >= 3)) == [[2], [5], [8]]
    assert made(config(last, sw.Condition.data(STEPS[0])["id"] % 4 == 1)) == [[1], [5]]


def test_several_patterns_make_trajectories_of_one_structure() -> None:
    both = [config(STEP["id"][-2:], sw.Condition.step_index() % 2 == 1), config(STEP["id"][-1:])]
    assert made(*both, steps=STEPS[:4]) == [[0], [0, 1], [1], [2], [2, 3], [3]]
    other = sw.create_config([STEP["id"][-1]], "table")
    with pytest.raises(ValueError, match="pattern_structure"):
        made(both[0], other)


def test_elements_are_the_datas_own() -> None:
    reused: dict[str, Any] = {
        "id": np.zeros((), np.int64),
        "x": np.zeros(2, np.float32),
        "last": np.bool_(False),
    }

    def steps() -> Any:
        for t in range(4):
            reused["id"][...] = t
            reused["x"][...] = t
            yield reused

    pattern = {"id": STEP["id"][-2:], "x": STEP["x"][-2:], "now": STEP["x"][-1]}
    dataset: Any = reverb.PatternDataset(
        steps(), [sw.create_config(pattern, "table")], True, lambda step: step["last"]
    )
    elements = list(dataset)
    assert [element["id"].tolist() for element in elements] == [[0, 1], [1, 2], [2, 3]]
    assert [element["x"][:, 0].tolist() for element in elements] == [[0, 1], [1, 2], [2, 3]]
    assert elements[0]["x"].dtype == np.float32 and elements[0]["now"].shape == (2,)


def test_a_dataset_can_be_iterated_again_and_with_info() -> None:
    configs = [config(STEP["id"][-1])]
    samples = pattern_dataset_with_info(STEPS, configs, True, lambda step: step["last"])
    for _ in range(2):
        got = list(samples)
        assert [int(sample.data["id"]) for sample in got] == list(range(9))
        assert got[0].info == reverb.SampleInfo.zeros()


def test_steps_and_configs_are_checked() -> None:
    pairs = config(STEP["x"][-2:])
    wrong = {**STEPS[0], "x": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match="incompatible shape"):
        made(pairs, steps=[STEPS[0], wrong])
    with pytest.raises(ValueError, match="wrong dtype"):
        made(pairs, steps=[STEPS[0], {**STEPS[0], "x": np.zeros(2)}])
    with pytest.raises(ValueError, match="unexpected length"):
        made(pairs, steps=[STEPS[0], {"x": STEPS[0]["x"], "last": False}])
    with pytest.raises(ValueError, match="At least one config"):
        made()
    with pytest.raises(ValueError, match="position 0"):
        made(config(STEP["x"][:]))


def test_trajectories_are_those_of_a_structured_writer(make_client: MakeClient) -> None:
    patterns = [
        config(STEP["id"][-3:], sw.Condition.step_index() % 2 == 0),
        config(STEP["id"][-2:], sw.Condition.steps_since_applied() >= 2),
        config(STEP["id"][-1:], sw.Condition.is_end_episode()),
    ]
    table = reverb.Table.queue("table", 100)
    for respect in (True, False):
        _, client = make_client([table])
        writer = client.structured_writer(patterns)
        for step in STEPS:
            writer.append(step)
            if step["last"]:
                writer.end_episode(clear_buffers=respect)
        writer.flush()
        count = client.server_info()["table"].current_size
        items = client.sample("table", count, emit_timesteps=False, timeout=0)
        assert made(*patterns, respect=respect) == [item.data[0].tolist() for item in items]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
@pytest.mark.filterwarnings("default")
def test_with_tensorflow() -> None:
    import tensorflow as tf

    columns: Any = {name: np.stack([np.asarray(step[name]) for step in STEPS]) for name in STEPS[0]}
    steps = tf.data.Dataset.from_tensor_slices(columns)
    configs = [config(STEP["id"][-2:])]
    dataset: Any = reverb.PatternDataset(steps, configs, True, lambda step: step["last"])
    assert isinstance(dataset, tf.data.Dataset)
    assert dataset.element_spec == {"id": tf.TensorSpec((2,), tf.int64)}
    (batch,) = dataset.batch(6).as_numpy_iterator()
    assert batch["id"].tolist() == made(*configs)
    samples: Any = pattern_dataset_with_info(steps, configs, False, lambda step: step["last"])
    got = list(samples.as_numpy_iterator())
    assert len(got) == 8 and isinstance(got[0], reverb.ReplaySample)
    assert got[0].info.key == 0 and got[0].data["id"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="one bool"):
        reverb.PatternDataset(steps, configs, True, lambda step: step["id"])
