"""Reads the engine's answers chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services.frontend.types import Chunk, RequestStream


async def chunks_of(stream: RequestStream) -> AsyncIterator[Chunk]:
    """What comes, until every choice has ended."""
    news = asyncio.Event()
    stream.listen(news.set)
    while True:
        chunk = stream.poll()
        if chunk is not None:
            yield chunk
        elif stream.exhausted:
            return
        else:
            await news.wait()
            news.clear()
