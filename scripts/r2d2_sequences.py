"""Overlapping sequences of stacked frames, as R2D2 wants them, with each frame in memory once.

A sequence has 20 steps, a new one begins every 10, and the network sees the newest 4 frames at each
step. Copied out, every frame would be there 8 times. Here the items refer to the frames, which are
written once, and the learner stacks them by views.

    python scripts/r2d2_sequences.py --episodes 20
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

import shmreplay as reverb
from shmreplay import structured

TABLE = "sequences"
FRAME = (84, 84)
STACK = 4
LENGTH, PERIOD = 20, 10
EPISODE = 120  # steps
STATE = 32  # size of the recurrent state

STEP = {"frame": None, "action": None, "reward": None, "state": None, "td_error": None}


def sequence(step: structured.ReferenceStep) -> structured.Pattern:
    """A sequence, the frames that its first step needs, and the recurrent state before it."""
    return {
        "frames": step["frame"][-(LENGTH + STACK - 1) :],
        "actions": step["action"][-LENGTH:],
        "rewards": step["reward"][-LENGTH:],
        "state": step["state"][-LENGTH],
        "td_errors": step["td_error"][-LENGTH:],
    }


def make_configs() -> list[structured.Config]:
    """Sequences begin every `PERIOD` steps; their priority mixes highest and mean TD error."""
    first = LENGTH + STACK - 2  # index of the step that ends the first whole sequence
    return [
        structured.create_config(
            structured.pattern_from_transform(STEP, sequence),
            TABLE,
            conditions=[
                structured.Condition.step_index() >= first,
                structured.Condition.step_index() % PERIOD == first % PERIOD,
            ],
            priority=structured.td_error(0.9, STEP, lambda step: step["td_error"]),
        )
    ]


def make_server() -> reverb.Server:
    """Serves a prioritized table of sequences."""
    table = reverb.Table(
        TABLE,
        sampler=reverb.selectors.Prioritized(priority_exponent=0.9),
        remover=reverb.selectors.Fifo(),
        max_size=10_000,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    return reverb.Server([table], capacity=512 << 20)


def play_episode(
    writer: reverb.StructuredWriter, episode: int, random: np.random.Generator
) -> None:
    """Writes frames that show their number."""
    for i in range(EPISODE):
        writer.append(
            {
                "frame": np.full(FRAME, (episode * EPISODE + i) % 256, np.uint8),
                "action": np.int32(random.integers(18)),
                "reward": np.float32(random.normal()),
                "state": np.full(STATE, i, np.float32),
                "td_error": np.float32(random.exponential()),
            }
        )
    writer.end_episode()


def stacked(frames: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Stacks of frames [steps, stack, height, width]: a view of the frames, no copy."""
    windows = np.lib.stride_tricks.sliding_window_view(frames, STACK, axis=0)
    return np.moveaxis(windows, -1, 1)


def look_at(client: reverb.Client) -> None:
    """Borrows sequences, without a copy, and checks that their frames follow one another."""
    with client.borrow(TABLE, 16) as sequences:
        for _, data in sequences:
            frames = stacked(data["frames"])
            numbers = frames[:, :, 0, 0].astype(int)
            steps = np.arange(LENGTH)[:, None] + np.arange(STACK)
            assert ((numbers - numbers[0, 0]) % 256 == steps).all()
            assert len(data["actions"]) == len(frames) == LENGTH
    print(f"a stacked sequence: {frames.shape} of {frames.dtype}, seen without a copy")


def main() -> None:
    """Writes sequences and says what they take."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=20)
    arguments = parser.parse_args()
    random = np.random.default_rng(1)
    with make_server() as server, reverb.Client(server.address) as client:
        before = server.stats()["arena_used_bytes"]
        writer = client.structured_writer(make_configs())
        for episode in range(arguments.episodes):
            play_episode(writer, episode, random)
        used = server.stats()["arena_used_bytes"] - before
        sequences = client.server_info()[TABLE].current_size
        look_at(client)
    frame_bytes = int(np.prod(FRAME))
    frames = arguments.episodes * EPISODE * frame_bytes
    copies = sequences * LENGTH * STACK * frame_bytes
    print(f"{sequences} sequences of {arguments.episodes * EPISODE} frames")
    print(f"one copy of each frame: {frames / 1e6:.1f} MB")
    print(f"in memory, with all else: {used / 1e6:.1f} MB")
    print(f"every stack of every sequence copied: {copies / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
