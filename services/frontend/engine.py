"""The frontend's side of the link to the scheduler: requests out, tokens in, and one way to resume.

All state lives on the event loop; services/frontend/link.py moves the bytes. Whatever is open can be told to a
scheduler again at any time (Add is attach), so every trouble has one answer: a new link, then everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from proto.codec import CodecError
from proto.messages import (
    Abort,
    Ack,
    Add,
    End,
    Finish,
    FinishReason,
    FrontendBeat,
    FrontendHello,
    FrontendToScheduler,
    Header,
    RefusalCode,
    Refused,
    SchedulerBeat,
    TokenFrame,
    Welcome,
    int64,
)
from services.frontend.link import Incoming, LinkState, LinkThread
from services.frontend.streams import Choice, Stream, logprobs_by_row
from services.frontend.types import RequestRefused, TokenLogprob
from services.transport import Link

BEAT_INTERVAL = 0.6  # seconds
BEAT_SLACK = 0.2  # seconds that a beat may go out early, to answer the scheduler's: an idle process wakes less often
REJECTED = 'signalbox_messages_dropped_total{reason="malformed at a frontend"}'
NO_LOGPROBS: dict[int, TokenLogprob] = {}
SILENCE = 2.0  # seconds without a SchedulerBeat after which the engine is not ready

log = structlog.get_logger()


class EngineClient:
    """An Engine (services/frontend/types.py). Use it on the event loop that `start` ran on, and only there.

    scheduler: where it listens. counters: this process's own, by sample name; told to the scheduler with every beat.
    model_length: the model's context, served until a worker says what fits. recovery_timeout: seconds.
    """

    def __init__(
        self,
        scheduler: Link,
        name: str,
        *,
        counters: Callable[[], Mapping[str, float]],
        model_length: int,
        recovery_timeout: float,
    ) -> None:
        self._scheduler = scheduler
        self._name = name
        self._counters = counters
        self._model_length = model_length
        self._recovery_timeout = recovery_timeout
        self._header: Header | None = None  # of the current link; None before a Welcome
        self._session = 0  # of the scheduler that last welcomed us
        self._last_frame = 0  # number of the last TokenFrame on this link
        self._beat: SchedulerBeat | None = None
        self._last_sequence = 0
        self._streams: dict[int, tuple[Stream, Choice]] = {}  # by handle: without a terminal event
        self._aborted: set[int] = set()  # handles that the scheduler may still hold
        self._idle = asyncio.Event()  # nothing is open
        self._idle.set()
        self._changed = asyncio.Event()  # readiness, perhaps; or it is about time for a beat
        self._followers: list[Callable[[], None]] = []
        self.draining = False

    async def start(self) -> None:
        """Connect, now and whenever a scheduler is there. The task `beats` ends only by `stop` or an error."""
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()  # when the scheduler last said that it serves
        self._link = LinkThread(self._scheduler, self._loop, self._deliver)
        self._link.start()
        self.beats = asyncio.create_task(self._beat_forever())

    async def stop(self) -> None:
        """End what is open as unavailable and leave the scheduler."""
        self.beats.cancel()
        await asyncio.gather(self.beats, return_exceptions=True)
        self._end_open("the frontend is shutting down")
        self._header = None
        self._link.stop()

    def drain(self) -> None:
        """Accept nothing new from now on."""
        self.draining = True
        self._changed.set()

    async def idle(self) -> None:
        """Until nothing is open."""
        await self._idle.wait()

    # --- Engine -------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """See Engine."""
        return self._problem() is None

    @property
    def reason(self) -> str:
        """See Engine."""
        return self._problem() or "ready"

    @property
    def max_length(self) -> int:
        """See Engine."""
        return (self._beat.max_length if self._beat else 0) or self._model_length

    @property
    def num_open(self) -> int:
        """Sequences without a terminal event."""
        return len(self._streams)

    def next_sequence(self) -> int:
        """See Engine."""
        self._last_sequence += 1
        return self._last_sequence

    def follow(self, tell: Callable[[], None]) -> None:
        """See Engine. An error of `tell` ends the task `beats`."""
        self._followers.append(tell)
        self._changed.set()

    def submit(self, add: Add) -> Stream:
        """See Engine."""
        if self.draining:
            raise RequestRefused(RefusalCode.UNAVAILABLE, "the server is shutting down")
        if self._given_up():
            raise RequestRefused(RefusalCode.UNAVAILABLE, f"the engine cannot serve now: {self.reason}")
        try:
            self._send(add)
        except CodecError as error:
            raise RequestRefused(RefusalCode.INVALID_ARGUMENT, str(error)) from error
        stream = Stream(self, add, self._loop.time(), sent=self._header is not None)
        for choice in stream.choices:
            self._streams[choice.start.sequence] = (stream, choice)
        self._idle.clear()
        return stream

    def metrics(self) -> dict[str, float]:
        """See Engine."""
        totals = dict(self._beat.frontend_totals) if self._beat is not None else {}
        for name, value in self._own_counters().items():
            totals[name] = totals.get(name, 0.0) + value
        return {**self._beat.metrics, **totals} if self._beat is not None else totals

    def _own_counters(self) -> dict[str, float]:
        """Of this process: its link's beside those that it was given."""
        return {**self._counters(), REJECTED: float(self._link.rejections.count)}

    # --- asked by streams ---------------------------------------------------------------------------------------

    def finish_choice(self, choice: Choice) -> None:
        """Tell the scheduler where the frontend found the end."""
        if choice.finish is not None:
            length, reason = choice.finish
            self._send(Finish(sequence=choice.start.sequence, length=length, reason=reason))

    def abort_stream(self, stream: Stream) -> None:
        """Give the blocks back; the stream ends by itself."""
        handles = [choice.start.sequence for choice in stream.open]
        handles = [handle for handle in handles if self._close(handle) is not None]
        self._aborted.update(handles)
        if handles:
            self._send(Abort(sequences=int64(handles)))

    def _close(self, handle: int) -> Stream | None:
        """The sequence needs no more from the scheduler; its stream, or None when it was closed before."""
        stream, _ = self._streams.pop(handle, (None, None))
        if not self._streams:
            self._idle.set()
        return stream

    # --- the link -----------------------------------------------------------------------------------------------

    def _send(self, message: FrontendToScheduler) -> None:
        """Without a link nothing is sent: _welcome tells everything that is open."""
        if self._header is not None:
            self._link.send(self._header, message)

    def _deliver(self, batch: list[Incoming]) -> None:
        acks: list[int] = []
        for item in batch:
            if isinstance(item, LinkState):
                self._lose_link(item)
                continue
            header, message = item
            if isinstance(message, Welcome):
                self._welcome(header)
            elif self._header is None or (header.session, header.link) != (self._header.session, self._header.link):
                continue
            elif isinstance(message, TokenFrame):
                acks += self._frame(header.number, message)
            elif isinstance(message, Refused):
                self._refuse(message)
            else:
                self._note_number(header.number, header.number)
                self._beat = message
                self._heard = self._loop.time()
                self._changed.set()
        if acks:
            self._send(Ack(sequences=int64(acks)))

    def _lose_link(self, state: LinkState) -> None:
        if self._header is not None:
            log.warning("scheduler lost")
        self._header = None
        self._beat = None
        self._changed.set()
        if state is LinkState.UP:
            self._link.send(Header(), FrontendHello(frontend=self._name))

    def _welcome(self, header: Header) -> None:
        log.info("welcomed", session=header.session, link=header.link, open=len(self._streams))
        if header.session != self._session:
            self._aborted.clear()  # the scheduler that held them is gone
        self._session = header.session
        self._header = Header(session=header.session, link=header.link)
        self._last_frame = 0
        self._tell_all()

    def _tell_all(self) -> None:
        """Attach to everything open, or make a new scheduler go on with it; abort again what has not been confirmed."""
        if self._aborted:
            self._send(Abort(sequences=int64(sorted(self._aborted))))
        now = self._loop.time()
        for stream in dict.fromkeys(stream for stream, _ in self._streams.values()):
            self._send(stream.resume(now))
            stream.sent = True
            for choice in stream.open:
                self.finish_choice(choice)

    def _frame(self, number: int, frame: TokenFrame) -> list[int]:
        """Hand the ranges to their streams; returns the handles whose end can be acknowledged."""
        self._note_number(number, number - 1)
        tokens, at = frame.tokens.tolist(), 0
        logprobs = logprobs_by_row(frame, tokens)
        ranges = zip(frame.sequences.tolist(), frame.firsts.tolist(), frame.counts.tolist(), strict=True)
        told: dict[Stream, None] = {}  # those with news, in order: each is told once, of tokens and ends together
        for row, (handle, first, count) in enumerate(ranges):
            known = self._streams.get(handle)
            if known is not None:
                stream, choice = known
                if choice.accept(first, tokens[at : at + count], logprobs.get(row, NO_LOGPROBS)):
                    stream.note(choice)
                    told[stream] = None
            at += count
        acknowledged = [end.sequence for end in frame.ends if self._end(end, told)]
        for stream in told:
            stream.tell()
        return acknowledged

    def _note_number(self, number: int, expected: int) -> None:
        """Frame `number` is the newest; all up to `expected` should have come in before."""
        if self._last_frame < expected:
            log.warning("frames lost", last=self._last_frame, number=number)
            self._tell_all()
        self._last_frame = number

    def _end(self, end: End, told: dict[Stream, None]) -> bool:
        """Whether the end is known now, so that the scheduler may forget the sequence. told: gets its stream."""
        known = self._streams.get(end.sequence)
        if known is None:
            self._aborted.discard(end.sequence)
            return True
        stream, choice = known
        if not choice.close(end):
            return False
        self._close(end.sequence)
        stream.note(choice)
        told[stream] = None
        return True

    def _refuse(self, refused: Refused) -> None:
        error = RequestRefused(refused.code, refused.message, refused.retry_after)
        closed = [self._close(handle) for handle in refused.sequences.tolist()]
        self._aborted.difference_update(refused.sequences.tolist())  # the scheduler does not hold them
        for stream in {stream for stream in closed if stream is not None}:
            self.abort_stream(stream)  # what it did not name
            stream.refuse(error)

    # --- time ---------------------------------------------------------------------------------------------------

    def _problem(self) -> str | None:
        if self.draining:
            return "the server is shutting down"
        if self._beat is None:
            return "no scheduler answers"
        if self._loop.time() - self._heard > SILENCE:
            return f"the scheduler has been silent for {self._loop.time() - self._heard:.1f} s"
        return None if self._beat.ready else self._beat.reason

    def _given_up(self) -> bool:
        return self._loop.time() - self._heard > self._recovery_timeout

    async def _beat_forever(self) -> None:
        due = self._loop.time() + BEAT_INTERVAL
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
            self._changed.clear()
            for tell in self._followers:
                tell()
            if self._loop.time() >= due - BEAT_SLACK:
                due = self._loop.time() + BEAT_INTERVAL
                self._send_beat()

    def _send_beat(self) -> None:
        if self._header is None:
            self._link.send(Header(), FrontendHello(frontend=self._name))
        else:
            self._send(FrontendBeat(counters=self._own_counters()))
        if self._given_up():
            self._end_open(f"the engine was not reachable for {self._recovery_timeout:g} s")

    def _end_open(self, why: str) -> None:
        """Also tells the scheduler, which may only be stopped and go on later, on the same link."""
        if not self._streams:
            return
        log.warning("ending open requests", why=why, open=len(self._streams))
        self._aborted.update(self._streams)
        self._send(Abort(sequences=int64(list(self._streams))))
        streams = {stream for stream, _ in self._streams.values()}
        self._streams.clear()
        self._idle.set()
        for stream in streams:
            stream.end_all(FinishReason.UNAVAILABLE, why)
