"""Work on what clients send that might not end: done by a child process, which is killed when its time is over.

Parent and child (child.py) talk over pipes. A request is a frame: four bytes of length, little-endian, then msgpack of
[work, arguments]; the answer likewise [kind, value]. A first frame, of nothing, says that the child is ready.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import IO, Any

import msgpack
import structlog

from services.frontend.offload import Offload
from services.frontend.request import ValidationFailed
from services.processes import child_environment

LENGTH_BYTES = 4
DONE, REFUSED, FAILED = "done", "refused", "failed"  # what an answer's value is
START_SECONDS = 60.0  # that a child may take to begin, on machines that are busy

log = structlog.get_logger()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    data = stream.read(size)
    return data if len(data) == size else None


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """One frame, sent at once."""
    stream.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    stream.flush()


class Killed(Exception):
    """The work did not end in its time, or ended its process; the message says which."""


class Killable:
    """One child, which does one thing at a time; `name` tells it from others. It is started when it is needed.

    seconds: that one piece of work may take. Time that it waits for its turn does not count.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self._offload = Offload(threads=1)
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self, work: str, **arguments: Any) -> Any:
        """What child.WORK[work] returns. Raises its ValidationFailed, Killed, or RequestRefused when too much waits."""
        try:
            request = msgpack.packb([work, arguments])
        except (ValueError, RecursionError, OverflowError):
            raise Killed("it is nested too deeply") from None
        return await self._offload.run(self._ask, request)

    async def start(self) -> None:
        """Have the child ready before it is needed."""
        await self._offload.run(self._child)

    def close(self) -> None:
        """End the child; what waits is dropped."""
        self._offload.close()
        self._kill()

    # --- on the pool's one thread -------------------------------------------------------------------------------------

    def _ask(self, request: bytes) -> Any:
        frame = self._within(self._child(), self.seconds, request)
        kind, value = msgpack.unpackb(frame)
        if kind == DONE:
            return value
        if kind == REFUSED:
            message, param = value
            raise ValidationFailed(message, param)
        raise Killed(value)

    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        command = [sys.executable, "-P", "-m", "services.frontend.child", self.name]
        self._process = child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment()
        )
        self._within(child, START_SECONDS, None)
        return child

    def _within(self, child: subprocess.Popen[bytes], seconds: float, request: bytes | None) -> bytes:
        """The child's next frame, after sending it `request`. Killed when it ends, or has to be ended, before that."""
        assert child.stdin is not None
        assert child.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            child.kill()

        alarm = threading.Timer(seconds, expire)
        alarm.start()
        try:
            if request is not None:
                write_frame(child.stdin, request)
            frame = read_frame(child.stdout)
        except BrokenPipeError:
            frame = None
        finally:
            alarm.cancel()
        if frame is None:
            self._kill()
            why = f"it takes more than {seconds:g} s" if expired.is_set() else "it ended the process that did it"
            log.warning("killed", work=self.name, why=why)
            raise Killed(why)
        return frame

    def _kill(self) -> None:
        child, self._process = self._process, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what was not sent any more
                    continue
