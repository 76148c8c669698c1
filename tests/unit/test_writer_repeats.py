"""A writer learns what its steps and items look like; whatever comes next is read right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, rate_limiters, selectors, structured

MakeServer = Callable[..., reverb.Server]
NAMES = "abcd"


@pytest.fixture
def client(make_server: MakeServer) -> reverb.Client:
    table = reverb.Table("t", selectors.Fifo(), selectors.Fifo(), 1000, rate_limiters.MinSize(1))
    return make_server([table]).localhost_client()


def all_data(client: reverb.Client) -> list[Any]:
    return [sample.data for sample in client.fetch("t", client.keys("t"))]


def same_text(name: str) -> str:
    """An equal string that is another object."""
    return "".join([name, "!"])[:-1]


def step(order: tuple[str, ...], number: int) -> dict[str, int]:
    return {same_text(name) if number % 3 else name: number * 10 + ord(name) for name in order}


def test_steps_and_items_in_every_order_of_their_keys(client: reverb.Client) -> None:
    """More orders than are learnt, each twice in a row and then once more."""
    orders = [order for order in permutations(NAMES) for _ in range(2)]
    orders += permutations(NAMES)
    with client.trajectory_writer(num_keep_alive_refs=2) as writer:
        for number, order in enumerate(orders):
            writer.append(step(order, number))
            names = order[::-1]
            writer.create_item("t", 1.0, {name: writer.history[name][-1] for name in names})
    found = all_data(client)
    assert len(found) == len(orders)
    for number, data in enumerate(found):
        assert {name: int(value) for name, value in data.items()} == {
            name: number * 10 + ord(name) for name in NAMES
        }


def test_a_structured_writer_passes_over_what_no_pattern_names(client: reverb.Client) -> None:
    reference = structured.create_reference_step(dict.fromkeys(NAMES))
    pattern = {name: reference[name][-1] for name in "db"}
    with client.structured_writer([structured.create_config(pattern, "t")]) as writer:
        for number, order in enumerate(permutations(NAMES)):
            writer.append(step(order, number))
    found = all_data(client)
    assert len(found) == 24
    for number, data in enumerate(found):
        assert {name: int(value) for name, value in data.items()} == {
            name: number * 10 + ord(name) for name in "bd"
        }


def test_another_key_in_place_of_one_is_another_column(client: reverb.Client) -> None:
    with client.trajectory_writer(num_keep_alive_refs=4) as writer:
        for _ in range(3):
            writer.append({"a": 1, "b": 2})
        writer.append({"a": 3, "c": 4})
        history = writer.history
        with pytest.raises(errors.InvalidArgumentError):
            history["b"][-1]
        writer.create_item("t", 1.0, {"a": history["a"][-1], "c": history["c"][-1]})
        with pytest.raises(errors.ArgumentTypeError):
            writer.append({"a": 1, 2: 2})
    assert [dict(data) for data in all_data(client)] == [{"a": 3, "c": 4}]


def test_items_by_turns_for_two_tables(make_server: MakeServer) -> None:
    """What is remembered of the last item's table is not taken for the next one's."""
    tables = [
        reverb.Table(name, selectors.Fifo(), selectors.Fifo(), 100, rate_limiters.MinSize(1))
        for name in ("one", "two")
    ]
    client = make_server(tables).localhost_client()
    with client.trajectory_writer(num_keep_alive_refs=2) as writer:
        for number in range(20):
            writer.append({"a": number})
            table = ("one", "two")[number // 2 % 2]
            writer.create_item(table, 1.0, {"a": writer.history["a"][-1]})
        with pytest.raises(errors.TableNotFoundError):
            writer.create_item("three", 1.0, {"a": writer.history["a"][-1]})
        bad: Any
        for bad in (float("nan"), "1"):
            with pytest.raises(errors.ReverbError):
                writer.create_item(table, bad, {"a": writer.history["a"][-1]})
    for half, name in enumerate(("one", "two")):
        values = [int(s.data["a"]) for s in client.fetch(name, client.keys(name))]
        assert values == [n for n in range(20) if n // 2 % 2 == half]


@pytest.mark.parametrize("start", [None, 0, 1, 4, 5, -1, -3, -5, np.int64(-2), True])
@pytest.mark.parametrize("stop", [None, 0, 1, 4, 5, -1, -3, -5, np.int64(-2)])
def test_a_slice_of_the_history_is_that_of_a_list(
    client: reverb.Client, start: Any, stop: Any
) -> None:
    with client.trajectory_writer(num_keep_alive_refs=5) as writer:
        for number in range(5):
            writer.append({"a": number})
        column = writer.history["a"][start:stop]
        expected = list(range(5))[start:stop]
        assert len(column) == len(expected)
        if expected:
            assert column.numpy().tolist() == expected
            writer.create_item("t", 1.0, {"a": column})
    assert [data["a"].tolist() for data in all_data(client)] == [expected][: len(expected)]


@pytest.mark.parametrize("bound", [6, -6, 2**62, -(2**62), 2**70, -(2**70)])
def test_a_slice_beyond_the_history_is_refused(client: reverb.Client, bound: int) -> None:
    with client.trajectory_writer(num_keep_alive_refs=5) as writer:
        for number in range(5):
            writer.append({"a": number})
        with pytest.raises(errors.InvalidArgumentError, match="slice bound"):
            writer.history["a"][bound:]
        if bound != 2**70:  # as with a list, the far end of the integers is that of the history
            with pytest.raises(errors.InvalidArgumentError, match="slice bound"):
                writer.history["a"][:bound]


def test_steps_with_a_gap_in_place_of_a_key_are_not_learnt(client: reverb.Client) -> None:
    """As many keys as the last whole step, but others: what those hold is not looked for."""
    with client.trajectory_writer(num_keep_alive_refs=8) as writer:
        for _ in range(2):
            writer.append({"a": 1, "b": 2})
        for number in range(6):
            writer.append({"a": number, "c": None})
            with pytest.raises(errors.InvalidArgumentError):
                writer.history["b"][-1]
            writer.create_item("t", 1.0, {"a": writer.history["a"][-1]})
        writer.append({"a": 7, "b": 8})
        writer.create_item("t", 1.0, {name: writer.history[name][-1] for name in "ab"})
    expected = [{"a": number} for number in range(6)] + [{"a": 7, "b": 8}]
    assert [dict(data) for data in all_data(client)] == expected


def test_items_by_turns_of_other_columns(client: reverb.Client) -> None:
    turns = ["ab", "ac", "ab", "ab", "ab", "ac", "ab", "ab"]
    with client.trajectory_writer(num_keep_alive_refs=2) as writer:
        writer.append({"a": 1, "b": 2, "c": 3})
        for names in turns:
            writer.create_item("t", 1.0, {name: writer.history[name][-1] for name in names})
    values = {"a": 1, "b": 2, "c": 3}
    assert [dict(data) for data in all_data(client)] == [
        {name: values[name] for name in names} for names in turns
    ]


class Disguised(str):
    """A key that says to be "b", and changes the dict that it is in when it is asked."""

    step: dict[str, Any]

    def __hash__(self) -> int:
        return hash("b")

    def __eq__(self, other: object) -> bool:
        if self.step["a"][0] == 1.0:
            self.step["a"] = np.full(100, 2.0)
            # The memory of what was there before is likely used by one of these.
            self.others = [np.full(100, 3.0) for _ in range(8)]
        return True


def test_a_key_that_changes_the_step_while_it_is_read(client: reverb.Client) -> None:
    with client.trajectory_writer(num_keep_alive_refs=2) as writer:
        for _ in range(3):
            writer.append({"a": np.zeros(100), "b": 0})
        for _ in range(3):
            key = Disguised("x")
            key.step = {"a": np.full(100, 1.0), key: 5}
            writer.append(key.step)
            writer.create_item("t", 1.0, {"a": writer.history["a"][-1]})
    for data in all_data(client):
        assert set(data["a"].tolist()) in ({1.0}, {2.0})


class Bound:
    """A bound of a slice that does something when it is asked for its number."""

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        self.number = number
        self.act = act

    def __index__(self) -> int:
        self.act()
        return self.number


def test_a_bound_that_drops_the_writer(client: reverb.Client) -> None:
    writers = [client.trajectory_writer(num_keep_alive_refs=5)]
    writers[0].append({"a": 1})
    column = writers[0].history["a"]
    with pytest.raises(errors.WriterClosedError):
        column[Bound(0, writers.clear) :]


def test_a_bound_that_appends_and_one_that_ends_the_episode(client: reverb.Client) -> None:
    with client.trajectory_writer(num_keep_alive_refs=5) as writer:
        writer.append({"a": 1})
        column = writer.history["a"]
        assert column[Bound(0, lambda: writer.append({"a": 2})) :].numpy().tolist() == [1, 2]
        with pytest.raises(errors.InvalidArgumentError, match="slice bound"):
            column[Bound(1, writer.end_episode) :]
