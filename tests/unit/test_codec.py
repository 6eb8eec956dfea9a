from __future__ import annotations

from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto import codec
from proto import messages as m
from proto.codec import CodecError, decode, encode
from tests.support.records import RECORDS, headers, patient, same

DIRECTIONS = {
    record: direction
    for direction in (
        codec.FRONTEND_TO_SCHEDULER,
        codec.SCHEDULER_TO_FRONTEND,
        codec.WORKER_TO_SCHEDULER,
        codec.SCHEDULER_TO_WORKER,
    )
    for record in direction
}
HEADER = m.Header(session=2**63 - 1, link=2, epoch=3, number=4)
HEARTBEAT = m.Heartbeat(worker="w0", last_plan=7, phase=m.Phase.EXECUTING)


def frame_of(fields: Any, tag: int = 41, schema: Any = m.SCHEMA_VERSION, **changed: Any) -> bytes:
    header = [changed.get(name, 1) for name in ("session", "link", "epoch", "number")]
    packed: bytes = msgpack.packb([schema, tag, *header, fields])
    return packed


def refusal(data: bytes | memoryview, expected: tuple[type, ...] = codec.WORKER_TO_SCHEDULER, **limits: int) -> str:
    with pytest.raises(CodecError) as caught:
        decode(data, expected, **limits)
    return str(caught.value)


def test_every_message_has_a_strategy_and_one_direction() -> None:
    assert set(RECORDS) == set(get_args(m.Message)) == set(DIRECTIONS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_round_trip(record: type) -> None:
    @settings(patient, max_examples=25)
    @given(headers, RECORDS[record])
    def holds(header: m.Header, message: m.Message) -> None:
        data = encode(header, message)
        for form in (data, memoryview(bytearray(data))):
            read_header, read = decode(form, DIRECTIONS[record])
            assert read_header == header
            assert same(read, message)
        for direction in set(DIRECTIONS.values()) - {DIRECTIONS[record]}:
            assert f"holds a {record.__name__} where only" in refusal(data, direction)

    holds()


def test_columns_are_read_only_and_of_fixed_types() -> None:
    plan = m.StepPlan(
        leaves=m.int32([3]), joins=(), entries=(), rows=m.int32(), starts=m.int32(), counts=m.int32(), blocks=()
    )
    _, read = decode(encode(HEADER, plan), codec.SCHEDULER_TO_WORKER)
    assert isinstance(read, m.StepPlan)
    assert read.leaves.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        read.leaves[0] = 1


def test_columns_that_are_not_contiguous_are_written_in_order() -> None:
    abort = m.Abort(sequences=np.arange(1, 9, dtype=np.int64)[::-2])
    _, read = decode(encode(HEADER, abort), codec.FRONTEND_TO_SCHEDULER)
    assert same(read, m.Abort(sequences=m.int64([8, 6, 4, 2])))


def test_a_frame_of_another_schema_names_both_versions() -> None:
    ours = m.SCHEMA_VERSION
    data = frame_of(["w0", 7, 2], schema=ours + 1)
    assert refusal(data) == f"frame: has schema version {ours + 1}, this side {ours}: run one release"
    assert f"schema version {ours + 1}" in refusal(msgpack.packb([ours + 1, "a later frame"]))


def test_size_is_checked_before_anything_is_parsed() -> None:
    assert refusal(b"\xc1" * 101, max_bytes=100) == "frame: has 101 bytes, more than the limit of 100"
    wide = memoryview(np.zeros(100, dtype=np.int64))
    assert "has 800 bytes" in refusal(wide, max_bytes=100)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "frame: is not valid msgpack"),
        (b"\xc1", "frame: is not valid msgpack"),
        (b"\x93\x01", "frame: is not valid msgpack"),
        (frame_of(["w0", 7, 2]) + b"\x00", "frame: is not valid msgpack"),
        (b"\xdd\xff\xff\xff\xff", "frame: is not valid msgpack"),
        (b"\x91" * 5000, "frame: is not valid msgpack"),
        (b"\x81\x01\x02", "frame: is not valid msgpack"),
        (b"\xa1\xff", "frame: is not valid msgpack"),
        (frame_of(msgpack.ExtType(4, b"x")), "frame: holds a msgpack extension (type 4)"),
        (frame_of(msgpack.Timestamp(1, 2)), "Heartbeat: must be the fields of Heartbeat (array), not Timestamp"),
        (b"\x01", "frame: must be an array that begins with the schema version"),
        (msgpack.packb([True, 41]), "frame: must be an array that begins with the schema version"),
        (msgpack.packb([m.SCHEMA_VERSION, 41, 1, 1]), "frame: must have 7 fields, not 4"),
        (frame_of([], tag=99), "unknown tag 99"),
        (frame_of([], tag="41"), "unknown tag '41'"),
        (frame_of({}), "Heartbeat: must be the fields of Heartbeat (array), not dict"),
        (frame_of(["w0", 7]), "Heartbeat: Heartbeat has 6 fields, not 2"),
        (frame_of([b"w0", 7, 2, None, 0, None]), "Heartbeat.worker: must be text, not bytes"),
        (frame_of(["", 7, 2, None, 0, None]), "Heartbeat.worker: must have 1 to 256 characters, not 0"),
        (frame_of(["w0", 7.0, 2, None, 0, None]), "Heartbeat.last_plan: must be an integer, not float"),
        (frame_of(["w0", True, 2, None, 0, None]), "Heartbeat.last_plan: must be an integer, not bool"),
        (frame_of(["w0", -7, 2, None, 0, None]), "Heartbeat.last_plan: must be 0 to"),
        (frame_of(["w0", 7, 9, None, 0, None]), "Heartbeat.phase: is no Phase: 9"),
        (frame_of(["w0", 7, None, None, 0, None]), "Heartbeat.phase: is no Phase: None"),
        (frame_of(["w0", 7, 2], session="x"), "Header.session: must be an integer, not str"),
        (frame_of(["w0", 7, 2], epoch=-1), "Header.epoch: must be 0 to"),
    ],
)
def test_malformed_frames_name_what_is_wrong(data: bytes, problem: str) -> None:
    assert problem in refusal(data)


@pytest.mark.parametrize(
    ("record", "place", "value", "problem"),
    [
        ("Abort", [0], b"1234567", "Abort.sequences: 7 bytes are no whole number of int64 items"),
        ("Abort", [0], [1], "Abort.sequences: must be a int64 column (bin), not list"),
        ("FrontendBeat", [0], {"x": float("nan")}, "FrontendBeat.counters['x']: must be finite, not nan"),
        ("FrontendBeat", [0], {b"x": 1.0}, "FrontendBeat.counters[\"b'x'\"]: must be text, not bytes"),
        ("FrontendBeat", [0], [], "FrontendBeat.counters: must be a map, not list"),
        ("Welcome", [0], float("inf"), "Welcome.heartbeat_timeout: must be finite, not inf"),
        ("Add", [3, 0], float("nan"), "Add.params.temperature: must be finite, not nan"),
        ("Add", [3, 11], b"\0" * 7 + b"\x7f", "Add.params.bias_values: must match the 0 bias_ids, not 1"),
        ("Add", [3, 8], np.int64([-1]).tobytes(), "Add.params.eos_ids: must hold ids from 0"),
        ("Add", [3, 18], 1, "Add.params: SamplingParams has 18 fields, not 19"),
        ("Add", [5, 0, 3], 99, "Add.sequences[0].delivered: 99 is beyond 2 known tokens"),
        ("Add", [5, 0], 99, "Add.sequences[0]: must be the fields of SequenceStart (array), not int"),
        ("Add", [11], "soon", "Add.deadline: must be a number, not str"),
        ("StepPlan", [2, 0], 5, "StepPlan.entries[0]: must be an array of tag and fields, not int"),
        ("StepPlan", [2, 0], [9, []], "StepPlan.entries[0]: unknown tag 9"),
        ("StepPlan", [2, 0, 1, 1], "x", "StepPlan.entries[0].Copy.source: must be an integer, not str"),
        ("StepPlan", [1, 0, 8, 4], 3, "StepPlan.joins[0].params.presence_penalty: must be -2.0 to 2.0, not 3.0"),
        ("StepPlan", [6, 0, 0], b"", "StepPlan.blocks[0].ids: must have 0 entries, the sum of its counts, not 1"),
    ],
)
def test_malformed_fields_are_named(record: str, place: list[int], value: Any, problem: str) -> None:
    message = EXAMPLES[record]
    frame = msgpack.unpackb(encode(HEADER, message))
    node = frame[6]
    for step in place[:-1]:
        node = node[step]
    node[place[-1] : place[-1] + 1] = [value]
    assert problem in refusal(msgpack.packb(frame), DIRECTIONS[type(message)])


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (m.Heartbeat(worker="w", last_plan=np.int32(3), phase=m.Phase.IDLE), "Heartbeat.last_plan: must be an integer"),
        (m.Heartbeat(worker="w", last_plan=2**64, phase=m.Phase.IDLE), "Heartbeat.last_plan: does not fit 64 bits"),
        (m.Heartbeat(worker="w", last_plan=3, phase=2), "Heartbeat.phase: must be a Phase, not int"),
        (m.Abort(sequences=m.int32([1])), "Abort.sequences: must be a one-dimensional int64 column, not int32 [1]"),
        (m.Abort(sequences=m.int64([[1]])), "must be a one-dimensional int64 column, not int64 [1, 1]"),
        (m.Abort(sequences=[1]), "Abort.sequences: must be a one-dimensional int64 column, not list"),
        (m.Shutdown(reason="\ud800"), "Shutdown.reason: holds a lone surrogate"),
        (m.Shutdown(reason="é" * 600_000), "Shutdown.reason: takes 1200000 bytes, more than 1048576"),
        (m.FrontendBeat(counters={str(n): 0.0 for n in range(65_537)}), "counters: has 65537 entries, more than 65536"),
        (m.Copy(group=0, source=1, target=2), "must be one of FrontendHello, Add, "),
    ],
)
def test_records_that_break_the_contract_are_not_written(message: Any, problem: str) -> None:
    with pytest.raises(CodecError) as caught:
        encode(HEADER, message)
    assert problem in str(caught.value)


def test_a_bad_header_is_not_written() -> None:
    with pytest.raises(CodecError, match=r"^Header\.epoch: must be 0 to"):
        encode(m.Header(epoch=-1), HEARTBEAT)


JOIN = m.Join(
    row=0,
    sequence=1,
    task=m.Task.GENERATE,
    tokens=m.int32([5, 6]),
    num_prompt=2,
    computed=0,
    max_length=9,
    seed=2**64 - 1,
    params=m.SamplingParams(),
    logprobs_from=2,
    blocks=(m.int32([4]),),
)
EXAMPLES: dict[str, Any] = {
    "Abort": m.Abort(sequences=m.int64([1])),
    "FrontendBeat": m.FrontendBeat(counters={"x": 1.0}),
    "Welcome": m.Welcome(heartbeat_timeout=2.0),
    "Add": m.Add(
        request_id="r",
        prompt_ids=m.int32([5, 6]),
        params=m.SamplingParams(),
        max_length=9,
        sequences=(m.SequenceStart(sequence=1, seed=0, output_ids=m.int32(), delivered=2),),
    ),
    "StepPlan": m.StepPlan(
        leaves=m.int32(),
        joins=(JOIN,),
        entries=(m.Copy(group=0, source=1, target=2),),
        rows=m.int32([0]),
        starts=m.int32([0]),
        counts=m.int32([2]),
        blocks=(m.NewBlocks(counts=m.int32([1]), ids=m.int32([7])),),
    ),
}

REPLACEMENTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=9),
    st.just([]),
    st.lists(st.integers(-2, 9), max_size=4),
    st.just({}),
    st.just(msgpack.ExtType(1, b"")),
)


def check_decodes_or_refuses(data: bytes) -> None:
    """Whatever the bytes: a valid record, which encodes again and reads the same, or a CodecError."""
    for direction in set(DIRECTIONS.values()):
        try:
            header, message = decode(data, direction)
        except CodecError:
            continue
        again, reread = decode(encode(header, message), direction)
        assert again == header
        assert same(reread, message)


@settings(patient, max_examples=150)
@given(st.data(), st.one_of(*RECORDS.values()))
def test_one_changed_value_is_read_or_refused(data: st.DataObject, message: m.Message) -> None:
    frame = msgpack.unpackb(encode(HEADER, message))
    node = frame
    while True:
        index = data.draw(st.integers(0, len(node) - 1))
        child = node[index]
        if not (isinstance(child, list) and child and data.draw(st.integers(0, 3))):
            break
        node = child
    node[index] = data.draw(REPLACEMENTS)
    check_decodes_or_refuses(msgpack.packb(frame))


@settings(patient, max_examples=60)
@given(st.randoms(use_true_random=False), st.one_of(*RECORDS.values()))
def test_changed_bytes_are_read_or_refused(random: Any, message: m.Message) -> None:
    data = bytearray(encode(HEADER, message))
    for _ in range(10):
        changed = bytearray(data)
        for _ in range(random.randint(1, 3)):
            place = random.randrange(len(changed))
            kind = random.randrange(3)
            changed[place : place + random.randint(0, 4) * (kind != 0)] = random.randbytes(kind and 1)
            if not changed:
                break
        check_decodes_or_refuses(bytes(changed))
        check_decodes_or_refuses(bytes(data[: random.randrange(len(data))]))


@settings(patient, max_examples=200)
@given(st.binary(max_size=64))
def test_random_bytes_are_refused(data: bytes) -> None:
    check_decodes_or_refuses(data)
