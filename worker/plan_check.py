"""Proves that a plan fits the batch before anything is changed; PlanError says what does not.

Every step waits for this: what a plan does not have is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from proto.messages import Copy, Int32, Join, NewBlocks, StepPlan, Task
from worker.batch import FREE, Batch
from worker.errors import PlanError, UnimplementedError


def check_plan(plan: StepPlan, batch: Batch, *, max_step_tokens: int, vocab_size: int, weights_version: int) -> None:
    """Raises PlanError (UnimplementedError for what is reserved) and changes nothing."""
    if len(plan.leaves):
        _check_leaves(plan.leaves, batch)
    if plan.entries:
        _check_entries(plan, batch)
    joining: set[int] = set()
    for join in plan.joins:
        _check_place(join, batch, plan.leaves, joining)
        _check_reserved(join, weights_version)
        _check_sequence(join, batch, vocab_size)
        joining.add(join.row)
    _check_rows(plan, batch, joining)
    _check_work(plan, batch, max_step_tokens)


def _check_leaves(leaves: Int32, batch: Batch) -> None:
    _check_range(leaves, batch.max_rows, "leaves: row")
    for row in leaves[batch.sequence[leaves] == FREE][:1]:
        raise PlanError(f"leaves: row {row} is empty")
    _check_distinct(leaves, "leaves: row")


def _check_entries(plan: StepPlan, batch: Batch) -> None:
    copies = []
    for entry in plan.entries:
        if not isinstance(entry, Copy):
            raise UnimplementedError(f"entry {type(entry).__name__} is not available in this version")
        if entry.group != 0:
            raise PlanError(f"copy: group {entry.group} does not exist: this worker has group 0 only")
        copies.append((entry.source, entry.target))
    ids = np.asarray(copies, np.int64).reshape(-1, 2)
    _check_range(ids.ravel(), batch.num_blocks, "copy: block")
    _check_distinct(ids[:, 1], "copy: target block")
    for block in np.intersect1d(ids[:, 0], ids[:, 1])[:1]:
        raise PlanError(f"copy: block {block} is source and target")


def _check_place(join: Join, batch: Batch, leaves: Int32, joining: set[int]) -> None:
    row = join.row
    if not 0 <= row < batch.max_rows:
        raise PlanError(f"join: row {row} is outside 0 to {batch.max_rows - 1}")
    if row in joining:
        raise PlanError(f"join: row {row} is given twice")
    if batch.sequence[row] != FREE and row not in leaves:
        raise PlanError(f"join: row {row} is taken by sequence {batch.sequence[row]}")


def _check_reserved(join: Join, weights_version: int) -> None:
    if join.task is not Task.GENERATE:
        raise UnimplementedError(f"join: row {join.row}: task {join.task.name} is not available in this version")
    if join.adapter:
        raise UnimplementedError(f"join: row {join.row}: adapters are not available in this version")
    if join.weights_version not in (0, weights_version):
        raise PlanError(
            f"join: row {join.row}: weights version {join.weights_version}, but {weights_version} is loaded"
        )


def _check_sequence(join: Join, batch: Batch, vocab_size: int) -> None:
    where, known = f"join: row {join.row}:", len(join.tokens)
    if not 0 < join.num_prompt <= known:
        raise PlanError(f"{where} num_prompt {join.num_prompt} is not within its {known} tokens")
    if not 0 <= join.computed < known:
        raise PlanError(f"{where} computed {join.computed} is not below its {known} tokens")
    if not known <= join.max_length <= batch.max_length:
        raise PlanError(f"{where} max_length {join.max_length} is not from {known} to {batch.max_length}")
    if join.sequence < 0:
        raise PlanError(f"{where} sequence {join.sequence} is negative")
    params = join.params
    for ids, name in (
        (join.tokens, "token"),
        (params.eos_ids, "eos id"),
        (params.stop_ids, "stop id"),
        (params.bias_ids, "bias id"),
        (params.allowed_ids, "allowed id"),
        ([id for run in params.bad_ids for id in run], "bad id"),
    ):
        _check_range(np.asarray(ids, np.int64), vocab_size, f"{where} {name}")
    if len(params.bias_ids) != len(params.bias_values):
        raise PlanError(f"{where} {len(params.bias_ids)} bias ids with {len(params.bias_values)} values")
    if len(join.blocks) != 1:
        raise PlanError(f"{where} blocks for {len(join.blocks)} KV groups: this worker has one")
    blocks = join.blocks[0]
    _check_range(blocks, batch.num_blocks, f"{where} block")
    _check_distinct(blocks, f"{where} block")
    if len(blocks) > batch.max_table or len(blocks) * batch.block_size < join.computed:
        raise PlanError(f"{where} {len(blocks)} blocks for {join.computed} computed positions")


def _check_rows(plan: StepPlan, batch: Batch, joining: set[int]) -> None:
    """The plan's rows are taken once leaves and joins are applied, and its columns belong together."""
    if not len(plan.rows) == len(plan.starts) == len(plan.counts) or len(plan.drafts) not in (0, len(plan.rows)):
        raise PlanError("rows, starts, counts and drafts differ in length")
    if len(plan.drafts) and plan.drafts.min() < 0:
        raise PlanError("drafts must not be negative")
    _check_range(plan.rows, batch.max_rows, "rows: row")
    _check_distinct(plan.rows, "rows: row")
    taken = batch.sequence != FREE
    if len(plan.leaves):
        taken[plan.leaves] = False
    if joining:
        taken[list(joining)] = True
    if not taken[plan.rows].all():
        raise PlanError(f"rows: row {plan.rows[~taken[plan.rows]][0]} is empty")
    if len(plan.blocks) != 1:
        raise PlanError(f"new blocks for {len(plan.blocks)} KV groups: this worker has one")
    new = plan.blocks[0]
    if len(new.counts) != len(plan.rows) or new.counts.min(initial=0) < 0 or new.counts.sum() != len(new.ids):
        raise PlanError("new blocks: counts do not match the rows and ids")
    _check_range(new.ids, batch.num_blocks, "new blocks: block")


def _check_work(plan: StepPlan, batch: Batch, max_step_tokens: int) -> None:
    """Positions follow on what is computed, and the tables cover them. Stopped rows are not computed."""
    rows, new = plan.rows, plan.blocks[0]
    computed, known = batch.computed[rows], batch.num_tokens[rows]
    stopped, held, limit = batch.stopped[rows], batch.table_length[rows], batch.limit[rows]
    for join in plan.joins:
        at = rows == join.row
        computed[at], known[at] = join.computed, len(join.tokens)
        stopped[at], held[at] = False, len(join.blocks[0])
        limit[at] = join.max_length
    going, counts = ~stopped, plan.counts.astype(np.int64)
    end = plan.starts + counts
    tables = held + new.counts
    _refuse(plan, going & (plan.starts != computed), lambda i: f"starts at {plan.starts[i]}, computed {computed[i]}")
    _refuse(plan, going & (counts < 1), lambda i: f"count {counts[i]} is below 1")
    _refuse(plan, going & (end > known), lambda i: f"computes to {end[i]}, but {known[i]} tokens are known")
    if len(plan.drafts):
        drafts = plan.drafts
        counts, end = counts + drafts, end + drafts
        _refuse(
            plan,
            going & (drafts > 0) & ((end != known + drafts) | (end >= limit)),
            lambda i: f"has {drafts[i]} drafts where none fit",
        )
    _refuse(
        plan,
        (tables > batch.max_table) | (going & (tables * batch.block_size < end)),
        lambda i: f"{tables[i]} blocks of {batch.block_size} for {end[i]} positions",
    )
    total = int(counts[going].sum())
    if total > max_step_tokens:
        raise PlanError(f"the plan computes {total} tokens, more than {max_step_tokens}")
    _check_new_blocks(plan, batch, new)


def _check_new_blocks(plan: StepPlan, batch: Batch, new: NewBlocks) -> None:
    """A new block is written by its row alone, so no row may hold it, nor may it be given twice."""
    if not len(new.ids):
        return
    _check_distinct(new.ids, "new blocks: block")
    staying = batch.table_length > 0
    staying[plan.leaves] = False
    held = np.zeros(batch.num_blocks + 1, bool)
    held[batch.table[staying]] = True
    for join in plan.joins:
        held[join.blocks[0]] = True
    for block in new.ids[held[new.ids]][:1]:
        raise PlanError(f"new blocks: block {block} is in a row's table")


def _refuse(plan: StepPlan, wrong: NDArray[np.bool_], text: Callable[[int], str]) -> None:
    if wrong.any():
        index = int(wrong.argmax())
        raise PlanError(f"rows: row {plan.rows[index]} {text(index)}")


def _check_range(values: NDArray[np.integer], end: int, what: str) -> None:
    wrong = (values < 0) | (values >= end)
    if wrong.any():
        raise PlanError(f"{what} {values[wrong][0]} is outside 0 to {end - 1}")


def _check_distinct(values: NDArray[np.integer], what: str) -> None:
    if len(values) > 1:
        ordered = np.sort(values)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise PlanError(f"{what} {ordered[1:][twice][0]} is given twice")
