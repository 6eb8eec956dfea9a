"""`signalbox bench trace`: a slice of the traffic through half of the pool, with what the whole trace is to show."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from services.bench import plots, stragglers, trace, trace_report
from services.bench.simulated_worker import WorkerModel
from services.bench.static_batching import simulate
from services.bench.traffic import CODE, CONVERSATION, TrafficConfig, draw
from services.bench.usage import Moment, UsageMeter
from services.bench.waste import BenchError
from services.bench.workload import Request

SLICE = TrafficConfig(num_requests=400, rate=20)
HALF_POOL = replace(trace.MODEL, num_blocks=4096)


@pytest.fixture(scope="module")
def report() -> trace.TraceReport:
    return trace.run(SLICE, HALF_POOL)


def test_every_claim_holds_for_a_slice(report):
    shown = trace_report.claims(report, [stragglers.measure(1)])
    assert len(shown) == 6
    assert [claim for claim in shown if not claim.holds] == []


def test_requests_wait_for_memory_and_a_reservation_wastes_what_was_published(report):
    paged, reserved, static = report.policies
    assert paged.usage.waiting_share > 0.5
    assert paged.usage.waste < paged.usage.strict_waste < 0.05
    assert reserved.usage.waste == pytest.approx(trace.PUBLISHED_WASTE, abs=0.06)
    assert reserved.usage.running_waiting <= HALF_POOL.num_slots / HALF_POOL.max_length
    assert paged.tokens_per_second > 2 * reserved.tokens_per_second > 2 * static.tokens_per_second
    assert paged.latencies.whole.mean < reserved.latencies.whole.mean < static.latencies.whole.mean


def test_series_and_means_agree(report):
    for policy in report.policies:
        series = policy.usage.series
        assert len(series.now) == len(series.allocated) == len(series.waiting)
        assert np.mean(series.allocated) == pytest.approx(policy.usage.allocated, rel=1e-3)
        assert np.mean(series.used) == pytest.approx(policy.usage.used, rel=1e-3)
        assert max(series.allocated) <= report.pool_slots
        assert all(used <= held for used, held in zip(series.used, series.allocated, strict=True))


def test_it_prints_for_people_and_as_json(capsys, monkeypatch, report):
    monkeypatch.setattr(trace, "run", lambda *args, **kwargs: report)
    options = {"num_requests": 400, "seed": 1, "rate": 20.0}
    assert trace_report.main(**options) == 0
    printed = capsys.readouterr().out
    assert "✗" not in printed
    assert "allocated |" in printed
    assert trace_report.main(**options, json=True) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert [policy["name"] for policy in parsed["policies"]] == ["on demand", "reserve the context", "static batching"]
    assert all(claim["holds"] for claim in parsed["claims"])


def test_a_claim_that_does_not_hold_is_shown(capsys, monkeypatch, report):
    real, *others = report.policies
    worse = replace(report, policies=(replace(real, lost=1), *others))
    monkeypatch.setattr(trace, "run", lambda *args, **kwargs: worse)
    assert trace_report.main(num_requests=400, seed=1, rate=20.0) == 1
    assert "✗ requests lost: 1" in capsys.readouterr().out


def test_plots_say_what_to_install_and_what_they_draw(monkeypatch, report, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"pip install -e '\.\[plots\]'"):
        trace_report.main(num_requests=400, seed=1, rate=20.0, plot=tmp_path)
    latencies = report.policies[0].latencies
    first, between, whole = plots.latency_bars(report.policies[0])
    assert first == [latencies.first_token.p50, latencies.first_token.p90, latencies.first_token.p99]
    assert between[2] == latencies.between_tokens.p99
    assert whole[0] == latencies.whole.p50


def test_a_pool_for_less_than_two_contexts_is_refused():
    with pytest.raises(BenchError, match="two contexts of 8192 tokens"):
        trace.run(SLICE, replace(trace.MODEL, num_blocks=1000))


def test_traffic_has_the_rates_and_quantiles_it_was_fitted_to():
    for stream in (CONVERSATION, CODE):
        requests = draw(TrafficConfig(num_requests=4000, streams=(stream,), max_tokens=4096, context=32_768))
        for values, table in (
            ([request.num_prompt for request in requests], stream.prompt),
            ([request.num_output for request in requests], stream.output),
        ):
            assert np.median(values) == pytest.approx(table[7], rel=0.1)
            assert np.percentile(values, 90) == pytest.approx(table[11], rel=0.15)
            assert table[0] <= min(values)
            assert max(values) <= table[-1]
    config = TrafficConfig(num_requests=2000, rate=20)
    requests = draw(config)
    assert requests == draw(config) != draw(replace(config, seed=2))
    assert requests[-1].arrival == pytest.approx(100)
    assert all(request.num_prompt + request.max_tokens <= config.context for request in requests)
    assert all(request.num_output <= request.max_tokens for request in requests)


def test_static_batching_waits_for_its_slowest_row():
    model = WorkerModel(num_blocks=100, step_seconds=1.0, token_seconds=0.0)
    requests = [Request(arrival=0.0, num_prompt=16, num_output=output, max_tokens=384) for output in (2, 10, 3, 5, 1)]
    meter = trace.LatencyMeter(requests)
    moments = list(simulate(model, requests, meter))
    assert sum(moment.seconds for moment in moments) == 10 + 1  # four rows of 400 slots fit at once
    assert moments[0].allocated == 1600
    assert moments[0].waiting == 1
    assert moments[9].running == 1
    assert meter.lost(requests) == 0
    assert meter.lasts.tolist() == [2, 10, 3, 5, 11]


def test_usage_is_weighted_by_time():
    meter = UsageMeter()
    common = {"settled": 0, "running": 1}
    meter.note(Moment(now=1, seconds=1, allocated=100, used=50, waiting=2, **common))
    meter.note(Moment(now=4, seconds=3, allocated=20, used=20, waiting=0, **common))
    usage = meter.result()
    assert usage.allocated == 40
    assert usage.waste == pytest.approx(1 - 110 / 160)
    assert usage.waiting_share == 0.25
    assert usage.held_waiting == 100
    assert (usage.queue.p50, usage.queue.p90) == (0, 2)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_stragglers_leave_no_row_idle_while_requests_wait(window):
    found = stragglers.measure(window)
    assert (found.rows, found.requests) == (8, 64)
    assert found.occupancy >= 0.98
    assert found.static < 0.4
