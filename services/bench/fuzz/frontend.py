"""The frontend's link: token frames that no scheduler would send, against the streams of open requests."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

from proto.codec import SCHEDULER_TO_FRONTEND, CodecError, decode, encode
from proto.messages import Add, Header, SamplingParams, SequenceStart, TokenFrame, Welcome, int32
from services.bench.fuzz.feed import Feed
from services.bench.fuzz.scheduler import Corpus
from services.frontend.engine import EngineClient
from services.frontend.link import LinkThread
from services.frontend.streams import Stream
from services.frontend.types import RequestRefused
from services.run_dir import RunDir
from services.transport import frontend_link

FRAMES_PER_TURN = 20
OPEN = 8
NEW_LINK_EVERY = 40  # turns


class FrontendStage:
    """Lies near the frames of `corpus`, which a real scheduler sent."""

    name = "frontend: scheduler link"

    def __init__(self, draw: random.Random, folder: Path, corpus: Corpus) -> None:
        self.draw, self.corpus = draw, corpus
        self.link = frontend_link(RunDir.prepare(folder / "run"))

    def run(self, count: int) -> int:
        """Send `count` lies; returns how many were no valid frame."""
        return asyncio.run(self._run(count))

    async def _run(self, count: int) -> int:
        loop = asyncio.get_running_loop()
        client = EngineClient(self.link, "fuzz", counters=dict, model_length=4096, recovery_timeout=30.0)
        thread = LinkThread(self.link, loop, client._deliver)  # never started: its frames are made here
        thread._dealer.close()
        feed = Feed(self.link.max_bytes)
        thread._dealer = feed.as_dealer()
        client._loop, client._heard, client._link = loop, loop.time(), thread
        streams: list[Stream] = []
        rejected = turns = 0
        while count > 0:
            lies = min(count, FRAMES_PER_TURN)
            count -= lies
            if client._header is None or turns % NEW_LINK_EVERY == 0:
                feed.incoming.append(encode(Header(session=9, link=turns + 1), Welcome(heartbeat_timeout=5.0)))
            turns += 1
            for _ in range(lies):
                frame = self._addressed(self.corpus.lie(self.draw), client)
                rejected += frame is None
                feed.incoming.append(frame if frame is not None else self.corpus.lie(self.draw))
            client._deliver(thread._received())
            thread._outbox.take()
            streams = [stream for stream in streams if _still_open(stream)]
            while client.num_open < OPEN:
                streams.append(client.submit(self._add(client)))
            await asyncio.sleep(0)
        client._end_open("the fuzzer is done")
        assert not any(_still_open(stream) for stream in streams), "a stream without an end"
        thread._outbox.close()
        thread._context.term()
        return rejected

    def _addressed(self, frame: bytes, client: EngineClient) -> bytes | None:
        """With the header of the link that stands and handles that are open; None when it is no valid frame."""
        try:
            header, message = decode(frame, SCHEDULER_TO_FRONTEND)
        except CodecError:
            return None
        if isinstance(message, Welcome) or client._header is None:
            return frame
        header = replace(client._header, number=client._last_frame + self.draw.choice((0, 1, 1, 1, 2)))
        open_ones = sorted(client._streams)
        if isinstance(message, TokenFrame) and open_ones:
            handles = message.sequences.copy()
            handles[:] = [self.draw.choice(open_ones) for _ in handles]
            ends = tuple(replace(end, sequence=self.draw.choice(open_ones)) for end in message.ends)
            message = replace(message, sequences=handles, ends=ends)
        try:
            return encode(header, message)
        except CodecError:
            return None

    def _add(self, client: EngineClient) -> Add:
        prompt = int32(range(1, 1 + self.draw.randrange(1, 20)))
        start = SequenceStart(sequence=client.next_sequence(), seed=1, output_ids=int32(), delivered=len(prompt))
        return Add(
            request_id="r",
            prompt_ids=prompt,
            params=SamplingParams(),
            max_length=len(prompt) + 16,
            sequences=(start,),
        )

    def close(self) -> None:
        """Nothing is held between runs."""


def _still_open(stream: Stream) -> bool:
    """Read what there is; False once the stream has ended."""
    try:
        while stream.poll() is not None:
            pass
    except RequestRefused:
        return False
    return not stream.exhausted
