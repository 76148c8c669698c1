"""Full rate for as long as one likes: does memory stay flat, and speed what it was?

Processes write items of random length to tables whose items live for a random time, and sample
them; this one prints a line a minute (or `--every` seconds), a summary, and in the end PASS, FAIL
or UNDECIDED. `--json FILE` writes all of it.

* The bytes in use in the store are what the tables' bounds allow, and do not grow.
* What is free between others is a bounded share of what is in use.
* The memory of the processes beside the store stays flat.
* The last line's rate is at least 0.9 of the first's. Where other processes had more than a
  twentieth of the machine in one of these two, that is UNDECIDED: run it again when it is quiet.
  What was done for each second that a processor gave is told besides.

The first line comes after the tables are full: until then everything grows, and is fast.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
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
LEAST_RATIO = 0.9
QUIET = 0.05
"""Share of the machine that others may have had for a rate to say anything."""
PASS, FAIL, UNDECIDED = "PASS", "FAIL", "UNDECIDED"
EXIT_CODES = {PASS: 0, FAIL: 1, UNDECIDED: 2}


class Line(NamedTuple):
    """What one stretch of time gave."""

    seconds: float
    items: int
    samples: int
    cpu_seconds: float
    """Time of processors that all processes had together."""
    others: float
    """Share of the machine's processors that other processes had."""
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
    def resident_bytes(self) -> float:
        """All memory: of the store, and of the processes beside it."""
        return self.private_bytes + self.stats["committed_bytes"]

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


def machine_seconds() -> tuple[float, float]:
    """Time of all processors so far that somebody had, and all of it."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    scale = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle) / scale, sum(ticks) / scale


def measure(server: reverb.Server, pids: list[int], seconds: float) -> Line:
    """Looks at the store for so long."""
    before, began, cpu = server.stats(), time.monotonic(), cpu_seconds(pids)
    busy, whole = machine_seconds()
    time.sleep(seconds)
    after = server.stats()
    items, samples = (
        sum(int(after[f"{name}/{key}"] - before[f"{name}/{key}"]) for name in TABLES)
        for key in ("inserts", "samples")
    )
    spent, ours = time.monotonic() - began, cpu_seconds(pids) - cpu
    busy_now, whole_now = machine_seconds()
    others = max(busy_now - busy - ours, 0.0) / max(whole_now - whole, 1e-9)
    return Line(spent, items, samples, ours, others, private_bytes(pids), after)


def verdict(lines: list[Line]) -> tuple[str, list[str]]:
    """PASS, FAIL or UNDECIDED, and what is not as it should be, in words."""
    first, last = lines[0], lines[-1]
    problems = accounting(lines)
    if problems:
        return FAIL, problems
    ratio, work = last.rate / first.rate, last.work / first.work
    others = max(first.others, last.others)
    if others > QUIET:
        why = (
            f"the machine was not the run's own: others had {others:.0%} of it, so that the rate"
            f" (last to first {ratio:.3f}) says little. For the same time of processors"
            f" {work:.3f} of the items were written. Run it again on a quiet machine"
        )
        return UNDECIDED, [why]
    if ratio < LEAST_RATIO:
        return FAIL, [f"the rate fell to {ratio:.3f} of the first"]
    return PASS, []


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
        if line.private_bytes > 1.03 * first.private_bytes + (4 << 20):
            problems.append(f"line {number}: the processes grew beside the store")
    return problems


def text(number: int, line: Line) -> str:
    mib = 1 << 20
    stats = line.stats
    return (
        f"{number:4d}  {line.rate:9.0f} items/s, {line.work:7.0f} a second of a processor,"
        f" {line.samples / line.seconds:.0f} samples/s, others {line.others:.0%} of the machine\n"
        f"      in use {stats['arena_used_bytes'] / mib:6.1f} MiB"
        f"  committed {stats['committed_bytes'] / mib:6.1f} MiB  gaps {line.fragmentation:5.1%}"
        f"  processes {line.private_bytes / mib:6.1f} MiB"
    )


def summary(lines: list[Line]) -> dict[str, Any]:
    """What came out of it, in figures."""
    first, last = lines[0], lines[-1]
    rates = [line.rate for line in lines]
    trend = 0.0
    if len(lines) > 1:  # by the straight line that fits best, from one end to the other
        slope, start = statistics.linear_regression(range(len(rates)), rates)
        trend = slope * (len(rates) - 1) / start if start > 0 else 0.0
    result, problems = verdict(lines)
    return {
        "verdict": result,
        "problems": problems,
        "seconds": sum(line.seconds for line in lines),
        "items": sum(line.items for line in lines),
        "samples": sum(line.samples for line in lines),
        "rate_first": first.rate,
        "rate_last": last.rate,
        "rate_ratio": last.rate / first.rate,
        "rate_least": min(rates),
        "rate_median": statistics.median(rates),
        "rate_trend": trend,
        "work_ratio": last.work / first.work,
        "others_first": first.others,
        "others_last": last.others,
        "others_most": max(line.others for line in lines),
        "private_bytes_first": first.private_bytes,
        "private_bytes_last": last.private_bytes,
        "private_bytes_most": max(line.private_bytes for line in lines),
        "resident_bytes_first": first.resident_bytes,
        "resident_bytes_last": last.resident_bytes,
        "resident_bytes_most": max(line.resident_bytes for line in lines),
        "fragmentation_first": first.fragmentation,
        "fragmentation_last": last.fragmentation,
        "fragmentation_most": max(line.fragmentation for line in lines),
    }


def summary_text(about: dict[str, Any]) -> str:
    """The same for people."""
    mib = 1 << 20
    return (
        f"{about['items']} items written and {about['samples']} sampled in"
        f" {about['seconds']:.0f} s\n"
        f"rate: first {about['rate_first']:.0f}/s, last {about['rate_last']:.0f}/s, ratio"
        f" {about['rate_ratio']:.3f} (at least {LEAST_RATIO}); least {about['rate_least']:.0f},"
        f" median {about['rate_median']:.0f}, trend over the run {about['rate_trend']:+.1%}\n"
        f"for the same time of processors: {about['work_ratio']:.3f}; others had"
        f" {about['others_first']:.0%} of the machine at first, {about['others_last']:.0%} at"
        f" last, {about['others_most']:.0%} at most\n"
        f"resident: store and processes {about['resident_bytes_first'] / mib:.1f} to"
        f" {about['resident_bytes_last'] / mib:.1f} MiB (most"
        f" {about['resident_bytes_most'] / mib:.1f}), processes alone"
        f" {about['private_bytes_first'] / mib:.1f} to {about['private_bytes_last'] / mib:.1f}\n"
        f"gaps: {about['fragmentation_first']:.1%} to {about['fragmentation_last']:.1%}, at most"
        f" {about['fragmentation_most']:.1%}\n"
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
            for _ in range(max(round(seconds / every), 1)):
                lines.append(measure(server, pids, every))
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
    parser.add_argument("--json", metavar="FILE", help="write figures there, too")
    options = parser.parse_args()
    arguments = (options.seconds, options.seed, options.every, options.actors, options.learners)
    lines = run(*arguments)
    about = summary(lines)
    if options.json:
        content = {
            "options": vars(options),
            "processors": os.cpu_count(),
            "summary": about,
            "lines": [
                line._asdict() | {"rate": line.rate, "fragmentation": line.fragmentation}
                for line in lines
            ],
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    sys.stdout.write(summary_text(about))
    sys.stdout.writelines(f"{problem}\n" for problem in about["problems"])
    sys.stdout.write(f"{about['verdict']}\n")
    return EXIT_CODES[about["verdict"]]


if __name__ == "__main__":
    sys.exit(main())
