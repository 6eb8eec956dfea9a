"""The bounded thread pool of the text side."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from proto.messages import RefusalCode
from services.frontend import prepare
from services.frontend.generation import generate
from services.frontend.offload import Offload
from services.frontend.request import ValidationFailed, limits_of
from services.frontend.types import RequestRefused
from services.frontend.validate import validate_chat
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.tiny_tokenizer import tiny_served_model


@pytest.fixture
def offload() -> Iterator[Offload]:
    pool = Offload(threads=1, max_pending=2)
    yield pool
    pool.close()


async def test_work_runs_in_another_thread_and_its_errors_come_back(offload: Offload) -> None:
    assert await offload.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await offload.run(divmod, 1, 0)


async def test_more_than_may_wait_is_refused_at_once(offload: Offload) -> None:
    release = threading.Event()
    waiting = [asyncio.create_task(offload.run(release.wait, 30)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused) as caught:
        await offload.run(int)
    assert caught.value.code is RefusalCode.OVERLOADED
    assert caught.value.retry_after
    release.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await offload.run(int) == 0


async def test_a_template_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "TEMPLATE_SECONDS", 0.01)
    endless = "{% for a in range(2000) %}{% for b in range(500) %}{{ a }}{% endfor %}{% endfor %}"
    context = fake_context(FakeEngine(), model=tiny_served_model(chat_template=endless))
    request = validate_chat({"messages": [{"role": "user", "content": "Hello"}]}, limits_of(context))
    with pytest.raises(ValidationFailed, match="took more than"):
        await anext(generate(context, request))
