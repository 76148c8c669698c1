"""DeepMind Acme's reverb adders, on shmreplay in Reverb's place. Skipped where Acme is not there.

To run it: `pip install --no-deps dm-acme && pip install tensorflow jax dm-env dm-tree absl-py`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = ("acme", "tensorflow", "jax", "dm_env", "tree", "absl")
PROGRAM = Path(__file__).with_name("acme_programs.py")

missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["transition", "sequence", "episode", "transitions"])
def test_acme(what: str) -> None:
    root = str(PROGRAM.parents[2])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": root, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " 0 failed" in done.stdout or "as they should be" in done.stdout
