"""One row of bench/peers.py in a process of its own, in the environment of its peer.

    python -m bench.peers_worker PEER CASE ROW [quick]

Says `ready` when it is built. Then it reads a number of seconds a line, measures for as long, and
answers with `calls seconds`.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import ExitStack

from bench.peers_cases import QUICK_SIZES, Row, Sizes


def find(peer: str, case: str, name: str) -> Row:
    """Returns a row of a peer's module.

    Raises:
        LookupError: There is none of that name.
    """
    rows: tuple[Row, ...] = importlib.import_module(f"bench.peers_{peer}").ROWS
    for row in rows:
        if (row.case, row.name) == (case, name):
            return row
    raise LookupError(f"{peer} has no row {name!r} in {case!r}")


def main(peer: str, case: str, name: str, sizes: Sizes) -> None:
    """Serves requests for measurements until the input ends."""
    # What a peer prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with ExitStack() as stack:
        measure = find(peer, case, name).prepare(stack, sizes)
        answers.write("ready\n")
        for line in sys.stdin:
            reading = measure(float(line))
            answers.write(f"{reading.calls} {reading.seconds!r}\n")


if __name__ == "__main__":
    _, peer_name, case_key, row_name, *quick = sys.argv
    main(peer_name, case_key, row_name, QUICK_SIZES if quick == ["quick"] else Sizes())
