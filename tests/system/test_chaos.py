"""A slice of `signalbox bench chaos`: real processes die under streams, each of which gets its undisturbed tokens."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest

from services.bench.chaos import campaign
from services.bench.chaos.campaign import Options, run
from services.bench.chaos.clients import Stream, draw_requests
from services.bench.chaos.faults import Fault, Kind
from services.bench.chaos.members import ChaosError
from services.bench.chaos.outages import Outage, helpless, overlap
from services.bench.chaos.pace import LONGEST, PROMPT_ROOM, SHORTEST, length_for, median_gap
from services.bench.chaos.relay import Relay
from services.bench.chaos.report import Report, note_pauses
from services.progress import Progress


@pytest.mark.timeout(300)
async def test_every_stream_gets_its_undisturbed_tokens_while_processes_die(tiny_model: Path) -> None:
    options = Options(
        model=str(tiny_model), streams=12, kills=7, others=4, every=1.0, distinct=6, at_once=6, max_tokens=600
    )
    with Progress() as progress:
        report, folder = await run(options, progress)
    assert not report.error, f"{report.error}; the logs are in {folder}"
    assert (report.wrong, report.left, report.hung) == ([], [], 0), f"the logs are in {folder}"
    assert report.kills == options.kills
    assert sum(report.faults.values()) == options.kills + options.others
    assert report.streams >= options.streams
    assert report.hit > 0


def a_report() -> Report:
    return Report(wanted_streams=2, streams=2, kills=1, wanted_kills=1, paused=1, usual_gap=0.1)


def test_misses_are_told_and_are_exit_code_1(capsys, monkeypatch) -> None:
    report = a_report()

    async def no_run(*_: object) -> tuple[Report, Path]:
        return report, Path("logs")

    monkeypatch.setattr(campaign, "run", no_run)
    monkeypatch.setattr(campaign.store, "resolve", lambda name: name)
    assert campaign.main(Options(model="m"), json=False) == 0
    assert "1 kills" in capsys.readouterr().out
    report.wrong = ["request 3 over HTTP: 2 of 9 tokens: first difference at 1"]
    report.pauses = [9.5]
    report.own_pauses = [9.0]
    assert campaign.main(Options(model="m", seed=7), json=True) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["wrong"] == 1
    assert "miss: stream: request 3" in printed.err
    assert "p99 9.00 s is over 3.00 s" in printed.err
    assert "the seed is 7" in printed.err


def test_a_pause_is_a_long_gap_in_which_a_fault_struck() -> None:
    report, (request,) = a_report(), draw_requests(1, 1, 100)
    stream = Stream(request, 0, began=0.0, times=[1.0, 1.1, 3.1, 4.0, 4.1])
    faults = [Fault(Kind.KILL, "worker 0", 2.0), Fault(Kind.STOP, "scheduler 0", 4.05)]
    note_pauses(report, stream, faults, [(0.5, 1.05), (2.0, 2.5), (3.0, 9.0)])
    assert report.pauses == [2.0]
    assert report.own_pauses == [pytest.approx(1.4)]
    assert report.stories() == ["2.00 s: kill of worker 0, 0.0 s"]
    assert (report.hit, report.paused) == (1, 2)


class Told:
    """A teller that keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def update(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.timeout(300)
async def test_answers_are_as_long_as_this_machine_is_fast(tiny_model: Path) -> None:
    options, told = (
        Options(model=str(tiny_model), streams=4, kills=1, others=0, every=0.5, distinct=4, at_once=4),
        Told(),
    )
    report, folder = await run(options, told)
    assert not report.broken(), f"the logs are in {folder}"
    assert report.max_tokens == length_for(report.measured_gap, options.every, 2048)
    assert "how fast 4 answers at once come: 5 s" in told.texts
    assert report.figures()["max_tokens"] == report.max_tokens


def test_an_answer_lasts_some_faults_within_bounds() -> None:
    assert length_for(gap=0.010, every=4.0, context=8192) == 800
    assert length_for(gap=0.100, every=4.0, context=8192) == 80
    assert length_for(gap=0.001, every=4.0, context=8192) == LONGEST
    assert length_for(gap=0.001, every=4.0, context=1024) == 1024 - PROMPT_ROOM
    assert length_for(gap=9.0, every=4.0, context=8192) == SHORTEST
    (request,) = draw_requests(1, 1, 100)
    streams = [Stream(request, 0, times=[1.0, 1.1, 1.3]), Stream(request, 0, times=[2.0]), Stream(request, 0)]
    assert median_gap(streams) == pytest.approx(0.2)
    with pytest.raises(ChaosError, match="no two tokens of an answer"):
        median_gap(streams[1:])


def test_faults_leave_nobody_when_all_workers_or_one_that_all_need_are_out() -> None:
    outages = [
        Outage("worker 0", 1.0, 4.0),
        Outage("worker 1", 2.0, 3.0),
        Outage("frontend 0", 5.0, 6.0),
        Outage("frontend 1", 5.5, 7.0),
        Outage("scheduler 0", 2.5, 3.5),
    ]
    workers = ["worker 0", "worker 1"]
    assert helpless(outages, workers, ["scheduler 0", "frontend 0"]) == [(2.0, 3.5), (5.0, 6.0)]
    assert helpless(outages, workers, ["frontend 1"]) == [(2.0, 3.0), (5.5, 7.0)]
    assert overlap([(2.0, 3.5), (5.0, 6.0)], 3.0, 5.5) == pytest.approx(1.0)


async def test_a_relay_passes_on_holds_and_cuts(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_unix_server(echo, tmp_path / "real")
    relay = Relay({tmp_path / "path": tmp_path / "real"})
    await relay.start()
    reader, writer = await asyncio.open_unix_connection(tmp_path / "path")
    writer.write(b"one")
    assert await reader.read(100) == b"one"
    held = asyncio.create_task(relay.hold(0.2))
    await asyncio.sleep(0)
    writer.write(b"two")
    assert await reader.read(100) == b"two"
    assert held.done()  # not before
    cut = asyncio.create_task(relay.cut(0.0))
    with suppress(ConnectionError):
        assert await reader.read(100) == b""
    await cut
    writer.close()
    await relay.stop()
    server.close()
