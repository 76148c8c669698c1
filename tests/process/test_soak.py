"""`scripts/soak` in short: counts and accounting, whatever the speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    sys.modules.pop("soak_run", None)
    import soak_run

    return soak_run


def test_memory_stays_flat(soak: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines = soak.run(4.0, seed=3, every=1.0, actors=2, learners=1)
    assert len(lines) == 4
    assert sum(line.items for line in lines) > 0 < sum(line.samples for line in lines)
    assert soak.accounting(lines) == []
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_what_grows_or_slows_down_is_found(soak: Any) -> None:
    stats = {
        "bytes/data_bytes": float(soak.BOUND),
        "arena_used_bytes": 50e6,
        "committed_bytes": 60e6,
        "fragmented_bytes": 1e6,
    }
    good = soak.Line(60.0, 6000, 600, 100.0, 0.01, 100 << 20, stats)
    assert soak.verdict([good, good._replace(items=5401)]) == (soak.PASS, [])
    bad = [
        good._replace(items=5399),
        good._replace(private_bytes=120 << 20),
        good._replace(stats={**stats, "bytes/data_bytes": soak.BOUND + 1.0}),
        good._replace(stats={**stats, "arena_used_bytes": 70e6}),
        good._replace(stats={**stats, "committed_bytes": 90e6}),
        good._replace(stats={**stats, "fragmented_bytes": 20e6}),
    ]
    for line in bad:
        result, problems = soak.verdict([good, line])
        assert result == soak.FAIL and len(problems) == 1
    # On a machine that others use a rate says nothing, but memory does.
    shared = good._replace(others=0.2)
    for lines in ([shared, good], [good, shared], [good, bad[0]._replace(others=0.2)]):
        result, (why,) = soak.verdict(lines)
        assert result == soak.UNDECIDED and "20% of it" in why
    assert soak.verdict([shared, bad[1]])[0] == soak.FAIL


def test_it_writes_a_summary_and_all_lines(
    soak: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "soak.json"
    arguments = ["--seconds", "2", "--every", "1", "--actors", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["soak", *arguments])
    code = soak.main()
    written = json.loads(path.read_text())
    about = written["summary"]
    assert code == soak.EXIT_CODES[about["verdict"]]
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == about["verdict"] and len(written["lines"]) == 2
    first, last = written["lines"]
    assert about["rate_ratio"] == last["rate"] / first["rate"]
    assert about["items"] > 0 < about["samples"] and about["fragmentation_most"] < 0.25
    assert any(line.startswith("gaps: ") for line in out)
