"""The papers' numeric tables from `results/published/*.csv`, with measured numbers beside the published ones.

A study assigns its arms to published drafters (`Study.shows`). The arm's value for a cell's dataset, temperature and metric
is shown beside the number that was published for the same target, or, if the table does not have that target, beside that
of another one, which is marked. What was not measured stays empty.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
from pydantic import StringConstraints
from typing_extensions import TypedDict

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_text, readable, validate
from specbench.reporting import text
from specbench.reporting.beside import Beside, assigned, matching
from specbench.reporting.evidence import Evidence


class PrintedNumber(TypedDict):
    """A published number. variant: `name=value`, separated by a semicolon and a space."""

    paper: str
    table: str
    row: str
    column: str
    hardware: str
    target: str
    drafter: str
    variant: Annotated[str, StringConstraints(pattern=r"^([^=;]+=[^;]*(; [^=;]+=[^;]*)*)?$")]
    dataset: str
    temperature: Annotated[str, StringConstraints(pattern=r"^([0-9]{1,6}([.][0-9]{1,15})?)?$")]
    metric: str
    value: Annotated[str, StringConstraints(pattern=r"^-?[0-9]{1,15}([.][0-9]{1,15})?$")]
    unit: str
    tau_convention: str
    note: str


FIELDS = tuple(PrintedNumber.__annotations__)
TITLES = {
    "beagle": "Beagle (arXiv:2505.24544)",
    "coral": "CORAL (arXiv:2502.16880)",
    "eagle": "EAGLE (arXiv:2401.15077)",
    "moa": "Mixture of Attentions (arXiv:2410.03804)",
    "spec-bench": "Spec-Bench, leaderboard",
    "slides": "Slides on Leviathan et al., Medusa, EAGLE and HASS",
}


def load(folder: Path, problems: list[str] | None = None) -> pd.DataFrame:
    """All published numbers, in the order of the files. problems: see `specbench.common.io.readable`.

    Raises:
        SpecBenchError: no file, wrong columns, or a value that is not a number; it names file and line.
    """
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise SpecBenchError(f"no published numbers in {folder}")
    cells = [cell for _, part in readable(paths, read, problems) for cell in part]
    numbers = pd.DataFrame(cells, columns=list(FIELDS), dtype=str)
    numbers["number"] = numbers["value"].astype(float)
    return numbers


def read(path: Path) -> list[Any]:
    """The cells of one file."""
    lines = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    cells = []
    try:
        if tuple(next(lines, ())) != FIELDS:
            raise SpecBenchError(f"{path}: the columns must be {','.join(FIELDS)}")
        for line in lines:
            where = f"{path} line {lines.line_num}"
            if len(line) != len(FIELDS):
                raise SpecBenchError(f"{where}: {len(line)} values in {len(FIELDS)} columns; correct or remove it")
            cells.append(validate(dict(zip(FIELDS, line, strict=True)), PrintedNumber, where))
    except csv.Error as error:
        raise SpecBenchError(f"{path} line {lines.line_num} is not CSV ({error}); correct or remove it") from error
    return cells


ELSEWHERE = "another target"  # shown instead of a value that was published for one


class Pair(NamedTuple):
    """A cell's measured and published ("" if none) value, the arm measured, and whether both have the same target."""

    measured: float | None
    published: str
    source: str = ""
    alike: bool = False


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper, as published, and as measured by a study if one is named."""

    paper: str
    table: str
    columns: tuple[str, ...]
    cells: Mapping[str, Mapping[str, Pair]]
    notes: tuple[str, ...]
    conventions: tuple[str, ...]
    published_on: str
    study: str = ""
    measured_on: str = ""
    again: bool = False  # an earlier study shows the same table

    @property
    def slug(self) -> str:
        """Its file name, without suffix."""
        return text.slug(f"{self.paper}-{self.table}{'-' + self.study if self.again else ''}")

    @property
    def title(self) -> str:
        return f"{TITLES.get(self.paper, self.paper)}, {self.table}"

    @property
    def targets(self) -> str:
        """Targets and machines of the published and the measured values."""
        theirs = f"published: {self.published_on or 'no target named'}"
        return f"{theirs}; measured here: {self.measured_on}" if self.measured_on else theirs

    @property
    def measured(self) -> int:
        """Number of cells with a measured value."""
        return sum(pair.measured is not None for row in self.cells.values() for pair in row.values())

    def pairs(self) -> list[list[Pair | None]]:
        """By row and column."""
        return [[row.get(c) for c in self.columns] for row in self.cells.values()]

    @property
    def heads(self) -> list[list[str]]:
        """Lines of headings for `lines`."""
        if not self.measured:
            return [["", *self.columns], ["row", *("" for _ in self.columns)]]
        sides = ("measured", "published") * len(self.columns)
        return [["", *(c for c in self.columns for _ in range(2))], ["", *sides], ["row", *("" for _ in sides)]]

    @property
    def csv_heads(self) -> list[list[str]]:
        """The same for CSV, in one line if it suffices."""
        return self.heads if self.measured else [["row", *self.columns]]

    def lines(self) -> list[list[str]]:
        """Two columns a column of the paper, measured and published; only published ones if nothing was measured."""
        first = 0 if self.measured else 1
        made = []
        for row, line in zip(self.cells, self.pairs(), strict=True):
            sides = ((shown(pair), pair.published) if pair else ("", "") for pair in line)
            made.append([row, *(text for both in sides for text in both[first:])])
        return made


def shown(pair: Pair) -> str:
    """The measured half."""
    value = pair.measured
    return "" if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"


def tables(published: pd.DataFrame, known: Mapping[str, Evidence], problems: list[str] | None = None) -> list[PaperTable]:
    """Every table of every paper, once for each study that shows it and measured something of it.

    Args:
        known: by study. problems: a line is appended for each row that a study shows and no table has.
    """
    made: list[PaperTable] = []
    absent = {(name, key) for name, evidence in known.items() for key in _keys(evidence)}
    for (paper, table), part in published.groupby(["paper", "table"], sort=False):
        own: list[PaperTable] = []
        for name, evidence in known.items():
            for shows in (s for s in evidence.study.get("shows", []) if (s["paper"], s["table"]) == (paper, table)):
                absent -= {(name, (paper, table, key)) for key in shows["arms"] if not matching(part, key).empty}
                rebuilt = _table(str(paper), str(table), part, Beside(part, shows, evidence), name, bool(own))
                own += [rebuilt] if rebuilt.measured else []
        made += own or [_table(str(paper), str(table), part)]
    if problems is not None:
        message = "study {} shows {}, which is not among the published numbers"
        problems += [message.format(name, " ".join(key)) for name, key in absent]
    return made


def _keys(evidence: Evidence) -> list[tuple[str, str, str]]:
    return [(s["paper"], s["table"], key) for s in evidence.study.get("shows", []) for key in s["arms"]]


def _table(
    paper: str, table: str, part: pd.DataFrame, beside: Beside | None = None, study: str = "", again: bool = False
) -> PaperTable:
    cells: dict[str, dict[str, Pair]] = {}
    for cell in part.itertuples():
        value, source = beside.find(cell) if beside else (None, "")
        alike = beside is not None and cell.target in beside.targets
        cells.setdefault(str(cell.row), {})[str(cell.column)] = Pair(value, str(cell.value), source, alike)
    if not any(pair.measured is not None for row in cells.values() for pair in row.values()):
        beside = None
    return PaperTable(
        paper=paper,
        table=table,
        columns=tuple(dict.fromkeys(part["column"])),
        cells=cells,
        notes=_notes(part),
        conventions=tuple(sorted(set(part["tau_convention"]) - {""})),
        published_on=_targets(part if beside is None else beside.shown),
        study=study,
        measured_on="" if beside is None else beside.where,
        again=again,
    )


def _targets(part: pd.DataFrame) -> str:
    """Targets and hardware of published values."""
    by_hardware: dict[str, list[str]] = {}
    for target, hardware in dict.fromkeys(zip(part["target"], part["hardware"], strict=True)):
        if target:
            by_hardware.setdefault(hardware, []).append(target)
    return "; ".join(
        f"{', '.join(names)}{f' on {hardware}' if hardware else ''}" for hardware, names in by_hardware.items()
    )


def _notes(part: pd.DataFrame) -> tuple[str, ...]:
    """Notes on cells; one that many cells share is given once."""
    notes = []
    for note, rows in part[part["note"] != ""].groupby("note", sort=False):
        first = rows.iloc[0]
        notes.append(f"all, {len(rows)} cells: {note}" if len(rows) > 3 else f"{first['row']}, {first['column']}: {note}")
    return tuple(notes)


def placed(numbers: pd.DataFrame, evidence: Evidence) -> Iterator[tuple[Any, str]]:
    """The published cells to which a study assigns an arm, with that arm."""
    for shows in evidence.study.get("shows", []):
        part = numbers[(numbers["paper"] == shows["paper"]) & (numbers["table"] == shows["table"])]
        arms = assigned(part, shows, {e.model for e in evidence.entries})
        yield from ((cell, arms[cell.Index]) for cell in part.itertuples() if cell.Index in arms)
