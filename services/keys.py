"""CURVE keys (RFC 26/ZMTP CURVE) of the links between machines: making them, reading them, and who is let in.

A key pair is two files of one line each, in Z85: NAME.key, the secret, which its owner alone may read, and NAME.pub.
NAME begins with the role that the key gives: scheduler, worker or frontend.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from services.settings import SettingsError

ROLES = ("scheduler", "worker", "frontend")
KEY_NAME = re.compile(rf"({'|'.join(ROLES)})(-[A-Za-z0-9._-]{{1,63}})?")
Z85_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
MAX_KEY_FILE = 256  # bytes

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Curve:
    """What a socket needs. server: the scheduler's public key on a connecting end; empty on the bound one.

    role: whose keys the bound end lets in. All in Z85.
    """

    secret: bytes = field(repr=False)
    server: bytes = b""
    role: str = ""

    def arm(self, socket: zmq.Socket[bytes]) -> None:
        """Set the options. The bound end fails closed: without an answer of the gatekeeper nobody gets in."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        if self.server:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self.secret))
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        else:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.ZAP_DOMAIN, self.role.encode("ascii"))
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class Gatekeeper:
    """Answers who may connect to the bound sockets of one context (RFC 27/ZAP), on a thread of the library.

    The folder of public keys is read at every handshake: a key that is put there or taken away counts from the next
    connection on, without a restart.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Path) -> None:
        self._allowed = allowed
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        for role in ROLES:
            self._authenticator.configure_curve_callback(domain=role, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of public key `key` (Z85) may connect to a socket for `domain`, a role."""
        try:
            let_in = key in allowed_keys(self._allowed, domain)
        except (OSError, SettingsError) as error:
            log.error("peer refused", role=domain, why=str(error))
            return False
        if not let_in:
            log.warning("peer refused", role=domain, key=key.decode("ascii"), why=f"not in {self._allowed}")
        return let_in

    def close(self) -> None:
        """Before the context ends."""
        self._authenticator.stop()


def make_keys(folder: Path, names: Sequence[str]) -> list[Path]:
    """New key pairs in `folder`; returns the public files. SettingsError for a name without a role, or taken."""
    for name in names:
        if KEY_NAME.fullmatch(name) is None:
            raise SettingsError(f"{name!r} must be a role ({', '.join(ROLES)}), or one with -NAME behind it")
        for path in (folder / f"{name}.key", folder / f"{name}.pub"):
            if path.exists():
                raise SettingsError(f"{path} exists; remove it first, or choose another name")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [_make_pair(folder, name) for name in names]
    except OSError as error:
        raise SettingsError(f"keys cannot be written to {folder}: {error.strerror}") from error


def _make_pair(folder: Path, name: str) -> Path:
    public, secret = zmq.curve_keypair()
    for suffix, value, mode in (("key", secret, 0o600), ("pub", public, 0o644)):
        descriptor = os.open(folder / f"{name}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(value + b"\n")
    return folder / f"{name}.pub"


def read_secret(path: Path) -> bytes:
    """A secret key. SettingsError when it is none, or others than its owner may read it; its text is never told."""
    secret = _read_key(path, "--link-key")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"--link-key {path} can be read by others: chmod 600 it")
    return secret


def read_public(path: Path) -> bytes:
    """The scheduler's public key. SettingsError when it is none."""
    if path.suffix != ".pub":
        raise SettingsError(f"--link-peers {path} must be the scheduler's public key, a file that ends in .pub")
    return _read_key(path, "--link-peers")


def allowed_keys(folder: Path, role: str) -> set[bytes]:
    """The public keys in `folder` that give this role. SettingsError when one of them is damaged."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix == ".pub"]
    named = ((path, KEY_NAME.fullmatch(path.stem)) for path in files)
    return {_read_key(path, "--link-peers") for path, found in named if found is not None and found[1] == role}


def _read_key(path: Path, flag: str) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_KEY_FILE).strip()
    except OSError as error:
        raise SettingsError(f"{flag} {path} cannot be read: {error.strerror}; see `signalbox keys`") from error
    if Z85_KEY.fullmatch(text) is None:
        raise SettingsError(f"{flag} {path} holds no key of one line with 40 signs; see `signalbox keys`")
    return text
