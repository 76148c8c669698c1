"""Tables as most tests want them, and an extension that holds up what it is told."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import shmreplay as reverb

if TYPE_CHECKING:
    from shmreplay.extensions import ExtensionItem

PATIENCE = 60.0
"""Seconds within which what waits goes on. Nothing is expected to come near it."""


def usual_table(name: str = "t", **options: Any) -> reverb.Table:
    """A table of 1,000 items, sampled uniformly, the oldest removed, but for what is given."""
    usual: dict[str, Any] = {
        "sampler": reverb.selectors.Uniform(),
        "remover": reverb.selectors.Fifo(),
        "max_size": 1000,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
    }
    return reverb.Table(name, **{**usual, **options})


class Gate(reverb.TableExtension):
    """Is behind while it is closed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def on_insert(self, item: ExtensionItem) -> None:
        if not self.open.is_set():
            self.reached.set()
        assert self.open.wait(PATIENCE)
