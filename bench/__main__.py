"""The command line: ``python -m bench``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import (
    batch_insert,
    block_append,
    borrow,
    bridge,
    checkpoint,
    compression,
    copy_vs_zero_copy,
    crash_safety,
    file_store,
    import_time,
    paper,
    peers,
    peers_remote,
    prioritized,
    report,
    scaling,
    single_insert,
    uniform_sample,
)
from bench.harness import Bench, Failure, Settings
from bench.resume import Clock, ResumeError, Unfinished
from bench.targets import all_targets, judge

RESULTS = Path(__file__).parent / "results"
QUICK_SCALE = 0.15
QUICK_REPEAT = 3
PEERS_VARIABLE = "SHMREPLAY_BENCH_PEERS"


@dataclass(frozen=True)
class Question:
    """A file of this folder.

    Attributes:
        name: As `--only` takes it.
        text: What it asks.
        run: What measures it.
        seconds: What that usually takes.
        by_name: Whether it takes so long that it runs only where it, or everything, is asked for.
    """

    name: str
    text: str
    run: Callable[[Bench], None]
    seconds: float = 30.0
    by_name: bool = False


SECONDS = {
    "import_time": 15.0,
    "copy_vs_zero_copy": 80.0,
    "scaling": 130.0,
    "bridge": 100.0,
    "peers": 450.0,
    "peers_remote": 330.0,
    "paper": 900.0,
}
"""What a question usually takes, where not about half a minute: only to say what is left."""

QUESTIONS: dict[str, Question] = {
    module.NAME: Question(
        module.NAME,
        module.QUESTION,
        module.run,
        SECONDS.get(module.NAME, 30.0),
        getattr(module, "BY_NAME", False),
    )
    for module in (
        single_insert,
        batch_insert,
        block_append,
        uniform_sample,
        prioritized,
        borrow,
        copy_vs_zero_copy,
        scaling,
        checkpoint,
        crash_safety,
        file_store,
        import_time,
        bridge,
        compression,
        peers,
        peers_remote,
        paper,
    )
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measures shmreplay beside its baselines in one run."
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(QUESTIONS),
        metavar="NAME",
        help=f"this question alone (may be given several times): {', '.join(QUESTIONS)}",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also the long ones: "
        + ", ".join(name for name, question in QUESTIONS.items() if question.by_name),
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on after the last finished case of the same run, which was interrupted",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=os.environ.get(PEERS_VARIABLE),
        metavar="DIR",
        help="virtual environments of the peers, made by python -m bench.peers_setup DIR "
        f"(default: ${PEERS_VARIABLE})",
    )
    parser.add_argument(
        "--repeat",
        type=_positive,
        default=None,
        metavar="N",
        help=f"repetitions of every figure (default 5; {QUICK_REPEAT} with --quick)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="short time boxes and fewer, smaller cases: to see that it runs, not to quote",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="folder for the results (default bench/results)",
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    """Returns a whole number of at least one.

    Raises:
        ValueError: It is none (argparse reports it).
    """
    value = int(text)
    if value < 1:
        raise ValueError(f"expected at least 1, got {value}")
    return value


def _chosen(arguments: argparse.Namespace) -> list[str]:
    """Returns the names of the questions to run, in their order."""
    if arguments.only:
        return [name for name in QUESTIONS if name in arguments.only]
    return [name for name, question in QUESTIONS.items() if arguments.all or not question.by_name]


def _run(bench: Bench, chosen: Sequence[str], unfinished: Unfinished) -> None:
    """Runs those of the chosen questions that are not finished."""
    scale = QUICK_SCALE if bench.settings.quick else 1.0
    clock = Clock({name: scale * QUESTIONS[name].seconds for name in chosen}, unfinished.seconds)
    bench.report = lambda text: report.say(f"{clock.line} {text}")
    bench.note = unfinished.write
    for name in chosen:
        if name in unfinished.seconds:
            continue
        clock.restart()
        try:
            QUESTIONS[name].run(bench)
        except Exception as error:
            # Recorded and reported at the end; the other questions are worth having all the same.
            bench.failures.append(Failure.of(error, name))
        unfinished.finished(name, clock.stop(name))
    report.say(clock.line)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the questions; returns 0, or 1 if a contender failed, 2 if there is nothing to resume.

    A target that is missed does not fail the run: it depends on the machine, and is in the report.
    """
    arguments = _arguments(argv)
    repeat = arguments.repeat or (QUICK_REPEAT if arguments.quick else 5)
    settings = Settings(repeat, QUICK_SCALE if arguments.quick else 1.0, arguments.quick)
    environment = {"versions": report.versions(), "machine": report.machine()}
    bench = Bench(settings, report.say, arguments.peers)
    chosen = _chosen(arguments)
    # Only a whole run is a run of record.
    stem = "partial" if arguments.quick or arguments.only else "latest"
    path = arguments.output / f"unfinished-{stem}.json"
    unfinished = Unfinished(path, bench, chosen, environment)
    if arguments.resume:
        try:
            unfinished.load()
        except ResumeError as error:
            sys.stderr.write(f"{error}\n")
            return 2
    _run(bench, chosen, unfinished)
    wanted = [target for target in all_targets() if target.row[0] in chosen]
    wanted += peers.targets(bench.figures) + paper.targets(bench.figures)
    wanted += paper.quantity_targets(bench.quantities)
    verdicts = judge(wanted, bench.figures, bench.quantities)
    report.say(report.as_text(bench, verdicts))
    questions = {name: question.text for name, question in QUESTIONS.items()}
    for path in report.write(arguments.output, stem, bench, verdicts, environment, questions):
        report.say(f"written: {path}")
    unfinished.remove()
    if not report.can_plot():
        report.say("no plots: matplotlib is not installed (pip install -e '.[bench]')")
    for failure in bench.failures:
        sys.stderr.write(f"\n{failure.question} {failure.case} {failure.contender}\n")
        sys.stderr.write(failure.trace)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
