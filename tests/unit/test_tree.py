"""Nested structures: order, paths, rebuilding, and their JSON form."""

from __future__ import annotations

import collections
import gc
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmreplay import tree
from shmreplay.errors import ArgumentTypeError, InvalidArgumentError
from shmreplay.limits import MAX_NESTING


class Step(NamedTuple):
    """A namedtuple whose fields are not in alphabetical order."""

    observation: Any
    action: Any


def nested(depth: int) -> Any:
    """Returns a leaf within ``depth`` lists."""
    structure: Any = 0
    for _ in range(depth):
        structure = [structure]
    return structure


leaves = st.integers() | st.none() | st.text(max_size=3) | st.floats(allow_nan=False)
structures = st.recursive(
    leaves,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), children, max_size=3)
        | st.dictionaries(st.integers(), children, max_size=3)
        | st.builds(Step, children, children)
    ),
    max_leaves=12,
)


def test_flatten_sorts_dict_keys_and_keeps_other_orders() -> None:
    structure = {"b": [1, (2, 3)], "a": Step(observation={"z": 4, "y": 5}, action=6), "c": None}
    assert tree.flatten(structure) == [5, 4, 6, 1, 2, 3, None]
    assert tree.flatten_with_path(structure) == [
        (("a", "observation", "y"), 5),
        (("a", "observation", "z"), 4),
        (("a", "action"), 6),
        (("b", 0), 1),
        (("b", 1, 0), 2),
        (("b", 1, 1), 3),
        (("c",), None),
    ]


@pytest.mark.parametrize(
    "leaf", [1, "text", b"bytes", None, np.zeros((2, 2)), np.float32(1), {1, 2}, range(3)]
)
def test_a_leaf_alone(leaf: Any) -> None:
    assert not tree.is_nested(leaf)
    (found,) = tree.flatten(leaf)
    assert found is leaf
    ((path, found),) = tree.flatten_with_path(leaf)
    assert path == ()
    assert found is leaf
    assert tree.unflatten_as(leaf, ["other"]) == "other"


@pytest.mark.parametrize("empty", [{}, [], (), {"a": []}])
def test_empty_containers_have_no_leaves(empty: Any) -> None:
    assert tree.is_nested(empty)
    assert tree.flatten(empty) == []
    assert tree.flatten_with_path(empty) == []
    assert tree.unflatten_as(empty, []) == empty


def test_unflatten_keeps_classes_and_dict_order() -> None:
    default: Any = collections.defaultdict(list, {"b": 1, "a": 2})
    ordered = collections.OrderedDict([("z", 3), ("y", 4)])
    structure = [default, ordered, Step(5, 6)]
    result = tree.unflatten_as(structure, [10, 20, 30, 40, 50, 60])
    assert result == [{"a": 10, "b": 20}, {"y": 30, "z": 40}, Step(50, 60)]
    assert type(result[0]) is collections.defaultdict
    assert result[0].default_factory is list
    assert type(result[1]) is collections.OrderedDict
    assert list(result[0]) == ["b", "a"]
    assert list(result[1]) == ["z", "y"]
    assert type(result[2]) is Step


def test_unflatten_takes_containers_as_leaves() -> None:
    assert tree.unflatten_as({"a": 0, "b": 0}, [[1, 2], {}]) == {"a": [1, 2], "b": {}}


@pytest.mark.parametrize("flat", [[], [1], [1, 2, 3]])
def test_unflatten_counts_leaves(flat: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"Got {len(flat)} leaves .* has 2"):
        tree.unflatten_as({"a": 0, "b": [0]}, flat)


@given(structures)
def test_walks_agree_and_unflatten_inverts_flatten(structure: Any) -> None:
    flat = tree.flatten(structure)
    assert [leaf for _, leaf in tree.flatten_with_path(structure)] == flat
    assert tree.unflatten_as(structure, flat) == structure
    assert tree.map_structure(lambda leaf: leaf, structure) == structure
    assert tree.map_structure_with_path(lambda _, leaf: leaf, structure) == structure
    for path, leaf in tree.flatten_with_path(structure):
        node = structure
        for key in path:
            node = getattr(node, key) if isinstance(node, Step) else node[key]
        assert node is leaf


def test_map_structure_over_several() -> None:
    one = {"a": 1, "b": (2, Step(3, 4))}
    two = {"b": (20, Step(30, 40)), "a": 10}
    assert tree.map_structure(lambda x, y: x + y, one, two) == {"a": 11, "b": (22, Step(33, 44))}


@pytest.mark.parametrize(
    ("one", "two", "path"),
    [
        ({"a": 1}, {"b": 1}, r"\(\)"),
        ({"a": [1, 2]}, {"a": [1]}, r"\('a',\)"),
        ({"a": [1]}, {"a": (1,)}, r"\('a',\)"),
        ([0, {"a": 1}], [0, 1], r"\(1,\)"),
        (Step(1, [2]), (1, [2]), r"\(\)"),
        (Step(1, [2]), Step(1, 2), r"\('action',\)"),
    ],
)
def test_structures_that_differ(one: Any, two: Any, path: str) -> None:
    for first, second in ((one, two), (two, one)):
        with pytest.raises(InvalidArgumentError, match=f"differ at {path}"):
            tree.assert_same_structure(first, second)
        with pytest.raises(InvalidArgumentError, match=f"differ at {path}"):
            tree.map_structure(lambda x, y: (x, y), first, second)


def test_map_structure_with_path() -> None:
    structure = {"b": [0, 0], "a": Step(0, 0)}
    assert tree.map_structure_with_path(lambda path, _: path, structure, ("root",)) == {
        "b": [("root", "b", 0), ("root", "b", 1)],
        "a": Step(("root", "a", "observation"), ("root", "a", "action")),
    }


WALKS: list[Callable[[Any], Any]] = [
    tree.flatten,
    tree.flatten_with_path,
    lambda structure: tree.unflatten_as(structure, [0]),
    lambda structure: tree.map_structure(lambda leaf: leaf, structure),
    lambda structure: tree.map_structure_with_path(lambda _, leaf: leaf, structure),
    lambda structure: tree.assert_same_structure(structure, structure),
    lambda structure: tree.structure_to_json(structure, lambda leaf: leaf),
]


@pytest.mark.parametrize("walk", WALKS)
def test_nesting_is_bounded(walk: Callable[[Any], Any]) -> None:
    walk(nested(MAX_NESTING))
    with pytest.raises(InvalidArgumentError, match=f"at most {MAX_NESTING}"):
        walk(nested(MAX_NESTING + 1))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidArgumentError, match="does not contain itself"):
        walk(endless)


@pytest.mark.parametrize("walk", WALKS)
def test_keys_that_cannot_be_sorted(walk: Callable[[Any], Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"types int, str.*Use str keys"):
        walk({"a": 1, 2: 3})


# --- JSON ---------------------------------------------------------------------------------------


def through_text(structure: Any) -> Any:
    """Returns ``structure`` after a way through JSON text, leaves as they are."""
    text = json.dumps(tree.structure_to_json(structure, lambda leaf: leaf))
    return tree.structure_from_json(json.loads(text), lambda leaf: leaf)


@given(structures)
def test_json_round_trip(structure: Any) -> None:
    result = through_text(structure)
    assert result == structure
    tree.assert_same_structure(result, structure)


def test_json_keeps_the_types_of_keys() -> None:
    result = through_text({"words": {"1": 0}, "numbers": {1: 0, -5: 0}})
    assert list(result["words"]) == ["1"]
    assert list(result["numbers"]) == [-5, 1]


@pytest.mark.parametrize("key", [1.5, True, (1, 2), None, b"a"])
def test_json_refuses_other_keys(key: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"at \('a',\); expected str or int"):
        tree.structure_to_json({"a": {key: 0}}, lambda leaf: leaf)


def test_json_walks_leaves_in_order() -> None:
    seen: list[Any] = []

    def record(leaf: Any) -> Any:
        seen.append(leaf)
        return leaf

    structure = {"b": [2, 3], "a": 1}
    description = tree.structure_to_json(structure, record)
    assert seen == [1, 2, 3]
    seen.clear()
    tree.structure_from_json(description, record)
    assert seen == [1, 2, 3]


def test_json_of_equal_structures_is_equal() -> None:
    one = tree.structure_to_json({"a": 1, "b": 2}, lambda leaf: leaf)
    assert tree.structure_to_json({"b": 2, "a": 1}, lambda leaf: leaf) == one


def test_namedtuple_class_that_is_known_comes_back() -> None:
    result = through_text([Step(1, 2)])
    assert type(result[0]) is Step


def test_namedtuple_class_that_is_not_known_is_made_once() -> None:
    description = ["namedtuple", "Unheard", ["x", "y"], [["leaf", 1], ["leaf", 2]]]
    one = tree.structure_from_json(description, lambda leaf: leaf)
    two = tree.structure_from_json(description, lambda leaf: leaf)
    assert (one.x, one.y) == (1, 2)
    assert type(one) is type(two)
    assert type(one).__name__ == "Unheard"
    assert through_text(one) == one


def test_namedtuple_class_is_not_kept_alive() -> None:
    cls: Any = collections.namedtuple("Passing", ["x"])  # type: ignore[name-match]
    description = tree.structure_to_json(cls(1), lambda leaf: leaf)
    assert type(tree.structure_from_json(description, lambda leaf: leaf)) is cls
    del cls
    gc.collect()
    made = tree.structure_from_json(description, lambda leaf: leaf)
    assert (type(made).__name__, made.x) == ("Passing", 1)


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "leaf",
        [],
        ["leaf"],
        ["leaf", 1, 2],
        ["set", []],
        ["list", 3],
        ["list", [1]],
        ["dict", [["a"]]],
        ["dict", [["a", ["leaf", 1]], ["a", ["leaf", 2]]]],
        ["dict", [[1.5, ["leaf", 1]]]],
        ["dict", [[True, ["leaf", 1]]]],
        ["dict", {"a": ["leaf", 1]}],
        ["namedtuple", "A", ["x"], []],
        ["namedtuple", "A", [3], [["leaf", 1]]],
        ["namedtuple", "A", ["x", "x"], [["leaf", 1], ["leaf", 2]]],
        ["namedtuple", "A", ["_x"], [["leaf", 1]]],
        ["namedtuple", "A", ["class"], [["leaf", 1]]],
        ["namedtuple", "A", ["x=print('run')"], [["leaf", 1]]],
        ["namedtuple", "A(object): pass", ["x"], [["leaf", 1]]],
    ],
)
def test_json_that_is_malformed(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="damaged, or written by another version"):
        tree.structure_from_json(value, lambda leaf: leaf)


def test_json_that_is_too_deep() -> None:
    value: Any = ["leaf", 1]
    for _ in range(MAX_NESTING):
        value = ["list", [value]]
    assert tree.structure_from_json(value, lambda leaf: leaf - 1) == nested(MAX_NESTING)
    with pytest.raises(InvalidArgumentError, match=f"at most {MAX_NESTING}"):
        tree.structure_from_json(["tuple", [value]], lambda leaf: leaf)
