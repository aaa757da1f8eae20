"""The one exception a user is meant to read, and the wrapper that prints it. Knows nothing else in the project."""

import os
import sys
from collections.abc import Callable

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


def run_door(main: Callable[[], None]) -> None:
    """Run a command-line door: mistakes end in one clear line and exit code 2, bugs keep their traceback.

    A full disk is a mistake of the machine, not a bug: it gets its one line too.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let Hydra's own errors reach us unformatted
    try:
        main()
    except SpecBenchError as error:
        sys.exit(_complain(one_line(error)))
    except KeyboardInterrupt:
        sys.exit(_complain("interrupted; run the same command again to continue"))
    except Exception as error:
        if type(error).__module__.startswith(_CONFIG_LIBRARIES):  # some of Hydra's are OSErrors too
            sys.exit(_complain(one_line(error)))
        if isinstance(error, OSError) and error.errno is not None:
            sys.exit(_complain(f"{error.strerror}: {error.filename or 'while writing'}; nothing half-written was kept"))
        raise


def _complain(line: str) -> int:
    print(f"specbench: {line}", file=sys.stderr)
    return 2
