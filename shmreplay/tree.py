"""Nested structures: dicts, lists, tuples and namedtuples with leaves of any other type.

The rules are dm-tree's: a dict is walked in the order of its sorted keys, ``None`` is a leaf, an
empty container has no leaves, and the path of a leaf holds dict keys, list and tuple indices and
the field names of namedtuples. A structure's JSON form keeps containers, keys (str and int), and
the names and fields of namedtuples; code is never stored.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from shmreplay.errors import ArgumentTypeError, InvalidArgumentError
from shmreplay.limits import MAX_NESTING

__all__ = [
    "Path",
    "assert_same_structure",
    "flatten",
    "flatten_with_path",
    "is_nested",
    "keys_of_flat_dict",
    "map_structure",
    "map_structure_with_path",
    "structure_from_json",
    "structure_to_json",
    "unflatten_as",
]

Path: TypeAlias = tuple[Any, ...]

# Answers for the usual leaves without the abstract base class checks, which cost more than the rest
# of a walk. A type that is not here is a leaf all the same when no container rule fits it.
_LEAF_TYPES = frozenset(
    {
        np.ndarray,
        *(np.dtype(code).type for code in "?bhilqBHILQefdFD"),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
    }
)

# Namedtuple classes whose structures were described by this process, by name and fields, so that
# what comes back is of the caller's own class wherever that class is still alive.
_KNOWN_NAMEDTUPLES: weakref.WeakValueDictionary[tuple[str, tuple[str, ...]], type] = (
    weakref.WeakValueDictionary()
)


def is_nested(node: Any) -> bool:
    """Returns whether ``node`` is a container (empty ones included) rather than a leaf."""
    if type(node) in _LEAF_TYPES:
        return False
    return isinstance(node, (list, tuple, Mapping))


def _is_namedtuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _sorted_keys(node: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(node)
    except TypeError as error:
        kinds = sorted({type(key).__name__ for key in node})
        raise ArgumentTypeError(
            f"Got a dict whose keys cannot be sorted (types {', '.join(kinds)}); expected keys of"
            " one type, so that the order of the leaves is defined. Use str keys throughout."
        ) from error


def _values(node: Any) -> Sequence[Any] | None:
    """Returns the children of a container in walking order, or None for a leaf."""
    kind = type(node)
    if kind in _LEAF_TYPES:
        return None
    if kind is dict or isinstance(node, Mapping):
        return [node[key] for key in _sorted_keys(node)]
    if isinstance(node, (list, tuple)):
        return node
    return None


def _items(node: Any) -> list[tuple[Any, Any]] | None:
    """Returns (path element, child) pairs of a container in walking order, or None for a leaf."""
    if not is_nested(node):
        return None
    if isinstance(node, Mapping):
        return [(key, node[key]) for key in _sorted_keys(node)]
    if _is_namedtuple(node):
        return list(zip(node._fields, node, strict=True))
    return list(enumerate(node))


def _rebuild(node: Any, values: list[Any]) -> Any:
    """Makes a container like ``node`` of ``values``, which are in walking order.

    Subclasses of dict, list and tuple other than those of the standard library become plain ones:
    what their constructors take is not known.
    """
    if isinstance(node, Mapping):
        by_key = dict(zip(_sorted_keys(node), values, strict=True))
        pairs = ((key, by_key[key]) for key in node)
        if isinstance(node, collections.OrderedDict):
            return collections.OrderedDict(pairs)
        if isinstance(node, collections.defaultdict):
            return collections.defaultdict(node.default_factory, pairs)
        return dict(pairs)
    if _is_namedtuple(node):
        return type(node)._make(values)
    return values if isinstance(node, list) else tuple(values)


def _check_depth(depth: int) -> None:
    if depth >= MAX_NESTING:
        raise InvalidArgumentError(
            f"Got a structure of more than {MAX_NESTING} containers within each other; expected at"
            f" most {MAX_NESTING}. Flatten it, and make sure that it does not contain itself."
        )


def flatten(structure: Any) -> list[Any]:
    """Returns the leaves of ``structure`` in walking order; a leaf alone gives a list of one.

    Raises:
        InvalidArgumentError: It is nested deeper than ``limits.MAX_NESTING``.
        ArgumentTypeError: A dict has keys that cannot be sorted.
    """
    flat: list[Any] = []
    _flatten_into(structure, flat, 0)
    return flat


def _flatten_into(node: Any, flat: list[Any], depth: int) -> None:
    values = _values(node)
    if values is None:
        flat.append(node)
        return
    _check_depth(depth)
    for value in values:
        if type(value) in _LEAF_TYPES:
            flat.append(value)
        else:
            _flatten_into(value, flat, depth + 1)


def flatten_with_path(structure: Any) -> list[tuple[Path, Any]]:
    """Returns (path, leaf) for every leaf of ``structure``, in the order of ``flatten``.

    A path is a tuple of dict keys, indices and field names; it is ``()`` for a leaf alone.

    Raises:
        InvalidArgumentError: It is nested deeper than ``limits.MAX_NESTING``.
        ArgumentTypeError: A dict has keys that cannot be sorted.
    """
    flat: list[tuple[Path, Any]] = []
    _flatten_with_path_into(structure, (), flat)
    return flat


# A function, not a closure that calls itself: that would be a circle of references, and keep the
# leaves alive until the garbage collector comes by. The same below.
def _flatten_with_path_into(node: Any, path: Path, flat: list[tuple[Path, Any]]) -> None:
    items = _items(node)
    if items is None:
        flat.append((path, node))
        return
    _check_depth(len(path))
    for key, child in items:
        _flatten_with_path_into(child, (*path, key), flat)


def unflatten_as(structure: Any, flat: Iterable[Any]) -> Any:
    """Packs the leaves ``flat`` into containers like those of ``structure``.

    Args:
        structure: Any structure; its own leaves are not used.
        flat: As many leaves as ``structure`` has, in the order of ``flatten``. They are taken as
            they are, so a leaf may itself be a container.

    Raises:
        InvalidArgumentError: The number of leaves differs, or the nesting is too deep.
    """
    leaves = list(flat)
    wanted = len(flatten(structure))
    if len(leaves) != wanted:
        raise InvalidArgumentError(
            f"Got {len(leaves)} leaves for a structure that has {wanted}. Expected is one"
            " for each leaf: give them in the order of flatten()."
        )
    return _unflatten_from(structure, iter(leaves))


def keys_of_flat_dict(structure: Any) -> list[Any] | None:
    """Returns the keys of a dict of leaves in walking order, or None if it is something else.

    For who packs leaves again and again: ``dict(zip(keys, leaves))`` is `unflatten_as`, quickly.
    """
    if type(structure) is not dict or any(map(is_nested, structure.values())):
        return None
    return _sorted_keys(structure)


def _unflatten_from(node: Any, remaining: Iterator[Any]) -> Any:
    values = _values(node)
    if values is None:
        return next(remaining)
    return _rebuild(node, [_unflatten_from(value, remaining) for value in values])


def assert_same_structure(first: Any, second: Any) -> None:
    """Checks that two structures have the same containers; their leaves may differ.

    Dicts of any class are alike, and so are lists of any class; a list and a tuple are not, nor
    are namedtuples of different fields.

    Raises:
        InvalidArgumentError: They differ; the message has the path of the first difference.
    """

    def label(node: Any) -> str:
        if not is_nested(node):
            return f"a leaf ({type(node).__name__})"
        if isinstance(node, Mapping):
            return f"a dict with keys {_sorted_keys(node)!r}"
        if _is_namedtuple(node):
            return f"a namedtuple with fields {list(node._fields)!r}"
        return f"a {'list' if isinstance(node, list) else 'tuple'} of {len(node)}"

    def walk(one: Any, two: Any, path: Path) -> None:
        items_one, items_two = _items(one), _items(two)
        if items_one is None and items_two is None:
            return
        if items_one is None or items_two is None or label(one) != label(two):
            raise InvalidArgumentError(
                f"Got structures that differ at {path!r}: {label(one)} in the first but"
                f" {label(two)} in the second; expected one. Give both the same containers, "
                "lengths and keys."
            )
        _check_depth(len(path))
        for (key, child_one), (_, child_two) in zip(items_one, items_two, strict=True):
            walk(child_one, child_two, (*path, key))

    walk(first, second, ())


def map_structure(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Returns a structure like the first, of ``function`` applied to the leaves of all of them.

    Raises:
        InvalidArgumentError: The structures differ, or the nesting is too deep.
    """
    for other in others:
        assert_same_structure(structure, other)
    columns = [flatten(each) for each in (structure, *others)]
    results = [function(*leaves) for leaves in zip(*columns, strict=True)]
    return unflatten_as(structure, results)


def map_structure_with_path(
    function: Callable[[Path, Any], Any], structure: Any, prefix: Path = ()
) -> Any:
    """Returns a structure like ``structure`` of the results of ``function(path, leaf)``.

    Args:
        function: Called once a leaf, in walking order. It may return a container.
        structure: Any structure.
        prefix: Stands before every path and counts as nesting.

    Raises:
        InvalidArgumentError: The nesting, with that of ``prefix``, is too deep.
    """
    return _map_with_path(function, structure, prefix)


def _map_with_path(function: Callable[[Path, Any], Any], node: Any, path: Path) -> Any:
    items = _items(node)
    if items is None:
        return function(path, node)
    _check_depth(len(path))
    return _rebuild(node, [_map_with_path(function, child, (*path, key)) for key, child in items])


# --- JSON ---------------------------------------------------------------------------------------
#
# A node is a list whose first element says what it is:
#   ["leaf", X]   ["dict", [[key, node], ...]]   ["list", [node, ...]]   ["tuple", [node, ...]]
#   ["namedtuple", name, [field, ...], [node, ...]]
# Dicts are lists of pairs because the keys of a JSON object are always strings.


def structure_to_json(structure: Any, leaf_to_json: Callable[[Any], Any]) -> Any:
    """Describes ``structure`` by lists, strings, numbers and what ``leaf_to_json`` returns.

    The result goes through ``json.dumps`` whenever the results of ``leaf_to_json`` do. Dicts are
    described with sorted keys, so equal structures have equal descriptions.

    Args:
        structure: Any structure whose dicts have str or int keys.
        leaf_to_json: Called once a leaf, in walking order.

    Raises:
        ArgumentTypeError: A dict key is neither str nor int.
        InvalidArgumentError: The nesting is too deep.
    """

    def describe(node: Any, path: Path) -> Any:
        items = _items(node)
        if items is None:
            return ["leaf", leaf_to_json(node)]
        _check_depth(len(path))
        if isinstance(node, Mapping):
            keys = [_json_key(key, path) for key, _ in items]
            children = [describe(child, (*path, key)) for key, child in items]
            return ["dict", [[key, child] for key, child in zip(keys, children, strict=True)]]
        children = [describe(child, (*path, key)) for key, child in items]
        if _is_namedtuple(node):
            cls = type(node)
            _KNOWN_NAMEDTUPLES[(cls.__name__, tuple(node._fields))] = cls
            return ["namedtuple", cls.__name__, list(node._fields), children]
        return ["list" if isinstance(node, list) else "tuple", children]

    return describe(structure, ())


def _json_key(key: Any, path: Path) -> str | int:
    # bool is an int, but True would come back as 1.
    if isinstance(key, str):
        return str(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return int(key)
    raise ArgumentTypeError(
        f"Got the dict key {key!r} of type {type(key).__name__} at {path!r}; expected str or int."
        " Rename the key."
    )


def structure_from_json(value: Any, leaf_from_json: Callable[[Any], Any]) -> Any:
    """Rebuilds the structure that ``structure_to_json`` described.

    A namedtuple comes back as the class of that name and those fields that this process described
    last; where there is none, as a class made from the name and the fields (always the same one).

    Args:
        value: What ``structure_to_json`` returned, usually after a way through JSON text. It is
            not trusted.
        leaf_from_json: Called once a leaf, in walking order.

    Raises:
        InvalidArgumentError: It is not such a description.
    """

    def build(node: Any, depth: int) -> Any:
        match node:
            case ["leaf", leaf]:
                return leaf_from_json(leaf)
            case ["dict", list(pairs)]:
                _check_depth(depth)
                return _dict_from_json(pairs, lambda child: build(child, depth + 1))
            case ["list", list(children)]:
                _check_depth(depth)
                return [build(child, depth + 1) for child in children]
            case ["tuple", list(children)]:
                _check_depth(depth)
                return tuple(build(child, depth + 1) for child in children)
            case ["namedtuple", str(name), list(fields), list(children)]:
                _check_depth(depth)
                cls = _namedtuple_class(name, fields, len(children))
                return cls._make(build(child, depth + 1) for child in children)
        raise _malformed(f"a node {_shortened(node)}")

    return build(value, 0)


def _dict_from_json(pairs: list[Any], build: Callable[[Any], Any]) -> dict[str | int, Any]:
    result: dict[str | int, Any] = {}
    for pair in pairs:
        match pair:
            case [str() | int() as key, child] if not isinstance(key, bool) and key not in result:
                result[key] = build(child)
            case _:
                raise _malformed(f"a dict entry {_shortened(pair)}")
    return result


def _namedtuple_class(name: str, fields: list[Any], num_children: int) -> Any:
    if len(fields) != num_children or not all(isinstance(field, str) for field in fields):
        raise _malformed(f"namedtuple fields {_shortened(fields)}")
    key = (name, tuple(fields))
    return _KNOWN_NAMEDTUPLES.get(key) or _made_namedtuple(*key)


@functools.lru_cache(maxsize=256)
def _made_namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    # collections.namedtuple lets only identifiers pass, so no text from outside is ever run.
    try:
        return collections.namedtuple(name, fields)
    except ValueError as error:
        raise _malformed(f"the namedtuple {_shortened([name, *fields])}") from error


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _malformed(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Got a description of a structure with {what}; expected what structure_to_json() returns."
        " It was damaged, or written by another version: write it anew."
    )
