"""The frontend's link against the real scheduler and a simulated worker, over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from proto.codec import encode
from proto.messages import Add, End, FinishReason, RefusalCode, SamplingParams, SchedulerBeat, SequenceStart, int32
from scheduler.events import PeerLost
from services import schedulerd, worker_control
from services.bench.faults.strict_worker import EOS, expected_output, token_at
from services.frontend.engine import EngineClient
from services.frontend.streams import Stream
from services.frontend.types import RequestRefused
from services.run_dir import RunDir
from services.transport import frontend_link
from tests.support.chunks import chunks_of
from tests.support.threads import SimRunner, scheduler_thread, worker_thread


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.prepare(tmp_path / "run")


@asynccontextmanager
async def client_of(run_dir: RunDir, recovery_timeout: float = 20.0) -> AsyncIterator[EngineClient]:
    client = EngineClient(
        frontend_link(run_dir),
        "f0",
        counters=lambda: {"x_total": 2.0},
        model_length=4096,
        recovery_timeout=recovery_timeout,
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


REJECTED = 'signalbox_messages_dropped_total{reason="malformed at a frontend"}'


async def until(condition) -> None:
    """Look every few milliseconds: the other side is a thread of its own."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def add(client: EngineClient, length: int = 40, seeds: tuple[int, ...] = (1,), **fields: object) -> Add:
    prompt = int32(range(10, 20))
    starts = tuple(
        SequenceStart(sequence=client.next_sequence(), seed=seed, output_ids=int32(), delivered=len(prompt))
        for seed in seeds
    )
    params = SamplingParams(eos_ids=(EOS,))
    return Add(request_id="r", prompt_ids=prompt, params=params, max_length=length, sequences=starts, **fields)


async def collect(stream: Stream) -> tuple[dict[int, list[int]], dict[int, End]]:
    """Tokens and ends of each choice; checks that ranges join without gap and that there is one end."""
    tokens: dict[int, list[int]] = {choice.index: [] for choice in stream.choices}
    ends: dict[int, End] = {}
    async for chunk in chunks_of(stream):
        assert chunk.index not in ends
        assert chunk.first == 10 + len(tokens[chunk.index])
        tokens[chunk.index] += chunk.tokens
        if chunk.end is not None:
            ends[chunk.index] = chunk.end
    assert ends.keys() == tokens.keys()
    return tokens, ends


def check(tokens: dict[int, list[int]], ends: dict[int, End], seeds: tuple[int, ...], length: int) -> None:
    for index, seed in enumerate(seeds):
        expected, reason = expected_output(seed, 10, length)
        assert tokens[index] == expected
        assert ends[index].reason is reason
        assert ends[index].length == 10 + len(expected)


async def test_streams_end_as_an_undisturbed_run(run_dir):
    with scheduler_thread(run_dir) as scheduler, worker_thread(run_dir, SimRunner(window=2)):
        async with client_of(run_dir) as client:
            await until(lambda: client.ready)
            assert client.max_length == 256
            seeds = tuple(range(1, 9))
            results = await asyncio.gather(*(collect(client.submit(add(client, 60, seeds))) for _ in range(3)))
            for tokens, ends in results:
                check(tokens, ends, seeds, 60)
            await until(lambda: not scheduler.state.sequences)
            await until(lambda: client.metrics()["signalbox_kv_blocks_used"] == 0)
            assert client.metrics()["x_total"] == 2.0


async def test_a_worker_that_fails_or_dies_costs_a_pause(run_dir):
    runner = SimRunner()
    with scheduler_thread(run_dir) as scheduler:
        async with client_of(run_dir) as client:
            with worker_thread(run_dir, runner):
                await until(lambda: client.ready)
                task = asyncio.create_task(collect(client.submit(add(client, 200, (3, 4)))))
                await until(lambda: runner.executed > 5)
                runner.errors.append(RuntimeError("boom"))
                await until(lambda: scheduler.state.totals.epochs_reset == 1)
                executed = runner.executed
                await until(lambda: runner.executed > executed + 5)
            assert not task.done()
            with worker_thread(run_dir, SimRunner(), "w1"):
                tokens, ends = await task
    check(tokens, ends, (3, 4), 200)


async def test_a_worker_whose_step_hangs_ends_and_another_goes_on(run_dir, monkeypatch):
    """Its control thread beats on; it is told to end by the time that no step may take, and does so in its stead."""
    ended, runner = threading.Event(), SimRunner()
    monkeypatch.setattr(worker_control, "OBEY_SECONDS", 0.0)
    monkeypatch.setattr(worker_control, "end_now", lambda why: ended.set())
    with scheduler_thread(run_dir, step_timeout=0.6) as scheduler, worker_thread(run_dir, runner):
        async with client_of(run_dir) as client:
            await until(lambda: client.ready)
            runner.hold.clear()
            stream = client.submit(add(client))
            await until(ended.is_set)
            with worker_thread(run_dir, SimRunner(), "w1"):
                tokens, ends = await collect(stream)
            assert (tokens[0], ends[0].reason) == expected_output(1, 10, 40)
            assert scheduler.state.totals.worker_losses >= 1
            runner.hold.set()


async def test_a_new_scheduler_costs_a_pause(run_dir):
    runner = SimRunner()
    with worker_thread(run_dir, runner):
        async with client_of(run_dir) as client:
            with scheduler_thread(run_dir):
                await until(lambda: client.ready)
                stream = client.submit(add(client, 200, (3, 5)))
                task = asyncio.create_task(collect(stream))
                await until(lambda: runner.executed > 5)
            await until(lambda: not client.ready)
            assert not task.done()
            with scheduler_thread(run_dir) as scheduler:
                check(*await task, (3, 5), 200)
                await until(lambda: not scheduler.state.sequences)


@pytest.mark.parametrize("loss", ["frame", "link"])
async def test_whatever_gets_lost_the_stream_is_whole(run_dir, loss):
    runner = SimRunner()
    with scheduler_thread(run_dir) as scheduler, worker_thread(run_dir, runner):
        async with client_of(run_dir) as client:
            await until(lambda: client.ready)
            task = asyncio.create_task(collect(client.submit(add(client, 200, (3, 5)))))
            await until(lambda: runner.executed > 5)
            runner.hold.clear()
            (frontend,) = scheduler.state.frontends.values()
            if loss == "frame":
                frontend.next_number += 1  # as if one had been sent
            else:
                scheduler.due.append(PeerLost(frontend.peer))
            runner.hold.set()
            check(*await task, (3, 5), 200)
            await until(lambda: not scheduler.state.sequences)


async def test_requests_wait_for_a_first_scheduler(run_dir):
    async with client_of(run_dir) as client:
        assert not client.ready
        assert client.reason == "no scheduler answers"
        assert client.max_length == 4096
        task = asyncio.create_task(collect(client.submit(add(client))))
        with scheduler_thread(run_dir), worker_thread(run_dir, SimRunner()):
            check(*await task, (1,), 40)


async def test_a_scheduler_that_stays_away_ends_streams(run_dir):
    async with client_of(run_dir, recovery_timeout=0.3) as client:
        _, ends = await collect(client.submit(add(client)))
        assert ends[0].reason is FinishReason.UNAVAILABLE
        with pytest.raises(RequestRefused, match="no scheduler answers") as refused:
            client.submit(add(client))
        assert refused.value.code is RefusalCode.UNAVAILABLE


async def test_a_scheduler_that_was_only_stopped_hears_what_was_given_up(run_dir, monkeypatch):
    runner, go_on = SimRunner(), threading.Event()
    with scheduler_thread(run_dir) as scheduler, worker_thread(run_dir, runner):
        async with client_of(run_dir, recovery_timeout=0.8) as client:
            await until(lambda: client.ready)
            runner.hold.clear()
            stream = client.submit(add(client, 200))
            await until(lambda: scheduler.state.sequences)
            step = scheduler.step

            def stopped(longest: float) -> None:
                assert go_on.wait(30)
                step(longest)

            monkeypatch.setattr(scheduler, "step", stopped)
            try:
                _, ends = await collect_rest(stream)
                assert [end.reason for end in ends] == [FinishReason.UNAVAILABLE]
                go_on.set()
                await until(lambda: not scheduler.state.sequences)  # the worker has not answered
            finally:
                go_on.set()
                runner.hold.set()


async def test_abort_gives_the_blocks_back(run_dir):
    runner = SimRunner()
    with scheduler_thread(run_dir) as scheduler, worker_thread(run_dir, runner):
        async with client_of(run_dir) as client:
            await until(lambda: client.ready)
            stream = client.submit(add(client, 200, (3, 4)))
            await anext(chunks_of(stream))
            stream.abort()
            stream.abort()
            _, ends = await collect_rest(stream)
            assert [end.reason for end in ends] == [FinishReason.ABORTED] * 2
            await until(lambda: not scheduler.state.sequences)
            await until(lambda: all(w.pool.used == 0 for w in scheduler.state.workers.values()))
            assert client.num_open == 0


async def collect_rest(stream: Stream) -> tuple[list[int], list[End]]:
    tokens: list[int] = []
    ends: list[End] = []
    async for chunk in chunks_of(stream):
        tokens += chunk.tokens
        ends += [chunk.end] if chunk.end else []
    return tokens, ends


async def test_finish_ends_a_choice_where_the_frontend_says(run_dir):
    with scheduler_thread(run_dir) as scheduler, worker_thread(run_dir, SimRunner()):
        async with client_of(run_dir) as client:
            stream = client.submit(add(client, 200, (3,)))
            first = await anext(chunks_of(stream))
            stream.finish(0, 11, FinishReason.STOP)
            tokens, (end,) = await collect_rest(stream)
            assert (first.tokens + tokens)[0] == token_at(3, 10)
            assert (end.length, end.reason) == (11, FinishReason.STOP)
            await until(lambda: not scheduler.state.sequences)


async def test_refusals_reach_the_reader(run_dir):
    with scheduler_thread(run_dir), worker_thread(run_dir, SimRunner()):
        async with client_of(run_dir) as client:
            await until(lambda: client.ready)
            with pytest.raises(RequestRefused, match="served context of 256") as refused:
                await collect(client.submit(add(client, 300)))
            assert refused.value.code is RefusalCode.INVALID_ARGUMENT
            client.drain()
            assert not client.ready
            with pytest.raises(RequestRefused, match="shutting down"):
                client.submit(add(client))
            assert client.num_open == 0


async def test_a_frontend_that_goes_takes_its_requests_along(run_dir):
    runner = SimRunner()
    with ExitStack() as stack:
        scheduler = stack.enter_context(scheduler_thread(run_dir))
        stack.enter_context(worker_thread(run_dir, runner))
        async with client_of(run_dir) as client:
            await until(lambda: client.ready)
            stream = client.submit(add(client, 250, (3,)))
            await until(lambda: runner.executed > 3)
        assert (await collect_rest(stream))[1][0].reason is FinishReason.UNAVAILABLE
        await until(lambda: not any(w.running for w in scheduler.state.workers.values()))


async def test_frames_that_a_frontend_cannot_read_are_counted_for_all_to_see(run_dir, monkeypatch):
    garbled = []

    def garble_a_beat(header, message):
        if not garbled and isinstance(message, SchedulerBeat):
            garbled.append(message)
            return b"no frame"
        return encode(header, message)

    monkeypatch.setattr(schedulerd, "encode", garble_a_beat)
    with scheduler_thread(run_dir) as scheduler:
        async with client_of(run_dir) as client:
            await until(lambda: client.metrics()[REJECTED] == 1)
            frontends = scheduler.state.frontends
            await until(lambda: [one.counters.get(REJECTED) for one in list(frontends.values())] == [1])
