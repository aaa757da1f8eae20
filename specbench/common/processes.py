"""Child processes that end with their parent."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process

INTERRUPTED = 130  # exit code of a command that Ctrl-C ended
PR_SET_PDEATHSIG = 1  # option of Linux' prctl: the signal that a process receives when its parent ends


def end_with_parent() -> None:
    """Start a thread that ends this process when its parent ends, even if that is killed."""

    def watch() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def dying_with_parent(nice: int = 0) -> Callable[[], None]:
    """A `preexec_fn` for `subprocess`: on Linux the child is terminated when its parent ends. nice: its nice value."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        os.nice(nice)
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return prepare


def was_interrupted(returncode: int) -> bool:
    """Whether somebody ended a child, with Ctrl-C or SIGTERM. Where memory ran out the system sends SIGKILL."""
    return returncode in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)


def signal_of(returncode: int) -> str | None:
    """The name of the signal that ended a child; None if it ended by itself."""
    return signal.Signals(-returncode).name if returncode < 0 else None
