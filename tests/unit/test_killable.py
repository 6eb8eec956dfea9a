"""Templates and grammars in a child process that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.frontend.generation import generate
from services.frontend.killable import Killable, Killed
from services.frontend.request import ValidationFailed, limits_of
from services.frontend.validate import validate_chat
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.tiny_tokenizer import tiny_served_model

HELLO = [{"role": "user", "content": "Hello"}]
FINE = "{{ messages[0].content }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
HUGE = "{% set x = namespace(s='aaaaaaaa') %}{% for i in range(40) %}{% set x.s = x.s ~ x.s %}{% endfor %}"


@pytest.fixture
def killable() -> Iterator[Killable]:
    made = Killable("templates", 30.0)
    yield made
    made.close()


async def render(killable: Killable, template: str) -> str:
    return await killable.run("render", template=[template, None, None], messages=HELLO)


def pid_of(killable: Killable) -> int:
    assert killable._process is not None
    return killable._process.pid


async def test_what_takes_too_long_is_killed_and_what_waits_behind_it_is_done(killable):
    assert await render(killable, FINE) == "Hello"
    first = pid_of(killable)
    killable.seconds = 0.2
    endless = asyncio.create_task(render(killable, ENDLESS))
    await asyncio.sleep(0)
    with pytest.raises(Killed, match=r"takes more than 0\.2 s"):
        await endless
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    killable.seconds = 30.0
    assert await render(killable, FINE) == "Hello"
    assert pid_of(killable) != first


async def test_a_child_that_died_is_replaced(killable):
    await killable.start()
    os.kill(pid_of(killable), signal.SIGKILL)
    killable._process.wait()
    assert await render(killable, FINE) == "Hello"


async def test_memory_is_bounded(killable):
    with pytest.raises(Killed, match=r"too much memory|ended the process"):
        await render(killable, HUGE)
    assert await render(killable, FINE) == "Hello"


async def test_refusals_and_judgements_come_back(killable):
    with pytest.raises(ValidationFailed, match="says: no such role") as caught:
        await render(killable, "{{ raise_exception('no such role') }}")
    assert caught.value.param == "messages"
    assert await killable.run("judge", spec="regex\na+") == ["regex\na+", ""]
    spec, problem = await killable.run("judge", spec="regex\n(")
    assert (spec, problem[:19]) == ("", "cannot be compiled:")


async def test_arguments_that_cannot_be_sent_are_refused(killable):
    nested: list = []
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(Killed, match="nested too deeply"):
        await killable.run("render", template=[FINE, None, None], messages=HELLO, arguments={"a": nested})


async def test_the_child_ends_with_its_parent(killable):
    await killable.start()
    child = killable._process
    assert child is not None
    child.stdin.close()
    await asyncio.to_thread(child.wait, 20)
    assert child.returncode == 0


async def test_a_template_that_takes_for_ever_fails_its_request_alone(killable):
    await killable.start()
    killable.seconds = 0.2
    context = fake_context(FakeEngine(), model=tiny_served_model(chat_template=ENDLESS))
    context = replace(context, templates=killable)
    request = validate_chat({"messages": HELLO}, limits_of(context))
    with pytest.raises(ValidationFailed, match=r"it takes more than 0\.2 s; shorten them") as caught:
        await anext(generate(context, request))
    assert caught.value.param == "messages"
