from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from proto import messages, signalbox_pb2, signalbox_pb2_grpc

CLIENT = "services/client/signalbox_client"
STUBS = (
    "proto/signalbox_pb2.py",
    "proto/signalbox_pb2.pyi",
    "proto/signalbox_pb2_grpc.py",
    f"{CLIENT}/signalbox_pb2.py",
    f"{CLIENT}/signalbox_pb2.pyi",
)


def test_the_committed_stubs_are_those_of_the_schema(repo: Path, tmp_path: Path) -> None:
    script = repo / "scripts" / "generate_stubs.sh"
    subprocess.run([script, tmp_path], check=True, env={**os.environ, "PYTHON": sys.executable})
    for name in STUBS:
        committed, generated = repo / name, tmp_path / name
        assert committed.read_text() == generated.read_text(), f"{name} is old: run scripts/generate_stubs.sh"


def test_finish_reasons_are_numbered_like_those_of_the_records() -> None:
    ours = {reason.name: int(reason) for reason in messages.FinishReason}
    ours["UNSPECIFIED"] = ours.pop("NONE")
    ours["TOOL_CALLS"] = 9  # STOP, as a chat with tools tells it
    theirs = signalbox_pb2.FinishReason.items()
    assert {name.removeprefix("FINISH_REASON_"): number for name, number in theirs} == ours


def test_the_service_is_where_clients_look_for_it() -> None:
    service = signalbox_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    assert service.full_name == "signalbox.v1.GenerationService"
    assert [method.name for method in service.methods] == ["Generate", "GenerateOnce", "Abort", "GetModelInfo"]
    assert all(hasattr(signalbox_pb2_grpc.GenerationServiceServicer, method.name) for method in service.methods)


def test_unset_differs_from_zero() -> None:
    fields = signalbox_pb2.GenerateRequest.DESCRIPTOR.fields
    assert [field.name for field in fields if not field.is_repeated and not field.has_presence] == []
