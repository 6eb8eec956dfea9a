"""Settings: values as people write them, bounds, and the way through a command line and back."""

import dataclasses
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from services.options import arguments, takes
from services.settings import (
    Address,
    ByteSize,
    FrontendSettings,
    SchedulerSettings,
    SettingsError,
    UpSettings,
    WorkerSettings,
    variable_of,
)

KINDS = [SchedulerSettings, WorkerSettings, FrontendSettings, UpSettings]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:8000", "127.0.0.1", 8000), ("[::1]:0", "::1", 0), ("me.local:1", "me.local", 1)],
)
def test_address(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize("text", ["8000", "::1:80", "a b:1", "host:65536", "host:", ":80", "http://host:80", ""])
def test_bad_address_says_how_to_write_one(text: str) -> None:
    with pytest.raises(SettingsError, match="write HOST:PORT"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 2**29), ("2GiB", 2**31), ("1.5gb", 1_500_000_000), ("4096", 4096), ("1 kib", 1024)]
)
def test_size(text: str, size: int) -> None:
    assert ByteSize.parse(text) == size
    assert ByteSize.parse(str(ByteSize(size))) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "5 parsecs", "1e9", "nan"])
def test_bad_size_says_how_to_write_one(text: str) -> None:
    with pytest.raises(SettingsError, match="write 512MiB, 2GiB or a number of bytes"):
        ByteSize.parse(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workers", 0),
        ("block_size", 24),
        ("window", 5),
        ("max_num_seqs", 0),
        ("kv_cache_memory", 0),
        ("gpu_memory_fraction", 1.5),
        ("grace_seconds", -1.0),
        ("max_num_batched_tokens", 8),
        ("threads", -1),
        ("recovery_timeout", float("nan")),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_option(field: str, value: float) -> None:
    with pytest.raises(SettingsError, match="--" + field.replace("_", "-")):
        dataclasses.replace(UpSettings(), **{field: value})


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 65])
def test_a_name_is_a_part_of_a_file_name(name: str) -> None:
    with pytest.raises(SettingsError, match="--name"):
        WorkerSettings(name=name)


def parsed(kind: type, command_line: list[str], env: dict[str, str] | None = None) -> object:
    """What a command with these options would be told."""
    app, told = typer.Typer(), []
    app.command()(takes(kind)(told.append))
    result = CliRunner().invoke(app, command_line, env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return told[0]


@pytest.mark.parametrize("kind", KINDS)
def test_no_option_gives_the_defaults(kind: type) -> None:
    assert parsed(kind, []) == kind()


@pytest.mark.parametrize("kind", KINDS)
def test_settings_survive_their_own_command_line(kind: type) -> None:
    settings = kind(run_dir=Path("/run/elsewhere"), grace_seconds=1.5)
    if hasattr(settings, "http"):
        settings = dataclasses.replace(settings, http=Address("::", 0), max_body=ByteSize(12345))
    assert parsed(kind, arguments(settings)) == settings


def test_a_yes_or_no_has_two_flags_and_a_variable() -> None:
    assert parsed(SchedulerSettings, ["--no-prefix-caching"]) == SchedulerSettings(prefix_caching=False)
    assert parsed(SchedulerSettings, [], {"SIGNALBOX_PREFIX_CACHING": "false"}) == SchedulerSettings(
        prefix_caching=False
    )
    settings = UpSettings(prefix_caching=False, itl_target_ms=25.0, max_chunk=64)
    assert parsed(UpSettings, arguments(settings)) == settings


@pytest.mark.parametrize("header", ["x tenant", "9", "x_tenant", "x:"])
def test_a_tenant_header_is_the_name_of_a_header(header: str) -> None:
    with pytest.raises(SettingsError, match="--tenant-header"):
        FrontendSettings(tenant_header=header)


def test_every_field_is_a_variable() -> None:
    env = {
        "SIGNALBOX_MODEL": "/m",
        "SIGNALBOX_WINDOW": "3",
        "SIGNALBOX_KV_CACHE_MEMORY": "1GiB",
        "SIGNALBOX_DTYPE": "BFloat16",
    }
    assert parsed(WorkerSettings, [], env) == WorkerSettings(
        model="/m", window=3, kv_cache_memory=ByteSize(2**30), dtype="bfloat16"
    )
    assert variable_of("max_num_seqs") == "SIGNALBOX_MAX_NUM_SEQS"


def test_the_command_line_is_stronger_than_the_environment() -> None:
    settings = parsed(WorkerSettings, ["--window", "1"], {"SIGNALBOX_WINDOW": "3"})
    assert settings == WorkerSettings(window=1)


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [
        ("smollm2-135m-instruct", "", "smollm2-135m-instruct"),
        ("/x/tiny.gguf", "", "tiny"),
        ("/x/qwen/", "", "qwen"),
        ("/x/tiny.gguf", "smol", "smol"),
    ],
)
def test_name_in_the_apis(model: str, served: str, name: str) -> None:
    assert FrontendSettings(model=model, served_model_name=served).api_name == name
