"""Starts the processes of a torture run, kills them, starts them anew, and calls the audits.

The supervisor never attaches to the store itself, has one thread, and so can fork workers that
have everything imported: a new one is at work within milliseconds.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from torture_audit import Findings, Incarnation, audit
from torture_processes import (
    BAD_PAYLOAD,
    FINE,
    SHUT,
    TICK_S,
    fork,
    in_short,
    note_interrupts,
    pause,
    wait,
    where,
)
from torture_shared import Board, Journal, make_tables, read_journal
from torture_totals import Options, Totals
from torture_workers import ROLES, SERVER, Work, serve, work_until_stopped

import shmreplay as reverb

STUCK_S: Final = 20.0
"""Seconds without progress after which a worker is taken to hang."""

_AUDIT_DEADLINE_S: Final = 120.0
_STOP_DEADLINE_S: Final = 20.0
_LONGEST_STOP_S: Final = 0.3


class RunFailedError(Exception):
    """Something that ends the run: it is among the faults."""


@dataclass
class _Slot:
    """A place for a worker, which has one process after the other."""

    number: int
    role: str
    pid: int = 0
    who: int = 0
    beats: int = 0
    """Those of the processes before this one."""
    successes: int = 0
    success_at: float = 0.0
    resume_at: float | None = None
    kill_then: bool = False
    killed: bool = False
    stalled: bool = False


class Supervisor:
    """One run."""

    def __init__(self, options: Options, directory: Path) -> None:
        """Prepares it; `directory` is for journals and messages of workers."""
        self._options = options
        self._directory = directory
        self._random = random.Random(options.seed)
        self._store = options.name or f"torture-{os.getpid()}"
        self._board = Board(len(ROLES) + 1)
        self._slots = [_Slot(n, role) for n, role in enumerate([SERVER, *ROLES])]
        self._ended: list[tuple[int, str, bool]] = []
        self._next_who = 1
        self._recover = False
        self._end = 0.0
        self._paused_at = 0.0
        self.totals = Totals(seed=options.seed)

    # ------------------------------------------------------------------ the run

    def run(self) -> Totals:
        """Goes on until time or kills are up, or something is wrong; leaves nothing behind."""
        started = time.monotonic()
        self._end = started + self._options.seconds
        try:
            self._play()
        except RunFailedError:
            self._kill_all()  # why is in the report
        finally:
            self._clean_up()
            self.totals.seconds = time.monotonic() - started
            self.totals.items_verified += self._board.items_read()
        return self.totals

    def _goes_on(self) -> bool:
        enough = self._options.kills is not None and self.totals.kills >= self._options.kills
        return time.monotonic() < self._end and not enough

    def _play(self) -> None:
        """The life of the store."""
        self._paused_at = time.monotonic()
        for slot in self._slots:
            slot.success_at = self._paused_at
        self._start_server()
        while self._goes_on():
            self._board.order(stop=False)
            for slot in self._slots[1:]:
                self._start(slot)
            now = time.monotonic()
            self._disturb(min(now + self._options.audit_every_s, self._end))
            self._quiet()
        self._stop_server()

    def _disturb(self, until: float) -> None:
        """Kills and stops workers until a time."""
        strike_at = time.monotonic()
        for slot in self._slots:
            # Goes on over audits and kills: where all workers hang, those would hide it.
            slot.success_at += strike_at - self._paused_at
        while (now := time.monotonic()) < until and self._goes_on():
            self._reap()
            self._watch(now)
            self._resume(now)
            if now >= strike_at:
                strike_at = max(strike_at, now - 0.5) + self._random.expovariate(self._options.rate)
                self._strike(now)
            pause(max(0.0, min(TICK_S, strike_at - time.monotonic())))
        self._resume(None)
        self._paused_at = time.monotonic()
        while any(slot.killed for slot in self._slots):
            self._reap()
            pause(TICK_S)

    def _strike(self, now: float) -> None:
        first = 0 if self._options.kill_server and self._random.random() < 0.5 else 1
        slot = self._random.choice(self._slots[first:])
        stop = self._random.random() < 0.15
        seconds = self._random.uniform(0.0, _LONGEST_STOP_S)
        kill_then = self._random.random() < 0.5
        if slot.killed or slot.resume_at is not None:
            return
        if not stop:
            self._kill(slot)
        elif all(other.resume_at is None for other in self._slots):
            # One at a time: what waits for several in a row would wait for longer than one stop.
            os.kill(slot.pid, signal.SIGSTOP)
            self.totals.stops += 1
            slot.resume_at, slot.kill_then = now + seconds, kill_then

    def _resume(self, now: float | None) -> None:
        """Lets stopped workers go on whose time is over, or kills them; None: all of them."""
        for slot in self._slots:
            if slot.resume_at is not None and (now is None or now >= slot.resume_at):
                if slot.kill_then:
                    self._kill(slot)
                    slot.resume_at = None
                else:
                    slot.resume_at = None
                    os.kill(slot.pid, signal.SIGCONT)

    # ------------------------------------------------------------------ processes

    def _path(self, who: int, suffix: str) -> Path:
        return self._directory / f"{who}.{suffix}"

    def _start(self, slot: _Slot) -> None:
        slot.who, self._next_who = self._next_who, self._next_who + 1
        board, who = self._board, slot.who
        work = Work(
            self._store,
            slot.number,
            who,
            board,
            Journal(self._path(who, "journal")),
            random.Random(f"{self._options.seed} {who}"),
            ExitStack(),
        )

        def body() -> None:
            if slot.role == SERVER:
                serve(
                    work,
                    capacity=self._options.capacity,
                    seed=self._options.seed,
                    recover=self._recover,
                )
            else:
                work_until_stopped(work, slot.role)

        slot.beats, slot.successes = board.beats(slot.number), board.successes(slot.number)
        board.start(slot.number)
        slot.pid = fork(body, self._path(who, "txt"))
        work.journal.close()
        slot.resume_at, slot.stalled = None, False

    def _start_server(self) -> None:
        """Starts the server and waits until its store is there."""
        server = self._slots[0]
        self._board.order(stop=False)
        self._start(server)
        end = time.monotonic() + STUCK_S
        while self._board.beats(0) == server.beats:
            self._reap_one(server)
            if time.monotonic() > end:
                self._fail_stuck(server, STUCK_S)
            pause(TICK_S)

    def _kill(self, slot: _Slot) -> None:
        """Kills a worker; when it is dead, `_reap` starts the next one in its place."""
        os.kill(slot.pid, signal.SIGKILL)
        if slot.resume_at is None:
            self._note_stall(slot, self._board.idle_s(slot.number))
        slot.killed = True

    def _bury(self, slot: _Slot, status: int) -> None:
        """Counts a worker that was killed."""
        slot.pid, slot.killed = 0, False
        if os.WIFEXITED(status):  # it was faster
            self._ended_by_itself(slot, os.WEXITSTATUS(status))
        self._ended.append((slot.who, slot.role, True))
        self.totals.kills += 1
        if slot.role == SERVER:
            self._recover = True
            self.totals.server_kills += 1

    def _reap(self) -> None:
        for slot in self._slots:
            self._reap_one(slot)

    def _reap_one(self, slot: _Slot) -> None:
        """Starts the successor of a killed worker; one that ended otherwise is a fault."""
        if slot.pid == 0:
            return
        pid, status = os.waitpid(slot.pid, os.WNOHANG)
        if pid == 0:
            return
        if slot.killed:
            self._bury(slot, status)
            self._start(slot)
            return
        slot.pid = 0
        if os.WIFSIGNALED(status):
            text = signal.Signals(os.WTERMSIG(status)).name
            self._fail(f"the {slot.role} (worker {slot.who}) died of {text}{self._said(slot)}")
        self._ended_by_itself(slot, os.WEXITSTATUS(status))
        self._fail(f"the {slot.role} (worker {slot.who}) ended although nobody told it to")

    def _ended_by_itself(self, slot: _Slot, code: int) -> None:
        """Raises unless the worker ended well."""
        if code == BAD_PAYLOAD:
            self.totals.bad_payloads += 1
        if code == SHUT:
            self.totals.tables_shut += 1
        if code != FINE:
            fault = f"the {slot.role} (worker {slot.who}) failed{self._said(slot)}"
            self._fail(f"{fault}\nThe store: {self._look()}")

    def _said(self, slot: _Slot) -> str:
        path = self._path(slot.who, "txt")
        return f":\n{path.read_text()[-4000:]}" if path.exists() else ""

    def _fail(self, fault: str) -> None:
        self.totals.faults.append(fault)
        raise RunFailedError(fault)

    # ------------------------------------------------------------------ stalls

    def _watch(self, now: float) -> None:
        for slot in self._slots:
            if slot.killed or slot.resume_at is not None:
                continue
            idle, successes = self._board.idle_s(slot.number), self._board.successes(slot.number)
            if idle > self._options.stall_s and not slot.stalled:
                slot.stalled = True
                self.totals.stalled.append(in_short(slot.pid, slot.role))
            if idle > STUCK_S:
                self._fail_stuck(slot, idle)
            if successes != slot.successes:
                slot.successes, slot.success_at = successes, now
            if now - slot.success_at > STUCK_S:
                self.totals.stuck += 1
                self._fail(
                    f"the {slot.role} (worker {slot.who}) had no success for "
                    f"{now - slot.success_at:.0f} s{self._evidence(slot)}"
                )

    def _note_stall(self, slot: _Slot, idle: float = 0.0) -> None:
        """Counts the longest time that a process was at one operation, if that is long."""
        longest, beats = self._board.longest(slot.number)
        if idle > longest:
            longest, beats = idle, self._board.beats(slot.number)
        if longest > self._options.stall_s:
            self.totals.stalls += 1
        if longest > self.totals.longest_stall_s:
            self.totals.longest_stall_s = longest
            at_start = " at its start" if beats == slot.beats else ""
            self.totals.longest_stall_of = slot.role + at_start

    def _fail_stuck(self, slot: _Slot, seconds: float) -> None:
        self._note_stall(slot, seconds)
        self.totals.stuck += 1
        self._fail(
            f"the {slot.role} (worker {slot.who}) is stuck for {seconds:.0f} s"
            f"{self._evidence(slot)}"
        )

    def _evidence(self, slot: _Slot) -> str:
        """Where a worker hangs, and what the others and the store say."""
        parts = [where(slot.pid, slot.role)]
        os.kill(slot.pid, signal.SIGUSR1)  # faulthandler writes the Python stacks
        pause(0.5)
        parts.append(self._said(slot))
        parts += [where(other.pid, other.role) for other in self._slots if other is not slot]
        parts.append(self._look())
        return "\n" + "\n".join(parts)

    def _look(self) -> str:
        """What a fresh process finds when it looks at the store."""

        def body() -> None:
            with reverb.Client(f"shm://{self._store}") as client:
                print(json.dumps(client.stats()), file=sys.stderr)
                client.check()
                print("check() found nothing", file=sys.stderr)

        path = self._directory / "look.txt"
        pid = fork(body, path)
        wait(pid, _STOP_DEADLINE_S)
        return path.read_text()

    # ------------------------------------------------------------------ audits

    def _quiet(self) -> None:
        """Ends all workers, in one of three ways, and audits the store."""
        if self._random.random() < 0.5:
            with_server = self._options.kill_server and self._random.random() < 0.5
            victims = self._slots if with_server else self._slots[1:]
            for slot in victims:
                self._kill(slot)
            for slot in victims:
                self._bury(slot, os.waitpid(slot.pid, 0)[1])
            if with_server:
                self._start_server()
        else:
            self._board.order(stop=True)
            for slot in self._slots[1:]:
                self._join(slot)
                self._ended.append((slot.who, slot.role, False))
        self._board.order(stop=True)
        self._reap()
        self._take_in(self._audit())
        for path in self._directory.iterdir():
            if path != self._path(self._slots[0].who, "txt"):
                path.unlink()
        self._ended.clear()

    def _join(self, slot: _Slot) -> None:
        status = wait(slot.pid, _STOP_DEADLINE_S, kill=False)
        if status is None:
            self._fail_stuck(slot, _STOP_DEADLINE_S)
        assert status is not None
        self._note_stall(slot)
        slot.pid = 0
        if not os.WIFEXITED(status):
            self._fail(f"the {slot.role} died of signal {os.WTERMSIG(status)}{self._said(slot)}")
        self._ended_by_itself(slot, os.WEXITSTATUS(status))

    def _audit(self) -> Findings:
        """Runs an audit in a process of its own."""
        answer = self._directory / "audit.json"

        def body() -> None:
            faulthandler.dump_traceback_later(_AUDIT_DEADLINE_S - 5.0, exit=True)
            incarnations = [
                Incarnation(who, role, killed, read_journal(self._path(who, "journal")))
                for who, role, killed in self._ended
            ]
            answer.write_text(json.dumps(asdict(audit(self._store, incarnations))))

        messages = self._directory / "audit.txt"
        pid = fork(body, messages)
        status = wait(pid, _AUDIT_DEADLINE_S)
        if status != 0:
            self._reap_one(self._slots[0])  # if the server is why, that says more
            self._fail(f"an audit failed (status {status}):\n{messages.read_text()[-4000:]}")
        return Findings(**json.loads(answer.read_text()))

    def _take_in(self, findings: Findings) -> None:
        totals = self.totals
        totals.audits += 1
        totals.items_verified += findings.items
        totals.queue_items += findings.consumed
        totals.lost_in_consumers += findings.lost_in_consumers
        totals.bad_payloads += findings.bad_payloads
        totals.bytes_leaked += findings.leaked_bytes
        totals.repairs = int(findings.stats.get("repairs", 0))
        if findings.faults:
            totals.faults += findings.faults[:20]
            self._fail(f"audit {totals.audits} found {len(findings.faults)} faults")

    # ------------------------------------------------------------------ the end

    def _stop_server(self) -> None:
        self._board.order(stop=True, close=True)
        self._join(self._slots[0])

    def _kill_all(self) -> None:
        living = [slot for slot in self._slots if slot.pid]
        for slot in living:
            os.kill(slot.pid, signal.SIGKILL)
        for slot in living:
            os.waitpid(slot.pid, 0)
            slot.pid, slot.killed = 0, False
        self._ended.clear()

    def _clean_up(self) -> None:
        """Ends what still runs, and removes the store if its server did not."""
        self._kill_all()
        if self._left():

            def body() -> None:
                reverb.Server(make_tables(0), name=self._store, capacity=32 << 20).stop()

            wait(fork(body, self._directory / "clean.txt"), _STOP_DEADLINE_S)
        self.totals.left_in_shared_memory = len(self._left())

    def _left(self) -> list[str]:
        return [
            name
            for name in os.listdir("/dev/shm")
            if name.removesuffix(".lease").endswith(f".{self._store}")
        ]


def run(options: Options) -> Totals:
    """One run in a directory of its own, which is removed at the end."""
    note_interrupts()
    with tempfile.TemporaryDirectory(prefix="torture-") as directory:
        return Supervisor(options, Path(directory)).run()
