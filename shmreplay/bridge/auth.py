"""Keys: who may connect to a bridge, and how a client knows that it is the right one.

CURVE encrypts and proves both ends. A key pair is two files, as `zmq.auth` writes them: NAME.key
is public, NAME.key_secret is not and must be readable by its owner alone. The server has a pair and
a directory of the public keys of the clients that it lets in.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

from shmreplay.errors import ArgumentTypeError, AuthenticationError, InvalidArgumentError

__all__ = ["ClientKeys", "ServerKeys", "check_type", "keygen"]


def keygen(directory: str | os.PathLike[str], name: str) -> tuple[str, str]:
    """Makes a pair of keys: NAME.key and NAME.key_secret, the latter with mode 0600.

    Args:
        directory: Where to; made with mode 0700 if it is not there.
        name: Of the pair.

    Returns:
        The paths of the public and the secret file.

    Raises:
        InvalidArgumentError: The name is no file name, or the pair is there already.
    """
    folder = Path(directory)
    if not name or name != os.path.basename(name):
        raise InvalidArgumentError(
            f"Got the key name {name!r}; expected a plain file name. Give the directory by itself."
        )
    for each in (folder / f"{name}.key_secret", folder / f"{name}.key"):
        if os.path.lexists(each):
            raise InvalidArgumentError(
                f"Got the key {each}, which is there already; expected a new name. Choose another"
                " one, or remove the pair first."
            )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    old = os.umask(0o077)
    try:
        public_file, secret_file = zmq.auth.create_certificates(folder, name)
    finally:
        os.umask(old)
    os.chmod(secret_file, 0o600)
    return str(public_file), str(secret_file)


def _load(path: str, secret: bool) -> tuple[bytes, bytes | None]:
    """The keys in a file.

    Raises:
        AuthenticationError: It cannot be read, or others can read a secret.
    """
    try:
        if secret:
            status = os.stat(path)
            if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
                raise AuthenticationError(
                    f"Got the secret key {path} of user {status.st_uid} with mode"
                    f" {stat.S_IMODE(status.st_mode):#o}; expected one that only user"
                    f" {os.geteuid()} can read. Run chmod 600 on it, and make a new one if others"
                    " could read it."
                )
        public_key, secret_key = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise AuthenticationError(
            f"Got the key file {path}, which cannot be read: {error}. Expected one as `shmreplay"
            " keygen` makes them: give the path of such a file."
        ) from None
    if secret and secret_key is None:
        raise AuthenticationError(
            f"Got the key file {path}; expected one with a secret key in it. Give the path of"
            " NAME.key_secret."
        )
    return public_key, secret_key


@dataclasses.dataclass(frozen=True)
class ClientKeys:
    """What a client needs to connect to a bridge with keys: paths of two files."""

    secret: str
    """Of the client's own pair: NAME.key_secret."""

    server: str
    """The server's public key: NAME.key."""

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Sets a socket up.

        Raises:
            AuthenticationError: A file cannot be read, or others can read the secret one.
        """
        public_key, secret_key = _load(self.secret, secret=True)
        socket.curve_publickey = public_key
        socket.curve_secretkey = secret_key or b""
        socket.curve_serverkey = _load(self.server, secret=False)[0]


@dataclasses.dataclass(frozen=True)
class ServerKeys:
    """What a bridge needs to let only clients with known keys in: paths."""

    secret: str
    """Of the server's own pair: NAME.key_secret."""

    clients: str
    """Directory of the public keys (NAME.key) of the clients that may connect."""

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Sets a socket up.

        Raises:
            AuthenticationError: A file cannot be read, or others can read the secret one.
        """
        public_key, secret_key = _load(self.secret, secret=True)
        socket.curve_publickey = public_key
        socket.curve_secretkey = secret_key or b""
        socket.curve_server = True

    def allow(self, authenticator: Any) -> None:
        """Tells an authenticator which clients may connect.

        Raises:
            AuthenticationError: There is no such directory.
        """
        if not os.path.isdir(self.clients):
            raise AuthenticationError(
                f"Got {self.clients!r} for the keys of clients; expected a directory of .key files."
                " Make it, and copy into it the NAME.key of each client that may connect."
            )
        authenticator.configure_curve(domain="*", location=self.clients)


def check_type(keys: object, expected: type[ClientKeys | ServerKeys]) -> None:
    """Refuses keys of another kind; None is fine.

    Args:
        keys: Anything.
        expected: The class of those that are needed.

    Raises:
        ArgumentTypeError: They are something else.
    """
    if keys is not None and not isinstance(keys, expected):
        names = ", ".join(field.name for field in dataclasses.fields(expected))
        raise ArgumentTypeError(
            f"Got the keys {keys!r} of type {type(keys).__name__}; expected a"
            f" shmreplay.bridge.auth.{expected.__name__}. Make it with"
            f" {expected.__name__}({names})."
        )
