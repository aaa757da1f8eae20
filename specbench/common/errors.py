"""The one exception a user is meant to read. Knows nothing else in the project."""

import difflib
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

# Of what a configuration library wraps, only the inside is worth reading.
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


def nearest(name: object, known: Collection[str]) -> str:
    """What to say behind the name of an option that is none: the nearest one, or which there are."""
    near = difflib.get_close_matches(str(name), known, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(known)}" if 0 < len(known) <= 20 else ""


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
