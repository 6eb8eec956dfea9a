"""The child process that does what clients could make endless: chat templates and grammars (see killable.py)."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgpack

from services import processes
from services.frontend.chat import chat_template
from services.frontend.grammar import judge
from services.frontend.killable import DONE, FAILED, REFUSED, read_frame, write_frame
from services.frontend.request import ValidationFailed

MAX_MEMORY = 2 * 2**30  # bytes of address space


def render(template: list[str | None], **conversation: Any) -> str:
    """A conversation as the template (source, bos token, eos token) writes it."""
    source, bos_token, eos_token = template
    assert source is not None
    return chat_template(source, bos_token, eos_token).render(**conversation)


WORK: dict[str, Callable[..., Any]] = {"render": render, "judge": judge}


def answer(request: bytes) -> bytes:
    """What the work came to; whatever went wrong is told, and the child lives."""
    work, arguments = msgpack.unpackb(request, strict_map_key=False)
    try:
        told: list[Any] = [DONE, WORK[work](**arguments)]
    except ValidationFailed as error:
        told = [REFUSED, [error.message, error.param]]
    except (MemoryError, RecursionError) as error:
        told = [FAILED, f"it needs too much memory ({type(error).__name__})"]
    except Exception as error:
        told = [FAILED, f"{type(error).__name__}: {error}"[:500]]
    packed: bytes = msgpack.packb(told)
    return packed


def main() -> None:
    """Until the parent closes the pipe, or kills."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    processes.follow_parent()
    processes.set_title("frontend", sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, b"")
    while (request := read_frame(requests)) is not None:
        write_frame(answers, answer(request))


if __name__ == "__main__":
    main()
