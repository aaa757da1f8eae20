"""What a report is made of, once for both of its media: sections of paragraphs, tables, figures and details.

`markdown` writes them as a code host shows them; `report.html.j2` writes the same blocks as a page. Whatever they say may
hold names of others, which each medium escapes where it writes them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specbench.reporting import text


@dataclass(frozen=True)
class Cell:
    """A cell that says more than its text.

    tone: what its colour says: good, bad, open, or away where nothing was measured. beside: what was published. hint: on
    hovering. parts: lines instead of a text.
    """

    text: str
    tone: str = ""
    beside: str | None = None
    hint: str = ""
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Paragraph:
    """A sentence. lead: a word in front that must not be overlooked."""

    text: str
    role: Literal["", "answer", "note"] = ""
    lead: str = ""
    kind: str = "paragraph"


@dataclass(frozen=True)
class Table:
    """look: plain numbers, long words, a square of drafters, or pairs of measured and published."""

    columns: Sequence[str]
    lines: Sequence[Sequence[str | Cell]]
    caption: str = ""
    look: Literal["numbers", "words", "matrix", "pairs"] = "numbers"
    kind: str = "table"


@dataclass(frozen=True)
class Figures:
    """Drawings by name, those of them that were drawn. wide: one to a line."""

    names: tuple[str, ...]
    wide: bool = False
    kind: str = "figures"


@dataclass(frozen=True)
class Tally:
    """Counts in one line, each with what a colour says of it."""

    lead: str
    counts: Sequence[Cell]
    kind: str = "tally"


@dataclass(frozen=True)
class Row:
    """Blocks side by side, where a page is wide enough."""

    blocks: Sequence["Block"]
    kind: str = "row"


@dataclass(frozen=True)
class Link:
    """A file below the report's folder, which the page names and does not hold."""

    title: str
    file: str
    kind: str = "link"


@dataclass(frozen=True)
class Details:
    """Blocks behind a line. file: where Markdown has them, below the report's folder. open: the page shows them at once."""

    title: str
    blocks: Sequence["Block"]
    file: str = ""
    open: bool = False
    kind: str = "details"


Block = Paragraph | Table | Figures | Tally | Row | Link | Details


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it. short: in the page's contents."""

    anchor: str
    short: str
    title: str
    blocks: Sequence[Block]


def markdown(sections: Iterable[Section], drawn: Mapping[str, str]) -> str:
    """All sections, without what has files of its own. drawn: name -> what it shows, of the figures beside the report."""
    parts = [line for s in sections for line in ("", f"## {s.title}", "", *_blocks(s.blocks, drawn))]
    return _text(parts)


def files(blocks: Iterable[Block], drawn: Mapping[str, str]) -> dict[str, str]:
    """The details that have files of their own: path below the report's folder -> Markdown."""
    found = {}
    for block in blocks:
        if isinstance(block, Details) and block.file:
            found[block.file] = whole(block.title, block.blocks, drawn, "../" * block.file.count("/"))
        if isinstance(block, Details | Row):
            found |= files(block.blocks, drawn)
    return found


def whole(title: str, blocks: Iterable[Block], drawn: Mapping[str, str], up: str = "../") -> str:
    """A file of its own. up: the way from it to the report's folder."""
    return _text([f"# {text.markdown(title)}", "", *_blocks(blocks, drawn, up)])


def _text(lines: Iterable[str]) -> str:
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _blocks(blocks: Iterable[Block], drawn: Mapping[str, str], up: str = "") -> list[str]:
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Paragraph):
            lead = f"**{block.lead}** " if block.lead else ""
            strong = "**" if block.role == "answer" else ""
            lines += ["", f"{lead}{strong}{text.markdown(block.text)}{strong}", ""]
        elif isinstance(block, Table):
            lines += ["", f"*{text.markdown(block.caption)}*"] if block.caption else []
            lines += ["", table(block), ""]
        elif isinstance(block, Figures):
            lines += [f"\n![{drawn[name]}]({up}figures/{name}.png)\n" for name in block.names if name in drawn]
        elif isinstance(block, Tally):
            lines += [f"{text.markdown(block.lead)}: {', '.join(map(_cell, block.counts))}.", ""]
        elif isinstance(block, Row):
            lines += _blocks(block.blocks, drawn, up)
        elif block.file:
            lines += [f"- [{text.markdown(block.title)}]({up}{block.file})"]
        elif isinstance(block, Details):
            lines += ["", f"<details><summary>{text.html(block.title)}</summary>", "", *_blocks(block.blocks, drawn, up)]
            lines += ["</details>", ""]
    return lines


def table(block: Table) -> str:
    """A table as Markdown, without its caption."""
    heading = "| " + " | ".join(map(text.markdown, block.columns)) + " |"
    body = ["| " + " | ".join(map(_cell, line)) + " |" for line in block.lines]
    return "\n".join([heading, "|---" * len(block.columns) + "|", *body])


def _cell(cell: str | Cell) -> str:
    """What a page says by colour is bold here."""
    if isinstance(cell, str):
        return text.markdown(cell)
    shown = text.markdown("; ".join(cell.parts) or cell.text)
    if cell.beside is not None:
        return f"{shown} / {text.markdown(cell.beside)}"
    return f"**{shown}**" if shown and cell.tone in ("good", "bad") else shown
