"""One picture a question: median rates as bars, with the range of all repetitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # Before pyplot: there need not be a display.

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.harness import Figure
from bench.report import grouped, short

OURS = "#1f6f8b"
OTHERS = "#b0b0b0"
COLUMNS = 4
WIDE = 30.0
"""From this ratio of the greatest rate to the least one on, a panel's axis is logarithmic."""


def draw(
    directory: Path, stem: str, figures: Sequence[Figure], questions: dict[str, str]
) -> list[Path]:
    """Draws every question that has figures.

    Args:
        directory: Where the files go.
        stem: The files are named `stem`-question.png and .svg.
        figures: What was measured.
        questions: What each question asks, by name.

    Returns:
        The files written.
    """
    written: list[Path] = []
    for name, title in questions.items():
        cases = {
            case: rows for (question, case), rows in grouped(figures).items() if question == name
        }
        if cases:
            path = directory / f"{stem}-{name}.png"
            _draw_question(path, title, cases)
            written += [path, path.with_suffix(".svg")]
    return written


def _draw_question(path: Path, title: str, cases: dict[str, list[Figure]]) -> None:
    """Draws one panel a case, as PNG and beside it as SVG."""
    columns = min(COLUMNS, len(cases))
    lines = math.ceil(len(cases) / columns)
    height = max(len(rows) for rows in cases.values()) * 0.36 + 1.0
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(max(7.5, 4.2 * columns + 2.4), height * lines + 0.6),
        squeeze=False,
        sharey=_same_rows(cases),
        layout="constrained",
    )
    panels: list[Axes] = list(axes.flat)
    for panel, (case, rows) in zip(panels, cases.items(), strict=False):
        _draw_case(panel, case, rows)
    for panel in panels[len(cases) :]:
        panel.set_visible(False)
    figure.suptitle(f"{title}  (items/s; more is better)", fontsize=11)
    figure.savefig(path, dpi=110)
    # The same figures give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "shmreplay"}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


def _same_rows(cases: dict[str, list[Figure]]) -> bool:
    """Whether every case has the same contenders, so that one set of labels does for a line."""
    labels = [tuple(row.contender for row in rows) for rows in cases.values()]
    return all(label == labels[0] for label in labels)


def _draw_case(panel: Axes, case: str, rows: Sequence[Figure]) -> None:
    """Draws one line a contender, the first on top.

    Bars from zero where the rates are near each other; points on a logarithmic axis, where a bar
    would have no honest length, where they are not.
    """
    rates = [row.items_per_second for row in rows]
    low, high = min(rate.minimum for rate in rates), max(rate.maximum for rate in rates)
    medians = [rate.median for rate in rates]
    colors = [OURS if row.ours else OTHERS for row in rows]
    errors = [
        [rate.median - rate.minimum for rate in rates],
        [rate.maximum - rate.median for rate in rates],
    ]
    places = list(range(len(rows)))
    if high / low > WIDE:
        panel.set_xscale("log")
        panel.scatter(medians, places, color=colors, s=40, zorder=3)
        panel.set_xlim(low / 2, high * (high / low) ** 0.35)
        panel.grid(axis="x", color="#eeeeee")
    else:
        panel.barh(places, medians, color=colors)
        panel.set_xlim(0, 1.25 * high)
    panel.errorbar(
        medians, places, xerr=errors, fmt="none", elinewidth=1, capsize=2, ecolor="#333333"
    )
    for place, rate in zip(places, rates, strict=True):
        panel.annotate(
            short(rate.median),
            (rate.maximum, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    panel.set_yticks(places, [row.contender for row in rows], fontsize=8)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    panel.set_title(case, fontsize=9)
    panel.spines[["top", "right", "bottom"]].set_visible(False)
