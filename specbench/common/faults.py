"""Any exception as one line: a mistake says what to mend, a fault of this program names the file with its traceback."""

import os
import tempfile
import time
import traceback
from pathlib import Path

from specbench.common.errors import SpecBenchError, one_line
from specbench.common.storage import cache_root

# Mistakes in what was asked for, too, and their text says which.
CONFIGURATION = ("hydra.", "omegaconf.")


def told(error: BaseException) -> str:
    """What to say of an exception. The traceback of what nobody foresaw goes to a file under the cache."""
    if isinstance(error, SpecBenchError) or type(error).__module__.startswith(CONFIGURATION):
        return one_line(error)  # some of Hydra's are OSErrors too
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
        return f"out of memory ({one_line(error) or 'the machine has no more'}); take a smaller model, tree or batch"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}: {error.filename or 'while writing'}; nothing half-written was kept"
    text = "".join(traceback.format_exception(error))
    what = f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")
    return f"{what} (a fault of SpecBench; its traceback is in {_keep(text)})"


def _keep(text: str) -> Path:
    """Write a traceback down, if not under the cache then wherever files can be written."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        path = cache_root() / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        path = Path(tempfile.gettempdir()) / f"specbench-{name}"
        path.write_text(text, encoding="utf-8")
    return path
