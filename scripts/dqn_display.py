"""What cartpole_dqn.py shows: progress on a terminal or in a log, and the learning curve."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib import pyplot
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

if TYPE_CHECKING:
    from cartpole_dqn import Config, Display, Evaluation, Progress, Result

logger = logging.getLogger("cartpole_dqn")

MAX_RETURN = 500.0  # the environment ends an episode after so many steps, each worth 1


class LogDisplay:
    """A plain line at a time, for files and pipes."""

    interval = 2.0

    def show(self, progress: Progress, evaluations: list[Evaluation]) -> None:
        """Logs one line."""
        logger.info(
            "%6.1f s  return %5.1f (%d episodes)  %6.0f inserts/s  %7.0f samples/s"
            "  table %6d  arena %5.1f MiB  %.1f samples/insert",
            progress.seconds,
            progress.mean_return,
            progress.episodes,
            progress.inserts_per_second,
            progress.samples_per_second,
            progress.table_size,
            progress.arena_bytes / 2**20,
            progress.ratio,
        )


class RichDisplay:
    """A panel that is redrawn in place, for terminals."""

    interval = 0.25

    def __init__(self, live: Live, config: Config) -> None:
        self._live = live
        self._config = config

    def show(self, progress: Progress, evaluations: list[Evaluation]) -> None:
        """Redraws the panel."""
        config = self._config
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="cyan", no_wrap=True)
        grid.add_column()
        grid.add_row(
            f"mean return of the last {config.window}",
            f"[bold]{progress.mean_return:.1f}[/] of {config.target_return:.1f}",
        )
        grid.add_row(
            "",
            ProgressBar(
                total=config.target_return,
                completed=progress.mean_return,
                width=40,
                finished_style="green",
            ),
        )
        grid.add_row("last evaluation episodes", sparkline(evaluations))
        grid.add_row("evaluation episodes", f"{progress.episodes:,}")
        grid.add_row("updates", f"{progress.updates:,} in {progress.seconds:.0f} s")
        grid.add_row("inserts/s", f"{progress.inserts_per_second:,.0f}")
        grid.add_row("samples/s", f"{progress.samples_per_second:,.0f}")
        grid.add_row("samples per insert", f"{progress.ratio:.2f}")
        grid.add_row("table size", f"{progress.table_size:,} of {config.replay_size:,}")
        grid.add_row("arena", f"{progress.arena_bytes / 2**20:.1f} MiB")
        title = f"{config.environment}: {config.actors} actors, 1 learner, 1 evaluator"
        self._live.update(Panel(grid, title=title, expand=False), refresh=True)


def sparkline(evaluations: list[Evaluation], width: int = 40) -> str:
    """The returns of the last episodes as a row of bars."""
    bars = "▁▂▃▄▅▆▇█"
    top = len(bars) - 1
    returns = [each.episode_return for each in evaluations[-width:]]
    return "".join(bars[min(top, int(value / MAX_RETURN * top))] for value in returns)


@contextlib.contextmanager
def make_display(config: Config) -> Iterator[Display]:
    """A live panel on a terminal, else lines."""
    if not sys.stdout.isatty():
        yield LogDisplay()
        return
    with Live(auto_refresh=False) as live:
        yield RichDisplay(live, config)


def save_curve(result: Result, config: Config, path: Path) -> None:
    """Draws the learning curve and saves it as a PNG."""
    matplotlib.use("Agg")
    updates = [each.updates for each in result.evaluations]
    returns = [each.episode_return for each in result.evaluations]
    means = [
        float(np.mean(returns[max(0, end - config.window) : end]))
        for end in range(1, len(returns) + 1)
    ]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(updates, returns, ".", alpha=0.5, label="one greedy episode")
    axes.plot(updates, means, linewidth=2, label=f"mean of the last {config.window}")
    axes.axhline(config.target_return, color="grey", linestyle="--", label="goal")
    axes.set(xlabel="updates of the learner", ylabel="return", ylim=(0, 1.05 * MAX_RETURN))
    axes.set_title(f"{config.environment}, {config.actors} actors, seed {config.seed}")
    axes.legend(loc="lower right")
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)
