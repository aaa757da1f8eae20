"""What trainings say of themselves: the `provenance.json` files under a folder, as a held-out table and as trials.

A trial is a training with one thing changed, beside a *base* with the same tokens, order and steps; both were measured on
the same held-out answers, which are resampled alike for both sides of a comparison.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json, readable
from specbench.records.metrics import RATES
from specbench.records.schema import PROVENANCE, Provenance
from specbench.records.statistics import Interval, Totals, interval, resamples
from specbench.reporting.tables import ABSENT, number

HELD_OUT = (
    "drafter", "trained parameters", "different tokens", "tokens seen", "steps", "hours",
    "held-out chain tau [95%]", "0-alpha … 4-alpha", "trained on",
)  # fmt: skip
TRIALS = ("drafter", "changed", "why", "base tau", "tau", "difference [95%]", "kept")


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


def counts(trainings: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """Tokens emitted and cycles by held-out answer, summed over trainings that differ by their seed. [answers, 2]"""
    each = [np.asarray(t["held_out"]["answers"], dtype=float) for t in trainings]
    if len({len(c) for c in each}) != 1:
        raise SpecBenchError("trainings measured on different held-out answers cannot be compared")
    return sum(each[1:], each[0])


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


def gain(ours: np.ndarray, theirs: np.ndarray) -> Interval:
    """Difference of taus on the same answers."""
    times = resamples(len(ours))

    def pooled(answers: np.ndarray) -> np.ndarray:
        sums: np.ndarray = times @ answers
        return sums[:, 0] / sums[:, 1]

    low, high = np.percentile(pooled(ours) - pooled(theirs), [2.5, 97.5])
    return Interval(tau(ours).value - tau(theirs).value, float(low), float(high))


def held_out_lines(folder: Path, problems: list[str] | None = None) -> list[list[str]]:
    """One line a drafter. problems: see `specbench.common.io.readable`."""
    lines = []
    for name, said in below(folder, problems).items():
        last = said.get("held_out") or said["history"][-1]  # older ones kept no answers apart: no interval then
        shown = number("{:.2f}", last.get("chain_tau", np.nan))
        if any(cycles for _, cycles in last.get("answers", [])):
            found = tau(counts([said]))
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


@dataclass(frozen=True)
class Trial:
    """What was tried. base: the trial it is compared with, None for a base itself. kept: what we made of it."""

    drafter: str
    name: str
    why: str
    base: str | None = None
    kept: bool | None = None


def _alike(row: Mapping[str, Any]) -> tuple[int, str, str, str]:
    """What a trial and its base share."""
    return row["seed"], row["machine"]["device"], row["precision"], tokens_of(row["options"])


def tokens_of(options: Iterable[str]) -> str:
    """How much of the corpus a training was told to see, in its own words."""
    return next((option for option in options if option.startswith("train.corpus.tokens=")), "")


def trial_lines(trials: Sequence[Trial], rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One line a trial that was run, seeds pooled.

    rows: {"drafter", "trial", "seed", "options", "held_out", "machine", "precision"} a training. A trial
        is compared with the base of its seed that saw as many tokens, on the same kind of machine, in the same precision.
    """
    by_trial: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_trial.setdefault((row["drafter"], row["trial"]), []).append(row)
    lines = []
    for trial in trials:
        ours = by_trial.get((trial.drafter, trial.name), [])
        theirs = by_trial.get((trial.drafter, trial.base or trial.name), [])
        shared = {_alike(r) for r in ours} & {_alike(r) for r in theirs}
        if not shared:
            continue
        ours, theirs = (sorted((r for r in part if _alike(r) in shared), key=_alike) for part in (ours, theirs))
        a, b = counts(ours), counts(theirs)
        if len(a) != len(b):
            raise SpecBenchError("trainings measured on different held-out answers cannot be compared")
        changed = gain(a, b)
        difference = f"{changed.value:+.3f} [{changed.low:+.3f}, {changed.high:+.3f}]" if trial.base else "-"
        kept = {None: "-", True: "yes", False: "no"}[trial.kept]
        lines.append(
            [
                trial.drafter,
                trial.name,
                trial.why,
                f"{tau(b).value:.3f}",
                f"{tau(a).value:.3f}",
                difference,
                kept,
            ]
        )
    return lines
