"""Kernels run in Triton's interpreter, which must be chosen before they are defined. Without Triton there is nothing
to collect here: `./signalbox test --triton` installs it."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["TRITON_INTERPRET"] = "1"

    from tests.cuda.interpreter import repair

    repair()
