"""Full rate for as long as one likes: does memory stay flat, and speed what it was?

Processes write items of random length to tables whose items live for a random time, and sample
them; this one prints a line a minute (or `--every` seconds), and in the end PASS or FAIL:

* the bytes in use in the store are what the tables' bounds allow, and do not grow;
* what is free between others is a bounded share of what is in use;
* the memory of the processes beside the store stays flat;
* the last line's rate is at least 0.9 of the first's; where others take processors away, the same
  of the items for each second that a processor gave.

The first line comes after the tables are full: until then everything grows, and is fast.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import numpy as np

import shmreplay as reverb

BOUND = 48 << 20
CAPACITY = 256 << 20
WIDTH = 64
LONGEST = 40
FULL_S = 60.0
"""Seconds at most until the tables are full, everybody is at work, and the first line begins."""
TABLES = ("bytes", "random", "once")


class Line(NamedTuple):
    """What one stretch of time gave."""

    seconds: float
    items: int
    cpu_seconds: float
    """Time of processors that all processes had together."""
    private_bytes: int
    """Memory of all processes that is not the store's."""
    stats: dict[str, float]

    @property
    def rate(self) -> float:
        return self.items / self.seconds

    @property
    def work(self) -> float:
        """Items for each second of a processor: the rate also says how busy others keep them."""
        return self.items / max(self.cpu_seconds, 1e-9)

    @property
    def fragmentation(self) -> float:
        """What is free between others, of what is in use and that together."""
        gaps = self.stats["fragmented_bytes"]
        return gaps / max(gaps + self.stats["arena_used_bytes"], 1.0)


def make_tables() -> list[reverb.Table]:
    selectors, limiter = reverb.selectors, reverb.rate_limiters.MinSize(1)
    make = reverb.Table
    return [
        make(
            "bytes", selectors.Prioritized(0.6), selectors.Fifo(), 10**6, limiter, max_bytes=BOUND
        ),
        make("random", selectors.Uniform(), selectors.Uniform(), 3000, limiter),
        make("once", selectors.Uniform(), selectors.Fifo(), 2000, limiter, 4),
    ]


def actor(address: str, seed: int, stop: Event) -> None:
    """Writes episodes of random length, with items of random length and lifetime."""
    rng = random.Random(seed)
    step = {"x": np.zeros(WIDTH, np.float32), "n": np.int64(0)}
    with reverb.Client(address) as client:
        while not stop.is_set():
            with client.trajectory_writer(LONGEST) as writer:
                for length in range(1, rng.randrange(2, 300)):
                    writer.append(step)
                    first = -rng.randrange(1, min(length, LONGEST) + 1)
                    items = {name: writer.history[name][first:] for name in step}
                    name = rng.choice(("bytes", "bytes", "bytes", "random", "once"))
                    writer.create_item(name, rng.random(), items)
                    if stop.is_set():
                        return


def learner(address: str, seed: int, stop: Event) -> None:
    """Samples, holds what it sampled for a random time, changes priorities and deletes."""
    rng = random.Random(seed)
    with reverb.Client(address) as client:
        while not stop.is_set():
            name = rng.choice(("bytes", "random", "once"))
            try:
                with client.borrow(name, rng.randrange(1, 32), timeout=0.1) as lent:
                    keys = [int(sample.info.key) for sample in lent]
                del lent
            except reverb.DeadlineExceededError:
                continue
            client.mutate_priorities(name, {key: rng.random() for key in keys[4:]}, keys[:1])
            stop.wait(rng.random() * 0.005)


def private_bytes(pids: list[int]) -> int:
    """Resident memory of processes without what they share."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        total += (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return total


def cpu_seconds(pids: list[int]) -> float:
    """Time of processors that processes had so far."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(server: reverb.Server, pids: list[int], seconds: float) -> Line:
    """Looks at the store for so long."""
    before, began, cpu = server.stats(), time.monotonic(), cpu_seconds(pids)
    time.sleep(seconds)
    after = server.stats()
    items = sum(int(after[f"{name}/inserts"] - before[f"{name}/inserts"]) for name in TABLES)
    spent = time.monotonic() - began
    return Line(spent, items, cpu_seconds(pids) - cpu, private_bytes(pids), after)


def verdict(lines: list[Line]) -> list[str]:
    """What is not as it should be, in words."""
    first, last = lines[0], lines[-1]
    problems = []
    if max(last.rate / first.rate, last.work / first.work) < 0.9:
        problems.append("the rate fell, and so did what is done in the same time of processors")
    return problems + accounting(lines)


def accounting(lines: list[Line]) -> list[str]:
    """The same of memory alone, which does not depend on how busy the machine is."""
    first, problems = lines[0], []
    for number, line in enumerate(lines):
        stats = line.stats
        if stats["bytes/data_bytes"] > BOUND:
            problems.append(f"line {number}: a table has {stats['bytes/data_bytes']:.0f} bytes")
        if line.fragmentation > 0.25:
            problems.append(f"line {number}: {line.fragmentation:.0%} of memory are gaps")
        if stats["arena_used_bytes"] > 1.15 * first.stats["arena_used_bytes"] + (4 << 20):
            problems.append(f"line {number}: the bytes in use grew")
        if stats["committed_bytes"] > 1.15 * first.stats["committed_bytes"] + (16 << 20):
            problems.append(f"line {number}: the committed bytes grew")
        if line.private_bytes > 1.1 * first.private_bytes + (16 << 20):
            problems.append(f"line {number}: the processes grew beside the store")
    return problems


def text(number: int, line: Line) -> str:
    mib = 1 << 20
    stats = line.stats
    return (
        f"{number:4d}  {line.rate:9.0f} items/s, {line.work:7.0f} a second of a processor\n"
        f"      in use {stats['arena_used_bytes'] / mib:6.1f} MiB"
        f"  committed {stats['committed_bytes'] / mib:6.1f} MiB  gaps {line.fragmentation:5.1%}"
        f"  processes {line.private_bytes / mib:6.1f} MiB"
    )


def fill(server: reverb.Server, processes: int) -> None:
    """Waits until the tables are full, and so many processes at work."""
    end = time.monotonic() + FULL_S
    while time.monotonic() < end:
        stats = server.stats()
        full = stats["bytes/evicted"] and stats["random/evicted"] and stats["once/deletes"]
        sampled = any(stats[f"{name}/samples"] for name in TABLES)
        if full and sampled and stats["participants"] > processes:
            return
        time.sleep(0.05)
    raise SystemExit(f"the tables were not full within {FULL_S:.0f} s")


def run(seconds: float, seed: int, every: float, actors: int, learners: int) -> list[Line]:
    """Runs it, printing a line each `every` seconds, and checks every invariant in the end."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    name = f"soak-{os.getpid()}"
    with reverb.Server(make_tables(), name=name, capacity=CAPACITY) as server:
        jobs: list[tuple[Any, int]] = [(actor, seed + i) for i in range(actors)]
        jobs += [(learner, seed + 1000 + i) for i in range(learners)]
        processes = [
            context.Process(target=job, args=(server.address, number, stop)) for job, number in jobs
        ]
        for process in processes:
            process.start()
        try:
            fill(server, len(processes))
            pids = [os.getpid(), *(process.pid or 0 for process in processes)]
            lines: list[Line] = []
            end = time.monotonic() + seconds
            while time.monotonic() < end - every / 2:
                lines.append(measure(server, pids, min(every, end - time.monotonic())))
                sys.stdout.write(text(len(lines), lines[-1]) + "\n")
                sys.stdout.flush()
        finally:
            stop.set()
            for process in processes:
                process.join(30)
                if process.is_alive():
                    process.kill()
                    process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"exit codes {[process.exitcode for process in processes]}")
        server.check()
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=60.0, help="seconds of a line")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--learners", type=int, default=1)
    options = parser.parse_args()
    arguments = (options.seconds, options.seed, options.every, options.actors, options.learners)
    lines = run(*arguments)
    problems = verdict(lines)
    ratio = lines[-1].rate / lines[0].rate
    work = lines[-1].work / lines[0].work
    sys.stdout.write(f"last to first: {ratio:.3f}, for the same time of processors {work:.3f}\n")
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    sys.stdout.write("FAIL\n" if problems else "PASS\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
