"""The ledger of claims: what papers say, as plain data, against what rows say. Knows rows and metrics, no drafter.

A claim is a list of tests; a test compares one metric of a drafter with the same or another metric of a drafter,

    {metric: tau, of: hass, over: eagle2, is: more}          tau(hass) - tau(eagle2) > 0
    {metric: speed_up, of: beagle, over: eagle2, within: 0.05}   the ratio lies in 1 +- 0.05
    {metric: tau, of: medusa, than: 2.0, is: more}           tau(medusa) > 2, a number instead of another drafter

or two measured numbers of a benchmark file (`file`, dotted keys in `of` and `over`; no interval there). Differences are
taken of tau and acceptances, ratios of everything else. The 95% interval resamples questions, for both drafters the same.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specbench import metrics
from specbench.errors import SpecBenchError
from specbench.metrics import BASELINE, Interval
from specbench.records import Row, read_cell

REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE, NOT_RUN = "reproduced", "not reproduced", "inconclusive", "not run here"
SAMPLES = 500


@dataclass(frozen=True)
class Evidence:
    """Greedy rows of one drafter on one dataset, with the baseline's beside them."""

    rows: tuple[Row, ...]
    baseline: tuple[Row, ...]
    parameters: int  # that a draft pass multiplies
    target_parameters: int = 1
    passes: int = 1  # draft passes a cycle

    def drawn(self, questions: Sequence[str]) -> "Evidence":
        """The same with these questions, as often as they are named."""
        ours, theirs = _by_question(self.rows), _by_question(self.baseline)
        rows = tuple(r for q in questions for r in ours.get(q, ()))
        return replace(self, rows=rows, baseline=tuple(r for q in questions for r in theirs.get(q, ())))


def _by_question(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.question, []).append(row)
    return found


def _alpha(depth: int) -> Callable[[Evidence], float]:
    def alpha(e: Evidence) -> float:
        found = metrics.step_alphas(e.rows)
        return found[depth] if depth < len(found) else float("nan")

    return alpha


def _late_alpha(e: Evidence) -> float:
    """Acceptance at depth 2 and deeper, all steps pooled."""
    tried = sum(max(0, min(a + 1, d) - 1) for r in e.rows for a, d in zip(r.accepted, r.drafted, strict=True))
    passed = sum(max(0, a - 1) for r in e.rows for a in r.accepted)
    return passed / tried if tried else float("nan")


def _draft_cost(e: Evidence) -> float:
    """Seconds of a draft pass over seconds of a target pass for one token."""
    draft = sum(r.draft_s for r in e.rows) / (metrics.cycles(e.rows) * max(e.passes, 1))
    return draft / (sum(r.target_s for r in e.baseline) / metrics.cycles(e.baseline))


METRICS: dict[str, Callable[[Evidence], float]] = {
    "tau": lambda e: metrics.tau(e.rows),
    "late_alpha": _late_alpha,
    **{f"alpha{depth}": _alpha(depth) for depth in range(6)},
    "speed_up": lambda e: metrics.speed(e.rows) / metrics.speed(e.baseline),
    "draft_ms": lambda e: 1000 * sum(r.draft_s for r in e.rows) / metrics.cycles(e.rows),
    "memory": lambda e: max(max(metrics.peak_bytes(r)) for r in e.rows) / 2**20,
    "parameters": lambda e: float(e.parameters),
    "draft_cost": _draft_cost,
    "draft_cost_by_parameters": lambda e: e.parameters / e.target_parameters,
}


def evidence(paths: Sequence[Path], dataset: str) -> dict[str, Evidence]:
    """Greedy cells on a dataset, by the drafter's name; of several with one name the one with most rows."""
    found: dict[str, Evidence] = {}
    for path in paths:
        header, records = read_cell(path)
        config = header["config"]
        if config["dataset"]["name"] != dataset or config["sampler"]["temperature"] != 0 or header["lossy"]:
            continue
        rows = [r for r in records if isinstance(r, Row)]
        name = config["drafter"]["name"]
        mine = tuple(r for r in rows if r.drafter == name)
        if name != BASELINE and mine and len(mine) > len(found[name].rows if name in found else ()):
            counts = header["parameters"]
            base = tuple(r for r in rows if r.drafter == BASELINE)
            found[name] = Evidence(mine, base, counts["drafter"], counts["target"], header["draft_passes"])
    return found


def compare(test: Mapping[str, Any], known: Mapping[str, Evidence], folder: Path) -> Interval | None:
    """The effect that a test is about, None where its rows are missing. Raises `SpecBenchError` for an unknown metric."""
    if "file" in test:
        path = folder / test["file"]
        if not path.exists():
            return None
        data = json.loads(path.read_text())
        value = _lookup(data, test["of"]) / _lookup(data, test["over"])
        return Interval(value, value, value)
    first = test["metric"]
    second = test.get("over_metric", first)
    for name in (first, second):
        if name not in METRICS:
            raise SpecBenchError(f"unknown metric {name} in a claim; there are {', '.join(METRICS)}")
    ours, theirs = known.get(test["of"]), known.get(test.get("over", test["of"]))
    if ours is None or theirs is None:
        return None
    questions = sorted({r.question for r in ours.rows} & {r.question for r in theirs.rows})
    if not questions:
        return None

    def effect(drawn: Sequence[str]) -> float:
        a = METRICS[first](ours.drawn(drawn))
        b = test["than"] if "than" in test else METRICS[second](theirs.drawn(drawn))
        return a - b if _subtracted(test) else a / b

    random = np.random.default_rng(0)
    draws = [effect([questions[i] for i in random.integers(len(questions), size=len(questions))]) for _ in range(SAMPLES)]
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return Interval(effect(questions), float(low), float(high))


def _subtracted(test: Mapping[str, Any]) -> bool:
    """Is the effect a difference? Otherwise it is a ratio."""
    return "file" not in test and (test["metric"] == "tau" or "alpha" in test["metric"])


def _lookup(data: Any, key: str) -> float:
    for part in key.split("."):
        data = data[part]
    return float(data)


def judge(test: Mapping[str, Any], effect: Interval | None) -> str:
    """A verdict from an effect and what the test expects of it."""
    if effect is None:
        return NOT_RUN
    neutral = 0.0 if _subtracted(test) else 1.0
    if "within" in test:
        low, high = neutral - test["within"], neutral + test["within"]
        if low <= effect.low and effect.high <= high:
            return REPRODUCED
        return NOT_REPRODUCED if effect.high < low or effect.low > high else INCONCLUSIVE
    bound = neutral + test.get("by", 0.0)
    above, below = effect.low > bound, effect.high < bound
    if test["is"] == "less":
        above, below = below, above
    return REPRODUCED if above else NOT_REPRODUCED if below else INCONCLUSIVE


@dataclass(frozen=True)
class Verdict:
    """A claim with what was found."""

    claim: Mapping[str, Any]
    effects: tuple[Interval | None, ...]
    verdict: str


def ledger(claims: Sequence[Mapping[str, Any]], known: Mapping[str, Evidence], folder: Path) -> list[Verdict]:
    """Judge every claim. It is reproduced if all its tests are, and not if one is not."""
    found = []
    for claim in claims:
        effects = tuple(compare(test, known, folder) for test in claim["tests"])
        verdicts = {judge(test, effect) for test, effect in zip(claim["tests"], effects, strict=True)}
        whole = next(v for v in (NOT_RUN, NOT_REPRODUCED, INCONCLUSIVE, REPRODUCED) if v in verdicts)
        found.append(Verdict(claim, effects, whole))
    return found


def markdown(verdicts: Sequence[Verdict]) -> str:
    """The ledger as a table; the measured effect of each test with its interval."""
    lines = ["| claim | source | published | measured | verdict |", "|---|---|---|---|---|"]
    for v in verdicts:
        measured = "; ".join(map(_effect, v.claim["tests"], v.effects))
        verdict = f"{v.verdict}: `{v.claim['run']}`" if v.verdict == NOT_RUN else v.verdict
        lines.append(f"| {v.claim['says']} | {v.claim['source']} | {v.claim['published']} | {measured} | {verdict} |")
    return "\n".join(lines) + "\n"


def _effect(test: Mapping[str, Any], effect: Interval | None) -> str:
    name = f"{test.get('metric', test.get('file'))} of {test['of']}"
    if test.get("over", test["of"]) != test["of"]:
        name += f" against {test['over']}"
    if "than" in test:
        name += f" against {test['than']}"
    if test.get("over_metric"):
        name += f" against {test['over_metric']}"
    if effect is None:
        return f"{name}: -"
    if "file" in test:
        return f"{name}: x{effect.value:.2f}"
    if _subtracted(test):
        return f"{name}: {effect.value:+.2f} [{effect.low:+.2f}, {effect.high:+.2f}]"
    return f"{name}: x{effect.value:.2f} [{effect.low:.2f}, {effect.high:.2f}]"
