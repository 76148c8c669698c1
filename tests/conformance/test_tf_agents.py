"""TF-Agents' replay buffer and adders, on shmreplay in Reverb's place.

Skipped where they are not there. To run it: `pip install tensorflow tf-keras gin-config decorator
tensorflow-probability cloudpickle`, then `pip install --no-deps tf-agents gym gym_notices mock`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = ("tf_agents", "tensorflow", "tf_keras", "tensorflow_probability", "gin", "gym", "mock")
ROOT = str(Path(__file__).parents[2])

missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")

PROGRAM = """
import builtins, sys, unittest
import numpy as np
import shmreplay
sys.modules["reverb"] = shmreplay
from tf_agents.replay_buffers import {module} as module
# The tests use int() on arrays of one element with dimensions, which newer numpy refuses.
module.int = lambda value: builtins.int(np.asarray(value).item())
suite = unittest.defaultTestLoader.loadTestsFromTestCase(module.{case})
result = unittest.TextTestRunner(stream=sys.stdout).run(suite)
print(f"ran {{result.testsRun}} tests")
sys.exit(0 if result.wasSuccessful() and result.testsRun > 1 else 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "case"),
    [
        ("reverb_utils_test", "ReverbObserverTest"),
        ("reverb_utils_test", "ReverbTableTests"),
        ("reverb_replay_buffer_test", "ReverbReplayBufferTest"),
    ],
)
def test_tf_agents_own_tests(module: str, case: str) -> None:
    environment = {"PYTHONPATH": ROOT, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module, case=case)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
