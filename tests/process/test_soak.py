"""`scripts/soak` in short: counts and accounting, whatever the speed."""

from __future__ import annotations

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
    assert all(line.items > 0 for line in lines)
    assert soak.accounting(lines) == []
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_what_grows_or_slows_down_is_found(soak: Any) -> None:
    stats = {
        "bytes/data_bytes": float(soak.BOUND),
        "arena_used_bytes": 50e6,
        "committed_bytes": 60e6,
        "fragmented_bytes": 1e6,
    }
    good = soak.Line(60.0, 6000, 100.0, 100 << 20, stats)
    assert soak.verdict([good, good]) == []
    bad = [
        good._replace(items=5000, cpu_seconds=110.0),
        good._replace(private_bytes=200 << 20),
        good._replace(stats={**stats, "bytes/data_bytes": soak.BOUND + 1.0}),
        good._replace(stats={**stats, "arena_used_bytes": 70e6}),
        good._replace(stats={**stats, "committed_bytes": 90e6}),
        good._replace(stats={**stats, "fragmented_bytes": 20e6}),
    ]
    for line in bad:
        assert len(soak.verdict([good, line])) == 1
