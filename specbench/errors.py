"""The one exception a user is meant to read. Knows nothing else in the project."""

# Of what a configuration library wraps, only the inside is worth reading.
_CONFIG_LIBRARIES = ("hydra.", "omegaconf.")


class SpecBenchError(Exception):
    """Something the user can mend: the message names the thing and the mend, in one line."""


def one_line(error: BaseException) -> str:
    """The error's text on one line; of a configuration library's wrapping only what it wraps."""
    cause = error.__cause__
    if type(error).__module__.startswith(_CONFIG_LIBRARIES) and isinstance(cause, (SpecBenchError, ValueError)):
        error = cause
    return " ".join(str(error).split())
