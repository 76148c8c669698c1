"""Batches of a table as JAX arrays.

    for batch in batches(client, "replay", batch_size=256):
        params = update(params, batch.data)    # a pytree of jax.Array

Batches are gathered into memory on 64-byte boundaries, which JAX on the CPU takes as it is, without
a copy. A batch's memory is used again only when the last array on it is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from shmreplay import errors, tree
from shmreplay.client import Client
from shmreplay.replay_sample import ReplaySample

__all__ = ["as_jax", "batches"]


def as_jax(structure: Any, device: Any = None) -> Any:
    """The structure with a JAX array for each array.

    JAX arrays do not change, so nobody may write into the numpy arrays any more.

    Args:
        structure: Nested structure of numpy arrays, as in the `data` of a batch: a pytree.
        device: A `jax.Device` or sharding to move the data to; None: JAX's default device.

    Returns:
        The same structure. On the CPU the arrays share the memory of those given, where these lie
        on 64-byte boundaries as those of a batch do. 64-bit dtypes are copied to 32-bit ones unless
        `jax_enable_x64` is set, as everywhere in JAX.

    Raises:
        ArgumentTypeError: A leaf is no array, or has a dtype that JAX lacks.
    """

    def convert(path: tree.Path, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            raise errors.ArgumentTypeError(
                f"got {type(array).__name__} at {path!r}; expected a numpy array. Use np.asarray"
            )
        try:
            return _as_array(array, device)
        except (TypeError, BufferError) as error:
            raise errors.ArgumentTypeError(
                f"got data of dtype {array.dtype} at {path!r}; expected one that JAX has. Convert"
                f" it with .astype before it is appended: {error}"
            ) from None

    return tree.map_structure_with_path(convert, structure)


def _as_array(array: np.ndarray[Any, Any], device: Any) -> Any:
    if device is None and jax.default_backend() == "cpu" and array.flags.writeable:
        return jax.dlpack.from_dlpack(array)
    # To another device; and numpy hands out nothing that is read-only, while JAX keeps that alive.
    return jax.device_put(array, device)


def batches(
    client: Client | str,
    table: str,
    batch_size: int,
    *,
    prefetch: int = 2,
    timeout: float | None = None,
    device: Any = None,
) -> Iterator[ReplaySample]:
    """Yields batches of a table, gathered ahead by a thread.

    Args:
        client: A client, or the address of a server: see `Client`.
        table: Name of the table.
        batch_size: Items in a batch, B.
        prefetch: Batches that are gathered ahead; 0: none.
        timeout: Seconds to wait for a batch; None: for ever.
        device: See `as_jax`.

    Yields:
        ReplaySample whose `data` is a pytree of JAX arrays [B, ...] in the structure of the items.
        `info` stays as it is, arrays of numpy: JAX would cut keys down to 32 bits.

    Raises:
        TableNotFoundError: There is no such table.
        DeadlineExceededError: No batch within the timeout.
        ServerClosedError: The server was stopped.
        ArgumentTypeError: The items have a dtype that JAX lacks.
    """
    own = Client(client) if isinstance(client, str) else None
    source: Any = client if own is None else own
    try:
        with source.sampler(table, batch_size, prefetch, timeout) as drawn:
            for batch in drawn:
                yield ReplaySample(batch.info, as_jax(batch.data, device))
    finally:
        if own is not None:
            own.close()
