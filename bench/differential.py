"""Sends the same random calls to dm-reverb and to shmreplay and compares what they answer.

``python -m bench.differential --programs 300 --seed 0`` needs dm-reverb 0.14 (Python 3.11 or older:
``pip install 'shmreplay[peers]'``). Each program is a server of one table with settings drawn at
random, and calls drawn at random: inserts, items of a writer over contiguous steps, samples,
updates, deletes, resets, wrong calls. Compared are all data and infos sampled (of selectors that
draw at random: the probability, size and priority reported of each item), what the limiter allows,
all counters, and the built-in types of exceptions.

Left out is what Reverb is known to get wrong: steps that do not lie together, and priorities that
stop a table's thread.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

TABLE = "table"
KEEP = 4
RANDOM = ("Uniform", "Prioritized")
PRIORITIES = (0.0, 0.5, 1.0, 1.0, 2.0, 3.0)
DRAWS = 12
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Setting:
    """A table's settings, as text and numbers that both libraries understand."""

    sampler: str
    remover: str
    max_size: int
    max_times_sampled: int
    limiter: tuple[Any, ...]

    @property
    def is_random(self) -> bool:
        """Whether the libraries draw different items."""
        return self.sampler in RANDOM


@dataclass
class Side:
    """One library with a server of the table, and the keys that its samples have told."""

    library: ModuleType
    table: Any
    server: Any
    client: Any
    writer: Any
    keys: dict[int, int] = field(default_factory=dict)

    def close(self) -> None:
        """Stops the server."""
        self.writer.close()
        self.server.stop()


@dataclass
class Report:
    """What a run has seen."""

    programs: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    impossible: int = 0
    """Samples that Reverb says it drew with probability 0: its running sums keep a rounding error
    where all priorities have become 0, and it then does not see that all items are equally likely.
    """
    differences: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for JSON."""
        return {
            "programs": self.programs,
            "calls": sum(self.calls.values()),
            "calls_by_kind": dict(sorted(self.calls.items())),
            "answers_compared": self.compared,
            "drawn_by_reverb_with_probability_0": self.impossible,
            "differences": self.differences,
        }


def draw_setting(rng: np.random.Generator) -> Setting:
    """Draws a table's settings."""
    ordered = ["Fifo", "Lifo", "MinHeap", "MaxHeap"]
    sampler = str(rng.choice([*ordered, *RANDOM]))
    max_size = int(rng.integers(1, 9))
    n = int(rng.integers(1, 4))
    ratio = float(rng.choice([0.5, 1.0, 1.5, 2.0]))
    limiter: tuple[Any, ...] = {
        0: ("MinSize", n),
        1: ("Queue", max_size),
        2: ("SampleToInsertRatio", ratio, n, float(rng.integers(2, 6)) * max(1.0, ratio)),
        3: ("RateLimiter", ratio, n, -3.0, 6.0),
    }[int(rng.integers(4))]
    times = 0 if sampler in RANDOM else int(rng.integers(0, 4))
    return Setting(sampler, str(rng.choice(ordered)), max_size, times, limiter)


def make_side(library: ModuleType, setting: Setting) -> Side:
    """Serves the table by one of the libraries."""

    def selector(name: str) -> Any:
        make = getattr(library.selectors, name)
        return make(0.7) if name == "Prioritized" else make()

    kind, *arguments = setting.limiter
    table = library.Table(
        TABLE,
        selector(setting.sampler),
        selector(setting.remover),
        setting.max_size,
        getattr(library.rate_limiters, kind)(*arguments),
        setting.max_times_sampled,
    )
    options = {"capacity": 16 << 20} if library.__name__ == "shmreplay" else {}
    server = library.Server([table], **options)
    client = library.Client(f"localhost:{server.port}")
    return Side(library, table, server, client, client.trajectory_writer(KEEP))


class Program:
    """One table in both libraries, and the calls that they get."""

    def __init__(self, libraries: Sequence[ModuleType], seed: Sequence[int], out: Report) -> None:
        """Draws the settings and starts both servers."""
        self.rng = np.random.default_rng(list(seed))
        self.seed = seed
        self.out = out
        self.setting = draw_setting(self.rng)
        self.sides = [make_side(library, self.setting) for library in libraries]
        self.next_id = 0
        self.steps = 0

    def run(self, calls: int) -> None:
        """Makes so many calls, or fewer if an answer differs: from there on all would."""
        known = len(self.out.differences)
        kinds = [self.insert, self.item, self.sample, self.change, self.end_episode, self.wrong]
        weights = [0.3, 0.25, 0.3, 0.1, 0.03, 0.02]
        for _ in range(calls):
            call = kinds[int(self.rng.choice(len(kinds), p=weights))]
            call()
            self.compare_table()
            if len(self.out.differences) > known:
                break
        self.out.programs += 1

    def close(self) -> None:
        """Stops both servers."""
        for side in self.sides:
            side.close()

    # -------------------------------------------------------------- comparing

    def same(self, what: str, answers: Sequence[Any]) -> None:
        """Notes a difference between the answers of the two libraries."""
        self.out.compared += 1
        if not _equal(*answers):
            self.out.differences.append(
                f"program {list(self.seed)} {self.setting}: {what}: {answers[0]} and {answers[1]}"
            )

    def compare_table(self) -> None:
        """Compares what the limiter allows and all counters."""
        for n in (1, 2, 3):
            self.same(f"can_insert({n})", [side.table.can_insert(n) for side in self.sides])
            self.same(f"can_sample({n})", [side.table.can_sample(n) for side in self.sides])
        infos = [side.client.server_info()[TABLE] for side in self.sides]
        for name in ("current_size", "num_episodes", "num_deleted_episodes"):
            self.same(name, [getattr(info, name) for info in infos])
        limiters = [info.rate_limiter_info for info in infos]
        self.same("inserts", [limiter.insert_stats.completed for limiter in limiters])
        self.same("samples", [limiter.sample_stats.completed for limiter in limiters])
        if not self.setting.is_random:
            self.same("num_unique_samples", [info.num_unique_samples for info in infos])

    def allowed(self, question: str) -> bool:
        """Whether both would do it without waiting; else the call is left out."""
        return all(getattr(side.table, question)(1) for side in self.sides)

    # -------------------------------------------------------------- calls

    def step(self) -> dict[str, Any]:
        """The next step's data; its number says which it is."""
        self.next_id += 1
        values = self.rng.standard_normal(2).astype(np.float32)
        return {"id": np.int64(self.next_id), "x": values}

    def insert(self) -> None:
        """One step as an item."""
        if not self.allowed("can_insert"):
            return
        data, priority = self.step(), float(self.rng.choice(PRIORITIES))
        for side in self.sides:
            side.client.insert(data, {TABLE: priority})
        self.out.calls["insert"] += 1

    def item(self) -> None:
        """A step of a writer and an item of the last ones."""
        data, priority = self.step(), float(self.rng.choice(PRIORITIES))
        self.steps = min(self.steps + 1, KEEP)
        length, other = (int(self.rng.integers(1, self.steps + 1)) for _ in range(2))
        squeeze = bool(self.rng.random() < 0.3)
        create = self.allowed("can_insert")
        for side in self.sides:
            side.writer.append(data)
            if create:
                history = side.writer.history
                x = history["x"]
                side.writer.create_item(
                    TABLE,
                    priority,
                    {"id": history["id"][-length:], "x": x[-other] if squeeze else x[-other:]},
                )
                side.writer.flush()
        self.out.calls["create_item" if create else "append"] += 1

    def end_episode(self) -> None:
        """A new episode, with or without the old one's steps."""
        clear = bool(self.rng.random() < 0.5)
        for side in self.sides:
            side.writer.end_episode(clear_buffers=clear)
        self.steps = 0 if clear else self.steps
        self.out.calls["end_episode"] += 1

    def sample(self) -> None:
        """One sample, or several of a table that draws at random."""
        seen: list[dict[int, Any]] = [{}, {}]
        for _ in range(DRAWS if self.setting.is_random else 1):
            if not self.allowed("can_sample") or self.sides[0].table.info.current_size == 0:
                break
            answers = [
                next(side.client.sample(TABLE, 1, emit_timesteps=False)) for side in self.sides
            ]
            self.out.calls["sample"] += 1
            for side, answer, drawn in zip(self.sides, answers, seen, strict=True):
                number = int(np.ravel(answer.data[0])[-1])
                side.keys[number] = int(answer.info.key)
                drawn[number] = (
                    answer.info.probability,
                    answer.info.table_size,
                    answer.info.priority,
                    None if self.setting.is_random else answer.info.times_sampled,
                    *answer.data,
                )
        if not self.setting.is_random:
            self.same("sampled", [list(drawn) for drawn in seen])
        for number in seen[0].keys() & seen[1].keys():
            answers = [drawn[number] for drawn in seen]
            if answers[0][0] == 0.0 and answers[0][2] == 0.0:
                self.out.impossible += 1
                answers = [answer[1:] for answer in answers]
            self.same(f"sample of item {number}", answers)

    def change(self) -> None:
        """New priorities and deletes, of items there and gone; at times a reset."""
        if self.rng.random() < 0.1:
            for side in self.sides:
                side.client.reset(TABLE)
            self.out.calls["reset"] += 1
            return
        known = sorted(self.sides[0].keys.keys() & self.sides[1].keys.keys())
        if not known:
            return
        chosen = [int(n) for n in self.rng.choice(known, min(3, len(known)), replace=False)]
        updates = {n: float(self.rng.choice(PRIORITIES)) for n in chosen[:2]}
        deletes = chosen[1:] if self.rng.random() < 0.5 else []
        for side in self.sides:
            side.client.mutate_priorities(
                TABLE,
                {side.keys[n]: p for n, p in updates.items()},
                [side.keys[n] for n in deletes],
            )
        self.out.calls["mutate_priorities"] += 1

    def wrong(self) -> None:
        """A call that must fail with an exception of Reverb's built-in type."""
        which = int(self.rng.integers(7))
        raised = [_exception_of(side, which) for side in self.sides]
        self.out.calls["wrong"] += 1
        self.out.compared += 1
        if raised[0] is None or raised[1] is None or not issubclass(raised[1], raised[0]):
            self.out.differences.append(f"wrong call {which}: {raised[0]} and {raised[1]}")


def _exception_of(side: Side, which: int) -> type[Exception] | None:
    client, writer = side.client, side.writer
    calls = (
        lambda: client.insert({"id": 1}, {}),
        lambda: next(client.sample("nope", 1)),
        lambda: client.reset("nope"),
        lambda: client.mutate_priorities("nope", {}, []),
        lambda: client.mutate_priorities(TABLE, {-1: 1.0}, []),
        lambda: client.trajectory_writer(0),
        lambda: writer.create_item(TABLE, 1.0, {}),
    )
    try:
        calls[which]()
    except Exception as error:
        return type(error)
    return None


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, tuple | list):
        both = len(first) == len(second)
        return both and all(_equal(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, np.ndarray):
        same = first.dtype == second.dtype and first.shape == second.shape
        return bool(same and first.tobytes() == second.tobytes())
    if isinstance(first, float):
        return math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(first == second)


def run(programs: int, calls: int, seed: int) -> Report:
    """Runs programs of so many calls on dm-reverb and shmreplay.

    Raises:
        ImportError: dm-reverb is not installed.
    """
    import reverb

    import shmreplay

    report = Report()
    for number in range(programs):
        program = Program((reverb, shmreplay), (seed, number), report)
        try:
            program.run(calls)
        finally:
            program.close()
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and prints the report as JSON; 1 if there was a difference."""
    parser = argparse.ArgumentParser(prog="python -m bench.differential")
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    report = run(arguments.programs, arguments.calls, arguments.seed)
    print(json.dumps(report.to_dict(), indent=2))
    return 1 if report.differences else 0


if __name__ == "__main__":
    sys.exit(main())
