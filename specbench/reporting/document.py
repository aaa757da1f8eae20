"""What a report is made of, once for both of its media: sections of sentences, tables, figures and folds.

`markdown` writes them as a code host shows them; `report.html.j2` writes the same blocks as a page. Whatever they say may
hold names of others, which each medium escapes where it writes them.
"""

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
class Says:
    """A sentence. lead: a word in front that must not be overlooked."""

    text: str
    role: Literal["", "answer", "note"] = ""
    lead: str = ""
    kind: str = "says"


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
class Fold:
    """Blocks behind a line. file: where Markdown finds them instead, below the report's folder."""

    title: str
    blocks: Sequence["Block"]
    file: str = ""
    open: bool = False
    kind: str = "fold"


Block = Says | Table | Figures | Tally | Fold


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it. short: in the page's contents."""

    anchor: str
    short: str
    title: str
    blocks: Sequence[Block]


def markdown(sections: Iterable[Section], drawn: Mapping[str, str]) -> str:
    """All sections. drawn: name -> what it shows, of the figures beside the report."""
    parts = []
    for section in sections:
        parts += [f"## {section.title}", "", *_blocks(section.blocks, drawn)]
    return "\n".join(parts).rstrip() + "\n"


def _blocks(blocks: Iterable[Block], drawn: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Says):
            lead = f"**{block.lead}** " if block.lead else ""
            strong = "**" if block.role == "answer" else ""
            lines += [f"{lead}{strong}{text.markdown(block.text)}{strong}", ""]
        elif isinstance(block, Table):
            lines += [f"*{text.markdown(block.caption)}*", ""] if block.caption else []
            lines += [table(block), ""]
        elif isinstance(block, Figures):
            lines += [f"![{drawn[name]}](figures/{name}.png)\n" for name in block.names if name in drawn]
        elif isinstance(block, Tally):
            lines += [f"{text.markdown(block.lead)}: {', '.join(map(_cell, block.counts))}.", ""]
        elif block.file:
            lines += [f"- [{text.markdown(block.title)}]({block.file})"]
        else:
            lines += [f"<details><summary>{text.html(block.title)}</summary>", "", *_blocks(block.blocks, drawn)]
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
    said = text.markdown("; ".join(cell.parts) or cell.text)
    if cell.beside is not None:
        return f"{said} / {text.markdown(cell.beside)}"
    return f"**{said}**" if said and cell.tone in ("good", "bad") else said
