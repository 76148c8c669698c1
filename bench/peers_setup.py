"""Makes the virtual environments of the peers: python -m bench.peers_setup DIR [PEER ...].

One a list of bench/peers_requirements, with pip and whatever index it is set to. One that is there
is brought up to its list. Together they take about 9 GB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "peers_requirements"


def names() -> list[str]:
    """Returns the peers that there are lists for."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def make(directory: Path, name: str) -> bool:
    """Makes or updates one environment; returns whether pip was content."""
    target = directory / name
    if not (target / "bin" / "python").exists():
        venv.create(target, with_pip=True)
    command = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    command += ["--disable-pip-version-check", "-r", str(REQUIREMENTS / f"{name}.txt")]
    return subprocess.run(command, check=False).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the environments; returns 1 if one could not be made, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers_setup", description="Makes the peers' virtual environments."
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=", ".join(names()))
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.peers) - set(names()))
    if unknown:
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(names())}")
    failed = []
    for name in arguments.peers or names():
        sys.stdout.write(f"{arguments.directory / name}\n")
        sys.stdout.flush()
        if not make(arguments.directory, name):
            failed.append(name)
    if failed:
        sys.stderr.write(f"not made: {', '.join(failed)}; pip says why above\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
