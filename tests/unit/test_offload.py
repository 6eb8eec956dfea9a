"""The bounded thread pool of the text side."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from proto.messages import RefusalCode
from services.frontend.offload import Offload
from services.frontend.types import RequestRefused


@pytest.fixture
def offload() -> Iterator[Offload]:
    pool = Offload(threads=1, max_pending=2)
    yield pool
    pool.close()


async def test_work_runs_in_another_thread_and_its_errors_come_back(offload: Offload) -> None:
    assert await offload.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await offload.run(divmod, 1, 0)


def test_all_its_threads_are_there_from_the_beginning() -> None:
    before = set(threading.enumerate())
    pool = Offload(threads=3)
    assert len(set(threading.enumerate()) - before) == 3
    pool.close()


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
