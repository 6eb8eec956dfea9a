"""Which waiting sequence takes a row of which worker, and what it need not compute there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from proto.messages import Copy, Int32, int32
from scheduler.errors import SchedulerError
from scheduler.lifecycle import admit
from scheduler.quarantine import isolated_worker, may_join, waiting_suspects
from scheduler.sequence import Sequence, Status
from scheduler.state import Link, SchedulerState, Worker

if TYPE_CHECKING:
    from scheduler.planner import PlanBuilder

LOOKAHEAD = 16  # how many of a tenant's first sequences may be passed over in one plan
MAX_PASSED = 128  # the same for all tenants together
LOAD_SLACK = 0.25  # share of a worker's rows by which a cached prefix may outweigh a smaller load
KEPT_SECONDS = 1.0  # from a worker's hello or first beat in which what is to be resumed waits for what it kept


@dataclass(slots=True)
class Offer:
    """What one worker has for one waiting sequence. hits: its blocks that hold a prefix of the sequence, at most
    those below the last token's position; next_digest: of the first block after them, b"" when there is none below.
    mostly: whether they are most of what there is to hold."""

    builder: PlanBuilder
    hits: list[int]
    next_digest: bytes
    mostly: bool

    @property
    def worker(self) -> Worker:
        """The worker."""
        return self.builder.worker


def admit_waiting(state: SchedulerState, builders: list[PlanBuilder]) -> None:
    """Admit in the queue's order. What does not fit may be passed by smaller ones, but only max_bypass times."""
    if not state.waiting or not any(builder.has_room for builder in builders):
        return
    blocked: list[Sequence] = []
    candidates = state.waiting.candidates(LOOKAHEAD, MAX_PASSED)
    isolated = None
    if state.suspects:
        isolated = isolated_worker(state)
        # First, whatever their place: a worker is kept free for them, so that what stands before them cannot go on.
        candidates = chain(waiting_suspects(state), candidates)
    for sequence in candidates:
        takers = [builder for builder in builders if builder.has_room]
        if not takers:
            break
        if state.suspects:
            takers = [builder for builder in takers if may_join(sequence, builder.worker, isolated)]
            if not takers:
                continue
        if _waits_for_source(state, sequence):
            continue
        offers = [_look(builder, sequence) for builder in takers]
        if _waits_for_block(state, sequence, offers, takers[0].now):
            continue
        if _waits_for_kept(state, sequence, offers, takers[0].now):
            continue
        offers = [offer for offer in offers if can_admit(offer, sequence)]
        if not offers:
            if sequence.bypassed >= state.config.max_bypass:
                break
            blocked.append(sequence)
            continue
        _take(state, _choose(offers, sequence), sequence)
        for other in blocked:
            other.bypassed += 1
        if any(other.bypassed >= state.config.max_bypass for other in blocked):
            break


def can_admit(offer: Offer, sequence: Sequence) -> bool:
    """Hysteresis: all known tokens must fit, and one more block for each running row, or it would soon be preempted
    again; a sequence alone needs no reserve. Prompts on their way get half of what they have still to take: about as
    much again comes back from others before they take it."""
    worker, pool = offer.worker, offer.worker.pool
    if sequence.max_length > worker.capacity:
        return False
    if adoptable(worker, sequence):
        needed, idle = 1, 0  # all but the block of its last known token are held already
    else:
        needed = -(-len(sequence.tokens) // pool.block_size) - len(offer.hits)
        idle = pool.idle.count_in(int32(offer.hits)) if offer.hits else 0
    reserve = worker.num_running + offer.builder.blocks_to_come // 2
    return needed + idle + reserve <= pool.num_free


def _look(builder: PlanBuilder, sequence: Sequence) -> Offer:
    """One look into the worker's prefix index."""
    if not sequence.reads_cache or not builder.state.config.prefix_caching:
        return Offer(builder, [], b"", mostly=False)
    hits, usable = _hits(builder.worker, sequence)
    following = sequence.digests[len(hits)] if len(hits) < usable else b""
    return Offer(builder, hits, following, mostly=_are_most(hits, usable))


def _hits(worker: Worker, sequence: Sequence) -> tuple[list[int], int]:
    """The worker's blocks that hold a prefix of the sequence, and how many there can be: below the last token's
    position."""
    pool = worker.pool
    digests = sequence.prefix_digests(sequence.tokens, pool.block_size, worker.weights_version)
    usable = (len(sequence.tokens) - 1) // pool.block_size
    return pool.prefix.match(digests, usable), usable


def _are_most(hits: list[int], usable: int) -> bool:
    return 2 * len(hits) >= usable


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
    """A sibling or fork waits while its source computes what they share; that one goes on, or ends and frees it. For a
    source that waits too only when that one's turn comes first."""
    source = sequence.source
    if source is None or not sequence.reads_cache or len(sequence.tokens) > sequence.num_prompt:
        return False
    if source.status is Status.WAITING:
        return len(source.tokens) == source.num_prompt and source.priority <= sequence.priority
    if source.status is not Status.RUNNING:
        return False
    return bool(state.workers[source.worker].batch.retired[source.row] < len(sequence.tokens) - 1)


def _waits_for_block(state: SchedulerState, sequence: Sequence, offers: list[Offer], now: float) -> bool:
    """Whether a running row is about to fill the next block that it needs; it waits for that a bounded time."""
    if not any(offer.next_digest in offer.worker.computing for offer in offers):
        return False
    return _hold(sequence, now, state.config.block_wait)


def _waits_for_kept(state: SchedulerState, sequence: Sequence, offers: list[Offer], now: float) -> bool:
    """Whether a worker that has said hello a moment ago has, or may have, most of what the others would have to compute
    again: it tells when its step of before has ended, and has its turn when its window opens. The sequence waits for
    that a bounded time."""
    if not (sequence.resumed and sequence.reads_cache) or any(offer.mostly for offer in offers):
        return False
    fresh = (w for w in state.workers.values() if w.keeps and now - w.joined_at <= KEPT_SECONDS)
    if not any(worker.standing is Link.JOINING or _are_most(*_hits(worker, sequence)) for worker in fresh):
        return False
    return _hold(sequence, now, KEPT_SECONDS)


def _hold(sequence: Sequence, now: float, longest: float) -> bool:
    """Whether the sequence may wait on, for something that can fail to come."""
    if sequence.held_since is None:
        sequence.held_since = now
    return now - sequence.held_since <= longest


def _choose(offers: list[Offer], sequence: Sequence) -> Offer:
    """The longest cached prefix among the workers that are not much more loaded than the least loaded one. What is
    resumed was part of the load where most of it is, and goes back there."""
    if len(offers) == 1:
        return offers[0]
    least = min(offer.worker.num_running for offer in offers)

    def is_near(offer: Offer) -> bool:
        near: bool = offer.worker.num_running <= least + LOAD_SLACK * offer.worker.max_rows
        return near or (sequence.resumed and offer.mostly)

    near = [offer for offer in offers if is_near(offer)]

    def score(offer: Offer) -> tuple[int, int]:
        held = len(sequence.tokens) if adoptable(offer.worker, sequence) else len(offer.hits)
        return (-held, offer.worker.num_running)

    return min(near, key=score)


def _take(state: SchedulerState, offer: Offer, sequence: Sequence) -> None:
    """Give the sequence a row with all the KV that exists for it, and its first chunk."""
    builder, worker = offer.builder, offer.worker
    sequence.weights_version = worker.weights_version
    if adoptable(worker, sequence):
        blocks, shared, computed = _adopt(builder, sequence)
    else:
        blocks = int32(offer.hits)
        if offer.hits:
            worker.pool.share(blocks)
        shared, computed = len(blocks), len(blocks) * worker.pool.block_size
    if sequence.admitted_at is None:  # later it finds what it computed itself
        if sequence.reads_cache:
            state.totals.prefix_queries += len(sequence.tokens)
            state.totals.prefix_hits += computed
        if len(sequence.tokens) == sequence.num_prompt:
            sequence.cached = computed
    stay = admit(state, sequence, worker, builder.now, blocks=blocks, shared=shared, computed=computed)
    fills = len(sequence.tokens) - computed > 1 and len(blocks) < sequence.num_prompt // worker.pool.block_size
    if fills and sequence.reads_cache and state.config.prefix_caching:
        worker.fill_next(stay, sequence.digests[len(blocks)])
    builder.join(stay)


def _adopt(builder: PlanBuilder, sequence: Sequence) -> tuple[Int32, int, int]:
    """Copy-on-write: whole blocks below the last known token by reference, the block that holds it by one copy.

    Returns (blocks, how many of them are shared, positions that need not be computed: all but the last, whose logits
    give the first sample).
    """
    worker, source = builder.worker, sequence.source
    if source is None:
        raise SchedulerError(f"nothing to adopt from: {sequence.tell()}")
    batch, last = worker.batch, len(sequence.tokens) - 1
    whole = last // worker.pool.block_size
    blocks = batch.blocks[source.row, :whole].copy()
    worker.pool.share(blocks)
    batch.shared[source.row] = max(int(batch.shared[source.row]), whole)
    if last % worker.pool.block_size:
        own = worker.pool.allocate(1)
        if own is None:
            raise SchedulerError(f"no block to copy to: {sequence.tell()}")
        block = int(batch.blocks[source.row, whole])
        # Copies of one plan have no order: one from a block that this plan fills by a copy goes back to its origin.
        block = next((copy.source for copy in builder.copies if copy.target == block), block)
        builder.copies.append(Copy(group=0, source=block, target=int(own[0])))
        blocks = np.concatenate([blocks, own])
    return blocks, whole, last
