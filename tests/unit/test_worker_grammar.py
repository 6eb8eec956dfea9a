"""Grammars in the worker: only what they allow is sampled, on both engines, whatever happens to the row meanwhile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from proto.messages import FinishReason, GrammarFailed, GrammarReady, Join, SamplingParams, Task, int32
from scheduler.config import SchedulerConfig
from tests.support.json_schemas import QUICK, SCHEMAS, conforms
from tests.support.local_engine import Generation, LocalEngine
from tests.support.plans import Driver
from tests.support.runners import SmallPool, serial_runner
from tests.support.tiny_model import write_served_tiny
from tests.support.tiny_tokenizer import IM_END, ids_of, tiny_tokenizer
from worker.config import WorkerConfig
from worker.cpu.native.choice import VARIABLE
from worker.grammar import RowGrammar
from worker.grammar_source import GrammarError, check_grammar, grammar_spec
from worker.runner import Runner

PROMPT = ids_of("Hello", ",", " world")
WORD = "regex\n[a-f]{3,5}"
# Random weights hardly ever close a string or a list: these help them.
CLOSERS = ids_of('"', "}", "]")


def params(grammar: str = "", **changes: object) -> SamplingParams:
    values: dict[str, object] = {"temperature": 1.0, "eos_ids": (IM_END,), "grammar": grammar}
    return SamplingParams(**(values | changes))  # type: ignore[arg-type]


def load(folder: Path, engine: str, **settings: int) -> Runner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, engine)
        defaults = {"threads": 1, "max_rows": 8, "max_step_tokens": 256, "kv_cache_memory": 2**23}
        return serial_runner(WorkerConfig(model=folder, **(defaults | settings)))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["torch", "native"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return load(write_served_tiny(tmp_path_factory.mktemp("grammar") / "tiny", seed=1), request.param)


@pytest.fixture(scope="module")
def torch_runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return load(write_served_tiny(tmp_path_factory.mktemp("grammar") / "tiny", seed=1), "torch")


def engine_of(runner: Runner, *, num_blocks: int = 400, **config: int) -> LocalEngine:
    return LocalEngine(SmallPool(runner, num_blocks), SchedulerConfig(**config))


def text_of(generation: Generation) -> str:
    assert generation.end is not None
    assert generation.end.reason is FinishReason.STOP, generation.end
    assert generation.tokens[-1] == IM_END
    return tiny_tokenizer().decode(generation.tokens[:-1])


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_only_what_the_grammar_allows_is_sampled(runner: Runner, temperature: float) -> None:
    engine = engine_of(runner)
    made = [engine.submit(PROMPT, params(WORD, temperature=temperature), 16, seed=seed) for seed in range(6)]
    engine.run()
    for generation in made:
        assert re.fullmatch("[a-f]{3,5}", text_of(generation))
    if temperature:
        assert len({text_of(generation) for generation in made}) > 1


@pytest.mark.parametrize("window", [1, 2, 3])
def test_rows_without_grammars_are_not_disturbed(runner: Runner, window: int) -> None:
    engine = engine_of(runner, window=window)
    free = [engine.submit(PROMPT, params(), 40, seed=seed) for seed in range(3)]
    engine.run()
    alone = [generation.tokens for generation in free]
    engine = engine_of(runner, window=window)
    mixed = []
    for seed in range(3):
        mixed.append(engine.submit(PROMPT, params(), 40, seed=seed))
        bound = engine.submit(PROMPT, params(WORD), 16, seed=seed)
    engine.run()
    assert [generation.tokens for generation in mixed] == alone
    assert re.fullmatch("[a-f]{3,5}", text_of(bound))


@pytest.mark.parametrize("window", [1, 3])
def test_preempted_rows_resume_inside_their_grammar(runner: Runner, window: int) -> None:
    grammar = "regex\n([a-z]{10},){10}"
    engine = engine_of(runner, window=window)
    undisturbed = [engine.submit(PROMPT, params(grammar), 200, seed=seed) for seed in range(4)]
    engine.run()
    engine = engine_of(runner, num_blocks=12, window=window)
    made = [engine.submit(PROMPT, params(grammar), 150, seed=seed) for seed in range(4)]
    engine.run()
    assert engine.state.totals.preemptions > 0
    assert [generation.tokens for generation in made] == [generation.tokens for generation in undisturbed]
    assert all(re.fullmatch(r"([a-z]{10},){10}", text_of(generation)) for generation in made)


def test_a_row_that_joins_with_output_goes_on_from_there(runner: Runner) -> None:
    driver = Driver(runner)
    sequence = driver.add(PROMPT, params=params("regex\nabcdefgh"), max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.preempt(sequence)
    driver.run()
    assert tiny_tokenizer().decode(sequence.output[:-1]) == "abcdefgh"
    assert sequence.reason is FinishReason.STOP


def test_min_tokens_keep_a_grammar_open_while_it_may_go_on(runner: Runner) -> None:
    engine = engine_of(runner)
    long = engine.submit(PROMPT, params("regex\n[a-f]+", min_tokens=30, bias_ids=(IM_END,), bias_values=(50.0,)), 60)
    short = engine.submit(PROMPT, params("regex\nabc", min_tokens=10), 60)
    engine.run()
    assert re.fullmatch("[a-f]{30,31}", text_of(long))
    assert text_of(short) == "abc"  # nothing else may follow it


def test_the_end_is_allowed_only_where_the_grammar_may_end(runner: Runner) -> None:
    ends = (0, IM_END)
    wanted = params("regex\n[a-f]{7}", eos_ids=ends, bias_ids=ends, bias_values=(100.0, 90.0))
    engine = engine_of(runner)
    generation = engine.submit(PROMPT, wanted, 20)
    engine.run()
    assert re.fullmatch("[a-f]{7}", tiny_tokenizer().decode(generation.tokens[:-1]))
    assert generation.tokens[-1] == 0


def test_a_grammar_that_is_cut_by_the_limit_ends_by_length(runner: Runner) -> None:
    engine = engine_of(runner)
    generation = engine.submit(PROMPT, params("regex\n[a-f]{50}"), 5)
    engine.run()
    assert generation.end is not None
    assert generation.end.reason is FinishReason.LENGTH
    assert len(generation.tokens) == 5


def test_a_bad_grammar_fails_its_own_sequence(runner: Runner) -> None:
    engine = engine_of(runner)
    good = engine.submit(PROMPT, params(WORD), 16)
    bad = engine.submit(PROMPT, params("regex\n(abc"), 16)
    engine.run()
    assert bad.end is not None
    assert bad.end.reason is FinishReason.ERROR
    assert "unclosed group" in bad.end.message
    assert not bad.tokens
    text_of(good)


def test_masks_fail_closed(torch_runner: Runner) -> None:
    """A plan with a row whose grammar failed samples nothing for it, even from a scheduler that does not wait."""
    driver = Driver(torch_runner)
    sequence = driver.add(PROMPT, params=params("regex\n(abc"))
    driver.run()
    assert sequence.reason is FinishReason.NOT_FINITE
    assert not sequence.output
    told = torch_runner.grammar_reports()
    assert [type(report) for report in told] == [GrammarFailed]


def test_an_output_outside_its_grammar_is_not_resumed(torch_runner: Runner) -> None:
    driver = Driver(torch_runner)
    sequence = driver.add(PROMPT, params=params("regex\nabc"))
    sequence.tokens += ids_of("x")
    driver.run()
    assert sequence.reason is FinishReason.NOT_FINITE
    (told,) = torch_runner.grammar_reports()
    assert isinstance(told, GrammarFailed)
    assert "does not match" in told.message


def test_reports_of_an_older_epoch_are_dropped(torch_runner: Runner) -> None:
    woken: list[None] = []
    torch_runner.watch_grammars(lambda: woken.append(None))
    driver = Driver(torch_runner)
    driver.add(PROMPT, params=params(WORD))
    driver.step()
    torch_runner.reset()
    assert torch_runner.grammar_reports() == []
    driver = Driver(torch_runner)
    driver.add(PROMPT, params=params(WORD))
    driver.step()
    assert [type(report) for report in torch_runner.grammar_reports()] == [GrammarReady]
    assert woken


def test_a_grammar_that_is_given_up_allows_nothing(torch_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = Event()
    monkeypatch.setattr(RowGrammar, "begin", lambda self, compiler: go_on.wait(30))
    torch_runner.reset()
    rows = torch_runner.batch.grammars
    rows.join(join_of(WORD, sequence=7))
    torch_runner.fail_grammar(7, "it was too slow")
    assert rows.reports() == [GrammarFailed(sequence=7, message="the grammar failed: it was too slow")]
    bits = rows.bits(0)
    assert bits is not None
    assert not bits.any()
    go_on.set()
    rows.rows[0].compiled.result()
    torch_runner.fail_grammar(7, "again")
    assert rows.reports() == []
    torch_runner.reset()


def join_of(grammar: str, *, sequence: int) -> Join:
    return Join(
        row=0,
        sequence=sequence,
        task=Task.GENERATE,
        tokens=int32(PROMPT),
        num_prompt=len(PROMPT),
        computed=0,
        max_length=20,
        seed=1,
        params=params(grammar),
        logprobs_from=len(PROMPT),
        blocks=(int32([0]),),
    )


def test_one_compilation_serves_all_choices(torch_runner: Runner) -> None:
    compiler = torch_runner.batch.grammars._compiler
    engine = engine_of(torch_runner)
    for seed in range(4):
        engine.submit(PROMPT, params("regex\n[xyz]{9}"), 16, seed=seed)
    engine.run()
    assert len([spec for spec in compiler._compiled if spec == "regex\n[xyz]{9}"]) == 1


def fuzz(runner: Runner, schemas: list[object]) -> None:
    """Random weights push everywhere: whatever comes must be of the schema, complete, and end by itself."""
    engine = engine_of(runner, num_blocks=runner.batch.num_blocks)
    wanted = dict(temperature=1.5, bias_ids=tuple(CLOSERS), bias_values=(4.0,) * len(CLOSERS))
    made = [
        engine.submit(PROMPT, params(grammar_spec("json_schema", schema), **wanted), 2000, seed=seed)
        for seed, schema in enumerate(schemas)
    ]
    engine.run()
    for schema, generation in zip(schemas, made, strict=True):
        assert generation.end is not None
        assert generation.end.reason is FinishReason.STOP, (schema, generation.end)
        text = tiny_tokenizer().decode(generation.tokens[:-1])
        problem = conforms(json.loads(text), schema)
        assert problem is None, (schema, text, problem)


def test_json_of_random_weights_is_of_its_schema(runner: Runner) -> None:
    fuzz(runner, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_json_of_random_weights_is_of_its_schema_for_200_schemas(runner: Runner) -> None:
    assert len(SCHEMAS) >= 200
    fuzz(runner, SCHEMAS)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("regex\n(abc", "unclosed group"),
        ("regex\n(?=a)b", "look-around"),
        ('json_schema\n{"type": "wrong"}', "wrong"),
        ('json_schema\n{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema\n[1]", ""),
        ("json_schema\n{", ""),
        ("lark\nstart: missing", "missing"),
        ("json_schema\n" + '{"items":' * 200 + "{}" + "}" * 200, ""),
    ],
)
def test_a_bad_grammar_is_told_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        check_grammar(spec)
    assert message in str(caught.value)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_bits_of_a_whole_vocabulary(torch_runner: Runner) -> None:
    """Against the definition: an id is allowed if and only if its bytes may come next."""
    driver = Driver(torch_runner)
    driver.add(PROMPT, params=params("regex\n[ab]{2}"))
    driver.step()
    (row,) = torch_runner.batch.grammars.rows
    bits = torch_runner.batch.grammars.bits(row)
    assert bits is not None
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    assert allowed == sorted(ids_of("a", "b"))
