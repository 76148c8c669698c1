"""Servers and actors that Ray places on the nodes of a cluster, and a learner that samples all."""

from __future__ import annotations

import re

import pytest

from tests.process.test_scripts import numbers_after, run

pytest.importorskip("ray", reason="Ray is not installed: see tests/README.md")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """To those who make Ray."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


def test_a_cluster_goes_on_while_a_server_is_killed_and_comes_back() -> None:
    output = run("ray_cluster.py", "--updates", "400", "--kill")
    assert "2 nodes, 2 actors, servers at tcp://" in output
    assert "took over store" in output
    assert "a server was killed, and is back" in output
    errors = [float(e) for e in re.findall(r"error of the values: ([0-9.]+)", output)]
    assert len(errors) == 2 and errors[-1] < 0.1
    sampled = numbers_after("sampled from each server:", output)
    assert len(sampled) == 2 and sum(sampled) == 64 * 420
    assert min(sampled) > 64 * 420 / 10


def test_bridges_without_keys_are_to_be_asked_for() -> None:
    output = run("ray_cluster.py", "--updates", "40", "--nodes", "1", "--insecure")
    assert "1 nodes, 1 actors" in output
    assert numbers_after("sampled from each server:", output) == [64 * 40]
