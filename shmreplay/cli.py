"""The command ``shmreplay``: which stores there are, what is in them, and what became of them.

Exit codes: 0 all is well, 1 a problem was found, 2 the command was not understood. Each command is
a module ``command_NAME``, whose ``add`` gives it its parser.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import shmreplay
from shmreplay import (
    command_bench,
    command_check,
    command_clean,
    command_doctor,
    command_dump,
    command_info,
    command_inspect,
    command_keygen,
    command_ls,
    command_minari,
    command_serve,
    command_size,
    command_top,
)
from shmreplay.command_support import OK, PROBLEM, USAGE, Usage, complain
from shmreplay.errors import InvalidArgumentError, ReverbError

__all__ = ["main"]

_COMMANDS = (
    command_serve,
    command_ls,
    command_info,
    command_top,
    command_check,
    command_clean,
    command_dump,
    command_inspect,
    command_keygen,
    command_doctor,
    command_bench,
    command_minari,
    command_size,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    Args:
        arguments: Without the program's name; None takes those of the process.
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:  # argparse has said what was wrong, or given the help
        return OK if end.code in (0, None) else USAGE
    if sys.stdout is None:  # as after `>&-`
        complain("standard output is closed")
        return PROBLEM
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        code = run(options)
        sys.stdout.flush()  # here, where an error can still be told
        return code
    except BrokenPipeError:  # whoever read it, as `head` does, has read enough
        _end_output()
        return OK
    except (Usage, InvalidArgumentError) as error:
        complain(str(error))
        return USAGE
    except (ReverbError, OSError) as error:
        complain(str(error))
        _end_output()
        return PROBLEM


def _end_output() -> None:
    """Writes what is left; where that fails, the interpreter's end must not try it once more."""
    try:
        sys.stdout.flush()
    except OSError:  # which was told already
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shmreplay",
        description="Looks after the replay stores of this user in shared memory.",
        epilog="Exit codes: 0 all is well, 1 a problem was found, 2 bad usage.",
    )
    parser.add_argument("--version", action="version", version=f"shmreplay {shmreplay.__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    for module in _COMMANDS:
        module.add(commands)
    return parser
