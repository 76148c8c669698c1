"""Kills a process that writes a checkpoint, at one system call after the other.

    python -m tests.process.checkpoint_killer ADDRESS ROOT STEP FIRST

Stops it at the beginning and at the end of each of its threads' system calls, kills it at stop
FIRST, the next one at FIRST + STEP, and so on until one ends by itself. After each death the newest
checkpoint in ROOT must be whole. Prints the number of stops of the last one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from shmreplay import Client, checkpoint_files
from shmreplay.checkpoint_check import load
from shmreplay.checkpoint_format import Reader

_TRACEME, _SYSCALL, _SETOPTIONS = 0, 24, 0x4200
_SYSGOOD, _TRACECLONE, _EXITKILL = 0x1, 0x8, 0x100000
_WALL = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def trace(request: int, pid: int, data: int = 0) -> bool:
    """Whether that was possible: it is not where the process has just died."""
    return bool(_libc.ptrace(request, pid, None, data) == 0)


def write_checkpoint(address: str) -> None:
    """The child: stops before it begins."""
    if not trace(_TRACEME, 0):
        os._exit(3)
    client = Client(address)
    client.server_info()
    os.kill(os.getpid(), signal.SIGSTOP)
    client.checkpoint()
    os._exit(0)


def run(address: str, kill_at: int) -> tuple[bool, int]:
    """Whether it ended by itself, and after how many stops."""
    pid = os.fork()
    if pid == 0:
        try:
            write_checkpoint(address)
        finally:
            os._exit(4)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSTOPPED(status), f"the child ended with status {status}"
    assert trace(_SETOPTIONS, pid, _SYSGOOD | _TRACECLONE | _EXITKILL)
    trace(_SYSCALL, pid)
    stops = 0
    while True:
        who, status = os.waitpid(-1, _WALL)
        if not os.WIFSTOPPED(status):
            if who != pid:
                continue
            if os.WIFSIGNALED(status):
                return False, stops
            assert status == 0, f"the child ended with status {status}"
            return True, stops
        sent = os.WSTOPSIG(status)
        if sent == signal.SIGTRAP | 0x80:
            stops += 1
            if stops == kill_at:
                os.kill(pid, signal.SIGKILL)
        # Its own stops, those of a new thread and of making one are not passed on.
        mine = sent in (signal.SIGTRAP | 0x80, signal.SIGTRAP, signal.SIGSTOP)
        trace(_SYSCALL, who, 0 if mine else sent)


def check(root: str) -> None:
    path = checkpoint_files.latest(root)
    assert path is not None, "the last checkpoint has gone"
    contents = load(Reader(path))
    for number in range(len(contents.reader.files)):
        for _ in contents.reader.chunks_of(number):
            pass


def main(address: str, root: str, step: str, first: str) -> None:
    kill_at = int(first)
    while True:
        ended, stops = run(address, kill_at)
        check(root)
        # Else those who die before they remove old ones would leave ever more of them, and the
        # system calls of the next would grow as fast as the number of the one to kill at.
        with checkpoint_files.locked(root):
            checkpoint_files.clear_away(root, 1)
        if ended:
            break
        kill_at += int(step)
    sys.stdout.write(f"{stops}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
