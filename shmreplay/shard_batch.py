"""Batches of several servers as one: keys that name the shard, infos of the whole, rows joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shmreplay import errors, limits, tree
from shmreplay.replay_sample import ReplaySample, SampleInfo

__all__ = ["KEY_DTYPE", "ShardKey", "checked_keys", "join", "keys_of", "length", "of_whole", "rows"]

KEY_DTYPE: Final = np.dtype([("shard", np.uint32), ("key", np.uint64)], align=True)
"""Keys of a `ShardedClient`: the shard's number and the key there, which is of 64 bits and says
nothing of the shard. So keys of different shards differ, and a plain integer is no such key."""


class ShardKey(NamedTuple):
    """One such key, as a tuple that a dict can be indexed by."""

    shard: int
    key: int


def checked_keys(keys: Any, n_shards: int) -> npt.NDArray[Any]:
    """Keys as an array [N] of `KEY_DTYPE`.

    Args:
        keys: Such an array, or an iterable of (shard, key).
        n_shards: How many shards there are.

    Raises:
        ArgumentTypeError: They are something else, such as the keys of a single server.
        InvalidArgumentError: They are not one-dimensional, or of a shard that is not there.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype.names != KEY_DTYPE.names:
            raise errors.ArgumentTypeError(
                f"Got keys of dtype {keys.dtype}; expected (shard, key), as in info.key of a"
                " ShardedClient's samples: a key alone does not say whose it is. Take them from"
                " there."
            )
        if keys.ndim != 1:
            raise errors.InvalidArgumentError(
                f"Got keys of shape {list(keys.shape)}; expected [N]. Flatten them with ravel()."
            )
        array = keys.astype(KEY_DTYPE, copy=False)
    else:
        array = np.array([_checked_key(key) for key in _each(keys)], KEY_DTYPE)
    if array.size and int(array["shard"].max()) >= n_shards:
        raise errors.InvalidArgumentError(
            f"Got a key of shard {int(array['shard'].max())}; there are {n_shards} shards. Take it"
            " from info.key of this client's samples."
        )
    return array


def _each(keys: Any) -> Iterable[Any]:
    if isinstance(keys, str | bytes | set | frozenset) or not isinstance(keys, Iterable):
        raise errors.ArgumentTypeError(
            f"Got the keys {keys!r:.80}; expected info.key, or a list of (shard, key). Take them"
            " from a sample."
        )
    return keys


def _checked_key(key: Any) -> tuple[int, int]:
    pair = key.item() if isinstance(key, np.void) else key
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise errors.ArgumentTypeError(
            f"Got the key {key!r}; expected (shard, key), as in info.key of a ShardedClient's"
            " samples: a key alone does not say whose it is. Take it from there."
        )
    shard = limits.checked_int("shard", pair[0])
    if not 0 <= shard < 1 << 32:
        raise errors.InvalidArgumentError(
            f"Got the key {key!r} of shard {shard}; expected numbers of 0 or more. Take them from"
            " info.key."
        )
    return shard, limits.checked_key(pair[1])


def keys_of(shard: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """Keys of one shard as such that name it."""
    array = np.empty(len(keys), KEY_DTYPE)
    array["shard"], array["key"] = shard, keys
    return array


def of_whole(info: SampleInfo, shard: int, share: float, others: int) -> SampleInfo:
    """The info of one shard's sample or batch as that of all shards together.

    Args:
        info: As the shard gave it.
        shard: Its number.
        share: The probability with which the shard was chosen.
        others: Items in the tables of the other shards.
    """
    many = isinstance(info.key, np.ndarray)
    key: Any = keys_of(shard, info.key) if many else ShardKey(shard, info.key)
    probability, size = info.probability * share, info.table_size + others
    return SampleInfo(key, probability, size, info.priority, info.times_sampled, info.inserted_ns)


def length(sample: ReplaySample) -> int:
    """Rows of a batch."""
    return len(sample.info.key)


def rows(sample: ReplaySample, part: slice) -> ReplaySample:
    """Some rows of a batch, as views."""
    info, inserted = sample.info, sample.info.inserted_ns
    some = [field[part] for field in info]
    when = None if inserted is None else inserted[part]
    return ReplaySample(_info(some, when), tree.map_structure(lambda leaf: leaf[part], sample.data))


def join(parts: Sequence[ReplaySample], out: Any, random: np.random.Generator) -> ReplaySample:
    """Makes one batch of several, whose rows it mixes; rows of one part keep their order.

    Args:
        parts: At least one.
        out: Structure of arrays [B, ...] to fill, or None.
        random: Mixes.

    Raises:
        InvalidArgumentError: The parts differ in structure, dtype or shape, or out does not fit.
    """
    if len(parts) == 1 and out is None:
        return parts[0]
    lengths = [length(part) for part in parts]
    owner = random.permutation(np.repeat(np.arange(len(parts)), lengths))
    places = [np.flatnonzero(owner == i) for i in range(len(parts))]
    flat = [tree.flatten(part.data) for part in parts]
    for part, leaves in zip(parts[1:], flat[1:], strict=True):
        _check_alike(parts[0], part, flat[0], leaves)
    wanted = [(len(owner), *leaf.shape[1:]) for leaf in flat[0]]
    arrays = [np.empty(shape, a.dtype) for shape, a in zip(wanted, flat[0], strict=True)]
    if out is not None:
        arrays = _checked_out(out, parts[0].data, arrays)
    for place, leaves in zip(places, flat, strict=True):
        for array, leaf in zip(arrays, leaves, strict=True):
            array[place] = leaf
    info = _joined_info([part.info for part in parts], places, len(owner))
    return ReplaySample(info, tree.unflatten_as(parts[0].data, arrays))


def _joined_info(
    infos: Sequence[SampleInfo], places: Sequence[npt.NDArray[Any]], n: int
) -> SampleInfo:
    def joined(fields: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        array = np.empty(n, fields[0].dtype)
        for place, field in zip(places, fields, strict=True):
            array[place] = field
        return array

    times = [info.inserted_ns for info in infos]
    known = all(time is not None for time in times)
    fields = [joined(each) for each in zip(*infos, strict=True)]
    return _info(fields, joined(times) if known else None)


def _info(fields: Sequence[Any], inserted_ns: Any) -> SampleInfo:
    key, probability, table_size, priority, times_sampled = fields
    return SampleInfo(key, probability, table_size, priority, times_sampled, inserted_ns)


def _check_alike(first: ReplaySample, part: ReplaySample, expected: Any, leaves: Any) -> None:
    try:
        tree.assert_same_structure(first.data, part.data)
    except errors.InvalidArgumentError as error:
        raise errors.InvalidArgumentError(
            f"Got items of the shards that differ in structure; expected one kind. Use"
            f" ShardedClient.sample, or give each kind a table of its own. {error}"
        ) from None
    for one, other in zip(expected, leaves, strict=True):
        if one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
            raise errors.InvalidArgumentError(
                "the items that the shards gave cannot be stacked, as one kind is expected: a"
                f" column is {one.dtype}{list(one.shape[1:])} on one and {other.dtype}"
                f"{list(other.shape[1:])} on another; use ShardedClient.sample"
            )


def _checked_out(out: Any, data: Any, arrays: Sequence[npt.NDArray[Any]]) -> list[Any]:
    try:
        tree.assert_same_structure(data, out)
    except errors.InvalidArgumentError as error:
        raise errors.InvalidArgumentError(
            f"out must have the structure that the items were created with. Make it like a batch"
            f" that sample_batch gave. {error}"
        ) from None
    given = []
    for (path, array), like in zip(tree.flatten_with_path(out), arrays, strict=True):
        fits = isinstance(array, np.ndarray) and array.flags.writeable and array.ndim == like.ndim
        fits = fits and array.dtype == like.dtype and array.shape[1:] == like.shape[1:]
        if not fits or len(array) < len(like):
            got = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else repr(array)
            raise errors.InvalidArgumentError(
                f"out at {path} is {got:.80}; expected a writable array"
                f" {like.dtype}{list(like.shape)}. Make it with np.empty."
            )
        given.append(array[: len(like)])
    return given
