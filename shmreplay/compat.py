"""Arguments that earlier releases of Reverb had: accepted, without effect, and said once."""

from __future__ import annotations

import functools
import logging

__all__ = ["ignored_argument"]

_log = logging.getLogger(__name__)


@functools.cache
def ignored_argument(call: str, argument: str) -> None:
    """Logs, once a process, that an argument has no effect.

    In the log and not by `warnings`: a program that turns those into errors would no longer run.

    Args:
        call: Whose argument it is.
        argument: Its name.
    """
    _log.warning(
        "%s() ignores %s: earlier releases of Reverb had it, and here there is nothing that it "
        "would do. Leave it out.",
        call,
        argument,
    )
