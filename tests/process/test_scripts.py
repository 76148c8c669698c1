"""The small programs in scripts/, each run as a user runs it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
DEADLINE = 280.0  # seconds; a run takes one or two, TensorFlow many more to start


def run(name: str, *arguments: str) -> str:
    """Runs a program and returns its output; it must end well and leave nothing behind."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"{name} hangs:\n{output}")
    assert process.returncode == 0, output
    assert "Traceback" not in output, output
    theirs = re.compile(rf"(?<!\d){process.pid}(?!\d)")
    left = [entry.name for entry in SHARED_MEMORY.iterdir() if theirs.search(entry.name)]
    assert not left
    return output


def numbers_after(text: str, output: str) -> list[float]:
    (line,) = [line for line in output.splitlines() if text in line]
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line.split(text)[1])]


def test_a_queue_for_on_policy_actors() -> None:
    output = run("on_policy_queue.py", "--updates", "30")
    assert numbers_after("update 30: mean reward", output)[0] > 0.8
    assert numbers_after("that a rollout was made with:", output)[0] < 30


def test_prioritized_nstep_dqn() -> None:
    output = run("prioritized_nstep_dqn.py", "--batches", "800")
    values = numbers_after("value of walking to the end:", output)
    assert len(values) == 9 and values[-1] > 0.9
    # Sampling is random, and at the far end the two actions are nearly the same.
    assert set(numbers_after("the greedy action leads back:", output)) <= {0, 1}
    # The limiter kept writing and sampling in step, to within its buffer.
    inserted, sampled = re.findall(r"(\d+) transitions, (\d+) samples", output)[0]
    assert int(sampled) == 800 * 32
    assert abs(int(sampled) - 8 * (int(inserted) - 200)) <= 1600 + 800 + 8


def test_overlapping_sequences_hold_each_frame_once() -> None:
    output = run("r2d2_sequences.py", "--episodes", "10")
    assert "100 sequences of 1200 frames" in output
    (once,) = numbers_after("one copy of each frame:", output)
    (used,) = numbers_after("in memory, with all else:", output)
    (copied,) = numbers_after("every stack of every sequence copied:", output)
    assert once <= used < 1.1 * once
    assert copied > 6 * once


def needs(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.mark.slow
def test_acmes_adders() -> None:
    needs("acme", "tensorflow", "jax", "dm_env", "tree", "absl")
    output = run("acme_adders.py", "--steps", "20")
    # One for each start, and at the end of the episode those over fewer steps.
    assert "22 transitions of an episode of 20 steps" in output
    assert "16 of them sampled; their rewards are right" in output


@pytest.mark.slow
def test_tf_agents_replay_buffer() -> None:
    needs("tf_agents", "tensorflow", "tf_keras", "tensorflow_probability", "gin", "gym")
    output = run("tf_agents_replay.py", "--episodes", "4")
    assert "36 sequences of 4 episodes" in output
    assert "a batch of 8: its steps follow" in output
