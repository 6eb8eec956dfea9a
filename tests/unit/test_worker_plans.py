"""Plans that do not fit are refused with their reason, and nothing has changed then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from proto.messages import (
    Copy,
    Join,
    LoadAdapter,
    NewBlocks,
    SamplingParams,
    SetWeights,
    StepPlan,
    Task,
    Transfer,
    int32,
)
from tests.support.runners import tiny_runner
from worker.errors import PlanError, UnimplementedError
from worker.runner import Runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return tiny_runner(tmp_path_factory.mktemp("model") / "tiny", flat=True)


def join(row: int = 0, **changes: Any) -> Join:
    values: dict[str, Any] = {
        "row": row,
        "sequence": 7,
        "task": Task.GENERATE,
        "tokens": int32(range(20)),
        "num_prompt": 20,
        "computed": 0,
        "max_length": 30,
        "seed": 0,
        "params": SamplingParams(),
        "logprobs_from": 20,
        "blocks": (int32(),),
    }
    return Join(**(values | changes))


def plan(
    work: list[tuple[int, int, int]] | None = None,
    *,
    blocks: list[list[int]] | None = None,
    joins: tuple[Join, ...] = (),
    leaves: tuple[int, ...] = (),
    entries: tuple[Any, ...] = (),
) -> StepPlan:
    """work: (row, start, count) of each row; blocks: the new ones of each."""
    work = work or []
    blocks = blocks if blocks is not None else [[] for _ in work]
    return StepPlan(
        leaves=int32(leaves),
        joins=joins,
        entries=entries,
        rows=int32([item[0] for item in work]),
        starts=int32([item[1] for item in work]),
        counts=int32([item[2] for item in work]),
        blocks=(NewBlocks(counts=int32([len(ids) for ids in blocks]), ids=int32([i for ids in blocks for i in ids])),),
    )


@pytest.fixture
def begun(runner: Runner) -> Runner:
    """Row 0 has computed 20 positions in blocks 3 and 4 and knows 21 tokens."""
    runner.reset()
    runner.execute(plan([(0, 0, 20)], blocks=[[3, 4]], joins=(join(),)))
    return runner


GOOD = plan([(0, 20, 1)])
NEXT = [(1, 0, 20)]
WRONG: dict[str, tuple[StepPlan, str]] = {
    "unknown row": (plan([(5, 0, 1)]), "rows: row 5 is empty"),
    "row outside": (plan([(8, 0, 1)]), "rows: row 8 is outside 0 to 7"),
    "negative row": (plan([(-1, 0, 1)]), "rows: row -1 is outside 0 to 7"),
    "row twice": (plan([(0, 20, 1), (0, 20, 1)]), "rows: row 0 is given twice"),
    "start behind": (plan([(0, 19, 1)]), "rows: row 0 starts at 19, computed 20"),
    "gap": (plan([(0, 21, 1)]), "rows: row 0 starts at 21, computed 20"),
    "nothing to compute": (plan([(0, 20, 0)]), "rows: row 0 count 0 is below 1"),
    "beyond the known": (plan([(0, 20, 2)]), "rows: row 0 computes to 22, but 21 tokens are known"),
    "missing block": (plan(NEXT, blocks=[[5]], joins=(join(1),)), "rows: row 1 1 blocks of 16 for 20 positions"),
    "too many blocks": (plan([(0, 20, 1)], blocks=[list(range(10, 27))]), "19 blocks of 16 for 21 positions"),
    "block outside": (plan([(0, 20, 1)], blocks=[[64]]), "new blocks: block 64 is outside 0 to 63"),
    "block twice": (plan([(0, 20, 1)], blocks=[[9, 9]]), "new blocks: block 9 is given twice"),
    "block in use": (plan([(0, 20, 1)], blocks=[[4]]), "new blocks: block 4 is in a row's table"),
    "too many tokens": (
        plan([(1, 0, 70)], blocks=[[5, 6, 7, 8, 9]], joins=(join(1, tokens=int32([1] * 70), max_length=80),)),
        "the plan computes 70 tokens, more than 64",
    ),
    "row taken": (plan(joins=(join(0),)), "join: row 0 is taken by sequence 7"),
    "join outside": (plan(joins=(join(8),)), "join: row 8 is outside 0 to 7"),
    "join twice": (plan(joins=(join(1), join(1))), "join: row 1 is given twice"),
    "leave of an empty row": (plan(leaves=(3,)), "leaves: row 3 is empty"),
    "leave twice": (plan(leaves=(0, 0)), "leaves: row 0 is given twice"),
    "leave outside": (plan(leaves=(99,)), "leaves: row 99 is outside 0 to 7"),
    "leave and compute": (plan([(0, 20, 1)], leaves=(0,)), "rows: row 0 is empty"),
    "token outside": (plan(joins=(join(1, tokens=int32([96] * 20)),)), "join: row 1: token 96 is outside 0 to 95"),
    "no prompt": (plan(joins=(join(1, num_prompt=0),)), "join: row 1: num_prompt 0 is not within its 20 tokens"),
    "no tokens": (plan(joins=(join(1, tokens=int32(), num_prompt=1),)), "num_prompt 1 is not within its 0 tokens"),
    "all computed": (plan(joins=(join(1, computed=20),)), "join: row 1: computed 20 is not below its 20 tokens"),
    "computed without blocks": (plan(joins=(join(1, computed=3),)), "join: row 1: 0 blocks for 3 computed positions"),
    "join block outside": (plan(joins=(join(1, blocks=(int32([-1]),)),)), "join: row 1: block -1 is outside 0 to 63"),
    "join block twice": (plan(joins=(join(1, blocks=(int32([5, 5]),)),)), "join: row 1: block 5 is given twice"),
    "limit below tokens": (plan(joins=(join(1, max_length=19),)), "join: row 1: max_length 19 is not from 20 to 256"),
    "limit over context": (plan(joins=(join(1, max_length=257),)), "join: row 1: max_length 257 is not from 20 to 256"),
    "two groups": (plan(joins=(join(1, blocks=(int32(), int32())),)), "join: row 1: blocks for 2 KV groups"),
    "weights version": (plan(joins=(join(1, weights_version=9),)), "join: row 1: weights version 9, but 1 is loaded"),
    "stop id outside": (
        plan(joins=(join(1, params=SamplingParams(stop_ids=(96,))),)),
        "join: row 1: stop id 96 is outside 0 to 95",
    ),
    "bias without value": (
        plan(joins=(join(1, params=SamplingParams(bias_ids=(1,))),)),
        "join: row 1: 1 bias ids with 0 values",
    ),
    "copy from outside": (plan(entries=(Copy(group=0, source=64, target=1),)), "copy: block 64 is outside 0 to 63"),
    "copy in another group": (plan(entries=(Copy(group=1, source=0, target=1),)), "copy: group 1 does not exist"),
    "two copies to one block": (
        plan(entries=(Copy(group=0, source=0, target=9), Copy(group=0, source=1, target=9))),
        "copy: target block 9 is given twice",
    ),
    "a chain of copies": (
        plan(entries=(Copy(group=0, source=0, target=9), Copy(group=0, source=9, target=10))),
        "copy: block 9 is source and target",
    ),
    "columns that differ": (replace(GOOD, starts=int32()), "rows, starts, counts and drafts differ in length"),
    "blocks of no group": (replace(GOOD, blocks=()), "new blocks for 0 KV groups: this worker has one"),
    "block counts that differ": (
        replace(GOOD, blocks=(NewBlocks(counts=int32([2]), ids=int32([9])),)),
        "new blocks: counts do not match the rows and ids",
    ),
}
RESERVED: dict[str, tuple[StepPlan, str]] = {
    "score": (plan(joins=(join(1, task=Task.SCORE),)), "task SCORE"),
    "embed": (plan(joins=(join(1, task=Task.EMBED),)), "task EMBED"),
    "adapter": (plan(joins=(join(1, adapter="poet"),)), "adapters"),
    "weights": (plan(entries=(SetWeights(version=2, path="/w"),)), "SetWeights"),
    "load adapter": (plan(entries=(LoadAdapter(name="poet", path="/a"),)), "LoadAdapter"),
    "transfer": (plan(entries=(Transfer(group=0, peer="w2", blocks=int32([1])),)), "Transfer"),
}


def state(runner: Runner) -> dict[str, object]:
    """Everything that a plan could change."""
    columns = vars(runner.batch) | vars(runner.batch.sampling) | {"blocks": np.array(runner.executor.cache.blocks)}
    del columns["sampling"]
    return {name: value.tobytes() if isinstance(value, np.ndarray) else repr(value) for name, value in columns.items()}


def assert_refused(runner: Runner, wrong: StepPlan, error: type[PlanError], message: str) -> None:
    before = state(runner)
    with pytest.raises(error) as caught:
        runner.execute(wrong)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert state(runner) == before
    runner.batch.validate()
    assert runner.execute(GOOD).counts.tolist() == [1]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_plan_is_refused_before_anything_changes(begun: Runner, name: str) -> None:
    wrong, message = WRONG[name]
    assert_refused(begun, wrong, PlanError, message)


@pytest.mark.parametrize("name", RESERVED)
def test_what_is_reserved_is_unimplemented(begun: Runner, name: str) -> None:
    reserved, message = RESERVED[name]
    assert_refused(begun, reserved, UnimplementedError, message)


def test_a_plan_without_rows(begun: Runner) -> None:
    result = begun.execute(plan(leaves=(0,)))
    assert (len(result.rows), len(result.tokens), result.logprobs) == (0, 0, None)
    freed = result.freed[0]
    assert (freed.rows.tolist(), freed.counts.tolist(), freed.ids.tolist()) == ([0], [2], [3, 4])
    begun.batch.validate()


def test_a_row_may_leave_and_be_taken_by_one_plan(begun: Runner) -> None:
    result = begun.execute(plan([(0, 0, 20)], blocks=[[4, 3]], joins=(join(0, sequence=8),), leaves=(0,)))
    assert result.counts.tolist() == [1]
    assert result.freed[0].ids.tolist() == [3, 4]
    assert begun.batch.table[0, :2].tolist() == [4, 3]


def test_reset_empties_the_batch(begun: Runner) -> None:
    begun.reset()
    begun.batch.validate()
    assert (begun.batch.table_length == 0).all()
    assert begun.execute(plan([(0, 0, 20)], blocks=[[3, 4]], joins=(join(),))).counts.tolist() == [1]
