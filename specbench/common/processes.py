"""Processes that a process starts for itself. Knows nothing else in the project."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process

PR_SET_PDEATHSIG = 1  # of Linux' prctl: the signal that a process gets when the one that started it ends


def end_with_parent() -> None:
    """End this process when its parent ends: a killed parent cannot end it, and its memory would stay in use."""

    def watch() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def dying_with_parent(nice: int = 0) -> Callable[[], None]:
    """A `preexec_fn` for `subprocess`: on Linux the child is terminated when its parent is killed.

    nice: by how much its priority is lowered.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        os.nice(nice)
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return prepare
