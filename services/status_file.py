"""The status file of a running service (services/status.py), kept fresh by the loop that is to be seen alive."""

from __future__ import annotations

import time
from collections.abc import Mapping

from services import status
from services.run_dir import RunDir

TOUCH_INTERVAL = 1.0  # seconds


class StatusFile:
    """Made at the start of a service. Raises StatusError when another living one has the same name."""

    def __init__(self, run_dir: RunDir, service: str, name: str) -> None:
        self._key = (run_dir.path, service, name)
        self._ready = False
        self._addresses: dict[str, str] = {}
        self._publish()

    def _publish(self) -> None:
        status.publish(*self._key, ready=self._ready, addresses=self._addresses)
        self._touched = time.monotonic()

    def update(self, ready: bool, addresses: Mapping[str, str] | None = None) -> None:
        """Cheap enough for every turn of a loop; call it at least once in TOUCH_INTERVAL."""
        if ready != self._ready or (addresses is not None and addresses != self._addresses):
            self._ready = ready
            self._addresses = dict(addresses or self._addresses)
            self._publish()
        elif time.monotonic() - self._touched >= TOUCH_INTERVAL / 2:
            status.touch(*self._key)
            self._touched = time.monotonic()

    def withdraw(self) -> None:
        """The service ends."""
        status.withdraw(*self._key)
