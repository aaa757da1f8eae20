"""The one exception a user is meant to read, and the wrapper that prints it. Knows nothing else in the project."""

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

# Printed instead of a traceback: they are mistakes in what was asked for, and their text says which.
_CONFIG_LIBRARIES = ("hydra.", "omegaconf.")
# Control characters of both kinds, marks of direction, what has no width, ends of lines, halves of pairs, tags.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)


class SpecBenchError(Exception):
    """Something the user can mend: the message names the thing and the mend, in one line."""


def visible(text: str) -> str:
    """What moves a cursor, ends a line or turns direction becomes its escape, as `\\x1b`; doing so twice does no harm."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(error: BaseException) -> str:
    """The error's text on one line; of a configuration library's wrapping only what it wraps."""
    cause = error.__cause__
    if type(error).__module__.startswith(_CONFIG_LIBRARIES) and isinstance(cause, (SpecBenchError, ValueError)):
        error = cause
    return visible(" ".join(str(error).split()))


def spoken(job: Callable[..., None]) -> Callable[..., None]:
    """Wrap a job: mistakes end in one clear line and exit code 2 here, before Hydra adds lines of its own.

    A full disk is a mistake of the machine, not a bug: it gets its one line too. Bugs keep their traceback.
    """

    @functools.wraps(job)
    def wrapped(*args: Any) -> None:
        try:
            job(*args)
        except KeyboardInterrupt:
            sys.exit(_complain("interrupted; run the same command again to continue"))
        except Exception as error:
            if isinstance(error, SpecBenchError) or type(error).__module__.startswith(_CONFIG_LIBRARIES):
                sys.exit(_complain(one_line(error)))  # some of Hydra's are OSErrors too
            if isinstance(error, OSError) and error.errno is not None:
                sys.exit(_complain(f"{error.strerror}: {error.filename or 'while writing'}; nothing half-written was kept"))
            raise

    return wrapped


def run_door(main: Callable[[], None]) -> None:
    """Run a command-line door; mistakes in the configuration itself are `spoken` too."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let Hydra's own errors reach us unformatted
    spoken(main)()


def _complain(line: str) -> int:
    print(f"specbench: {visible(line)}", file=sys.stderr)
    return 2
