"""What attackers and accidents have taught this field, one test for each kind (docs/security.md)."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import msgpack
import pytest

from proto import signalbox_pb2 as pb
from proto.codec import FRONTEND_TO_SCHEDULER, WORKER_TO_SCHEDULER, CodecError, decode, encode
from proto.digests import root_digest
from proto.messages import (
    Add,
    FrontendHello,
    Header,
    Refused,
    SamplingParams,
    SequenceStart,
    Welcome,
    WorkerHello,
    int32,
)
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import FromFrontend
from scheduler.state import SchedulerState
from services.bench.faults.strict_worker import StrictWorker
from services.frontend.http import build_app
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.grpc_front import grpc_front
from tests.support.http_front import http_front
from worker.loader.errors import ModelError
from worker.loader.model import open_model

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "kvpool", "scheduler", "worker", "services")
BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


async def answer_of(path: str, body: dict, headers: dict[str, str] | None = None) -> tuple[int, dict]:
    async with http_front(fake_context(FakeEngine([7, 8]))) as client:
        answer = await client.post(path, json=body, headers=headers or {})
        return answer.status, await answer.json()


def parsed_sources() -> list[tuple[Path, ast.AST]]:
    files = [file for package in PACKAGES for file in (REPO / package).rglob("*.py")]
    return [(file, ast.parse(file.read_text())) for file in files]


def test_pickle_on_a_socket():
    """Nothing of the product can unpickle, and frames with extension types are refused."""
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for file, tree in parsed_sources():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not banned & {name.partition(".")[0] for name in names}, file
            attribute = node.attr if isinstance(node, ast.Attribute) else ""
            assert attribute not in ("recv_pyobj", "send_pyobj", "allow_pickle"), file
    frame = msgpack.packb([1, 1, 0, 0, 0, 0, [msgpack.ExtType(5, b"cos\nsystem\n")]])
    with pytest.raises(CodecError, match="extension"):
        decode(frame, FRONTEND_TO_SCHEDULER)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "chat_template": "{{ cycler.__init__.__globals__ }}"}),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}),
        (
            "/v1/chat/completions",
            {
                **CHAT,
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
            },
        ),
        ("/v1/completions", {**BODY, "model": "../../etc/passwd"}),
        ("/v1/completions", {**BODY, "kv_transfer_params": {"remote_host": "10.0.0.1"}}),
    ],
)
async def test_a_template_path_url_or_handle_from_a_client(path, body):
    status, _ = await answer_of(path, body)
    assert status in (400, 404)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {**BODY, "n": 10**9}, "n"),
        ("/v1/completions", {**BODY, "logprobs": 10**9}, "logprobs"),
        ("/v1/completions", {**BODY, "prompt_logprobs": 10**6}, "prompt_logprobs"),
        ("/v1/completions", {**BODY, "stop": ["x"] * 10_000}, "stop"),
        ("/v1/completions", {**BODY, "logit_bias": {str(i): 1 for i in range(10_000)}}, "logit_bias"),
        ("/v1/completions", {**BODY, "max_tokens": 10**12}, "max_tokens"),
        ("/v1/completions", {**BODY, "prompt": [5] * 100_000}, "prompt"),
        ("/v1/completions", {**BODY, "prompt": "x" * 1_000_000}, "prompt"),
        ("/v1/completions", {**BODY, "prompt": ["x"] * 10_000}, "prompt"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 10**9, "logprobs": True}, "top_logprobs"),
        ("/v1/chat/completions", {**CHAT, "messages": CHAT["messages"] * 10_000}, "messages"),
    ],
)
async def test_a_number_that_makes_the_server_allocate(path, body, field):
    status, answer = await answer_of(path, body)
    assert (status, answer["error"]["param"]) == (400, field)


async def test_a_body_that_is_too_large_or_too_deep():
    async with http_front(fake_context(FakeEngine([7]))) as client:
        json = {"content-type": "application/json"}
        large = await client.post("/v1/completions", data=io.BytesIO(b" " * (9 * 2**20)), headers=json)
        assert large.status == 413
        for depth in (400, 2000, 500_000):
            nested = b'{"prompt": "x", "metadata": ' + b"[" * depth + b"]" * depth + b"}"
            deep = await client.post("/v1/completions", data=io.BytesIO(nested), headers=json)
            assert deep.status in (200, 400)


def test_a_worker_that_claims_tables_of_any_size():
    for claim in ({"max_rows": 2**31 - 1}, {"max_length": 2**31 - 1}):
        with pytest.raises(CodecError, match="must be 1 to"):
            encode(Header(), replace(_small_hello(), **claim))
    frame = encode(Header(), _small_hello())
    parts = msgpack.unpackb(frame)
    text = msgpack.packb(parts).replace(msgpack.packb(4444), msgpack.packb(2**31 - 1))  # blocks
    with pytest.raises(CodecError, match="num_blocks: must be 1 to"):
        decode(text, WORKER_TO_SCHEDULER)


def _small_hello() -> WorkerHello:
    return StrictWorker("w", num_blocks=4444).hello()


@pytest.mark.parametrize(
    "spec",
    [
        {"regex": "(((a{1,1000}){1,1000}){1,1000})"},
        {"json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}, "$ref": "#/$defs/a"}},
        {"grammar": 'start: x\nx: "a" x x x | x x'},
        {"json": {"type": "array", "items": {"enum": list(range(3000))}, "minItems": 10**6}},
    ],
)
@pytest.mark.timeout(60)
async def test_a_grammar_that_takes_for_ever(spec):
    """It is judged within limits, one way or the other, and others are served meanwhile."""
    async with http_front(fake_context(FakeEngine([7]))) as client:
        answer = await client.post("/v1/completions", json={**BODY, "structured_outputs": spec})
        assert answer.status in (200, 400)
        assert (await client.post("/v1/completions", json=BODY)).status == 200


def test_a_prefix_cache_that_tells_of_other_tenants():
    """Whatever salt a client sends, its blocks have another root than those of any other tenant."""
    roots = {root_digest(1, "", f"{tenant}\0{salt}") for tenant in ("", "a", "b") for salt in ("", "a", "b", "a\0b")}
    assert len(roots) == 12
    assert all(len(root) == 16 for root in roots)


async def test_a_tenant_that_a_client_names_itself():
    engine = FakeEngine([7])
    async with http_front(fake_context(engine)) as client:
        headers = {"x-tenant": "victim", "tenant": "victim"}
        answer = await client.post("/v1/completions", json={**BODY, "tenant": "victim"}, headers=headers)
        assert answer.status == 200
    assert [add.tenant for add in engine.adds] == [""]


@pytest.mark.parametrize("name", ["a b", "x\x7f", "../../x", "a" * 129, "-x", "é", "x/y", "%0a"])
async def test_a_request_id_that_is_more_than_a_name(name):
    status, answer = await answer_of("/v1/completions", {**BODY, "request_id": name})
    assert (status, answer["error"]["param"]) == (400, "request_id")
    async with grpc_front(FakeEngine([7])) as opened:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await opened.stub.GenerateOnce(pb.GenerateRequest(text="x", request_id=name))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("id", [-1, 10**6, 2**31 - 1])
async def test_a_token_id_outside_the_vocabulary(id):
    for field in ("prompt", "stop_token_ids", "allowed_token_ids"):
        status, answer = await answer_of("/v1/completions", {**BODY, field: [id]})
        assert (status, answer["error"]["param"]) == (400, field)
    status, _ = await answer_of("/v1/completions", {**BODY, "logit_bias": {str(id): 1}})
    assert status == 400
    status, _ = await answer_of("/detokenize", {"tokens": [id]})
    assert status == 400
    if id < 0:
        return
    async with grpc_front(FakeEngine([7])) as opened:
        for fields in ({"token_ids": pb.TokenIds(ids=[id])}, {"text": "x", "stop_token_ids": [id]}):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await opened.stub.GenerateOnce(pb.GenerateRequest(**fields))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_checks_that_go_with_python_minus_o():
    """Python -O leaves out assert: refusals do not hang on it."""
    script = """
from dataclasses import replace
from pathlib import Path
import msgpack
from proto.codec import FRONTEND_TO_SCHEDULER, CodecError, decode
from services.bench.fuzz.bodies import small_model
from services.frontend.auth import ApiKeys
from services.frontend.request import Limits, ValidationFailed
from services.frontend.validate import validate_completion
from services.keys import make_keys
from services.settings import LinkSettings, Address, SettingsError

def refused(kind, work, *arguments, **named):
    try:
        work(*arguments, **named)
    except kind:
        return
    raise SystemExit(f"{work} took {arguments} {named}")

limits = Limits(model=small_model(), max_length=4096)
for bad in ({"n": 999}, {"prompt": [10**6]}, {"logprobs": 99}, {"stop": ["x"] * 99}, {"temperature": 9}):
    refused(ValidationFailed, validate_completion, {"prompt": "x", **bad}, limits)
refused(CodecError, decode, msgpack.packb([1, 1, -1, 0, 0, 0, ["f"]]), FRONTEND_TO_SCHEDULER)
refused(SettingsError, LinkSettings, link=Address("0.0.0.0", 7000))
refused(SettingsError, make_keys, Path("/nonexistent"), ["../x"])
if ApiKeys(["x" * 20]).accepts("Bearer y"):
    raise SystemExit("a wrong key was accepted")
"""
    subprocess.run([sys.executable, "-O", "-c", script], cwd=REPO, check=True, timeout=60)


def test_code_in_a_model_folder(tmp_path):
    """It is data: nothing in it is imported or unpickled, whatever its config asks for."""
    ran = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    code = f"open({str(ran)!r}, 'w')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py", "tokenization_evil.py"):
        (folder / name).write_text(code)
    (folder / "config.json").write_text(
        '{"architectures": ["EvilForCausalLM"], "model_type": "evil",'
        ' "auto_map": {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}}'
    )
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError):
        open_model(folder)
    assert not ran.exists()


@pytest.mark.parametrize("name", ["../../secrets", "/etc/passwd", "a/../../b", "adapter"])
def test_an_adapter_name_that_leaves_its_root(name):
    """No adapter is served: every name is refused before it is looked at."""
    state = SchedulerState(SchedulerConfig(), 5)
    welcome = advance(state, [FromFrontend("f", Header(), FrontendHello(frontend="f"))], 0.0).frames[0]
    assert isinstance(welcome.message, Welcome)
    start = SequenceStart(sequence=1, seed=1, output_ids=int32(), delivered=2)
    add = Add(
        request_id="r",
        prompt_ids=int32([1, 2]),
        params=SamplingParams(),
        max_length=9,
        sequences=(start,),
        adapter=name,
    )
    frames = advance(state, [FromFrontend("f", welcome.header, add)], 0.1).frames
    assert [frame.message.code.name for frame in frames if isinstance(frame.message, Refused)] == ["UNIMPLEMENTED"]
    assert not state.sequences


def test_an_admin_route_on_the_port_of_clients():
    """All that the port answers; none of it changes the server."""
    app = build_app(fake_context(FakeEngine()))
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}
    assert {path for method, path in routes if method == "POST"} == {
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
    }
    assert {method for method, _ in routes} == {"GET", "HEAD", "POST"}
    words = ("load", "sleep", "weights", "adapter", "collective", "pause", "reset", "profile", "debug", "admin")
    assert not [path for _, path in routes if any(word in path for word in words)]
