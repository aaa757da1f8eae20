"""Escaping of text (names, errors, claims) for each medium; to be applied once, where the text enters the medium.

Every function makes control characters visible (`common.errors.visible`) and escapes the medium's special characters.
"""

import csv
import io
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup, escape

from specbench.common.errors import visible

# Special characters of GitHub's Markdown where they have a meaning; they become character references, which no renderer
# misreads. Underscores inside words, brackets without a link and signs between spaces have none and stay readable.
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
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # their wide forms as well
_NUMBER = re.compile(r"[-+]?[\d.,]*%?( [\[(][-+\d., ]+[\])])*")  # with interval; or a dash, where nothing was measured
MAX_LABEL = 60  # characters of a label in a figure


def markdown(text: str) -> str:
    """For a table cell or the inside of a line, not for its beginning."""
    return _MARKS.sub(lambda match: f"&#{ord(match[0])};", visible(text))


def html(value: Any) -> Markup:
    """For an element or a quoted attribute; markup is not escaped again."""
    return value if isinstance(value, Markup) else escape(visible(str(value)))


def latex(text: str) -> str:
    """For a cell of `tabular`. A bracket or star in front would be an argument of the line break before."""
    escaped = "".join(_LATEX.get(sign, sign) for sign in visible(text))
    return f"{{{escaped[0]}}}{escaped[1:]}" if escaped[:1] in ("[", "*") else escaped


def mathtext(text: str) -> str:
    """For Matplotlib, which reads formulas between dollars and hides labels that begin with `_`; shortened."""
    label = visible(text)
    label = label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"
    return (" " if label.startswith("_") else "") + label.replace("$", r"\$")


def slug(text: str) -> str:
    """For a part of a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:MAX_LABEL]


def csv_table(lines: Iterable[Sequence[str]]) -> str:
    """Lines of texts, headings included, as CSV."""
    made = io.StringIO()
    csv.writer(made, lineterminator="\n").writerows([csv_cell(cell) for cell in line] for line in lines)
    return made.getvalue()


def csv_cell(value: str) -> str:
    """For a spreadsheet, which would run a cell that begins as a formula does; numbers and intervals stay as they are."""
    shown = visible(value)
    return f"'{shown}" if shown.startswith(_FORMULA) and not _NUMBER.fullmatch(shown) else shown


def latex_table(heads: Sequence[Sequence[str]], lines: Iterable[Sequence[str]]) -> str:
    """Lines of texts as `tabular`. heads: lines of headings; equal ones side by side span their columns."""
    body = [" & ".join(map(latex, line)) + r" \\" for line in lines]
    columns = "l" * len(heads[0])
    parts = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", *map(_spanned, heads), r"\midrule", *body, r"\bottomrule"]
    return "\n".join(parts) + "\n\\end{tabular}\n"


def _spanned(head: Sequence[str]) -> str:
    cells = []
    for label, same in itertools.groupby(head):
        count, own = len(list(same)), latex(label)
        cells += [f"\\multicolumn{{{count}}}{{r}}{{{own}}}"] if label and count > 1 else [own] * count
    return " & ".join(cells) + r" \\"
