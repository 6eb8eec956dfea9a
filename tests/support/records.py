"""Hypothesis strategies for valid records of every type, and a comparison of records that hold columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from proto import messages as m
from proto.checks import MAX_BLOCKS, MAX_LENGTH, MAX_ROWS

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

# Time says nothing about the code where the machine is busy with other tests.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

small = st.integers(0, 5)
ids = st.integers(0, INT32_MAX)
handles = st.integers(1, INT64_MAX)
names = st.text(min_size=1, max_size=12)
maybe_names = st.just("") | names
paths = names.map(lambda text: text.replace("\0", "/"))
finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(0, 1e9)
counters = st.dictionaries(st.text(max_size=20), finite, max_size=3)
ends = st.sampled_from([reason for reason in m.FinishReason if reason != m.FinishReason.NONE])


def same(left: Any, right: Any) -> bool:
    """Whether two records are of one type and equal, columns entry by entry and dtype by dtype."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if is_dataclass(left):
        return all(same(getattr(left, field.name), getattr(right, field.name)) for field in fields(left))
    return bool(left == right)


def columns(item: st.SearchStrategy[int], size: int | None = None, least: int = 0) -> st.SearchStrategy[m.Int32]:
    most = 6 if size is None else size
    return st.lists(item, min_size=least if size is None else size, max_size=most).map(m.int32)


def handle_columns(size: int | None = None, least: int = 0) -> st.SearchStrategy[m.Int64]:
    most = 6 if size is None else size
    return st.lists(handles, min_size=least if size is None else size, max_size=most).map(m.int64)


@st.composite
def ledgers(draw: st.DrawFn) -> m.Ledger:
    rows = draw(columns(ids))
    return m.Ledger(rows=rows, digests=draw(handle_columns(len(rows))))


@st.composite
def kept(draw: st.DrawFn) -> m.Kept:
    blocks = draw(distinct(draw(small)))
    size = m.DIGEST_BYTES * len(blocks)
    return m.Kept(blocks=blocks, digests=draw(st.binary(min_size=size, max_size=size)))


def tuples(item: st.SearchStrategy[Any], least: int = 0, most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(item, min_size=least, max_size=most).map(tuple)


def distinct(size: int) -> st.SearchStrategy[m.Int32]:
    return st.lists(ids, min_size=size, max_size=size, unique=True).map(m.int32)


def logprob_values(size: int) -> st.SearchStrategy[m.Float32]:
    value = st.floats(max_value=0.0, allow_nan=False, width=32)
    return st.lists(value, min_size=size, max_size=size).map(m.float32)


def counted(draw: Callable[[Any], Any], size: int, least: int = 0) -> tuple[m.Int32, m.Int32]:
    """A column of counts and the flat column that it describes."""
    counts = draw(columns(st.integers(least, 4), size))
    return counts, draw(columns(ids, int(counts.sum())))


@st.composite
def logprobs(draw: Any, num_rows: int) -> m.Logprobs:
    place = st.tuples(st.integers(0, max(num_rows - 1, 0)), st.integers(1, 9))
    places = sorted(draw(st.sets(place, max_size=6 if num_rows else 0)))
    counts, top_ids = counted(draw, len(places))
    return m.Logprobs(
        rows=m.int32([row for row, _ in places]),
        positions=m.int32([position for _, position in places]),
        values=draw(logprob_values(len(places))),
        ranks=draw(columns(st.integers(1, INT32_MAX), len(places))),
        top_counts=counts,
        top_ids=top_ids,
        top_values=draw(logprob_values(len(top_ids))),
    )


grammars = st.just("") | st.builds("{}\n{}".format, st.sampled_from(m.GRAMMAR_KINDS), st.text(max_size=20))


@st.composite
def sampling_params(draw: Any) -> m.SamplingParams:
    bias = draw(st.dictionaries(ids, st.floats(-100, 100), max_size=3))
    return m.SamplingParams(
        temperature=draw(st.floats(0, 2)),
        top_k=draw(ids),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.floats(0, 1e6, exclude_min=True)),
        min_tokens=draw(ids),
        eos_ids=draw(tuples(ids)),
        stop_ids=draw(tuples(ids)),
        bias_ids=tuple(bias),
        bias_values=tuple(bias.values()),
        allowed_ids=draw(tuples(ids)),
        logprobs=draw(st.integers(-1, 20)),
        prompt_logprobs=draw(st.integers(-1, 20)),
        grammar=draw(grammars),
    )


@st.composite
def adds(draw: Any) -> m.Add:
    prompt_ids = draw(columns(ids, least=1))
    sequences = []
    for handle in draw(st.lists(handles, min_size=1, max_size=3, unique=True)):
        output_ids = draw(columns(ids))
        delivered = draw(st.integers(1, len(prompt_ids) + len(output_ids)))
        seed = draw(st.integers(0, 2**64 - 1))
        start = m.SequenceStart(sequence=handle, seed=seed, output_ids=output_ids, delivered=delivered)
        sequences.append(start)
    longest = len(prompt_ids) + max(len(start.output_ids) for start in sequences)
    return m.Add(
        request_id=draw(names),
        task=draw(st.sampled_from(m.Task)),
        prompt_ids=prompt_ids,
        params=draw(sampling_params()),
        max_length=draw(st.integers(longest, INT32_MAX)),
        sequences=tuple(sequences),
        priority=draw(st.integers(-100, 100)),
        tenant=draw(maybe_names),
        adapter=draw(maybe_names),
        weights_version=draw(ids),
        deadline=draw(st.none() | finite),
        age=draw(seconds),
        deaths=draw(small),
    )


@st.composite
def token_frames(draw: Any) -> m.TokenFrame:
    size = draw(small)
    counts, tokens = counted(draw, size)
    length = st.integers(0, INT32_MAX)
    end = length.flatmap(
        lambda length: st.builds(
            m.End,
            sequence=handles,
            reason=ends,
            length=st.just(length),
            stop_id=st.integers(-1, INT32_MAX),
            cached=st.integers(0, length),
            queued=st.floats(0, 1e6) | st.just(-1.0),
            message=st.text(max_size=9),
        )
    )
    return m.TokenFrame(
        sequences=draw(handle_columns(size)),
        firsts=draw(columns(ids, size)),
        counts=counts,
        versions=draw(columns(ids, size)),
        tokens=tokens,
        logprobs=draw(st.none() | logprobs(size)),
        ends=draw(tuples(end)),
    )


@st.composite
def step_results(draw: Any) -> m.StepResult:
    size = draw(small)
    finite_flags = draw(columns(st.integers(0, 1), size))
    counts = draw(columns(small, size)) * finite_flags
    freed = []
    for num_freed in draw(st.lists(small, max_size=2)):
        freed_counts, freed_ids = counted(draw, num_freed)
        freed.append(m.Freed(rows=draw(columns(ids, num_freed)), counts=freed_counts, ids=freed_ids))
    return m.StepResult(
        rows=draw(columns(ids, size)),
        counts=counts,
        tokens=draw(columns(ids, int(counts.sum()))),
        finite=finite_flags,
        reasons=draw(columns(st.sampled_from(m.FinishReason), size)),
        weights_version=draw(ids),
        seconds=draw(seconds),
        freed=tuple(freed),
        logprobs=draw(st.none() | logprobs(size)),
        kernel_seconds=draw(seconds),
        limit_seconds=draw(seconds),
    )


@st.composite
def joins(draw: Any, task: st.SearchStrategy[m.Task], reserved: st.SearchStrategy[str]) -> m.Join:
    tokens = draw(columns(ids, least=1))
    return m.Join(
        row=draw(ids),
        sequence=draw(handles),
        task=draw(task),
        tokens=tokens,
        num_prompt=draw(st.integers(1, len(tokens))),
        computed=draw(st.integers(0, len(tokens) - 1)),
        max_length=draw(st.integers(len(tokens), INT32_MAX)),
        seed=draw(st.integers(0, 2**64 - 1)),
        params=draw(sampling_params()),
        logprobs_from=draw(ids),
        blocks=draw(tuples(columns(ids), most=2)),
        adapter=draw(reserved),
        weights_version=draw(ids),
        root=draw(st.just(b"") | st.binary(min_size=m.DIGEST_BYTES, max_size=m.DIGEST_BYTES)),
    )


served_joins = joins(st.just(m.Task.GENERATE), st.just(""))
any_joins = joins(st.sampled_from(m.Task), maybe_names)
copies = st.lists(ids, min_size=3, max_size=3, unique=True).map(
    lambda three: m.Copy(group=three[0], source=three[1], target=three[2])
)
reserved_entries = st.one_of(
    st.builds(m.SetWeights, version=st.integers(1, INT32_MAX), path=paths),
    st.builds(m.LoadAdapter, name=names, path=paths),
    st.builds(m.Transfer, group=ids, peer=names, blocks=columns(ids)),
)


@st.composite
def step_plans(draw: Any, join: st.SearchStrategy[m.Join], entry: st.SearchStrategy[Any]) -> m.StepPlan:
    size = draw(small)
    groups = [counted(draw, size) for _ in range(draw(st.integers(0, 2)))]
    return m.StepPlan(
        leaves=draw(columns(ids)),
        joins=draw(tuples(join, most=2)),
        entries=draw(tuples(entry)),
        rows=draw(distinct(size)),
        starts=draw(columns(ids, size)),
        counts=draw(columns(st.integers(1, INT32_MAX), size)),
        blocks=tuple(m.NewBlocks(counts=counts, ids=flat) for counts, flat in groups),
    )


served_plans = step_plans(served_joins, copies)

groups = st.builds(
    m.KVGroup,
    kind=st.sampled_from(["full", "window", "recurrent"]),
    block_size=st.integers(1, 64),
    num_blocks=st.integers(1, MAX_BLOCKS),
)
sizes = st.integers(1, INT32_MAX)

RECORDS: dict[type, st.SearchStrategy[Any]] = {
    m.FrontendHello: st.builds(m.FrontendHello, frontend=names),
    m.Add: adds(),
    m.Abort: st.builds(m.Abort, sequences=handle_columns()),
    m.Finish: st.builds(m.Finish, sequence=handles, length=sizes, reason=ends),
    m.Ack: st.builds(m.Ack, sequences=handle_columns()),
    m.FrontendBeat: st.builds(m.FrontendBeat, counters=counters),
    m.Welcome: st.builds(m.Welcome, heartbeat_timeout=st.floats(0.001, 1e6)),
    m.TokenFrame: token_frames(),
    m.Refused: st.builds(
        m.Refused,
        request_id=names,
        sequences=handle_columns(least=1),
        code=st.sampled_from(m.RefusalCode),
        message=st.text(max_size=20),
        retry_after=st.none() | seconds,
    ),
    m.SchedulerBeat: st.builds(
        m.SchedulerBeat,
        ready=st.booleans(),
        reason=st.text(max_size=20),
        max_length=ids,
        max_queued_tokens=st.integers(0, INT64_MAX),
        metrics=counters,
        frontend_totals=counters,
    ),
    m.WorkerHello: st.builds(
        m.WorkerHello,
        worker=names,
        fingerprint=names,
        model=names,
        groups=tuples(groups, least=1),
        max_rows=st.integers(1, MAX_ROWS),
        max_step_tokens=sizes,
        max_length=st.integers(1, MAX_LENGTH),
        vocab_size=sizes,
        window=sizes,
        device=names,
    ),
    m.Heartbeat: st.builds(
        m.Heartbeat,
        worker=names,
        last_plan=st.integers(0, INT64_MAX),
        phase=st.sampled_from(m.Phase),
        ledger=st.none() | ledgers(),
        rejected=st.integers(0, INT64_MAX),
        kept=st.none() | kept(),
    ),
    m.WorkerFault: st.builds(m.WorkerFault, message=st.text(max_size=20), executing=st.booleans()),
    m.StepResult: step_results(),
    m.GrammarReady: st.builds(m.GrammarReady, sequences=handle_columns(least=1)),
    m.GrammarFailed: st.builds(m.GrammarFailed, sequence=handles, message=st.text(max_size=20)),
    m.Reset: st.builds(m.Reset, keep=st.booleans()),
    m.Shutdown: st.builds(m.Shutdown, reason=st.text(max_size=20)),
    m.StepPlan: step_plans(any_joins, copies | reserved_entries),
}

header_number = st.integers(0, INT64_MAX)
headers = st.builds(m.Header, session=header_number, link=header_number, epoch=header_number, number=header_number)
