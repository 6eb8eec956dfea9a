"""`signalbox bench serve`: the measures on hand-made timings, the table of workloads, the loop, the processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from services.bench import serve, serve_report, serve_sweep
from services.bench.peers.process import ServerProcess, SideError
from services.bench.peers.side import DriverSide, Place
from services.bench.serve_client import complete, send_all
from services.bench.serve_measures import Figures, Spread, Timing, figures, problems
from services.bench.serve_run import Comparison, Results, Run
from services.bench.serve_workloads import STRAGGLERS, WORKLOADS, Request, Workload, by_concurrency, by_context
from services.frontend.tokenizer import Tokenizer
from services.progress import Progress
from services.settings import SettingsError
from tests.support.engine_server import wait_for
from tests.support.tiny_model import write_served_tiny

DRIVER = """
import json, sys
mode = sys.argv[1]
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    calls = json.loads(line)
    for step in range(max(call["output"] for call in calls)):
        pieces = [(call["id"], choice) for call in calls for choice in range(call["n"]) if step < call["output"]]
        print(json.dumps({"pieces": pieces}), flush=True)
    if mode == "dies":
        sys.exit("out of memory")
    short = 1 if mode == "short" else 0
    ends = [(call["id"], len(call["prompt"]), call["n"] * call["output"] - short) for call in calls]
    print(json.dumps({"ends": ends}), flush=True)
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write_served_tiny(tmp_path_factory.mktemp("model") / "tiny")
    loaded = Tokenizer.load(folder / "tokenizer.json")
    yield loaded
    loaded.offload.close()


def timing(request: Request | None = None, **fields) -> Timing:
    """A valid answer of three tokens to two, sent at 10 s, unless told otherwise."""
    defaults = {
        "request": request or Request(prompt=(1, 2), output=3),
        "sent": 10.0,
        "pieces": ((10.5, 10.6, 10.9),),
        "last": 10.9,
        "prompt_tokens": 2,
        "output_tokens": 3,
    }
    return Timing(**defaults | fields)


def test_measures_of_hand_made_timings():
    later = timing(sent=10.2, pieces=((11.2, 11.4, 12.2),), last=12.2)
    found = figures([timing(), later], cpu_seconds=0.11)
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (2, 4, 6)
    assert found.seconds == pytest.approx(2.2)  # from the first request sent to the last token
    assert found.throughput == pytest.approx(6 / 2.2)
    assert found.ttft.p50 == pytest.approx(0.75)
    assert found.ttft.p99 == pytest.approx(1.0)
    assert found.itl.p50 == pytest.approx(0.25)  # of 0.1, 0.3, 0.2, 0.8: the first token's wait is not in it
    assert found.itl.p99 == pytest.approx(0.8)
    assert found.tpot.p50 == pytest.approx((0.2 + 0.5) / 2)
    assert found.e2e.p50 == pytest.approx((0.9 + 2.0) / 2)
    assert found.load == pytest.approx(0.05)


def test_choices_have_gaps_of_their_own_and_pieces_may_bring_several_tokens():
    request = Request(prompt=(1, 2), output=3, n=2)
    both = timing(request, pieces=((10.5, 10.6, 10.9), (10.4, 11.0)), last=11.0, output_tokens=6)
    found = figures([both])
    assert found.ttft.p50 == pytest.approx(0.4)  # of the choice that came first
    assert found.itl.p50 == pytest.approx(0.3)  # 0.1, 0.3 and 0.6
    assert found.tpot.p50 == pytest.approx((0.2 + 0.3) / 2)
    one_token = timing(Request(prompt=(1, 2), output=1), pieces=((10.5,),), output_tokens=1)
    assert figures([one_token]).tpot == figures([one_token]).itl == Spread(p50=0.0, p99=0.0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"error": "status 503: overloaded"}, "status 503: overloaded"),
        ({"output_tokens": 2}, "2 output tokens instead of 3"),
        ({"prompt_tokens": 3}, "3 prompt tokens instead of 2"),
        ({"pieces": ((),)}, "0 choices with output instead of 1"),
    ],
)
def test_an_answer_that_is_not_as_asked_is_no_measurement(wrong, said):
    assert problems([timing(), timing(**wrong), timing(**wrong)]) == [f"{said} (2 of 3 requests)"]
    assert problems([timing()]) == []


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens", "at_once"),
    [
        ("single", 3, 3 * 128, 3 * 128, 1),
        ("four", 8, 8 * 564, 8 * 128, 4),
        ("sixteen", 16, 16 * 564, 16 * 128, 16),
        ("stragglers", 16, 16 * 64, 4 * sum(STRAGGLERS), 16),
        ("refill", 32, 32 * 64, 8 * sum(STRAGGLERS), 8),
        ("groups", 4, 4 * 256, 4 * 8 * 64, 4),
        ("prefix", 24, 24 * 800, 24 * 32, 8),
    ],
)
def test_tokens_of_the_table(tokenizer, name, requests, prompt_tokens, output_tokens, at_once):
    workload = WORKLOADS[name]
    calls = workload.requests(tokenizer, 0)
    assert len(calls) == requests
    assert sum(len(call.prompt) for call in calls) == prompt_tokens
    assert sum(call.tokens for call in calls) == workload.output_tokens == output_tokens
    assert workload.at_once == at_once


def test_the_short_ones_are_short(tokenizer):
    calls = WORKLOADS["short"].requests(tokenizer, 0)
    assert len(calls) == 64
    assert {len(call.prompt) for call in calls} <= set(range(16, 65))
    assert {call.output for call in calls} <= set(range(32, 129))
    assert WORKLOADS["short"].at_once == 32


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_are_the_same_for_every_side_and_new_in_every_round(tokenizer, name):
    workload = WORKLOADS[name].quick()
    first, second = workload.requests(tokenizer, 0), workload.requests(tokenizer, 1)
    assert first == workload.requests(tokenizer, 0)
    assert [len(call.prompt) for call in first] == [len(call.prompt) for call in second]
    # No two prompts have a whole block of 16 in common at their start, but those of one round in `prefix`.
    starts = [call.prompt[workload.shared :][:16] for call in first + second]
    assert len(set(starts)) == len(starts)
    assert len({call.prompt[: workload.shared] for call in first + second}) == (2 if workload.shared else 1)


def test_quick_keeps_the_shape():
    quick = WORKLOADS["refill"].quick()
    assert quick.at_once == len(quick.lengths) == 8
    assert [output for _, output in quick.lengths] == [6, 15, 30, 128] * 2


def test_sweeps_double_the_load_and_grow_the_context():
    assert [workload.at_once for workload in by_concurrency()] == [1, 2, 4, 8, 16, 32, 64]
    assert all(len(workload.lengths) >= workload.at_once for workload in by_concurrency())
    assert [workload.longest - 64 for workload in by_context()] == [128, 512, 1024, 2048, 4096, 8000]


class Target:
    """Answers when `release` is called; knows how many calls were open at once."""

    def __init__(self, together: bool) -> None:
        self.together = together
        self.batches: list[int] = []
        self.open = self.most_open = 0

    async def answer(self, requests):
        """See serve_client.Target."""
        self.batches.append(len(requests))
        self.open += len(requests)
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(0)
        self.open -= len(requests)
        return [timing(request) for request in requests]


@pytest.mark.parametrize(("together", "batches"), [(False, [1] * 7), (True, [3, 3, 1])])
async def test_so_many_are_in_flight_and_all_are_answered_once(together, batches):
    target = Target(together)
    requests = [Request(prompt=(number,), output=3) for number in range(7)]
    timings = await send_all(target, requests, 3)
    assert sorted(one.request.prompt for one in timings) == [call.prompt for call in requests]
    assert target.batches == batches
    assert target.most_open == 3


def event(*choices: tuple[int, str, str | None], usage: tuple[int, int] | None = None) -> bytes:
    """One line of a stream. choices: index, text, finish reason. usage: prompt and completion tokens."""
    named = [{"index": index, "text": text, "finish_reason": reason} for index, text, reason in choices]
    counts = usage and {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return b"data: " + json.dumps({"choices": named, "usage": counts}).encode() + b"\n\n"


async def answered_with(lines: list[bytes], request: Request) -> Timing:
    """What the load generator makes of a server that sends `lines`."""

    async def handle(call: web.Request) -> web.StreamResponse:
        assert (await call.json())["ignore_eos"] is True
        response = web.StreamResponse()
        await response.prepare(call)
        for line in lines:
            await response.write(line)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        return await complete(session, str(server.make_url("")).rstrip("/"), "m", request)


TWO = Request(prompt=(1, 2), output=2, n=2)
ENDS_APART = [
    event((0, "a", None)),
    event((1, "b", None)),
    event((0, "c", "length"), usage=(2, 2)),
    event((1, "d", None)),
    event((1, "", "length"), usage=(2, 2)),
]
DONE = b"data: [DONE]\n\n"


async def test_usage_comes_for_all_choices_or_with_the_end_of_each():
    apart = await answered_with([*ENDS_APART, DONE], TWO)
    assert apart.problem == ""
    assert [len(pieces) for pieces in apart.pieces] == [2, 2]
    assert apart.last > apart.pieces[1][-1]  # the mark of its end is no piece
    both = await answered_with([*ENDS_APART, event(usage=(2, 4)), DONE], TWO)
    assert (both.problem, both.output_tokens) == ("", 4)


async def test_streams_that_break_off_are_told():
    assert (await answered_with(ENDS_APART, TWO)).problem == "the stream ended without [DONE]"
    failed = b'data: {"error": {"message": "out of memory"}}\n\n'
    assert "out of memory" in (await answered_with([ENDS_APART[0], failed], TWO)).problem
    assert "a choice 2 that was not asked for" in (await answered_with([event((2, "a", None)), DONE], TWO)).problem


class Script(DriverSide):
    """A driver that answers at once."""

    name, title, together = "script", "a script", True
    environment_name = "none"

    def __init__(self, place: Place, mode: str) -> None:
        super().__init__(place)
        self.script = str(place.folder / "driver.py")
        self.mode = mode
        Path(self.script).write_text(DRIVER)

    @property
    def python(self) -> Path:
        """See DriverSide."""
        return Path(sys.executable)

    def arguments(self) -> list[str]:
        """See DriverSide."""
        return [self.mode]


def place_in(folder: Path) -> Place:
    return Place(home=folder, folder=folder, model="tiny", context=2048)


async def compare(side: Script, tokenizer: Tokenizer) -> Results:
    workload = Workload(name="two", title="", at_once=2, n=2, lengths=((8, 3), (8, 2)))
    comparison = Comparison([side], tokenizer, Progress())
    async with comparison:
        await comparison.start()
        await comparison.run([workload], 2, ready=True)
    return comparison.results


async def test_a_driver_is_asked_and_ended(tmp_path, tokenizer):
    side = Script(place_in(tmp_path), "works")
    results = await compare(side, tokenizer)
    assert side.server is None
    assert results.valid
    assert [run.figures.output_tokens for run in results.runs if run.figures] == [10, 10]
    assert len(results.starts["script"]) == 2


@pytest.mark.parametrize(
    ("mode", "said"), [("short", "1 output tokens instead of 2|7 output"), ("dies", "out of memory")]
)
async def test_a_driver_that_fails_is_left_out_and_told(tmp_path, tokenizer, mode, said):
    results = await compare(Script(place_in(tmp_path), mode), tokenizer)
    assert not results.valid
    assert results.runs == []
    assert "script does not answer as asked" in results.failed["script"]


async def test_a_process_is_paused_resumed_and_ended_with_its_children(tmp_path):
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); sys.stdin.read()"
    server = ServerProcess("one", [sys.executable, "-c", code], os.environ, tmp_path / "log")
    await server.start(talks=True)
    assert server.process is not None
    assert server.process.stdout is not None
    child = int(await server.process.stdout.readline())
    server.pause()
    await asyncio.to_thread(wait_for, lambda: state_of(child) == "T", "paused")
    server.resume()
    await asyncio.to_thread(wait_for, lambda: state_of(child) in "RS", "resumed")
    server.pause()
    await server.stop()
    await asyncio.to_thread(wait_for, lambda: state_of(child) in ("", "Z"), "ended")


def state_of(pid: int) -> str:
    """The letter of /proc/PID/stat; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


async def test_a_process_that_ends_before_it_is_ready_is_told_with_its_last_words(tmp_path):
    async def never() -> bool:
        return False

    server = ServerProcess("one", ["sh", "-c", "echo no such model >&2; exit 3"], os.environ, tmp_path / "log")
    await server.start()
    with pytest.raises(SideError, match=r"one ended \(exit code 3\): no such model"):
        await server.wait_ready(never)
    await server.stop()
    absent = ServerProcess("other", ["/nowhere/server"], os.environ, tmp_path / "log")
    with pytest.raises(SideError, match="other cannot be started: No such file"):
        await absent.start()


def some_figures(throughput: float) -> Figures:
    one = Spread(p50=0.1, p99=0.2)
    return Figures(
        requests=1,
        prompt_tokens=2,
        output_tokens=3,
        seconds=1.0,
        throughput=throughput,
        ttft=one,
        itl=one,
        tpot=one,
        e2e=one,
        load=0.0,
    )


def some_results(rates: dict[str, list[float]], workload: str) -> Results:
    results = Results()
    for side, values in rates.items():
        for round, value in enumerate(values):
            figures = some_figures(value) if value else None
            results.runs.append(
                Run(side=side, workload=workload, round=round, figures=figures, problem="" if value else "short")
            )
    return results


def test_ratios_pair_the_rounds_and_invalid_rows_are_told(tmp_path, capsys):
    place = place_in(tmp_path)
    sides = [serve.Ours(place, "auto"), serve.PEERS["vllm"](place), serve.PEERS["hf"](place)]
    results = some_results({"ours": [30, 40, 60], "vllm": [10, 20, 20], "hf": [5, 0, 5]}, "single")
    results.starts = {"ours": [2.0, 4.0], "vllm": [100.0]}
    workload = WORKLOADS["single"]
    found = {(one.peer, one.workload): one for one in serve_report.ratios(results, sides, [workload])}
    assert (found["vllm", "single"].median, found["vllm", "single"].low, found["vllm", "single"].high) == (3, 2, 3)
    assert found["hf", "single"].rounds == 2
    assert found["vllm", "ready"].median == pytest.approx((50 + 25) / 2)
    facts = {"machine": serve_report.machine()}
    serve_report.show(Console(width=200), results, sides, [workload], facts)
    printed = capsys.readouterr().out
    assert "3.00 (2.00-3.00)" in printed
    assert "INVALID single, hf, round 2: short" in printed
    assert "TTFT: time to first token" in printed
    json.dumps(serve_report.as_json(results, sides, [workload], facts))


def test_curves_are_medians_over_rounds():
    by_load, by_length = list(by_concurrency(2)), list(by_context((128,)))
    results = some_results({"ours": [10, 30]}, "at-2")
    results.runs += some_results({"ours": [1, 1]}, "in-128").runs
    curves = serve_sweep.curves_of(results, ["ours", "vllm"], by_load, by_length)
    assert curves["concurrency"] == {"ours": [(2, 20.0)], "vllm": []}
    assert curves["prompts"]["ours"] == [(128, pytest.approx(1280))]
    assert curves["decoding"]["ours"] == [(128, pytest.approx(10))]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peers": ("vlm",)}, "--peers has no 'vlm'; choose from vllm,llamacpp,openvino,hf"),
        ({"workloads": ("singel",)}, "--workloads has no 'singel'"),
        ({"ours": ("int8",)}, "--ours has no 'int8'"),
        ({"model": "/a/model"}, "give --peers '' for another model"),
        ({"ours": (), "peers": ()}, "name at least one side"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(fields, said):
    with pytest.raises(SettingsError, match=said):
        serve.ServeBench(**fields)


def test_peers_that_are_not_installed_are_named_with_what_to_do(tmp_path, capsys):
    sides = serve.choose_sides(serve.ServeBench(ours=("auto",)), place_in(tmp_path), Progress())
    assert [side.name for side in sides] == ["ours"]
    told = capsys.readouterr().err
    assert "vllm is left out, it is not in" in told
    assert "install it with scripts/peers.sh llamacpp" in told
