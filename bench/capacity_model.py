"""What larger machines and several hosts would reach: python -m bench.capacity_model [FILE].

Takes the costs of single calls from the last run of record, says where its other figures agree with
what the model makes of them, and then goes on to machines that nobody measured here. The method and
its limits are in bench/README.md.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LATEST = Path(__file__).parent / "results" / "latest.json"
BATCH = 256
TRANSITION_BYTES = 681
STRIPES = 16
"""As many as the library makes by itself on a large machine."""
LINE_TRANSFER = 0.1
"""Microseconds for the cache lines of a lock and of what it guards to come from another core. Not
measured: a core-to-core transfer is 0.03 to 0.2 on the machines that one meets."""
CORES_A_MEMORY_CHANNEL = 8.0
"""Of server processors: 64 cores come with 8 channels, 192 with 24."""
CHANNEL_GIGABYTES = 20.0
"""What a channel of DDR4 gives in practice, in GB/s; two cores of a virtual machine reach half."""
NETWORK_GIGABYTES = 1.25
"""Of 10 Gbit/s, in GB/s."""
SIMULATED = 20_000.0
"""Microseconds that a simulation covers."""


@dataclass(frozen=True)
class Costs:
    """What one call costs, in microseconds.

    Attributes:
        outside: Of an insert, without any lock: Python, the copy, the item's record.
        limiter: Of an insert, with the limiter's lock held.
        stripe: Of an insert, with a stripe's lock held.
        sample: Of a batch of 256, all of it; nearly all is copying without a lock.
        bridge: Of an item over the bridge, on the server's side.
    """

    outside: float
    limiter: float
    stripe: float
    sample: float
    bridge: float

    @property
    def insert(self) -> float:
        """Of an insert that meets nobody."""
        return self.outside + self.limiter + self.stripe


LIMITER_SHARE, STRIPE_SHARE = 0.15, 0.45
"""Of the core's own insert (measured whole, as `insert, the core alone`): what it does under the
limiter's lock and under a stripe's. Estimates from reading the code, not measured; they matter
little on two cores and decide from a few dozen on. The rest is done under no lock."""


class MissingFigureError(LookupError):
    """The run lacks a figure that the model is built on."""


def figure(document: dict[str, Any], question: str, case: str, contender: str) -> float:
    """Returns the median of a figure in microseconds a call.

    Raises:
        MissingFigureError: It was not measured.
    """
    for row in document["figures"]:
        if (row["question"], row["case"], row["contender"]) == (question, case, contender):
            return float(row["microseconds_per_call"]["median"])
    raise MissingFigureError(
        f"no figure for {question}, {case}, {contender}; run python -m bench first"
    )


WRITER_CASE = "append + 5 slices + create_item"


def costs_of(document: dict[str, Any]) -> Costs:
    """Returns the costs that a run measured.

    Raises:
        MissingFigureError: One was not.
    """
    whole = figure(document, "scaling", WRITER_CASE, "shmreplay, 1 writer")
    core = figure(document, "crash_safety", "insert, the core alone", "shmreplay")
    sample = figure(document, "uniform_sample", "200k items", "shmreplay sample_batch")
    bridge = figure(
        document,
        "bridge",
        "insert 64 of 400 B, one by one",
        "shmreplay, item by item, confirmed together",
    )
    limiter, stripe = LIMITER_SHARE * core, STRIPE_SHARE * core
    return Costs(whole - limiter - stripe, limiter, stripe, sample, bridge / 64)


@dataclass
class _Lock:
    """A lock in the simulation: when it is free, and who had it last."""

    free: float = 0.0
    owner: int = -1

    def take(self, now: float, who: int, held: float, transfer: float) -> float:
        """Waits for the lock, holds it; returns when it is given back."""
        start = max(now, self.free)
        if self.owner not in (who, -1):
            start += transfer
        self.free, self.owner = start + held, who
        return self.free


def simulate(
    costs: Costs, cores: int, stripes: int, *, transfer: float = LINE_TRANSFER, seed: int = 1
) -> float:
    """Returns inserts a microsecond of one writer a core, all on one table.

    A discrete-event simulation: each writer works outside the locks for a time that varies by a
    fifth, takes the limiter, gives it back, takes the stripe of its item, gives it back, and goes
    on. Locks serve in the order of asking, and cost `transfer` more where another core had them.

    Args:
        costs: Of an insert.
        cores: Writers, each with a core of its own.
        stripes: Of the table; a writer keeps to its own.
        transfer: Microseconds for a lock's lines to come from another core.
        seed: Of the variation.
    """
    rng = random.Random(seed)
    limiter, locks = _Lock(), [_Lock() for _ in range(stripes)]
    done = 0
    # When each writer comes to its next lock, and to which: 0 is the limiter, 1 its stripe.
    events = [(rng.uniform(0, costs.insert), writer, 0) for writer in range(cores)]
    heapq.heapify(events)
    while True:
        now, writer, place = heapq.heappop(events)
        if now > SIMULATED:
            return done / SIMULATED
        if place == 0:
            end = limiter.take(now, writer, costs.limiter, transfer)
        else:
            end = locks[writer % stripes].take(now, writer, costs.stripe, transfer)
            done += 1
            end += costs.outside * rng.uniform(0.8, 1.2)
        heapq.heappush(events, (end, writer, 1 - place))


@dataclass(frozen=True)
class Reach:
    """What a machine would reach, and what stands in the way.

    Attributes:
        inserts: Single inserts in millions a second.
        insert_limit: What limits them.
        samples: Sampled transitions in millions a second.
        sample_limit: What limits those.
    """

    inserts: float
    insert_limit: str
    samples: float
    sample_limit: str


def machine(costs: Costs, cores: int) -> Reach:
    """Returns what one machine would reach, with all cores writing, or all cores sampling."""
    memory = CHANNEL_GIGABYTES * max(1.0, cores / CORES_A_MEMORY_CHANNEL)
    # A step is read, and written (which reads the line first); a sample is read and written.
    by_memory = 1e3 * memory / (3 * TRANSITION_BYTES)
    simulated = simulate(costs, cores, STRIPES)
    chances = {
        "the cores": cores / costs.insert,
        "memory bandwidth": by_memory,
        "the limiter's lock": _alone(costs, "limiter"),
        "the stripes' locks": STRIPES * _alone(costs, "stripe"),
    }
    limit = min(chances, key=lambda name: chances[name])
    by_cores = cores * BATCH / costs.sample
    samples = min(by_cores, by_memory)
    return Reach(
        min(simulated, by_memory),
        limit,
        samples,
        "the cores" if samples == by_cores else "memory bandwidth",
    )


def _alone(costs: Costs, lock: str) -> float:
    """Returns how many inserts a microsecond one lock lets through, handed from core to core."""
    held = costs.limiter if lock == "limiter" else costs.stripe
    return 1.0 / (held + LINE_TRANSFER)


def hosts(costs: Costs, count: int, cores: int, item_bytes: int = TRANSITION_BYTES) -> Reach:
    """Returns what one server reaches whose clients are on `count` other hosts.

    Each host has as many actors as it likes: what arrives is limited by the server's network, and
    by the process that serves the bridge, which one core does; or by the hosts where they are few.
    """
    network = 1e3 * NETWORK_GIGABYTES / item_bytes
    chances = {
        "the bridge's process (one core)": 1.0 / costs.bridge,
        "the network (10 Gbit/s)": network,
        "the clients": count * cores / (2 * costs.bridge),
    }
    limit = min(chances, key=lambda name: chances[name])
    # A batch costs the bridge about a copy more than it costs a local learner.
    by_process = BATCH / (2 * costs.sample)
    samples = min(network, by_process)
    return Reach(
        chances[limit],
        limit,
        samples,
        "the network (10 Gbit/s)" if samples == network else "the bridge's process (one core)",
    )


def sharded(costs: Costs, count: int, cores: int) -> Reach:
    """Returns what a server on each of `count` hosts reaches, with its clients beside it."""
    one = machine(costs, cores)
    return replace(one, inserts=count * one.inserts, samples=count * one.samples)


def check(document: dict[str, Any], costs: Costs) -> list[tuple[str, float, float]]:
    """Returns what the simulation says beside what was measured, in millions a second.

    One writer is what the costs come from; two writers, on two stripes, are the test. Two cores of
    a machine that others use give less than twice one: by how much, the rows of rings of their own
    say, which share nothing, and the simulation is held to that.
    """
    pairs = []
    ring = "numpy ring of its own, {} process"
    alone = figure(document, "scaling", WRITER_CASE, ring.format(1))
    both = figure(document, "scaling", WRITER_CASE, ring.format(2) + "es")
    for cores in (1, 2):
        name = f"shmreplay, {cores} writer{'s' * (cores > 1)}"
        measured = 1.0 / figure(document, "scaling", WRITER_CASE, name)
        given = 1.0 if cores == 1 else alone / (2 * both)
        pairs.append((name, given * simulate(costs, cores, 2), measured))
    return pairs


def _line(name: str, reach: Reach) -> str:
    return (
        f"| {name} | {reach.inserts:.2f} M/s | {reach.insert_limit} | {reach.samples:.1f} M/s "
        f"| {reach.sample_limit} |"
    )


def report(document: dict[str, Any]) -> str:
    """Returns the model of a run as Markdown.

    Raises:
        MissingFigureError: The run lacks a figure.
    """
    costs = costs_of(document)
    lines = [
        (
            f"An insert costs {costs.insert:.2f} us: {costs.outside:.2f} outside the locks, "
            f"{costs.limiter:.3f} under the limiter's, {costs.stripe:.3f} under a stripe's. "
            f"A batch of 256 costs {costs.sample:.0f} us, "
            f"an item over the bridge {costs.bridge:.1f}."
        ),
        "",
        "| point | simulated | measured | ratio |",
        "|---|---:|---:|---:|",
    ]
    for name, simulated, measured in check(document, costs):
        ratio = simulated / measured
        lines.append(f"| {name} | {simulated:.2f} M/s | {measured:.2f} M/s | {ratio:.2f} |")
    lines += [
        "",
        "| set-up | single inserts | limited by | sampled, 256 a call | limited by |",
        "|---|---:|---|---:|---|",
    ]
    for cores in (2, 64, 192):
        lines.append(_line(f"one machine of {cores} cores", machine(costs, cores)))
    for count in (10, 100, 1000):
        lines.append(_line(f"one server, clients on {count} hosts", hosts(costs, count, 64)))
    for count in (10, 100, 1000):
        name = f"{count} hosts of 64 cores, a server and its clients on each"
        lines.append(_line(name, sharded(costs, count, 64)))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the model; returns 1 if the run lacks a figure."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.capacity_model", description="Models larger machines."
    )
    parser.add_argument("file", type=Path, nargs="?", default=LATEST, metavar="FILE")
    arguments = parser.parse_args(argv)
    try:
        sys.stdout.write(report(json.loads(arguments.file.read_text())))
    except (MissingFigureError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
