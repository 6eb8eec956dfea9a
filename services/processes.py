"""What the supervisor and its children agree on: a child dies with its parent, and bears a title."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import NoReturn

import setproctitle

PARENT_VARIABLE = "SIGNALBOX_PARENT_PID"
ERROR_MARK = "signalbox: error: "  # how services/cli.py begins the one line that ends a command
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def child_environment() -> dict[str, str]:
    """The environment of a child that is to end when this process ends, however it ends."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}


def follow_parent() -> None:
    """In a child of `child_environment`: have the kernel kill this process when its parent is gone."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # it went before prctl could see it go
        sys.exit(1)


def watch_parent() -> int | None:
    """In a child of `child_environment` that ends in its own time: a descriptor that can be read once the parent, not
    only the thread of it that started us, is gone. None where there is no such parent."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent:
        return None
    watched = os.pidfd_open(int(parent))
    if os.getppid() != int(parent):
        sys.exit(1)
    return watched


def end_with_any_thread() -> None:
    """A service is whole or not at all: an error that ends one of its threads ends the process."""

    def end(failure: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(failure)
        os._exit(1)

    threading.excepthook = end


def end_now(why: str) -> NoReturn:
    """End this process from any thread, as one that was killed: nothing is said to anybody but the log."""
    print(f"{ERROR_MARK}{why}", file=sys.stderr, flush=True)
    os._exit(1)


def set_title(service: str, name: str) -> None:
    """Show the process as `signalbox-SERVICE NAME` in ps, pgrep and top."""
    setproctitle.setproctitle(f"signalbox-{service} {name}")
