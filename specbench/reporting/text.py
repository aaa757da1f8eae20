"""Text of others, such as names, errors and claims, into a medium: one function each, applied once, where it enters.

All of them make control characters visible first (`common.errors.visible`), and then take the medium's own signs for what
they are: letters. Knows errors and nothing else in the project.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape
from rich.text import Text

from specbench.common.errors import visible

if TYPE_CHECKING:
    import pandas as pd

# What GitHub's Markdown would take for a mark, as a character reference: no renderer takes those for anything else.
# Underscores inside words, brackets that are no link and signs between spaces mean nothing to it and stay readable.
_MARKS = re.compile(
    r"""\\(?=[!-/:-@\[-`{-~])   # a backslash before punctuation
      | &(?=\#?\w+;)             # the beginning of a character reference
      | <(?=[\w/!?])             # of a tag, a comment, an address
      | [|`$]                    # the end of a cell, code, a formula
      | (?<!\ )\*|\*(?!\ )       # emphasis
      | (?<![^\W_])_|_(?![^\W_]) # emphasis, only at a word's edge
      | ~(?=~)|(?<=~)~           # struck out
      | \](?=[(:\[])             # the middle of a link
    """,
    re.VERBOSE | re.ASCII,
)
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": "\\textbackslash ",
    "~": "\\textasciitilde ",
    "^": "\\textasciicircum ",
    "|": "\\textbar ",
}
LONGEST = 60  # letters of a label in a figure


def terminal(text: str) -> Text:
    """For Rich, which would read `[bold]` and `:smile:` in a plain string."""
    return Text(visible(text))


def markdown(text: str) -> str:
    """For a cell or inside a line, not for its beginning."""
    return _MARKS.sub(lambda found: f"&#{ord(found[0])};", visible(text))


def html(value: Any) -> Markup:
    """For an element or a quoted attribute; what is markup already passes."""
    return value if isinstance(value, Markup) else escape(visible(str(value)))


def latex(text: str) -> str:
    """For a cell of `tabular`. A bracket or star in front would be an argument of the line break before."""
    escaped = "".join(_LATEX.get(sign, sign) for sign in visible(text))
    return f"{{{escaped[0]}}}{escaped[1:]}" if escaped[:1] in ("[", "*") else escaped


def mathtext(text: str) -> str:
    """For Matplotlib, which reads formulas between dollars, hides labels that begin with `_`, and has little room."""
    shown = visible(text)
    shown = shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"
    return (" " if shown.startswith("_") else "") + shown.replace("$", r"\$")


def slug(text: str) -> str:
    """A part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:LONGEST]


def csv_table(frame: "pd.DataFrame", index: bool) -> str:
    """A frame of texts as CSV."""
    written: str = _each(frame, visible).to_csv(index=index, lineterminator="\n")
    return written


def latex_table(frame: "pd.DataFrame", index: bool) -> str:
    """A frame of texts as LaTeX."""
    written: str = _each(frame, latex).to_latex(index=index, escape=False)
    return written


def _each(frame: "pd.DataFrame", change: Callable[[str], str]) -> "pd.DataFrame":
    """Cells, columns and index changed alike."""
    return frame.astype(str).map(change).rename(columns=change, index=lambda label: change(str(label)))
