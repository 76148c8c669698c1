"""Tensors of a table's batches: shared memory, workers of a DataLoader, dtypes, devices."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
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


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
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


PROGRAM = """
import os, signal, sys
from torch.utils.data import DataLoader
from shmreplay.integrations.torch import ReplayDataset
dataset = ReplayDataset(sys.argv[1], "replay", 32)
loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
batches = iter(loader)
for _ in range(3):
    batch = next(batches)
    assert (batch.data["obs"][:, 0] == batch.data["action"] * 4.0).all()
if sys.argv[2] == "dropped":
    del batches
else:
    for worker in batches._workers:
        os.kill(worker.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["dropped", "killed"])
def test_workers_that_end_in_mid_iteration_keep_nothing(make_server: MakeServer, end: str) -> None:
    server = filled(make_server)
    client = server.localhost_client()
    client.reset("replay")
    client.insert_batch("replay", {"obs": np.zeros((9, 4)), "action": np.zeros(9, int)})
    before = server.stats()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, server.address, end], timeout=120, check=False
    )
    assert done.returncode == (0 if end == "dropped" else -signal.SIGKILL)
    client.reset("replay")
    # What a process that was killed had is given back by the server.
    deadline = time.monotonic() + 60
    now = server.stats()
    while now["pinned_bytes"] or now["participants"] > before["participants"]:
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.01)
        now = server.stats()
    assert now["arena_used_bytes"] < before["arena_used_bytes"] + 64


class FakeCuda:
    """What the dataset asks of CUDA, recorded; the data stays where it is.

    There is no such device where the tests run. What is tested is the order of calls that PyTorch
    asks for, and that data comes through them unchanged; not that a device does as it is told.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stream = "compute"
        fake = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = f"copies to {device}"

        class Current:
            def wait_stream(self, other: Stream) -> None:
                fake.calls.append(("wait", fake.stream, other.name))

        @contextlib.contextmanager
        def entered(stream: Stream) -> Iterator[None]:
            fake.stream = stream.name
            yield
            fake.stream = "compute"

        def pin_memory(tensor: Any) -> Any:
            pinned = tensor.clone()
            fake.calls.append(("pin", pinned.data_ptr()))
            return pinned

        def to(tensor: Any, device: Any, non_blocking: bool = False) -> Any:
            moved = tensor.clone()
            call = ("to", str(device), non_blocking, fake.stream, tensor.data_ptr())
            fake.calls.append((*call, moved.data_ptr()))
            return moved

        def record_stream(tensor: Any, stream: Any) -> None:
            fake.calls.append(("record", type(stream).__name__, tensor.data_ptr()))

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current())
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(torch.Tensor, "to", to)
        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)


def test_the_way_to_a_cuda_device(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned, copied on a stream of its own, waited for there, its memory kept until both are done.

    Against a stand-in for the device.
    """
    address = filled(make_server).address
    cuda = FakeCuda(monkeypatch)
    batches = iter(ReplayDataset(address, "replay", 8, num_batches=2, device="cuda:1"))
    for _ in range(2):
        cuda.calls.clear()
        batch = next(batches)
        pins, moves, rest = cuda.calls[:2], cuda.calls[2:4], cuda.calls[4:]
        assert [call[0] for call in pins] == ["pin", "pin"]
        assert [call[:4] for call in moves] == [("to", "cuda:1", True, "copies to cuda:1")] * 2
        assert [call[4] for call in moves] == [call[1] for call in pins]
        assert rest[0] == ("wait", "compute", "copies to cuda:1")
        assert rest[1:] == [("record", "Current", call[5]) for call in moves]
        assert {t.data_ptr() for t in batch.data.values()} == {call[5] for call in moves}
        assert torch.equal(batch.data["obs"][:, 0], batch.data["action"] * 4.0)
        assert batch.info.key.dtype == torch.uint64
    assert next(batches, None) is None


@pytest.mark.parametrize(("options", "pins"), [({"pin_memory": True}, 2), ({"device": "cpu"}, 0)])
def test_pinning(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, options: Any, pins: int
) -> None:
    address = filled(make_server).address
    cuda = FakeCuda(monkeypatch)
    (batch,) = ReplayDataset(address, "replay", 8, num_batches=1, **options)
    assert [call[0] for call in cuda.calls].count("pin") == pins
    assert torch.equal(batch.data["obs"][:, 0], batch.data["action"] * 4.0)


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
