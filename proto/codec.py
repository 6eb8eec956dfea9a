"""Records to bytes and back: the only place that knows what a frame looks like.

A frame is one msgpack array: [schema, tag, session, link, epoch, number, fields]. proto.fields says how fields are
written. No extension types, no hooks, no pickle; size limits hold before anything is parsed. Bad bytes raise
CodecError and nothing else.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar, get_args

import msgpack

from proto.errors import CodecError
from proto.fields import MAX_ITEMS, MAX_TEXT_BYTES, TaggedUnion, record_form
from proto.messages import (
    SCHEMA_VERSION,
    Abort,
    Ack,
    Add,
    Copy,
    Finish,
    FrontendBeat,
    FrontendHello,
    FrontendToScheduler,
    GrammarFailed,
    GrammarReady,
    Header,
    Heartbeat,
    LoadAdapter,
    Message,
    Refused,
    Reset,
    SchedulerBeat,
    SchedulerToFrontend,
    SchedulerToWorker,
    SetWeights,
    Shutdown,
    StepPlan,
    StepResult,
    TokenFrame,
    Transfer,
    Welcome,
    WorkerFault,
    WorkerHello,
    WorkerToScheduler,
)

__all__ = [
    "FRONTEND_TO_SCHEDULER",
    "MAX_FRAME_BYTES",
    "SCHEDULER_TO_FRONTEND",
    "SCHEDULER_TO_WORKER",
    "WORKER_TO_SCHEDULER",
    "CodecError",
    "decode",
    "encode",
]

MAX_FRAME_BYTES = 64 << 20

# What a receiver expects: the record types of its direction.
FRONTEND_TO_SCHEDULER: tuple[type[FrontendToScheduler], ...] = get_args(FrontendToScheduler)
SCHEDULER_TO_FRONTEND: tuple[type[SchedulerToFrontend], ...] = get_args(SchedulerToFrontend)
WORKER_TO_SCHEDULER: tuple[type[WorkerToScheduler], ...] = get_args(WorkerToScheduler)
SCHEDULER_TO_WORKER: tuple[type[SchedulerToWorker], ...] = get_args(SchedulerToWorker)

# A tag is never given to another record, not even when its own is gone.
_TAGS: dict[type, int] = {
    FrontendHello: 1,
    Add: 2,
    Abort: 3,
    Finish: 4,
    Ack: 5,
    FrontendBeat: 6,
    Welcome: 20,
    TokenFrame: 21,
    Refused: 22,
    SchedulerBeat: 23,
    WorkerHello: 40,
    Heartbeat: 41,
    WorkerFault: 42,
    StepResult: 43,
    GrammarReady: 44,
    GrammarFailed: 45,
    Reset: 60,
    Shutdown: 61,
    StepPlan: 62,
}
_ENTRY_TAGS: dict[type, int] = {Copy: 1, SetWeights: 2, LoadAdapter: 3, Transfer: 4}

_HEADER = record_form(Header, {})
_MESSAGES = TaggedUnion(_TAGS, _ENTRY_TAGS)
_FRAME_FIELDS = 7

M = TypeVar("M")


def encode(header: Header, message: Message) -> bytes:
    """One frame. Raises CodecError, naming record and field, for a record that breaks its rules."""
    try:
        written = _HEADER.write(header)
    except CodecError as error:
        raise error.within("Header") from None
    tag, fields = _MESSAGES.write(message)
    frame: bytes = msgpack.packb([SCHEMA_VERSION, tag, *written, fields])
    return frame


def decode(
    data: bytes | memoryview, expected: tuple[type[M], ...], max_bytes: int = MAX_FRAME_BYTES
) -> tuple[Header, M]:
    """The header and message of one frame, which must be one of the `expected` records (a direction, see above).

    Columns are read-only views. Raises CodecError, naming record and field, for anything that is not a valid frame.
    """
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > max_bytes:
        raise CodecError("frame", f"has {size} bytes, more than the limit of {max_bytes}")
    frame = _unpack(data, size)
    if type(frame) is not list or not frame or type(frame[0]) is not int:
        raise CodecError("frame", "must be an array that begins with the schema version")
    if frame[0] != SCHEMA_VERSION:
        raise CodecError("frame", f"has schema version {frame[0]}, this side {SCHEMA_VERSION}: run one release")
    if len(frame) != _FRAME_FIELDS:
        raise CodecError("frame", f"must have {_FRAME_FIELDS} fields, not {len(frame)}")
    _, tag, *header, fields = frame
    record = _MESSAGES.record_of(tag)
    if record not in expected:
        wanted = ", ".join(kind.__name__ for kind in expected)
        raise CodecError("frame", f"holds a {record.__name__} where only {wanted} may come")
    try:
        read_header = _HEADER.read(header)
    except CodecError as error:
        raise error.within("Header") from None
    return read_header, _MESSAGES.read_fields(record, fields)


def _unpack(data: bytes | memoryview, size: int) -> Any:
    items = min(size, MAX_ITEMS)
    try:
        return msgpack.unpackb(
            data,
            ext_hook=_refuse_extension,
            max_str_len=min(size, MAX_TEXT_BYTES),
            max_bin_len=size,
            max_array_len=items,
            max_map_len=items,
        )
    except CodecError:
        raise
    except (ValueError, msgpack.exceptions.UnpackException, OverflowError, TypeError, BufferError) as error:
        raise CodecError("frame", f"is not valid msgpack: {error or type(error).__name__}") from None


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise CodecError("frame", f"holds a msgpack extension (type {code}), which no frame has")
