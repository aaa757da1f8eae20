"""Verdicts on papers' claims, from the rows of their studies.

A claim is a list of tests (`specbench/records/studies.py`); a test compares a metric of one arm with that of another,

    {metric: tau, of: hass, over: eagle2, is: more}               tau(hass) - tau(eagle2) > 0
    {metric: speed_up, of: beagle, over: eagle2, within: 0.05}    the ratio lies in 1 +- 0.05
    {metric: tau, of: medusa, than: 2.0, is: more}                tau(medusa) > 2, a number instead of another arm
    {metric: tau, of: eagle2, at: {temperature: 1}, over_at: {}, is: less}     one arm in two cells
    {metric: tau, of: eagle1, at: {category: coding}, over_at: {}, is: more}   some prompts of a cell against all others
    {measured: memory.peak, of: beagle, over: eagle2, is: less}   a measurement, repeated five times or more
    {measured: generate.ratio, of: none, than: 1, is: more}       a measurement against a number

The effect is a difference for tau, acceptances and problems solved, a ratio otherwise. Its 95% interval resamples questions
(paired between arms) or repetitions. Entries are compared only if their conditions agree, see `config_differences`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.records import identity
from specbench.records.metrics import BASELINE, RATES
from specbench.records.statistics import Interval, Rate, Totals, contrast, interval, medians, repeated
from specbench.records.studies import Study, option, unmet
from specbench.reporting.cells import Entry, pooled

REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE = "reproduced", "not reproduced", "inconclusive"
NOT_TESTABLE, NOT_RUN = "not testable here", "not run"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE, NOT_TESTABLE, NOT_RUN)
TIMED = ("tokens_per_s", "speed_up", "draft_ms", "draft_cost", "expected_speed_up", "lossless", "solved")
FEWEST, QUESTIONS = 5, 4  # repetitions of a measurement, and questions, that an interval needs
EXACT = ("parameters", "draft_cost_by_parameters")  # independent of the questions


@dataclass(frozen=True)
class Verdict:
    """A claim with its verdict. summary: the effects in words, or the reason why there is no verdict."""

    study: str
    claim: Mapping[str, Any]
    effects: tuple[Interval | None, ...]
    verdict: str
    summary: str


def config_differences(a: Entry, b: Entry, varies: Iterable[str] = ()) -> list[str]:
    """Aspects in which two entries differ, so that they are not compared. varies: aspects that may differ."""
    free = {*varies, *(["prompts"] if "dataset" in varies else [])}
    differences = []
    for aspect, first in a.conditions.items():
        second = b.conditions[aspect]
        if aspect == "prompts":  # only of shared questions
            equal = all(second.get(question, text) == text for question, text in first.items())
        else:  # a drafter without a tree policy is compared with any
            equal = first == second or (aspect == "tree" and None in (first, second))
        if not equal and aspect not in free:
            differences.append(aspect)
    return differences


def rate(e: Entry, metric: str) -> Rate:
    """A metric of an entry, as a function of its sums."""
    target = e.header["target"]["parameters"]
    if metric == "parameters":
        return lambda s: np.full_like(s["cycles"], e.parameters)
    if metric == "draft_cost_by_parameters":
        return lambda s: np.full_like(s["cycles"], e.parameters / target)
    if metric == "draft_cost":  # seconds of a draft pass over seconds of a target pass for one token
        return lambda s: s["counted_draft"] / s["passes"] / (s["base_target"] / s["base_cycles"])
    if metric == "expected_speed_up":  # of a chain, whose length is the maximum of passes a cycle
        return lambda s: _expected(RATES["alpha"](s), rate(e, "draft_cost")(s), e.arm["passes"])
    if metric == "promised_speed_up":  # of fitted trees only
        promised = e.arm.get("fitted", {}).get("choice", {}).get("speedup", math.nan)
        return lambda s: np.full_like(s["cycles"], promised)
    return RATES[metric]


def _expected(alpha: np.ndarray, cost: np.ndarray, gamma: int) -> np.ndarray:
    """Theorem 3.8 of Leviathan et al.: speed-up of a chain of gamma tokens if a wide pass costs as much as a narrow one."""
    return (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * cost + 1))


class Evidence:
    """The entries of one study on one target, by which its claims are judged.

    If a cell was measured on several kinds of machine, seconds are those of the one with most generations.
    """

    def __init__(self, study: Study, entries: Iterable[Entry]):
        self.study = study
        self.entries = [e for e in entries if e.name == BASELINE or e.name in study["arms"]]

    def find(self, arm: str, at: Mapping[str, Any] | None, timed: bool) -> Entry | None:
        """An arm's entry in one of the study's cells; without seconds the replayed one, which has more questions."""
        at = {"dataset": option(self.study["cells"][0], "dataset", "mtbench"), "temperature": 0} | dict(at or {})
        fit = [
            e
            for e in self.entries
            if e.name == arm and e.dataset == at["dataset"] and e.temperature == at["temperature"]
            and not e.lossy and not (timed and e.replayed)
        ]  # fmt: skip
        if not fit:
            return None
        best = max(fit, key=lambda e: (e.replayed, e.summary.prompts))
        if timed or best.replayed:
            return best
        cell = identity.cell_key(best.header)  # counts, unlike seconds, are pooled over kinds of machine
        return pooled([e for e in fit if identity.cell_key(e.header) == cell])

    def incomparable(self, a: Entry, b: Entry) -> str:
        """Why two entries are not compared; empty if they can be."""
        aspects = config_differences(a, b, self.study.get("varies", []))
        return f"rows that differ in {', '.join(aspects)} are not compared" if aspects else ""


def compare(test: Mapping[str, Any], known: Evidence) -> tuple[Interval | None, str]:
    """The effect of a test; None with the reason if there is none."""
    if "measured" in test:
        return _compare_measured(test, known)
    metric, second = test["metric"], test.get("over_metric", test["metric"])
    timed = metric in TIMED or second in TIMED
    ours = known.find(test["of"], test.get("at"), timed)
    if ours is None:
        return None, f"no rows of {test['of']}"
    category = test.get("at", {}).get("category")
    if "than" in test:
        part = _part(ours, category)
        value = _unbounded_if_few(interval(rate(ours, metric), part), metric, part)
        return (value and _relative(value, test)), "" if value else "no number"
    theirs = known.find(test.get("over", test["of"]), test.get("over_at", test.get("at")), timed)
    if theirs is None:
        return None, f"no rows of {test.get('over', test['of'])}"
    if ours.replayed != theirs.replayed:  # use timed rows of both
        places = ({"dataset": e.dataset, "temperature": e.temperature} for e in (ours, theirs))
        ours, theirs = (known.find(e.name, at, timed=True) or e for e, at in zip((ours, theirs), places, strict=True))
    if problem := known.incomparable(ours, theirs):
        return None, problem
    split = category is not None and "over_at" in test  # one category against all others
    paired = ours.dataset == theirs.dataset and not split
    mine, yours = _part(ours, category), _part(theirs, category, others=split)
    if paired:
        shared = sorted({*mine.questions} & {*yours.questions})
        mine, yours = mine.among(shared), yours.among(shared)
    effect = contrast(rate(ours, metric), mine, yours, not _subtracted(test), rate(theirs, second), paired)
    return _unbounded_if_few(effect, metric, mine, yours), "" if effect else "no questions of both sides"


def _unbounded_if_few(effect: Interval | None, metric: str, *parts: Totals) -> Interval | None:
    """An effect with infinite bounds if there are too few questions for an interval."""
    if effect is None or metric in EXACT or min(len(part.questions) for part in parts) >= QUESTIONS:
        return effect
    return Interval(effect.value, -math.inf, math.inf)


def _part(e: Entry, category: str | None, others: bool = False) -> Totals:
    """Sums over the questions of one category, or of all others; over all questions without a category."""
    if category is None:
        return e.totals
    chosen = {row.question for row in e.rows if (row.category == category) != others}
    return e.totals.among([question for question in e.totals.questions if question in chosen])


def _compare_measured(test: Mapping[str, Any], known: Evidence) -> tuple[Interval | None, str]:
    """A median over repetitions, relative to a number or to another arm's median."""
    quantity, _, name = test["measured"].partition(".")
    sides = []
    for side in ("of",) if "than" in test else ("of", "over"):
        arm = test.get(side, test["of"])
        entry = next((e for e in known.entries if e.name == arm and e.measured.get(quantity)), None)
        if entry is None:
            return None, f"no measurement of {arm}"
        values = [v[name] for v in entry.measured[quantity] if name in v]
        if len(values) < FEWEST:
            return None, f"{len(values)} repetitions, where {FEWEST} make an interval"
        sides.append((entry, values))
    (ours, a), (theirs, b) = sides[0], sides[-1]
    if "than" in test:
        return _relative(repeated(a), test), ""
    if problem := known.incomparable(ours, theirs):
        return None, problem
    low, high = np.percentile(medians(a, seed=0) / medians(b, seed=1), [2.5, 97.5])
    return Interval(float(np.median(a) / np.median(b)), float(low), float(high)), ""


def _relative(value: Interval, test: Mapping[str, Any]) -> Interval:
    """A value as the effect relative to the test's number; `_absolute` reverses it."""
    number, subtracted = test["than"], _subtracted(test)
    return Interval(*(v - number if subtracted else v / number for v in (value.value, value.low, value.high)))


def _absolute(effect: Interval, test: Mapping[str, Any]) -> Interval:
    number, subtracted = test["than"], _subtracted(test)
    return Interval(*(v + number if subtracted else v * number for v in (effect.value, effect.low, effect.high)))


def _subtracted(test: Mapping[str, Any]) -> bool:
    """Is the effect a difference? Otherwise it is a ratio."""
    return "metric" in test and (test["metric"] in ("tau", "solved") or "alpha" in test["metric"])


def judge(test: Mapping[str, Any], effect: Interval | None) -> str:
    """The verdict of one test."""
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


def judge_study(name: str, study: Study, entries: Sequence[Entry], cuda: bool = False) -> list[Verdict]:
    """Verdicts on all claims of a study: reproduced if all tests are, not reproduced if one is not.

    Args:
        entries: of one target; those of other studies are ignored. cuda: is there a GPU, if nothing was run?
    """
    known = Evidence(study, [e for e in entries if e.study == name])
    header: Any = known.entries[0].header if known.entries else None
    verdicts = []
    for claim in study.get("claims", []):
        results = [(test, *compare(test, known)) for test in claim["tests"]]
        effects = tuple(effect for _, effect, _ in results)
        missing = unmet({**study.get("needs", {}), **claim.get("needs", {})}, header, cuda)
        judged = {judge(test, effect) for test, effect, _ in results}
        order = (NOT_RUN, NOT_REPRODUCED, INCONCLUSIVE, REPRODUCED)
        verdict = NOT_TESTABLE if missing else next(v for v in order if v in judged)
        summary = "; ".join(_describe(*result) for result in results)
        if missing:
            shown = f". Measured nevertheless: {summary}" if any(effects) else ""
            summary = f"needs {', '.join(missing)}{shown}"
        elif not known.entries:
            summary = f"python -m specbench.study study={name}"
        elif _trained_once(known, claim):
            summary += " (one seed)"
        verdicts.append(Verdict(name, claim, effects, verdict, summary))
    return verdicts


def _trained_once(known: Evidence, claim: Mapping[str, Any]) -> bool:
    """Was an arm of this claim trained for the study with a single seed?"""
    named = {test[side] for test in claim["tests"] for side in ("of", "over") if side in test}
    return any(e.name in named and "of" in e.arm and e.seeds < 2 for e in known.entries)


COLUMNS = ("claim", "source", "published", "measured", "verdict")


def cells(v: Verdict) -> list[str]:
    """One line of the table of claims, in the order of `COLUMNS`."""
    return [v.claim["says"], v.claim["source"], v.claim["published"], v.summary, v.verdict]


def tally(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Number of claims by verdict, without zeros."""
    counts = {kind: sum(v.verdict == kind for v in verdicts) for kind in VERDICTS}
    return {kind: count for kind, count in counts.items() if count}


def is_goal(v: Verdict) -> bool:
    """Is it a goal of this project instead of a paper's claim?"""
    return "this project" in v.claim["source"]


# Effects in words -----------------------------------------------------------------------------------------------------

METRIC_WORDS = {
    "tau": "tau", "speed_up": "speed-up", "tokens_per_s": "speed", "draft_ms": "drafting a cycle", "alpha": "acceptance",
    "late_alpha": "acceptance behind the first step", "lossless": "lossless answers", "parameters": "parameters",
    "solved": "share of problems solved",
    "draft_cost": "cost of a draft pass", "draft_cost_by_parameters": "its share of the parameters",
    "expected_speed_up": "speed-up by Theorem 3.8", "promised_speed_up": "what its fit promised",
}  # fmt: skip


def words(metric: str) -> str:
    """A metric's name for readers."""
    if metric[:5] == "alpha" and metric[5:]:
        return f"acceptance of step {int(metric[5:]) + 1}"
    return METRIC_WORDS.get(metric, metric.replace(".", ": ").replace("_", " "))


def _describe(test: Mapping[str, Any], effect: Interval | None, reason: str) -> str:
    """An effect and its claim, as `speed-up of hass over eagle2: 1.03 [0.99, 1.07] times, claimed more`."""
    name = f"{words(test.get('metric') or test['measured'])} of {test['of']}{_where(test.get('at'))}"
    if test.get("over", test["of"]) != test["of"]:
        name += f" over {test['over']}"
    if "over_at" in test:
        other = "all others" if "category" in test.get("at", {}) else "greedy"
        name += f" over{_where(test['over_at']) or f' {other}'}"
    if test.get("over_metric"):
        name += f" over {words(test['over_metric'])}"
    if effect is None:
        return f"{name}: {reason}"
    return f"{name}: {_measured(test, effect)}, claimed {_claimed(test)}"


def _measured(test: Mapping[str, Any], effect: Interval) -> str:
    """The effect; the value itself if the claim is about a number."""
    sign, unit = ("+", "") if _subtracted(test) else ("", " times")
    if "than" in test:
        sign, unit, effect = "", "", _absolute(effect, test)
    if math.isinf(effect.high):
        return f"{effect.value:{sign}.2f}{unit} (fewer than {QUESTIONS} questions make no interval)"
    return f"{effect.value:{sign}.2f} [{effect.low:{sign}.2f}, {effect.high:{sign}.2f}]{unit}"


def _claimed(test: Mapping[str, Any]) -> str:
    """What a test expects, in the units of `_measured`."""
    subtracted, than = _subtracted(test), test.get("than")
    neutral = 0.0 if subtracted else 1.0
    unit = "" if subtracted or than else " times"

    def limit(shift: float) -> str:
        value = neutral + shift if than is None else than + shift if subtracted else than * (1 + shift)
        return f"{value:g}"

    if "within" in test:
        return f"{limit(-test['within'])} to {limit(test['within'])}{unit}"
    if than is None and not test.get("by"):
        return str(test["is"])
    return f"at {'least' if test['is'] == 'more' else 'most'} {limit(test.get('by', 0.0))}{unit}"


def _where(at: Mapping[str, Any] | None) -> str:
    at = at or {}
    parts = [f"T={at['temperature']:g}" if "temperature" in at else "", at.get("dataset", ""), at.get("category", "")]
    return "".join(f" at {part}" for part in parts if part)
