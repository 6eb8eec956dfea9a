"""`run-batch`: OpenAI's batch form in and out, over a real HTTP front and an engine in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from proto.messages import Add, RefusalCode
from services import run_batch
from services.console import ClientError
from services.frontend.auth import ApiKeys
from services.frontend.types import RequestRefused
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.http_front import Front, http_front
from tests.support.tiny_tokenizer import ids_of

WORDS = ids_of(" quick", " brown", "<|im_end|>")


def request(id: str | None, **changes: Any) -> dict[str, Any]:
    body = {"prompt": [5], "max_tokens": 8, "model": "tiny"}
    return {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body} | changes


def write(file: Path, *lines: object) -> Path:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def url_of(front: Front) -> str:
    return str(front.make_url("")).rstrip("/")


async def run(engine: FakeEngine, file: Path, out: Path, at_once: int = 4) -> list[dict[str, Any]]:
    async with http_front(fake_context(engine)) as front:
        await run_batch.run(url_of(front), file, out, at_once=at_once)
    return answers_in(out)


def answers_in(out: Path) -> list[dict[str, Any]]:
    assert not out.with_name(out.name + ".part").exists()
    return [json.loads(line) for line in out.read_text().splitlines()]


async def test_answers_have_the_order_and_the_ids_of_the_requests(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    chat = {"url": "/v1/chat/completions", "body": {"messages": messages}}  # the server's own model
    file = write(tmp_path / "in.jsonl", *[request(f"r{i}") for i in range(9)], "", request("chat", **chat))
    answers = await run(FakeEngine(WORDS), file, tmp_path / "out.jsonl")
    assert [answer["custom_id"] for answer in answers] == [*(f"r{i}" for i in range(9)), "chat"]
    assert len({answer["id"] for answer in answers}) == 10
    for answer in answers:
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"]
    assert answers[0]["response"]["body"]["choices"][0]["text"] == " quick brown"
    assert answers[9]["response"]["body"]["choices"][0]["message"]["content"] == " quick brown"


async def test_a_bad_line_has_an_error_of_its_own(tmp_path: Path) -> None:
    bad_field = request("field", body={"prompt": [5], "temperature": 9, "model": "tiny"})
    lines = ["{", "[]", request(None), request("m", method="GET"), request("u", url="/v1/files"), request("b", body=3)]
    file = write(tmp_path / "in.jsonl", *lines, request("s", body={"stream": True}), bad_field, request("good"))
    answers = await run(FakeEngine(WORDS), file, tmp_path / "out.jsonl")
    codes = [answer["error"] and answer["error"]["code"] for answer in answers]
    invalid = ["line", "line", "custom_id", "method", "url", "body", "body"]
    assert codes == [*(f"invalid_{what}" for what in invalid), None, None]
    assert [answer["response"] for answer in answers[:7]] == [None] * 7
    assert answers[7]["response"]["status_code"] == 400
    assert answers[7]["response"]["body"]["error"]["param"] == "temperature"
    assert answers[8]["response"]["status_code"] == 200


async def test_a_run_that_was_broken_off_does_only_what_is_left(tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(file, *[request(f"r{i}") for i in range(6)])
    engine = FakeEngine(WORDS)
    submit = engine.submit

    def third_breaks(add: Add) -> Any:
        if len(engine.streams) == 3:
            raise KeyError("the server is gone")  # a 500, which is an answer; then the process is killed
        return submit(add)

    engine.submit = third_breaks  # type: ignore[method-assign]
    whole = await run(engine, file, out, at_once=1)
    # What a run leaves that is killed after three answers, in the middle of the fourth.
    lines = run_batch.read_lines(file)
    entries = [f"{line.number}:{line.digest} {json.dumps(answer)}\n" for line, answer in zip(lines, whole, strict=True)]
    out.unlink()
    (tmp_path / "out.jsonl.part").write_text("".join(entries[:3]) + entries[3][:40])
    write(file, request("r0"), request("other"), *[request(f"r{i}") for i in range(2, 6)])  # line 2 is a new one
    second = FakeEngine(WORDS)
    answers = await run(second, file, out)
    assert len(second.adds) == 4
    assert [answer["custom_id"] for answer in answers] == ["r0", "other", "r2", "r3", "r4", "r5"]
    assert answers[0] == whole[0]
    assert answers[2] == whole[2]


async def test_an_overload_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_batch, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(run_batch, "LONGEST_PAUSE", 0.0)
    engine = FakeEngine(WORDS)
    submit, tries = engine.submit, []

    def full_twice(add: Add) -> Any:
        tries.append(add)
        if len(tries) < 3:
            raise RequestRefused(RefusalCode.UNAVAILABLE, "no worker")
        return submit(add)

    engine.submit = full_twice  # type: ignore[method-assign]
    (answer,) = await run(engine, write(tmp_path / "in.jsonl", request("r")), tmp_path / "out.jsonl")
    assert answer["response"]["status_code"] == 200
    assert len(tries) == 3


async def test_what_cannot_be_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_batch, "FIRST_PAUSE", 0.0)
    out = tmp_path / "out.jsonl"
    with pytest.raises(ClientError, match=r"none.jsonl: cannot be read: No such file"):
        await run_batch.run("http://127.0.0.1:9", tmp_path / "none.jsonl", out, at_once=1)
    file = write(tmp_path / "in.jsonl", request("a"), request("b"), request("a"))
    with pytest.raises(ClientError, match="lines 1 and 3 have the same custom_id 'a'"):
        await run_batch.run("http://127.0.0.1:9", file, out, at_once=1)
    with pytest.raises(ClientError, match=r"does not answer .* run the same again to go on"):
        await run_batch.run("http://127.0.0.1:9", write(file, request("a")), out, at_once=1)


async def test_answers_go_to_a_file_of_their_own(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", request("a"))
    before = file.read_text()
    (tmp_path / "link.jsonl").symlink_to(file)
    refused = {
        file: "is the file of the requests",
        tmp_path / "link.jsonl": "is the file of the requests",
        tmp_path: "is a folder",
        tmp_path / "none" / "out.jsonl": "there is no folder",
    }
    for out, why in refused.items():
        with pytest.raises(ClientError, match=f"--output .* {why}"):
            await run_batch.run("http://127.0.0.1:9", file, out, at_once=1)
    assert file.read_text() == before
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "link.jsonl"]


async def test_a_server_with_keys_gets_the_key_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write(tmp_path / "in.jsonl", request("a", body={"prompt": [5]})), tmp_path / "out.jsonl"
    context = fake_context(FakeEngine(WORDS))
    object.__setattr__(context, "keys", ApiKeys(["secret-of-the-test"]))
    async with http_front(context) as front:
        monkeypatch.delenv("SIGNALBOX_API_KEY", raising=False)
        with pytest.raises(ClientError, match="the server answers 401"):
            await run_batch.run(url_of(front), file, out, at_once=1)
        monkeypatch.setenv("SIGNALBOX_API_KEY", "secret-of-the-test")
        await run_batch.run(url_of(front), file, out, at_once=1)
    assert answers_in(out)[0]["response"]["status_code"] == 200


async def test_a_server_that_is_gone_is_told_while_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_batch, "FIRST_PAUSE", 0.0)
    file = write(tmp_path / "in.jsonl", request("a", body={"prompt": [5]}))
    with pytest.raises(ClientError, match="does not answer"):
        await run_batch.run("http://127.0.0.1:9", file, tmp_path / "out.jsonl", at_once=1)
    assert capsys.readouterr().err == "signalbox: http://127.0.0.1:9 does not answer; trying again\n"
    assert os.listdir(tmp_path) == ["in.jsonl"]
