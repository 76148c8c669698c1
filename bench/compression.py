"""What do compressed blocks save, and what do they cost, on frames as of an Atari game?"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench import library
from bench.harness import Bench, Contender, Measure, TimedLoop

if TYPE_CHECKING:
    import shmreplay

NAME = "compression"
QUESTION = "What do compressed blocks save and cost, on frames of 84 x 84 with moving sprites?"
RAW = "shmreplay, raw"
ROWS = 20_000
SIDE = 84
FRAME_BYTES = SIDE * SIDE
STACK = 4
BATCH = 32
EPISODE = 1000
SPRITE = 8


def atari_like(count: int, *, seed: int = 5) -> list[NDArray[np.uint8]]:
    """Returns `count` frames of one game: sprites that move over a background that does not.

    The background has flat areas, a score board of noise and a few walls; eight sprites of random
    bytes move by up to three pixels a frame and bounce off the borders.
    """
    rng = np.random.default_rng(seed)
    background = np.full((SIDE, SIDE), 87, np.uint8)
    background[:12] = rng.integers(0, 4, (12, SIDE), np.uint8) * 60
    for row in range(18, 42, 4):
        background[row : row + 3] = 30 * (row % 7) + 20
    background[-6:] = 142
    sprites = rng.integers(0, 256, (8, SPRITE, SPRITE), np.uint8)
    place = rng.integers(0, SIDE - SPRITE, (8, 2))
    speed = rng.integers(-3, 4, (8, 2))
    frames = []
    for _ in range(count):
        frame = background.copy()
        for sprite, (y, x) in zip(sprites, place, strict=True):
            frame[y : y + SPRITE, x : x + SPRITE] = sprite
        frames.append(frame)
        outside = (place + speed < 0) | (place + speed > SIDE - SPRITE)
        speed = np.where(outside, -speed, speed)
        place = place + speed
    return frames


def _steps() -> list[dict[str, Any]]:
    """One game, again and again: steps as a writer gets them."""
    rng = np.random.default_rng(6)
    return [
        {"frame": frame, "action": np.int32(rng.integers(18)), "reward": np.float32(0.0)}
        for frame in atari_like(EPISODE)
    ]


class _Filler:
    """Writes steps, and makes an item of the last few of each."""

    def __init__(self, stack: ExitStack, compress: str, length: int) -> None:
        _, self.client = library.serve(stack, ROWS, FRAME_BYTES)
        self.writer = stack.enter_context(self.client.trajectory_writer(STACK, compress=compress))
        self.length = length
        self._steps = _steps()
        self._next = 0

    def write(self, calls: int) -> None:
        """Appends so many steps, with an item each."""
        writer, steps, last = self.writer, self._steps, slice(-self.length, None)
        for _ in range(calls):
            writer.append(steps[self._next])
            self._next = (self._next + 1) % EPISODE
            if writer.episode_steps >= self.length:
                history = writer.history
                item = {name: history[name][last] for name in history}
                writer.create_item(library.TABLE, 1.0, item)

    def fill(self) -> shmreplay.Client:
        """Fills the table and overwrites some of it; checks what comes out."""
        self.write(ROWS + 2 * EPISODE)
        library.check_size(self.client, ROWS)
        data: Any = self.client.sample_batch(library.TABLE, 8).data
        known = {step["frame"].tobytes() for step in self._steps}
        if not all(frame.tobytes() in known for frame in data["frame"].reshape(-1, FRAME_BYTES)):
            raise RuntimeError("a sampled frame is none that was written")
        return self.client


def ratio() -> float:
    """How many times smaller the steps of a full table are, compressed."""
    with ExitStack() as stack:
        stats = _Filler(stack, "lz4", 1).fill().stats()
        return stats["compressed_raw_bytes"] / stats["compressed_stored_bytes"]


def _write(stack: ExitStack, compress: str) -> Measure:
    filler = _Filler(stack, compress, 1)
    filler.fill()
    return TimedLoop(filler.write)


def _sample(stack: ExitStack, compress: str, length: int) -> Measure:
    client = _Filler(stack, compress, length).fill()

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.sample_batch(library.TABLE, BATCH)

    return TimedLoop(loop)


def run(bench: Bench) -> None:
    """Measures this question."""
    packed = f"shmreplay, compressed ({ratio():.1f} times smaller)"
    both = ((RAW, "none"), (packed, "lz4"))
    bench.compare(
        NAME,
        "one step and an item of it written",
        [Contender(name, partial(_write, compress=how), ours=True) for name, how in both],
        bytes_per_item=FRAME_BYTES,
    )
    for length in (1, STACK):
        bench.compare(
            NAME,
            f"{BATCH} items of {length} frame{'s' if length > 1 else ''} sampled",
            [
                Contender(name, partial(_sample, compress=how, length=length), ours=True)
                for name, how in both
            ],
            items_per_call=BATCH,
            bytes_per_item=length * FRAME_BYTES,
        )
