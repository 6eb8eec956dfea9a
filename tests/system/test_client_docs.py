"""The Python examples of docs/clients.md and of the client run as they stand, but for addresses and the model."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest


def examples(repo: Path) -> list[str]:
    texts = [(repo / name).read_text() for name in ("docs/clients.md", "services/client/README.md")]
    return [example for text in texts for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an example need not close its client
def test_the_python_examples_run(engine_server, repo, capsys):
    found = examples(repo)
    assert len(found) >= 4
    for example in found:
        here = example.replace("http://127.0.0.1:8000", engine_server.http)
        here = here.replace("127.0.0.1:8001", engine_server.grpc)
        here = here.replace("smollm2-135m-instruct", str(engine_server.model))
        assert here != example
        exec(compile(here, "docs/clients.md", "exec", dont_inherit=True), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["review.py", "branches.py"])
def test_the_clients_examples_run(engine_server, repo, capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [name, engine_server.grpc])
    runpy.run_path(str(repo / "services/client/examples" / name), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert not [line for line in lines if "Error" in line or "InvalidRequest" in line]
