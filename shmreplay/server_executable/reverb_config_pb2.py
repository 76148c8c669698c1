"""The configuration of a server as a message, under Reverb's name.

As text it is read by ``reverb_server.parse_config``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from shmreplay.patterns import Message

__all__ = ["ReverbServerConfig"]


class ReverbServerConfig(Message):
    """The tables of a server, each a `PriorityTableCheckpoint`, and its port."""

    tables: list[Any]
    port: int
    _FIELDS: ClassVar[dict[str, Any]] = {"tables": list, "port": int}
