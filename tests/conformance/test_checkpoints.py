"""What Reverb's own tests pin of checkpoints: what is restored is what a client saw before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import rate_limiters, selectors
from shmreplay.checkpointers import DefaultCheckpointer

TABLE = "table"

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]


def limited_table() -> reverb.Table:
    """Takes five items at once, and then one for each two samples."""
    return reverb.Table(
        TABLE,
        selectors.Prioritized(0.5),
        selectors.MinHeap(),
        max_size=20,
        rate_limiter=rate_limiters.RateLimiter(2.0, 3, -1.0, 10.0),
        max_times_sampled=7,
        signature={"x": reverb.TensorSpec((None,), np.int64, "x")},
    )


def insert(client: reverb.Client, value: int, priority: float = 1.0) -> None:
    client.insert({"x": np.int64(value)}, {TABLE: priority}, timeout=0)


def restarted(
    make_client: MakeClient, path: Path, server: reverb.Server, table: reverb.Table
) -> reverb.Client:
    """A client of a new server, of what the old one saved."""
    server.stop()
    return make_client([table], checkpointer=DefaultCheckpointer(path))[1]


def test_a_checkpoint_keeps_the_order_of_insertion(make_client: MakeClient, tmp_path: Path) -> None:
    def table() -> reverb.Table:
        return reverb.Table(
            TABLE, selectors.Fifo(), selectors.Fifo(), 8, rate_limiters.MinSize(1), 1
        )

    server, client = make_client([table()], checkpointer=DefaultCheckpointer(tmp_path))
    for value in range(11):  # the first three are evicted
        insert(client, value, priority=float(-value % 4))
    keys = client.keys(TABLE)
    client.mutate_priorities(TABLE, {int(keys[6]): 5.0, int(keys[0]): 6.0}, [int(keys[4])])
    client.checkpoint()
    client = restarted(make_client, tmp_path, server, table())
    assert client.keys(TABLE).tolist() == [*keys[:4], *keys[5:]]
    samples = client.sample(TABLE, 7, emit_timesteps=False, timeout=0)
    assert [int(sample.data[0][0]) for sample in samples] == [3, 4, 5, 6, 8, 9, 10]


def test_a_checkpoint_holds_parameters_counts_selectors_signature_and_sizes(
    make_client: MakeClient, tmp_path: Path
) -> None:
    server, client = make_client([limited_table()], checkpointer=DefaultCheckpointer(tmp_path))
    for value in range(4):
        insert(client, value, priority=1.0 + value)
    client.sample_batch(TABLE, 3, timeout=0)
    client.mutate_priorities(TABLE, deletes=[int(client.keys(TABLE)[1])])
    before = client.server_info()[TABLE]
    client.checkpoint()
    client = restarted(make_client, tmp_path, server, limited_table())
    info = client.server_info()[TABLE]
    assert info == before
    assert (info.max_size, info.max_times_sampled, info.current_size) == (20, 7, 3)
    assert info.sampler_options.prioritized.priority_exponent == 0.5
    assert info.remover_options.heap.min_heap
    assert info.signature == {"x": reverb.TensorSpec((None,), np.int64, "x")}
    limiter = info.rate_limiter_info
    assert (limiter.samples_per_insert, limiter.min_size_to_sample) == (2.0, 3)
    assert (limiter.min_diff, limiter.max_diff) == (-1.0, 10.0)
    assert (limiter.insert_stats.completed, limiter.sample_stats.completed) == (4, 3)
    assert (info.num_episodes, info.num_deleted_episodes) == (3, 1)


def test_a_restored_limiter_goes_on_counting_from_there(
    make_client: MakeClient, tmp_path: Path
) -> None:
    server, client = make_client([limited_table()], checkpointer=DefaultCheckpointer(tmp_path))
    for value in range(4):
        insert(client, value)
    client.sample_batch(TABLE, 3, timeout=0)  # 4 * 2 - 3 = 5
    client.checkpoint()
    client = restarted(make_client, tmp_path, server, limited_table())
    insert(client, 4)
    insert(client, 5)  # 6 * 2 - 3 = 9
    with pytest.raises(reverb.DeadlineExceededError):
        insert(client, 6)
    assert len(client.sample_batch(TABLE, 20, timeout=0).info.key) == 10  # 6 * 2 - 13 = -1
    with pytest.raises(reverb.DeadlineExceededError):
        client.sample_batch(TABLE, 1, timeout=0)
    insert(client, 6)
    assert len(client.sample_batch(TABLE, 20, timeout=0).info.key) == 2
