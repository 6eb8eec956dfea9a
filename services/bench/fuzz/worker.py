"""The worker's two sockets: plans and orders that no scheduler would send, against the real checks and batch."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np

from proto.codec import CodecError, decode, encode
from proto.messages import Header, Reset, Shutdown, StepPlan
from services.bench.fuzz.feed import Feed
from services.bench.fuzz.scheduler import Corpus
from services.run_dir import RunDir
from services.status_file import StatusFile

VOCAB, LENGTH, BLOCKS, BLOCK_SIZE, ROWS = 1000, 4096, 64, 4, 8
FRAMES_PER_STEP = 20
NEW_EPOCH_EVERY = 20  # steps


class NoDevice:
    """An executor that computes nothing: every row samples the same token."""

    device, num_blocks, kv_dtype = "none", BLOCKS, "none"

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs

    def copy_blocks(self, sources: Any, targets: Any) -> None:
        """Nothing."""

    def run(self, inputs: Any) -> Any:
        """See worker.executor.Executor."""
        tokens = np.full(len(inputs.sample.rows), 7, np.int32)
        return self._outputs(finite=np.ones(len(inputs.rows), bool), tokens=tokens, sampled=None, prompt=None)

    def rest(self) -> None:
        """Nothing."""


def real_service(run_dir: RunDir, status: StatusFile) -> Any:
    """A WorkerService around a Runner without a model. By name: only worker processes may reach torch; this is one."""
    service = importlib.import_module("services.workerd").WorkerService(run_dir, status)
    runner = importlib.import_module("worker.runner")
    executor = importlib.import_module("worker.executor")
    config = importlib.import_module("worker.config").WorkerConfig(
        model=Path("none"), block_size=BLOCK_SIZE, max_rows=ROWS, max_step_tokens=512, window=1
    )
    model = SimpleNamespace(max_position_embeddings=LENGTH, vocab_size=VOCAB)
    files = SimpleNamespace(config=model, tokenizer_file=Path("none.json"), fingerprint="none")
    service.runner = runner.Runner(config, files, NoDevice(executor.StepOutputs))
    return service


class WorkerStage:
    """Lies near the plans of `corpus`, which a real scheduler sent to another worker."""

    name = "worker: plan and control links"

    def __init__(self, draw: random.Random, folder: Path, corpus: Corpus) -> None:
        self.draw, self.corpus = draw, corpus
        run_dir = RunDir.prepare(folder / "run")
        self.status = StatusFile(run_dir, "worker", "fuzz")
        self.service = real_service(run_dir, self.status)
        self.bound = (self.service.plans, self.service.control._dealer)
        self.plans, self.control = Feed(self.bound[0].max_bytes), Feed(self.bound[1].max_bytes)
        self.service.plans = self.plans.as_dealer()
        self.service.control._dealer = self.control.as_dealer()
        self.epoch = 0
        self.num_steps = 0

    def run(self, count: int) -> int:
        """Send `count` lies; returns how many were no valid frame, or made a fault."""
        left, rejected = count, 0
        while left > 0:
            lies = min(left, FRAMES_PER_STEP)
            left -= lies
            if self.service.epoch is None or self.num_steps % NEW_EPOCH_EVERY == 0:
                self.epoch += 1
                reset = Reset(keep=self.epoch % 2 == 0)
                self.control.incoming.append(encode(Header(session=5, link=1, epoch=self.epoch), reset))
            for _ in range(lies):
                feed = self.plans if self.draw.random() < 0.9 else self.control
                frame = self._addressed(self.corpus.lie(self.draw))
                rejected += not _valid(frame)
                feed.incoming.append(frame)
            rejected += self._step()
        return rejected

    def _addressed(self, frame: bytes) -> bytes:
        """Most are given the header that the worker expects, so that they get further than that."""
        if self.draw.random() < 0.2:
            return frame
        try:
            parts = msgpack.unpackb(frame, strict_map_key=False)
            parts[2:6] = (5, 1, self.epoch, self.service.last_plan + 1)
            packed: bytes = msgpack.packb(parts)
            return packed
        except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException):
            return frame

    def _step(self) -> int:
        self.num_steps += 1
        self.service.control._receive()
        for data in self.plans.receive():
            self.service._obey()
            self.service.take_frame(data)
        self.service._obey()
        self.service.grammars.take()
        self.service._tell_grammars()
        self.service.refused = ""
        self.service.runner.batch.validate()
        faults = sum(not _is_result(frame) for frame in self.plans.take_sent())
        self.control.take_sent()
        return faults

    def close(self) -> None:
        """Close the sockets."""
        for dealer in self.bound:
            dealer.close()
        for mailbox in (self.service.control.inbox, self.service.control._wake, self.service.grammars):
            mailbox.close()
        self.service.context.term()
        self.status.withdraw()


def _valid(frame: bytes) -> bool:
    try:
        decode(frame, (StepPlan, Reset, Shutdown))
    except CodecError:
        return False
    return True


def _is_result(frame: bytes) -> bool:
    return bool(msgpack.unpackb(frame)[1] == 43)
