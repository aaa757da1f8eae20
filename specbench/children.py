"""Processes that a process starts for itself. Knows nothing else in the project."""

import os
import threading
from multiprocessing import parent_process


def end_with_parent() -> None:
    """A killed process cannot end the one that it started, which would wait for it for ever, with all its memory."""

    def watch() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
