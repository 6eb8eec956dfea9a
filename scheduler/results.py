"""Applies a worker's result to the membership that was recorded with its own plan, never to the current one.

Rows that simply went on are applied as columns; one by one only those that stopped, are over, or report more.
"""

from __future__ import annotations

import numpy as np

from proto.messages import FinishReason, Freed, Header, Int32, Logprobs, StepResult
from scheduler.batch import Bools, Stay
from scheduler.errors import LedgerError
from scheduler.lifecycle import end, mark_dirty, register_blocks
from scheduler.queue import OUTPUT_WEIGHT, PROMPT_WEIGHT
from scheduler.sequence import LogprobEntry
from scheduler.state import Flight, SchedulerState, Worker
from scheduler.steady import Piece, Steady, apply_steady, is_steady
from scheduler.timing import note_first_tokens

RATE_SMOOTHING = 0.1  # weight of the newest plan in tokens_per_second


def apply_result(state: SchedulerState, worker: Worker, header: Header, result: StepResult, now: float) -> None:
    """Raises LedgerError when the result does not fit the plan or the books; nothing has been applied then."""
    flight = worker.flights[0] if worker.flights else None
    if flight is None or header.number != flight.number:
        expected = flight.number if flight else "none"
        raise LedgerError(f"result of plan {header.number} arrived, expected {expected}")
    if flight.steady is not None and flight.steady is worker.steady and is_steady(flight.steady, result):
        worker.flights.popleft()
        _apply_steady(state, worker, flight.steady, result)
        _measure(state, worker, flight, result)
        return
    if not np.array_equal(result.rows, flight.rows):
        raise LedgerError(f"plan {flight.number} had rows {flight.rows.tolist()}, its result {result.rows.tolist()}")
    stopping = (result.reasons != FinishReason.NONE) | (result.finite == 0)
    current = worker.batch.stay[flight.rows] == flight.stays
    _check_rows(worker, flight, result, stopping, current)
    _check_freed(worker, flight, result, stopping, current)
    worker.flights.popleft()
    note_first_tokens(state, worker, flight, result, now)
    _advance_columns(state, worker, flight, result, current)
    _add_logprobs(worker, flight, result.logprobs, current)
    _deliver(state, worker, flight, current)
    for index in np.flatnonzero(stopping & current).tolist():
        _end_row(state, worker, flight, result, index, now)
    for stay in flight.leaves:
        del worker.departed[stay.number]
    _measure(state, worker, flight, result)


# --- applying -----------------------------------------------------------------------------------------------------


def _apply_steady(state: SchedulerState, worker: Worker, steady: Steady, result: StepResult) -> None:
    frontends = {frontend.link: frontend for frontend in state.frontends.values()}
    for link, piece in apply_steady(steady, worker.batch, result.tokens):
        frontends[link].pieces.append(piece)
    state.totals.generation_tokens += len(result.tokens)
    state.tenants.charge(worker.batch.tenant[steady.rows], OUTPUT_WEIGHT, 1)


def _advance_columns(state: SchedulerState, worker: Worker, flight: Flight, result: StepResult, current: Bools) -> None:
    """Positions, samples and tokens of all rows whose sequence still has its row."""
    batch = worker.batch
    rows = flight.rows[current]
    retired = flight.starts[current] + flight.counts[current]
    batch.retired[rows] = retired
    batch.sampling[rows] -= flight.samples[current]
    owners = np.repeat(np.arange(len(flight.rows)), result.counts)
    fresh = current[owners]
    sampled = flight.rows[owners[fresh]]
    batch.tokens[sampled, batch.known[sampled]] = result.tokens[fresh]
    batch.known[sampled] += 1
    prompt_end = np.minimum(retired, batch.num_prompt[rows])
    state.totals.prompt_tokens += int(np.maximum(0, prompt_end - flight.starts[current]).sum())
    state.totals.generation_tokens += len(sampled)
    uncharged = np.maximum(0, prompt_end - np.maximum(batch.charged[rows], flight.starts[current]))
    batch.charged[rows] = np.maximum(batch.charged[rows], prompt_end)
    state.tenants.charge(batch.tenant[rows], PROMPT_WEIGHT, uncharged)
    state.tenants.charge(batch.tenant[sampled], OUTPUT_WEIGHT, 1)
    filled = rows[(flight.starts[current] < batch.num_prompt[rows]) & (result.finite[current] != 0)]
    for row in filled.tolist():
        stay = batch.stays[row]
        if stay is not None:
            register_blocks(state, worker, stay, min(int(batch.retired[row]), int(batch.num_prompt[row])))


def _deliver(state: SchedulerState, worker: Worker, flight: Flight, current: Bools) -> None:
    """Plain rows with one new token go out as columns; anything else makes its sequence dirty."""
    batch = worker.batch
    rows = flight.rows[current]
    behind = batch.known[rows] - batch.sent[rows]
    plain = rows[batch.plain[rows] & (behind == 1)]
    for row in rows[~batch.plain[rows] | (behind > 1)].tolist():
        stay = batch.stays[row]
        if stay is not None:
            mark_dirty(state, stay.sequence)
    for frontend in state.frontends.values():
        mine = plain[batch.link[plain] == frontend.link]
        if len(mine):
            firsts = batch.sent[mine]
            piece = Piece(batch.handle[mine], firsts, batch.version[mine], batch.tokens[mine, firsts])
            frontend.pieces.append(piece)
            batch.sent[mine] += 1


def _end_row(state: SchedulerState, worker: Worker, flight: Flight, result: StepResult, index: int, now: float) -> None:
    row = int(flight.rows[index])
    stay = worker.stay_of(int(flight.stays[index]), row)
    sequence, reason = stay.sequence, FinishReason(int(result.reasons[index]))
    if reason is FinishReason.NOT_FINITE:
        worker.batch.registered[row] = worker.batch.limit[row]  # its blocks do not enter the prefix index
        worker.pool.unregister(worker.batch.block_ids(row))
        message = "the model's logits for this sequence held NaN or infinity"
        end(state, sequence, reason, now, cause="not finite", message=message)
        return
    stop_id = int(worker.batch.known_tokens(row)[-1]) if reason is FinishReason.STOP else -1
    end(state, sequence, reason, now, cause=f"worker stop: {reason.name.lower()}", stop_id=stop_id)


def _add_logprobs(worker: Worker, flight: Flight, columns: Logprobs | None, current: Bools) -> None:
    if columns is None:
        return
    top_ids, top_values, at = columns.top_ids.tolist(), columns.top_values.tolist(), 0
    numbers = zip(
        columns.rows.tolist(),
        columns.values.tolist(),
        columns.ranks.tolist(),
        columns.top_counts.tolist(),
        strict=True,
    )
    for index, value, rank, count in numbers:
        last = at + count
        stay = worker.batch.stays[int(flight.rows[index])] if current[index] else None
        if stay is not None:
            entry = LogprobEntry(value=value, rank=rank, top_ids=top_ids[at:last], top_values=top_values[at:last])
            stay.sequence.logprobs.append(entry)
        at = last


def _measure(state: SchedulerState, worker: Worker, flight: Flight, result: StepResult) -> None:
    if result.seconds > 0 and len(flight.rows):
        worker.step_time.observe(int(flight.counts.sum()), result.seconds)
        rate = len(result.tokens) / result.seconds
        state.tokens_per_second += RATE_SMOOTHING * (rate - state.tokens_per_second)
        computed = float(flight.counts.sum()) / result.seconds
        state.computed_per_second += RATE_SMOOTHING * (computed - state.computed_per_second)


# --- the checks that come before anything is applied --------------------------------------------------------------


def _check_rows(worker: Worker, flight: Flight, result: StepResult, stopping: Bools, current: Bools) -> None:
    """Every row sampled what its plan said, and ended only where it may."""
    expected = flight.samples & (result.finite != 0)
    wrong = (result.counts != expected) | stopping
    ends = flight.starts + flight.counts + result.counts
    limits = np.where(current, worker.batch.limit[flight.rows], np.iinfo(np.int32).max)
    wrong |= ends >= limits
    offsets = np.cumsum(result.counts) - result.counts
    for index in np.flatnonzero(wrong).tolist():
        at, count = int(offsets[index]), int(result.counts[index])
        problem = _row_problem(worker, flight, result, index, result.tokens[at : at + count])
        if problem:
            raise LedgerError(f"result of plan {flight.number}, row {flight.rows[index]}: {problem}")


def _row_problem(worker: Worker, flight: Flight, result: StepResult, index: int, tokens: Int32) -> str | None:
    """What is wrong with one row's outcome, or None."""
    stay = worker.stay_of(int(flight.stays[index]), int(flight.rows[index]))
    reason, count = int(result.reasons[index]), len(tokens)
    if stay.stopped:
        return "tokens or an end after it stopped" if count or reason else None
    if not result.finite[index]:
        return None if count == 0 and reason == FinishReason.NOT_FINITE else "not finite, yet it goes on"
    if count != int(flight.samples[index]):
        return f"{count} tokens, expected {int(flight.samples[index])}"
    if reason not in (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH):
        return f"finish reason {reason} is not a worker's to give"
    if reason == FinishReason.STOP:
        params = stay.sequence.params
        return None if count and tokens[-1] in params.eos_ids + params.stop_ids else f"{tokens} is no stop of it"
    complete = int(flight.starts[index] + flight.counts[index]) + count >= stay.sequence.max_length
    if (reason == FinishReason.LENGTH) != complete:
        return f"its length is {'' if complete else 'not '}reached, yet its reason is {reason}"
    return None


def _check_freed(worker: Worker, flight: Flight, result: StepResult, stopping: Bools, current: Bools) -> None:
    """Compare the freed-block report with the tables, then note what was reported.

    A row gives back all that it has when it stops or leaves, and what it gets after it stopped. One that leaves by
    this plan does so before another one joins under its number: both reports are then compared as one.
    """
    if len(result.freed) != 1:
        raise LedgerError(f"result of plan {flight.number} reports {len(result.freed)} KV groups, not 1")
    over: list[tuple[Stay, int]] = []
    for index in np.flatnonzero(stopping | ~current).tolist():
        stay = worker.stay_of(int(flight.stays[index]), int(flight.rows[index]))
        if stay.stopped or stopping[index]:
            over.append((stay, int(flight.told[index])))
    expected: dict[int, list[int]] = {}
    for stay in flight.leaves:
        if not stay.stopped:
            expected[stay.row] = stay.ids[: stay.told]
    for stay, told in over:
        ids = stay.ids or worker.batch.block_ids(stay.row)
        expected[stay.row] = expected.get(stay.row, []) + ids[stay.reported : told]
    expected = {row: ids for row, ids in expected.items() if ids}
    reported = _reported(result.freed[0])
    if expected != reported:
        raise LedgerError(f"plan {flight.number} freed {reported}, expected {expected}")
    for stay, told in over:
        stay.stopped = True
        stay.reported = told


def _reported(freed: Freed) -> dict[int, list[int]]:
    ids, at = freed.ids.tolist(), 0
    rows: dict[int, list[int]] = {}
    for row, count in zip(freed.rows.tolist(), freed.counts.tolist(), strict=True):
        if count:
            rows[row] = rows.get(row, []) + ids[at : at + count]
        at += count
    return rows
