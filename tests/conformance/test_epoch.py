"""The epoch selector: every item once before any is drawn again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import Client, Server, errors

Maker = Callable[..., Server]
Connect = Callable[[Server], Client]


def epoch_table(**options: Any) -> reverb.Table:
    usual: dict[str, Any] = {
        "sampler": reverb.selectors.Epoch(),
        "remover": reverb.selectors.Fifo(),
        "max_size": 1000,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
    }
    return reverb.Table("t", **{**usual, **options})


def ids_of(client: Client, n: int) -> list[int]:
    ids: list[int] = client.sample_batch("t", n).data["id"].tolist()
    return ids


def insert(client: Client, *ids: int) -> list[int]:
    keys: list[int] = client.insert_batch("t", {"id": np.array(ids)}).tolist()
    return keys


def test_each_item_once_and_then_again(serve: Maker, connect: Connect) -> None:
    server = serve([epoch_table()])
    with connect(server) as client:
        insert(client, *range(10))
        first = ids_of(client, 7)
        batch = client.sample_batch("t", 8)  # the last three of this pass, five of the next
        second = batch.data["id"].tolist()
        assert sorted(first + second[:3]) == list(range(10))
        np.testing.assert_array_equal(
            batch.info.probability, [1 / 3, 1 / 2, 1, 1 / 10, 1 / 9, 1 / 8, 1 / 7, 1 / 6]
        )
        assert sorted(second[3:] + ids_of(client, 5)) == list(range(10))
        counts = Counter(ids_of(client, 1000))  # many passes in one batch
        assert set(counts.values()) == {100} and len(counts) == 10
        info = client.server_info()["t"]
        assert info.sampler_options.epoch and info.sampler_options.HasField("epoch")
        assert info.sampler_options.WhichOneof("distribution") == "epoch"


def test_what_comes_and_goes_within_a_pass(serve: Maker, connect: Connect) -> None:
    server = serve([epoch_table(max_size=6)])
    with connect(server) as client:
        keys = insert(client, 0, 1, 2, 3)
        drawn = ids_of(client, 3)
        [left] = {0, 1, 2, 3} - set(drawn)
        insert(client, 4)
        client.update_priorities("t", keys, np.arange(4.0))
        client.mutate_priorities("t", deletes=[keys[drawn[0]]])
        assert sorted(ids_of(client, 2)) == sorted([left, 4])
        # All were drawn, but the pass only ends when the next draw finds nothing left.
        insert(client, 5)
        assert ids_of(client, 1) == [5]
        there = sorted({1, 2, 3, 4, 5, 0} - {drawn[0]})
        assert sorted(ids_of(client, 5)) == there
        # The remover takes what is to be drawn and what was drawn alike.
        seen = ids_of(client, 2)
        insert(client, 6, 7, 8)  # six stay: two of the oldest go
        gone = there[:2]
        left_over = [i for i in [*there[2:], 6, 7, 8] if i not in seen]
        assert sorted(ids_of(client, len(left_over))) == sorted(left_over)
        assert not set(ids_of(client, 6)) & set(gone)
        client.reset("t")
        insert(client, 9)
        assert ids_of(client, 2) == [9, 9]
        client.check()


@pytest.mark.parametrize("most", [1, 3])
def test_with_a_bound_on_samples(serve: Maker, connect: Connect, most: int) -> None:
    server = serve([epoch_table(max_times_sampled=most)])
    with connect(server) as client:
        insert(client, *range(20))
        for _ in range(most):
            assert sorted(ids_of(client, 20)) == list(range(20))
        assert client.server_info()["t"].current_size == 0


def test_several_clients_share_a_pass(serve: Maker, connect: Connect) -> None:
    server = serve([epoch_table()])
    drawn: Counter[int] = Counter()
    with connect(server) as client:
        insert(client, *range(64))

        def work() -> None:
            with connect(server) as mine:
                ids = [i for _ in range(100) for i in ids_of(mine, 16)]
            with lock:
                drawn.update(ids)

        lock = threading.Lock()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert drawn == dict.fromkeys(range(64), 100)
        client.check()


def test_what_was_drawn_ahead_is_not_lost(serve: Maker, connect: Connect) -> None:
    server = serve([epoch_table()])
    with connect(server) as client:
        insert(client, *range(60))
        with client.sampler("t", batch_size=4, prefetch=5) as batches:
            ids = next(batches).data["id"].tolist() + next(batches).data["id"].tolist()
        assert sorted(ids + ids_of(client, 52)) == list(range(60))
        wrong = {"id": np.zeros(10, np.float32)}
        with pytest.raises(errors.InvalidArgumentError):
            client.sample_batch("t", 10, out=wrong)
        assert sorted(ids_of(client, 60)) == list(range(60))


def test_where_it_cannot_be_used() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="epoch remover"):
        epoch_table(remover=reverb.selectors.Epoch())
    with pytest.raises(errors.InvalidArgumentError, match="2 stripes"):
        epoch_table(stripes=2)
    assert epoch_table().config().stripes == 1
    assert reverb.item_selectors.Epoch is reverb.selectors.Epoch
