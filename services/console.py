"""`signalbox generate` and `signalbox chat`: HTTP clients of a running server, for a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from yarl import URL

from services import status
from services.settings import DEFAULT_HTTP, runtime_base

CONNECT_TIMEOUT = 5.0  # seconds


class ClientError(ValueError):
    """The server could not be asked or refused; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a prompt is sent with; None leaves the choice to the server."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: list[str]

    def body(self) -> dict[str, Any]:
        """The fields of the request that were given."""
        fields = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
        given = {name: value for name, value in fields.items() if value is not None}
        return {**given, "stop": self.stop} if self.stop else given


def running_server() -> str:
    """The URL of this user's frontend on this machine, else the default address; ClientError when there are several
    and none has the default address: which one is meant must be said."""
    folders = [folder for folder in runtime_base().glob("signalbox-*") if folder.is_dir()]
    found = [entry for folder in folders for entry in status.read_all(folder) if entry.service == "frontend"]
    living = [entry for entry in found if entry.alive and "http" in entry.addresses]
    addresses = sorted({entry.addresses["http"] for entry in living})
    if not addresses or str(DEFAULT_HTTP) in addresses:
        return f"http://{DEFAULT_HTTP}"
    if len(addresses) > 1:
        raise ClientError(f"several servers run: {', '.join(addresses)}; choose one with --url http://HOST:PORT")
    return f"http://{addresses[0]}"


def server_url(given: str) -> str:
    """The base URL for what --url says: without a slash at its end, and without the /v1 that `up` prints for SDKs.
    ClientError when it is no URL."""
    try:
        url = URL(given)
        valid = url.scheme in ("http", "https") and bool(url.host)
    except ValueError:
        valid = False
    if not valid:
        raise ClientError(f"--url {given} is not a server's URL; write http://HOST:PORT")
    return given.rstrip("/").removesuffix("/v1")


def key_headers() -> dict[str, str]:
    """The header for servers that ask for a key: the one in SIGNALBOX_API_KEY, if any."""
    key = os.environ.get("SIGNALBOX_API_KEY", "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


class Client:
    """One conversation partner at `url`. Use `Client.open(url)`; its calls raise ClientError."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[Client]:
        """A client whose connections end with the context; failures to connect become ClientErrors."""
        url = server_url(url)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        try:
            async with aiohttp.ClientSession(timeout=timeout, headers=key_headers()) as session:
                yield cls(url, session)
        except aiohttp.ClientConnectorError as error:
            raise ClientError(f"no server answers at {url}; start one with: signalbox up") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ClientError(f"the connection to {url} failed: {str(error) or type(error).__name__}") from error

    async def model(self) -> str:
        """The name of the model that the server offers."""
        async with self._session.get(f"{self.url}/v1/models") as answer:
            await raise_for_error(answer)
            return str((await answer.json())["data"][0]["id"])

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """POST `body` and yield the choice of each chunk of the answer."""
        async with self._session.post(f"{self.url}{path}", json={**body, "stream": True}) as answer:
            await raise_for_error(answer)
            async for line in answer.content:
                data = line.strip().removeprefix(b"data:").strip()
                if data in (b"", b"[DONE]"):
                    continue
                chunk = orjson.loads(data)
                if "error" in chunk:
                    raise ClientError(f"the server ended the answer: {chunk['error']['message']}")
                for choice in chunk["choices"]:
                    yield choice


async def raise_for_error(answer: aiohttp.ClientResponse) -> None:
    """ClientError with the server's own words when it refuses."""
    if answer.status == 200:
        return
    text = await answer.text()
    message = text.strip()
    with suppress(ValueError, KeyError, TypeError):
        message = orjson.loads(text)["error"]["message"]
    raise ClientError(f"the server answers {answer.status}: {message}")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def generate(url: str, model: str, prompts: list[str], sampling: Sampling) -> None:
    """Print the continuation of each prompt as it comes; several are set apart by their prompts."""
    async with Client.open(url) as client:
        body = {"model": model or await client.model(), **sampling.body()}
        for prompt in prompts:
            if len(prompts) > 1:
                _write(f"--- {prompt}\n")
            async for choice in client.stream("/v1/completions", {**body, "prompt": prompt}):
                _write(choice["text"])
            _write("\n")


def chat(url: str, model: str, system: str, sampling: Sampling) -> None:
    """Talk line by line until the input ends. Ctrl-C during an answer stops it, at the prompt all."""
    messages = [{"role": "system", "content": system}] if system else []
    with asyncio.Runner() as runner:
        model = model or runner.run(_first_model(url))
        print(f"Talking to {model} at {url}. Ctrl-D ends.")
        while (line := _read_line()) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            pieces: list[str] = []
            with suppress(KeyboardInterrupt):
                runner.run(_reply(url, {"model": model, **sampling.body(), "messages": messages}, pieces))
            _write("\n")
            messages.append({"role": "assistant", "content": "".join(pieces)})


def _read_line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        _write("\n")
        return None


async def _first_model(url: str) -> str:
    async with Client.open(url) as client:
        return await client.model()


async def _reply(url: str, body: dict[str, Any], pieces: list[str]) -> None:
    """Print an answer as it comes and append its pieces, so that a part of it is known when it is stopped."""
    async with Client.open(url) as client:
        async for choice in client.stream("/v1/chat/completions", body):
            pieces.append(choice["delta"].get("content") or "")
            _write(pieces[-1])
