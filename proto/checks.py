"""What must hold in a record whoever looks at it: ranges, lengths that agree, order. No state, no clock.

There is one check for each record type, called whenever proto.codec writes or reads one. Types are already right and
scalar floats finite. Records inside a record are checked on their own before it. Each raises CodecError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from proto import messages as m
from proto.errors import CodecError
from proto.rules import (
    INT32_MAX,
    INT64_MAX,
    check_counts,
    check_handles,
    check_ids,
    check_lengths,
    check_names,
    check_no_negatives,
    check_range,
    largest,
    smallest,
)

MAX_LOGPROBS = 20
# What a worker may say of itself: the scheduler makes tables of these sizes for it.
MAX_BLOCKS = 2**23
MAX_BLOCK_SIZE = 2**16
MAX_ROWS = 2**16
MAX_LENGTH = 2**24
KV_KINDS = ("full", "window", "recurrent")
_LAST_REASON = int(max(m.FinishReason))


def _nothing(record: object) -> None:
    """A record without rules beyond its types."""


def _header(r: m.Header) -> None:
    check_range(r, 0, INT64_MAX, "session", "link", "epoch", "number")


def _sampling_params(r: m.SamplingParams) -> None:
    check_range(r, 0.0, 2.0, "temperature")
    check_range(r, 0, INT32_MAX, "top_k", "min_tokens")
    check_range(r, 0.0, 1.0, "top_p", "min_p")
    check_range(r, -2.0, 2.0, "presence_penalty", "frequency_penalty")
    check_range(r, -1, MAX_LOGPROBS, "logprobs", "prompt_logprobs")
    for name in ("top_p", "repetition_penalty"):
        if getattr(r, name) <= 0:
            raise CodecError(name, f"must be greater than 0, not {getattr(r, name)}")
    check_ids(r, "eos_ids", "stop_ids", "bias_ids", "allowed_ids")
    for ids in r.bad_ids:
        if not ids or min(ids) < 0 or max(ids) > INT32_MAX:
            raise CodecError("bad_ids", f"must hold runs of at least one id from 0 to {INT32_MAX}, not {ids[:8]}")
    if len(r.bias_ids) != len(r.bias_values):
        raise CodecError("bias_values", f"must match the {len(r.bias_ids)} bias_ids, not {len(r.bias_values)}")
    if len(set(r.bias_ids)) != len(r.bias_ids):
        raise CodecError("bias_ids", "must not name a token twice")
    for value in r.bias_values:
        if not -100.0 <= value <= 100.0:
            raise CodecError("bias_values", f"must be -100 to 100, not {value}")
    if r.grammar and r.grammar.partition("\n")[0] not in m.GRAMMAR_KINDS:
        raise CodecError("grammar", f"must begin with one of {', '.join(m.GRAMMAR_KINDS)}, not {r.grammar!r:.80}")


def _logprobs(r: m.Logprobs) -> None:
    check_lengths(r, "rows", "positions", "values", "ranks", "top_counts")
    check_no_negatives(r, "rows", "positions", "ranks", "top_counts", "top_ids")
    check_counts(r.top_counts, r.top_ids, "top_ids")
    check_counts(r.top_counts, r.top_values, "top_values")
    if not len(r.rows):
        return
    if largest(r.top_counts) > MAX_LOGPROBS:
        raise CodecError("top_counts", f"must be at most {MAX_LOGPROBS}, not {largest(r.top_counts)}")
    if smallest(r.positions) < 1 or smallest(r.ranks) < 1:
        raise CodecError("positions", "positions and ranks must be at least 1")
    places = (r.rows.astype(np.int64) << 32) + r.positions
    if not (places[1:] > places[:-1]).all():
        raise CodecError("positions", "must be ordered by row and then by position, each once")
    for name, values in (("values", r.values), ("top_values", r.top_values)):
        # A maximum is NaN if anything is. Minus infinity is a logprob.
        if len(values) and not largest(values) < np.inf:
            raise CodecError(name, f"must not hold {largest(values)}")


def _sequence_start(r: m.SequenceStart) -> None:
    check_range(r, 1, INT64_MAX, "sequence")
    check_range(r, 0, INT64_MAX, "parent")
    check_range(r, 0, 2**64 - 1, "seed")
    check_range(r, 1, INT32_MAX, "delivered")
    check_no_negatives(r, "output_ids")


def _add(r: m.Add) -> None:
    check_names(r, "request_id")
    check_names(r, "tenant", "cache_salt", "adapter", shortest=0)
    check_no_negatives(r, "prompt_ids")
    if not len(r.prompt_ids):
        raise CodecError("prompt_ids", "must hold at least one token")
    if not r.sequences:
        raise CodecError("sequences", "must hold at least one sequence")
    if len({start.sequence for start in r.sequences}) != len(r.sequences):
        raise CodecError("sequences", "must not name a sequence twice")
    check_range(r, len(r.prompt_ids), INT32_MAX, "max_length")
    check_range(r, -INT32_MAX, INT32_MAX, "priority")
    check_range(r, 0, INT32_MAX, "weights_version", "deaths")
    if r.age < 0:
        raise CodecError("age", f"must not be negative, not {r.age}")
    for index, start in enumerate(r.sequences):
        known = len(r.prompt_ids) + len(start.output_ids)
        if known > r.max_length:
            raise CodecError(f"sequences[{index}].output_ids", f"{known} tokens exceed max_length {r.max_length}")
        if start.delivered > known:
            raise CodecError(f"sequences[{index}].delivered", f"{start.delivered} is beyond {known} known tokens")


def _abort_or_ack(r: m.Abort | m.Ack) -> None:
    check_handles(r.sequences)


def _finish(r: m.Finish) -> None:
    check_range(r, 1, INT64_MAX, "sequence")
    check_range(r, 1, INT32_MAX, "length")
    _check_final(r.reason)


def _check_final(reason: m.FinishReason) -> None:
    if reason is m.FinishReason.NONE:
        raise CodecError("reason", "must not be NONE")


def _welcome(r: m.Welcome) -> None:
    if r.heartbeat_timeout <= 0:
        raise CodecError("heartbeat_timeout", f"must be greater than 0, not {r.heartbeat_timeout}")


def _end(r: m.End) -> None:
    check_range(r, 1, INT64_MAX, "sequence")
    check_range(r, 0, INT32_MAX, "length")
    check_range(r, -1, INT32_MAX, "stop_id")
    check_range(r, 0, r.length, "cached")
    if not -1 <= r.queued < math.inf:
        raise CodecError("queued", f"must be -1 or seconds, not {r.queued}")
    _check_final(r.reason)


def _token_frame(r: m.TokenFrame) -> None:
    check_lengths(r, "sequences", "firsts", "counts", "versions")
    check_no_negatives(r, "firsts", "counts", "versions", "tokens")
    check_counts(r.counts, r.tokens, "tokens")
    check_handles(r.sequences)
    _check_logprob_rows(r.logprobs, len(r.sequences))


def _check_logprob_rows(logprobs: m.Logprobs | None, num_rows: int) -> None:
    # Entries are ordered by row: the last one has the largest.
    if logprobs is not None and len(logprobs.rows) and logprobs.rows[-1] >= num_rows:
        raise CodecError("logprobs.rows", f"must be below {num_rows}, not {logprobs.rows[-1]}")


def _refused(r: m.Refused) -> None:
    check_names(r, "request_id")
    check_handles(r.sequences, least=1)
    if r.retry_after is not None and r.retry_after < 0:
        raise CodecError("retry_after", f"must not be negative, not {r.retry_after}")


def _scheduler_beat(r: m.SchedulerBeat) -> None:
    check_range(r, 0, INT64_MAX, "max_length", "max_queued_tokens")


def _kv_group(r: m.KVGroup) -> None:
    if r.kind not in KV_KINDS:
        raise CodecError("kind", f"must be one of {', '.join(KV_KINDS)}, not {r.kind!r:.80}")
    check_range(r, 1, MAX_BLOCK_SIZE, "block_size")
    check_range(r, 1, MAX_BLOCKS, "num_blocks")


def _worker_hello(r: m.WorkerHello) -> None:
    check_names(r, "worker", "fingerprint", "model", "device")
    if not r.groups:
        raise CodecError("groups", "must hold at least one KV group")
    check_range(r, 1, INT32_MAX, "max_step_tokens", "vocab_size", "window")
    check_range(r, 1, MAX_ROWS, "max_rows")
    check_range(r, 1, MAX_LENGTH, "max_length")
    check_range(r, 0, INT32_MAX, "max_drafts")


def _ledger(r: m.Ledger) -> None:
    check_lengths(r, "rows", "digests")
    check_no_negatives(r, "rows")


def _heartbeat(r: m.Heartbeat) -> None:
    check_names(r, "worker")
    check_range(r, 0, INT64_MAX, "last_plan", "rejected")


def _kept(r: m.Kept) -> None:
    check_no_negatives(r, "blocks")
    if len(r.blocks) > m.MAX_KEPT:
        raise CodecError("blocks", f"must be at most {m.MAX_KEPT}, not {len(r.blocks)}")
    if len(r.digests) != m.DIGEST_BYTES * len(r.blocks):
        raise CodecError("digests", f"must have {m.DIGEST_BYTES} bytes for each of {len(r.blocks)} blocks")
    if len(np.unique(r.blocks)) != len(r.blocks):
        raise CodecError("blocks", "must not name a block twice")


def _freed(r: m.Freed) -> None:
    check_lengths(r, "rows", "counts")
    check_no_negatives(r, "rows", "counts", "ids")
    check_counts(r.counts, r.ids, "ids")


def _grammar_failed(r: m.GrammarFailed) -> None:
    check_range(r, 1, INT64_MAX, "sequence")


def _step_result(r: m.StepResult) -> None:
    check_lengths(r, "rows", "counts", "finite", "reasons")
    check_no_negatives(r, "rows", "counts", "tokens", "finite", "reasons")
    check_counts(r.counts, r.tokens, "tokens")
    check_range(r, 0, INT32_MAX, "weights_version")
    for name in ("seconds", "kernel_seconds", "limit_seconds"):
        if getattr(r, name) < 0:
            raise CodecError(name, f"must not be negative, not {getattr(r, name)}")
    _check_logprob_rows(r.logprobs, len(r.rows))
    if len(r.drafts):
        check_lengths(r, "rows", "drafts")
        check_no_negatives(r, "drafts")
        if (r.counts > r.drafts + 1).any():
            raise CodecError("counts", "must be at most one more than the row's drafts")
    if not len(r.rows):
        return
    if largest(r.reasons) > _LAST_REASON:
        raise CodecError("reasons", f"must be 0 to {_LAST_REASON}, not {largest(r.reasons)}")
    if largest(r.finite) > 1:
        raise CodecError("finite", f"must be 0 or 1, not {largest(r.finite)}")
    if not smallest(r.finite) and r.counts[r.finite == 0].any():
        raise CodecError("counts", "must be 0 for a row that is not finite")


def _join(r: m.Join) -> None:
    check_range(r, 0, INT32_MAX, "row", "weights_version", "logprobs_from")
    check_range(r, 1, INT64_MAX, "sequence")
    check_range(r, 0, 2**64 - 1, "seed")
    check_names(r, "adapter", shortest=0)
    check_no_negatives(r, "tokens")
    if not len(r.tokens):
        raise CodecError("tokens", "must hold at least one token")
    check_range(r, 1, len(r.tokens), "num_prompt")
    check_range(r, 0, len(r.tokens) - 1, "computed")
    check_range(r, len(r.tokens), INT32_MAX, "max_length")
    if len(r.root) not in (0, m.DIGEST_BYTES):
        raise CodecError("root", f"must have {m.DIGEST_BYTES} bytes or none, not {len(r.root)}")
    for index, ids in enumerate(r.blocks):
        if len(ids) and smallest(ids) < 0:
            raise CodecError(f"blocks[{index}]", f"must not be negative, not {smallest(ids)}")


def _copy(r: m.Copy) -> None:
    check_range(r, 0, INT32_MAX, "group", "source", "target")
    if r.source == r.target:
        raise CodecError("target", f"must not be the source, block {r.source}")


def _set_weights(r: m.SetWeights) -> None:
    check_range(r, 1, INT32_MAX, "version")
    _check_path(r.path)


def _load_adapter(r: m.LoadAdapter) -> None:
    check_names(r, "name")
    _check_path(r.path)


def _check_path(path: str) -> None:
    if not path or "\0" in path:
        raise CodecError("path", "must be a path, not empty and without a NUL")


def _transfer(r: m.Transfer) -> None:
    check_range(r, 0, INT32_MAX, "group")
    check_names(r, "peer")
    check_no_negatives(r, "blocks")


def _new_blocks(r: m.NewBlocks) -> None:
    check_no_negatives(r, "counts", "ids")
    check_counts(r.counts, r.ids, "ids")


def _step_plan(r: m.StepPlan) -> None:
    check_lengths(r, "rows", "starts", "counts")
    check_no_negatives(r, "leaves", "rows", "starts", "counts")
    num_rows = len(r.rows)
    if len(r.drafts):
        check_lengths(r, "rows", "drafts")
        check_no_negatives(r, "drafts")
    for group, new in enumerate(r.blocks):
        if len(new.counts) != num_rows:
            raise CodecError(f"blocks[{group}].counts", f"must have one entry for each of {num_rows} rows")
    if num_rows and not smallest(r.counts):
        raise CodecError("counts", "must be at least 1: a row that computes nothing is not in the plan")
    ordered = (r.rows[1:] > r.rows[:-1]).all()  # as in most plans, and quicker to see than that none comes twice
    if not ordered and len(set(r.rows.tolist())) != num_rows:
        raise CodecError("rows", "must not name a row twice")


CHECKS: dict[type, Callable[[Any], None]] = {
    m.Header: _header,
    m.SamplingParams: _sampling_params,
    m.Logprobs: _logprobs,
    m.FrontendHello: lambda r: check_names(r, "frontend"),
    m.SequenceStart: _sequence_start,
    m.Add: _add,
    m.Abort: _abort_or_ack,
    m.Finish: _finish,
    m.Ack: _abort_or_ack,
    m.FrontendBeat: _nothing,
    m.Welcome: _welcome,
    m.End: _end,
    m.TokenFrame: _token_frame,
    m.Refused: _refused,
    m.SchedulerBeat: _scheduler_beat,
    m.KVGroup: _kv_group,
    m.WorkerHello: _worker_hello,
    m.Ledger: _ledger,
    m.Kept: _kept,
    m.Heartbeat: _heartbeat,
    m.WorkerFault: _nothing,
    m.Freed: _freed,
    m.StepResult: _step_result,
    m.GrammarReady: lambda r: check_handles(r.sequences, least=1),
    m.GrammarFailed: _grammar_failed,
    m.Reset: _nothing,
    m.Shutdown: _nothing,
    m.Join: _join,
    m.Copy: _copy,
    m.SetWeights: _set_weights,
    m.LoadAdapter: _load_adapter,
    m.Transfer: _transfer,
    m.NewBlocks: _new_blocks,
    m.StepPlan: _step_plan,
}


def check(record: object) -> None:
    """Raises CodecError for a record that breaks its own rules; records inside it are not looked at."""
    CHECKS[type(record)](record)


def unimplemented(message: m.Message) -> str | None:
    """What in a valid message is reserved for later, in words for the sender; None if all of it is served."""
    if isinstance(message, m.Add):
        return _unserved_request(message.task, message.adapter)
    if isinstance(message, m.WorkerHello):
        kinds = [group.kind for group in message.groups if group.kind != "full"]
        return f"KV groups of kind {kinds[0]} are not served yet" if kinds else None
    if isinstance(message, m.StepPlan):
        return _first(_unserved_parts(message))
    return None


def _unserved_parts(plan: m.StepPlan) -> Iterable[str | None]:
    for join in plan.joins:
        yield _unserved_request(join.task, join.adapter)
    for entry in plan.entries:
        if not isinstance(entry, m.Copy):
            yield f"plan entry {type(entry).__name__} is not served yet"


def _unserved_request(task: m.Task, adapter: str) -> str | None:
    if task is not m.Task.GENERATE:
        return f"task {task.name} is not served yet"
    if adapter:
        return "adapters are not served yet"
    return None


def _first(found: Iterable[str | None]) -> str | None:
    return next((what for what in found if what), None)
