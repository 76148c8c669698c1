#!/usr/bin/env python3
"""Draws where the data lies: `scripts/memory.svg`, which README.md shows.

    scripts/memory_picture.py            writes it anew
    scripts/memory_picture.py --check    exit status 1 if the file is not what this draws

No packages, and the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

TARGET: Final = Path(__file__).with_name("memory.svg")
WIDTH: Final = 960
HEIGHT: Final = 560

INK: Final = "#1f2933"
SOFT: Final = "#52606d"
LINE: Final = "#9aa5b1"
PAPER: Final = "#ffffff"
PROCESS: Final = "#e3f2fd"
STORE: Final = "#f5f7fa"
TABLE: Final = "#fff3e0"
BLOCK: Final = "#e8f5e9"
STEP: Final = "#a5d6a7"
STEP_USED: Final = "#43a047"
WRITE: Final = "#1565c0"
READ: Final = "#c62828"
REFER: Final = "#ef6c00"


class Drawing:
    """Collects the elements of an SVG picture; all lengths in its pixels."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def box(
        self, x: int, y: int, width: int, height: int, fill: str, *, stroke: str = LINE, r: int = 8
    ) -> None:
        """Draws a rectangle with round corners."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{r}" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )

    def text(
        self,
        x: int,
        y: int,
        words: str,
        *,
        size: int = 13,
        bold: bool = False,
        fill: str = INK,
        middle: bool = False,
    ) -> None:
        """Writes a line."""
        weight = ' font-weight="600"' if bold else ""
        anchor = ' text-anchor="middle"' if middle else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}"{weight}{anchor}>'
            f"{escape(words)}</text>"
        )

    def arrow(
        self, points: Sequence[tuple[int, int]], colour: str, *, dashed: bool = False
    ) -> None:
        """Draws a line through the points that ends in an arrow of its colour."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash} '
            f'marker-end="url(#{_marker(colour)})"/>'
        )

    def svg(self) -> str:
        """Returns the whole picture."""
        markers = "".join(
            f'<marker id="{_marker(colour)}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" '
            f'fill="{colour}"/></marker>'
            for colour in (WRITE, READ, REFER)
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img" '
            f'font-family="system-ui, sans-serif">'
        )
        title = "<title>Where the data lies: processes around one store in shared memory</title>"
        ground = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{PAPER}"/>'
        body = "\n".join(self._parts)
        return f"{head}\n{title}\n<defs>{markers}</defs>\n{ground}\n{body}\n</svg>\n"


def _marker(colour: str) -> str:
    return f"tip-{colour[1:]}"


def _processes(draw: Drawing) -> None:
    for number, y in ((1, 60), (2, 150)):
        draw.box(24, y, 170, 70, PROCESS)
        draw.text(40, y + 28, f"actor process {number}", bold=True)
        draw.text(40, y + 50, "append, next_step", size=12, fill=SOFT)
    draw.box(24, 240, 170, 70, PROCESS)
    draw.text(40, 268, "server process", bold=True)
    draw.text(40, 290, "owns, sweeps, saves", size=12, fill=SOFT)
    draw.box(24, 330, 170, 70, PROCESS)
    draw.text(40, 358, "bridge", bold=True)
    draw.text(40, 380, "same tables, ZeroMQ", size=12, fill=SOFT)
    draw.box(24, 450, 170, 70, PAPER)
    draw.text(40, 478, "other hosts", bold=True)
    draw.text(40, 500, "tcp://, CURVE, lz4", size=12, fill=SOFT)
    draw.box(770, 150, 178, 90, PROCESS)
    draw.text(784, 178, "learner process", bold=True)
    draw.text(784, 200, "sample_batch: one copy", size=12, fill=SOFT)
    draw.text(784, 220, "borrow: no copy", size=12, fill=SOFT)


def _store(draw: Drawing) -> None:
    draw.box(230, 24, 510, 512, STORE)
    draw.text(250, 52, "one store: a segment in /dev/shm", size=15, bold=True)
    draw.box(250, 68, 470, 40, PAPER)
    draw.text(264, 93, "header, leases, sessions: who is here, what each holds", fill=SOFT)

    draw.box(250, 124, 225, 178, TABLE)
    draw.text(264, 148, "table", bold=True)
    draw.text(310, 148, "limiter: when to wait", size=12, fill=SOFT)
    for number in range(2):
        y = 160 + 66 * number
        draw.box(264, y, 197, 56, PAPER)
        draw.text(276, y + 21, f"stripe {number}: a lock of its own", size=12)
        draw.text(276, y + 43, "slots: key, priority, ref.", size=12, fill=SOFT)

    draw.box(495, 124, 225, 178, TABLE)
    draw.text(509, 148, "another table", bold=True)
    draw.box(509, 160, 197, 56, PAPER)
    draw.text(521, 181, "slots: key, priority, ref.", size=12, fill=SOFT)
    draw.text(521, 203, "sum tree, heap, or list", size=12, fill=SOFT)
    draw.text(509, 246, "items are references: both", size=12, fill=SOFT)
    draw.text(509, 266, "tables can hold the same steps", size=12, fill=SOFT)


def _blocks(draw: Drawing) -> None:
    draw.box(250, 330, 470, 186, BLOCK)
    draw.text(264, 354, "arenas: blocks of steps", bold=True)
    draw.text(450, 354, "each step once; it never changes", size=12, fill=SOFT)
    for row, (name, used) in enumerate(
        (("obs", range(2, 6)), ("action", (4,)), ("reward", (4, 5)))
    ):
        y = 372 + 32 * row
        draw.text(264, y + 17, name, size=12)
        for step in range(8):
            fill = STEP_USED if step in used else STEP
            draw.box(325 + 46 * step, y, 40, 24, fill, stroke=PAPER, r=4)
    draw.text(
        264,
        492,
        "dark: one item, its stack of frames, its action, its rewards;",
        size=12,
        fill=SOFT,
    )
    draw.text(264, 508, "the next item shares three of the four frames", size=12, fill=SOFT)


def _arrows(draw: Drawing) -> None:
    draw.arrow([(194, 95), (214, 95), (214, 384), (247, 384)], WRITE)
    draw.arrow([(194, 185), (214, 185), (214, 192), (261, 192)], WRITE, dashed=True)
    draw.arrow([(194, 365), (214, 365), (214, 416), (247, 416)], WRITE)
    draw.arrow([(109, 450), (109, 403)], WRITE)
    draw.arrow([(461, 200), (485, 200), (485, 327)], REFER)
    draw.arrow([(720, 384), (858, 384), (858, 243)], READ)
    draw.text(24, 46, "solid: steps, dashed: items", size=12, fill=WRITE)
    draw.text(752, 406, "rows of steps,", size=12, fill=READ)
    draw.text(752, 423, "straight out of the store", size=12, fill=READ)
    draw.text(770, 100, "nothing is serialised,", size=12, fill=SOFT)
    draw.text(770, 118, "nobody stands in between", size=12, fill=SOFT)


def picture() -> str:
    """Returns the SVG."""
    draw = Drawing()
    _processes(draw)
    _store(draw)
    _blocks(draw)
    _arrows(draw)
    return draw.svg()


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the picture, or compares it with the file; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draws where the data lies.")
    parser.add_argument("--check", action="store_true", help="compare with the file instead")
    parser.add_argument("--output", type=Path, default=TARGET, help="the file")
    options = parser.parse_args(arguments)
    if not options.check:
        options.output.write_text(picture(), encoding="utf-8")
        return 0
    if options.output.is_file() and options.output.read_text(encoding="utf-8") == picture():
        return 0
    sys.stderr.write(f"{options.output} is not what {Path(__file__).name} draws: run it again\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
