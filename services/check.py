"""`--check`: one line and an exit status, for supervisors and container health checks."""

from __future__ import annotations

import http.client
from pathlib import Path

from services import status
from services.settings import Address, FrontendSettings, ServiceSettings

TIMEOUT = 2.0  # seconds for one answer
UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listening on all addresses: ask on the loopback


class Unhealthy(Exception):
    """The service does not answer as it should; the message is one line."""


def http_status(address: Address, path: str) -> int:
    """The status of GET `path`. Raises Unhealthy when nothing answers within TIMEOUT."""
    host = UNSPECIFIED.get(address.host, address.host)
    connection = http.client.HTTPConnection(host, address.port, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise Unhealthy(f"http://{address}{path} does not answer: {reason}") from error
    finally:
        connection.close()


def check_frontend(settings: FrontendSettings) -> str:
    """One line that says that /live answers, or where ports are shared the status file; raises Unhealthy otherwise."""
    if settings.share_ports:  # another one might answer
        return check_process("frontend", settings)
    address = settings.http
    found = status.find(settings.run_dir, "frontend", settings.name)
    if address.port == 0 and found is not None:
        address = Address.parse(found.addresses["http"])
    answer = http_status(address, "/live")
    if answer != 200:
        raise Unhealthy(f"http://{address}/live answers {answer}")
    return f"frontend lives at http://{address}"


def check_process(service: str, settings: ServiceSettings) -> str:
    """One line that says that the service touched its status file lately; raises Unhealthy otherwise."""
    run_dir: Path = settings.run_dir
    found = status.find(run_dir, service, settings.name)
    if found is None:
        raise Unhealthy(f"no {service} named {settings.name!r} runs in {run_dir}; see --run-dir and --name")
    if not found.alive:
        raise Unhealthy(f"{service} {settings.name!r} (process {found.pid}) in {run_dir} gives no sign of life")
    return f"{service} {settings.name!r} lives, process {found.pid}, {'ready' if found.ready else 'not ready'}"
