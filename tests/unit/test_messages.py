"""The rules of each record, one broken at a time, and what is reserved for later."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from proto import messages as m
from proto.checks import CHECKS, check, unimplemented
from proto.errors import CodecError
from tests.support.records import patient, served_plans

PARAMS = m.SamplingParams(eos_ids=(2,), bias_ids=(4,), bias_values=(1.5,))
LOGPROBS = m.Logprobs(
    rows=m.int32([0, 0, 1]),
    positions=m.int32([4, 5, 4]),
    values=m.float32([-1, -np.inf, 0]),
    ranks=m.int32([1, 9, 1]),
    top_counts=m.int32([1, 2, 0]),
    top_ids=m.int32([7, 7, 8]),
    top_values=m.float32([-1, -2, -np.inf]),
)
START = m.SequenceStart(sequence=5, seed=1, output_ids=m.int32([9]), delivered=3)
ADD = m.Add(
    request_id="r", prompt_ids=m.int32([1, 2, 3]), params=PARAMS, max_length=8, sequences=(START,), deadline=-1.0
)
END = m.End(sequence=5, reason=m.FinishReason.STOP, length=4, stop_id=2, cached=3)
FRAME = m.TokenFrame(
    sequences=m.int64([5, 6]),
    firsts=m.int32([4, 4]),
    counts=m.int32([2, 1]),
    versions=m.int32([1, 1]),
    tokens=m.int32([7, 8, 9]),
    logprobs=LOGPROBS,
    ends=(END,),
)
FREED = m.Freed(rows=m.int32([1]), counts=m.int32([2]), ids=m.int32([11, 12]))
RESULT = m.StepResult(
    rows=m.int32([0, 1]),
    counts=m.int32([3, 0]),
    tokens=m.int32([7, 8, 9]),
    finite=m.int32([1, 0]),
    reasons=m.int32([0, 5]),
    weights_version=1,
    seconds=0.01,
    freed=(FREED,),
)
JOIN = m.Join(
    row=0,
    sequence=5,
    task=m.Task.GENERATE,
    tokens=m.int32([1, 2, 3]),
    num_prompt=3,
    computed=2,
    max_length=3,
    seed=2**64 - 1,
    params=PARAMS,
    logprobs_from=1,
    blocks=(m.int32([3]), m.int32([])),
)
PLAN = m.StepPlan(
    leaves=m.int32([2]),
    joins=(JOIN,),
    entries=(m.Copy(group=0, source=1, target=2),),
    rows=m.int32([0, 3]),
    starts=m.int32([2, 0]),
    counts=m.int32([1, 5]),
    blocks=(m.NewBlocks(counts=m.int32([0, 1]), ids=m.int32([9])),),
)
GROUP = m.KVGroup(kind="full", block_size=16, num_blocks=100)
HELLO = m.WorkerHello(
    worker="w",
    fingerprint="f",
    model="m",
    groups=(GROUP,),
    max_rows=8,
    max_step_tokens=512,
    max_length=2048,
    vocab_size=100,
    window=1,
    device="cpu",
)
REFUSED = m.Refused(request_id="r", sequences=m.int64([5]), code=m.RefusalCode.OVERLOADED, message="", retry_after=0.5)
BEAT = m.SchedulerBeat(ready=True, reason="", max_length=0, max_queued_tokens=0, metrics={})
GOOD: list[Any] = [
    m.Header(), PARAMS, LOGPROBS, START, ADD, END, FRAME, FREED, RESULT, JOIN, PLAN, GROUP, HELLO, REFUSED, BEAT,
    m.FrontendHello(frontend="f"), m.Abort(sequences=m.int64()), m.Ack(sequences=m.int64([5])),
    m.Finish(sequence=5, length=3, reason=m.FinishReason.STOP), m.FrontendBeat(counters={}),
    m.Welcome(heartbeat_timeout=2.0), m.Heartbeat(worker="w", last_plan=0, phase=m.Phase.LOADING),
    m.GrammarReady(sequences=m.int64([5])), m.GrammarFailed(sequence=5, message=""),
    m.WorkerFault(message=""), m.Reset(), m.Shutdown(reason=""), m.Copy(group=0, source=1, target=2),
    m.SetWeights(version=1, path="/w"), m.LoadAdapter(name="a", path="/a"),
    m.Ledger(rows=m.int32([0]), digests=m.int64([-7])), m.Kept(blocks=m.int32([9]), digests=bytes(16)),
    m.Transfer(group=0, peer="p", blocks=m.int32()), m.NewBlocks(counts=m.int32(), ids=m.int32()),
]  # fmt: skip
GOOD_BY_TYPE = {type(record): record for record in GOOD}


def test_every_record_has_a_check_and_a_good_example() -> None:
    records = {kind for kind in vars(m).values() if isinstance(kind, type) and is_dataclass(kind)}
    assert set(CHECKS) == set(GOOD_BY_TYPE) == records
    for record in GOOD:
        check(record)


@pytest.mark.parametrize(
    ("record", "field", "values"),
    [
        (m.Header, "session", [-1, 2**63]),
        (m.SamplingParams, "temperature", [-0.1, 2.1, float("nan")]),
        (m.SamplingParams, "top_k", [-1, 2**31]),
        (m.Join, "root", [bytes(15), bytes(17)]),
        (m.Kept, "digests", [b"", bytes(15), bytes(32)]),
        (m.SamplingParams, "top_p", [0.0, 1.1, -1.0]),
        (m.SamplingParams, "min_p", [-0.1, 1.1]),
        (m.SamplingParams, "presence_penalty", [-2.1, 2.1]),
        (m.SamplingParams, "frequency_penalty", [-2.1, 2.1]),
        (m.SamplingParams, "repetition_penalty", [0.0, -1.0]),
        (m.SamplingParams, "min_tokens", [-1]),
        (m.SamplingParams, "eos_ids", [(-1,), (1, 2**31)]),
        (m.SamplingParams, "stop_ids", [(3, -1)]),
        (m.SamplingParams, "bias_ids", [(-1,)]),
        (m.SamplingParams, "bias_values", [(), (101.0,), (-101.0,), (float("nan"),)]),
        (m.SamplingParams, "allowed_ids", [(-1,)]),
        (m.SamplingParams, "logprobs", [-2, 21]),
        (m.SamplingParams, "prompt_logprobs", [-2, 21]),
        (m.Logprobs, "rows", [m.int32([-1, 0, 1])]),
        (m.Logprobs, "positions", [m.int32([4, 4, 4]), m.int32([5, 4, 4]), m.int32([0, 5, 4]), m.int32([-1, 5, 4])]),
        (m.Logprobs, "values", [m.float32([0, 0]), m.float32([0, np.nan, 0]), m.float32([np.inf, 0, 0])]),
        (m.Logprobs, "ranks", [m.int32([1, -9, 1]), m.int32([1, 1])]),
        (m.Logprobs, "top_counts", [m.int32([1, -2, 4])]),
        (m.Logprobs, "top_ids", [m.int32([7, 7]), m.int32([7, 7, -8])]),
        (m.Logprobs, "top_values", [m.float32([-1, -2]), m.float32([-1, -2, np.nan])]),
        (m.FrontendHello, "frontend", ["", "x" * 257]),
        (m.SequenceStart, "sequence", [0, -1]),
        (m.SequenceStart, "seed", [-1]),
        (m.SequenceStart, "output_ids", [m.int32([-1])]),
        (m.SequenceStart, "delivered", [0]),
        (m.Add, "request_id", ["", "x" * 257]),
        (m.Add, "prompt_ids", [m.int32(), m.int32([1, -2])]),
        (m.Add, "max_length", [2, 0, 2**31]),
        (m.Add, "sequences", [(), (START, START)]),
        (m.Add, "tenant", ["x" * 257]),
        (m.Add, "adapter", ["x" * 257]),
        (m.Add, "weights_version", [-1]),
        (m.Add, "age", [-0.1]),
        (m.Add, "deaths", [-1]),
        (m.Abort, "sequences", [m.int64([0]), m.int64([4, -1])]),
        (m.Finish, "length", [0]),
        (m.Finish, "reason", [m.FinishReason.NONE]),
        (m.Welcome, "heartbeat_timeout", [0.0, -1.0]),
        (m.End, "sequence", [0]),
        (m.End, "reason", [m.FinishReason.NONE]),
        (m.End, "length", [-1]),
        (m.End, "stop_id", [-2]),
        (m.End, "cached", [-1, 5]),
        (m.TokenFrame, "sequences", [m.int64([5, 0])]),
        (m.TokenFrame, "firsts", [m.int32([4]), m.int32([4, -1])]),
        (m.TokenFrame, "counts", [m.int32([2]), m.int32([4, -1])]),
        (m.TokenFrame, "versions", [m.int32(), m.int32([0, -1])]),
        (m.TokenFrame, "tokens", [m.int32([7, 8]), m.int32([7, 8, -9])]),
        (m.Refused, "sequences", [m.int64()]),
        (m.Refused, "retry_after", [-0.5]),
        (m.SchedulerBeat, "max_queued_tokens", [-1]),
        (m.KVGroup, "kind", ["", "sparse"]),
        (m.KVGroup, "block_size", [0]),
        (m.KVGroup, "num_blocks", [0, 2**31]),
        (m.WorkerHello, "groups", [()]),
        (m.WorkerHello, "fingerprint", [""]),
        (m.WorkerHello, "window", [0]),
        (m.Heartbeat, "last_plan", [-1]),
        (m.Heartbeat, "rejected", [-1]),
        (m.Ledger, "rows", [m.int32([-1])]),
        (m.Ledger, "digests", [m.int64()]),
        (m.Freed, "counts", [m.int32(), m.int32([-1])]),
        (m.Freed, "ids", [m.int32([11]), m.int32([11, -1])]),
        (m.StepResult, "rows", [m.int32([0, -1])]),
        (m.StepResult, "counts", [m.int32([3]), m.int32([2, 1])]),
        (m.StepResult, "tokens", [m.int32([7, 8])]),
        (m.StepResult, "finite", [m.int32([1, 2]), m.int32([1, -1]), m.int32([1])]),
        (m.StepResult, "reasons", [m.int32([0, 9]), m.int32([0, -1])]),
        (m.StepResult, "weights_version", [-1]),
        (m.StepResult, "seconds", [-0.1]),
        (m.StepResult, "kernel_seconds", [-0.1]),
        (m.StepResult, "limit_seconds", [-0.1]),
        (m.GrammarReady, "sequences", [m.int64(), m.int64([0])]),
        (m.GrammarFailed, "sequence", [0]),
        (m.SamplingParams, "grammar", ["gbnf\nroot ::= x", "\nx"]),
        (m.Join, "row", [-1]),
        (m.Join, "sequence", [0]),
        (m.Join, "seed", [-1]),
        (m.Join, "tokens", [m.int32(), m.int32([1, 2, -3])]),
        (m.Join, "num_prompt", [0, 4]),
        (m.Join, "computed", [-1, 3]),
        (m.Join, "max_length", [2]),
        (m.Join, "logprobs_from", [-1]),
        (m.Copy, "target", [1, -1]),
        (m.SetWeights, "version", [0]),
        (m.SetWeights, "path", ["", "a\0b"]),
        (m.LoadAdapter, "name", [""]),
        (m.LoadAdapter, "path", [""]),
        (m.Transfer, "blocks", [m.int32([-1])]),
        (m.NewBlocks, "ids", [m.int32([3])]),
        (m.StepPlan, "leaves", [m.int32([-1])]),
        (m.StepPlan, "rows", [m.int32([3, 3]), m.int32([0, -3])]),
        (m.StepPlan, "starts", [m.int32([2]), m.int32([2, -1])]),
        (m.StepPlan, "counts", [m.int32([1, 0]), m.int32([1, -5])]),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str) else ""),
)
def test_a_broken_rule_names_its_field(record: type, field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(CodecError) as caught:
            check(replace(GOOD_BY_TYPE[record], **{field: value}))
        assert caught.value.path == field
        assert "must" in caught.value.problem


@pytest.mark.parametrize(
    ("broken", "path"),
    [
        (replace(ADD, sequences=(replace(START, delivered=5),)), "sequences[0].delivered"),
        (replace(ADD, max_length=3), "sequences[0].output_ids"),
        (replace(FRAME, logprobs=replace(LOGPROBS, rows=m.int32([0, 0, 2]))), "logprobs.rows"),
        (replace(RESULT, logprobs=replace(LOGPROBS, rows=m.int32([0, 0, 2]))), "logprobs.rows"),
        (replace(JOIN, blocks=(m.int32([1]), m.int32([-1]))), "blocks[1]"),
        (replace(PLAN, blocks=(m.NewBlocks(counts=m.int32([1]), ids=m.int32([9])),)), "blocks[0].counts"),
        (replace(LOGPROBS, top_counts=m.int32([0, 21, 0]), top_ids=m.int32(range(21)),
                 top_values=m.float32([-1] * 21)), "top_counts"),
        (replace(PARAMS, bias_ids=(4, 4), bias_values=(1.0, 1.0)), "bias_ids"),
    ],
)  # fmt: skip
def test_rules_between_fields_and_records(broken: Any, path: str) -> None:
    with pytest.raises(CodecError) as caught:
        check(broken)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (replace(ADD, task=m.Task.EMBED), "task EMBED"),
        (replace(ADD, task=m.Task.SCORE), "task SCORE"),
        (replace(ADD, adapter="a"), "adapters"),
        (replace(HELLO, groups=(GROUP, replace(GROUP, kind="recurrent"))), "KV groups of kind recurrent"),
        (replace(HELLO, groups=(replace(GROUP, kind="window"),)), "KV groups of kind window"),
        (replace(PLAN, joins=(JOIN, replace(JOIN, adapter="a"))), "adapters"),
        (replace(PLAN, entries=(m.SetWeights(version=2, path="/w"),)), "plan entry SetWeights"),
        (replace(PLAN, entries=(m.LoadAdapter(name="a", path="/a"),)), "plan entry LoadAdapter"),
        (replace(PLAN, entries=(m.Transfer(group=0, peer="p", blocks=m.int32()),)), "plan entry Transfer"),
    ],
)
def test_what_is_reserved_is_valid_and_named(message: m.Message, what: str) -> None:
    check(message)
    found = unimplemented(message)
    assert found is not None
    assert found.startswith(what)
    assert found.endswith("not served yet")


def test_what_is_served_is_not_named() -> None:
    for message in (ADD, HELLO, PLAN, RESULT, FRAME, BEAT, m.Reset()):
        assert unimplemented(message) is None


@settings(patient, max_examples=30)
@given(served_plans)
def test_plans_of_served_parts_are_served(plan: m.StepPlan) -> None:
    assert unimplemented(plan) is None


def test_records_are_frozen_and_keyword_only() -> None:
    for kind in CHECKS:
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert all(field.kw_only for field in fields(kind))
        assert hasattr(kind, "__slots__")
