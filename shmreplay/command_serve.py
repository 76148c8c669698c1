"""``shmreplay serve``: a server with the tables of a file, until it is told to stop."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from types import FrameType
from typing import Any, Final

from shmreplay import serve_config
from shmreplay.command_support import OK, Commands, add_command, say, say_json
from shmreplay.serve_config import ServeConfig
from shmreplay.server import Server

__all__ = ["add"]

_STOPPED_BY: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_EVERY_S: Final = 1.0


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "serve",
        run,
        "Serve the tables of a TOML file until Ctrl-C, SIGTERM or SIGHUP; then remove the store.",
    )
    parser.add_argument("config", help="the file; `python -c 'help(\"shmreplay.serve_config\")'`")
    parser.add_argument("--check", action="store_true", help="only say whether the file is right")


def run(options: argparse.Namespace) -> int:
    """Does it and returns the exit code."""
    config = serve_config.read(options.config)
    names = [table.name for table in config.tables]
    if options.check:
        if options.json:
            say_json({"config": options.config, "tables": names})
        else:
            say(f"{options.config}: good, with the tables {', '.join(names)}")
        return OK
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    # Before the server is made: from here on whoever ends this leaves no store behind.
    before = {
        number: signal.signal(number, on_signal)
        for number in _STOPPED_BY
        # Under nohup it is to go on when its terminal is closed.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        with _server(config) as server:
            about = {"name": server.name, "address": server.address, "port": server.port}
            if options.json:
                say_json({**about, "tables": names})
            else:
                tables = ", ".join(names)
                say(f"serving {server.address}, port {server.port}, tables {tables}; Ctrl-C stops")
            sys.stdout.flush()
            while not stop.wait(_LOOK_EVERY_S):
                pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not options.json:
        say("stopped, and the store is removed")
    return OK


def _server(config: ServeConfig) -> Server:
    arguments: dict[str, Any] = dict(config.options)
    if config.auth is not None:
        from shmreplay.bridge.auth import ServerKeys  # nothing else here needs ZeroMQ

        arguments["auth"] = ServerKeys(*config.auth)
    return Server(config.tables, **arguments)
