"""How long until a first sample? Lines of code, and seconds from an empty environment.

    python -m bench.ease [NAME ...]        writes bench/results/ease.json and ease.md

Each contender gets a new virtual environment and pip without its cache, then runs its program of
`ease_programs`: a prioritized buffer, a thousand steps in, 32 out, their priorities back. Seconds
are those of one run, from `pip install` to the end of the program; downloads are in, so that the
network counts. Lines are those with code on them. Together it takes some minutes and 9 GB. Names
choose whom to measure anew; the others' figures stay.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import subprocess
import sys
import tempfile
import time
import tokenize
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "ease_programs"
RESULTS = Path(__file__).parent / "results"
INSTALLS = {
    "shmreplay": [str(ROOT)],
    "reverb": ["dm-reverb[tensorflow]"],
    "cpprb": ["cpprb"],
    "torchrl": ["torchrl"],
}
"""What pip is given, as the project's own documentation has it. shmreplay is built from source."""
SKIP = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
SKIP |= {tokenize.ENCODING, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Ease:
    """What a newcomer meets.

    Attributes:
        name: The contender.
        lines: Lines of its program with code on them.
        install_s: Seconds that pip took, downloads included.
        first_s: Seconds that the program then took, the first time that it ran.
        megabytes: Of the environment, without pip.
        problem: Why there are no figures; empty: there are.
    """

    name: str
    lines: int
    install_s: float = 0.0
    first_s: float = 0.0
    megabytes: float = 0.0
    problem: str = ""


def lines_of_code(source: str) -> int:
    """Counts the lines on which a token stands that is no comment."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIP:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found)


def size_of(directory: Path) -> int:
    """Bytes of the files below a directory."""
    return sum(f.lstat().st_size for f in directory.rglob("*") if f.is_file())


def measure(name: str) -> Ease:
    """Installs and runs one contender in an environment that is gone afterwards."""
    program = PROGRAMS / f"with_{name}.py"
    lines = lines_of_code(program.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="shmreplay-ease-") as directory:
        home = Path(directory) / "venv"
        venv.create(home, with_pip=True)
        python = str(home / "bin" / "python")
        empty = size_of(home)
        install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *INSTALLS[name]]
        spent = []
        for command in (install, [python, str(program)]):
            started = time.monotonic()
            done = subprocess.run(
                command, cwd=directory, capture_output=True, text=True, check=False
            )
            spent.append(time.monotonic() - started)
            if done.returncode != 0:
                return Ease(name, lines, problem=(done.stderr.strip().splitlines() or ["?"])[-1])
        return Ease(name, lines, spent[0], spent[1], (size_of(home) - empty) / 1e6)


def last() -> list[Ease]:
    """What the last run found; nothing if there was none."""
    record = RESULTS / "ease.json"
    if not record.exists():
        return []
    return [Ease(**one) for one in json.loads(record.read_text(encoding="utf-8"))["contenders"]]


def table(found: Sequence[Ease]) -> str:
    """The Markdown table that README.md shows."""
    rows = [
        "| | lines of code | seconds to install | seconds to a first batch | MB installed |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        figures = f"{one.install_s:.0f} | {one.first_s:.1f} | {one.megabytes:,.0f}"
        rows.append(f"| {one.name} | {one.lines} | {figures if not one.problem else '- | - | -'} |")
    return "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 if a contender could not be measured, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.ease", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(INSTALLS))
    names = parser.parse_args(argv).names or list(INSTALLS)
    if unknown := sorted(set(names) - set(INSTALLS)):
        parser.error(f"no such contender: {', '.join(unknown)}; there are {', '.join(INSTALLS)}")
    found = [] if set(names) == set(INSTALLS) else [one for one in last() if one.name not in names]
    for name in names:
        sys.stdout.write(f"{name} ...\n")
        sys.stdout.flush()
        found.append(measure(name))
        if found[-1].problem:
            sys.stderr.write(f"{name}: {found[-1].problem}\n")
    found.sort(key=lambda one: list(INSTALLS).index(one.name))
    record = {"python": platform.python_version(), "contenders": [asdict(one) for one in found]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "ease.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "ease.md").write_text(table(found), encoding="utf-8")
    sys.stdout.write(table(found))
    return 1 if any(one.problem for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
