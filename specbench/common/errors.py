"""The exception for errors that users can fix, and one-line messages of all others, whose traceback goes to a file."""

import difflib
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_CONFIG_LIBRARIES = ("hydra.", "omegaconf.")  # their errors are errors of the user, often wrapped around one of ours
# Control characters, marks of direction, characters without width, line separators, lone surrogates, tags.
_INVISIBLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)
# In messages of torch's allocator, of C++ and of the system; a size beyond the address space, too.
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator|bad_?alloc|[Cc]annot allocate memory|CUDA out of memory|Storage size calculation"
)


class SpecBenchError(Exception):
    """An error that the user can fix: the message says in one line what is wrong and how to fix it."""


class Reported(SpecBenchError):
    """An error that was printed where it was raised."""


def visible(text: str) -> str:
    """Text whose control characters and marks of direction are escaped, as `\\x1b`; idempotent."""
    return _INVISIBLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(error: BaseException) -> str:
    """The error's text on one line; of an error that a configuration library wraps, the inner one's."""
    cause = error.__cause__
    if type(error).__module__.startswith(_CONFIG_LIBRARIES) and isinstance(cause, (SpecBenchError, ValueError)):
        error = cause
    return visible(" ".join(str(error).split()))


def warn(message: str) -> None:
    """Print a line on a problem after which the work goes on."""
    print(f"specbench: {visible(message)}", file=sys.stderr, flush=True)


def nearest(name: object, known: Collection[str]) -> str:
    """The end of a message on an unknown name: the nearest known name, or all if they are few."""
    near = difflib.get_close_matches(str(name), known, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(known)}" if 0 < len(known) <= 20 else ""


def shorten(text: str, length: int) -> str:
    """A text cut to at most `length` characters."""
    return text if len(text) <= length else text[: length - 1].rstrip(" ,;:") + "…"


@contextmanager
def refusing(message: str) -> Iterator[None]:
    """Around a library's call that reads foreign data: any exception becomes a `SpecBenchError`, except lack of memory.

    message: names the file and how to fix it; the library's reason is appended.
    """
    try:
        yield
    except (SpecBenchError, MemoryError):
        raise
    except Exception as error:
        if _out_of_memory(error):
            raise
        reason = one_line(error)
        if len(reason.split()) < 2:  # a KeyError's text is the key alone
            reason = f"{type(error).__name__} {reason}".strip()
        raise SpecBenchError(f"{message} ({shorten(reason, 300)})") from error


def format_exception(error: BaseException) -> str:
    """An exception as one line. The traceback of an unexpected one goes to a file under the cache."""
    if isinstance(error, SpecBenchError) or type(error).__module__.startswith(_CONFIG_LIBRARIES):
        return one_line(error)  # some of Hydra's are OSErrors too
    if _out_of_memory(error):
        return f"out of memory ({one_line(error) or 'the machine has no more'}); take a smaller model, tree or batch"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}: {error.filename or 'while writing'}; nothing half-written was kept"
    text = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")
    return f"{summary} (a fault of SpecBench; its traceback is in {_write_log(text)})"


def _out_of_memory(error: BaseException) -> bool:
    """Is it a library's lack of memory? torch's own class, not imported here, is for devices alone."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or (isinstance(error, (RuntimeError, OSError)) and bool(_NO_MEMORY.search(str(error))))


def _write_log(text: str) -> Path:
    """Write a traceback to a file under the cache, or to the folder for temporary files if that fails."""
    from specbench.common.storage import cache_root

    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        path = cache_root() / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except (OSError, SpecBenchError):
        path = Path(tempfile.gettempdir()) / f"specbench-{name}"
        path.write_text(text, encoding="utf-8")
    return path
