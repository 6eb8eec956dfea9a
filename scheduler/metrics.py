"""Gauges and counters of the scheduler, by Prometheus sample name. Gauges are computed from the state when asked."""

from __future__ import annotations

from scheduler.state import SchedulerState


def metrics(state: SchedulerState) -> dict[str, float]:
    """Sample name -> value; counters end in _total."""
    pools = [worker.pool for worker in state.ready_workers]
    blocks = sum(pool.num_blocks for pool in pools)
    used = sum(pool.used for pool in pools)
    totals = state.totals
    values: dict[str, float] = {
        "signalbox_requests_running": state.num_running,
        "signalbox_requests_running_limit": sum(worker.max_rows for worker in state.ready_workers),
        "signalbox_requests_waiting": len(state.waiting),
        "signalbox_waiting_tokens": state.waiting_tokens,
        "signalbox_workers_ready": sum(1 for _ in state.ready_workers),
        "signalbox_frontends": len(state.frontends),
        "signalbox_kv_blocks": blocks,
        "signalbox_kv_blocks_used": used,
        "signalbox_kv_slots": sum(pool.num_blocks * pool.block_size for pool in pools),
        "signalbox_kv_slots_used": sum(worker.used_slots for worker in state.ready_workers),
        "signalbox_kv_cache_usage_ratio": used / blocks if blocks else 0.0,
        "signalbox_kv_blocks_cached": sum(pool.num_cached for pool in pools),
        "signalbox_tokens_per_second": state.tokens_per_second if state.num_running else 0.0,
        "signalbox_prefix_cache_queries_total": totals.prefix_queries,
        "signalbox_prefix_cache_hits_total": totals.prefix_hits,
        "signalbox_preemptions_total": totals.preemptions,
        "signalbox_prompt_tokens_computed_total": totals.prompt_tokens,
        "signalbox_tokens_sampled_total": totals.generation_tokens,
        "signalbox_plans_total": totals.plans,
        "signalbox_spec_decode_num_drafts_total": totals.drafted_rows,
        "signalbox_spec_decode_num_draft_tokens_total": totals.draft_tokens,
        "signalbox_spec_decode_num_accepted_tokens_total": totals.accepted.total(),
        "signalbox_worker_losses_total": totals.worker_losses,
        "signalbox_epochs_reset_total": totals.epochs_reset,
    }
    for name, counter, label in (
        ("signalbox_sequences_ended_total", totals.ended, "reason"),
        ("signalbox_requests_refused_total", totals.refused, "code"),
        ("signalbox_messages_dropped_total", totals.dropped, "reason"),
        ("signalbox_audits_total", totals.audits, "result"),
    ):
        for key, count in sorted(counter.items()):
            values[f'{name}{{{label}="{key}"}}'] = count
    for part, seconds in totals.step_seconds.items():
        values[f'signalbox_step_seconds_total{{part="{part}"}}'] = seconds
    for place, count in sorted(totals.accepted.items()):
        values[f'signalbox_spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}}'] = count
    values.update(totals.queue_time.samples("signalbox_request_queue_time_seconds"))
    values.update(totals.prefill_time.samples("signalbox_request_prefill_time_seconds"))
    return values
