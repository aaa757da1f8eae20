"""Groups of comparable entries: one cell, one kind of machine, the same prompts, one baseline."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.records import blocks
from specbench.records.metrics import BASELINE
from specbench.reporting.cells import Entry, collect


def groups(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Comparable entries. An arm with failed generations belongs to the other arms with the same prompts."""
    by_cell: dict[tuple[str, ...], list[Entry]] = {}
    for e in entries:
        by_cell.setdefault(e.cell, []).append(e)
    return [group for cell in by_cell.values() for group in _by_prompts(cell)]


def _by_prompts(cell: Sequence[Entry]) -> list[list[Entry]]:
    """Entries of one cell by their questions, each group with the baseline on these."""
    plain = [e for e in cell if e.name == BASELINE]
    arms = [e for e in cell if e.name != BASELINE]
    by_questions: dict[frozenset[str], list[Entry]] = {}
    for e in sorted(arms, key=lambda e: -len(e.questions)):
        larger = (asked for asked in by_questions if e.questions <= asked) if e.failed else iter(())
        by_questions.setdefault(next(larger, e.questions), []).append(e)
    if plain and not by_questions:
        by_questions[plain[0].questions] = []
    for questions, group in by_questions.items():
        if plain:
            group.insert(0, _among(max(plain, key=lambda e: len(e.questions & questions)), questions))
    order = {id(e): number for number, e in enumerate(cell)}
    return [sorted(group, key=lambda e: order.get(id(e), -1)) for group in by_questions.values()]


def _among(e: Entry, questions: frozenset[str]) -> Entry:
    """An entry restricted to some questions."""
    if e.questions <= questions:
        return e
    rows, base = ([r for r in some if r.asked in questions] for some in (e.rows, e.baseline))
    return e.with_rows(rows, base)


@dataclass(frozen=True)
class Asked:
    """What one process was to measure; tables of a run show only that, not older rows.

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


def measured(requests: Iterable[Asked]) -> list[Entry]:
    """Entries of what some processes were to measure, as far as there are rows."""
    folders: dict[str, list[Entry]] = {}
    entries: dict[tuple[Any, ...], Entry] = {}
    for asked in requests:
        if asked.folder not in folders:
            folders[asked.folder] = collect(blocks.below(Path(asked.folder)))
        questions, arms = frozenset(asked.questions), {tuple(key) for key in asked.arms}
        for e in folders[asked.folder]:
            *_, cell, machine = e.cell
            shared = e.questions & questions
            if cell == asked.cell and machine in (asked.machine, "") and e.key in arms and shared:
                entries[e.cell, e.name, e.key, shared] = _among(e, shared)
    return list(entries.values())
