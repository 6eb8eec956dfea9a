"""The command lines as programs: help for strangers, and one line for what a person got wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services import cli
from services.environment import known_variables

COMMANDS = [
    "up",
    "scheduler",
    "worker",
    "frontend",
    "generate",
    "chat",
    "models",
    "bench",
    "replay",
    "events",
    "story",
    "plan",
]


def signalbox(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "services.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: signalbox {command}")


def test_help_begins_with_the_command_to_start_with() -> None:
    commands = CliRunner().invoke(cli.app, ["--help"]).output.partition("Commands:\n")[2]
    assert commands.split()[0] == "up"


def test_help_of_the_tests_runs_none(repo: Path) -> None:
    told = subprocess.run([repo / "signalbox", "test", "--help"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0
    assert told.stdout.startswith("Usage: signalbox test")
    flags = set(re.findall(r"^      (--[a-z0-9]+)\) skipped=", (repo / "signalbox").read_text(), re.MULTILINE))
    assert flags
    assert flags | {"--help"} == set(re.findall(r"^  (--[a-z0-9]+) ", told.stdout, re.MULTILINE))


def test_every_option_has_a_help_text() -> None:
    import typer

    def walk(command: typer.core.TyperCommand) -> None:
        for name, one in getattr(command, "commands", {}).items():
            assert one.help, name
            walk(one)
        for option in command.params:
            assert getattr(option, "help", ""), f"{command.name} {option.name}"

    walk(typer.main.get_command(cli.app))


def test_help_loads_nothing_heavy(repo: Path) -> None:
    code = "import sys, services.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True).stdout
    heavy = {"torch", "numpy", "aiohttp", "grpc", "structlog", "zmq", "tokenizers", "gguf"}
    assert not {name.partition(".")[0] for name in loaded.split()} & heavy


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["worker", "--block-size", "7"], 2, "signalbox: error: --block-size must be a power of two, not 7\n"),
        (
            ["generate", "hi", "--url", "http://127.0.0.1:9"],
            1,
            "signalbox: error: no server answers at http://127.0.0.1:9",
        ),
        (["worker", "--check"], 1, "no worker named"),
        (["up", "--workers", "0"], 2, "signalbox: error: --workers must be from 1 to 256, not 0\n"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    result = signalbox(*arguments, cwd=tmp_path, SIGNALBOX_RUN_DIR=str(tmp_path))
    assert result.returncode == code
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_misspelt_variable_is_warned_about_with_the_nearest_right_one(tmp_path: Path) -> None:
    environment = {"SIGNALBOX_MAX_NUM_SEQ": "7", "SIGNALBOX_ZZZ": "1", "SIGNALBOX_RUN_DIR": str(tmp_path)}
    result = signalbox("worker", "--check", cwd=tmp_path, **environment)
    first, second, _ = result.stderr.splitlines()
    assert first == (
        "signalbox: warning: SIGNALBOX_MAX_NUM_SEQ is set, and nothing reads it; did you mean SIGNALBOX_MAX_NUM_SEQS?"
    )
    assert second == "signalbox: warning: SIGNALBOX_ZZZ is set, and nothing reads it"


def test_every_variable_that_the_repository_names_is_known(repo: Path) -> None:
    files = [*(repo / "docs").glob("*.md"), *repo.glob("*.yaml"), *repo.glob("*.md"), repo / "signalbox"]
    files += [file for folder in ("services", "worker", "scripts") for file in (repo / folder).rglob("*.*")]
    texts = [file.read_text(errors="ignore") for file in files if file.suffix in (".md", ".yaml", ".py", ".sh", "")]
    named = {name for text in texts for name in re.findall(r"\bSIGNALBOX_[A-Z_]*[A-Z]\b", text)}
    assert "SIGNALBOX_HOME" in named
    assert named <= known_variables()


def test_a_value_of_the_wrong_form_names_the_option(tmp_path: Path) -> None:
    result = signalbox("frontend", "--http", "8000", cwd=tmp_path)
    assert result.returncode == 2
    assert "--http" in result.stderr
    assert "write HOST:PORT" in result.stderr


def test_folders_of_the_caller_do_not_shadow_our_packages(tmp_path: Path) -> None:
    for package in ("proto", "services", "worker"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('shadowed')")
    assert signalbox("worker", "--check", cwd=tmp_path, SIGNALBOX_RUN_DIR=str(tmp_path)).returncode == 1


def test_the_release_is_told() -> None:
    told = CliRunner().invoke(cli.app, ["--version"])
    assert told.exit_code == 0
    assert re.fullmatch(r"signalbox \d+\.\d+\.\d+\S*\n", told.output)
