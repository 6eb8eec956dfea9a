"""The event log: every input of ``scheduler.advance``, so that a run can be replayed to the same plans.

A log is a sequence of msgpack objects (docs/observability.md): one header, then for each step
``[now, digest, [[kind, peer, data], ...]]``, where data is the frame as it was received, and at last an end. The
digest is over all that was sent before the step, state messages (SchedulerBeat) left out. Nothing is encoded again:
a step costs one copy of the frames that it received.
"""

from __future__ import annotations

import dataclasses
import os
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, get_origin, get_type_hints

import msgpack
import structlog

from proto.messages import SCHEMA_VERSION, Message, SchedulerBeat
from scheduler.state import SchedulerState
from services.checkpoint import CheckpointError, compress, freeze

log = structlog.get_logger()

FORMAT = "signalbox event log"
FORMAT_VERSION = 1
FLUSH_INTERVAL = 0.5  # seconds that a recording may lag behind


class Kind(IntEnum):
    """What an input of advance is; data is a frame for the first two, text for REJECTED, else empty."""

    FRONTEND = 1
    WORKER = 2
    LOST = 3
    REJECTED = 4
    DRAIN = 5


@dataclass(frozen=True, kw_only=True)
class LogHeader:
    """How a log begins.

    schema: of the frames. started: the scheduler's clock at its start; time: seconds since 1970 at the beginning of
    this log. step, digest: steps before this log and the digest of what they sent. checkpoint: the state then
    (services/checkpoint.py), compressed in a file; empty when the log begins with the scheduler itself.
    """

    format: str = FORMAT
    version: int = FORMAT_VERSION
    schema: int = SCHEMA_VERSION
    release: str
    session: int
    started: float
    time: float
    config: dict[str, Any]
    step: int = 0
    digest: int = 1
    checkpoint: bytes = b""


@dataclass(slots=True)
class Segment:
    """A stretch of the log in memory that can be replayed by itself."""

    header: LogHeader
    records: list[bytes] = field(default_factory=list)
    size: int = 0


def digest_of(digest: int, message: Message, frame: bytes) -> int:
    """The digest after one more outgoing frame (Adler-32, RFC 1950: cheap, and no one forges a log to himself)."""
    return digest if type(message) is SchedulerBeat else zlib.adler32(frame, digest)


class EventLog:
    """Keeps the last inputs in memory, always, and writes them to a file when asked.

    The tail is two segments at most. Each begins with a checkpoint of the state (or with the scheduler's start) and
    is half of `memory` bytes long; a third one drops the first. With `memory` 0 nothing is kept.
    """

    def __init__(self, state: SchedulerState, started: float, *, memory: int, record: Path | None = None) -> None:
        """`started`: what the state was made with. OSError when `record` cannot be written."""
        self.digest = 1
        self.steps = 0
        self._inputs: list[tuple[int, str, bytes | str]] = []
        self._limit = memory // 2
        self._packer = msgpack.Packer()
        self._header = LogHeader(
            release=version("signalbox"),
            session=state.session,
            started=started,
            time=time.time(),
            config=dataclasses.asdict(state.config),
        )
        self._segments = deque([Segment(self._header)], maxlen=2)
        self._file: IO[bytes] | None = None
        self._flush_at = 0.0
        if record is not None:
            self._file = open_new(record)
            self._file.write(_pack_header(self._header))
            log.info("recording events", file=str(self._file.name))

    # --- what the service calls, in this order, for each step -----------------------------------------------------

    def note(self, kind: Kind, peer: str = "", data: bytes | str = b"") -> None:
        """One input of the next step, in the order in which advance gets them."""
        self._inputs.append((kind, peer, data))

    def begin(self, now: float) -> None:
        """The step is about to be made with what was noted."""
        record = self._packer.pack((now, self.digest, self._inputs))
        self._inputs = []
        self.steps += 1
        if self._limit:
            segment = self._segments[-1]
            segment.records.append(record)
            segment.size += len(record)
        if self._file is not None:
            self._write(record, now)

    def sent(self, message: Message, frame: bytes) -> None:
        """One frame that the step brought, in order."""
        self.digest = digest_of(self.digest, message, frame)

    def finish(self, state: SchedulerState) -> None:
        """The step is done; begins a new segment when the last one is full, a little earlier in an idle moment."""
        size = self._segments[-1].size if self._limit else 0
        if self._limit and (size >= self._limit or (size >= self._limit // 2 and state.idle)):
            self._begin_segment(state)

    # --- what is done now and then --------------------------------------------------------------------------------

    def dump(self, path: Path, reason: str) -> int:
        """Write the tail to `path`, whole or not at all; returns its bytes. `reason` stands at its end."""
        if not self._limit:
            raise OSError("there is no tail in memory")
        header = self._segments[0].header
        if header.checkpoint:
            header = dataclasses.replace(header, checkpoint=compress(header.checkpoint))
        parts = [_pack_header(header)]
        parts += [record for segment in self._segments for record in segment.records]
        parts.append(self._end(reason))
        unfinished = path.with_name(f".{path.name}.part")
        with unfinished.open("wb") as file:
            os.chmod(file.fileno(), 0o600)
            file.writelines(parts)
        unfinished.replace(path)
        return sum(map(len, parts))

    def close(self, reason: str) -> None:
        """End the recording."""
        if self._file is not None:
            self._write(self._end(reason), float("inf"))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_segment(self, state: SchedulerState) -> None:
        try:
            checkpoint = freeze(state)
        except CheckpointError as error:
            log.error("no more events are kept in memory", why=str(error))
            self._limit = 0
            self._segments.clear()
            return
        header = dataclasses.replace(
            self._header, time=time.time(), step=self.steps, digest=self.digest, checkpoint=checkpoint
        )
        self._segments.append(Segment(header))

    def _end(self, reason: str) -> bytes:
        packed: bytes = self._packer.pack({"end": reason, "digest": self.digest})
        return packed

    def _write(self, record: bytes, now: float) -> None:
        """A disk that is full ends the recording, never the scheduler."""
        file = self._file
        assert file is not None
        try:
            file.write(record)
            if now >= self._flush_at:
                file.flush()
                self._flush_at = now + FLUSH_INTERVAL
        except OSError as error:
            log.error("recording ended", file=file.name, why=error.strerror)
            self._file = None
            with suppress(OSError):
                file.close()


def open_new(path: Path) -> IO[bytes]:
    """A new file, for this user alone: `path`, or `path` with a number behind it when there is one already."""
    for number in range(1, 10_000):
        candidate = path if number == 1 else path.with_name(f"{path.name}.{number}")
        try:
            return open(candidate, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))
        except FileExistsError:
            continue
    raise FileExistsError(f"{path} and 9,998 others exist")


def _pack_header(header: LogHeader) -> bytes:
    packed: bytes = msgpack.packb(dataclasses.asdict(header))
    return packed


class EventLogError(ValueError):
    """A file that is no event log of this release; the message is one line."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of advance. digest: of all that was sent before it."""

    now: float
    digest: int
    inputs: list[tuple[Kind, str, bytes | str]]


@dataclass(slots=True)
class LogFile:
    """A log on disk. Iterate over `steps()` once; then `end` and `last_digest` tell how it ended.

    end: the reason given; empty when the file stops without one, as that of a killed scheduler.
    """

    path: Path
    header: LogHeader
    end: str = ""
    last_digest: int | None = None

    @classmethod
    def open(cls, path: Path) -> LogFile:
        """Reads the header. EventLogError when it is none."""
        objects = _objects(path)
        first = next(objects, None)
        if not isinstance(first, dict) or first.get("format") != FORMAT:
            raise EventLogError(f"{path} is not an event log: record one with `signalbox up --record FILE`")
        for name, ours in (("version", FORMAT_VERSION), ("schema", SCHEMA_VERSION)):
            if first.get(name) != ours:
                raise EventLogError(
                    f"{path} has {name} {first.get(name)}, this release reads {ours}: replay it with the release "
                    f"that wrote it ({first.get('release')})"
                )
        try:
            header = LogHeader(**first)
        except TypeError as error:
            raise EventLogError(f"{path} has a header of another form: {error}") from error
        for name, kind in get_type_hints(LogHeader).items():
            if not isinstance(getattr(header, name), (int, float) if kind is float else get_origin(kind) or kind):
                raise EventLogError(f"{path} has a header of another form: {name} is {getattr(header, name)!r:.80}")
        return cls(path, header)

    def steps(self) -> Iterator[Step]:
        """The steps in order. EventLogError at the first thing that is none."""
        objects = _objects(self.path)
        next(objects)
        for number, record in enumerate(objects, self.header.step + 1):
            try:
                if isinstance(record, dict):
                    self.end, self.last_digest = record["end"], record["digest"]
                    return
                now, digest, inputs = record
                yield Step(float(now), digest, [(Kind(kind), peer, data) for kind, peer, data in inputs])
            except (TypeError, ValueError, KeyError) as error:
                raise EventLogError(f"{self.path}: step {number} is damaged: {error}") from error


def _objects(path: Path) -> Iterator[Any]:
    """What the file holds; an object that is cut off at its end is left out."""
    try:
        with path.open("rb") as file:
            yield from msgpack.Unpacker(file, max_buffer_size=2**31 - 1)
    except OSError as error:
        raise EventLogError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise EventLogError(f"{path} is damaged: {error or type(error).__name__}") from error
