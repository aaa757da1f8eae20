"""The figures that studies declare (`specbench/records/figures.py`), as charts; or, where rows are missing, what to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from specbench.records import figures
from specbench.records.metrics import BASELINE, METRICS
from specbench.records.studies import unmet
from specbench.reporting import tables
from specbench.reporting.charts import Chart, Panel
from specbench.reporting.evidence import Evidence
from specbench.reporting.study_rows import Rows
from specbench.reporting.study_series import KINDS


@dataclass(frozen=True)
class StudyFigure:
    """A figure that a study declares.

    Attributes:
        name: of its files. chart: None if its rows are missing. missing: what to do then.
    """

    name: str
    study: str
    title: str
    source: str
    chart: Chart | None
    missing: str = ""

    @property
    def caption(self) -> str:
        notes = "".join(f"; {note}" for note in self.chart.notes) if self.chart else ""
        return f"{self.source}. {self.title}{notes}"


def all_of(known: Mapping[str, Evidence], numbers: pd.DataFrame, cuda: bool = False) -> list[StudyFigure]:
    """The figures of all studies. known: by study. numbers: all published ones. cuda: is there a GPU?"""
    return [
        _made(name, number, figure, evidence, numbers, cuda)
        for name, evidence in known.items()
        for number, figure in enumerate(evidence.study.get("figures", []))
    ]


def _made(
    study: str, number: int, figure: Mapping[str, Any], evidence: Evidence, numbers: pd.DataFrame, cuda: bool
) -> StudyFigure:
    rows = Rows(evidence, numbers)
    made: Chart = KINDS[figure["kind"]](figure, figures.series(figure, evidence.study["arms"]), rows)
    panels = [panel for panel in made.panels if any(map(bool, panel.series))]
    notes = [*_basis(rows), *made.notes]
    if any(s.printed for panel in panels for s in panel.series):
        notes.append("open or in brackets: as printed")
    elif rows.another_target:
        notes.append("its source prints numbers of another target")
    if absent := _absent(figure, rows, made.panels):
        notes.append(f"not measured yet: {'; '.join(absent)}")
    chart = replace(made, panels=panels, notes=notes) if panels else None
    missing = "" if chart else _missing(study, figure, rows, cuda)
    name, source = f"{study}-{number + 1}-{figure['kind']}", "; ".join(figure["source"])
    return StudyFigure(name, study, figure["title"], source, chart, missing)


def _basis(rows: Rows) -> list[str]:
    """Of which target, and what else the values rest on."""
    entries = [e for e, _ in rows.used]
    models = ", ".join(dict.fromkeys(e.model for e in entries))
    notes = [", ".join([models, *tables.basis(rows.used)])] if entries else []
    return [*notes, tables.NO_INTERVAL] if tables.too_few(entries) else notes


def _absent(figure: Mapping[str, Any], rows: Rows, panels: Sequence[Panel]) -> list[str]:
    """Arms without any rows; panels, or groups of bars, without any value."""
    names = {e.name for e in rows.evidence.entries}
    arms = [arm for group in figures.series(figure, rows.study["arms"]).values() for arm in group if arm not in names]
    empty = [" at ".join(filter(None, (panel.y, panel.title))) for panel in panels if not any(map(bool, panel.series))]
    groups = [group for panel in panels if any(map(bool, panel.series)) for group in panel.absent]
    return list(dict.fromkeys([*arms, *empty, *groups]))


def _missing(study: str, figure: Mapping[str, Any], rows: Rows, cuda: bool) -> str:
    """What a figure without any value waits for, in a phrase."""
    if lacking := unmet(rows.study.get("needs", {}), None, cuda):
        return f"waits for {', '.join(lacking)}"
    if not any(e.name != BASELINE for e in rows.evidence.entries):
        return f"run study {study}"
    if figure["kind"] == "progress":
        return f"train the arms of study {study} anew: these rows hold no history"
    if figure["kind"] == "stack" and figure["parts"] == "drafting":
        return f"run study {study}: drafting is not measured yet"
    wanted = [*figure.get("y", ()), *figure.get("value", ())]
    if any(metric not in METRICS for metric in wanted):
        return f"run study {study}: {' and '.join(wanted)} are not measured yet"
    return f"run study {study}: its timed cells have no rows yet"
