"""Work that would stall the event loop runs in a few threads, and only so much of it may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import ParamSpec, TypeVar

from proto.messages import RefusalCode
from services.frontend.types import RequestRefused

P = ParamSpec("P")
R = TypeVar("R")

MAX_PENDING = 512
RETRY_AFTER = 1.0


class Offload:
    """A bounded thread pool for one event loop.

    threads: more than cores are no gain, since Python code holds the interpreter lock; tokenising does not. All are
    there from the beginning, so that what a frontend holds does not depend on how requests overlapped.
    """

    def __init__(self, threads: int = 2, max_pending: int = MAX_PENDING) -> None:
        self._pool, all_there = ThreadPoolExecutor(threads, thread_name_prefix="text"), Barrier(threads)
        for _ in range(threads):
            self._pool.submit(all_there.wait)
        self._max_pending = max_pending
        self._pending = 0

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of `function` from a thread. Raises RequestRefused(OVERLOADED) when too much waits already.

        A call that has begun cannot be stopped: who calls caps its size first.
        """
        if self._pending >= self._max_pending:
            raise RequestRefused(
                RefusalCode.OVERLOADED,
                f"{self._pending} requests wait to be tokenised; try again later",
                RETRY_AFTER,
            )
        self._pending += 1
        future = self._pool.submit(function, *args, **kwargs)
        future.add_done_callback(self._done_from_thread(asyncio.get_running_loop()))
        return await asyncio.wrap_future(future)

    def _done_from_thread(self, loop: asyncio.AbstractEventLoop) -> Callable[[object], None]:
        def done(_future: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._release)

        return done

    def _release(self) -> None:
        self._pending -= 1

    def close(self) -> None:
        """Waiting work is dropped; running work ends on its own."""
        self._pool.shutdown(wait=False, cancel_futures=True)
