"""Status files and the health commands that read them."""

import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services import status
from services.check import Unhealthy, check_frontend, check_process
from services.settings import Address, FrontendSettings, WorkerSettings

PUBLISH = "import pathlib, sys; from services import status; status.publish(pathlib.Path(sys.argv[1]), 'worker', '0')"


def test_publish_read_withdraw(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    status.publish(run_dir, "frontend", "0", ready=True, addresses={"http": "127.0.0.1:1"})
    (found,) = status.read_all(run_dir)
    assert (found.service, found.name, found.pid, found.ready) == ("frontend", "0", os.getpid(), True)
    assert found.addresses == {"http": "127.0.0.1:1"}
    assert found.alive
    assert [path.name for path in run_dir.iterdir()] == ["frontend-0.json"]
    status.withdraw(run_dir, "frontend", "0")
    assert status.read_all(run_dir) == []


def test_silence_is_not_life(tmp_path: Path) -> None:
    status.publish(tmp_path, "worker", "0")
    old = time.time() - status.STALE_AFTER - 1
    os.utime(tmp_path / "worker-0.json", (old, old))
    found = status.find(tmp_path, "worker", "0")
    assert found is not None
    assert not found.alive
    status.touch(tmp_path, "worker", "0")
    found = status.find(tmp_path, "worker", "0")
    assert found is not None
    assert found.alive


def test_a_process_that_ended_does_not_live(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PUBLISH, str(tmp_path)], check=True)
    found = status.find(tmp_path, "worker", "0")
    assert found is not None
    assert not found.alive
    status.publish(tmp_path, "worker", "0")  # its name is free again
    with pytest.raises(Unhealthy, match="no worker named 'x' runs in"):
        check_process("worker", WorkerSettings(run_dir=tmp_path, name="x"))
    assert "lives" in check_process("worker", WorkerSettings(run_dir=tmp_path, name="0"))


def test_a_name_in_use_is_refused(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PUBLISH + "; print(flush=True); sys.stdin.read()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    with child:
        child.stdout.readline()
        with pytest.raises(
            status.StatusError, match=f"already runs in .* as process {child.pid}; choose another --name"
        ):
            status.publish(tmp_path, "worker", "0")
        status.withdraw(tmp_path, "worker", "0")  # not ours: it stays
        assert status.find(tmp_path, "worker", "0") is not None
        child.kill()


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(status.StatusError, match=r"cannot write to the run folder .*--run-dir"):
        status.publish(tmp_path / "file" / "run", "worker", "0")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"service": "worker"}', '{"pid": 1, "unknown": 2}'])
def test_foreign_files_are_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "worker-0.json").write_text(text)
    assert status.read_all(tmp_path) == []


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers /live with 200 and all else with 503."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200 if self.path == "/live" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_frontend_check_asks_live(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        settings = FrontendSettings(http=Address("127.0.0.1", server.server_port), run_dir=tmp_path)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert check_frontend(settings) == f"frontend lives at http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
    with pytest.raises(Unhealthy, match="does not answer"):
        check_frontend(settings)
