"""What a run has finished so far, on disk, and how long the rest takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness import Bench, Failure, Quantity, Skipped
from bench.report import as_json, figure_of

FORMAT = 2


class ResumeError(RuntimeError):
    """An unfinished run cannot be continued; the message says why and what to do."""


class Unfinished:
    """The file beside the results that holds the finished cases of a run under way.

    Written anew after every case and put in place in one step, so that whatever interrupts a run
    leaves all that was whole. The last write of the results removes it.
    """

    def __init__(
        self, path: Path, bench: Bench, chosen: Sequence[str], environment: dict[str, Any]
    ) -> None:
        """Notes what belongs to what.

        Args:
            path: The file.
            bench: The run.
            chosen: The names of its questions.
            environment: `versions` and `machine`.
        """
        self._path = path
        self._bench = bench
        self._chosen = list(chosen)
        self._environment = environment
        self.seconds: dict[str, float] = {}

    def load(self) -> None:
        """Takes over the finished cases.

        Raises:
            ResumeError: There is nothing to resume, or it was another run: other questions, other
                settings, other versions.
        """
        if not self._path.exists():
            raise ResumeError(f"nothing to resume: {self._path} does not exist; leave out --resume")
        document = json.loads(self._path.read_text())
        now = self._document()
        for key in ("format", "chosen", "settings", "versions"):
            if document[key] != now[key]:
                raise ResumeError(
                    f"{self._path} is of a run with other {key} ({document[key]}; now {now[key]}): "
                    "give the same options, or leave out --resume"
                )
        self._environment["machine"] = document["machine"]
        self._bench.figures += [figure_of(each) for each in document["figures"]]
        self._bench.failures += [
            Failure(trace=each["error"], **each) for each in document["failures"]
        ]
        self._bench.skipped += [Skipped(**each) for each in document["skipped"]]
        self._bench.quantities += [
            Quantity(**{**each, "values": tuple(each["values"])}) for each in document["quantities"]
        ]
        self._bench.finished += [(question, case) for question, case in document["finished"]]
        self.seconds.update(document["seconds"])

    def finished(self, name: str, seconds: float) -> None:
        """Notes that a question is finished and took so many seconds."""
        self.seconds[name] = seconds
        self.write()

    def write(self) -> None:
        """Notes all that is finished."""
        part = self._path.with_suffix(".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(self._document(), indent=1) + "\n")
        os.replace(part, self._path)

    def remove(self) -> None:
        """Removes the file: the results are written."""
        self._path.unlink(missing_ok=True)

    def _document(self) -> dict[str, Any]:
        bench, settings = self._bench, self._bench.settings
        whole = as_json(bench, [], self._environment)
        return {
            "format": FORMAT,
            "chosen": self._chosen,
            "settings": asdict(settings),
            "versions": whole["versions"],
            "machine": whole["machine"],
            "seconds": self.seconds,
            "finished": self._bench.finished,
            "figures": whole["figures"],
            "failures": whole["failures"],
            "skipped": whole["skipped"],
            "quantities": whole["quantities"],
        }


class Clock:
    """Says how far a run is: questions done of all, and about how many seconds are left.

    What is left is what the questions usually take, corrected by what those that are finished took.
    """

    def __init__(self, usual: Mapping[str, float], done: Mapping[str, float]) -> None:
        """Starts at once.

        Args:
            usual: Seconds that each question of this run usually takes, in order.
            done: Seconds that the finished ones took.
        """
        self._usual = dict(usual)
        self._done = dict(done)
        self._started = time.monotonic()

    def restart(self) -> None:
        """A question begins."""
        self._started = time.monotonic()

    def stop(self, name: str) -> float:
        """A question is finished; returns its seconds."""
        self._done[name] = time.monotonic() - self._started
        return self._done[name]

    @property
    def left(self) -> float:
        """Seconds that are left, about."""
        finished = sum(self._usual[name] for name in self._done)
        pace = sum(self._done.values()) / finished if finished else 1.0
        rest = [usual for name, usual in self._usual.items() if name not in self._done]
        if not rest:
            return 0.0
        # The first of the rest is under way; it does not take less than nothing more.
        under_way = max(0.0, pace * rest[0] - (time.monotonic() - self._started))
        return under_way + pace * sum(rest[1:])

    @property
    def line(self) -> str:
        """How far, in words."""
        return f"[{len(self._done)}/{len(self._usual)} done, about {self.left:.0f} s left]"
