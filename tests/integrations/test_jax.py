"""JAX arrays of a table's batches, on the memory that they were gathered into."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay.spec import DTYPE_CODES

jax = pytest.importorskip("jax")

from shmreplay.integrations.jax import as_jax, batches  # noqa: E402

MakeServer = Callable[..., reverb.Server]
Step = namedtuple("Step", "obs action")

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks for JAX on the CPU")


def client_of(make_server: MakeServer, data: object) -> reverb.Client:
    table = reverb.Table(
        "replay",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        1000,
        reverb.rate_limiters.MinSize(1),
    )
    client = make_server([table]).localhost_client()
    client.insert_batch("replay", data)
    return client


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
        *("float16", "float32", "complex64"),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (84, 84)])
def test_no_copy(make_server: MakeServer, dtype: str, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(1).integers(0, 2, (10, *shape)).astype(dtype)
    client = client_of(make_server, {"x": rows})
    batch = client.sample_batch("replay", 6)
    array = as_jax(batch.data)["x"]
    assert array.dtype == rows.dtype and array.shape == (6, *shape)
    assert array.unsafe_buffer_pointer() == batch.data["x"].ctypes.data
    if dtype != "bool":  # which numpy takes in by DLPack from version 2.1 on
        assert np.from_dlpack(array).ctypes.data == batch.data["x"].ctypes.data
    assert np.array_equal(np.asarray(array), batch.data["x"])


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7)])
def test_64_bits_need_no_copy_either_where_they_are_on(
    make_server: MakeServer, dtype: str, shape: tuple[int, ...]
) -> None:
    rows = np.arange(10 * np.prod(shape, dtype=int)).reshape(10, *shape).astype(dtype)
    batch = client_of(make_server, {"x": rows}).sample_batch("replay", 6)
    with jax.enable_x64(True):
        array = as_jax(batch.data)["x"]
        assert array.dtype == dtype
        assert array.unsafe_buffer_pointer() == batch.data["x"].ctypes.data
        assert np.array_equal(np.from_dlpack(array), batch.data["x"])
        assert np.from_dlpack(array).ctypes.data == batch.data["x"].ctypes.data
    narrow = as_jax(batch.data)["x"]
    assert narrow.dtype.itemsize == np.dtype(dtype).itemsize // 2
    assert np.array_equal(np.asarray(narrow), batch.data["x"].astype(narrow.dtype))


def test_every_dtype_is_among_these() -> None:
    marks = [test_no_copy, test_64_bits_need_no_copy_either_where_they_are_on]
    tested = {
        dtype
        for test in marks
        for mark in test.pytestmark  # type: ignore[attr-defined]
        if mark.args[0] == "dtype"
        for dtype in mark.args[1]
    }
    assert tested == {dtype.name for dtype in DTYPE_CODES}


@pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
def test_batches_begin_on_64_bytes(make_server: MakeServer, batch_size: int) -> None:
    """Each array of them, whatever its size, and those of a sampler as well."""
    rows = {dtype.name: np.ones((10, 3), dtype) for dtype in DTYPE_CODES}
    client = client_of(make_server, rows)
    with client.sampler("replay", batch_size) as drawn:
        batches = [client.sample_batch("replay", batch_size), next(drawn)]
    for batch in batches:
        for array in batch.data.values():
            assert array.ctypes.data % 64 == 0


def test_batches_keep_their_memory(make_server: MakeServer) -> None:
    client = client_of(make_server, {"x": np.arange(4000, dtype=np.float32).reshape(10, 400)})
    kept = []
    for batch, _ in zip(batches(client, "replay", 8), range(30), strict=False):
        kept.append((batch.data["x"], np.array(batch.data["x"])))
    assert len({array.unsafe_buffer_pointer() for array, _ in kept}) == 30
    assert all(np.array_equal(np.asarray(array), copy) for array, copy in kept)


def test_batches_are_pytrees(make_server: MakeServer) -> None:
    rows = Step({"pixels": np.zeros((9, 2, 2), np.uint8)}, [np.arange(9, dtype=np.int32)])
    client = client_of(make_server, rows)
    batch = next(batches(client.server_address, "replay", 4, prefetch=0))

    @jax.jit
    def total(data):  # type: ignore[no-untyped-def]
        return jax.tree.map(lambda leaf: leaf.sum(), data)

    sums = total(batch.data)
    assert type(sums).__name__ == "Step" and set(sums.obs) == {"pixels"}
    assert sums.action[0] == np.asarray(batch.data.action[0]).sum()
    assert len(jax.tree.leaves(batch.data)) == 2


def test_keys_stay_whole(make_server: MakeServer) -> None:
    client = client_of(make_server, {"x": np.arange(10)})
    batch = next(batches(client, "replay", 4))
    assert batch.info.key.dtype == np.uint64
    assert client.update_priorities("replay", batch.info.key, 2.0) == 4


def test_another_device(make_server: MakeServer) -> None:
    client = client_of(make_server, {"x": np.arange(10, dtype=np.int32)})
    device = jax.devices("cpu")[0]
    batch = next(batches(client, "replay", 4, device=device))
    assert batch.data["x"].devices() == {device}


def test_borrowed_views(make_server: MakeServer) -> None:
    """They are read-only, and stay what they are as long as an array may lie on them."""
    client = client_of(make_server, {"x": np.full((10, 64), 7, np.float32)})
    with client.borrow("replay") as [item]:
        array = as_jax(item.data)["x"]
    del item
    client.reset("replay")
    client.insert_batch("replay", {"x": np.zeros((200, 64), np.float32)})
    assert (np.asarray(array) == 7).all()


def test_errors(make_server: MakeServer) -> None:
    with pytest.raises(reverb.errors.ArgumentTypeError, match=r"got int at .'x'"):
        as_jax({"x": 1})
    with pytest.raises(reverb.errors.ArgumentTypeError, match=r"'x'.*astype"):
        as_jax({"x": np.array(["a"])})
    client = client_of(make_server, {"x": np.arange(3)})
    with pytest.raises(reverb.errors.TableNotFoundError, match="other"):
        next(batches(client, "other", 4))
