"""Arguments that would be taken for something else, or whose errors would mislead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, rate_limiters, selectors

ROWS = 1000
LONE = "a\ud800"
"""A name that no encoding has."""


class Tagged(np.ndarray[Any, Any]):
    """A kind of array of somebody's own."""


def table(name: str = "t", **options: Any) -> reverb.Table:
    return reverb.Table(
        name, selectors.Uniform(), selectors.Fifo(), ROWS, rate_limiters.MinSize(1), **options
    )


@pytest.fixture
def client(make_server: Callable[..., reverb.Server]) -> reverb.Client:
    return make_server([table()], capacity=8 << 20).localhost_client()


# --- data that this process has no memory for ---------------------------------------------------


def test_data_that_is_too_large_to_copy(client: reverb.Client) -> None:
    huge = np.broadcast_to(np.float64(1), (1 << 44,))
    keys = np.broadcast_to(np.uint64(1), (1 << 44,))
    writer = client.trajectory_writer(2)
    writer.append({"x": np.zeros(3)})
    calls: list[Callable[[], object]] = [
        lambda: client.insert({"x": huge}, {"t": 1.0}),
        lambda: client.insert_batch("t", {"x": huge}),
        lambda: client.insert_batch("t", {"x": np.zeros((3, 2))}, np.broadcast_to(1.0, (1 << 44,))),
        lambda: client.update_priorities("t", keys, 1.0),
        lambda: client.fetch("t", keys),
        lambda: writer.append({"x": np.zeros(3), "y": huge}),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(errors.ReverbError) as caught:
            call()
        if number == 2:  # there are 3 items: that is seen first
            assert isinstance(caught.value, errors.InvalidArgumentError)
            continue
        assert isinstance(caught.value, errors.OutOfMemoryError), number
        assert isinstance(caught.value, MemoryError)
        for part in ("Unable to allocate", "expected less", "several calls"):
            assert part in str(caught.value)
    writer.close()
    assert client.server_info()["t"].current_size == 0


# --- masks --------------------------------------------------------------------------------------


def test_masked_arrays_are_refused(client: reverb.Client) -> None:
    masked = np.ma.masked_array(np.ones((2, 3)), [[True, False, False]] * 2)
    writer = client.trajectory_writer(2)
    writer.append({"x": np.ones((2, 3)), "y": 1.0})
    keys = client.insert_batch("t", {"x": np.ones((2, 3))})
    calls: list[Callable[[], object]] = [
        lambda: client.insert({"x": masked}, {"t": 1.0}),
        lambda: client.insert_batch("t", {"x": masked}),
        lambda: client.insert_batch("t", {"x": np.ones(2)}, priorities=masked[:, 0]),
        lambda: client.update_priorities("t", keys, masked[:, 0]),
        lambda: client.update_priorities("t", np.ma.masked_array(keys, [True, False]), 2.0),
        lambda: writer.append({"x": masked, "y": 1.0}),  # a column that is known
        lambda: writer.append({"x": np.ones((2, 3)), "y": np.ma.masked}),
        lambda: writer.append({"z": masked}),  # and one that is not
    ]
    for call in calls:
        with pytest.raises(errors.ArgumentTypeError, match=r"masked array .* Give x.filled"):
            call()
    # Other classes of arrays have nothing that would be lost.
    writer.append({"x": np.full((2, 3), 7.0).view(Tagged), "y": 1.0})
    assert (writer.history["x"][-1].numpy() == 7.0).all()
    writer.close()
    assert client.server_info()["t"].current_size == 2
    assert (client.sample_batch("t", 8).info.priority == 1.0).all()


# --- a server without a bridge ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("auth", object()), ("insecure", True), ("bind", "0.0.0.0"), ("bridge_workers", 2)],
)
def test_what_only_a_bridge_uses_needs_a_port(
    make_server: Callable[..., reverb.Server], name: str, value: Any
) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=rf"Got {name}=.* without port="):
        make_server([table()], **{name: value})


# --- names that cannot be printed ---------------------------------------------------------------


def test_lone_surrogates(client: reverb.Client) -> None:
    calls: list[Callable[[], object]] = [
        lambda: table(LONE),
        lambda: reverb.Table.queue(LONE, 3),
        lambda: client.insert([1.0], {LONE: 1.0}),
        lambda: client.insert_batch(LONE, [np.zeros(3)]),
        lambda: client.sample_batch(LONE, 1),
        lambda: reverb.Client(f"{LONE}:8000"),
        lambda: reverb.Client(f"tcp://{LONE}:8000"),
        lambda: reverb.Client(f"shm://{LONE}"),
    ]
    for call in calls:
        with pytest.raises(errors.ReverbError) as caught:
            call()
        assert r"\ud800" in str(caught.value)
        str(caught.value).encode()


# --- hints that help ----------------------------------------------------------------------------


def message(kind: type[errors.ReverbError], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_text_and_numbers_in_one_column(client: reverb.Client) -> None:
    with client.trajectory_writer(2) as writer:
        writer.append({"text": np.array("abcd"), "number": np.float32(1)})
        text = message(errors.SignatureError, lambda: writer.append({"text": 5}))
        assert "Got int64 but expected string<U4>" in text
        assert 'Give a str, or np.array(x, "U4")' in text
        text = message(errors.SignatureError, lambda: writer.append({"number": "abc"}))
        assert "Got string<U3> but expected float" in text and "Give a number" in text
        assert "np.asarray" not in text
        text = message(errors.SignatureError, lambda: writer.append({"number": np.arange(0)[:1]}))
        assert 'np.asarray(x, "float32")' in text


def test_columns_of_no_steps(client: reverb.Client) -> None:
    with client.trajectory_writer(3) as writer:
        for i in range(3):
            writer.append({"a": i})
        empty = {"a": writer.history["a"][2:2]}
        text = message(errors.InvalidArgumentError, lambda: writer.create_item("t", 1.0, empty))
        assert "must not be empty" in text and "1 columns of 0 steps each" in text
        assert "[-1:]" in text
        text = message(errors.InvalidArgumentError, lambda: writer.create_item("t", 1.0, {}))
        assert "no columns" in text


def test_a_step_within_a_step(client: reverb.Client) -> None:
    with client.trajectory_writer(3) as writer:
        writer.append({"a": 1.0})
        with writer.next_step() as step:
            text = message(errors.WriterStateError, lambda: writer.next_step().__enter__())
            assert "with next_step()" in text and "append" not in text
            step["a"][...] = 2.0
        writer.append({"a": 3.0}, partial_step=True)
        text = message(errors.WriterStateError, lambda: writer.next_step().__enter__())
        assert "Finish it by append()" in text
        writer.append({"b": 3.0})


def test_a_key_that_is_no_list(client: reverb.Client) -> None:
    (key,) = client.insert_batch("t", [np.zeros((1, 2))])
    for call in (
        lambda: client.fetch("t", int(key)),
        lambda: client.fetch("t", key),
        lambda: client.update_priorities("t", key, 1.0),
    ):
        text = message(errors.InvalidArgumentError, call)
        assert str(key) in text and "[key]" in text and "ravel" not in text
    assert "ravel" in message(
        errors.InvalidArgumentError, lambda: client.fetch("t", np.array([[key]]))
    )


# --- what is refused leaves nothing -------------------------------------------------------------


def test_a_refused_batch_keeps_no_block(client: reverb.Client) -> None:
    client.insert_batch("t", {"x": np.zeros((1, 1000))})
    connection = client._connected()
    session = connection.take_session()
    used = client.stats()["arena_used_bytes"]
    rows, priorities, keys = np.zeros((10, 1000)), np.ones(10), np.zeros(10, np.uint64)
    for _ in range(300):  # three times what there is room for
        with pytest.raises(errors.InvalidArgumentError):  # there is no table of this number
            session.insert_batch(
                99, [rows], 10, priorities, 0, 0.0, str, connection.next_episode(), keys
            )
    connection.give_session(session)
    assert client.stats()["arena_used_bytes"] == used
    client.check()
