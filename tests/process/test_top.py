"""`shmreplay top` and `info`: what they make of what a store says, and what they show of it."""

from __future__ import annotations

import asyncio
import html
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from textual.widgets import Static

import shmreplay as reverb
from shmreplay import cli, errors, monitor
from shmreplay.monitor import Rates, Snapshot
from shmreplay.top import TopApp
from tests.conftest import free_port
from tests.process.servants import make_tables, rows
from tests.process.top_data import SNAPSHOTS

MakeServer = Callable[..., reverb.Server]
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "top.txt"

# --- what two looks come to ---------------------------------------------------------------------


def test_rates_are_what_was_done_between_two_looks() -> None:
    view = monitor.view(SNAPSHOTS[1], SNAPSHOTS[0])
    assert view.rates == Rates(12_000, 45_000, 5_120, 12 * 2**20)
    replay, prioritized, queue, broken = view.tables
    assert replay.rates == Rates(12_000, 45_000, 0, 0)
    assert prioritized.rates == Rates(0, 1_000, 5_120, 0)
    assert (replay.ratio, replay.target) == (1_990_000 / 974_000, None)
    assert (prioritized.ratio, prioritized.target) == (161_000 / 40_000, 4.0)
    assert (queue.ratio, queue.target) == (None, 1.0)
    assert [each.poisoned for each in view.tables] == [False, False, False, True]
    assert "'broken' is shut" in view.problems[0]
    assert not broken.sample_blocked_by
    by_pid = {each.pid: each for each in view.processes}
    assert by_pid[4101].rates == Rates(12_000, 0, 0, 12 * 2**20)  # not what session 3 had counted
    assert by_pid[4102].rates == Rates(0, 45_000, 5_120, 0)
    assert (by_pid[4102].oldest_pin_s, by_pid[4102].borrowed_items) == (31.5, 256)
    assert by_pid[4103].alive is False
    assert sum(view.memory.values()) == view.committed_bytes


def test_one_look_has_no_rates() -> None:
    view = monitor.view(SNAPSHOTS[0])
    assert view.rates is None
    assert {each.rates for each in view.tables} == {each.rates for each in view.processes} == {None}


def test_why_a_limiter_blocks() -> None:
    _, prioritized, queue, _ = monitor.view(SNAPSHOTS[1]).tables
    assert "below min_diff=-1000" in prioritized.sample_blocked_by
    assert not prioritized.insert_blocked_by
    assert "0 items, below min_size_to_sample=1" in queue.sample_blocked_by


def test_another_store_of_the_same_name_has_no_rates_yet() -> None:
    other = Snapshot(SNAPSHOTS[1].at_s, {**SNAPSHOTS[1].about, "generation": "f" * 16})
    assert monitor.view(other, SNAPSHOTS[0]).rates is None


def test_counters_that_were_reset_give_no_negative_rates() -> None:
    before, now = SNAPSHOTS
    tables = [{**each, "inserts": 50, "samples": 0} for each in now.about["tables"]]
    view = monitor.view(Snapshot(now.at_s, {**now.about, "tables": tables}), before)
    assert view.tables[0].rates == Rates(25, 0, 0, 0)


# --- the screen ---------------------------------------------------------------------------------


def screen_of(source: Callable[[], Snapshot], *shown: Snapshot) -> tuple[list[str], str]:
    """Lines that the app shows, and its picture."""

    async def run() -> str:
        app = TopApp(source, 3600.0)
        async with app.run_test(size=(118, 34)) as pilot:
            await app.workers.wait_for_complete()
            for each in shown:
                app.show(each)
            await pilot.pause()
            return app.export_screenshot()

    picture = asyncio.run(run())
    return text_of(picture), picture


def text_of(picture: str) -> list[str]:
    """The lines of a screenshot, which is an SVG with a text element for each run of a style."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(
        r'<text [^>]*?x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', picture
    ):
        lines.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    found = []
    for _, runs in sorted(lines.items()):
        line = ""
        for x, text in sorted(runs):
            line = line.ljust(round(x / 12.2)) + text
        found.append(line.rstrip())
    return found


def test_the_screen_is_as_it_was() -> None:
    """If it is to look different: write what `lines` holds to the file."""
    lines, picture = screen_of(lambda: SNAPSHOTS[0], SNAPSHOTS[1])
    shown = [line for line in lines if line and "Quit" not in line and "shmreplay top" not in line]
    assert "\n".join(shown) + "\n" == GOLDEN.read_text()
    style = re.findall(r'<text class="([\w-]+)"[^>]*>broken(?:&#160;)*</text>', picture)
    color = re.search(rf"\.{style[0]} {{ fill: #(\w\w)(\w\w)(\w\w)", picture)
    assert color is not None
    red, green, blue = (int(part, 16) for part in color.groups())
    assert red > 2 * max(green, blue)


def test_a_server_that_is_gone_is_said() -> None:
    def gone() -> Snapshot:
        raise errors.ServerClosedError("the server is gone; start it again")

    lines, _ = screen_of(gone)
    assert any("the server is gone; start it again" in line for line in lines)


def test_a_pause_stops_looking() -> None:
    looked = []

    def look() -> Snapshot:
        looked.append(1)
        return SNAPSHOTS[0]

    async def run() -> None:
        app = TopApp(look, 3600.0)
        async with app.run_test() as pilot:
            await app.workers.wait_for_complete()
            await pilot.press("p")
            app.look()
            await app.workers.wait_for_complete()
            assert len(looked) == 1
            await pilot.press("p")
            app.look()
            await app.workers.wait_for_complete()
            assert len(looked) == 2
            assert app.query_one("#head", Static).display
            await pilot.press("q")

    asyncio.run(run())


# --- of a real store, here and over the bridge --------------------------------------------------


@pytest.mark.parametrize("where", ["name", "address", "port", "bridge"])
def test_the_same_from_everywhere(
    make_server: MakeServer, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    server = make_server(make_tables(), port=free_port())
    client = server.localhost_client()
    client.insert_batch("replay", rows(*range(100)))
    places = {"name": server.name, "address": server.address}
    places |= {"port": f"localhost:{server.port}", "bridge": f"tcp://localhost:{server.port}"}
    with client.borrow("replay", 3) as items:
        assert len(items) == 3
        assert cli.main(["info", places[where], "--json"]) == 0
        about = json.loads(capsys.readouterr().out)
        assert cli.main(["info", places[where], "--seconds", "0.01"]) == 0
        text = capsys.readouterr().out
        assert cli.main(["top", places[where], "--json", "--count", "2", "--interval", "0.1"]) == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (about["name"], about["state"]) == (server.name, "served")
    assert about["tables"][0]["inserts"] == 100
    assert sum(each["items"] for each in about["borrowed"]) == 3
    assert sum(each["inserts"] for each in about["sessions"]) == 100
    for word in (server.name, "replay", "INSERTS/S", "WRITTEN/S", "has borrowed 3 items"):
        assert word in text
    assert shown[0]["rates"] is None
    assert shown[1]["rates"][0] == 0
    assert shown[1]["processes"][0]["borrowed_items"] == 3
    lines, _ = screen_of(monitor.source(places[where]))
    assert any(line.lstrip("│ ").startswith("replay") for line in lines)


def test_info_says_what_a_limiter_waits_for(
    make_server: MakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server([reverb.Table.queue("queue", 2)])
    server.localhost_client().insert_batch("queue", {"x": np.zeros(2)})
    assert cli.main(["info", server.name]) == 0
    assert "queue: an insert would bring" in capsys.readouterr().out


def test_top_says_what_it_needs(
    make_server: MakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(make_tables())
    assert cli.main(["top", server.name]) == 2
    assert "top needs a terminal" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "shmreplay.top")
    assert cli.main(["top", server.name]) == 2
    assert "pip install 'shmreplay[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["top", "nosuch"], "no store 'nosuch'"),
        (["top", "a:b:c"], "got 'a:b:c'"),
        (["top", "tcp://host:1", "--secret", "x"], "both or neither"),
        (["top", "tcp://host:1", "--interval", "0"], "--interval 0: expected"),
        (["top", "tcp://host:1", "--count", "3"], "--count 3: expected"),
        (["info", "tcp://host:1", "--seconds", "nan"], "--seconds nan: expected"),
    ],
)
def test_bad_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err
