"""`python -m tests.cuda.on_cpu worker --device cuda ...`: the worker's process, and those of its ranks, without a GPU.

The engine is the captured one, its kernels run in Triton's interpreter, and Gloo stands in for NCCL.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

import worker.cuda.availability
import worker.cuda.ranks
from services import cli, ranks
from tests.cuda.interpreter import repair
from tests.cuda.ranks import NoGpus
from worker.cuda.backend import DirectBackend

if __name__ == "__main__":
    repair()
    worker.cuda.availability.require_gpu = lambda: None
    worker.cuda.ranks.Gpus = lambda: NoGpus(make_device=lambda: DirectBackend(torch.device("cpu")))  # type: ignore
    ranks.PROGRAM = ("-m", "tests.cuda.on_cpu")
    cli.main()
