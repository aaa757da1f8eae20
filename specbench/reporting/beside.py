"""Which measured value stands beside a published number, see `specbench.reporting.published`."""

from collections.abc import Iterable
from typing import Any, get_args

import numpy as np
import pandas as pd

from specbench.records.metrics import RATES
from specbench.records.statistics import interval
from specbench.records.studies import Quantised, Shown, cell_needs, cell_options
from specbench.reporting import tables
from specbench.reporting.cells import Entry
from specbench.reporting.evidence import SPEEDS, TIMED, Evidence, rate

# Metrics of the papers' tables -> metrics of `evidence.rate`; others are not measured here.
MEASURED = {name: name for name in ("tau", "speed_up", "tokens_per_s", "alpha", "target_calls")}
N_ALPHAS = tuple(f"alpha{i}" for i in range(5))
MEASURED |= {f"{i}-alpha": name for i, name in enumerate(N_ALPHAS)}
MEASURED |= {"pass_parameters": "parameters", "parameter_ratio": "draft_cost_by_parameters"}
MEASURED |= {"pass_ms": "pass_ms", "latency_ratio": "draft_cost"}
MEASURED |= {"pass_at_1": "solved", "accuracy": "solved", "rouge_l": "rouge_l"}
SCALES = {"%": 100.0, "M": 2.0**-20}  # printed values are these times the measured ones; the papers' M fits 2^20
MEMORY = "memory_gb"  # GB in the papers' tables are GiB
OVERALL = ("", "spec-bench")  # as a dataset: a mean over sets that the table does not have apart
MEAN = "mean"  # as a dataset: the mean over the other datasets of its row
COLUMNS = ("row", "column", "target", "dataset", "temperature", "metric", "hardware")  # that a key may name


def matching(part: pd.DataFrame, key: str) -> pd.DataFrame:
    """The published cells that a key of `Shown.arms` names."""
    drafter, *named = key.split("; ")
    chosen = part["drafter"] == drafter if drafter else pd.Series(True, part.index)
    for name in named:
        column, _, value = name.partition("=")
        if column in COLUMNS:
            chosen &= part[column] == value
        else:
            chosen &= ("; " + part["variant"] + ";").str.contains(f"; {name};", regex=False)
    return part[chosen]


def assigned(part: pd.DataFrame, shows: Shown, measured: Iterable[str]) -> dict[int, str]:
    """Index of a published cell -> arm. measured: targets; if the table has one of them, only its cells are assigned."""
    own = {*measured} & {*part["target"]}
    arms: dict[int, str] = {}
    for key in sorted(shows["arms"], key=lambda key: key.count(";")):  # the one with most parts last, so that it counts
        cells = matching(part, key)
        if own:
            cells = cells[cells["target"].isin([*own, ""])]
        elif not cells.empty:
            known = [*cells["target"]]
            cells = cells[cells["target"] == (shows["beside"] if shows.get("beside") in known else known[0])]
        arms |= dict.fromkeys(cells.index, shows["arms"][key])
    return arms


class Beside:
    """The measured values of a table."""

    def __init__(self, part: pd.DataFrame, shows: Shown, evidence: Evidence):
        self.part, self.evidence = part, evidence
        self.targets = {e.model for e in evidence.entries}
        self.arms = assigned(part, shows, self.targets)
        self.used: list[tuple[Entry, bool]] = []  # by `find`, each with whether it gave seconds

    @property
    def shown(self) -> pd.DataFrame:
        """The published cells that an arm is assigned to."""
        return self.part.loc[sorted(self.arms)]

    @property
    def where(self) -> str:
        """Targets and machines of the values that `find` found, and what they rest on."""
        machines = dict.fromkeys(f"{e.model} on {e.machine}, {e.precision}" for e, _ in self.used)
        return "; ".join([*machines, *tables.basis(self.used)])

    def find(self, cell: Any) -> tuple[float | None, str]:
        """The measured value of a published cell, and what was measured."""
        arm = self.arms.get(cell.Index)
        if arm is None:
            return None, ""
        if cell.dataset == MEAN:
            part = self.part
            row = (part["row"] == cell.row) & (part["metric"] == cell.metric) & (part["temperature"] == cell.temperature)
            return self._mean(arm, cell, [name for name in dict.fromkeys(part[row]["dataset"]) if name not in (MEAN, "")])
        if cell.dataset in OVERALL and MEASURED.get(cell.metric) in RATES:
            return self._mean(arm, cell, self._datasets(cell))
        return self._value(arm, cell, cell.dataset)

    def _datasets(self, cell: Any) -> list[str]:
        """The study's sets, which follow the source; those of Spec-Bench that a machine without its file has."""
        study = self.evidence.study
        cells = enumerate(cell_options(study))
        named = [one.dataset for number, one in cells if cell.dataset == "" or not cell_needs(study, number)]
        return [*dict.fromkeys(named)]

    def _mean(self, arm: str, cell: Any, datasets: list[str]) -> tuple[float | None, str]:
        """Mean over data sets, if all of them were measured."""
        found = [self._value(arm, cell, dataset) for dataset in datasets]
        values = [value for value, _ in found if value is not None]
        if not values or len(values) < len(found):
            return None, ""
        return (float(np.mean(values)), f"mean of {', '.join(datasets)}") if len(found) > 1 else found[0]

    def _value(self, arm: str, cell: Any, dataset: str) -> tuple[float | None, str]:
        at = place_of(cell) | ({"dataset": dataset} if dataset else {})
        metric = MEASURED.get(cell.metric)
        if metric is None and cell.metric != MEMORY:
            return None, ""
        e = self.evidence.with_memory(arm, at) if metric is None else self.evidence.find(arm, at, metric in TIMED)
        value = None if e is None else _memory(e) if metric is None else _measured(e, metric)
        if e is None or value is None:
            return None, ""
        self.used.append((e, metric in SPEEDS))
        trained = f", {e.seeds} seed{'s' if e.seeds > 1 else ''}" if "of" in e.arm else ""
        source = f"{arm}{trained}: {e.dataset}, {e.summary.prompts} generations{', replayed' if e.replayed else ''}"
        return value * SCALES.get(cell.unit, 1.0), source


def place_of(cell: Any) -> dict[str, Any]:
    """What names the cell of a study in which a published number belongs, besides its data set; see `studies.At`."""
    options = dict(part.split("=", 1) for part in cell.variant.split("; ") if part)
    place: dict[str, Any] = {"temperature": float(cell.temperature or 0), "batch": int(options.get("batch", 1))}
    place["quantised"] = precision if (precision := options.get("precision")) in get_args(Quantised) else None
    cut = options.get("disconnect_after", options.get("stop_after"))
    return place | ({} if cut is None else {"cut_after": None if cut == "inf" else int(cut)})


def _memory(e: Entry) -> float | None:
    return e.summary.peak_bytes / 2**30 if e.summary.peak_bytes else None


def _measured(e: Entry, metric: str) -> float | None:
    if metric in N_ALPHAS and not is_chain(e):
        return None
    found = interval(rate(e, metric), e.totals)
    return None if found is None else found.value


def is_chain(e: Entry) -> bool:
    """Does it draft a chain? n-alpha is defined for no other tree."""
    return str(e.growth.get("_target_", "Chain")).endswith("Chain")
