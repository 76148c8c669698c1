"""The structure of a writer's history: the union of the structures of all its steps."""

from __future__ import annotations

from typing import Any

from shmreplay import errors, tree

__all__ = ["HistoryLeaf", "merged", "paths_of"]


class HistoryLeaf:
    """A leaf of the history's structure: where it stands, and whether it has had a value."""

    def __init__(self, path: tuple[Any, ...], has_value: bool) -> None:
        """Of one leaf."""
        self.path = path
        self.has_value = has_value


def paths_of(data: Any) -> Any:
    """Returns the structure of a step, its leaves as `HistoryLeaf`."""
    return tree.map_structure_with_path(
        lambda path, leaf: HistoryLeaf(path, leaf is not None), data
    )


def merged(old: Any, new: Any, path: tuple[Any, ...]) -> Any:
    """Union of two structures: dicts by key, sequences by the longer one.

    Where they are of different kinds, the one that has had values stays.

    Raises:
        SignatureError: Both have: their columns could not all be reached.
    """
    if old is None:
        return new
    if isinstance(old, dict) and isinstance(new, dict):
        both = dict(old)
        for key, value in new.items():
            both[key] = merged(both.get(key), value, (*path, key))
        return both
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        shared = [merged(o, n, (*path, i)) for i, (o, n) in enumerate(zip(old, new, strict=False))]
        tail = list(old[len(shared) :]) + list(new[len(shared) :])
        longer = old if len(old) >= len(new) else new
        if hasattr(longer, "_fields"):
            return type(longer)(*shared, *tail)
        return type(longer)([*shared, *tail])
    if not any(leaf.has_value for leaf in tree.flatten(old)):
        return new
    both_leaves = isinstance(old, HistoryLeaf) and isinstance(new, HistoryLeaf)
    if both_leaves or not any(leaf.has_value for leaf in tree.flatten(new)):
        return old
    raise errors.SignatureError(
        f"the data at {path} was {_kind(old)} before and is {_kind(new)} now. Expected is what it "
        "was before. Use another name for the new structure."
    )


def _kind(node: Any) -> str:
    return "a value" if isinstance(node, HistoryLeaf) else f"a {type(node).__name__}"
