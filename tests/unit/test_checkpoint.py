"""Checkpoints: what is saved comes back, and what lies where."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import checkpoint_data, checkpoint_format
from shmreplay.checkpointers import DefaultCheckpointer

MakeServer = Callable[..., reverb.Server]
Samples = list[reverb.ReplaySample]

FIFO, LIFO = reverb.selectors.Fifo(), reverb.selectors.Lifo()
ITEMS = int(os.environ.get("CHECKPOINT_ITEMS", "3000"))


def table(
    name: str = "t", sampler: Any = None, remover: Any = None, **options: Any
) -> reverb.Table:
    usual: dict[str, Any] = {
        "max_size": 1000,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
        "seed": 7,
        **options,
    }
    return reverb.Table(name, sampler or FIFO, remover or FIFO, **usual)


def fill(client: reverb.Client, name: str, n: int, first: int = 0) -> np.ndarray[Any, Any]:
    rows = np.arange(first, first + n)
    data = {"x": rows.astype(np.float32), "y": np.stack([rows, -rows], 1)}
    return client.insert_batch(name, data, priorities=(rows * 7919 % 101).astype(np.float64))


def draws(client: reverb.Client, name: str, n: int = 6, size: int = 20) -> Samples:
    return [client.sample_batch(name, size) for _ in range(n)]


def assert_same(first: Samples, second: Samples) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a.info, b.info, strict=True):
            np.testing.assert_array_equal(x, y)
        for key in a.data:
            np.testing.assert_array_equal(a.data[key], b.data[key])


def listing(client: reverb.Client, name: str) -> list[Any]:
    connection = client._connected()
    number, cursor, out = connection.number(name), 0, []
    while cursor is not None:
        cursor, part = connection.list_some(number, cursor)  # type: ignore[assignment]
        out += part.tolist()
    return sorted(out, key=lambda item: item[1])


SELECTORS = {
    "fifo": FIFO,
    "lifo": LIFO,
    "uniform": reverb.selectors.Uniform(),
    "prioritized": reverb.selectors.Prioritized(0.7),
    "min_heap": reverb.selectors.MinHeap(),
    "max_heap": reverb.selectors.MaxHeap(),
    "epoch": reverb.selectors.Epoch(),
}


@pytest.mark.parametrize(
    ("kind", "compress"), [*((kind, None) for kind in SELECTORS), ("prioritized", "lz4")]
)
def test_items_and_later_samples_are_the_same(
    make_server: MakeServer, tmp_path: Path, kind: str, compress: str | None
) -> None:
    remover = SELECTORS["uniform" if kind == "epoch" else kind]
    checkpointer = DefaultCheckpointer(tmp_path)

    def make() -> tuple[reverb.Server, reverb.Client]:
        made = table("t", SELECTORS[kind], remover, max_size=ITEMS, compress=compress)
        capacity = (64 << 20) + 1000 * ITEMS
        server = make_server([made], checkpointer=checkpointer, capacity=capacity)
        return server, server.localhost_client()

    server, client = make()
    with client:
        keys = fill(client, "t", ITEMS + ITEMS // 3)
        client.update_priorities("t", keys[-50:], np.full(50, 3.0))
        client.mutate_priorities("t", deletes=[int(k) for k in keys[-300:-200]])
        fill(client, "t", 40, first=10**6)
        draws(client, "t", 2)
        client.checkpoint()
        before, info = listing(client, "t"), client.server_info()["t"]
        expected = draws(client, "t")
        fill(client, "t", 150, first=2 * 10**6)  # free places are taken in the same order, too
        expected += draws(client, "t")
    server.stop()
    server, client = make()
    with client:
        server.check()
        assert listing(client, "t") == before
        again = client.server_info()["t"]
        assert again == info
        assert_same(draws(client, "t"), expected[:6])
        fill(client, "t", 150, first=2 * 10**6)
        after = draws(client, "t")
        for a, b in zip(after, expected[6:], strict=True):
            np.testing.assert_array_equal(a.data["x"], b.data["x"])
        server.check()


def test_trajectories_over_shared_blocks_in_several_tables(
    make_server: MakeServer, tmp_path: Path
) -> None:
    checkpointer = DefaultCheckpointer(tmp_path)
    server = make_server([table("a"), table("b", LIFO)], checkpointer=checkpointer)
    with server.localhost_client() as client:
        with client.trajectory_writer(6) as writer:
            for i in range(40):
                writer.append(
                    {"o": np.full((3, 2), i, np.uint8), "r": np.float32(i), "s": np.int16(-i)}
                )
                if i % 13 >= 5:
                    history = writer.history
                    writer.create_item("a", 1.0, {"o": history["o"][-4:], "last": history["r"][-1]})
                    writer.create_item(
                        "b", 2.0, {"o": history["o"][[-1, -5]], "s": history["s"][-2:]}
                    )
                if i % 13 == 12:
                    writer.end_episode()
                if i == 20:
                    writer.flush()
                    client.checkpoint()  # the block is still being filled
            writer.flush()
            client.checkpoint()
        want = {t: list(client.sample(t, 1, emit_timesteps=False)) for t in "ab"}
        infos = client.server_info()
    server.stop()
    server = make_server([table("b", LIFO), table("a")], checkpointer=checkpointer)
    with server.localhost_client() as client:
        assert client.server_info()["a"].num_episodes == infos["a"].num_episodes > 1
        for name in "ab":
            (got,) = client.sample(name, 1, emit_timesteps=False)
            assert got.info.key == want[name][0].info.key
            for x, y in zip(got.data, want[name][0].data, strict=True):
                np.testing.assert_array_equal(x, y)
        server.check()


def files_of(path: str | Path) -> dict[str, int]:
    return {f.name: f.stat().st_ino for f in Path(path).iterdir() if f.name.startswith("blocks-")}


def test_a_second_checkpoint_writes_new_blocks_only_and_old_ones_go(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server([table(max_size=200)], checkpointer=DefaultCheckpointer(tmp_path, keep=2))
    with server.localhost_client() as client:
        fill(client, "t", 200)
        first = server.checkpoint()
        assert first.new_bytes == first.data_bytes > 0
        same = server.checkpoint()
        assert same.new_bytes == 0 and files_of(same.path) == files_of(first.path)
        fill(client, "t", 50, first=1000)
        more = server.checkpoint()
        assert 0 < more.new_bytes < first.new_bytes
        assert files_of(same.path).items() < files_of(more.path).items()
        old = files_of(same.path).keys()
        fill(client, "t", 200, first=2000)
        last, latest = server.checkpoint(), server.checkpoint()
    assert sorted(os.listdir(tmp_path)) == [Path(p).name for p in (last.path, latest.path)]
    assert not old & (files_of(last.path).keys() | files_of(latest.path).keys())


def test_only_its_own_directories_are_touched(make_server: MakeServer, tmp_path: Path) -> None:
    (tmp_path / "zzz.txt").write_text("mine")
    (tmp_path / "2020-01-01T00:00:00.000000000+00:00").mkdir()
    unfinished = tmp_path / ".shmreplay-0123456789abcdef"
    unfinished.mkdir()
    (unfinished / "index.bin").write_bytes(b"half")
    server = make_server([table()], checkpointer=DefaultCheckpointer(tmp_path))
    with server.localhost_client() as client:
        fill(client, "t", 10)
        first = Path(client.checkpoint())
        (first / "note").write_text("kept")
        second = Path(client.checkpoint())
        third = Path(client.checkpoint())
    assert not unfinished.exists() and not second.exists() and third.is_dir()
    assert (first / "note").read_text() == "kept"
    assert (tmp_path / "zzz.txt").read_text() == "mine"
    assert (tmp_path / "2020-01-01T00:00:00.000000000+00:00").is_dir()


def saved_in(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if not name.startswith(".")]


def saved(make_server: MakeServer, path: Path, tables: Sequence[reverb.Table], n: int = 60) -> str:
    server = make_server(tables, checkpointer=DefaultCheckpointer(path))
    with server.localhost_client() as client:
        for each in tables:
            fill(client, each.name, n)
        where = client.checkpoint()
    server.stop()
    return where


def test_declared_settings_win_and_differences_are_logged(
    make_server: MakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(make_server, tmp_path, [table(max_size=100)])
    caplog.set_level("INFO")
    server = make_server(
        [table(sampler=LIFO, max_size=40, max_times_sampled=5)],
        checkpointer=DefaultCheckpointer(tmp_path),
    )
    with server.localhost_client() as client:
        info = client.server_info()["t"]
        assert (info.max_size, info.current_size, info.sampler_options.lifo) == (40, 40, True)
        assert client.sample_batch("t", 1).data["x"][0] == 59
    for words in (
        *("max_size was saved as 100 and is declared as 40", "sampler_kind was saved as 'fifo'"),
        "60 items, 0 trajectories, 1 blocks, 1 episodes",
    ):
        assert words in caplog.text


def test_saved_settings_win_if_asked_for(make_server: MakeServer, tmp_path: Path) -> None:
    saved(make_server, tmp_path, [table(max_size=100)])
    server = make_server(
        [table(sampler=LIFO, max_size=40)],
        checkpointer=DefaultCheckpointer(tmp_path, settings="saved"),
    )
    with server.localhost_client() as client:
        info = client.server_info()["t"]
        assert (info.max_size, info.current_size, info.sampler_options.fifo) == (100, 60, True)


def test_settings_that_were_changed_while_it_ran_are_those_saved(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server([table(max_size=100)], checkpointer=DefaultCheckpointer(tmp_path))
    server.configure_table("t", max_size=70)
    server.checkpoint()
    server.stop()
    server = make_server([table()], checkpointer=DefaultCheckpointer(tmp_path, settings="saved"))
    with server.localhost_client() as client:
        assert client.server_info()["t"].max_size == 70


@pytest.mark.parametrize("max_size", [50, 400, 10**6])
def test_keys_survive_another_max_size_where_they_fit(
    make_server: MakeServer, tmp_path: Path, max_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server([table(max_size=100)], checkpointer=DefaultCheckpointer(tmp_path))
    with server.localhost_client() as client:
        keys = fill(client, "t", 60)
        client.checkpoint()
    server.stop()
    server = make_server([table(max_size=max_size)], checkpointer=DefaultCheckpointer(tmp_path))
    with server.localhost_client() as client:
        there = {item[0] for item in listing(client, "t")}
        if max_size < 10**6:
            assert there == set(keys.tolist()[-max_size:])
        else:
            assert len(there) == 60 and "new keys" in caplog.text
        assert sorted(client.sample_batch("t", 1).data["x"]) == [0 if max_size > 50 else 10]
        fill(client, "t", 100, first=500)
        server.check()


def test_tables_with_stripes_keep_them_or_are_dealt_out_anew(
    make_server: MakeServer, tmp_path: Path
) -> None:
    def striped(n: int | None) -> reverb.Table:
        return table("t", reverb.selectors.Uniform(), stripes=n)

    saved(make_server, tmp_path, [striped(3)])
    for n, expected in ((None, 3), (2, 2), (1, 1)):
        server = make_server([striped(n)], checkpointer=DefaultCheckpointer(tmp_path))
        with server.localhost_client() as client:
            assert client._connected().configs[0].stripes == expected
            items = listing(client, "t")
            assert len(items) == 60 and [i[1] for i in items] == sorted(i[1] for i in items)
            server.check()
        server.stop()


def test_a_table_that_is_not_declared_is_an_error_that_names_both(
    make_server: MakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(make_server, tmp_path, [table("a"), table("b")])
    with pytest.raises(ValueError, match=r"'b' but table was not found.*'a', 'b'.*'a', 'c'"):
        make_server([table("a"), table("c")], checkpointer=DefaultCheckpointer(tmp_path))
    server = make_server(
        [table("a"), table("b"), table("c")], checkpointer=DefaultCheckpointer(tmp_path)
    )
    assert "'c' is not in the checkpoint" in caplog.text
    with server.localhost_client() as client:
        sizes = {name: info.current_size for name, info in client.server_info().items()}
    assert sizes == {"a": 60, "b": 60, "c": 0}


def test_the_fallback_is_loaded_where_there_is_none(
    make_server: MakeServer, tmp_path: Path
) -> None:
    path = saved(make_server, tmp_path / "a", [table()])
    for fallback, size in ((path, 60), (tmp_path / "nothing", 0)):
        server = make_server(
            [table()],
            checkpointer=DefaultCheckpointer(tmp_path / "b", fallback_checkpoint_path=fallback),
        )
        with server.localhost_client() as client:
            assert client.server_info()["t"].current_size == size
        server.stop()


def test_a_limiter_goes_on_where_it_was_or_counts_anew(
    make_server: MakeServer, tmp_path: Path
) -> None:
    def limited() -> reverb.Table:
        return table(rate_limiter=reverb.rate_limiters.SampleToInsertRatio(1.0, 10, 10.0))

    server = make_server([limited()], checkpointer=DefaultCheckpointer(tmp_path))
    with server.localhost_client() as client:
        fill(client, "t", 20)
        client.checkpoint()
    server.stop()
    for reset in (False, True):
        made = limited()
        make_server([made], checkpointer=DefaultCheckpointer(tmp_path, reset_limiters=reset))
        assert made.info.current_size == 20
        assert made.can_insert(1) is reset and made.can_sample(1)


def test_items_that_were_sampled_too_often_by_now_are_left_out(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server([table()], checkpointer=DefaultCheckpointer(tmp_path))
    with server.localhost_client() as client:
        fill(client, "t", 10)
        client.sample_batch("t", 3)  # all of them the first item
        client.checkpoint()
    server.stop()
    made = table(max_times_sampled=3)
    server = make_server([made], checkpointer=DefaultCheckpointer(tmp_path))
    assert made.info.current_size == 9
    server.check()


def test_checkpoints_are_written_by_time_and_by_inserts(
    make_server: MakeServer, tmp_path: Path
) -> None:
    each: list[dict[str, Any]] = [{"every_seconds": 0.05}, {"every_inserts": 5}]
    for n, options in enumerate(each):
        root = tmp_path / str(n)
        server = make_server([table()], checkpointer=DefaultCheckpointer(root, **options))
        with server.localhost_client() as client:
            fill(client, "t", 10)
            waiting = threading.Event()
            while server.stats()["checkpoints_written"] < 1:
                waiting.wait(0.01)
        assert server.stats()["checkpoint_failures"] == 0
        server.stop()
        made = table()
        make_server([made], checkpointer=DefaultCheckpointer(root))
        assert made.info.current_size == 10


def test_a_failure_is_counted_and_logged_and_the_server_goes_on(
    make_server: MakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "here"
    server = make_server([table()], checkpointer=DefaultCheckpointer(root, every_inserts=5))
    root.write_text("not a directory")
    with server.localhost_client() as client:
        fill(client, "t", 5)
        waiting = threading.Event()
        while server.stats()["checkpoint_failures"] < 1:
            waiting.wait(0.01)
        assert "could not be written" in caplog.text
        with pytest.raises(reverb.errors.CheckpointError, match="expected a directory"):
            client.checkpoint()
        assert client.server_info()["t"].current_size == 5
    with pytest.raises(reverb.errors.CheckpointError, match="cannot be read"):
        make_server([table()], checkpointer=DefaultCheckpointer(root))


def test_what_was_written_of_a_failed_checkpoint_does_not_stay(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server([table()], checkpointer=DefaultCheckpointer(tmp_path))
    with server.localhost_client() as client:
        fill(client, "t", 5)
        first = Path(client.checkpoint())
        fill(client, "t", 5, first=5)

        def full(fd: int, data: memoryview) -> None:
            os.write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        for module in (checkpoint_data, checkpoint_format):  # steps; index and manifest
            with monkeypatch.context() as patch:
                patch.setattr(module, "write_all", full)
                with pytest.raises(reverb.errors.CheckpointError, match="No space left"):
                    client.checkpoint()
            assert os.listdir(tmp_path) == [first.name]
            assert (first / "manifest.json").exists()
        assert Path(client.checkpoint()).is_dir()


def test_what_is_replaced_while_it_is_written_is_still_saved(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shmreplay import _native

    server = make_server([table(max_size=100)], checkpointer=DefaultCheckpointer(tmp_path))
    client = server.localhost_client()
    fill(client, "t", 100)
    expected = listing(client, "t")
    read = _native.image_rows

    def after_changes(*arguments: Any) -> int:
        fill(client, "t", 300, first=5000)
        server.check()
        client.reset("t")
        server.check()
        return read(*arguments)

    monkeypatch.setattr(_native, "image_rows", after_changes)
    client.checkpoint()
    monkeypatch.undo()
    server.check()
    assert server.stats()["arena_allocations"] <= 4  # all that was held has gone
    client.close()
    server.stop()
    server = make_server([table(max_size=100)], checkpointer=DefaultCheckpointer(tmp_path))
    with server.localhost_client() as client:
        assert listing(client, "t") == expected
        np.testing.assert_array_equal(client.sample_batch("t", 1).data["x"], [0.0])


def test_who_needs_memory_in_a_full_store_ends_the_checkpoint(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shmreplay import _native

    server = make_server(
        [table(max_size=40)], capacity=12 << 20, checkpointer=DefaultCheckpointer(tmp_path)
    )
    client = server.localhost_client()
    frame = np.zeros((1, 200_000), np.uint8)
    for i in range(40):
        client.insert_batch("t", {"frame": frame + i % 200})
    first = client.checkpoint()
    threads: list[threading.Thread] = []
    read = _native.image_rows

    def insert_many() -> None:
        for i in range(120):
            client.insert_batch("t", {"frame": frame + i % 200})

    def meanwhile(store: Any, *arguments: Any) -> int:
        if not threads:
            threads.append(threading.Thread(target=insert_many))
            threads[0].start()
            while not _native.hold_unwanted(store):
                threads[0].join(0.001)
                assert threads[0].is_alive(), "there was room for all of it"
        return read(store, *arguments)

    for i in range(40):
        client.insert_batch("t", {"frame": frame + i % 200})
    monkeypatch.setattr(checkpoint_data, "_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(_native, "image_rows", meanwhile)
    with pytest.raises(reverb.errors.CheckpointError, match="larger"):
        client.checkpoint()
    threads[0].join()
    assert client.server_info()["t"].current_size == 40
    server.check()
    client.close()
    assert Path(first).is_dir() and len(saved_in(tmp_path)) == 1


@pytest.mark.parametrize("verify", [True, False])
def test_a_bandwidth_is_kept_to(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    rests: list[float] = []
    clock = SimpleNamespace(sleep=rests.append, monotonic=lambda: sum(rests))
    monkeypatch.setattr(checkpoint_data, "time", clock)
    settings = DefaultCheckpointer(tmp_path, bandwidth=5e5, verify=verify)
    server = make_server([table()], checkpointer=settings)
    with server.localhost_client() as client:
        client.insert_batch("t", {"x": np.zeros((5, 600_000), np.uint8)})
        saved = server.checkpoint()
        assert sum(rests) == pytest.approx(saved.new_bytes / 5e5) and max(rests) <= 0.1
        rests.clear()
        client.checkpoint()  # nothing of it is new: at most it is read
        assert sum(rests) == pytest.approx(saved.new_bytes / 5e5 if verify else 0)


def test_the_manifest_can_be_read(make_server: MakeServer, tmp_path: Path) -> None:
    path = saved(make_server, tmp_path, [table()])
    manifest = json.loads((Path(path) / "manifest.json").read_text())
    assert manifest["tables"][0]["settings"]["max_size"] == 1000
    assert manifest["tables"][0]["stripes"][0]["items"] == 60
