"""Which entries stand in one table: those that were measured alike, with one baseline."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.records import blocks
from specbench.records.metrics import BASELINE
from specbench.reporting.cells import Entry, collect

Captioned = tuple[str, list[Entry]]


def groups(entries: Iterable[Entry]) -> list[Captioned]:
    """Comparable entries under their captions: of one cell, on one kind of machine, of the same prompts, with one baseline.

    An arm of which some generations failed stands beside the others that were asked the same.
    """
    by_cell: dict[tuple[str, ...], list[Entry]] = {}
    for e in entries:
        by_cell.setdefault(e.cell or (e.caption,), []).append(e)
    return [found for cell in by_cell.values() for found in _by_prompts(cell)]


def _by_prompts(cell: Sequence[Entry]) -> list[Captioned]:
    """Entries of one cell, apart where they were asked different questions."""
    plain = [e for e in cell if e.name == BASELINE]
    found: dict[frozenset[str], list[Entry]] = {}
    arms = [e for e in cell if e.name != BASELINE]
    for e in sorted(arms, key=lambda e: -len(e.questions)):
        whole = next((known for known in found if e.questions == known or (e.failed and e.questions < known)), e.questions)
        found.setdefault(whole, []).append(e)
    if plain and not found:
        found[plain[0].questions] = []
    for questions, group in found.items():
        if plain:
            group.insert(0, _among(max(plain, key=lambda e: len(e.questions & questions)), questions))
    place = {id(e): number for number, e in enumerate(cell)}
    return [(g[-1].caption, sorted(g, key=lambda e: place.get(id(e), -1))) for g in found.values()]


def _among(e: Entry, questions: frozenset[str]) -> Entry:
    """An entry of these questions alone."""
    if e.questions <= questions:
        return e
    rows, base = ([r for r in some if (r.text or r.question) in questions] for some in (e.rows, e.baseline))
    return e.with_rows(rows, base)


@dataclass(frozen=True)
class Asked:
    """What one process was asked for, so that a table shows that and nothing older.

    Attributes:
        folder: of the cell. cell, machine, arms: see `specbench.records.identity`. questions: their digests.
    """

    folder: str
    cell: str
    machine: str
    arms: list[tuple[str, str]]
    questions: list[str]

    @classmethod
    def of(cls, ledger: blocks.Ledger, questions: Sequence[str]) -> "Asked":
        return cls(str(ledger.folder), ledger.cell, ledger.machine, list(ledger.arms.values()), list(questions))


def measured(wanted: Iterable[Asked]) -> list[Entry]:
    """What there is of that which some processes were asked for."""
    folders: dict[str, list[Entry]] = {}
    found: dict[tuple[Any, ...], Entry] = {}
    for one in wanted:
        if one.folder not in folders:
            folders[one.folder] = collect(blocks.below(Path(one.folder)))
        questions, arms = frozenset(one.questions), {tuple(key) for key in one.arms}
        for e in folders[one.folder]:
            if (
                e.cell[3] == one.cell
                and e.cell[4] in (one.machine, "")
                and e.key in arms
                and (shared := e.questions & questions)
            ):
                found[e.cell, e.name, e.key, shared] = _among(e, shared)
    return list(found.values())
