"""The terminal clients against a small server that speaks as the frontend does."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from services import console, status
from services.console import ClientError, Sampling
from services.progress import Progress

SAMPLING = Sampling(max_tokens=5, temperature=0.0, top_p=None, seed=None, stop=[])


@asynccontextmanager
async def server(lines: list[object], http_status: int = 200, seen: list[object] | None = None) -> AsyncIterator[str]:
    """A server with one model whose every answer is these SSE events, or this JSON when it refuses."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "smol"}]})

    async def complete(request: web.Request) -> web.Response:
        if seen is not None:
            seen.append(await request.json())
        if http_status != 200:
            return web.json_response(lines[0], status=http_status)
        events = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        text = "".join(f"data: {event}\n\n" for event in events)
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    async with TestServer(app) as running:
        yield str(running.make_url("/")).rstrip("/")


def chunk(text: str) -> object:
    return {"choices": [{"index": 0, "text": text}]}


async def test_generate_prints_what_comes(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []
    async with server([chunk(" Paris"), chunk("."), "[DONE]"], seen=seen) as url:
        await console.generate(url, "", ["The capital of France is"], SAMPLING)
    assert capsys.readouterr().out == " Paris.\n"
    expected = {"model": "smol", "prompt": "The capital of France is", "stream": True, "max_tokens": 5}
    assert seen == [{**expected, "temperature": 0.0}]


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
async def test_the_address_that_up_prints_is_a_url_too(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with server([chunk("."), "[DONE]"]) as url:
        await console.generate(url + end, "", ["a"], SAMPLING)
    assert capsys.readouterr().out == ".\n"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "nonsense", "ftp://host", "http://", "http://host:port"])
async def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ClientError, match="is not a server's URL; write http://HOST:PORT"):
        await console.generate(url, "", ["a"], SAMPLING)


async def test_several_prompts_are_set_apart(capsys: pytest.CaptureFixture[str]) -> None:
    async with server([chunk("!"), "[DONE]"]) as url:
        await console.generate(url, "smol", ["a", "b"], SAMPLING)
    assert capsys.readouterr().out == "--- a\n!\n--- b\n!\n"


async def test_a_refusal_is_told() -> None:
    async with server([{"error": {"message": "max_tokens is too large"}}], 400) as url:
        with pytest.raises(ClientError, match="the server answers 400: max_tokens is too large"):
            await console.generate(url, "smol", ["x"], SAMPLING)


async def test_an_error_in_the_stream_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    async with server([chunk("a"), {"error": {"message": "no usable worker"}}]) as url:
        with pytest.raises(ClientError, match="the server ended the answer: no usable worker"):
            await console.generate(url, "smol", ["x"], SAMPLING)
    assert capsys.readouterr().out == "a"


async def test_no_server_is_told() -> None:
    with pytest.raises(ClientError, match=r"no server answers at http://127\.0\.0\.1:9; start one with: signalbox up"):
        await asyncio.wait_for(console.generate("http://127.0.0.1:9", "", ["x"], SAMPLING), 10)


def test_the_frontend_that_lives_here_is_found_and_of_several_none_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert console.running_server() == "http://127.0.0.1:8000"
    status.publish(tmp_path / "signalbox-up-x", "frontend", "0", addresses={"http": "127.0.0.1:8123"})
    status.publish(tmp_path / "signalbox-up-x", "scheduler", "0")
    assert console.running_server() == "http://127.0.0.1:8123"
    status.publish(tmp_path / "signalbox-up-y", "frontend", "0", addresses={"http": "127.0.0.1:8124"})
    with pytest.raises(console.ClientError, match=r"127.0.0.1:8123, 127.0.0.1:8124; choose one with --url"):
        console.running_server()
    status.publish(tmp_path / "signalbox-up-z", "frontend", "0", addresses={"http": "127.0.0.1:8000"})
    assert console.running_server() == "http://127.0.0.1:8000"


def test_progress_is_a_line_for_each_change_that_is_more_than_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        for text in ("fetching 1 %", "fetching 2 %", "fetching 2 %", "unpacking 1 %", "unpacking 99.5 %"):
            progress.update(text)
        progress.line("done")
    assert capsys.readouterr().err == "signalbox: fetching 1 %\nsignalbox: unpacking 1 %\ndone\n"
