"""Event logs replay to the same plans; what differs, fails or is damaged is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from typer.testing import CliRunner

from proto.messages import SCHEMA_VERSION
from scheduler import advance as advance_module
from scheduler.errors import SchedulerError
from services import cli
from services.checkpoint import CheckpointError
from services.eventlog import EventLog, EventLogError, LogFile
from services.replay import first_state, replay
from services.replay_report import summary
from tests.support.recorded_runs import WORKLOAD, Recorder, record_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    path = tmp_path_factory.mktemp("events") / "run.events"
    return path, record_run(path, memory=60_000)


def objects_of(path: Path) -> list[Any]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(path.read_bytes())
    return list(unpacker)


def test_a_recording_replays_to_the_same_plans(recorded):
    path, recorder = recorded
    log = LogFile.open(path)
    found = replay(log, validate=True)
    assert found.same
    assert (found.difference, found.fault, found.end) == (None, "", "the simulation is over")
    assert found.requests == WORKLOAD.num_requests
    assert found.steps == recorder.log.steps
    assert found.plans == recorder.state.totals.plans
    assert summary(log, found)[-1] == "every step sent what it had sent: the same plans"


def test_the_tail_begins_with_a_checkpoint_and_replays(recorded, tmp_path):
    path, recorder = recorded
    tail = tmp_path / "tail.events"
    assert recorder.log.dump(tail, "asked for") == tail.stat().st_size < 200_000
    assert tail.stat().st_mode & 0o777 == 0o600
    log = LogFile.open(tail)
    assert log.header.checkpoint
    assert log.header.step > 0
    state = first_state(log)
    found = replay(log, validate=True, state=state)
    assert found.same
    assert found.first_step + found.steps - 1 == recorder.log.steps
    whole = LogFile.open(path)
    other = first_state(whole)
    replay(whole, state=other)
    assert state.totals == other.totals


def test_a_difference_names_its_step_with_plan_and_story(recorded, tmp_path):
    path, _ = recorded
    objects = objects_of(path)
    for record in objects[101:-1]:
        record[1] += 1  # what was sent by step 100 is not what is sent now
    changed = tmp_path / "changed.events"
    changed.write_bytes(b"".join(map(msgpack.packb, objects)))
    found = replay(LogFile.open(changed))
    assert not found.same
    assert found.difference is not None
    assert found.difference.step == 100
    assert any("sequence" in line and "request" in line for line in found.difference.stories)
    result = CliRunner().invoke(cli.app, ["replay", str(changed)])
    assert result.exit_code == 1
    assert "step 100 (at " in result.output


def test_a_fault_is_found_again(recorded, tmp_path, monkeypatch):
    """The log ends with the step that failed; the same failure is no difference, none is."""
    path, _ = recorded
    objects = objects_of(path)[:81]
    objects.append({"end": "fault: SchedulerError: broken", "digest": objects[-1][1]})
    faulty = tmp_path / "fault.events"
    faulty.write_bytes(b"".join(map(msgpack.packb, objects)))
    log = LogFile.open(faulty)
    found = replay(log)
    assert not found.same

    calls = iter(range(1000))
    real = advance_module.advance

    def breaking(state, events, now):
        if next(calls) == 79:
            raise SchedulerError("broken")
        return real(state, events, now)

    monkeypatch.setattr("services.replay.advance", breaking)
    found = replay(log, story_of="request-0")
    assert found.same
    assert found.fault == "SchedulerError: broken"
    assert found.story
    lines = summary(log, found, "request-0")
    assert "step 80 ends in the same fault: SchedulerError: broken" in lines


def test_a_log_of_a_killed_process_ends_where_it_is_cut_off(recorded, tmp_path):
    path, _ = recorded
    cut = tmp_path / "cut.events"
    cut.write_bytes(path.read_bytes()[:-3000])
    found = replay(LogFile.open(cut))
    assert found.same
    assert found.end == ""


def test_a_story_is_told_of_every_choice(recorded):
    """Whatever order they end and are forgotten in."""
    path, _ = recorded
    for number in range(WORKLOAD.num_requests):
        story = replay(LogFile.open(path), story_of=f"request-{number}").story
        assert len(story) == (2 if number % 5 == 0 else 1), number
        assert all(" ended (" in line for line in story)


def test_the_command_tells_stories_and_speaks_json(recorded):
    path, _ = recorded
    runner = CliRunner()
    told = runner.invoke(cli.app, ["replay", str(path), "--story", "request-3"])
    assert told.exit_code == 0
    assert "'request-3'" in told.output
    assert "no request 'x' in this log" in runner.invoke(cli.app, ["replay", str(path), "--story", "x"]).output
    parsed = json.loads(runner.invoke(cli.app, ["replay", str(path), "--json"]).output)
    assert parsed["same"] is True
    assert parsed["difference"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an event log: record one with"),
        (b"\xc1", "is damaged"),
        (msgpack.packb({"format": "signalbox event log", "version": 99, "release": "9"}), "replay it with the release"),
        (
            msgpack.packb({"format": "signalbox event log", "version": 1, "schema": SCHEMA_VERSION, "release": "9"}),
            "has a header of another form",
        ),
        (
            msgpack.packb(
                {"format": "signalbox event log", "version": 1, "schema": SCHEMA_VERSION, "release": "9", "session": 1}
                | {"started": 0.0, "time": 0.0, "config": {}, "step": {}}
            ),
            "has a header of another form: step is {}",
        ),
    ],
    ids=["empty", "noise", "another version", "another header", "a header with a field of another type"],
)
def test_a_file_that_is_no_log_is_one_line(content, message, tmp_path):
    path = tmp_path / "x.events"
    path.write_bytes(content)
    with pytest.raises(EventLogError, match=message):
        LogFile.open(path)


def test_a_damaged_step_is_named(recorded, tmp_path):
    path, _ = recorded
    objects = objects_of(path)
    objects[5] = [1.0, 2]
    bad = tmp_path / "bad.events"
    bad.write_bytes(b"".join(map(msgpack.packb, objects)))
    with pytest.raises(EventLogError, match="step 5 is damaged"):
        replay(LogFile.open(bad))


def test_a_recording_is_never_written_over(recorded, tmp_path):
    _, recorder = recorded
    path = tmp_path / "run.events"
    for _ in range(2):
        EventLog(recorder.state, 0.0, memory=0, record=path).close("over")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.events", "run.events.2"]
    with pytest.raises(OSError, match="no tail in memory"):
        EventLog(recorder.state, 0.0, memory=0).dump(path, "why")


def test_a_state_that_cannot_be_kept_ends_the_tail_and_nothing_else(monkeypatch, tmp_path):
    def refuse(state):
        raise CheckpointError("the scheduler's state holds a socket")

    monkeypatch.setattr("services.eventlog.freeze", refuse)
    path = tmp_path / "run.events"
    recorder = record_run(path, memory=20_000)
    assert replay(LogFile.open(path)).same
    with pytest.raises(OSError, match="no tail in memory"):
        recorder.log.dump(tmp_path / "tail.events", "why")
