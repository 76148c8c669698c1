"""The same random calls to dm-reverb and to shmreplay. Skipped where dm-reverb is not installed.

To run it: `pip install 'shmreplay[peers]'` on Python 3.11. `python -m bench.differential` goes on
for longer.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from bench import differential


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # TensorFlow has warnings of its own
@pytest.mark.skipif(importlib.util.find_spec("reverb") is None, reason="dm-reverb is not installed")
def test_both_answer_the_same() -> None:
    report = differential.run(programs=25, calls=60, seed=1)
    assert report.differences == []
    assert report.programs == 25
    assert report.compared > 5000
    assert {"insert", "create_item", "sample", "mutate_priorities"} <= set(report.calls)


def test_a_difference_is_seen() -> None:
    """The comparison itself: it must be able to fail."""
    assert differential._equal((1, 0.25, np.zeros(3)), (1, 0.25, np.zeros(3)))
    different = [
        (1, 2),
        (0.25, 0.26),
        (np.zeros(3), np.zeros(4)),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros(3), np.ones(3)),
        ([1], [1, 2]),
    ]
    assert not any(differential._equal(first, second) for first, second in different)
