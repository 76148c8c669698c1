"""`max_bytes` of a table as a user meets it, over each way to reach a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import Client, Server, errors
from tests.tables import usual_table

Maker = Callable[..., Server]
Connect = Callable[[Server], Client]


def table(name: str = "t", **options: Any) -> reverb.Table:
    return usual_table(name, **{"max_bytes": 100_000, **options})


def rows(n: int, width: int = 64) -> dict[str, Any]:
    return {"x": np.zeros((n, width), np.float64)}


@pytest.mark.parametrize("max_bytes", [-1, 2**47])
def test_a_bound_out_of_range_is_refused(max_bytes: int) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=f"max_bytes {max_bytes}"):
        table(max_bytes=max_bytes)


def test_a_bound_of_another_type_is_refused() -> None:
    with pytest.raises(errors.ArgumentTypeError, match="max_bytes"):
        table(max_bytes=1.5)


def test_the_bound_stays_with_a_table_that_is_described_again() -> None:
    first = table(max_bytes=12345)
    assert first.info.max_bytes == 12345
    assert reverb.Table.from_config(first.config()).info.max_bytes == 12345
    assert first.replace(name="u").info.max_bytes == 12345
    assert first.replace(max_bytes=0).info.max_bytes == 0


def test_inserting_evicts_the_oldest(serve: Maker, connect: Connect) -> None:
    server = serve([table(), table("other", max_bytes=0)])
    with connect(server) as client:
        for _ in range(40):
            client.insert_batch("t", rows(10))
            info = client.server_info()["t"]
            assert 0 < info.current_bytes <= info.max_bytes == 100_000
        # 10 rows of 512 bytes take a little more than 5,120.
        assert 160 <= info.current_size <= 190
        assert info.rate_limiter_info.insert_stats.completed == 400
        assert client.server_info()["other"].current_bytes == 0
        server.check()


def test_an_item_that_is_too_large_by_itself_is_refused(serve: Maker, connect: Connect) -> None:
    server = serve([table()])
    with connect(server) as client:
        client.insert_batch("t", rows(1))
        with pytest.raises(errors.InvalidArgumentError, match=r"max_bytes of its table, 100000"):
            client.insert_batch("t", rows(1, 20_000))
        with pytest.raises(errors.InvalidArgumentError, match=r"max_bytes of its table, 100000"):
            client.insert([np.zeros(20_000)], {"t": 1.0})
        assert client.server_info()["t"].current_size == 1
        server.check()


def test_a_writer_is_told(serve: Maker, connect: Connect) -> None:
    server = serve([table()])
    with connect(server) as client, client.trajectory_writer(1) as writer:
        writer.append({"x": np.zeros(20_000)})
        with pytest.raises(errors.InvalidArgumentError, match=r"max_bytes of its table, 100000"):
            writer.create_item("t", 1.0, {"x": writer.history["x"][-1:]})
            writer.flush()  # where the server is elsewhere it tells so later
        assert client.server_info()["t"].current_size == 0
    server.check()


def test_a_writer_is_told_at_once_also_where_its_items_wait(make_server: Maker) -> None:
    server = make_server([table(rate_limiter=reverb.rate_limiters.Queue(1))])
    with server.localhost_client() as client, client.trajectory_writer(1) as writer:
        for held_back in (False, True):
            writer.append({"x": np.zeros(8)})
            key = writer.create_item("t", 1.0, {"x": writer.history["x"][-1:]})
            assert (key is None) == held_back
        other = client.trajectory_writer(1)
        for _ in range(2):
            other.append({"y": np.zeros(20_000)})
            with pytest.raises(errors.InvalidArgumentError, match="max_bytes of its table"):
                other.create_item("t", 1.0, {"y": other.history["y"][-1:]})
        other.close()
        client.sample_batch("t", 2)
        writer.flush()
    server.check()


def test_other_data_for_an_item_counts(serve: Maker, connect: Connect) -> None:
    server = serve([table()])
    with connect(server) as client, client.trajectory_writer(2) as writer:
        writer.append({"x": np.zeros(8)})
        key = writer.create_item("t", 1.0, {"x": writer.history["x"][-1:]})
        assert key is not None
        writer.flush()
        before = client.server_info()["t"].current_bytes
        for _ in range(2):
            writer.append({"x": np.ones(8)})
        assert writer.replace_item("t", key, {"x": writer.history["x"][-2:]})
        assert client.server_info()["t"].current_bytes > before
    server.check()


def test_the_bound_changes_while_the_table_is_in_use(serve: Maker, connect: Connect) -> None:
    server = serve([table(max_bytes=0)])
    with connect(server) as client:
        for _ in range(50):
            client.insert_batch("t", rows(10))
        info = client.server_info()["t"]
        assert (info.current_size, info.current_bytes, info.max_bytes) == (500, 0, 0)
        client.configure_table("t", max_bytes=60_000)
        info = client.server_info()["t"]
        assert 50_000 < info.current_bytes <= info.max_bytes == 60_000
        assert info.current_size < 120
        server.check()
        client.configure_table("t", max_bytes=2**40, max_size=30)
        assert client.server_info()["t"].current_size == 30
        client.configure_table("t", max_bytes=0)
        info = client.server_info()["t"]
        assert (info.current_size, info.current_bytes, info.max_bytes) == (30, 0, 0)
        with pytest.raises(errors.InvalidArgumentError, match="max_bytes -3"):
            client.configure_table("t", max_bytes=-3, max_size=1)
        assert client.server_info()["t"].current_size == 30
        server.check()


def test_many_writers_at_once_stay_within_the_bound(serve: Maker, connect: Connect) -> None:
    server = serve([table(stripes=4, max_bytes=300_000)])
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            with connect(server) as client, client.trajectory_writer(20) as writer:
                for step in range(300):
                    writer.append({"x": rng.random(64)})
                    length = int(rng.integers(1, min(step + 1, 20) + 1))
                    writer.create_item("t", 1.0, {"x": writer.history["x"][-length:]})
                    info = client.server_info()["t"]
                    # Others may have inserted and not evicted yet.
                    assert info.current_bytes < 300_000 + 4 * 140_000
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a writer hangs"
    assert not problems
    with connect(server) as client:
        info = client.server_info()["t"]
        assert 0 < info.current_bytes <= 300_000
        server.check()


def test_blocks_count_as_they_are_stored(make_server: Maker) -> None:
    tables = [table(compress="lz4", max_bytes=2_000_000), table("plain", max_bytes=2_000_000)]
    server = make_server(tables)
    with server.localhost_client() as client, client.trajectory_writer(8) as writer:
        for step in range(4000):
            writer.append({"x": np.full(1000, step // 50, np.int64)})
            writer.create_item("t", 1.0, {"x": writer.history["x"][-1 - step % min(step + 1, 8) :]})
            if step % 500 == 0:
                client.configure_table("t", max_bytes=0)
                server.check()
                client.configure_table("t", max_bytes=2_000_000)
                server.check()
        stats = server.stats()
        assert stats["compressed_stored_bytes"] > 0
        info = client.server_info()["t"]
        # Eight times as much as would fit uncompressed.
        assert info.current_size == 1000 and 0 < info.current_bytes < 2_000_000
        assert stats["t/data_bytes"] <= stats["block_bytes"] + stats["trajectory_bytes"] + 1000
        client.insert_batch("plain", {"x": np.zeros((100, 1000))})
        server.check()
        client.reset("t")
        assert client.server_info()["t"].current_bytes == 0
        server.check()
