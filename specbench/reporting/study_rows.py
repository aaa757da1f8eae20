"""What figures of a study read: its entries by arm and cell, their values and options, and what its sources printed."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from specbench.records.statistics import Interval, interval
from specbench.records.studies import PLACE, cell_options
from specbench.reporting import beside, published
from specbench.reporting.cells import Entry
from specbench.reporting.evidence import OF_ENGINE, SPEEDS, TIMED, Evidence, rate


class Rows:
    """The rows of one study, and what its sources printed.

    Attributes:
        another_target: was a printed number left out because it is of another target?
        used: entries that were found, each with whether seconds of it were asked for.
    """

    def __init__(self, evidence: Evidence, numbers: pd.DataFrame):
        self.evidence, self.study, self.numbers = evidence, evidence.study, numbers
        self.another_target = False
        self.used: list[tuple[Entry, bool]] = []
        targets = {e.model for e in evidence.entries}
        self._printed: dict[tuple[Any, ...], list[tuple[bool, float]]] = {}
        for cell, arm in published.placed(numbers, evidence):
            metric = beside.MEASURED.get(cell.metric, cell.metric)
            place = evidence.place({"dataset": cell.dataset} | beside.place_of(cell))
            key = arm, metric, tuple(place[name] for name in PLACE)
            self._printed.setdefault(key, []).append((cell.target in targets, cell.number))

    def find(self, arm: str, at: Mapping[str, Any], metric: str = "tau") -> Entry | None:
        e = self.evidence.find(arm, at, timed=metric in TIMED)
        self.used += [] if e is None else [(e, metric in SPEEDS)]
        return e

    def printed(self, arm: str, metric: str, at: Mapping[str, Any]) -> list[float]:
        """What a source printed of this very target."""
        place = self.evidence.place(at)
        found = self._printed.get((arm, metric, tuple(place[name] for name in PLACE)), [])
        self.another_target |= any(not same for same, _ in found)
        return [number for same, number in found if same]

    def places(self) -> list[dict[str, Any]]:
        """What names each cell; a replayed and a timed one have one name."""
        found = [tuple(getattr(options, name) for name in PLACE) for options in cell_options(self.study)]
        return [dict(zip(PLACE, place, strict=True)) for place in dict.fromkeys(found)]

    def values(self, aspect: str) -> list[Any]:
        """The data sets, temperatures, batch sizes or kinds of quantised targets of the study's cells, in their order."""
        return list(dict.fromkeys(place[aspect] for place in self.places()))

    def measured(self, arm: str, quantity: str) -> list[Mapping[str, float]]:
        """Repetitions of a measurement."""
        e = self.evidence.measured(arm, quantity)
        self.used += [] if e is None else [(e, quantity in OF_ENGINE)]
        return [] if e is None else list(e.measured[quantity])


def value(e: Entry | None, metric: str, category: str | None = None) -> Interval | None:
    """A metric of an entry with its interval. category: of its prompts alone."""
    if e is None:
        return None
    return interval(rate(e, metric), e.totals if category is None else e.among(category))


def option_of(e: Entry, name: str) -> float | None:
    """A numeric option of an arm, see `records.figures.Option`; None without one."""
    drafter: Mapping[str, Any] = e.arm["drafter"]
    if name == "ids":
        return _ids(e)
    if name in ("nodes", "parameters"):
        return e.summary.nodes if name == "nodes" else float(e.parameters)
    group, _, key = name.partition(".")
    verify: Any = e.arm.get("verify") or {}
    groups: dict[str, Mapping[str, Any]] = {"drafter": drafter, "tree": e.growth, "verify": verify}
    found = groups[group].get(key)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _ids(e: Entry) -> float | None:
    """Number of ids for which an arm multiplies the LM head."""
    drafter: Mapping[str, Any] = e.arm["drafter"]
    target = e.header["target"].get("vocabulary", 0)
    groups, active = drafter.get("groups"), drafter.get("active")
    if isinstance(groups, int) and isinstance(active, int):  # a router
        return target * active // groups
    listed = drafter.get("vocabulary") or drafter.get("draft_vocabulary") or target
    return float(min(listed, target) if target else listed) or None


def place_label(at: Mapping[str, Any]) -> str:
    """`gsm8k, T=1`; empty for the default cell."""
    dataset, temperature = at.get("dataset"), at.get("temperature")
    return ", ".join([*([dataset] if dataset else []), *([f"T={temperature:g}"] if temperature is not None else [])])
