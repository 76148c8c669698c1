"""Tensors of a table's batches: shared memory, workers of a DataLoader, dtypes, devices."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay.spec import DTYPE_CODES

torch = pytest.importorskip("torch")
# What JAX says of any fork, where another test has imported it.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

from torch.utils.data import DataLoader  # noqa: E402

from shmreplay.integrations.torch import (  # noqa: E402
    ReplayDataset,
    as_tensors,
    sample_as_tensors,
)

MakeServer = Callable[..., reverb.Server]


def uniform(**options: Any) -> reverb.Table:
    return reverb.Table(
        "replay",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        1000,
        reverb.rate_limiters.MinSize(1),
        **options,
    )


def filled(make_server: MakeServer, **options: Any) -> reverb.Server:
    server = make_server([uniform(**options)])
    with server.localhost_client() as client:
        data = {"obs": np.arange(400.0).reshape(100, 4), "action": np.arange(100)}
        client.insert_batch("replay", data)
    return server


def test_tensors_share_the_memory_of_the_batch(make_server: MakeServer) -> None:
    client = filled(make_server).localhost_client()
    batch = client.sample_batch("replay", 8)
    sample = sample_as_tensors(batch)
    for name, tensor in sample.data.items():
        assert tensor.data_ptr() == batch.data[name].ctypes.data
        assert tensor.data_ptr() % 64 == 0
    assert sample.info.key.data_ptr() == batch.info.key.ctypes.data
    assert sample.info.key.dtype == torch.uint64
    assert sample.info.age().shape == (8,)
    assert client.update_priorities("replay", sample.info.key, 2.0) == 8


def test_memory_is_not_used_again_while_a_tensor_refers_to_it(make_server: MakeServer) -> None:
    dataset = ReplayDataset(filled(make_server).address, "replay", 8, num_batches=50)
    kept = [(batch.data["obs"], batch.data["obs"].clone()) for batch in dataset]
    pointers = {tensor.data_ptr() for tensor, _ in kept}
    assert len(pointers) == 50
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)


def test_memory_goes_with_its_last_tensor(make_server: MakeServer) -> None:
    client = filled(make_server).localhost_client()
    batch = client.sample_batch("replay", 8)
    array = weakref.ref(batch.data["obs"])
    part = sample_as_tensors(batch).data["obs"][2:4]
    del batch
    gc.collect()
    assert array() is not None
    del part
    gc.collect()
    assert array() is None


def test_rows_are_whole(make_server: MakeServer) -> None:
    dataset = ReplayDataset(filled(make_server).address, "replay", 16, num_batches=5, prefetch=0)
    batches = list(dataset)
    assert len(batches) == 5
    for batch in batches:
        first = batch.data["action"].to(torch.float64) * 4
        assert torch.equal(batch.data["obs"], first[:, None] + torch.arange(4))


def test_structures_stay(make_server: MakeServer) -> None:
    server = make_server([uniform()])
    client = server.localhost_client()
    client.insert_batch("replay", {"a": (np.zeros((3, 2), np.float32), [np.ones(3, np.uint8)])})
    (batch,) = ReplayDataset(client, "replay", 4, num_batches=1)
    assert isinstance(batch.data["a"], tuple) and isinstance(batch.data["a"][1], list)
    assert batch.data["a"][0].shape == (4, 2) and batch.data["a"][1][0].dtype == torch.uint8


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(make_server: MakeServer, method: str) -> None:
    """Each attaches by itself, does its share, and draws numbers of its own."""
    server = filled(make_server, seed=3)
    client = server.localhost_client()
    assert client.sample_batch("replay", 1) is not None  # the parent is attached already
    dataset = ReplayDataset(client, "replay", 32, num_batches=7)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    batches = list(loader)
    assert len(batches) == 7
    drawn = {tuple(batch.data["action"].tolist()) for batch in batches}
    assert len(drawn) == 7
    for batch in batches:
        assert isinstance(batch, reverb.ReplaySample)
        assert torch.equal(batch.data["obs"][:, 0], batch.data["action"].to(torch.float64) * 4)
        assert (batch.info.probability == 0.01).all()
    assert client.update_priorities("replay", batches[0].info.key, 1.0) == 32
    assert client.sample_batch("replay", 1) is not None


def test_all_dtypes(make_server: MakeServer) -> None:
    server = make_server([uniform()])
    client = server.localhost_client()
    data = {dtype.name: np.ones(4, dtype) for dtype in DTYPE_CODES}
    client.insert_batch("replay", data)
    (batch,) = ReplayDataset(client, "replay", 4, num_batches=1)
    assert {str(t.dtype).removeprefix("torch.") for t in batch.data.values()} == set(data)


def test_what_cannot_be_a_tensor_is_named() -> None:
    with pytest.raises(reverb.errors.ArgumentTypeError, match=r"'wide'.*astype"):
        as_tensors({"obs": {"wide": np.zeros(3, np.longdouble)}})
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    with pytest.raises(reverb.errors.ArgumentTypeError, match=r"read-only array at .'x'"):
        as_tensors({"x": fixed})
    with pytest.raises(reverb.errors.ArgumentTypeError, match=r"got int at .'x'"):
        as_tensors({"x": 1})


def test_data_moves_to_a_device_and_info_does_not(make_server: MakeServer) -> None:
    """The device that every PyTorch has and that is not the CPU."""
    address = filled(make_server).address
    (batch,) = ReplayDataset(address, "replay", 8, num_batches=1, device="meta")
    assert batch.data["obs"].device.type == "meta" and batch.data["obs"].shape == (8, 4)
    assert batch.info.key.device.type == "cpu"
    (batch,) = ReplayDataset(address, "replay", 8, num_batches=1, device="cpu", pin_memory=True)
    assert batch.data["obs"].device.type == "cpu"
    assert batch.data["obs"].is_pinned() == torch.cuda.is_available()


def test_no_devices_in_workers(make_server: MakeServer) -> None:
    dataset = ReplayDataset(filled(make_server).address, "replay", 8, device="meta")
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(Exception, match="within a worker of a DataLoader"):
        next(iter(loader))


def test_what_was_drawn_ahead_of_a_queue_is_not_lost(make_server: MakeServer) -> None:
    server = make_server([reverb.Table.queue("queue", 100)])
    client = server.localhost_client()
    client.insert_batch("queue", {"x": np.arange(40)})
    seen: list[int] = []
    for _ in range(4):
        for batch in ReplayDataset(client, "queue", 5, num_batches=2, prefetch=3):
            seen.extend(batch.data["x"].tolist())
    assert seen == list(range(40))


def test_errors(make_server: MakeServer) -> None:
    address = filled(make_server).address
    with pytest.raises(reverb.errors.TableNotFoundError, match="other"):
        next(iter(ReplayDataset(address, "other", 8)))
    with pytest.raises(reverb.errors.InvalidArgumentError, match="batch_size"):
        ReplayDataset(address, "replay", 0)
    with pytest.raises(reverb.errors.InvalidArgumentError, match="num_batches"):
        ReplayDataset(address, "replay", 8, num_batches=-1)
    empty = make_server([uniform()])
    with pytest.raises(reverb.DeadlineExceededError):
        next(iter(ReplayDataset(empty.address, "replay", 8, timeout=0.01)))
