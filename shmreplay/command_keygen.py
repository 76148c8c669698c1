"""``shmreplay keygen``: a pair of keys for a bridge or one of its clients."""

from __future__ import annotations

import argparse

from shmreplay.command_support import OK, Commands, add_command, say, say_json

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "keygen", run, "Make a pair of keys for a bridge or one of its clients."
    )
    parser.add_argument("directory", help="where to; made if it is not there")
    parser.add_argument("name", help="of the pair: NAME.key is public, NAME.key_secret is not")


def run(options: argparse.Namespace) -> int:
    from shmreplay.bridge.auth import keygen  # no other command needs ZeroMQ

    public, secret = keygen(options.directory, options.name)
    if options.json:
        say_json({"public": public, "secret": secret})
    else:
        say(f"{public}: public, for the other side\n{secret}: secret, stays here")
    return OK
