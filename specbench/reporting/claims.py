"""The ledger of claims: what papers say, against what the rows of their studies say. Knows rows and metrics, no drafter.

A claim is a list of tests (`specbench/records/studies.py`); a test compares a metric of one arm with that of another,

    {metric: tau, of: hass, over: eagle2, is: more}               tau(hass) - tau(eagle2) > 0
    {metric: speed_up, of: beagle, over: eagle2, within: 0.05}    the ratio lies in 1 +- 0.05
    {metric: tau, of: medusa, than: 2.0, is: more}                tau(medusa) > 2, a number instead of another arm
    {metric: tau, of: eagle2, at: {temperature: 1}, over_at: {}, is: less}     one arm in two cells
    {metric: tau, of: eagle1, at: {category: coding}, over_at: {}, is: more}   some prompts of a cell against all others
    {measured: memory.peak, of: beagle, over: eagle2, is: less}   what was measured beside the rows, five times or more
    {measured: generate.ratio, of: none, than: 1, is: more}       the same against a number

Differences are taken of tau, acceptances and problems solved, ratios of everything else. The 95% interval resamples
questions, for both arms the same, or repetitions. Only what was measured alike is compared: see `config_differences`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.records import identity
from specbench.records.metrics import BASELINE, RATES
from specbench.records.statistics import Interval, Rate, Totals, contrast, interval, medians, repeated
from specbench.records.studies import Study, unmet
from specbench.reporting.cells import Entry, pooled

REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE = "reproduced", "not reproduced", "inconclusive"
NOT_TESTABLE, NOT_RUN = "not testable here", "not run"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE, NOT_TESTABLE, NOT_RUN)
TIMED = ("tokens_per_s", "speed_up", "draft_ms", "draft_cost", "expected_speed_up", "lossless", "solved")
FEWEST, QUESTIONS = 5, 4  # repetitions of a measurement and questions of a cell, for an interval
EXACT = ("parameters", "draft_cost_by_parameters")  # the same whatever was asked


@dataclass(frozen=True)
class Verdict:
    """A claim with what was found. said: the effects in words, and why there is no verdict where there is none."""

    study: str
    claim: Mapping[str, Any]
    effects: tuple[Interval | None, ...]
    verdict: str
    said: str


def config_differences(a: Entry, b: Entry, varies: Iterable[str] = ()) -> list[str]:
    """In what two entries differ that may not differ in one comparison, unless a study is about it."""
    free = {*varies, *(["prompts"] if "dataset" in varies else [])}
    found = []
    for name, first in a.conditions.items():
        second = b.conditions[name]
        if name == "prompts":  # of those that both have
            alike = all(second.get(question, text) == text for question, text in first.items())
        else:  # a drafter without a tree to choose has the one it has
            alike = first == second or (name == "tree" and None in (first, second))
        if not alike and name not in free:
            found.append(name)
    return found


def rate(e: Entry, metric: str) -> Rate:
    """A metric of one entry, as a function of sums over its rows."""
    target = e.header["target"]["parameters"]
    if metric == "parameters":
        return lambda s: np.full_like(s["cycles"], e.parameters)
    if metric == "draft_cost_by_parameters":
        return lambda s: np.full_like(s["cycles"], e.parameters / target)
    if metric == "draft_cost":  # seconds of a draft pass over seconds of a target pass for one token
        return lambda s: s["counted_draft"] / s["passes"] / (s["base_target"] / s["base_cycles"])
    if metric == "expected_speed_up":  # of a chain, whose length is the most passes that a cycle may run
        return lambda s: _expected(RATES["alpha"](s), rate(e, "draft_cost")(s), e.arm["passes"])
    if metric == "promised_speed_up":  # by the search for a fitted tree; of no other tree
        promised = e.arm.get("fitted", {}).get("choice", {}).get("speedup", math.nan)
        return lambda s: np.full_like(s["cycles"], promised)
    return RATES[metric]


def _expected(alpha: np.ndarray, cost: np.ndarray, gamma: int) -> np.ndarray:
    """Theorem 3.8 of Leviathan et al.: what a chain of gamma brings where a wide pass costs no more than a narrow one."""
    return (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * cost + 1))


class Evidence:
    """The entries of one study on one target: what its claims are judged on.

    Where a cell was measured on several kinds of machine, seconds are those of the one with most generations.
    """

    def __init__(self, study: Study, entries: Iterable[Entry]):
        self.study = study
        self.entries = [e for e in entries if e.name == BASELINE or e.name in study["arms"]]

    def find(self, arm: str, at: Mapping[str, Any] | None, timed: bool) -> Entry | None:
        """An arm's entry in one of the study's cells; of acceptances the replayed one, which holds more questions."""
        at = at or {}
        dataset = at.get("dataset", self._first)
        fit = [
            e
            for e in self.entries
            if e.name == arm and e.dataset == dataset and e.temperature == at.get("temperature", 0)
            and not e.lossy and not (timed and e.replayed)
        ]  # fmt: skip
        if not fit:
            return None
        best = max(fit, key=lambda e: (e.replayed, e.summary.prompts))
        if timed or best.replayed:
            return best
        cell = identity.cell_key(best.header)  # counts, unlike seconds, are pooled over kinds of machine
        return pooled([e for e in fit if identity.cell_key(e.header) == cell])

    @property
    def _first(self) -> str | None:
        option = next((o for o in self.study["cells"][0] if o.startswith("dataset=")), "dataset=mtbench")
        return option.partition("=")[2]


def compare(test: Mapping[str, Any], known: Evidence) -> tuple[Interval | None, str]:
    """The effect that a test is about; None, and why, where there is none."""
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
        found = _bounded(interval(rate(ours, metric), part), metric, part)
        return (found and _against(found, test["than"], _subtracted(test))), "" if found else "no number"
    theirs = known.find(test.get("over", test["of"]), test.get("over_at", test.get("at")), timed)
    if theirs is None:
        return None, f"no rows of {test.get('over', test['of'])}"
    if ours.replayed != theirs.replayed:  # one of them was not replayed: neither counts as such
        ours, theirs = (known.find(e.name, _place(e), timed=True) or e for e in (ours, theirs))
    if differ := config_differences(ours, theirs, known.study.get("varies", [])):
        return None, f"rows that differ in {', '.join(differ)} are not compared"
    apart = category is not None and "over_at" in test
    paired = ours.dataset == theirs.dataset and not apart
    mine, yours = _part(ours, category), _part(theirs, category, others=apart)
    if paired:
        shared = sorted({*mine.questions} & {*yours.questions})
        mine, yours = mine.among(shared), yours.among(shared)
    found = contrast(rate(ours, metric), mine, yours, not _subtracted(test), rate(theirs, second), paired)
    return _bounded(found, metric, mine, yours), "" if found else "no questions of both sides"


def _bounded(found: Interval | None, metric: str, *parts: Totals) -> Interval | None:
    """An effect whose bounds are nowhere where too few questions lie behind it: resampling them would show too little."""
    if found is None or metric in EXACT or min(len(part.questions) for part in parts) >= QUESTIONS:
        return found
    return Interval(found.value, -math.inf, math.inf)


def _place(e: Entry) -> dict[str, Any]:
    return {"dataset": e.dataset, "temperature": e.temperature}


def _part(e: Entry, category: str | None, others: bool = False) -> Totals:
    """Of the questions of one category, or of all others; of all questions where there is none."""
    if category is None:
        return e.totals
    wanted = {row.question for row in e.rows if (row.category == category) != others}
    return e.totals.among([question for question in e.totals.questions if question in wanted])


def _compare_measured(test: Mapping[str, Any], known: Evidence) -> tuple[Interval | None, str]:
    """A ratio of medians over repetitions, with a bootstrap over these."""
    what, _, name = test["measured"].partition(".")
    sides = []
    for side in ("of",) if "than" in test else ("of", "over"):
        entry = next((e for e in known.entries if e.name == test.get(side, test["of"]) and e.measured.get(what)), None)
        if entry is None:
            return None, f"no measurement of {test.get(side, test['of'])}"
        values = [v[name] for v in entry.measured[what] if name in v]
        if len(values) < FEWEST:
            return None, f"{len(values)} repetitions, where {FEWEST} make an interval"
        sides.append((entry, values))
    ours, a = sides[0]
    if "than" in test:
        return _against(repeated(a), test["than"], _subtracted(test)), ""
    theirs, b = sides[1]
    if differ := config_differences(ours, theirs, known.study.get("varies", [])):
        return None, f"rows that differ in {', '.join(differ)} are not compared"
    low, high = np.percentile(medians(a, seed=0) / medians(b, seed=1), [2.5, 97.5])
    return Interval(float(np.median(a) / np.median(b)), float(low), float(high)), ""


def _against(found: Interval, number: float, subtracted: bool) -> Interval:
    values = (v - number if subtracted else v / number for v in (found.value, found.low, found.high))
    return Interval(*values)


def _subtracted(test: Mapping[str, Any]) -> bool:
    """Is the effect a difference? Otherwise it is a ratio."""
    return "metric" in test and (test["metric"] in ("tau", "solved") or "alpha" in test["metric"])


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


def judge_study(name: str, study: Study, entries: Sequence[Entry], cuda: bool = False) -> list[Verdict]:
    """Every claim of a study, on entries of one target. A claim is reproduced if all its tests are, and not if one is not.

    Args:
        entries: of any study; those of others do not count. cuda: is there a GPU at all, where nothing was run?
    """
    known = Evidence(study, [e for e in entries if e.study == name])
    header: Any = known.entries[0].header if known.entries else None
    found = []
    for claim in study.get("claims", []):
        results = [compare(test, known) for test in claim["tests"]]
        effects = tuple(effect for effect, _ in results)
        needs = {**study.get("needs", {}), **claim.get("needs", {})}
        absent = unmet(needs, header, cuda)
        verdicts = {judge(test, effect) for test, effect in zip(claim["tests"], effects, strict=True)}
        order = (NOT_RUN, NOT_REPRODUCED, INCONCLUSIVE, REPRODUCED)
        verdict = NOT_TESTABLE if absent else next(v for v in order if v in verdicts)
        said = "; ".join(_said(test, *result) for test, result in zip(claim["tests"], results, strict=True))
        if absent:
            shown = f". Measured nevertheless: {said}" if any(effects) else ""
            said = f"needs {', '.join(absent)}{shown}"
        elif not known.entries:
            said = f"python -m specbench.study study={name}"
        elif _trained_once(known, claim):
            said += " (one seed)"
        found.append(Verdict(name, claim, effects, verdict, said))
    return found


def _trained_once(known: Evidence, claim: Mapping[str, Any]) -> bool:
    """Does an arm of this claim rest on a single training made for the study?"""
    named = {test[side] for test in claim["tests"] for side in ("of", "over") if side in test}
    return any(e.name in named and "of" in e.arm and e.seeds < 2 for e in known.entries)


COLUMNS = ("claim", "source", "published", "measured", "verdict")


def cells(v: Verdict) -> list[str]:
    """One line of the ledger, in the order of `COLUMNS`."""
    return [v.claim["says"], v.claim["source"], v.claim["published"], v.said, v.verdict]


def tally(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many claims became what, of what any became."""
    counts = {kind: sum(v.verdict == kind for v in verdicts) for kind in VERDICTS}
    return {kind: count for kind, count in counts.items() if count}


METRIC_WORDS = {
    "tau": "tau", "speed_up": "speed-up", "tokens_per_s": "speed", "draft_ms": "drafting a cycle", "alpha": "acceptance",
    "late_alpha": "acceptance behind the first step", "lossless": "lossless answers", "parameters": "parameters",
    "solved": "share of problems solved",
    "draft_cost": "cost of a draft pass", "draft_cost_by_parameters": "its share of the parameters",
    "expected_speed_up": "speed-up by Theorem 3.8", "promised_speed_up": "what its fit promised",
}  # fmt: skip


def words(metric: str) -> str:
    """A metric as a reader calls it."""
    if metric[:5] == "alpha" and metric[5:]:
        return f"acceptance of step {int(metric[5:]) + 1}"
    return METRIC_WORDS.get(metric, metric.replace(".", ": ").replace("_", " "))


def is_goal(v: Verdict) -> bool:
    """Is it what this project set itself, and no paper's claim?"""
    return "this project" in v.claim["source"]


def _said(test: Mapping[str, Any], effect: Interval | None, why: str) -> str:
    """A value against what was claimed of it: `speed-up of hass over eagle2: 1.03 [0.99, 1.07] times, claimed more`."""
    name = f"{words(test.get('metric') or test['measured'])} of {test['of']}{_where(test.get('at'))}"
    if test.get("over", test["of"]) != test["of"]:
        name += f" over {test['over']}"
    if "over_at" in test:
        other = "all others" if "category" in test.get("at", {}) else "greedy"
        name += f" over{_where(test['over_at']) or f' {other}'}"
    if test.get("over_metric"):
        name += f" over {words(test['over_metric'])}"
    if effect is None:
        return f"{name}: {why}"
    return f"{name}: {_found(test, effect)}, claimed {_threshold(test)}"


def _found(test: Mapping[str, Any], effect: Interval) -> str:
    """The value itself where a number is claimed, else the effect."""
    sign, unit = ("+", "") if _subtracted(test) else ("", " times")
    if "than" in test:
        sign, unit = "", ""
        by = test["than"]
        effect = Interval(*((x + by) if _subtracted(test) else x * by for x in (effect.value, effect.low, effect.high)))
    if math.isinf(effect.high):
        return f"{effect.value:{sign}.2f}{unit} (fewer than {QUESTIONS} questions make no interval)"
    return f"{effect.value:{sign}.2f} [{effect.low:{sign}.2f}, {effect.high:{sign}.2f}]{unit}"


def _threshold(test: Mapping[str, Any]) -> str:
    """What a test expects, in the terms of `_found`."""
    subtracted, than = _subtracted(test), test.get("than")
    neutral = 0.0 if subtracted else 1.0
    unit = "" if subtracted or than else " times"

    def at(shift: float) -> str:
        found = neutral + shift if than is None else than + shift if subtracted else than * (1 + shift)
        return f"{found:g}"

    if "within" in test:
        return f"{at(-test['within'])} to {at(test['within'])}{unit}"
    if than is None and not test.get("by"):
        return str(test["is"])
    return f"at {'least' if test['is'] == 'more' else 'most'} {at(test.get('by', 0.0))}{unit}"


def _where(at: Mapping[str, Any] | None) -> str:
    at = at or {}
    parts = [f"T={at['temperature']:g}" if "temperature" in at else "", at.get("dataset", ""), at.get("category", "")]
    return "".join(f" at {part}" for part in parts if part)
