"""API keys over HTTP and gRPC, and TLS, by real clients."""

from __future__ import annotations

import hmac
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import signalbox_client
from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from services.frontend import auth
from services.frontend.auth import ApiKeys, load_keys
from services.frontend.context import FrontendContext
from services.frontend.grpc_server import start_grpc
from services.settings import Address, FrontendSettings, SettingsError
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.http_front import http_front

KEY = "a-key-of-this-server"
LOOPBACK = Address("127.0.0.1", 0)
TLS = Path(__file__).parent.parent / "support" / "tls"
BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}


def keyed(**settings: Path) -> FrontendContext:
    context = fake_context(FakeEngine([7, 8]), settings=FrontendSettings(**settings))
    object.__setattr__(context, "keys", ApiKeys([KEY, "another-key-of-it"]))
    return context


# --- HTTP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer  x{KEY}"]
)
async def test_without_a_key_there_is_no_answer(sent):
    async with http_front(keyed()) as client:
        headers = {"authorization": sent} if sent else {}
        for path in ("/v1/models", "/metrics", "/version", "/no/such/path", "/openapi.json"):
            answer = await client.get(path, headers=headers)
            assert answer.status == 401, path
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        error = (await answer.json())["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert KEY not in error["message"]


@pytest.mark.parametrize("sent", [f"Bearer {KEY}", f"bearer {KEY}", "Bearer another-key-of-it"])
async def test_each_key_is_accepted(sent):
    async with http_front(keyed()) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"authorization": sent})
        assert answer.status == 200


async def test_health_is_open():
    async with http_front(keyed()) as client:
        assert [(await client.get(path)).status for path in ("/live", "/health", "/ready")] == [200] * 3


async def test_a_large_body_is_not_read_without_a_key():
    async with http_front(keyed()) as client:
        answer = await client.post("/v1/completions", data=b"x" * 2**20)
        assert answer.status == 401


# --- gRPC ---------------------------------------------------------------------------------------------------------


async def code_of(call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_our_client_sends_a_key_as_metadata_and_names_its_lack():
    front = await start_grpc(keyed(), LOOPBACK)
    try:
        async with signalbox_client.AsyncClient(f"127.0.0.1:{front.port}") as client:
            with pytest.raises(signalbox_client.Unauthenticated, match="send an API key") as error:
                await client.generate("Hello", max_tokens=2)
            assert error.value.reason == "INVALID_API_KEY"
        metadata = {"authorization": f"Bearer {KEY}"}
        async with signalbox_client.AsyncClient(f"127.0.0.1:{front.port}", metadata=metadata) as client:
            assert (await client.generate("Hello", max_tokens=2)).choices
    finally:
        await front.stop(0)


async def test_grpc_calls_need_a_key_and_health_does_not():
    front = await start_grpc(keyed(), LOOPBACK)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            request = pb.GenerateRequest(text="Hello", max_tokens=2)
            for metadata in ((), (("authorization", "Bearer wrong-key-of-it"),), (("authorization-bin", b"x"),)):
                called = stub.GenerateOnce(request, metadata=metadata)
                assert await code_of(called) is grpc.StatusCode.UNAUTHENTICATED
                assert await code_of(anext(aiter(stub.Generate(request, metadata=metadata)))) is (
                    grpc.StatusCode.UNAUTHENTICATED
                )
                called = stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)
                assert await code_of(called) is grpc.StatusCode.UNAUTHENTICATED
            reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
            assert await code_of(anext(aiter(reflected))) is grpc.StatusCode.UNAUTHENTICATED
            answer = await stub.GenerateOnce(request, metadata=(("authorization", f"Bearer {KEY}"),))
            assert answer.choices
            status = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert status.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await front.stop(0)


def tls_settings(**more: Path) -> dict[str, Path]:
    return {"grpc_tls_cert": TLS / "server.pem", "grpc_tls_key": TLS / "server.key", **more}


def credentials(name: str = "") -> grpc.ChannelCredentials:
    own = (TLS / f"{name}.key", TLS / f"{name}.pem") if name else ()
    return grpc.ssl_channel_credentials((TLS / "ca.pem").read_bytes(), *(path.read_bytes() for path in own))


async def model_over(port: int, channel_credentials: grpc.ChannelCredentials | None) -> str:
    target = f"localhost:{port}"
    channel = (
        grpc.aio.insecure_channel(target)
        if channel_credentials is None
        else grpc.aio.secure_channel(target, channel_credentials)
    )
    async with channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        metadata = (("authorization", f"Bearer {KEY}"),)
        return (await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata, timeout=10)).id


async def test_grpc_over_tls_is_for_tls_clients_alone():
    front = await start_grpc(keyed(**tls_settings()), Address("localhost", 0))
    try:
        assert await model_over(front.port, credentials()) == "tiny"
        assert await code_of(model_over(front.port, None)) is grpc.StatusCode.UNAVAILABLE
    finally:
        await front.stop(0)


async def test_grpc_over_mutual_tls_is_for_certificates_of_one_authority_alone():
    front = await start_grpc(keyed(**tls_settings(grpc_client_ca=TLS / "ca.pem")), Address("localhost", 0))
    try:
        assert await model_over(front.port, credentials("client")) == "tiny"
        for other in (credentials(), credentials("stranger"), None):
            assert await code_of(model_over(front.port, other)) is grpc.StatusCode.UNAVAILABLE
    finally:
        await front.stop(0)


# --- settings -----------------------------------------------------------------------------------------------------


def test_keys_come_from_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n  second-key-of-file \n")
    keys = load_keys(FrontendSettings(api_key_file=file), {"SIGNALBOX_API_KEY": "third-from-environment"})
    assert keys is not None
    for key in (KEY, "second-key-of-file", "third-from-environment"):
        assert keys.accepts(f"Bearer {key}")
    assert load_keys(FrontendSettings(), {}) is None
    assert load_keys(FrontendSettings(), {"SIGNALBOX_API_KEY": ""}) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "holds no key"), ("short", "16 to 512"), ("a key with spaces in it", "16 to 512"), ("é" * 20, "16 to 512")],
)
def test_keys_of_no_use_are_refused_and_never_told(tmp_path, text, why):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SettingsError, match=why) as error:
        load_keys(FrontendSettings(api_key_file=file), {})
    assert not text or text not in str(error.value)
    if text:
        with pytest.raises(SettingsError, match="SIGNALBOX_API_KEY must") as error:
            load_keys(FrontendSettings(), {"SIGNALBOX_API_KEY": text})
        assert text not in str(error.value)


def test_a_file_of_keys_that_others_can_write_is_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_text(KEY)
    file.chmod(0o666)
    with pytest.raises(SettingsError, match="can be written by others"):
        load_keys(FrontendSettings(api_key_file=file), {})


def test_settings_of_tls_go_together():
    with pytest.raises(SettingsError, match="go together"):
        FrontendSettings(grpc_tls_cert=TLS / "server.pem")
    with pytest.raises(SettingsError, match="needs --grpc-tls-cert"):
        FrontendSettings(grpc_client_ca=TLS / "ca.pem")
    with pytest.raises(SettingsError, match="is no PEM file"):
        auth.grpc_credentials(FrontendSettings(grpc_tls_cert=Path(__file__), grpc_tls_key=TLS / "server.key"))


def test_a_secret_that_is_compared_in_its_own_time(monkeypatch):
    """Every known key is compared, by hmac, whatever came and whichever fits."""
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    keys = ApiKeys([KEY, "another-key-of-it", "a-third-key-of-it"])
    for sent in (f"Bearer {KEY}", "Bearer nothing", None, "Bearer " + "x" * 10_000):
        compared.clear()
        keys.accepts(sent)
        assert len(compared) == 3
        assert {len(part) for pair in compared for part in pair} == {32}
