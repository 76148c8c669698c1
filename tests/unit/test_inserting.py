"""Single inserts of steps that are like the one before, and of those that are not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, inserting, tree

MakeServer = Callable[..., reverb.Server]


class Step(NamedTuple):
    """A step that is no dict."""

    obs: Any
    rest: Any


def table(name: str = "t", **options: Any) -> reverb.Table:
    usual: dict[str, Any] = {
        "sampler": reverb.selectors.Fifo(),
        "remover": reverb.selectors.Fifo(),
        "max_size": 1000,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
    }
    return reverb.Table(name, **{**usual, **options})


def all_data(client: reverb.Client, name: str = "t") -> list[Any]:
    return [sample.data for sample in client.fetch(name, client.keys(name))]


@pytest.mark.parametrize(
    "make",
    [
        lambda i: {"b": float(i), "a": np.full(3, i, np.int16)},
        lambda i: {"a": i, "b": bool(i % 2), "c": np.float32(i)},
        lambda i: Step(np.full((2, 2), i), {"x": i, "y": [float(i)]}),
        lambda i: np.full(2, i),
        lambda i: float(i),
        lambda i: {"a": np.arange(20)[i::5][:2], "b": [i, i]},  # copied and converted each time
    ],
)
def test_steps_of_one_make_come_back_as_they_were(
    make_server: MakeServer, make: Callable[[int], Any]
) -> None:
    server = make_server([table()])
    client = server.localhost_client()
    for i in range(5):
        client.insert(make(i), {"t": float(i)})
    found = all_data(client)
    container = type(make(0)) if tree.is_nested(make(0)) else np.ndarray
    assert [type(data) for data in found] == [container] * 5
    for i, data in enumerate(found):
        expected = tree.flatten(make(i))
        for got, wanted in zip(tree.flatten(data), expected, strict=True):
            array = np.asarray(wanted)
            assert got.dtype == array.dtype
            np.testing.assert_array_equal(got, array[None])
    assert client.items("t").priority.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert client.server_info()["t"].num_episodes == 5
    server.check()


@pytest.mark.parametrize(
    "data",
    [
        {"a": 1, "b": 2.0, "c": True, "d": np.int8(1), "e": np.zeros(2)},
        Step(1, {"x": [2.0, np.zeros(3)]}),
    ],
)
def test_a_step_like_one_before_is_not_looked_at_in_python(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, data: Any
) -> None:
    client = make_server([table()]).localhost_client()
    client.insert(data, {"t": 1.0})

    def insert_new(*arguments: Any) -> None:
        pytest.fail("it was looked at as if it were the first")

    monkeypatch.setattr(inserting.Inserter, "_insert_new", insert_new)
    client.insert(data, {"t": 2.0})
    assert client.server_info()["t"].current_size == 2


def test_steps_of_several_makes_take_turns(make_server: MakeServer) -> None:
    server = make_server([table()])
    client = server.localhost_client()
    makes: list[Callable[[int], Any]] = [
        lambda i: {"a": i, "b": 1.0},
        lambda i: {"a": float(i), "b": 1.0},
        lambda i: {"a": np.full(2, i), "b": 1.0},
        lambda i: {"b": 1.0, "a": i, "c": 1},
        lambda i: [i, 1.0],
    ]
    for i in range(20):
        client.insert(makes[i % 5](i), {"t": 1.0})
    for i, data in enumerate(all_data(client)):
        values = tree.flatten(data)
        assert values[0].reshape(-1)[0] == i
        assert values[0].dtype == np.asarray(tree.flatten(makes[i % 5](i))[0]).dtype
        assert len(values) == len(tree.flatten(makes[i % 5](i)))
    server.check()


def test_an_int_that_does_not_fit_is_refused_in_every_insert(make_server: MakeServer) -> None:
    client = make_server([table()]).localhost_client()
    client.insert({"a": 1}, {"t": 1.0})
    client.insert({"a": 2**63}, {"t": 1.0})  # as uint64, with a writer of its own
    with pytest.raises(errors.ReverbError):
        client.insert({"a": 2**64}, {"t": 1.0})
    client.insert({"a": -(2**63)}, {"t": 1.0})
    dtypes = [data["a"].dtype for data in all_data(client)]
    assert dtypes == [np.int64, np.uint64, np.int64]


def test_a_later_table_of_the_same_steps_is_checked_too(make_server: MakeServer) -> None:
    signature = {"a": reverb.TensorSpec((1, 3), np.float64)}
    server = make_server([table("free"), table("bound", signature=signature)])
    client = server.localhost_client()
    for _ in range(3):
        client.insert({"a": np.zeros(2)}, {"free": 1.0})
        with pytest.raises(errors.SignatureError, match="bound"):
            client.insert({"a": np.zeros(2)}, {"free": 1.0, "bound": 1.0})
        client.insert({"a": np.zeros(3)}, {"bound": 1.0, "free": 1.0})
    info = client.server_info()
    assert (info["free"].current_size, info["bound"].current_size) == (6, 3)
    server.check()


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf")])
def test_a_bad_priority_of_a_step_seen_before_is_refused(
    make_server: MakeServer, priority: float
) -> None:
    server = make_server([table(sampler=reverb.selectors.Prioritized(1.0))])
    client = server.localhost_client()
    client.insert({"a": 1}, {"t": 1.0})
    with pytest.raises(errors.PriorityError):
        client.insert({"a": 1}, {"t": priority})
    assert client.server_info()["t"].current_size == 1


def test_a_step_seen_before_waits_for_the_limiter(make_server: MakeServer) -> None:
    server = make_server([table(rate_limiter=reverb.rate_limiters.Queue(2), max_times_sampled=1)])
    client = server.localhost_client()
    for i in range(2):
        client.insert({"a": i}, {"t": 1.0})
    with pytest.raises(reverb.DeadlineExceededError, match=r"0 items inserted within 0\.01 s"):
        client.insert({"a": 2}, {"t": 1.0}, timeout=0.01)
    done = threading.Event()

    def insert() -> None:
        client.insert({"a": 3}, {"t": 1.0})
        done.set()

    thread = threading.Thread(target=insert)
    thread.start()
    assert client.sample_batch("t", 1).data["a"].tolist() == [[0]]
    assert done.wait(60.0)
    thread.join()
    assert client.sample_batch("t", 2).data["a"].tolist() == [[1], [3]]
    server.check()


def test_threads_insert_steps_of_one_make_at_once(make_server: MakeServer) -> None:
    server = make_server([table(max_size=4000)])
    client = server.localhost_client()

    def insert(first: int) -> None:
        for i in range(first, first + 200):
            client.insert({"a": i, "b": np.full(2, i)}, {"t": 1.0})

    threads = [threading.Thread(target=insert, args=(200 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = sorted(int(data["a"][0]) for data in all_data(client))
    assert values == list(range(1600))
    server.check()
