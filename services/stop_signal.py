"""SIGTERM and SIGINT for processes whose main thread sits in a poller."""

from __future__ import annotations

import signal
import socket
from types import FrameType, TracebackType


class StopSignal:
    """While entered, SIGTERM and SIGINT are counted and make `fd` readable. Main thread only.

    While `interrupts` is set they end the process at once instead, in good order and with exit code 0.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.count = 0
        self.interrupts = False
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)

    @property
    def fd(self) -> int:
        """For a poller; `clear` makes it quiet again."""
        return self._read.fileno()

    def clear(self) -> None:
        """Take what made `fd` readable."""
        try:
            while self._read.recv(64):
                pass
        except BlockingIOError:
            return

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.interrupts:
            raise SystemExit(0)

    def __enter__(self) -> StopSignal:
        self._former_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._former = [signal.signal(number, self._handle) for number in self.SIGNALS]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in zip(self.SIGNALS, self._former, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._read.close()
        self._write.close()
