"""Applies a worker's result to the membership that was recorded with its own plan, never to the current one."""

from __future__ import annotations

from collections.abc import Iterator

from proto.messages import FinishReason, Freed, Header, Logprobs, StepResult
from scheduler.errors import LedgerError
from scheduler.lifecycle import end, mark_dirty
from scheduler.sequence import LogprobEntry, Status
from scheduler.state import Flight, Scheduled, SchedulerState, Worker

RATE_SMOOTHING = 0.1  # weight of the newest plan in tokens_per_second


def apply_result(state: SchedulerState, worker: Worker, header: Header, result: StepResult, now: float) -> None:
    """Raises LedgerError when the result does not fit the plan or the books; nothing has been applied then."""
    flight = worker.flights[0] if worker.flights else None
    if flight is None or header.number != flight.number:
        expected = flight.number if flight else "none"
        raise LedgerError(f"result of plan {header.number} arrived, expected {expected}")
    _check_shape(flight, result, len(worker.pools))
    _check_freed(flight, result)
    worker.flights.popleft()
    logprobs = _logprobs_by_row(result.logprobs)
    tokens, at = result.tokens.tolist(), 0
    outcome = zip(flight.rows, result.counts.tolist(), result.reasons.tolist(), result.finite.tolist(), strict=True)
    for index, (entry, count, reason, finite) in enumerate(outcome):
        new = tokens[at : at + count]
        at += count
        _apply_row(state, entry, new, FinishReason(reason), bool(finite), logprobs.get(index, []), now)
    _measure(state, result, len(tokens))


def _apply_row(
    state: SchedulerState,
    entry: Scheduled,
    new: list[int],
    reason: FinishReason,
    finite: bool,
    logprobs: list[LogprobEntry],
    now: float,
) -> None:
    row, sequence = entry.row, entry.row.sequence
    if row.released or sequence.row is not row or sequence.status is not Status.RUNNING:
        return  # ended or aborted meanwhile: its tombstone needed only the freed report
    sequence.retired = entry.start + entry.count
    sequence.sampling -= entry.samples
    sequence.tokens += new
    sequence.logprobs += logprobs
    state.totals.prompt_tokens += _prompt_share(entry, sequence.num_prompt)
    state.totals.generation_tokens += len(new)
    mark_dirty(state, sequence)
    if not finite:
        message = "the model's logits for this sequence held NaN or infinity"
        end(state, sequence, FinishReason.NOT_FINITE, now, cause="not finite", message=message)
    elif reason is not FinishReason.NONE:
        stop_id = new[-1] if reason is FinishReason.STOP else -1
        end(state, sequence, reason, now, cause=f"worker stop: {reason.name.lower()}", stop_id=stop_id)


def _prompt_share(entry: Scheduled, num_prompt: int) -> int:
    """Prompt positions among those that this plan computed."""
    return max(0, min(entry.start + entry.count, num_prompt) - entry.start)


# --- the checks that come before anything is applied --------------------------------------------------------------


def _check_shape(flight: Flight, result: StepResult, num_groups: int) -> None:
    rows = [entry.row.index for entry in flight.rows]
    if result.rows.tolist() != rows:
        raise LedgerError(f"plan {flight.number} had rows {rows}, its result {result.rows.tolist()}")
    if len(result.freed) != num_groups:
        raise LedgerError(f"result of plan {flight.number} reports {len(result.freed)} KV groups, not {num_groups}")
    ended = zip(flight.rows, result.counts.tolist(), result.reasons.tolist(), result.finite.tolist(), strict=True)
    at = 0
    for entry, count, reason, finite in ended:
        problem = _row_problem(entry, count, reason, finite, result.tokens[at : at + count].tolist())
        at += count
        if problem:
            raise LedgerError(f"result of plan {flight.number}, row {entry.row.index}: {problem}")


def _row_problem(entry: Scheduled, count: int, reason: int, finite: int, tokens: list[int]) -> str | None:
    """What is wrong with one row's outcome, or None."""
    sequence = entry.row.sequence
    if entry.row.stopped:
        return "tokens or an end after it stopped" if count or reason else None
    if not finite:
        return None if count == 0 and reason == FinishReason.NOT_FINITE else "not finite, yet it goes on"
    if count != int(entry.samples):
        return f"{count} tokens, expected {int(entry.samples)}"
    if reason not in (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH):
        return f"finish reason {reason} is not a worker's to give"
    complete = (entry.start + entry.count + 1 if count else entry.start + entry.count) >= sequence.max_length
    if (reason == FinishReason.LENGTH) != complete and reason != FinishReason.STOP:
        return f"length {'reached' if complete else 'not reached'}, yet its reason is {reason}"
    if reason == FinishReason.STOP:
        params = sequence.params
        if not tokens or tokens[-1] not in params.eos_ids + params.stop_ids:
            return f"stopped at {tokens}, which is no stop of it"
    return None


def _check_freed(flight: Flight, result: StepResult) -> None:
    """Compare the freed-block report of every group with the tables, then note what was reported."""
    stopped = {
        entry.row.index: entry
        for entry, reason in zip(flight.rows, result.reasons.tolist(), strict=True)
        if reason != FinishReason.NONE
    }
    for group, freed in enumerate(result.freed):
        expected = dict(_expected_freed(flight, stopped, group))
        reported = dict(_reported(freed))
        if expected != reported:
            raise LedgerError(f"plan {flight.number} freed {reported} in group {group}, expected {expected}")
    for entry in flight.rows:
        if entry.row.index in stopped or entry.row.stopped:
            entry.row.stopped = True
            entry.row.reported[:] = entry.sent


def _expected_freed(flight: Flight, stopped: dict[int, Scheduled], group: int) -> Iterator[tuple[int, list[int]]]:
    """(row, blocks) of every row that must give blocks back with this plan.

    A row that leaves by this plan does so before another one joins under its number, so both may report: their
    blocks are then reported one after the other, and compared so.
    """
    left: dict[int, list[int]] = {}
    for row in flight.leaves:
        if not row.stopped and row.sent[group]:
            left[row.index] = row.tables[group].ids[: row.sent[group]]
    for entry in flight.rows:
        row = entry.row
        if row.index in stopped or row.stopped:
            ids = row.tables[group].ids[row.reported[group] : entry.sent[group]]
            if ids:
                left[row.index] = left.get(row.index, []) + ids
    yield from left.items()


def _reported(freed: Freed) -> Iterator[tuple[int, list[int]]]:
    ids, at = freed.ids.tolist(), 0
    rows: dict[int, list[int]] = {}
    for row, count in zip(freed.rows.tolist(), freed.counts.tolist(), strict=True):
        if count:
            rows[row] = rows.get(row, []) + ids[at : at + count]
        at += count
    yield from rows.items()


# --- small helpers ------------------------------------------------------------------------------------------------


def _logprobs_by_row(columns: Logprobs | None) -> dict[int, list[LogprobEntry]]:
    if columns is None:
        return {}
    entries: dict[int, list[LogprobEntry]] = {}
    top_ids, top_values, at = columns.top_ids.tolist(), columns.top_values.tolist(), 0
    numbers: Iterator[tuple[int, float, int, int]] = zip(
        columns.rows.tolist(),
        columns.values.tolist(),
        columns.ranks.tolist(),
        columns.top_counts.tolist(),
        strict=True,
    )
    for row, value, rank, count in numbers:
        entry = LogprobEntry(
            value=value, rank=rank, top_ids=top_ids[at : at + count], top_values=top_values[at : at + count]
        )
        entries.setdefault(row, []).append(entry)
        at += count
    return entries


def _measure(state: SchedulerState, result: StepResult, tokens: int) -> None:
    if result.seconds > 0:
        rate = tokens / result.seconds
        state.tokens_per_second += RATE_SMOOTHING * (rate - state.tokens_per_second)
