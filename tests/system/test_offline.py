"""services.offline: an engine of one's own, and a list of prompts in one call."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from services.local_server import LocalServerError
from services.offline import Engine, GenerationFailed, requests_of
from tests.support.engine_server import wait_for
from tests.support.tiny_model import write_served_tiny


def test_a_list_of_prompts_in_one_call(tmp_path: Path) -> None:
    with Engine(str(write_served_tiny(tmp_path / "tiny")), kv_cache_memory="16MiB", threads=1) as engine:
        prompts = ["Hello", [5, 6, 7], [{"role": "user", "content": "Hello"}], "Hello"]
        answers = engine.generate(prompts, max_tokens=6, ignore_eos=True, n=2, seed=3, logprobs=0)
        assert [len(choices) for choices in answers] == [2] * 4
        for choice in [choice for choices in answers for choice in choices]:
            assert len(choice.token_ids) == len(choice.logprobs) == 6
            assert choice.finish_reason == "length"
        assert answers[0] == answers[3] != answers[1]
        assert engine.generate(["Hello"], max_tokens=6, ignore_eos=True, n=2, seed=3, logprobs=0) == [answers[0]]
        with pytest.raises(GenerationFailed, match="prompt 1: prompt holds token id 1000000"):
            engine.generate(["Hello", [10**6]], max_tokens=1)
        with pytest.raises(GenerationFailed, match="not a field of GenerateRequest"):
            engine.generate(["Hello"], max_tokenz=1)


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(LocalServerError, match=r"the engine did not start: .*nothing-here"):
        Engine(str(tmp_path / "nothing-here"))


@pytest.fixture
def folder_for_leftovers() -> Iterator[str]:
    """A folder with a short path, for sockets, that takes what a killed process cannot remove."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield folder


def test_an_engine_ends_with_a_process_that_is_killed(tmp_path: Path, folder_for_leftovers: str) -> None:
    model = str(write_served_tiny(tmp_path / "tiny"))
    code = (
        "import sys, threading; from services.offline import Engine; made = []\n"
        "def make(): made.append(Engine(sys.argv[1], kv_cache_memory='16MiB', threads=1))\n"
        "thread = threading.Thread(target=make); thread.start(); thread.join()\n"  # its end is not the process's
        "made[0].generate(['Hello'], max_tokens=1); print(made[0].server.http, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, model]
    environment = {**os.environ, "TMPDIR": folder_for_leftovers}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        host, _, port = owner.stdout.readline().strip().rpartition(":")
        socket.create_connection((host, int(port))).close()
        owner.kill()

    def refused() -> bool:
        try:
            socket.create_connection((host, int(port))).close()
        except ConnectionRefusedError:
            return True
        return False

    wait_for(refused, "the engine's end")


@pytest.mark.parametrize("prompts", ["one text", None, 7, {"role": "user", "content": "Hello"}])
def test_a_single_prompt_is_not_taken_for_several(prompts: object) -> None:
    with pytest.raises(GenerationFailed, match=r"prompts must be a list: \[prompt\] for a single one"):
        requests_of(prompts, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [7, None, ["a", "b"], [-1], [{"role": "user"}], {"role": "user", "content": "x"}])
def test_what_is_no_prompt_is_named(prompt: object) -> None:
    with pytest.raises(GenerationFailed, match="prompt 1 must be a text, a list of token ids, or a list of messages"):
        requests_of(["Hello", prompt], {})  # type: ignore[list-item]
