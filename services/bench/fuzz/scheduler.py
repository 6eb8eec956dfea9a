"""The scheduler's three sockets, between an honest worker, an honest frontend, and a liar with their names."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from proto.codec import SCHEDULER_TO_FRONTEND, SCHEDULER_TO_WORKER, decode, encode
from proto.messages import (
    Abort,
    Ack,
    Add,
    FrontendBeat,
    FrontendHello,
    Header,
    Heartbeat,
    Kept,
    Message,
    Phase,
    Reset,
    SamplingParams,
    SequenceStart,
    Shutdown,
    StepPlan,
    TokenFrame,
    Welcome,
    WorkerFault,
    int32,
    int64,
)
from scheduler.config import SchedulerConfig
from services.bench.faults.strict_worker import EOS, PlanViolation, StrictWorker
from services.bench.fuzz.feed import Feed
from services.bench.fuzz.mutate import mutated
from services.run_dir import RunDir
from services.schedulerd import SchedulerService

WORKER, FRONTEND = "w0", "f0"
LIARS = (WORKER, FRONTEND, "x1", "x2", "x3")
MAX_OPEN = 12
CORPUS = 400
LIES_PER_STEP = 40
VALIDATE_EVERY = 50  # steps
LINK_BREAKS = 0.03  # share of the steps in which the honest worker says hello anew


class Corpus:
    """The last honest frames, from which lies are made."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def add(self, draw: random.Random, frame: bytes) -> None:
        """Keep it, perhaps instead of an older one."""
        if len(self.frames) < CORPUS:
            self.frames.append(frame)
        else:
            self.frames[draw.randrange(CORPUS)] = frame

    def lie(self, draw: random.Random) -> bytes:
        """A frame near one of them."""
        if not self.frames:
            return draw.randbytes(40)
        return mutated(draw, draw.choice(self.frames), draw.choice(self.frames))


class SchedulerStage:
    """`steps` steps of the real service; its state is proved sound now and then."""

    name = "scheduler: worker and frontend links"

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self.draw = draw
        run_dir = RunDir.prepare(folder / "run")
        config = SchedulerConfig(max_num_seqs=8, max_queued_requests=64, max_queued_tokens=4096, worker_timeout=1.0)
        self.service = SchedulerService(run_dir, config, event_memory=2**20)
        self.bound = [source.router for source in self.service.sources]
        self.feeds = [Feed(router.max_bytes) for router in self.bound]
        control, plans, frontends = self.feeds
        self.service.control, self.service.plans = control.as_router(), plans.as_router()
        self.service.frontends = frontends.as_router()
        self.service.sources = tuple(
            replace(source, router=feed.as_router())
            for source, feed in zip(self.service.sources, self.feeds, strict=True)
        )
        self.worker = StrictWorker("w", num_blocks=64, block_size=4)
        self.worker_header = self.frontend_header = Header()
        self.kept: Kept | None = None  # told with the worker's beats until its first plan
        self.next_sequence = 1
        self.open: set[int] = set()
        self.to_scheduler, self.to_worker, self.to_frontend = Corpus(), Corpus(), Corpus()
        self.num_steps = 0

    def run(self, count: int) -> int:
        """Send `count` lies; returns how many were rejected or dropped."""
        left = count
        totals = self.service.state.totals
        before = sum(totals.dropped.values())
        while left > 0:
            lies = min(left, LIES_PER_STEP)
            left -= lies
            self._speak_honestly()
            for _ in range(lies):
                feed = self.draw.choice(self.feeds)
                peer = None if self.draw.random() < 0.01 else self.draw.choice(LIARS)
                feed.incoming.append((peer, self.to_scheduler.lie(self.draw)))
            for feed in self.feeds:
                self.draw.shuffle(feed.incoming)
            self._step()
        return sum(totals.dropped.values()) - before

    def close(self) -> None:
        """Give the run folder back."""
        self.service.state.validate()
        for router in self.bound:
            router.close()
        self.service.sources = ()
        self.service.close()

    def _step(self) -> None:
        self.service.step(0.0)
        self.num_steps += 1
        if self.num_steps % VALIDATE_EVERY == 0:
            self.service.state.validate()

    def _say(self, feed: Feed, peer: str, header: Header, message: Message) -> None:
        frame = encode(header, message)
        self.to_scheduler.add(self.draw, frame)
        feed.incoming.append((peer, frame))

    def _speak_honestly(self) -> None:
        control, plans, frontends = self.feeds
        for feed in (control, plans):
            for peer, frame in feed.take_sent():
                self.to_worker.add(self.draw, frame)
                if peer == WORKER:
                    self._as_worker(frame)
        for peer, frame in frontends.take_sent():
            self.to_frontend.add(self.draw, frame)
            if peer == FRONTEND:
                self._as_frontend(frame)
        if self.worker_header.epoch == 0 or self.draw.random() < LINK_BREAKS:
            self._say(control, WORKER, Header(), self.worker.hello())
        else:
            last_plan, ledger = self.worker.next_number - 1, self.worker.ledger()
            kept = None if last_plan else self.kept
            beat = Heartbeat(worker="w", last_plan=last_plan, phase=Phase.IDLE, ledger=ledger, kept=kept)
            self._say(control, WORKER, self.worker_header, beat)
        if self.frontend_header.link == 0:
            self._say(frontends, FRONTEND, Header(), FrontendHello(frontend="f"))
        else:
            self._ask(frontends)

    def _ask(self, frontends: Feed) -> None:
        header = self.frontend_header
        while len(self.open) < MAX_OPEN:
            prompt = int32([self.draw.randrange(1000) for _ in range(self.draw.randrange(1, 24))])
            starts = []
            for _ in range(self.draw.choice((1, 1, 2))):
                start = SequenceStart(
                    sequence=self.next_sequence, seed=self.next_sequence, output_ids=int32(), delivered=len(prompt)
                )
                self.open.add(self.next_sequence)
                self.next_sequence += 1
                starts.append(start)
            add = Add(
                request_id=f"{self.draw.getrandbits(32):08x}",
                prompt_ids=prompt,
                params=SamplingParams(eos_ids=(EOS,)),
                max_length=len(prompt) + 12,
                sequences=tuple(starts),
                deadline=5.0,
            )
            self._say(frontends, FRONTEND, header, add)
        if self.draw.random() < 0.1:
            self._say(frontends, FRONTEND, header, Abort(sequences=int64(self.draw.sample(sorted(self.open), 2))))
        if self.draw.random() < 0.1:
            self._say(frontends, FRONTEND, header, FrontendBeat(counters={"x_total": 1.0}))

    def _as_worker(self, frame: bytes) -> None:
        header, message = decode(frame, SCHEDULER_TO_WORKER)
        if isinstance(message, Reset | Shutdown):
            self.kept = self.worker.kept() if isinstance(message, Reset) and message.keep else None
            self.worker.reset(self.kept)
            self.worker_header = replace(header, number=0) if isinstance(message, Reset) else Header()
        elif isinstance(message, StepPlan) and replace(header, number=0) == self.worker_header:
            try:
                self._say(self.feeds[1], WORKER, header, self.worker.execute(header.number, message))
            except PlanViolation as error:  # a lie told in its name has set the two apart
                self._say(self.feeds[1], WORKER, header, WorkerFault(message=str(error)))

    def _as_frontend(self, frame: bytes) -> None:
        header, message = decode(frame, SCHEDULER_TO_FRONTEND)
        if isinstance(message, Welcome):
            self.frontend_header = replace(header, number=0)
            self.open.clear()  # asks for new ones: what is still held ends at its deadline
        elif isinstance(message, TokenFrame) and message.ends:
            ended = [end.sequence for end in message.ends]
            self.open.difference_update(ended)
            self._say(self.feeds[2], FRONTEND, self.frontend_header, Ack(sequences=int64(ended)))
