"""The command line: ``python -m bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import (
    batch_insert,
    borrow,
    bridge,
    checkpoint,
    compression,
    copy_vs_zero_copy,
    crash_safety,
    file_store,
    import_time,
    prioritized,
    report,
    scaling,
    single_insert,
    uniform_sample,
)
from bench.harness import Bench, Failure, Settings
from bench.targets import all_targets, judge

RESULTS = Path(__file__).parent / "results"
QUICK_SCALE = 0.15
QUICK_REPEAT = 3


@dataclass(frozen=True)
class Question:
    """A file of this folder: its name, what it asks, and what measures it."""

    name: str
    text: str
    run: Callable[[Bench], None]


QUESTIONS: dict[str, Question] = {
    module.NAME: Question(module.NAME, module.QUESTION, module.run)
    for module in (
        single_insert,
        batch_insert,
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the questions; returns 0, or 1 if a contender failed.

    A target that is missed does not fail the run: it depends on the machine, and is in the report.
    """
    arguments = _arguments(argv)
    repeat = arguments.repeat or (QUICK_REPEAT if arguments.quick else 5)
    settings = Settings(repeat, QUICK_SCALE if arguments.quick else 1.0, arguments.quick)
    environment = {"versions": report.versions(), "machine": report.machine()}
    bench = Bench(settings, report.say)
    chosen = arguments.only or list(QUESTIONS)
    for name in QUESTIONS:
        if name not in chosen:
            continue
        try:
            QUESTIONS[name].run(bench)
        except Exception as error:
            # Recorded and reported at the end; the other questions are worth having all the same.
            bench.failures.append(Failure.of(error, name))
    verdicts = judge([target for target in all_targets() if target.row[0] in chosen], bench.figures)
    report.say(report.as_text(bench, verdicts))
    # Only a whole run is a run of record.
    stem = "partial" if arguments.quick or arguments.only else "latest"
    questions = {name: question.text for name, question in QUESTIONS.items()}
    for path in report.write(arguments.output, stem, bench, verdicts, environment, questions):
        report.say(f"written: {path}")
    if not report.can_plot():
        report.say("no plots: matplotlib is not installed (pip install -e '.[bench]')")
    for failure in bench.failures:
        sys.stderr.write(f"\n{failure.question} {failure.case} {failure.contender}\n")
        sys.stderr.write(failure.trace)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
