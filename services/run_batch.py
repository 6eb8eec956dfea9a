"""`signalbox run-batch`: a file of requests in OpenAI's batch form, answered into another file.

Each line is {"custom_id", "method": "POST", "url", "body"}; its answer {"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"} has the same place in the output. Answers are first appended to OUT.part as they come,
so that a run that was broken off goes on: lines that have their answer are not done again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from services.console import ClientError, key_headers, raise_for_error, server_url
from services.progress import Progress

URLS = ("/v1/chat/completions", "/v1/completions")
RETRIED = (429, 503)  # the server has too much to do, or no worker just now
ATTEMPTS = 8
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input. problem: why it cannot be sent (code and message)."""

    number: int
    digest: str
    custom_id: str | None
    url: str
    body: dict[str, Any]
    problem: tuple[str, str] | None = None


def read_lines(file: Path) -> list[Line]:
    """All lines that are not empty. ClientError when the file cannot be read, or two lines have one custom_id."""
    try:
        texts = file.read_bytes().splitlines()
    except OSError as error:
        raise ClientError(f"{file}: cannot be read: {error.strerror}") from error
    lines = [_line(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    seen: dict[str, int] = {}
    for line in lines:
        if line.custom_id is not None and seen.setdefault(line.custom_id, line.number) != line.number:
            first = seen[line.custom_id]
            raise ClientError(f"{file}: lines {first} and {line.number} have the same custom_id {line.custom_id!r}")
    return lines


def check_output(file: Path, out: Path) -> None:
    """ClientError when the answers to `file` cannot be written to `out`."""
    if not out.parent.is_dir():
        raise ClientError(f"--output {out}: there is no folder {out.parent}; make it, or choose another")
    if out.is_dir():
        raise ClientError(f"--output {out} is a folder; give a file in it")
    if out.exists() and out.samefile(file):
        raise ClientError(f"--output {out} is the file of the requests; choose another")


def _line(number: int, text: bytes) -> Line:
    digest = hashlib.sha256(text).hexdigest()[:32]
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return Line(number, digest, None, "", {}, ("invalid_line", f"line {number} is not JSON: {error}"))
    if not isinstance(parsed, dict):
        return Line(number, digest, None, "", {}, ("invalid_line", f"line {number} is not an object"))
    id, url, body = parsed.get("custom_id"), parsed.get("url"), parsed.get("body")
    problem = None
    if not isinstance(id, str) or not id:
        id, problem = None, ("invalid_custom_id", f"line {number}: custom_id must be text, not empty")
    elif parsed.get("method") != "POST":
        problem = ("invalid_method", f"line {number}: method must be POST")
    elif url not in URLS:
        problem = ("invalid_url", f"line {number}: url must be {' or '.join(URLS)}")
    elif not isinstance(body, dict):
        problem = ("invalid_body", f"line {number}: body must be an object")
    elif body.get("stream"):
        problem = ("invalid_body", f"line {number}: stream has no meaning in a batch; leave it out")
    return Line(number, digest, id, str(url), body if isinstance(body, dict) else {}, problem)


class Journal:
    """OUT.part: the answers so far, each with the line that it is for. Use as a context.

    Of a former run, answers to these very lines count; what was cut off in mid-line is dropped. num_failed: answers
    with an error.
    """

    def __init__(self, file: Path, lines: Sequence[Line]) -> None:
        self.file = file
        self.num_failed = 0
        self._places: dict[int, tuple[int, int]] = {}  # line number -> where its answer is: offset, size
        self._digests = {line.number: line.digest for line in lines}

    def __enter__(self) -> Journal:
        self._stream = self.file.open("a+b")
        self._stream.seek(0)
        at = 0
        for entry in self._stream:
            if not entry.endswith(b"\n"):
                break
            head, _, answer = entry.partition(b" ")
            number, _, digest = head.decode(errors="replace").partition(":")
            at += len(entry)
            if number.isdigit() and self._digests.get(int(number)) == digest:
                self._note(int(number), answer, at)
        self._stream.truncate(at)
        self._end = at
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        if not self._end:
            self.file.unlink(missing_ok=True)

    def __contains__(self, line: Line) -> bool:
        return line.number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, line: Line, answer: bytes) -> None:
        """Append one; it is with the operating system when this returns."""
        entry = f"{line.number}:{line.digest} ".encode() + answer
        self._stream.write(entry)
        self._stream.flush()
        self._end += len(entry)
        self._note(line.number, answer, self._end)

    def answers(self, lines: Iterable[Line]) -> Iterator[bytes]:
        """Those of all lines, in their order."""
        for line in lines:
            at, size = self._places[line.number]
            self._stream.seek(at)
            yield self._stream.read(size)

    def _note(self, number: int, answer: bytes, end: int) -> None:
        self._places[number] = (end - len(answer), len(answer))
        parsed = orjson.loads(answer)
        self.num_failed += parsed["error"] is not None or parsed["response"]["status_code"] != 200


async def run(url: str, file: Path, out: Path, *, at_once: int) -> tuple[int, int]:
    """Answer all lines; returns how many there are, and how many of them have an error.

    Raises ClientError when the files cannot be used or the server goes away; a second run then goes on.
    """
    lines = read_lines(file)
    check_output(file, out)
    url = server_url(url)
    with Journal(out.with_name(out.name + ".part"), lines) as journal, Bar(len(lines), len(journal)) as bar:
        waiting = iter([line for line in lines if line not in journal])
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(timeout=timeout, headers=key_headers()) as session:
            sender = Sender(session, url, bar.tell)

            async def client() -> None:
                for line in waiting:
                    journal.add(line, await sender.answer(line))
                    bar.advance(journal.num_failed)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(at_once):
                        group.create_task(client())
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        _write_whole(out, journal.answers(lines))
        journal.file.unlink()
        return len(lines), journal.num_failed


def _write_whole(out: Path, answers: Iterator[bytes]) -> None:
    draft = out.with_name(out.name + ".draft")
    with draft.open("wb") as stream:
        stream.writelines(answers)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, out)


class Sender:
    """Asks the server at `url`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tell: Callable[[str], None]) -> None:
        self._session, self._url, self._tell = session, url, tell
        self._model: str | None = None

    async def answer(self, line: Line) -> bytes:
        """The line of the output for one line of the input. ClientError when the server has gone."""
        if line.problem is not None:
            return answer_line(line, error=line.problem)
        pause = FIRST_PAUSE
        for attempt in range(ATTEMPTS):
            try:
                body = line.body if "model" in line.body else {**line.body, "model": await self._default_model()}
                async with self._session.post(self._url + line.url, json=body) as response:
                    data = await response.read()
                    last = attempt == ATTEMPTS - 1
                    if response.status not in RETRIED or last:
                        return answer_line(line, status=response.status, id=response.headers, data=data)
                    pause = max(pause, float(response.headers.get("retry-after", 0)))
                    self._tell(f"{self._url} answers {response.status}; trying again")
            except (aiohttp.ClientError, TimeoutError) as error:
                if attempt == ATTEMPTS - 1:
                    raise ClientError(
                        f"{self._url} does not answer ({error}); what is done is kept: run the same again to go on"
                    ) from error
                self._tell(f"{self._url} does not answer; trying again")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError("the last attempt returns or raises")

    async def _default_model(self) -> str:
        """The model that the server offers, for bodies that name none."""
        if self._model is None:
            async with self._session.get(f"{self._url}/v1/models") as response:
                await raise_for_error(response)
                self._model = str((await response.json())["data"][0]["id"])
        return self._model


def answer_line(
    line: Line, *, status: int = 0, id: Any = None, data: bytes = b"", error: tuple[str, str] | None = None
) -> bytes:
    """One line of the output. An HTTP error is a response; `error` is for what could not be sent."""
    response = None
    if error is None:
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError:
            body = data.decode(errors="replace")
        response = {"status_code": status, "request_id": id.get("x-request-id", ""), "body": body}
    told = None if error is None else {"code": error[0], "message": error[1]}
    name = f"batch_req_{line.digest[:24]}"
    return orjson.dumps({"id": name, "custom_id": line.custom_id, "response": response, "error": told}) + b"\n"


class Bar:
    """How far it is: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done = total, done
        self._lines: Progress | None = None
        self._bar: Any = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
        else:
            self._lines = Progress()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_failed: int) -> None:
        """One more line is done. num_failed: of all that are."""
        self._done += 1
        errors = f"{num_failed} with errors" if num_failed else ""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=errors)
        elif self._lines is not None:
            self._lines.update(f"{self._done} of {self._total} lines {errors}".rstrip())

    def tell(self, what: str) -> None:
        """Say why nothing comes just now."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)
        elif self._lines is not None:
            self._lines.update(what)
