"""The blocks of a report (paragraphs, tables, figures, details), and their Markdown. `report.html.j2` makes the page.

Texts are escaped where they are written into a medium.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specbench.reporting import text


@dataclass(frozen=True)
class TableCell:
    """A table cell.

    tone: its colour: good, bad, open (undecided) or away (not measured). beside: the published value. hint: shown on
    hovering. parts: lines instead of a text.
    """

    text: str
    tone: str = ""
    beside: str | None = None
    hint: str = ""
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Paragraph:
    """Text. lead: a highlighted word in front."""

    text: str
    role: Literal["", "answer", "note"] = ""
    lead: str = ""
    kind: str = "paragraph"


@dataclass(frozen=True)
class Table:
    """look: numbers, long texts, a square of drafters, or pairs of measured and published values."""

    columns: Sequence[str]
    lines: Sequence[Sequence[str | TableCell]]
    caption: str = ""
    look: Literal["numbers", "words", "matrix", "pairs"] = "numbers"
    kind: str = "table"


@dataclass(frozen=True)
class Figures:
    """Figures by name; those that were not drawn are left out."""

    names: tuple[str, ...]
    kind: str = "figures"


@dataclass(frozen=True)
class Tally:
    """Counts in one line, each with its colour."""

    lead: str
    counts: Sequence[TableCell]
    kind: str = "tally"


@dataclass(frozen=True)
class SideBySide:
    """Blocks side by side, if the page is wide enough."""

    blocks: Sequence["Block"]
    kind: str = "row"


@dataclass(frozen=True)
class Link:
    """A file of the report that the page does not contain."""

    title: str
    file: str
    kind: str = "link"


@dataclass(frozen=True)
class Details:
    """Folded blocks. file: relative path of the Markdown file that contains them. open: unfolded on the page."""

    title: str
    blocks: Sequence["Block"]
    file: str = ""
    open: bool = False
    kind: str = "details"


Block = Paragraph | Table | Figures | Tally | SideBySide | Link | Details


@dataclass(frozen=True)
class Section:
    """A heading with its blocks. short: title in the page's navigation."""

    anchor: str
    short: str
    title: str
    blocks: Sequence[Block]


def markdown(sections: Iterable[Section], drawn: Mapping[str, str]) -> str:
    """All sections, without the blocks that have files of their own. drawn: titles of the figures by name."""
    return _text(line for s in sections for line in ("", f"## {s.title}", "", *_blocks(s.blocks, drawn)))


def files(blocks: Iterable[Block], drawn: Mapping[str, str]) -> dict[str, str]:
    """The details with files of their own: relative path -> Markdown."""
    texts = {}
    for block in blocks:
        if isinstance(block, Details) and block.file:
            texts[block.file] = whole(block.title, block.blocks, drawn, "../" * block.file.count("/"))
        if isinstance(block, Details | SideBySide):
            texts |= files(block.blocks, drawn)
    return texts


def tables(blocks: Iterable[Block]) -> dict[str, Table]:
    """The table of each file in `tables/` that holds a single one, by the file's path without suffix."""
    made: dict[str, Table] = {}
    for block in blocks:
        if isinstance(block, Details) and block.file.startswith("tables/"):
            own = [part for part in block.blocks if isinstance(part, Table)]
            made |= {block.file.removesuffix(".md"): own[0]} if len(own) == 1 else {}
        if isinstance(block, Details | SideBySide):
            made |= tables(block.blocks)
    return made


def whole(title: str, blocks: Iterable[Block], drawn: Mapping[str, str], up: str = "../") -> str:
    """A file with a title. up: relative path to the report's folder."""
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
            captions = {name: text.markdown(drawn[name]) for name in block.names if name in drawn}
            lines += [f"\n![]({up}figures/{name}.png)\n\n*{caption}*\n" for name, caption in captions.items()]
        elif isinstance(block, Tally):
            lines += [f"{text.markdown(block.lead)}: {', '.join(map(_cell, block.counts))}.", ""]
        elif isinstance(block, SideBySide):
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


def _cell(cell: str | TableCell) -> str:
    """Good and bad cells are bold."""
    shown = text.markdown(plain(cell))
    return f"**{shown}**" if shown and isinstance(cell, TableCell) and cell.tone in ("good", "bad") else shown


def plain(cell: str | TableCell) -> str:
    """A cell's text, with the published value beside it."""
    if isinstance(cell, str):
        return cell
    shown = "; ".join(cell.parts) or cell.text
    return shown if cell.beside is None else f"{shown} / {cell.beside}"
