"""The papers' numeric tables from `results/published/*.csv`, with measured numbers beside the published ones.

A published cell names paper, table, row, column, and what it is about: target, drafter, variant, dataset, temperature,
metric. A study says which of its arms a row, or `row | column`, is about (`Study.shows`); nothing is matched by names. The
arm's number for the cell's dataset, temperature and metric then stands beside the published one, if that is of the same
target; of another one's the report says that alone. What was not measured stays empty.
"""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import StringConstraints
from typing_extensions import TypedDict

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_text, readable, validate
from specbench.records.metrics import RATES
from specbench.records.statistics import interval
from specbench.reporting import text
from specbench.reporting.cells import Entry
from specbench.reporting.claims import TIMED, Evidence


class Cell(TypedDict):
    """A published number. variant: `name=value`, several with a semicolon and a space between."""

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


FIELDS = tuple(Cell.__annotations__)
TITLES = {
    "beagle": "Beagle (arXiv:2505.24544)",
    "coral": "CORAL (arXiv:2502.16880)",
    "eagle": "EAGLE (arXiv:2401.15077)",
    "moa": "Mixture of Attentions (arXiv:2410.03804)",
    "spec-bench": "Spec-Bench, leaderboard",
    "slides": "Slides on Leviathan et al., Medusa, EAGLE and HASS",
}


def load(folder: Path, problems: list[str] | None = None) -> pd.DataFrame:
    """All published numbers, in the order of the files.

    Args:
        problems: see `specbench.common.io.readable`.

    Raises:
        SpecBenchError: no file, other columns, or a value that is no number; file and line are named.
    """
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise SpecBenchError(f"no published numbers in {folder}")
    parts = [pd.DataFrame(cells, columns=list(FIELDS), dtype=str) for _, cells in readable(paths, read, problems)]
    found = pd.concat(parts or [pd.DataFrame(columns=list(FIELDS), dtype=str)], ignore_index=True)
    found["number"] = found["value"].astype(float)
    return found


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
                raise SpecBenchError(f"{where}: {len(line)} values in {len(FIELDS)} columns; mend or remove it")
            cells.append(validate(dict(zip(FIELDS, line, strict=True)), Cell, where))
    except csv.Error as error:
        raise SpecBenchError(f"{path} line {lines.line_num} is not CSV ({error}); mend or remove it") from error
    return cells


MEASURED = {  # metrics of the papers' tables -> ours; the rest is not measured here
    "tau": "tau",
    "speed_up": "speed_up",
    "tokens_per_s": "tokens_per_s",
    "alpha": "alpha",
    **{f"{i}-alpha": f"alpha{i}" for i in range(5)},
}
MEMORY = "memory_gb"  # GB in the papers' tables are GiB
ELSEWHERE = "another target"  # stands for a number that was published of one
MEAN = "mean"  # as a dataset: of the others of its row


class Pair(NamedTuple):
    """A cell: measured here or None, as published or "", what was measured, and whether both are of the same target."""

    measured: float | None
    published: str
    said: str = ""
    alike: bool = False


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper, as published or as a study rebuilt it. study: its name, or none. on: what measured it."""

    paper: str
    table: str
    columns: tuple[str, ...]
    cells: Mapping[str, Mapping[str, Pair]]
    notes: tuple[str, ...]
    conventions: tuple[str, ...]
    published_on: str
    study: str = ""
    measured_on: str = ""
    again: bool = False  # another study shows the same table before this one

    @property
    def slug(self) -> str:
        """Its name as a file."""
        return text.slug(f"{self.paper}-{self.table}{'-' + self.study if self.again else ''}")

    @property
    def title(self) -> str:
        return f"{TITLES.get(self.paper, self.paper)}, {self.table}"

    @property
    def targets(self) -> str:
        """What was measured where; the reader must not take one target's numbers for another's."""
        theirs = f"published: {self.published_on or 'no target named'}"
        return f"{theirs}; measured here: {self.measured_on}" if self.measured_on else theirs

    @property
    def measured(self) -> int:
        """How many cells hold a measured number."""
        return sum(pair.measured is not None for row in self.cells.values() for pair in row.values())

    def pairs(self) -> list[list[Pair | None]]:
        """By row and column."""
        return [[row.get(c) for c in self.columns] for row in self.cells.values()]

    def frame(self) -> pd.DataFrame:
        """Two columns a column of the paper: measured, published; one, where nothing was measured."""
        index = pd.Index(list(self.cells), name="row")
        if not self.measured:
            body = [[pair.published if pair else "" for pair in line] for line in self.pairs()]
            return pd.DataFrame(body, index=index, columns=list(self.columns))
        heads = pd.MultiIndex.from_product([self.columns, ("measured", "published")])
        sides = [[(shown(p), p.published) if p else ("", "") for p in line] for line in self.pairs()]
        return pd.DataFrame([[v for both in line for v in both] for line in sides], index=index, columns=heads)


def shown(pair: Pair) -> str:
    """The measured half."""
    value = pair.measured
    return "" if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"


def tables(published: pd.DataFrame, known: Mapping[str, Evidence], problems: list[str] | None = None) -> list[PaperTable]:
    """Every table of every paper, once for each study that shows it and measured something of it.

    Args:
        known: what there is by study. problems: a row that a study shows and no table has is appended.
    """
    found, absent = [], {(name, key) for name, one in known.items() for key in _keys(one)}
    for (paper, table), part in published.groupby(["paper", "table"], sort=False):
        made: list[PaperTable] = []
        for name, evidence in known.items():
            for rows in (s["rows"] for s in evidence.study.get("shows", []) if (s["paper"], s["table"]) == (paper, table)):
                there = {*part["row"], *(part["row"] + " | " + part["column"])}
                absent -= {(name, (paper, table, row)) for row in rows if row in there}
                one = _table(str(paper), str(table), part, _Beside(part, rows, evidence), name, bool(made))
                made += [one] if one.measured else []
        found += made or [_table(str(paper), str(table), part)]
    if problems is not None:
        problems += [
            f"study {name} shows {' '.join(key)}, which is not among the published numbers" for name, key in absent
        ]
    return found


def _keys(evidence: Evidence) -> list[tuple[str, str, str]]:
    return [(s["paper"], s["table"], row) for s in evidence.study.get("shows", []) for row in s["rows"]]


def _table(
    paper: str, table: str, part: pd.DataFrame, beside: "_Beside | None" = None, study: str = "", again: bool = False
) -> PaperTable:
    cells: dict[str, dict[str, Pair]] = {}
    for cell in part.itertuples():
        value, said = beside.find(cell) if beside else (None, "")
        alike = beside is not None and cell.target in beside.targets
        cells.setdefault(str(cell.row), {})[str(cell.column)] = Pair(value, str(cell.value), said, alike)
    conventions = tuple(sorted(set(part["tau_convention"]) - {""}))
    notes = tuple(f"{row}, {column}: {note}" for row, column, note in _noted(part))
    ours = beside is not None and any(p.measured is not None for row in cells.values() for p in row.values())
    theirs = beside.shown if beside is not None and ours else part
    return PaperTable(
        paper=paper,
        table=table,
        columns=tuple(dict.fromkeys(part["column"])),
        cells=cells,
        notes=notes,
        conventions=conventions,
        published_on=_on(theirs),
        study=study,
        measured_on=beside.where if beside is not None and ours else "",
        again=again,
    )


def _on(part: pd.DataFrame) -> str:
    """Targets and hardware of published rows."""
    pairs = dict.fromkeys(zip(part["target"], part["hardware"], strict=True))
    machines: dict[str, list[str]] = {}
    for target, hardware in pairs:
        if target:
            machines.setdefault(hardware, []).append(target)
    return "; ".join(f"{', '.join(names)}{f' on {hardware}' if hardware else ''}" for hardware, names in machines.items())


class _Beside:
    """The measured halves of a table: which arm each cell is about, and what is known of that arm."""

    def __init__(self, part: pd.DataFrame, rows: Mapping[str, str], evidence: Evidence):
        self.part, self.rows, self.evidence = part, rows, evidence
        self.targets = {e.model for e in evidence.entries}

    def arm(self, cell: Any) -> str | None:
        return self.rows.get(f"{cell.row} | {cell.column}", self.rows.get(str(cell.row)))

    @property
    def shown(self) -> pd.DataFrame:
        """The published cells that an arm stands beside."""
        return self.part[[self.arm(cell) is not None for cell in self.part.itertuples()]]

    @property
    def where(self) -> str:
        """The study's target and machine."""
        return "; ".join(dict.fromkeys(f"{e.model} on {e.machine}, {e.dtype}" for e in self.evidence.entries))

    def find(self, cell: Any) -> tuple[float | None, str]:
        """The measured number of a published cell, and what it is."""
        arm = self.arm(cell)
        if arm is None:
            return None, ""
        return self._mean(cell) if cell.dataset == MEAN else self._value(arm, cell)

    def _value(self, arm: str, cell: Any) -> tuple[float | None, str]:
        at: dict[str, Any] = {"dataset": cell.dataset} if cell.dataset else {}
        at |= {"temperature": float(cell.temperature)} if cell.temperature else {}
        metric = str(cell.metric)
        if metric == MEMORY:
            e = self.evidence.find(arm, at, timed=True)
            value = e.summary.peak_bytes / 2**30 if e is not None and e.summary.peak_bytes else None
        elif metric in MEASURED:
            e = self.evidence.find(arm, at, timed=MEASURED[metric] in TIMED)
            by_tree = (
                e is not None and metric.endswith("-alpha") and not _is_chain(e)
            )  # n-alpha is of chains, by definition
            rate = None if e is None or by_tree else interval(RATES[MEASURED[metric]], e.totals)
            value = None if rate is None else rate.value
        else:
            return None, ""
        if value is None or e is None:
            return None, ""
        trained = f", {e.seeds} seed{'s' if e.seeds > 1 else ''}" if "of" in e.arm else ""
        return value, f"{arm}{trained}: {e.dataset}, {e.summary.prompts} generations{', replayed' if e.replayed else ''}"

    def _mean(self, cell: Any) -> tuple[float | None, str]:
        """Over the datasets of the cell's row, only if all of them were measured."""
        part = self.part
        alike = (part["row"] == cell.row) & (part["metric"] == cell.metric) & (part["temperature"] == cell.temperature)
        others = part[alike & ~part["dataset"].isin([MEAN, ""])].drop_duplicates("dataset")
        found = [self.find(other)[0] for other in others.itertuples()]
        values = [value for value in found if value is not None]
        if not values or len(values) < len(found):
            return None, ""
        return float(np.mean(values)), f"mean of {', '.join(others['dataset'])}"


def _is_chain(e: Entry) -> bool:
    return str(e.growth.get("_target_", "Chain")).endswith("Chain")


def _noted(part: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Cells with a note; a note that many cells share is given once."""
    noted = part[part["note"] != ""]
    found = []
    for note, rows in noted.groupby("note", sort=False):
        first = rows.iloc[0]
        many = len(rows) > 3
        found.append(("all" if many else first["row"], f"{len(rows)} cells" if many else first["column"], str(note)))
    return found
