"""Processes of a torture run: forking them, waiting for them, and saying where one hangs."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torture_shared import BadPayloadError

from shmreplay import errors

TICK_S: Final = 0.005
"""Seconds between two looks at what is waited for."""

FINE: Final = 0
BAD_PAYLOAD: Final = 3
SHUT: Final = 4
FAILED: Final = 5
"""How a child says why it ended; `SHUT` is for a table that is damaged."""

_PR_SET_PDEATHSIG: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Interrupt:
    """Whether Ctrl-C was pressed, until somebody has acted on it."""

    pressed = False


def note_interrupts() -> None:
    """From now on Ctrl-C is noted, and acted on in `pause`.

    Elsewhere it could get lost in a hook of the interpreter, or hit a child that was just forked,
    or come before a new child's number is written down.
    """

    def note(*_: Any) -> None:
        _Interrupt.pressed = True

    signal.signal(signal.SIGINT, note)


def pause(seconds: float) -> None:
    """Sleeps.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; once.
    """
    time.sleep(seconds)
    if _Interrupt.pressed:
        _Interrupt.pressed = False
        raise KeyboardInterrupt


def fork(body: Callable[[], None], messages: Path) -> int:
    """Runs a function in a child whose messages go to a file; returns its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    code = FAILED
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before the line above
            os._exit(FAILED)
        fd = os.open(messages, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 2)
        faulthandler.enable(fd)
        faulthandler.register(signal.SIGUSR1, file=fd)
        body()
        code = FINE
    except errors.TableCorruptedError:
        traceback.print_exc()
        code = SHUT
    except BadPayloadError:
        traceback.print_exc()
        code = BAD_PAYLOAD
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid: int, seconds: float, *, kill: bool = True) -> int | None:
    """A child's status, or None if it did not end in time (and then, if asked for, is killed)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        pause(TICK_S)
    if kill:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def in_short(pid: int, role: str) -> str:
    """Where the threads of a process wait in the kernel, and how busy the machine is."""
    places = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            places.append(f"{state} {(task / 'wchan').read_text()}")
        except OSError as e:  # a thread that ended meanwhile
            places.append(str(e.strerror))
    return f"{role}: {', '.join(places)}; load {os.getloadavg()[0]:.1f}"


def where(pid: int, role: str) -> str:
    """What the kernel, and a debugger if there is one, say about where a process is."""
    if pid == 0:
        return f"--- {role}: not running"
    lines = [f"--- {role}, process {pid}"]
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        for name in ("comm", "wchan", "syscall", "stack"):
            try:
                lines.append(f"{task.name} {name}: {(task / name).read_text().strip()}")
            except OSError as e:
                lines.append(f"{task.name} {name}: {e.strerror}")
    command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 12"]
    try:
        shown: Any = subprocess.run(command, capture_output=True, text=True, timeout=20)
        lines.append(shown.stdout[-3000:])
    except (OSError, subprocess.TimeoutExpired) as e:
        lines.append(f"no debugger: {e}")
    return "\n".join(lines)
