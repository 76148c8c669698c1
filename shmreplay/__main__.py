"""`python -m shmreplay`: the command, see `cli.py`."""

from __future__ import annotations

import sys

from shmreplay.cli import main

sys.exit(main())
