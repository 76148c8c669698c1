"""Processes that a test may kill, and store names of which nothing stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.servants import Other


@pytest.fixture
def store_name(unique_name: Callable[[], str]) -> Iterator[str]:
    """A store's name; whatever a killed process left of it is removed."""
    name = unique_name()
    yield name
    for suffix in ("", ".lease", ".path"):
        Path(f"/dev/shm/shmreplay.{os.geteuid()}.{name}{suffix}").unlink(missing_ok=True)


@pytest.fixture
def others() -> Iterator[Callable[[], Other]]:
    """Starts other processes, which are killed when the test is over."""
    started: list[Other] = []

    def start() -> Other:
        started.append(Other())
        return started[-1]

    yield start
    for other in started:
        other.close()
