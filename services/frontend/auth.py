"""Who may call: API keys over HTTP and gRPC, and the TLS of the gRPC port.

Keys come from a file or the environment, never from the command line, which every user of the machine can read.
Only their digests are kept, and each is compared in full: an answer's time tells nothing about a key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc

from services.frontend import grpc_errors
from services.frontend.grpc_errors import Failure
from services.settings import FrontendSettings, FrontSettings, SettingsError

KEY_VARIABLE = "SIGNALBOX_API_KEY"
MIN_KEY, MAX_KEY = 16, 512  # characters
SCHEME = "bearer"
OPEN_PATHS = ("/live", "/health", "/ready")  # what supervisors and load balancers ask
OPEN_SERVICES = ("/grpc.health.v1.Health/",)
REFUSAL = "send an API key of this server: Authorization: Bearer KEY"
UNAUTHENTICATED = Failure(code=grpc.StatusCode.UNAUTHENTICATED, reason="INVALID_API_KEY", message=REFUSAL)


class ApiKeys:
    """The keys that are accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def accepts(self, authorization: str | None) -> bool:
        """Whether the value of an Authorization header names one of the keys."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip()[: MAX_KEY + 1])
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found and scheme.lower() == SCHEME


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def load_keys(settings: FrontSettings, environment: Mapping[str, str]) -> ApiKeys | None:
    """The keys, or None when none are asked for. SettingsError, which never holds a key, for those of no use."""
    keys: list[str] = []
    if environment.get(KEY_VARIABLE):
        keys.append(_checked(environment[KEY_VARIABLE].strip(), KEY_VARIABLE))
    path = settings.api_key_file
    if path is not None:
        lines = _read(path, "--api-key-file").decode("utf-8", "replace").splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise SettingsError(f"--api-key-file {path} holds no key: write one on each line")
        keys += [_checked(key, f"--api-key-file {path}, key {number},") for number, key in enumerate(found, 1)]
    return ApiKeys(keys) if keys else None


def _checked(key: str, where: str) -> str:
    if not MIN_KEY <= len(key) <= MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise SettingsError(
            f"{where} must have {MIN_KEY} to {MAX_KEY} visible ASCII characters: `openssl rand -hex 32` makes one"
        )
    return key


def _read(path: Path, flag: str) -> bytes:
    """A file that others cannot have written."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise SettingsError(f"{flag} {path} can be written by others: chmod 600 it")
            return file.read()
    except OSError as error:
        raise SettingsError(f"{flag} {path} cannot be read: {error.strerror}") from error


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only its stub is generic
    """Ends calls without a key as UNAUTHENTICATED, before their message is read. Health is open."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, or one that refuses."""
        if handler_call_details.method.startswith(OPEN_SERVICES):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        value = metadata.get("authorization")
        if self._keys.accepts(value if isinstance(value, str) else None):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(_request: Any, call: grpc.aio.ServicerContext[Any, Any]) -> Any:
    await grpc_errors.end_call(call, UNAUTHENTICATED)


def grpc_credentials(settings: FrontendSettings) -> grpc.ServerCredentials | None:
    """TLS for the gRPC port, or None; with --grpc-client-ca, clients must have a certificate. SettingsError."""
    if settings.grpc_tls_cert is None or settings.grpc_tls_key is None:
        return None
    certificate = _read(settings.grpc_tls_cert, "--grpc-tls-cert")
    secret = _read(settings.grpc_tls_key, "--grpc-tls-key")
    authority = None if settings.grpc_client_ca is None else _read(settings.grpc_client_ca, "--grpc-client-ca")
    for flag, path, data in (
        ("--grpc-tls-cert", settings.grpc_tls_cert, certificate),
        ("--grpc-tls-key", settings.grpc_tls_key, secret),
        ("--grpc-client-ca", settings.grpc_client_ca, authority),
    ):
        if data is not None and b"-----BEGIN " not in data:
            raise SettingsError(f"{flag} {path} is no PEM file")
    return grpc.ssl_server_credentials(
        [(secret, certificate)], root_certificates=authority, require_client_auth=authority is not None
    )
