"""What trainings say of themselves: the `provenance.json` files under a folder, as a table of held-out acceptance."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json, readable
from specbench.records.metrics import RATES
from specbench.records.schema import PROVENANCE, Provenance
from specbench.records.statistics import Interval, Totals, interval
from specbench.reporting.tables import ABSENT, number

HELD_OUT = (
    "drafter", "trained parameters", "different tokens", "tokens seen", "steps", "hours",
    "held-out chain tau [95%]", "0-alpha … 4-alpha", "trained on",
)  # fmt: skip


def read(path: Path) -> Mapping[str, Any]:
    """A `provenance.json`. Raises `SpecBenchError`."""
    said: Mapping[str, Any] = read_json(path, Provenance)
    return said


def below(folder: Path, problems: list[str] | None = None) -> dict[str, Mapping[str, Any]]:
    """Provenances of trainings anywhere below a folder, by the name of their own; weights of others have no training.

    problems: see `specbench.common.io.readable`.
    """
    found = readable(sorted(folder.rglob(PROVENANCE)), read, problems)
    return {path.parent.name: said for path, said in found if said.get("history")}


def tau(answers: np.ndarray) -> Interval:
    """Pooled over cycles, with a bootstrap over answers. Raises `SpecBenchError` where no cycle was counted."""
    found = interval(RATES["tau"], _totals(answers)) if answers.size else None
    if found is None:
        raise SpecBenchError("trainings measured on held-out answers without a cycle cannot be compared")
    return found


def _totals(answers: np.ndarray) -> Totals:
    """[answers, 2] of tokens and cycles, as sums by question."""
    tokens, cycles = answers.T
    return Totals(tuple(map(str, range(len(answers)))), {"tokens": tokens, "cycles": cycles})


def held_out_lines(folder: Path, problems: list[str] | None = None) -> list[list[str]]:
    """One line a drafter. problems: see `specbench.common.io.readable`."""
    lines = []
    for name, said in below(folder, problems).items():
        last = said.get("held_out") or said["history"][-1]  # older ones kept no answers apart: no interval then
        shown = number("{:.2f}", last.get("chain_tau", np.nan))
        if any(cycles for _, cycles in last.get("answers", [])):
            found = tau(np.asarray(last["answers"], dtype=float))
            shown += f" [{found.low:.2f}, {found.high:.2f}]"
        lines.append(
            [
                name,
                f"{said['parameters']:,}",
                f"{said['data']['unique_tokens']:,}",
                f"{said['tokens_seen']:,}",
                f"{said['steps']:,}",
                f"{said['hours']:.2f}",
                shown,
                " ".join(number("{:.2f}", a) for a in last.get("n_alpha", [])) or ABSENT,
                said["machine"]["device"],
            ]
        )
    return lines
