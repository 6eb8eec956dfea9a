"""A simulated frontend on its link, as services/frontend/ is, and the streams that it holds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
    Int64,
    Message,
    RefusalCode,
    Refused,
    SamplingParams,
    SchedulerBeat,
    SequenceStart,
    TokenFrame,
    Welcome,
    int32,
    int64,
)
from scheduler.events import FromFrontend
from services.bench.faults.peers import Process, StreamViolation, Surroundings
from services.bench.faults.strict_worker import EOS, expected_output

FRONTEND_BEAT_SECONDS = 0.6


@dataclass(eq=False)
class SimSequence:
    """What the frontend holds of one sequence.

    finish_at: absolute length at which the frontend ends it, as a stop string would. parent: handle of the sequence
    that it forks from. siblings: all sequences of its request. spoiled: position at which its logits are not finite.
    """

    handle: int
    seed: int
    prompt: list[int]
    max_length: int
    priority: int = 0
    deadline: float | None = None
    tenant: str = ""
    grammar: str = ""
    outputs: list[int] = field(default_factory=list)
    end: End | None = None
    refused: Refused | None = None
    finish_at: int | None = None
    parent: int = 0
    siblings: list[SimSequence] = field(default_factory=list)
    spoiled: int | None = None

    @property
    def delivered(self) -> int:
        """The next position that is wanted."""
        return len(self.prompt) + len(self.outputs)

    @property
    def open(self) -> bool:
        """Whether its terminal event is still to come."""
        return self.end is None and self.refused is None

    def expected(self) -> tuple[list[int], FinishReason]:
        """Output tokens and reason of an undisturbed run, but for what the frontend itself ends."""
        tokens, reason = expected_output(self.seed, len(self.prompt), self.max_length)
        before = None if self.spoiled is None else max(0, self.spoiled - len(self.prompt))
        if before is not None and before < len(tokens):
            return tokens[:before], FinishReason.NOT_FINITE
        return tokens, reason

    def check_prefix(self) -> tuple[End, list[int]]:
        """Its end and the tokens that count. Raises StreamViolation if it has none, or they are not undisturbed."""
        if self.end is None:
            raise StreamViolation(f"sequence {self.handle} has no end: {self.refused}")
        tokens, _ = self.expected()
        got = self.outputs[: self.end.length - len(self.prompt)]
        if got != tokens[: len(got)]:
            raise StreamViolation(f"sequence {self.handle} has tokens {got}, undisturbed {tokens}")
        return self.end, got

    def check(self) -> None:
        """Raise StreamViolation unless it has ended with exactly its undisturbed tokens, or at the client's wish."""
        if self.refused is not None and self.refused.code is RefusalCode.OVERLOADED and self.deadline is not None:
            return  # told at once that its deadline would pass
        end, got = self.check_prefix()
        tokens, reason = self.expected()
        finished = end.length == self.finish_at and end.reason is FinishReason.STOP
        late = end.reason is FinishReason.DEADLINE and self.deadline is not None
        if end.reason is FinishReason.ABORTED or finished or late:
            return
        if end.reason is not reason or got != tokens:
            raise StreamViolation(f"sequence {self.handle} ended {end}, expected {tokens} and {reason.name}; got {got}")
        if end.stop_id != (tokens[-1] if reason is FinishReason.STOP else -1):
            raise StreamViolation(f"sequence {self.handle} has stop id {end.stop_id}")


class FrontendNode(Process):
    """A frontend process: adds, delivers, acknowledges, and attaches again when something was lost."""

    def __init__(self, world: Surroundings, name: str) -> None:
        super().__init__(world, name)
        self.header = Header()
        self.session = 0
        self.last_frame = 0
        self.sequences: dict[int, SimSequence] = {}
        self.aborted: set[int] = set()  # handles that the scheduler may still hold
        world.at(0.0, self.say_hello)
        world.at(FRONTEND_BEAT_SECONDS, lambda: self.every(FRONTEND_BEAT_SECONDS, self.beat))

    # --- what clients ask for ---

    def submit(self, *members: SimSequence) -> None:
        """One request, with one sequence for each choice."""
        for member in members:
            member.siblings = list(members)
            self.sequences[member.handle] = member
        if self.header.session:
            self.add(*members)

    def abort(self, handle: int) -> None:
        """The client is gone."""
        sequence = self.sequences.get(handle)
        if self.alive and sequence is not None and sequence.open:
            sequence.end = End(sequence=handle, reason=FinishReason.ABORTED, length=sequence.delivered)
            self.aborted.add(handle)
            if self.header.session:
                self.send(Abort(sequences=int64([handle])))

    # --- the link ---

    def say_hello(self) -> None:
        """As soon as there is a link."""
        if self.alive and not self.header.session and self.connected:
            self._send(Header(), FrontendHello(frontend=self.name))

    def beat(self) -> None:
        """A beat, or another hello."""
        if self.header.session:
            self.send(FrontendBeat(counters={"requests": float(len(self.sequences))}))
        else:
            self.say_hello()

    def disconnect(self) -> None:
        """Without a link nothing is said."""
        self.header = Header()

    def reconnect(self) -> None:
        """Say hello; everything is told again after the Welcome."""
        self.say_hello()

    def send(self, message: FrontendToScheduler) -> None:
        """On the current link."""
        self._send(self.header, message)

    def _send(self, header: Header, message: FrontendToScheduler) -> None:
        self.world.to_scheduler(self.name, FromFrontend(self.name, header, message))

    def add(self, *members: SimSequence) -> None:
        """Create or attach these sequences of one request."""
        first = members[0]
        starts = tuple(
            SequenceStart(
                sequence=member.handle,
                seed=member.seed,
                output_ids=int32(member.outputs),
                delivered=member.delivered,
                parent=member.parent,
            )
            for member in members
        )
        self.send(
            Add(
                request_id=f"{self.name}-{first.siblings[0].handle if first.siblings else first.handle}",
                prompt_ids=int32(first.prompt),
                params=SamplingParams(eos_ids=(EOS,), temperature=1.0, grammar=first.grammar),
                max_length=first.max_length,
                sequences=starts,
                priority=first.priority,
                tenant=first.tenant,
                deadline=first.deadline,
            )
        )

    def tell_all(self) -> None:
        """Attach to everything open, or make a new scheduler go on with it."""
        if self.aborted:
            self.send(Abort(sequences=int64(sorted(self.aborted))))
        told: set[int] = set()
        for sequence in self.sequences.values():
            members = [one for one in sequence.siblings or [sequence] if one.open and one.handle not in told]
            if members:
                told.update(one.handle for one in members)
                self.add(*members)
                for one in members:
                    self._finish(one)

    def handle(self, header: Header, message: Message) -> None:
        """Welcome, frames, refusals and beats; those of another link are dropped."""
        if isinstance(message, Welcome):
            if header.session != self.session:
                self.aborted.clear()
            self.session = header.session
            self.header = Header(session=header.session, link=header.link)
            self.last_frame = 0
            self.tell_all()
        elif not self.header.session or (header.session, header.link) != (self.header.session, self.header.link):
            return
        elif isinstance(message, TokenFrame):
            self._frame(header, message)
        elif isinstance(message, Refused):
            self._refuse(message)
        elif isinstance(message, SchedulerBeat):
            self._note_number(header.number, header.number)

    def _note_number(self, number: int, expected: int) -> None:
        if self.last_frame < expected:
            self.tell_all()
        self.last_frame = number

    def _refuse(self, message: Refused) -> None:
        for handle in message.sequences.tolist():
            self.aborted.discard(handle)
            if self.sequences[handle].open:
                self.sequences[handle].refused = message

    def _frame(self, header: Header, frame: TokenFrame) -> None:
        self._note_number(header.number, header.number - 1)
        at = 0
        ranges = zip(frame.sequences.tolist(), frame.firsts.tolist(), frame.counts.tolist(), strict=True)
        for handle, first, length in ranges:
            self._deliver(self.sequences[handle], first, frame.tokens[at : at + length].tolist())
            at += length
        acks: Int64 = int64([end.sequence for end in frame.ends if self._end(self.sequences[end.sequence], end)])
        if len(acks):
            self.send(Ack(sequences=acks))

    def _deliver(self, sequence: SimSequence, first: int, tokens: list[int]) -> None:
        """Take what is new of a range, if it begins at or before the next position that is wanted."""
        known = sequence.delivered - first
        if not sequence.open or not 0 <= known < len(tokens):
            return
        sequence.outputs += tokens[known:]
        self._finish(sequence)

    def _finish(self, sequence: SimSequence) -> None:
        if sequence.finish_at is not None and sequence.delivered >= sequence.finish_at:
            self.send(Finish(sequence=sequence.handle, length=sequence.finish_at, reason=FinishReason.STOP))

    def _end(self, sequence: SimSequence, end: End) -> bool:
        """Whether the end is known now, so that the scheduler may forget the sequence."""
        self.aborted.discard(sequence.handle)
        if not sequence.open:
            return True
        if end.length > sequence.delivered:
            return False
        if (
            sequence.finish_at is not None
            and sequence.finish_at <= sequence.delivered
            and end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        ):
            end = replace(end, length=sequence.finish_at, reason=FinishReason.STOP, stop_id=-1)
        sequence.end = end
        return True
