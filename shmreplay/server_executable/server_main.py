"""Reverb's server command under its module name; see ``reverb_server``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shmreplay import reverb_server

__all__ = ["app_run_main", "main"]


def main(unused_argv: Sequence[str] = ()) -> int:
    """Serves what the command line's `--config` says, until SIGTERM or Ctrl-C; returns 0 or 2."""
    return reverb_server.main()


def app_run_main() -> None:
    """Does that and ends the process."""
    sys.exit(main())


if __name__ == "__main__":
    app_run_main()
