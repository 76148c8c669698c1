"""Counters: what `stats` counts, that each key is explained, and what Prometheus gets of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grafana_dashboard
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import shmreplay as reverb
from shmreplay import counters
from shmreplay.metrics import StoreCollector, metric_name
from tests.conftest import free_port

MakeServer = Callable[..., reverb.Server]
ROOT = Path(__file__).resolve().parents[2]


def table(name: str = "replay", **options: Any) -> reverb.Table:
    select = reverb.selectors
    limiter = options.pop("limiter", reverb.rate_limiters.MinSize(1))
    options = {"max_size": 10, "rate_limiter": limiter, **options}
    return reverb.Table(name, select.Uniform(), select.Fifo(), **options)


def rows(n: int) -> dict[str, Any]:
    return {"x": np.zeros((n, 4), np.float32)}


@pytest.mark.parametrize("bridge", [False, True])
def test_stats_are_numbers_whose_keys_are_explained(make_server: MakeServer, bridge: bool) -> None:
    extension = reverb.TableExtension()
    tables = [table(), table("told", extensions=[extension])]
    server = make_server(tables, port=free_port() if bridge else None)
    with reverb.Client(f"tcp://localhost:{server.port}" if bridge else server.address) as client:
        remote = client.stats()
    stats = server.stats()
    here = {key for key in stats if key.endswith("/extension_errors")} | set(counters.SERVER)
    assert set(stats) - here == set(remote)
    assert all(type(value) in (int, float) for value in stats.values())
    for name in tables:
        found = {k.removeprefix(f"{name.name}/") for k in stats if k.startswith(f"{name.name}/")}
        assert found | {"extension_errors"} == set(counters.TABLE)
    assert {key for key in stats if "/" not in key} == {*counters.STORE, *counters.SERVER}
    json.dumps(stats, allow_nan=False)


def test_what_is_counted(make_server: MakeServer) -> None:
    server = make_server([table(), reverb.Table.queue("queue", 100)])
    client = server.localhost_client()
    keys = client.insert_batch("replay", rows(25))
    client.insert_batch("queue", rows(3))
    client.sample_batch("replay", 7)
    client.sample_batch("queue", 2)
    client.update_priorities("replay", keys[-4:], np.ones(4))
    client.update_priorities("replay", keys[:2], np.ones(2))
    client.mutate_priorities("replay", deletes=[int(keys[-1]), int(keys[-2])])
    with client.trajectory_writer(1) as writer:
        writer.append({"x": np.zeros(100, np.uint8)})
    writer.close()
    stats = server.stats()
    assert (stats["inserts"], stats["samples"]) == (28, 9)
    assert stats["updates"] == 4
    assert stats["written_bytes"] == 28 * 16 + 100
    assert [stats[f"replay/{k}"] for k in ("inserts", "samples", "updates", "missed_updates")] == [
        25,
        7,
        4,
        2,
    ]
    assert [stats[f"replay/{k}"] for k in ("deletes", "evicted", "deleted", "consumed")] == [
        17,
        15,
        2,
        0,
    ]
    assert [stats[f"queue/{k}"] for k in ("deletes", "evicted", "deleted", "consumed")] == [
        2,
        0,
        0,
        2,
    ]
    client.reset("replay")
    after = server.stats()
    counted = [key for key, about in counters.TABLE.items() if about.kind == counters.COUNTER]
    assert not any(after.get(f"replay/{key}", 0) for key in counted)
    assert after["inserts"] == 28  # the store's go on


def test_counts_outlive_who_counted(make_server: MakeServer) -> None:
    server = make_server([table()])
    for _ in range(3):
        with reverb.Client(server.address) as client:
            client.insert_batch("replay", rows(5))
    assert server.stats()["inserts"] == 15


def test_waits_are_counted(make_server: MakeServer) -> None:
    server = make_server([reverb.Table.queue("queue", 2)])
    client = server.localhost_client()
    with pytest.raises(reverb.DeadlineExceededError):
        client.sample_batch("queue", 1, timeout=0.05)
    client.insert_batch("queue", rows(2))
    with pytest.raises(reverb.DeadlineExceededError):
        client.insert_batch("queue", rows(1), timeout=0.05)
    stats = server.stats()
    for what in ("insert", "sample"):
        assert stats[f"queue/{what}s_refused"] >= 1
        assert 0.02 < stats[f"queue/{what}_wait_s"] < 60


# --- Prometheus ---------------------------------------------------------------------------------


def scrape(collector: StoreCollector) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    registry.register(collector)
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found[sample.name, sample.labels.get("table", "")] = sample.value
    return found


@pytest.mark.parametrize("source", ["server", "client", "name", "port", "bridge"])
def test_metrics_are_the_stats(make_server: MakeServer, source: str) -> None:
    server = make_server([table()], port=free_port())
    server.localhost_client().insert_batch("replay", rows(25))
    of: dict[str, Any] = {"server": server, "client": server.localhost_client()}
    of |= {"name": server.address, "port": f"localhost:{server.port}"}
    of["bridge"] = f"tcp://localhost:{server.port}"
    found = scrape(StoreCollector(of[source], store="mine"))
    assert found["shmreplay_up", ""] == 1
    assert found["shmreplay_table_inserts_total", "replay"] == 25
    assert found["shmreplay_table_size", "replay"] == 10
    assert found["shmreplay_table_insert_wait_seconds_total", "replay"] == 0
    assert found["shmreplay_capacity_bytes", ""] == 32 << 20
    not_asked = 0 if source == "server" else len(counters.SERVER)
    assert len(found) == 1 + len(server.stats()) - not_asked


def test_metrics_of_a_server_that_is_gone(unique_name: Callable[[], str]) -> None:
    found = scrape(StoreCollector(f"shm://{unique_name()}"))
    assert found == {("shmreplay_up", ""): 0.0}


def test_what_is_no_source() -> None:
    with pytest.raises(reverb.errors.ArgumentTypeError, match=r"Got the source 7.*expected a"):
        StoreCollector(7)  # type: ignore[arg-type]
    with pytest.raises(reverb.errors.InvalidArgumentError, match="address"):
        StoreCollector("nowhere")


def test_the_dashboard_names_metrics_that_there_are() -> None:
    there = {metric_name(key, of_table=True) for key in counters.TABLE}
    there |= {metric_name(key, of_table=False) for key in {**counters.STORE, **counters.SERVER}}
    there |= {"shmreplay_up"}
    text = json.dumps(grafana_dashboard.dashboard())
    named = set(re.findall(r"\bshmreplay_\w+", text))
    assert len(named) > 20
    assert named <= there


def test_the_dashboard_is_written_the_same_each_time() -> None:
    run = [sys.executable, str(ROOT / "scripts" / "grafana_dashboard.py")]
    texts = [
        subprocess.run(
            run, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    panels = json.loads(texts[0])["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
