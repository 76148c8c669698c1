"""The screen of ``shmreplay top``. Needs ``pip install 'shmreplay[cli]'``."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Group
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Footer, Static

from shmreplay import monitor, recovery
from shmreplay.errors import ReverbError
from shmreplay.monitor import Process, Snapshot, Source, StoreView, Table
from shmreplay.wording import age, rate, size

__all__ = ["TopApp"]

_USE_STYLES = {
    "steps and items": "#4e9de0",
    "ready for use": "#2f5878",
    "indexes": "#c08ad8",
    "fixed": "#7a7f87",
}
_BAR_CELLS = 60
# Seconds after which a batch that is still lent is worth a look.
_LONG_BORROW_S = 10.0


class TopApp(App[None]):
    """Shows what a source of snapshots finds, again and again."""

    TITLE = "shmreplay top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    Static { padding: 0 1; height: auto; }
    .box { border: round $primary-darken-2; border-title-color: $text; height: auto;
           margin: 0 1; }
    #head { padding: 1 2 0 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("p", "pause", "Pause"),
    ]

    def __init__(self, source: Source, interval: float = 1.0) -> None:
        """Looks at nothing before it runs.

        Args:
            source: Looks once more.
            interval: Seconds between two looks.
        """
        super().__init__()
        self._source = source
        self._interval = interval
        self._before: Snapshot | None = None
        self._paused = False

    def compose(self) -> ComposeResult:
        """The parts of the screen, from top to bottom."""
        yield Static(id="head")
        with VerticalScroll():
            for name in ("memory", "tables", "limiters", "processes"):
                with Vertical(classes="box", id=f"{name}-box") as box:
                    box.border_title = name
                    yield Static(id=name)
        yield Footer()

    def on_mount(self) -> None:
        """Begins to look."""
        self.set_interval(self._interval, self.look)
        self.look()

    def look(self) -> None:
        """Looks once more, in a thread: a server on another host may let one wait."""
        if not self._paused:
            self.run_worker(self._ask, thread=True, exclusive=True, group="look")

    def _ask(self) -> None:
        try:
            found = self._source()
        except (ReverbError, OSError) as error:
            self.call_from_thread(self.show_error, str(error))
        else:
            self.call_from_thread(self.show, found)

    def action_pause(self) -> None:
        """Stops looking, or goes on."""
        self._paused = not self._paused
        self.sub_title = "paused" if self._paused else ""
        self.query_one("#memory-box").border_subtitle = self.sub_title

    def show_error(self, message: str) -> None:
        """Says why there is nothing new to show; what was there stays."""
        self.query_one("#head", Static).update(Text(message, style="bold red"))

    def show(self, now: Snapshot) -> None:
        """Shows what was found, with rates since the one before."""
        view = monitor.view(now, self._before)
        self._before = now
        self.query_one("#head", Static).update(_head(view))
        for name in ("memory", "tables", "limiters", "processes"):
            self.query_one(f"#{name}-box").display = view.readable
        if view.readable:
            self.query_one("#memory", Static).update(_memory(view))
            self.query_one("#tables", Static).update(_tables(view.tables))
            self.query_one("#limiters", Static).update(_limiters(view.tables))
            self.query_one("#processes", Static).update(_processes(view.processes))


# --- parts --------------------------------------------------------------------------------------


def _head(view: StoreView) -> Text:
    good = view.state == recovery.SERVED
    text = Text.assemble(
        (view.name, "bold"),
        ("  "),
        (f" {view.state} ", "bold black on green" if good else "bold white on red"),
        (f"  {view.address}", "dim"),
    )
    if view.readable:
        text.append(f"  port {view.port or '-'}  server {view.server_pid}", style="dim")
    for problem in view.problems:
        text.append(f"\n{problem}", style="bold red")
    return text


def _memory(view: StoreView) -> Text:
    text = Text()
    used = 0
    for use, nbytes in view.memory.items():
        cells = round(_BAR_CELLS * nbytes / view.capacity_bytes)
        cells = max(cells, 1) if nbytes > 0 else cells
        cells = min(cells, _BAR_CELLS - used)
        text.append("█" * cells, style=_USE_STYLES[use])
        used += cells
    text.append("░" * (_BAR_CELLS - used), style="dim")
    text.append(f"  {size(view.committed_bytes)} of {size(view.capacity_bytes)}")
    if view.rates is not None:
        text.append(f"   {size(view.rates.written_bytes)}/s written", style="dim")
    text.append("\n")
    for use, nbytes in view.memory.items():
        text.append("■ ", style=_USE_STYLES[use])
        text.append(f"{use} {size(nbytes)}   ")
    return text


def _grid(*titles: str, left: int) -> Grid:
    """A table without lines; the first `left` columns hold words, the others numbers."""
    grid = Grid(box=None, expand=True, padding=(0, 1), pad_edge=False, header_style="dim")
    for number, title in enumerate(titles):
        grid.add_column(title, justify="left" if number < left else "right", no_wrap=True)
    return grid


def _tables(tables: list[Table]) -> Grid:
    titles = ("table", "state", "selectors", "items", "of", "inserts/s", "samples/s")
    grid = _grid(*titles, "updates/s", "ratio", "target", left=3)
    for each in tables:
        rates = each.rates
        waits = each.insert_waiters + each.sample_waiters > 0
        state = "waiting" if waits else "ok"
        grid.add_row(
            Text(each.name, style="bold"),
            Text("shut", style="bold red")
            if each.poisoned
            else Text(state, style="yellow" if waits else "green"),
            Text(f"{each.sampler} / {each.remover}", style="dim"),
            f"{each.size:,}",
            f"{each.max_size:,}",
            rate(rates.inserts if rates else None),
            rate(rates.samples if rates else None),
            rate(rates.updates if rates else None),
            "-" if each.ratio is None else f"{each.ratio:.3f}",
            "-" if each.target is None else f"{each.target:g}",
            style="red" if each.poisoned else "",
        )
    return grid


def _limiters(tables: list[Table]) -> Group | Text:
    lines: list[Text | Padding] = []
    for each in tables:
        reasons = (
            ("inserts", each.insert_waiters, each.insert_blocked_by),
            ("samples", each.sample_waiters, each.sample_blocked_by),
        )
        for what, waiters, why in reasons:
            if not why:
                continue
            title = Text(f"{each.name}: {what} held back", style="bold yellow")
            if waiters > 0:
                title.append(f", {waiters} waiting", style="not bold yellow")
            lines += [title, Padding(Text(why), (0, 0, 0, 2))]
    return Group(*lines) if lines else Text("nobody is held back", style="dim")


def _processes(processes: list[Process]) -> Grid:
    titles = ("pid", "role", "holds", "inserts/s", "samples/s", "written", "attached", "oldest pin")
    grid = _grid(*titles, left=3)
    for each in sorted(processes, key=lambda one: (not one.alive, one.pid)):
        rates = each.rates
        pin = each.oldest_pin_s
        old = pin is not None and pin >= _LONG_BORROW_S
        grid.add_row(
            Text(str(each.pid), style="bold"),
            each.role if each.alive else f"{each.role} (dead)",
            Text(each.holds, style="dim"),
            rate(rates.inserts if rates else None),
            rate(rates.samples if rates else None),
            f"{size(rates.written_bytes)}/s" if rates and rates.written_bytes else "-",
            age(each.attached_s),
            Text(
                "-" if pin is None else f"{each.borrowed_items} items, {pin:.1f} s",
                style="yellow" if old else "",
            ),
            style="" if each.alive else "red",
        )
    return grid
