"""Signatures made of other packages' specs; each test is skipped where its package is missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay.spec import TensorSpec, as_signature


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def signature_of_table(signature: Any) -> Any:
    """The signature as it comes back from a table, after its way through the store's JSON."""
    table = reverb.Table(
        "table",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        10,
        reverb.rate_limiters.MinSize(1),
        signature=signature,
    )
    with reverb.Server([table], capacity=1 << 20) as server:
        info = reverb.Client(server.address).server_info()["table"]
    assert info.signature == as_signature(signature)
    return info.signature


@needs("dm_env")
def test_dm_env() -> None:
    from dm_env import specs

    got = signature_of_table(
        {
            "array": specs.Array((2, 3), np.float32, "observation"),
            "bounded": specs.BoundedArray((4,), np.uint8, 0, 255),
            "discrete": specs.DiscreteArray(5),
            "text": specs.Array((), np.int32, None),
        }
    )
    assert got == {
        "array": TensorSpec((2, 3), np.float32, "observation"),
        "bounded": TensorSpec((4,), np.uint8),
        "discrete": TensorSpec((), np.int32),
        "text": TensorSpec((), np.int32),
    }


@needs("gymnasium")
def test_gymnasium() -> None:
    from gymnasium import spaces

    got = signature_of_table(
        spaces.Dict(
            {
                "box": spaces.Box(-1, 1, (3,), np.float32),
                "pair": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(4)]),
            }
        )
    )
    assert got == {
        "box": TensorSpec((3,), np.float32),
        "pair": (TensorSpec((), np.int64), TensorSpec((4,), np.int8)),
    }


@needs("jax")
@pytest.mark.filterwarnings("default")
def test_jax() -> None:
    import jax

    got = signature_of_table(
        {
            "struct": jax.ShapeDtypeStruct((2,), np.float32),
            "array": jax.numpy.zeros((3, 1), np.int32),
        }
    )
    assert got == {"struct": TensorSpec((2,), np.float32), "array": TensorSpec((3, 1), np.int32)}
    with pytest.raises(reverb.errors.SignatureError, match=r"bfloat16.*np\.uint16"):
        as_signature(jax.ShapeDtypeStruct((2,), jax.numpy.bfloat16))


@needs("tensorflow")
@pytest.mark.filterwarnings("default")
def test_tensorflow() -> None:
    import tensorflow as tf
    from tensorflow.python.framework import tensor_spec

    got = signature_of_table(
        (
            tf.TensorSpec([None, 84], tf.uint8, "frames"),
            tensor_spec.BoundedTensorSpec([2], tf.float64, 0, 1),
            [tf.constant([1, 2])],
        )
    )
    assert got[0] == TensorSpec((None, 84), np.uint8, "frames")
    assert got[1] == TensorSpec((2,), np.float64)
    assert (got[2][0].shape, got[2][0].dtype) == ((2,), np.int32)
    for bad in (tf.TensorSpec([], tf.string), tf.TensorSpec(None, tf.float32)):
        with pytest.raises(ValueError):
            as_signature(bad)


def test_numpy() -> None:
    got = signature_of_table([np.zeros((2, 2)), np.float32(1)])
    assert got == [TensorSpec((2, 2), np.float64), TensorSpec((), np.float32)]
