"""The one exception a user is meant to read, and any other exception as one line.

A mistake says what to change; a fault of this program names the file with its traceback.
"""

import difflib
import os
import re
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

# Their errors are mistakes in what was asked for; of what they wrap, only the inside is worth reading.
_CONFIG_LIBRARIES = ("hydra.", "omegaconf.")
# Control characters of both kinds, marks of direction, what has no width, ends of lines, halves of pairs, tags.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)


class SpecBenchError(Exception):
    """Something the user can fix: the message says in one line what is wrong and how to fix it."""


def visible(text: str) -> str:
    """Text whose control characters and marks of direction are escaped, as `\\x1b`; idempotent."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(error: BaseException) -> str:
    """The error's text on one line; of a configuration library's wrapping only what it wraps."""
    cause = error.__cause__
    if type(error).__module__.startswith(_CONFIG_LIBRARIES) and isinstance(cause, (SpecBenchError, ValueError)):
        error = cause
    return visible(" ".join(str(error).split()))


def nearest(name: object, known: Collection[str]) -> str:
    """The end of a message on an unknown name: the nearest known one, or all if they are few."""
    near = difflib.get_close_matches(str(name), known, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(known)}" if 0 < len(known) <= 20 else ""


def shorten(text: str, length: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= length else text[: length - 1].rstrip(" ,;:") + "…"


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Around one call into another library that reads what others wrote: whatever it raises becomes one line.

    Such libraries raise anything at all on a damaged file, so nothing short of `Exception` will do. A line that is ours
    already passes, and so does memory that ran out, which says nothing about the file.

    Args:
        what: the line, naming the file and how to fix it; the library's reason stands behind it.
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
        raise SpecBenchError(f"{what} ({shorten(reason, 300)})") from error


def format_exception(error: BaseException) -> str:
    """One line on an exception. The traceback of one that nobody foresaw goes to a file under the cache."""
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
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, not imported here


def _write_log(text: str) -> Path:
    """Write a traceback to a file, if not under the cache then wherever files can be written."""
    from specbench.common.storage import cache_root

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
