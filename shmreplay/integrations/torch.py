"""Batches of a table as PyTorch tensors, alone or through a `DataLoader`.

    dataset = ReplayDataset(server.address, "replay", batch_size=256, device="cuda")
    for batch in dataset:                      # ReplaySample: info and data of tensors
        loss = learn(batch.data["obs"], batch.data["action"])

A CPU tensor shares its memory with the array that the batch was gathered into: no second copy. That
memory is the batch's own; it is used again only when the last tensor on it is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shmreplay import errors, limits, tree
from shmreplay.client import Client, checked_batch_size
from shmreplay.replay_sample import ReplaySample, SampleInfo

__all__ = ["ReplayDataset", "as_tensors", "sample_as_tensors"]


def as_tensors(structure: Any) -> Any:
    """The structure with a tensor for each array, on the same memory.

    Args:
        structure: Nested structure of writable numpy arrays, as in the `data` of a batch.

    Raises:
        ArgumentTypeError: A leaf is no array, is read-only, or has a dtype that this PyTorch lacks.
            PyTorch before 2.3 lacks uint16, uint32 and uint64.
    """
    return tree.map_structure_with_path(_as_tensor, structure)


def _as_tensor(path: tree.Path, array: Any) -> torch.Tensor:
    if not isinstance(array, np.ndarray):
        raise errors.ArgumentTypeError(
            f"got {type(array).__name__} at {path!r}; expected a numpy array. Use np.asarray"
        )
    if not array.flags.writeable:
        raise errors.ArgumentTypeError(
            f"got a read-only array at {path!r}; expected a writable one, since a tensor cannot be"
            " read-only. Copy what was borrowed, or use Client.sample_batch"
        )
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise errors.ArgumentTypeError(
            f"got data of dtype {array.dtype} at {path!r}; expected a dtype that PyTorch"
            f" {torch.__version__} has. Convert it with .astype before it is appended, or take a"
            f" newer PyTorch: {error}"
        ) from None


def sample_as_tensors(batch: ReplaySample) -> ReplaySample:
    """A batch from `Client.sample_batch` or `Client.sampler` with tensors on the same memory.

    Returns:
        ReplaySample whose `info` has tensors (key uint64[B], probability float64[B], table_size
        int64[B], priority float64[B], times_sampled int32[B]) and whose `data` has them in the
        structure of the items.

    Raises:
        ArgumentTypeError: See `as_tensors`.
    """
    info = SampleInfo(*as_tensors(list(batch.info)))
    info.inserted_ns = batch.info.inserted_ns
    return ReplaySample(info, as_tensors(batch.data))


class ReplayDataset(IterableDataset):  # type: ignore[misc]
    """Iterable of batches of a table, each a `ReplaySample` of tensors.

    Use it directly, or as `DataLoader(dataset, batch_size=None, num_workers=n)`: the batches are
    made by the table. Each worker attaches to the table by itself, whether it was forked or
    spawned, and draws from a random stream of its own. (A DataLoader makes namedtuples anew, so
    behind it `info.age()` is None.)

    `client.update_priorities(table, batch.info.key, priorities)` takes the tensors of a batch.

    Where items leave the table when they are sampled, batches that were drawn ahead and not taken
    come first in the next iteration of the same process, but those that a DataLoader's workers hold
    when it ends are lost.
    """

    def __init__(
        self,
        client: Client | str,
        table: str,
        batch_size: int,
        *,
        prefetch: int = 2,
        timeout: float | None = None,
        num_batches: int | None = None,
        pin_memory: bool = False,
        device: Any = None,
    ) -> None:
        """Does not connect before it is iterated.

        Args:
            client: A client, or the address of a server: see `Client`.
            table: Name of the table.
            batch_size: Items in a batch, B.
            prefetch: Batches that a thread gathers ahead; 0: none, each is drawn when asked for.
            timeout: Seconds to wait for a batch; None: for ever.
            num_batches: Batches of an iteration, over all workers; None: it does not end.
            pin_memory: Give tensors in page-locked memory. Of no effect where PyTorch finds no
                accelerator. Not within a DataLoader's workers: it has an argument for that.
            device: Where the data goes to; None: stays on the CPU. To a CUDA device it goes on a
                stream of its own, beside what the device computes. `info` stays on the CPU. Not
                within a DataLoader's workers.

        Raises:
            InvalidArgumentError: A number is out of range.
            ArgumentTypeError: An argument is of the wrong type.
        """
        super().__init__()
        self._client = Client(client) if isinstance(client, str) else client
        self._table = table
        self._batch_size = checked_batch_size(batch_size)
        self._prefetch = limits.checked_int("prefetch", prefetch)
        self._timeout = limits.checked_timeout(timeout)
        self._num_batches = num_batches
        if num_batches is not None and limits.checked_int("num_batches", num_batches) < 0:
            raise errors.InvalidArgumentError(
                f"num_batches must be at least 0, or None, got {num_batches}"
            )
        self._pin_memory = bool(pin_memory)
        self._device = None if device is None else torch.device(device)

    def __iter__(self) -> Iterator[ReplaySample]:
        """Yields batches.

        Raises:
            TableNotFoundError: There is no such table.
            DeadlineExceededError: No batch within the timeout.
            ServerClosedError: The server was stopped.
            ArgumentTypeError: The items have a dtype that this PyTorch lacks.
            InvalidArgumentError: The items differ in structure or length and cannot be stacked; or
                pin_memory or a device was asked for within a worker of a DataLoader.
        """
        left = self._share_of_this_worker()
        if left == 0:
            return
        mover = None if self._device is None else _Mover(self._device)
        # What goes to a CUDA device must be in page-locked memory, or the copy is waited for.
        to_cuda = self._device is not None and self._device.type == "cuda"
        pin = (self._pin_memory or to_cuda) and _has_accelerator()
        with self._client.sampler(
            self._table, self._batch_size, self._prefetch, self._timeout
        ) as batches:
            for batch in batches:
                sample = sample_as_tensors(batch)
                if pin:
                    sample = ReplaySample(sample.info, _pinned(sample.data))
                if mover is not None:
                    sample = ReplaySample(sample.info, mover.move(sample.data))
                yield sample
                if left is not None:
                    left -= 1
                    if left == 0:
                        return

    def _share_of_this_worker(self) -> int | None:
        worker = get_worker_info()
        if worker is None:
            return self._num_batches
        if self._pin_memory or (self._device is not None and self._device.type != "cpu"):
            raise errors.InvalidArgumentError(
                f"got pin_memory={self._pin_memory}, device={self._device} within a worker of a"
                " DataLoader; expected neither, since its batches cross to another process. Give"
                " pin_memory to the DataLoader, and move batches where they are used; or iterate"
                " the dataset without a DataLoader"
            )
        if self._num_batches is None:
            return None
        share, rest = divmod(self._num_batches, int(worker.num_workers))
        return share + int(worker.id < rest)


class _Mover:
    """Moves batches to a device; to a CUDA device without holding up what it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def move(self, data: Any) -> Any:
        if self._stream is None:
            return tree.map_structure(lambda tensor: tensor.to(self._device), data)
        with torch.cuda.stream(self._stream):
            moved = tree.map_structure(
                lambda tensor: tensor.to(self._device, non_blocking=True), data
            )
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in tree.flatten(moved):
            # Its memory belongs to the other stream, and must not be used again before this one
            # is done with it.
            tensor.record_stream(current)
        return moved


def _has_accelerator() -> bool:
    return bool(torch.cuda.is_available())


def _pinned(data: Any) -> Any:
    return tree.map_structure(lambda tensor: tensor.pin_memory(), data)
