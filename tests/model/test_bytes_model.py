"""Tables with a bound on their bytes, against the model of `oracle.py`, and against arithmetic.

Items have random lengths and begin anywhere, so that they share blocks in every way. The model is
told which blocks those are: a writer puts so many steps into each of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import Server
from shmreplay._native import size_of_block, size_of_episode, size_of_trajectory
from tests.model import oracle

KEEP = 12
ROWS = 5
STEP = {"x": np.zeros(16, np.float32), "n": np.int64(0)}
ROW_BYTES = [64, 8]
BLOCK = size_of_block(1, ROW_BYTES, ROWS)

REMOVERS: Mapping[str, tuple[Any, Callable[[], oracle.Selector]]] = {
    "fifo": (reverb.selectors.Fifo(), oracle.Fifo),
    "lifo": (reverb.selectors.Lifo(), oracle.Lifo),
    "min_heap": (reverb.selectors.MinHeap(), oracle.MinHeap),
    "uniform": (reverb.selectors.Uniform(), oracle.Uniform),
    "prioritized": (reverb.selectors.Prioritized(1.0), lambda: oracle.Prioritized(1.0)),
}


class Author:
    """A writer that knows in which blocks its steps lie."""

    def __init__(self, client: reverb.Client, number: int) -> None:
        self.writer = client.trajectory_writer(KEEP)
        for column in STEP:
            self.writer.configure((column,), num_keep_alive_refs=KEEP, max_chunk_length=ROWS)
        self.number = number
        self.steps = self.episode = self.since = 0

    def append(self) -> None:
        self.writer.append(STEP)
        self.steps += 1
        self.since += 1

    def end_episode(self) -> None:
        self.writer.end_episode()
        self.episode += 1
        self.since = 0

    def item(self, key: int, priority: float, start: int, stop: int) -> oracle.Item:
        """Of steps [start, stop) of this episode."""
        first = self.steps - self.since
        blocks = {(first + step) // ROWS for step in range(start, stop)}
        # Whole rows of one block need no record.
        many = len(blocks)
        record = 0 if many == 1 else size_of_trajectory(len(STEP), many, many * len(STEP))
        return oracle.Item(
            key,
            priority,
            episodes=frozenset({(self.number, self.episode)}),
            blocks={(self.number, block): BLOCK for block in blocks},
            record_bytes=record,
        )


def columns(author: Author, start: int, stop: int) -> dict[str, Any]:
    window = slice(start - author.since, stop - author.since or None)
    return {name: author.writer.history[name][window] for name in STEP}


def insert(client: reverb.Client, model: oracle.TableModel, author: Author, rng: Any) -> None:
    start = rng.randrange(max(author.since - KEEP, 0), author.since)
    stop = rng.randrange(start + 1, author.since + 1)
    priority = rng.choice([0.5, 1.0, 1.0, 3.0])
    key = author.writer.create_item("t", priority, columns(author, start, stop))
    assert key is not None
    item = author.item(key, priority, start, stop)
    gone = None
    if not model.remover.deterministic:
        left = {int(k) for k in client.items("t").key}
        gone = ({*model.items, key}) - left
    states = model.insert_run([item], gone)
    deleted = client.server_info()["t"].num_deleted_episodes
    (after,) = (state for state in states if state.num_deleted_episodes == deleted)
    model.__dict__.update(after.__dict__)


def compare(client: reverb.Client, model: oracle.TableModel) -> None:
    info = client.server_info()["t"]
    assert info.current_bytes == model.nbytes
    assert info.max_bytes == 0 or info.current_bytes <= info.max_bytes
    assert {int(key) for key in client.items("t").key} == set(model.items)
    assert info.num_episodes == model.counts().num_episodes
    client.check()


@pytest.mark.parametrize("stripes", [1, 3])
@pytest.mark.parametrize("remover", REMOVERS)
def test_a_table_with_a_bound_on_its_bytes_does_what_the_model_says(
    make_server: Callable[..., Server], remover: str, stripes: int
) -> None:
    if stripes > 1 and remover in ("lifo", "min_heap"):
        pytest.skip("needs one order over all items")
    selector, model_of = REMOVERS[remover]
    rng = random.Random(f"{remover} {stripes}")
    most = 12 * BLOCK
    table = reverb.Table(
        "t",
        reverb.selectors.Uniform(),
        selector,
        20,
        reverb.rate_limiters.MinSize(1),
        stripes=stripes,
        max_bytes=most,
    )
    model = oracle.TableModel(
        oracle.Uniform(),
        model_of(),
        20,
        oracle.Limiter.min_size(1),
        max_bytes=most,
        episode_bytes=size_of_episode(1),
    )
    with make_server([table]).localhost_client() as client:
        authors = [Author(client, number) for number in range(3)]
        for round_ in range(200):
            author = rng.choice(authors)
            if author.since > 4 and rng.random() < 0.05:
                author.end_episode()
            author.append()
            if rng.random() < 0.7:
                insert(client, model, author, rng)
            if model.items and rng.random() < 0.1:
                victim = rng.choice(list(model.items))
                client.mutate_priorities("t", {}, [victim])
                model.mutate({}, [victim])
            if round_ % 50 == 49 and model.remover.deterministic:
                most = rng.choice([0, 6, 9, 16]) * BLOCK
                client.configure_table("t", max_bytes=most)
                model.bound_bytes(most)
                if most == 0:
                    client.configure_table("t", max_bytes=1 << 40)
            if round_ % 10 == 0:
                compare(client, model) if most else client.check()
        client.reset("t")
        model.reset()
        compare(client, model)
        for author in authors:
            author.writer.close()


@pytest.mark.parametrize("n", [1, 700])
def test_a_batch_leaves_what_single_inserts_leave(
    make_server: Callable[..., Server], n: int
) -> None:
    table = reverb.Table(
        "t",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        1000,
        reverb.rate_limiters.MinSize(1),
        max_bytes=150_000,
    )
    with make_server([table]).localhost_client() as client:
        keys = np.concatenate(
            [client.insert_batch("t", {"x": np.zeros((n, 32), np.float32)}) for _ in range(5)]
        )
        block = size_of_block(1, [128], n)
        size = client.server_info()["t"].current_size
        kept = min((150_000 - size_of_episode(1)) // block, 5)
        episodes = kept * size_of_episode(1)
        assert kept * block + episodes <= 150_000
        # Of a block that does not fit any more not a single row stays.
        assert size == kept * n
        assert [int(key) for key in client.items("t").key] == keys[-size:].tolist()
        assert client.server_info()["t"].current_bytes == kept * block + episodes
        client.check()
