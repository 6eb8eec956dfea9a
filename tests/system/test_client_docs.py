"""The Python examples of docs/clients.md run as they stand there, but for the addresses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def examples(repo: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (repo / "docs/clients.md").read_text(), re.DOTALL)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an example need not close its client
def test_the_python_examples_run(engine_server, repo, capsys):
    found = examples(repo)
    assert len(found) >= 4
    for example in found:
        here = example.replace("http://127.0.0.1:8000", engine_server.http)
        here = here.replace("127.0.0.1:8001", engine_server.grpc)
        assert here != example
        exec(compile(here, "docs/clients.md", "exec", dont_inherit=True), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip()
