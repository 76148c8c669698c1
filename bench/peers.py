"""How fast are others at the same work?

Every peer has an environment and processes of its own, made by `python -m bench.peers_setup DIR`,
so that nobody's pins clash; all run the same workloads in turn with shmreplay and a numpy ring.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import workers
from bench.harness import Bench, Contender, Figure, Measure
from bench.peers_cases import CASES, Case, Row
from bench.targets import Target

NAME = "peers"
QUESTION = "How fast are other replay buffers at the same work?"
ROOT = Path(__file__).parent.parent
REVERB = "dm-reverb"
RING = "numpy ring"
AHEAD_OF_REVERB = 50.0
AHEAD_OF_OTHERS = 2.0
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE", "CUDA_VISIBLE_DEVICES": "-1"}


@dataclass(frozen=True)
class Peer:
    """Another replay buffer.

    Attributes:
        module: `bench.peers_MODULE` has its rows.
        environment: The folder of its virtual environment, which `bench/peers_requirements` has a
            list for; None: what runs this.
        label: Its name.
        lacks: Cases that it has no way to do, and why.
    """

    module: str
    environment: str | None
    label: str
    lacks: dict[str, str]


_TOGETHER = ("w7-insert", "w7-sample")
PEERS = (
    Peer("ours", None, "shmreplay", {}),
    Peer("reverb", "reverb", REVERB, {"w2": "it inserts items one by one"}),
    Peer(
        "sb3",
        "sb3",
        "stable-baselines3",
        {"w4": "it has no priorities", **dict.fromkeys(_TOGETHER, "its buffer is of one process")},
    ),
    Peer("cpprb", "cpprb", "cpprb", {}),
    Peer("torchrl", "torchrl", "torchrl", {}),
    Peer(
        "flashbax", "flashbax", "flashbax", dict.fromkeys(_TOGETHER, "its buffer is of one process")
    ),
)

_MEMORY = (
    "both are held up by the same memory: what is left to gain is the work around the copy, and "
    "one copy of the payload is what everybody pays"
)
REASONS: dict[str, str] = {
    "w1": "a call from Python and a dict of five arrays cost more than the copy of 681 bytes, for "
    "whoever takes them one by one",
    "w4": "both draw from a sum tree and update it, bound by the misses of the same levels",
    "w8-insert": "a client's insert waits for the item to be in the table, and takes a structure "
    "apart anew each time; writers do neither",
    "w8-writer": "append, five slices of the history and create_item are seven calls from Python "
    "for an item; a StructuredWriter needs one",
    "w2": _MEMORY,
    "w3": _MEMORY,
    "w5-insert": _MEMORY,
    "w5-sample": _MEMORY,
    **{case: _MEMORY for case in CASES if case.startswith("w6")},
    "w7-insert": "actors and learner share two cores freely, so the split between inserting and "
    "sampling is the scheduler's; add both",
    "w7-sample": "actors and learner share two cores freely, so the split between inserting and "
    "sampling is the scheduler's; add both",
    "w8-sample": "a generator hands over items one by one, so a Python object an item is the cost; "
    "sample_batch is the way for batches",
    "w8-dataset": "a batch of the dataset is a sample_batch, which reads its rows from memory that "
    "no cache holds",
}
"""Why a target may be missed; shown with those that are."""


def rows_of(peer: Peer) -> tuple[Row, ...]:
    """Returns a peer's rows. The modules import their libraries only in functions."""
    rows: tuple[Row, ...] = importlib.import_module(f"bench.peers_{peer.module}").ROWS
    return rows


def python_of(directory: Path | None, peer: Peer) -> str | None:
    """Returns the interpreter of a peer's environment; None if there is none."""
    if peer.environment is None:
        return sys.executable
    if directory is None:
        return None
    python = directory.resolve() / peer.environment / "bin" / "python"
    return str(python) if python.exists() else None


def _launch(stack: ExitStack, python: str, module: str, row: Row, quick: bool) -> workers.Worker:
    command = [python, "-m", "bench.peers_worker", module, row.case, row.name]
    env = {**QUIET, "PYTHONPATH": str(ROOT)}
    return workers.Worker(stack, [*command, "quick"] if quick else command, ROOT, env)


def _measure_case(
    bench: Bench, question: str, case: Case, rows: Sequence[tuple[str, str, Row]], box: float
) -> None:
    """Compares the rows of a case, each given as (interpreter, module of its peer, row).

    All get ready at once, which takes most of the time that nothing is measured in.
    """
    with ExitStack() as stack:
        started = [_launch(stack, *row, bench.settings.quick) for row in rows]
        for worker in started:
            stack.callback(worker.bid)  # all, before any is waited for
        contenders = [
            Contender(row.name, partial(_ready, worker=worker), row.name.startswith("shmreplay"))
            for (_, _, row), worker in zip(rows, started, strict=True)
        ]
        bench.compare(
            question,
            case.title,
            contenders,
            bytes_per_item=case.bytes_per_item,
            items_per_call=case.items,
            box=box,
        )


def _ready(_: ExitStack, worker: workers.Worker) -> Measure:
    return worker.ready()


def measure(
    bench: Bench, question: str, peers: Sequence[Peer], cases: Mapping[str, Case], box: float
) -> None:
    """Measures cases with all peers whose environment is here.

    Args:
        bench: Collects.
        question: The question's name.
        peers: Whom to measure; alone, shmreplay is not worth it, so then all are skipped.
        cases: What to measure, by the key that rows have.
        box: Seconds for one repetition of one contender.
    """
    pythons = {peer.label: python_of(bench.peers, peer) for peer in peers}
    for peer in peers:
        if pythons[peer.label] is None:
            where = bench.peers or "DIR"
            bench.skip(
                question,
                "all",
                peer.label,
                f"no environment {where}/{peer.environment}: make it with python -m "
                f"bench.peers_setup {where}, and give --peers {where}",
            )
    if not any(pythons[peer.label] for peer in peers if peer.environment):
        return
    for key, case in cases.items():
        rows = []
        for peer in peers:
            python = pythons[peer.label]
            if python is None:
                continue
            if key in peer.lacks:
                bench.skip(question, case.title, peer.label, peer.lacks[key])
            rows += [(python, peer.module, row) for row in rows_of(peer) if row.case == key]
        if not bench.has(question, case.title):
            _measure_case(bench, question, case, rows, box)


def run(bench: Bench) -> None:
    """Measures this question."""
    measure(bench, NAME, PEERS, CASES, 0.3)


def _reason(key: str, rings: Sequence[Figure], rival: Figure, factor: float) -> str:
    """Why a target may be missed; says so where a ring that only copies would miss it as well."""
    if not rings:
        return REASONS[key]
    bound = rings[0].items_per_second.median / rival.items_per_second.median
    out_of_reach = ", so that it is out of reach for whoever copies" if bound < factor else ""
    return (
        f"{REASONS[key]}. A numpy ring, which copies and does nothing else, has {bound:.3g} x the "
        f"rival's rate{out_of_reach}"
    )


def targets(figures: Sequence[Figure]) -> list[Target]:
    """Returns what shmreplay is held to: the best of Reverb and the best of the others, a case.

    Args:
        figures: What was measured; the best is the one with the highest median.
    """
    found: list[Target] = []
    for key, case in CASES.items():
        here = [f for f in figures if f.question == NAME and f.case == case.title]
        here.sort(key=lambda figure: figure.items_per_second.median, reverse=True)
        ours = [f for f in here if f.ours]
        theirs = [f for f in here if f.contender.startswith(REVERB)]
        others = [f for f in here if f not in ours and f not in theirs and f.contender != RING]
        rings = [f for f in here if f.contender == RING]
        for rivals, factor in ((theirs, AHEAD_OF_REVERB), (others, AHEAD_OF_OTHERS)):
            if ours and rivals:
                found.append(
                    Target(
                        f"{case.title}: rate against {rivals[0].contender}",
                        (NAME, case.title, ours[0].contender),
                        factor,
                        True,
                        "x",
                        "items/s",
                        (NAME, case.title, rivals[0].contender),
                        _reason(key, rings, rivals[0], factor),
                    )
                )
    return found
