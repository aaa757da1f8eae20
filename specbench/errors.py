"""The one exception a user is meant to read, and the wrapper that prints it. Knows nothing else in the project."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Printed instead of a traceback: they are mistakes in what was asked for, and their text says which.
_CONFIG_LIBRARIES = ("hydra.", "omegaconf.")


class SpecBenchError(Exception):
    """Something the user can mend: the message names the thing and the mend, in one line."""


def one_line(error: BaseException) -> str:
    """The error's text on one line; of a configuration library's wrapping only what it wraps."""
    cause = error.__cause__
    if type(error).__module__.startswith(_CONFIG_LIBRARIES) and isinstance(cause, (SpecBenchError, ValueError)):
        error = cause
    return " ".join(str(error).split())


LONGEST = 300  # characters of another library's reason


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Around one call into another library that reads what others wrote: whatever it raises becomes one line.

    Such libraries raise anything at all on a damaged file, so nothing short of `Exception` will do. A line that is ours
    already passes, and so does memory that ran out, which says nothing about the file.

    Args:
        what: the line, naming the file and the mend; the library's reason stands behind it.
    """
    try:
        yield
    except (SpecBenchError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's; this file imports nothing
            raise
        reason = one_line(error)
        if len(reason.split()) < 2:  # a KeyError's text is the key alone
            reason = f"{type(error).__name__} {reason}".strip()
        raise SpecBenchError(f"{what} ({reason if len(reason) <= LONGEST else reason[:LONGEST] + '…'})") from error


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
    print(f"specbench: {line}", file=sys.stderr)
    return 2
