#!/usr/bin/env python3
"""Writes a Grafana dashboard of the metrics that `shmreplay.metrics` gives to Prometheus.

scripts/grafana_dashboard.py > shmreplay.json, then "Import" in Grafana; it asks for the data
source. The same text every time.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final, NamedTuple

PER_SECOND: Final = "[$__rate_interval]"
OF_STORE: Final = '{store=~"$store"}'
OF_TABLE: Final = '{store=~"$store",table=~"$table"}'


class Panel(NamedTuple):
    """A graph: its title, unit, and lines as (expression, label)."""

    title: str
    unit: str
    lines: list[tuple[str, str]]
    about: str = ""


def _rate(metric: str, of: str = OF_TABLE) -> str:
    return f"rate({metric}{of}{PER_SECOND})"


INSERTS_RATE: Final = _rate("shmreplay_table_inserts_total")
SAMPLES_RATE: Final = _rate("shmreplay_table_samples_total")

TABLE_PANELS: Final = [
    Panel("Items", "short", [(f"shmreplay_table_size{OF_TABLE}", "{{table}}")]),
    Panel("Inserts a second", "ops", [(INSERTS_RATE, "{{table}}")]),
    Panel("Samples a second", "ops", [(SAMPLES_RATE, "{{table}}")]),
    Panel(
        "Samples for each insert",
        "none",
        [
            (
                f"{SAMPLES_RATE} / ({INSERTS_RATE} > 0)",
                "{{table}}",
            ),
            (f"shmreplay_table_samples_per_insert{OF_TABLE}", "{{table}}, limiter"),
        ],
        "Of the time shown, beside the limiter's samples_per_insert (a limiter without bounds on"
        " the two has one as well).",
    ),
    Panel(
        "Threads that are held back",
        "short",
        [
            (f"shmreplay_table_insert_waiters{OF_TABLE}", "{{table}}, inserts"),
            (f"shmreplay_table_sample_waiters{OF_TABLE}", "{{table}}, samples"),
        ],
    ),
    Panel(
        "Seconds waited in a second",
        "none",
        [
            (_rate("shmreplay_table_insert_wait_seconds_total"), "{{table}}, inserts"),
            (_rate("shmreplay_table_sample_wait_seconds_total"), "{{table}}, samples"),
        ],
        "By all threads together: 2 is two threads that always wait.",
    ),
    Panel(
        "Items that leave in a second",
        "ops",
        [
            (_rate("shmreplay_table_evicted_total"), "{{table}}, evicted"),
            (_rate("shmreplay_table_consumed_total"), "{{table}}, sampled for the last time"),
            (_rate("shmreplay_table_deleted_total"), "{{table}}, deleted"),
        ],
    ),
    Panel(
        "Priorities set in a second",
        "ops",
        [
            (_rate("shmreplay_table_updates_total"), "{{table}}"),
            (_rate("shmreplay_table_missed_updates_total"), "{{table}}, item gone"),
        ],
    ),
]

STORE_PANELS: Final = [
    Panel(
        "Memory",
        "bytes",
        [
            (f"shmreplay_arena_used_bytes{OF_STORE}", "steps and items"),
            (f"shmreplay_arena_free_bytes{OF_STORE}", "ready for use"),
            (f"shmreplay_index_bytes{OF_STORE}", "indexes"),
            (f"shmreplay_fixed_bytes{OF_STORE}", "fixed"),
            (f"shmreplay_capacity_bytes{OF_STORE}", "capacity"),
        ],
    ),
    Panel(
        "Bytes written in a second", "Bps", [(_rate("shmreplay_written_bytes_total", OF_STORE), "")]
    ),
    Panel(
        "Processes and sessions",
        "short",
        [
            (f"shmreplay_participants{OF_STORE}", "processes"),
            (f"shmreplay_sessions{OF_STORE}", "sessions"),
        ],
    ),
    Panel("Oldest borrowed batch", "s", [(f"shmreplay_oldest_borrow_seconds{OF_STORE}", "age")]),
    Panel(
        "Repairs and shut tables",
        "short",
        [
            (f"shmreplay_repairs_total{OF_STORE}", "repairs"),
            (f"shmreplay_poisoned_tables{OF_STORE}", "tables that are shut"),
        ],
    ),
    Panel("Up", "none", [(f"shmreplay_up{OF_STORE}", "{{store}}")]),
]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    for number, panel in enumerate([*TABLE_PANELS, *STORE_PANELS]):
        panels.append(_panel(number, panel))
    variables = [_variable("store", "shmreplay_up"), _variable("table", "shmreplay_table_size")]
    return {
        "__inputs": [
            {
                "name": "DS_PROMETHEUS",
                "label": "Prometheus",
                "type": "datasource",
                "pluginId": "prometheus",
            }
        ],
        "title": "shmreplay",
        "uid": "shmreplay",
        "tags": ["shmreplay"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _variable(name: str, metric: str) -> dict[str, Any]:
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": _source(),
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _source(),
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": label}
            for i, (expression, label) in enumerate(panel.lines)
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=2) + "\n")
