"""Episodes between tables and Minari datasets.

An episode of T steps is an item as `EpisodeItemWriter` writes it: `observation` [T + 1, ...],
`action`, `reward`, `terminated` and `truncated` [T, ...], and maybe `extras` [T, ...], a dict.
Values and dtypes cross unchanged, both ways.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
from minari.dataset.minari_dataset import parse_dataset_id
from minari.storage.datasets_root_dir import get_dataset_path

from shmreplay import errors, tree
from shmreplay.client import Client
from shmreplay.integrations.episode_writers import EpisodeItemWriter, EpisodeWriter

__all__ = ["export_table", "import_dataset"]

_CHUNK = 64  # episodes that are asked for at once
_FIELDS = ("observation", "action", "reward", "terminated", "truncated")


def export_table(
    client: Client,
    table: str,
    dataset_id: str,
    *,
    limit: int | None = None,
    env: Any = None,
    **about: Any,
) -> Any:
    """Writes the episodes of a table to a new Minari dataset, in the order of their insertion.

    Others go on using the table; episodes that it loses meanwhile may be left out. All of them are
    in memory at once.

    Args:
        client: A client.
        table: Name of the table. Lists in its items become tuples.
        dataset_id: `(NAMESPACE/)NAME-vNUMBER`, not there yet.
        limit: Episodes at most, those first that were inserted first; None: all.
        env: A Gymnasium environment, or its id, to be recorded with the dataset, which then has its
            spaces. None: spaces are made of the dtypes and shapes.
        **about: More for `minari.create_dataset_from_buffers`, such as `author` and `description`.

    Returns:
        The `minari.MinariDataset`. Of an item's `extras` it has `infos`.

    Raises:
        TableNotFoundError: There is no such table.
        InvalidArgumentError: The table is empty, or an item is not such an episode; or Minari
            refuses the id or the environment. No dataset was made.
    """
    buffers = []
    spaces: dict[str, Any] = {}
    for number, item in enumerate(_items(client, table, limit)):
        episode = _checked(item, number, table)
        made = {name: _space_of(episode[name], name) for name in ("observation", "action")}
        if spaces and made != spaces:
            raise errors.InvalidArgumentError(
                f"got episode {number} of table {table!r} with {made}; expected all to be like the"
                f" first, with {spaces}. A dataset has one kind of observations and"
                " actions: write others to a table of their own"
            )
        spaces = made
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                observations=episode["observation"],
                actions=episode["action"],
                rewards=episode["reward"],
                terminations=episode["terminated"],
                truncations=episode["truncated"],
                infos=episode.get("extras"),
            )
        )
    if not buffers:
        raise errors.InvalidArgumentError(
            f"got table {table!r}, which has no items; expected episodes. Write them with"
            " EpisodeItemWriter"
        )
    if env is None:
        about |= {"observation_space": spaces["observation"], "action_space": spaces["action"]}
    return _create(dataset_id, buffers, {"env": env, **about})


def _create(dataset_id: str, buffers: list[Any], about: dict[str, Any]) -> Any:
    made: Path | None = None
    try:
        parse_dataset_id(dataset_id)  # before anything is made by that name
        path = Path(get_dataset_path(dataset_id))
        if not path.exists():
            made = path
        # JPEG would change the values of images.
        return minari.create_dataset_from_buffers(dataset_id, buffers, jpeg_encoding=False, **about)
    except BaseException as error:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)  # what there is of it, if anything
        if isinstance(error, ValueError | TypeError | gymnasium.error.Error):
            raise errors.InvalidArgumentError(
                f"got dataset_id {dataset_id!r} and {about}; Minari refuses: {error}"
            ) from error
        raise


def _items(client: Client, table: str, limit: int | None) -> Iterator[Any]:
    keys = client.keys(table)[:limit]
    for start in range(0, len(keys), _CHUNK):
        for sample in client.fetch(table, keys[start : start + _CHUNK]):
            yield sample.data


def _checked(item: Any, number: int, table: str) -> dict[str, Any]:
    """The item, if it is an episode, with tuples for lists.

    Raises:
        InvalidArgumentError: It is none.
    """
    where = f"item {number} of table {table!r}"
    if not isinstance(item, dict) or not set(_FIELDS) <= item.keys() <= {*_FIELDS, "extras"}:
        have = sorted(map(str, item)) if isinstance(item, dict) else type(item).__name__
        raise errors.InvalidArgumentError(
            f"got {where} with {have}; expected an episode: a dict of {list(_FIELDS)}, and maybe"
            " 'extras'. Write it with EpisodeItemWriter"
        )
    if not isinstance(item.get("extras", {}), dict):
        raise errors.InvalidArgumentError(
            f"got {where} with extras of type {type(item['extras']).__name__}; expected a dict,"
            " which Minari calls infos. Give each of them a name"
        )
    steps = len(item["reward"]) if np.ndim(item["reward"]) == 1 else -1
    for path, leaf in tree.flatten_with_path(item):
        wanted = steps + (path[0] == "observation")
        if steps < 1 or np.ndim(leaf) < 1 or len(leaf) != wanted:
            raise errors.InvalidArgumentError(
                f"got {where} with an array of shape {list(np.shape(leaf))} at {path!r} and rewards"
                f" of shape {list(np.shape(item['reward']))}; expected an episode of T steps with"
                " rewards [T], observations [T + 1, ...] and all else [T, ...]. Write it"
                " with EpisodeItemWriter"
            )
        for key in path:
            if isinstance(key, str) and ("/" in key or not key):
                raise errors.InvalidArgumentError(
                    f"got {where} with the name {key!r}; expected names that are not empty and"
                    " have no '/', which Minari's files keep for themselves. Rename it"
                )
    checked: dict[str, Any] = _with_tuples(item)
    return checked


def _with_tuples(node: Any) -> Any:
    if isinstance(node, dict):
        return {str(name): _with_tuples(part) for name, part in node.items()}
    if isinstance(node, list | tuple):
        return tuple(map(_with_tuples, node))
    return node


def _space_of(node: Any, name: str) -> Any:
    """A space that has all values of these dtypes and shapes."""
    if isinstance(node, dict):
        return gymnasium.spaces.Dict({k: _space_of(v, f"{name}/{k}") for k, v in node.items()})
    if isinstance(node, tuple):
        return gymnasium.spaces.Tuple([_space_of(v, name) for v in node])
    dtype, shape = node.dtype, node.shape[1:]
    match dtype.kind:
        case "f":
            low, high = -np.inf, np.inf
        case "b":
            low, high = 0, 1
        case "i" | "u":
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        case _:
            raise errors.InvalidArgumentError(
                f"got {name} of dtype {dtype}; expected numbers that are not complex: Gymnasium has"
                " no space for these. Convert them, or leave them out"
            )
    return gymnasium.spaces.Box(low, high, shape, dtype)


def import_dataset(
    client: Client,
    table: str,
    dataset: Any,
    *,
    limit: int | None = None,
    writer: EpisodeWriter | None = None,
) -> int:
    """Inserts the episodes of a Minari dataset into a table, in their order.

    Args:
        client: A client.
        table: Name of the table.
        dataset: A `minari.MinariDataset`, or the id of one that is on this machine.
        limit: Episodes at most; None: all.
        writer: Writes the episodes as other items, for instance as transitions with
            `NStepWriter(client, table)`. Stays open. None: each is an item.

    Returns:
        The number of episodes.

    Raises:
        TableNotFoundError: There is no such table.
        InvalidArgumentError: There is no such dataset.
        ArgumentTypeError: It has values that a table cannot hold, such as texts.
        SignatureError: The table is for other data.
        ArenaFullError: No memory. Episodes before are inserted, here and above.
    """
    if isinstance(dataset, str):
        dataset = _load(dataset)
    if table not in client.server_info():
        raise errors.TableNotFoundError(
            f"got table {table!r}; expected one that the server has. Choose one of"
            f" {sorted(client.server_info())}"
        )
    indices = dataset.episode_indices[:limit]
    steps = [int(each["total_steps"]) for each in dataset.storage.get_episode_metadata(indices)]
    own: EpisodeItemWriter | None = None
    try:
        for episode in dataset.iterate_episodes(indices):
            if writer is None and own is None:
                dtype = np.asarray(episode.rewards).dtype
                own = EpisodeItemWriter(client, table, max_steps=max(steps), reward_dtype=dtype)
            target: Any = own if writer is None else writer
            _replay(episode, target)
    finally:
        if own is not None:
            own.close()
    return len(indices)


def _load(dataset_id: str) -> Any:
    try:
        return minari.load_dataset(dataset_id)
    except (ValueError, FileNotFoundError) as error:
        raise errors.InvalidArgumentError(
            f"got dataset id {dataset_id!r}; expected one that is on this machine:"
            f" {sorted(minari.list_local_datasets())}. `minari download ID` brings others: {error}"
        ) from error


def _replay(episode: Any, writer: EpisodeWriter) -> None:
    """Makes a writer's calls for an episode."""
    steps = len(episode.rewards)
    extras = _extras_of(episode.infos, steps)
    writer.begin(_row(episode.observations, 0))
    for t in range(steps):
        writer.step(
            _row(episode.actions, t),
            episode.rewards[t],
            _row(episode.observations, t + 1),
            episode.terminations[t],
            episode.truncations[t],
            None if extras is None else _row(extras, t),
        )
    writer.cut()  # where the dataset does not say that the episode has ended


def _extras_of(infos: Any, steps: int) -> Any:
    """Infos that have a value for each step. Those of environments have one for the reset too."""
    if not isinstance(infos, Mapping) or not infos:
        return None
    fits = all(np.ndim(leaf) > 0 and len(leaf) == steps for leaf in tree.flatten(infos))
    return infos if fits else None


def _row(batch: Any, t: int) -> Any:
    return tree.map_structure(lambda array: array[t], batch)
