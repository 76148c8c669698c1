"""What a run leaves behind: a table on the terminal, JSON, a Markdown report and plots."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness import Bench, Figure, Quantity, Spread
from bench.targets import Verdict

NO_REASON = "no reason is known: it is ours"
PACKAGES = ("shmreplay", "numpy", "posix_ipc", "lz4", "pyzmq", "matplotlib")


def versions() -> dict[str, str]:
    """Returns the versions of what a figure depends on."""
    found = {"python": platform.python_version(), "libc": " ".join(platform.libc_ver())}
    found["kernel"] = platform.release()
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    compiler = os.environ.get("CC", "cc")
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
        found["cc"] = done.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        found["cc"] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Returns what the machine is and how busy it was, with nothing that names it."""
    shm = os.statvfs("/dev/shm")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shm_free_bytes": shm.f_bavail * shm.f_frsize,
        "load_average_before": [round(value, 2) for value in os.getloadavg()],
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge_pages_shm": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    }


def _cpu_model() -> str:
    """Returns the processor's name and model numbers (names alone are often those of a cloud)."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name", platform.machine())
    if "cpu family" in found:
        return f"{name} (family {found['cpu family']} model {found.get('model', '?')})"
    return name


def _chosen(path: str) -> str:
    """Returns the bracketed word of a kernel switch, or "unknown" where there is no such switch."""
    switch = Path(path)
    if not switch.exists():
        return "unknown"
    return switch.read_text().partition("[")[2].partition("]")[0]


def as_json(
    bench: Bench, verdicts: Sequence[Verdict], environment: dict[str, Any]
) -> dict[str, Any]:
    """Returns the whole run as one JSON document.

    Args:
        bench: The figures and failures.
        verdicts: The targets.
        environment: `versions` and `machine`, taken before the run.
    """
    settings = bench.settings
    return {
        "format": 1,
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment,
        "settings": {
            "repeat": settings.repeat,
            "box_scale": settings.box_scale,
            "quick": settings.quick,
        },
        "targets": [_verdict_json(verdict) for verdict in verdicts],
        "figures": [_figure_json(figure) for figure in bench.figures],
        "failures": [
            {
                "question": failure.question,
                "case": failure.case,
                "contender": failure.contender,
                "error": failure.error,
            }
            for failure in bench.failures
        ],
        "skipped": [asdict(skipped) for skipped in bench.skipped],
        "quantities": [asdict(quantity) for quantity in bench.quantities],
    }


def figure_of(document: dict[str, Any]) -> Figure:
    """Returns a figure of a run's JSON document."""
    return Figure(
        document["question"],
        document["case"],
        document["contender"],
        document["ours"],
        document["items_per_call"],
        document["bytes_per_item"],
        tuple(document["seconds_per_call"]),
    )


def _spread_json(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "min": spread.minimum, "max": spread.maximum}


def _figure_json(figure: Figure) -> dict[str, Any]:
    return {
        "question": figure.question,
        "case": figure.case,
        "contender": figure.contender,
        "ours": figure.ours,
        "items_per_call": figure.items_per_call,
        "bytes_per_item": figure.bytes_per_item,
        "microseconds_per_call": _spread_json(figure.microseconds),
        "items_per_second": _spread_json(figure.items_per_second),
        "gigabytes_per_second": _spread_json(figure.gigabytes_per_second),
        "seconds_per_call": list(figure.seconds_per_call),
    }


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "target": verdict.target.text,
        "required": verdict.target.requirement,
        "measured": None if verdict.measured is None else _spread_json(verdict.measured),
        "met": verdict.met,
        "reason": verdict.target.reason,
    }


def short(value: float) -> str:
    """Returns a number in three digits, with k or M where it is large."""
    for factor, suffix in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= factor * 0.9995:
            return f"{_three(value / factor)}{suffix}"
    return _three(value)


def _three(value: float) -> str:
    """Returns three significant digits without an exponent."""
    if value == 0:
        return "0"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}" if abs(value) >= 0.1 else f"{value:.3g}"


def spread_text(spread: Spread) -> str:
    """Returns "median (min-max)"."""
    return f"{short(spread.median)} ({short(spread.minimum)}-{short(spread.maximum)})"


HEADS = ("contender", "us a call", "items/s", "GB/s")
TARGET_HEADS = ("target", "required", "measured", "verdict")


QUANTITY_HEADS = ("what", "value")


def _quantity_cells(quantity: Quantity) -> tuple[str, ...]:
    return (
        f"{quantity.case}: {quantity.name}",
        f"{spread_text(Spread.of(quantity.values))} {quantity.unit}",
    )


def _figure_cells(figure: Figure) -> tuple[str, ...]:
    return (
        figure.contender,
        spread_text(figure.microseconds),
        spread_text(figure.items_per_second),
        _three(figure.gigabytes_per_second.median),
    )


def _verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    measured = "-" if verdict.measured is None else spread_text(verdict.measured)
    return (verdict.target.text, verdict.target.requirement, measured, verdict.word)


def grouped(figures: Sequence[Figure]) -> dict[tuple[str, str], list[Figure]]:
    """Returns figures by question and case, in the order they were taken."""
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        groups.setdefault((figure.question, figure.case), []).append(figure)
    return groups


def _text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns aligned lines: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = []
    for row in [heads, ["-" * width for width in widths], *rows]:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]))
    return lines


def as_text(bench: Bench, verdicts: Sequence[Verdict]) -> str:
    """Returns the tables for a terminal."""
    lines: list[str] = []
    for (question, case), figures in grouped(bench.figures).items():
        lines += ["", f"{question}: {case}"]
        lines += _text_table(HEADS, [_figure_cells(figure) for figure in figures])
    if bench.quantities:
        lines += ["", *_text_table(QUANTITY_HEADS, [_quantity_cells(q) for q in bench.quantities])]
    lines += ["", *_text_table(TARGET_HEADS, [_verdict_cells(each) for each in verdicts])]
    if bench.failures:
        lines += ["", "failed:"]
        for failure in bench.failures:
            lines.append(f"  {failure.question}, {failure.case}, {failure.contender}")
            lines += [f"    {line}" for line in failure.error.splitlines()]
    if bench.skipped:
        lines += ["", "not measured:", *(f"  {line}" for line in _skipped_lines(bench))]
    return "\n".join(lines)


def _skipped_lines(bench: Bench) -> list[str]:
    """Returns one line a question and contender: where it was not measured, and why."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for skipped in bench.skipped:
        key = (skipped.question, skipped.contender, skipped.reason)
        cases.setdefault(key, []).append(skipped.case)
    return [
        f"{question}, {contender} ({'; '.join(found)}): {reason}"
        for (question, contender, reason), found in cases.items()
    ]


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def as_markdown(
    bench: Bench,
    verdicts: Sequence[Verdict],
    environment: dict[str, Any],
    questions: dict[str, str],
    plots: Sequence[Path],
) -> str:
    """Returns the report.

    Args:
        bench: The figures and failures.
        verdicts: The targets.
        environment: `versions` and `machine`, taken before the run.
        questions: What each question asks, by name.
        plots: Files beside the report, named after their question.
    """
    settings, here = bench.settings, environment["machine"]
    software = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    quick = " This was a quick run: read nothing into it." if settings.quick else ""
    lines = [
        "# Benchmark results",
        "",
        (
            f"Taken {datetime.now(UTC):%Y-%m-%d} by `python -m bench`: median of {settings.repeat} "
            f"interleaved repetitions (min-max).{quick} The method is in "
            "[bench/README.md](../README.md)."
        ),
        "",
        (
            f"{here['cpu']}, {here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB; load "
            f"average before the run {here['load_average_before'][0]}; transparent huge pages "
            f"{here['huge_pages']}, for shared memory {here['huge_pages_shm']}. {software}."
        ),
        "",
        "## Targets",
        "",
        *_markdown_table(TARGET_HEADS, [_verdict_cells(verdict) for verdict in verdicts]),
    ]
    missed = [v.target for v in verdicts if v.met is False]
    if missed:
        lines += ["", "Why some are not met:", ""]
        lines += [f"- {target.text}: {target.reason or NO_REASON}." for target in missed]
    by_stem = {plot.stem.partition("-")[2]: plot for plot in plots if plot.suffix == ".png"}
    last = ""
    for (question, case), figures in grouped(bench.figures).items():
        if question != last:
            lines += ["", f"## {questions[question]}"]
            if question in by_stem:
                lines += ["", f"![{question}]({by_stem[question].name})"]
            last = question
        lines += ["", f"### {case}", ""]
        lines += _markdown_table(HEADS, [_figure_cells(figure) for figure in figures])
    for question in dict.fromkeys(quantity.question for quantity in bench.quantities):
        rows = [_quantity_cells(q) for q in bench.quantities if q.question == question]
        lines += ["", f"## {questions[question]} Latencies and fairness", ""]
        lines += _markdown_table(QUANTITY_HEADS, rows)
    if bench.failures:
        lines += ["", "## Failed", ""]
        for failure in bench.failures:
            lines.append(f"- {failure.question}, {failure.case}, {failure.contender}:")
            lines.append("  `" + failure.error.replace("\n", " ") + "`")
    if bench.skipped:
        lines += ["", "## Not measured", "", *(f"- {line}" for line in _skipped_lines(bench))]
    return "\n".join(lines) + "\n"


def write(
    directory: Path,
    stem: str,
    bench: Bench,
    verdicts: Sequence[Verdict],
    environment: dict[str, Any],
    questions: dict[str, str],
) -> list[Path]:
    """Writes `stem`.json, `stem`.md and, where matplotlib is installed, a plot a question.

    Returns:
        The files written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    plots: list[Path] = []
    if can_plot():
        from bench import plots as drawing

        plots = drawing.draw(directory, stem, bench.figures, questions)
    document = directory / f"{stem}.json"
    document.write_text(json.dumps(as_json(bench, verdicts, environment), indent=1) + "\n")
    report = directory / f"{stem}.md"
    report.write_text(as_markdown(bench, verdicts, environment, questions, plots))
    return [document, report, *plots]


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def say(text: str) -> None:
    """Writes a line to standard output at once, also where that is a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
