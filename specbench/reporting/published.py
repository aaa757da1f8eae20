"""The papers' numeric tables, rebuilt from `results/published/*.csv` with measured numbers beside the published ones.

A published cell names paper, table, row, column, and what it is about: target, drafter, variant, dataset, temperature,
metric. A measured number stands beside it only if it is about the very same target; the targets measured here get rows
of their own below, where the published number is missing. What was not measured stays empty.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import StringConstraints
from typing_extensions import TypedDict

from specbench.errors import SpecBenchError
from specbench.files import hold, read_text, readable
from specbench.metrics import BASELINE, RATES, interval
from specbench.reporting.cells import Entry


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
    "slides": "Slides on Leviathan et al., Medusa, EAGLE and HASS",
}
# Keys of `variant` that name whose weights or software, not another way of drafting.
INCIDENTAL = {"weights", "engine", "draft", "epochs", "k"}


def load(folder: Path, problems: list[str] | None = None) -> pd.DataFrame:
    """All published numbers, in the order of the files.

    Args:
        problems: see `specbench.files.readable`.

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
            cells.append(hold(dict(zip(FIELDS, line, strict=True)), Cell, where))
    except csv.Error as error:
        raise SpecBenchError(f"{path} line {lines.line_num} is not CSV ({error}); mend or remove it") from error
    return cells


def names(drafter: str, variant: str) -> list[str]:
    """Names under which this project's rows would hold a published drafter in a variant, best first; none if none do."""
    options = dict(part.split("=", 1) for part in variant.split("; ")) if variant else {}
    options = {k: v for k, v in options.items() if k not in INCIDENTAL}
    if drafter == "medusa" and "medusa" in options:  # joint training (Medusa-2) is not in this project
        trees = {"none": ["medusa-chain"], "dense": ["medusa-medusa_dense"], "sparse": ["medusa-medusa", "medusa"]}
        return trees.get(options.get("tree", "sparse"), []) if options["medusa"] == "1" else []
    if options.pop("tree", "dynamic") == "chain":
        options.pop("gamma", None)
        drafter = {"eagle1": "eagle2"}.get(drafter, drafter) + "-chain"
    if options.pop("batch", "1") != "1":
        return []
    if not options:
        return [drafter]
    match options:
        case {"steps": n} if len(options) == 1:
            return [f"{drafter}-n{n}"]
        case {"tli": "0"} if len(options) == 1:
            return [drafter]
        case {"tli": n} if len(options) == 1:
            return [f"{drafter}-tli{n}"]
        case {"tli": "0", "lsa": "0"} if len(options) == 2:
            return [f"{drafter}-without-lsa"]
        case {"groups": n, "active": g} if len(options) == 2:
            grid = f"{drafter}-N{n}-top{g}"
            return [grid, drafter] if (n, g) == ("16", "2") else [grid]
        case {"input": kind} if len(options) == 1:
            return [f"eagle2-{ {'feature+shifted-token': 'shifted'}.get(kind, kind) }"]
        case {"gamma": g} if len(options) == 1:
            return [f"{drafter}-gamma{g}"]
    return []


@dataclass(frozen=True)
class Measured:
    """Measured numbers by what they are about, and the drafters' training tokens for row labels."""

    numbers: Mapping[tuple[str, str, str, float, str], float]  # target, drafter, dataset, temperature, metric
    tokens: Mapping[tuple[str, str], int]  # target, drafter -> training tokens seen

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> "Measured":
        """Of several cells about the same thing the one with most generations counts."""
        numbers: dict[tuple[str, str, str, float, str], float] = {}
        best: dict[tuple[str, str, str, float], int] = {}
        tokens: dict[tuple[str, str], int] = {}
        for e in entries:
            key = (e.model, e.name, e.dataset, e.temperature)
            if e.summary.prompts <= best.get(key, 0):
                continue
            best[key] = e.summary.prompts
            tokens[e.model, e.name] = e.weights.get("tokens_seen", 0)
            rates = {m: interval(RATES[m], e.totals) for m in ("tau", "speed_up", "tokens_per_s", "alpha")}
            rates |= {f"{i}-alpha": interval(RATES[f"alpha{i}"], e.totals) for i in range(5) if e.name.endswith("-chain")}
            if e.name == BASELINE:
                rates["speed_up"] = None
            values = {m: v.value for m, v in rates.items() if v is not None}
            if e.summary.peak_bytes:
                values["memory_gb"] = e.summary.peak_bytes / 2**30  # GB in the papers' tables are GiB
            numbers |= {(*key, m): v for m, v in values.items()}
        return cls(numbers, tokens)

    @property
    def targets(self) -> list[str]:
        return sorted({key[0] for key in self.numbers})

    def find(self, target: str, drafter: str, variant: str, dataset: str, temperature: str, metric: str) -> float | None:
        """The measured number that a published cell is about, for this target."""
        for name in names(drafter, variant):
            found = self.numbers.get((target, name, dataset, float(temperature or 0), metric))
            if found is not None:
                return found
        return None


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper. cells[row][column] is (measured or None, published or "")."""

    paper: str
    table: str
    columns: tuple[str, ...]
    cells: Mapping[str, Mapping[str, tuple[float | None, str]]]
    notes: tuple[str, ...]
    conventions: tuple[str, ...]

    @property
    def slug(self) -> str:
        """Its name as a file."""
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.paper}-{self.table}".lower())

    @property
    def title(self) -> str:
        return f"{TITLES.get(self.paper, self.paper)}, {self.table}"

    @property
    def measured(self) -> int:
        """How many cells hold a measured number."""
        return sum(m is not None for row in self.cells.values() for m, _ in row.values())

    def lines(self) -> list[list[str]]:
        """Row label, then `measured / published` a column; a missing half is a dash, a missing cell empty."""
        return [[label, *(_pair(row.get(c)) for c in self.columns)] for label, row in self.cells.items()]

    def frame(self) -> pd.DataFrame:
        """Two columns a column of the paper: measured, published."""
        heads = pd.MultiIndex.from_product([self.columns, ("measured", "published")])
        body = [
            [v for c in self.columns for v in (_number(row.get(c, (None, ""))[0]), row.get(c, (None, ""))[1])]
            for row in self.cells.values()
        ]
        return pd.DataFrame(body, index=pd.Index(list(self.cells), name="row"), columns=heads)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"


def _pair(cell: tuple[float | None, str] | None) -> str:
    if cell is None or cell == (None, ""):
        return ""
    return f"{_number(cell[0]) or '-'} / {cell[1] or '-'}"


def tables(published: pd.DataFrame, measured: Measured) -> list[PaperTable]:
    """Every table of every paper."""
    return [
        _table(str(paper), str(table), part, measured)
        for (paper, table), part in published.groupby(["paper", "table"], sort=False)
    ]


def _table(paper: str, table: str, part: pd.DataFrame, measured: Measured) -> PaperTable:
    columns = tuple(dict.fromkeys(part["column"]))
    cells: dict[str, dict[str, tuple[float | None, str]]] = {}
    for cell in part.itertuples():
        found = measured.find(str(cell.target), *_about(cell))
        cells.setdefault(str(cell.row), {})[str(cell.column)] = (found, str(cell.value))
    theirs = set(part["target"])
    for target in measured.targets:
        if target not in theirs:
            _own_rows(target, part, measured, cells)
    notes = tuple(f"{row}, {column}: {note}" for row, column, note in _noted(part))
    return PaperTable(paper, table, columns, cells, notes, tuple(sorted(set(part["tau_convention"]) - {""})))


def _about(cell: Any) -> tuple[str, str, str, str, str]:
    """What a published cell is about, its target aside."""
    return cell.drafter, cell.variant, cell.dataset, cell.temperature, cell.metric


def _own_rows(
    target: str,
    part: pd.DataFrame,
    measured: Measured,
    cells: dict[str, dict[str, tuple[float | None, str]]],
) -> None:
    """One row for every drafter and variant of the table that was measured on a target of ours; no published half."""
    for (drafter, variant, temperature), rows in part.groupby(["drafter", "variant", "temperature"], sort=False):
        row: dict[str, tuple[float | None, str]] = {}
        for cell in rows.drop_duplicates("column").itertuples():
            found = measured.find(target, *_about(cell))
            if found is None and cell.dataset == "mean":
                found = _mean(target, rows, str(cell.metric), measured)
            if found is not None:
                row[str(cell.column)] = (found, "")
        if row:
            heat = f", T={temperature}" if temperature and part["temperature"].nunique() > 1 else ""
            cells[f"{target}: {_label(target, str(drafter), str(variant), measured)}{heat}"] = row


def _label(target: str, drafter: str, variant: str, measured: Measured) -> str:
    for name in names(drafter, variant):
        if (target, name) in measured.tokens:
            seen = measured.tokens[target, name]
            return f"{name} ({seen / 1e6:.2g} M tokens)" if seen else name
    return drafter


def _mean(target: str, rows: pd.DataFrame, metric: str, measured: Measured) -> float | None:
    """Our own mean over the datasets of the paper's row, only if all of them were measured."""
    wanted = rows[(rows["metric"] == metric) & (rows["dataset"] != "mean")].drop_duplicates("dataset")
    found = [measured.find(target, *_about(cell)) for cell in wanted.itertuples()]
    values = [f for f in found if f is not None]
    return float(np.mean(values)) if values and len(values) == len(found) else None


def _noted(part: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Cells with a note; a note that many cells share is given once."""
    noted = part[part["note"] != ""]
    found = []
    for note, rows in noted.groupby("note", sort=False):
        first = rows.iloc[0]
        many = len(rows) > 3
        found.append(("all" if many else first["row"], f"{len(rows)} cells" if many else first["column"], str(note)))
    return found
