"""Prometheus metrics of a store: a custom collector for ``prometheus_client``.

Register a `StoreCollector` once, in any process that can reach the store: each scrape then asks
anew. Needs ``pip install 'shmreplay[metrics]'``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from shmreplay import address, counters
from shmreplay.client import Client
from shmreplay.errors import ArgumentTypeError, ReverbError
from shmreplay.server import Server

__all__ = ["StoreCollector", "metric_name"]

_log = logging.getLogger(__name__)

# Seconds that a scrape waits for a server: Prometheus's own timeout is 10.
_PATIENCE_S: Final = 3.0
_OF_STORE: Final = {**counters.STORE, **counters.SERVER}


def metric_name(key: str, *, of_table: bool) -> str:
    """The metric of a key of `counters`, as Prometheus shows it.

    Args:
        key: As in `counters.STORE`, `counters.SERVER` or `counters.TABLE`.
        of_table: Which of the two.
    """
    kind = (counters.TABLE if of_table else _OF_STORE)[key].kind
    base = f"{key.removesuffix('_s')}_seconds" if key.endswith("_s") else key
    name = f"shmreplay_{'table_' if of_table else ''}{base}"
    return f"{name}_total" if kind == counters.COUNTER else name


class StoreCollector(Collector):
    """What `stats()` says, as metrics with the labels ``store`` and, of tables, ``table``.

    ``shmreplay_up`` is 1 where the store could be asked, and all there is where it could not.
    """

    def __init__(self, source: Server | Client | str, store: str | None = None) -> None:
        """Asks nothing yet.

        Args:
            source: A server, a client, or an address as `Client` takes it.
            store: Value of the label of this name; None: the store's name, or the address.

        Raises:
            ArgumentTypeError: The source is none of these.
            InvalidArgumentError: It is no address.
        """
        if isinstance(source, str):
            address.parse(source)
            remote = address.RemoteOptions(timeout=_PATIENCE_S)
            self._source: Server | Client = Client(source, remote)
            known = source
        elif isinstance(source, Client):
            self._source, known = source, source.server_address
        elif isinstance(source, Server):
            self._source, known = source, source.name
        else:
            raise ArgumentTypeError(
                f"Got the source {source!r}; expected a Server, a Client, or an address like"
                " 'localhost:8000' or 'shm://name'."
            )
        self._store = known if store is None else store

    def describe(self) -> Iterable[Metric]:
        """Says nothing before a scrape: a server need not be up when this is registered."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Asks the store, and gives its metrics."""
        up = GaugeMetricFamily("shmreplay_up", "1 if the store can be asked.", labels=["store"])
        try:
            stats = self._stats()
        except (ReverbError, OSError) as error:
            _log.warning("no metrics of %s: %s", self._store, error)
            up.add_metric([self._store], 0.0)
            return [up]
        up.add_metric([self._store], 1.0)
        families: dict[tuple[bool, str], CounterMetricFamily | GaugeMetricFamily] = {}
        for name, value in stats.items():
            table, _, key = name.rpartition("/")
            of_table = bool(table)
            known = counters.TABLE if of_table else _OF_STORE
            if key not in known:  # of a server of a later version
                continue
            family = families.get((of_table, key))
            if family is None:
                counts = known[key].kind == counters.COUNTER
                family = (CounterMetricFamily if counts else GaugeMetricFamily)(
                    metric_name(key, of_table=of_table),
                    known[key].about,
                    labels=["store", "table"] if of_table else ["store"],
                )
                families[of_table, key] = family
            family.add_metric([self._store, table] if of_table else [self._store], value)
        return [up, *families.values()]

    def _stats(self) -> dict[str, float]:
        if isinstance(self._source, Client):
            # `stats` waits for a server that is not up yet; a scrape must not.
            self._source.server_info(timeout=_PATIENCE_S)
        return self._source.stats()
