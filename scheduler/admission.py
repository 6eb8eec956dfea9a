"""Which waiting sequence takes a row of which worker, and what it need not compute there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.pool import HolderKind
from proto.messages import Copy
from scheduler.errors import SchedulerError
from scheduler.lifecycle import admit
from scheduler.sequence import Sequence, Status
from scheduler.state import SchedulerState, Worker

if TYPE_CHECKING:
    from scheduler.planner import PlanBuilder

LOOKAHEAD = 16  # how many of a tenant's first sequences may be tried for one plan
LOAD_SLACK = 0.25  # share of a worker's rows by which a cached prefix may outweigh a smaller load


def admit_waiting(state: SchedulerState, builders: list[PlanBuilder]) -> None:
    """Admit in the queue's order. What does not fit may be passed by smaller ones, but only max_bypass times."""
    if not state.waiting or not any(builder.has_room for builder in builders):
        return
    blocked: list[Sequence] = []
    for sequence in state.waiting.candidates(LOOKAHEAD):
        takers = [builder for builder in builders if builder.has_room]
        if not takers:
            break
        now = takers[0].now
        if _waits_for_source(state, sequence) or _waits_for_block(state, sequence, takers, now):
            continue
        takers = [builder for builder in takers if can_admit(builder, sequence)]
        if not takers:
            if sequence.bypassed >= state.config.max_bypass:
                break
            blocked.append(sequence)
            continue
        _take(state, _choose(takers, sequence), sequence)
        for other in blocked:
            other.bypassed += 1
        if any(other.bypassed >= state.config.max_bypass for other in blocked):
            break


def can_admit(builder: PlanBuilder, sequence: Sequence) -> bool:
    """Hysteresis: all known tokens must fit, and one more block for each running row, or it would soon be preempted
    again; a sequence alone needs no reserve. Prompts on their way get half of what they have still to take: about as
    much again comes back from others before they take it."""
    worker = builder.worker
    if sequence.max_length > worker.capacity:
        return False
    hits = cached_blocks(worker, sequence)
    idle = sum(1 for block in hits if block in worker.pool.prefix.idle)
    needed = -(-len(sequence.tokens) // worker.pool.block_size) - len(hits)
    reserve = worker.num_running + worker.blocks_to_come // 2
    return worker.pool.check_free(needed + idle + reserve)


def cached_blocks(worker: Worker, sequence: Sequence) -> list[int]:
    """Blocks of this worker that hold a prefix of the sequence: at most those below its last token's position."""
    pool = worker.pool
    if not sequence.reads_cache or not pool.prefix.block_of:
        return []  # with prefix caching off the index stays empty
    digests = sequence.prefix_digests(sequence.tokens, pool.block_size, worker.weights_version)
    return pool.prefix.match(digests[: (len(sequence.tokens) - 1) // pool.block_size])


def adoptable(worker: Worker, sequence: Sequence) -> bool:
    """Whether its source runs here with everything before its last known token retired."""
    source = sequence.source
    if source is None or source.status is not Status.RUNNING or source.worker != worker.peer:
        return False
    wanted, batch = len(sequence.tokens), worker.batch
    if not sequence.reads_cache or batch.retired[source.row] < wanted - 1 or batch.known[source.row] < wanted:
        return False
    return bool((batch.tokens[source.row, :wanted] == sequence.tokens).all())


def _waits_for_source(state: SchedulerState, sequence: Sequence) -> bool:
    """A sibling waits while the first one computes what they share; that one goes on, or ends and frees it."""
    source = sequence.source
    if source is None or not sequence.reads_cache or len(sequence.tokens) > sequence.num_prompt:
        return False
    if source.status is Status.WAITING:
        return len(source.tokens) == source.num_prompt
    if source.status is not Status.RUNNING:
        return False
    return bool(state.workers[source.worker].batch.retired[source.row] < len(sequence.tokens) - 1)


def _waits_for_block(state: SchedulerState, sequence: Sequence, takers: list[PlanBuilder], now: float) -> bool:
    """Whether a running row is about to fill the next block that it needs; it waits for that a bounded time."""
    if not sequence.reads_cache or not any(b.worker.computing for b in takers):
        return False
    if sequence.held_since is not None and now - sequence.held_since > state.config.block_wait:
        return False
    if not any(_next_digest(builder.worker, sequence) in builder.worker.computing for builder in takers):
        return False
    if sequence.held_since is None:
        sequence.held_since = now
    return True


def _next_digest(worker: Worker, sequence: Sequence) -> bytes | None:
    hits = len(cached_blocks(worker, sequence))
    limit = (len(sequence.tokens) - 1) // worker.pool.block_size
    digests = sequence.prefix_digests(sequence.tokens, worker.pool.block_size, worker.weights_version)
    return digests[hits] if hits < limit else None


def _choose(takers: list[PlanBuilder], sequence: Sequence) -> PlanBuilder:
    """The longest cached prefix among the workers that are not much more loaded than the least loaded one."""
    if len(takers) == 1:
        return takers[0]
    least = min(builder.worker.num_running for builder in takers)
    near = [b for b in takers if b.worker.num_running <= least + LOAD_SLACK * b.worker.max_rows]

    def score(builder: PlanBuilder) -> tuple[int, int]:
        worker = builder.worker
        held = len(sequence.tokens) if adoptable(worker, sequence) else len(cached_blocks(worker, sequence))
        return (-held, worker.num_running)

    return min(near, key=score)


def _take(state: SchedulerState, builder: PlanBuilder, sequence: Sequence) -> None:
    """Give the sequence a row with all the KV that exists for it, and its first chunk."""
    worker = builder.worker
    sequence.weights_version = worker.weights_version
    if adoptable(worker, sequence):
        blocks, shared, computed = _adopt(builder, sequence)
    else:
        blocks = cached_blocks(worker, sequence)
        worker.pool.share(blocks, HolderKind.TABLE)
        shared, computed = len(blocks), len(blocks) * worker.pool.block_size
    if sequence.reads_cache:
        state.totals.prefix_queries += len(sequence.tokens)
        state.totals.prefix_hits += computed
    if len(sequence.tokens) == sequence.num_prompt:
        sequence.cached = computed
    stay = admit(state, sequence, worker, builder.now, blocks=blocks, shared=shared, computed=computed)
    if state.config.prefix_caching and sequence.reads_cache and len(sequence.tokens) - computed > 1:
        digests = sequence.prefix_digests(sequence.tokens, worker.pool.block_size, worker.weights_version)
        for digest in digests[len(blocks) : sequence.num_prompt // worker.pool.block_size]:
            worker.computing.setdefault(digest, stay.number)
    builder.join(stay)


def _adopt(builder: PlanBuilder, sequence: Sequence) -> tuple[list[int], int, int]:
    """Copy-on-write: whole blocks below the last known token by reference, the block that holds it by one copy.

    Returns (blocks, how many of them are shared, positions that need not be computed: all but the last, whose logits
    give the first sample).
    """
    worker, source = builder.worker, sequence.source
    if source is None:
        raise SchedulerError(f"nothing to adopt from: {sequence.tell()}")
    batch, last = worker.batch, len(sequence.tokens) - 1
    whole = last // worker.pool.block_size
    blocks: list[int] = batch.blocks[source.row, :whole].tolist()
    worker.pool.share(blocks, HolderKind.TABLE)
    batch.shared[source.row] = max(int(batch.shared[source.row]), whole)
    if last % worker.pool.block_size:
        own = worker.pool.allocate(1)
        if own is None:
            raise SchedulerError(f"no block to copy to: {sequence.tell()}")
        block = int(batch.blocks[source.row, whole])
        # Copies of one plan have no order: one from a block that this plan fills by a copy goes back to its origin.
        block = next((copy.source for copy in builder.copies if copy.target == block), block)
        builder.copies.append(Copy(group=0, source=block, target=own[0]))
        blocks += own
    return blocks, whole, last
