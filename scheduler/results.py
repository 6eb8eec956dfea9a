"""Applies a worker's result to the membership that was recorded with its own plan, never to the current one.

Rows that simply went on are applied as columns; one by one only those that stopped, are over, or report more.
"""

from __future__ import annotations

import numpy as np

from proto.messages import FinishReason, Freed, Header, Int32, Int64, Logprobs, StepResult
from scheduler.batch import Bools, RowBatch, Stay
from scheduler.drafts import count_drafts, retire_drafts, within_runs
from scheduler.errors import LedgerError
from scheduler.lifecycle import end_stopped, mark_dirty, register_blocks
from scheduler.queue import OUTPUT_WEIGHT, PROMPT_WEIGHT
from scheduler.sequence import LogprobEntry
from scheduler.state import Flight, SchedulerState, Worker
from scheduler.steady import Piece, Steady, apply_steady, is_steady
from scheduler.timing import note_first_tokens, note_parts

_REASONS = {int(reason): reason for reason in FinishReason}
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
        _measure(state, worker, flight, result, now)
        return
    if not np.array_equal(result.rows, flight.column):
        raise LedgerError(f"plan {flight.number} had rows {flight.rows.tolist()}, its result {result.rows.tolist()}")
    stopping = (result.reasons != FinishReason.NONE) | (result.finite == 0)
    current = worker.batch.stay[flight.rows] == flight.stays
    _check_rows(worker, flight, result, stopping, current)
    _check_freed(worker, flight, result, stopping, current)
    worker.flights.popleft()
    note_first_tokens(state, worker, flight, result, now)
    _advance_columns(state, worker, flight, result, current)
    _add_logprobs(worker, flight, result.logprobs, current)
    _deliver(state, worker, flight.rows if current.all() else flight.rows[current])
    _end_rows(state, worker, flight, result, np.flatnonzero(stopping & current), now)
    for stay in flight.leaves:
        del worker.departed[stay.number]
    _measure(state, worker, flight, result, now)


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
    index = slice(None) if current.all() else np.flatnonzero(current)
    rows, starts = flight.rows[index], flight.starts[index]
    batch.sampling[rows] -= flight.samples[index]
    if len(flight.drafts):
        retire_drafts(batch, flight, result, current)
        sampled = np.repeat(rows, result.counts[index])
        count_drafts(state.totals, worker, result)
    else:
        batch.retired[rows] = flight.ends[index]
        with_token = np.flatnonzero(result.counts)  # one each
        fresh = current[with_token]
        sampled = flight.rows[with_token[fresh]]
        batch.tokens[sampled, batch.known[sampled]] = result.tokens[fresh]
        batch.known[sampled] += 1
    retired = batch.retired[rows]
    state.totals.generation_tokens += len(sampled)
    state.tenants.charge(batch.tenant[sampled], OUTPUT_WEIGHT, 1)
    prefills = np.flatnonzero(starts < batch.num_prompt[rows])
    if len(prefills):
        finite = result.finite[index][prefills] != 0
        _retire_prompts(state, worker, rows[prefills], starts[prefills], retired[prefills], finite)


def _retire_prompts(
    state: SchedulerState, worker: Worker, rows: Int64, starts: Int32, retired: Int32, finite: Bools
) -> None:
    """Prompt positions are charged once, and full blocks of them enter the prefix index."""
    batch = worker.batch
    prompt_end = np.minimum(retired, batch.num_prompt[rows])
    state.totals.prompt_tokens += int((prompt_end - starts).sum())
    charged = batch.charged[rows]
    batch.charged[rows] = np.maximum(charged, prompt_end)
    uncharged = np.maximum(0, prompt_end - np.maximum(charged, starts))
    state.tenants.charge(batch.tenant[rows], PROMPT_WEIGHT, uncharged)
    register_blocks(state, worker, rows[finite], prompt_end[finite])


def _deliver(state: SchedulerState, worker: Worker, rows: Int64) -> None:
    """Plain rows with as many new tokens as one step may bring go out as columns; anything else makes its sequence
    dirty."""
    batch = worker.batch
    sent = batch.sent[rows]
    behind = batch.known[rows] - sent
    plain, most = batch.plain[rows], 1 + worker.hello.max_drafts
    for row in rows[~plain | (behind > most)].tolist():
        mark_dirty(state, batch.stay_in(row).sequence)
    ready = plain & (behind >= 1) & (behind <= most)
    links = batch.link[rows]
    for frontend in state.frontends.values():
        which = np.flatnonzero(ready & (links == frontend.link))
        if len(which):
            frontend.pieces.append(_piece(batch, rows[which], sent[which], behind[which]))
            batch.sent[rows[which]] = batch.known[rows[which]]


def _piece(batch: RowBatch, rows: Int64, firsts: Int32, counts: Int32) -> Piece:
    handles, versions = batch.handle[rows], batch.version[rows]
    if counts.max() == 1:
        return Piece(handles, firsts, versions, batch.tokens[rows, firsts])
    tokens = batch.tokens[np.repeat(rows, counts), np.repeat(firsts, counts) + within_runs(counts)]
    return Piece(handles, firsts, versions, tokens, counts)


def _end_rows(
    state: SchedulerState, worker: Worker, flight: Flight, result: StepResult, indices: Int64, now: float
) -> None:
    if not len(indices):
        return
    batch = worker.batch
    stops: list[tuple[Stay, FinishReason]] = []
    for row, reason in zip(flight.rows[indices].tolist(), result.reasons[indices].tolist(), strict=True):
        stops.append((batch.stay_in(row), _REASONS[reason]))
        if reason == FinishReason.NOT_FINITE:
            batch.registered[row] = batch.limit[row]  # its blocks do not enter the prefix index
            worker.pool.unregister(batch.block_ids(row))
    end_stopped(state, worker, stops, now)


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


def _measure(state: SchedulerState, worker: Worker, flight: Flight, result: StepResult, now: float) -> None:
    if result.seconds > 0 and len(flight.rows):
        note_parts(state.totals.step_seconds, worker, flight, result, now)
        tokens = flight.tokens + int(result.drafts.sum())
        worker.step_time.observe(tokens, result.seconds)
        rate = len(result.tokens) / result.seconds
        state.tokens_per_second += RATE_SMOOTHING * (rate - state.tokens_per_second)
        computed = tokens / result.seconds
        state.computed_per_second += RATE_SMOOTHING * (computed - state.computed_per_second)


# --- the checks that come before anything is applied --------------------------------------------------------------


def _check_rows(worker: Worker, flight: Flight, result: StepResult, stopping: Bools, current: Bools) -> None:
    """Every row sampled what its plan said, and ended only where it may."""
    ends = flight.ends + result.counts
    drafts = flight.drafts if len(flight.drafts) else np.zeros_like(flight.ends)
    if len(result.drafts) and (result.drafts > drafts).any():
        raise LedgerError(f"result of plan {flight.number} has more drafts than were granted")
    sampled = flight.samples & (result.finite != 0)
    special = (result.counts < sampled) | (result.counts > sampled + drafts) | stopping
    special |= (ends >= worker.batch.limit[flight.rows]) & current
    indices = np.flatnonzero(special)
    if not len(indices):
        return
    offsets = np.cumsum(result.counts)[indices].tolist()
    most = flight.samples + drafts
    columns = (result.counts, result.reasons, result.finite, ends, flight.samples, most, flight.rows, flight.stays)
    values = zip(*(column[indices].tolist() for column in columns), strict=True)
    for offset, (count, reason, finite, end, least, limit, row, number) in zip(offsets, values, strict=True):
        last = int(result.tokens[offset - 1]) if count else -1
        stay = worker.stay_of(number, row)
        problem = _row_problem(stay, count, reason, bool(finite), end, (int(least), int(limit)), last)
        if problem:
            raise LedgerError(f"result of plan {flight.number}, row {row}: {problem}")


def _row_problem(
    stay: Stay, count: int, reason: int, finite: bool, end: int, allowed: tuple[int, int], last: int
) -> str | None:
    """What is wrong with one row's outcome, or None. end: its length after this plan; allowed: the least and the most
    tokens that it may bring; last: its newest token."""
    if stay.stopped:
        return "tokens or an end after it stopped" if count or reason else None
    if not finite:
        return None if count == 0 and reason == FinishReason.NOT_FINITE else "not finite, yet it goes on"
    if not allowed[0] <= count <= allowed[1]:
        return f"{count} tokens, expected {allowed[0]} to {allowed[1]}"
    if reason == FinishReason.STOP:
        params = stay.sequence.params
        return None if count and (last in params.eos_ids or last in params.stop_ids) else f"{last} is no stop of it"
    if reason not in (FinishReason.NONE, FinishReason.LENGTH):
        return f"finish reason {reason} is not a worker's to give"
    complete = end >= stay.sequence.max_length
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
    expected: dict[int, bytes] = {}
    for stay in flight.leaves:
        if not stay.stopped and stay.told:
            expected[stay.row] = stay.ids[: stay.told].tobytes()
    for stay, told in over:
        if told > stay.reported:
            ids = stay.ids if len(stay.ids) else worker.batch.blocks[stay.row]
            expected[stay.row] = expected.get(stay.row, b"") + ids[stay.reported : told].tobytes()
    reported = _reported(result.freed[0])
    if expected != reported:
        raise LedgerError(f"plan {flight.number} freed {_ids(reported)}, expected {_ids(expected)}")
    for stay, told in over:
        stay.stopped = True
        stay.reported = told


def _reported(freed: Freed) -> dict[int, bytes]:
    """The ids that each row gave back, int32 after int32: compared as one, which is quicker than one by one."""
    ids, at = freed.ids.tobytes(), 0
    rows: dict[int, bytes] = {}
    for row, count in zip(freed.rows.tolist(), freed.counts.tolist(), strict=True):
        end = at + count * freed.ids.itemsize
        if count:
            rows[row] = rows.get(row, b"") + ids[at:end]
        at = end
    return rows


def _ids(rows: dict[int, bytes]) -> dict[int, list[int]]:
    return {row: np.frombuffer(ids, np.int32).tolist() for row, ids in rows.items()}
