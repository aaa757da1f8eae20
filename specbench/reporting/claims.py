"""Verdicts on papers' claims, from the rows of their studies.

A claim is a list of tests (`specbench/records/studies.py`); a test compares a metric of one arm with that of another,

    {metric: tau, of: hass, over: eagle2, is: more}               tau(hass) - tau(eagle2) > 0
    {metric: speed_up, of: beagle, over: eagle2, within: 0.05}    the ratio lies in 1 +- 0.05
    {metric: tau, of: medusa, than: 2.0, is: more}                tau(medusa) > 2, a number instead of another arm
    {metric: tau, of: eagle2, at: {temperature: 1}, over_at: {}, is: less}     one arm in two cells
    {metric: speed_up, of: eagle1, at: {batch: 4}, over_at: {}, is: less}      against one sequence at a time
    {metric: tau, of: eagle1, at: {category: coding}, over_at: {}, is: more}   some prompts of a cell against all others
    {measured: memory.peak, of: beagle, over: eagle2, is: less}   a measurement, repeated five times or more
    {measured: generate.ratio, of: none, than: 1, is: more}       a measurement against a number
    {measured: target_pass.ms_8/ms_1, of: none, than: 1.3, is: less}    two values of each repetition, one over the other

The effect is a difference for tau, acceptances and problems solved, a ratio otherwise. Its 95% interval resamples questions
(paired between arms) or repetitions. With `at: {dataset: [mtbench, gsm8k]}` it is the mean over data sets, each resampled
by its own questions. Entries are compared only if their conditions agree, see `evidence.config_differences`.

A study fixes its size in advance (questions and length of its cells, seeds of its arms, repetitions of `measure`): before
all of it is measured, and with fewer than 20 questions at all, of a category too, a claim is preliminary, whatever its
interval says. So is one about speeds that a busy machine or an earlier engine measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbench.records.statistics import (
    LEVEL,
    Estimate,
    Interval,
    average,
    estimate,
    estimate_contrast,
    medians,
    repeated,
    with_seeds,
)
from specbench.records.studies import Study, claim_needs, compared_arms, is_difference, unmet
from specbench.records.totals import Totals
from specbench.reporting import claim_text
from specbench.reporting.cells import Entry
from specbench.reporting.evidence import EXACT, OF_ENGINE, SPEEDS, TIMED, Evidence, rate, seeds_of
from specbench.reporting.fastest import QUESTIONS

REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE = "reproduced", "not reproduced", "inconclusive"
PRELIMINARY, NOT_TESTABLE, NOT_RUN = "preliminary", "not testable here", "not run"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE, PRELIMINARY, NOT_TESTABLE, NOT_RUN)
FEWEST = 5  # repetitions of a measurement that an interval needs


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim with its verdict.

    Attributes:
        summary: the effects in words, or the reason why there is no verdict. size: of a preliminary one, `24 of 80`.
    """

    study: str
    claim: Mapping[str, Any]
    effects: tuple[Interval | None, ...]
    verdict: str
    summary: str
    size: str = ""

    @property
    def shown(self) -> str:
        """`preliminary, 24 of 80`."""
        return f"{self.verdict}, {self.size}" if self.size else self.verdict


@dataclass(frozen=True)
class Comparison:
    """The effect of a test, or the reason why there is none.

    Attributes:
        done, planned: questions of the comparison's cell, or repetitions of a measurement.
        doubt: why its rows decide nothing, whatever their number.
    """

    effect: Interval | None = None
    reason: str = ""
    done: int = 0
    planned: int = 0
    doubt: str = ""

    @property
    def preliminary(self) -> bool:
        return self.done < self.planned or self.doubt != ""

    @property
    def size(self) -> str:
        """`24 of 80, with an earlier engine`: what is missing, and what makes it doubtful."""
        counted = f"{self.done} of {self.planned}" if self.done < self.planned else ""
        return ", ".join(filter(None, (counted, self.doubt)))


def compare(test: Mapping[str, Any], known: Evidence) -> Comparison:
    """The effect of a test, over all its data sets."""
    if "measured" in test:
        return _compare_measured(test, known)
    named = known.place(test.get("at"))["dataset"]
    parts = []
    for number, dataset in enumerate(named if isinstance(named, list) else [named]):
        found, one = _compare_at(test, {**test.get("at", {}), "dataset": dataset}, known, seed=2 * number)
        if found is None:
            return one
        parts.append((found, one))
    if len({found.log for found, _ in parts}) > 1:
        return Comparison(reason="on some of these data sets it has no ratio")
    sizes = _least(one for _, one in parts)
    effect = average([found for found, _ in parts]).interval()
    if effect is not None and "than" in test:
        effect = _relative(effect, test)
    return replace(sizes, effect=effect, reason="" if effect else "no number")


def _compare_at(
    test: Mapping[str, Any], at: Mapping[str, Any], known: Evidence, seed: int
) -> tuple[Estimate | None, Comparison]:
    """The effect on one data set, and its size; None with the reason if there is none. seed: of the samples."""
    metric, second = test["metric"], test.get("over_metric", test["metric"])
    timed = metric in TIMED or second in TIMED
    one, other = (test["of"], at), (test.get("over", test["of"]), test.get("over_at", at))
    alone = "than" in test
    ours, theirs = (known.find(*one, timed), None) if alone else known.find_pair(one, other, timed)
    if ours is None:
        return None, Comparison(reason=_no_rows(one[0], at, known))
    category = at.get("category")
    if alone:
        of = rate(ours, metric)
        found = estimate(of, _part(ours, category), seed)
        return found and with_seeds(found, [(of, seeds_of(ours))]), _size(known, metric, category, ours)
    if theirs is None:
        return None, Comparison(reason=_no_rows(*other, known))
    if problem := known.incomparable(ours, theirs, timed):
        return None, Comparison(reason=problem)
    split = category is not None and "over_at" in test  # one category against all others
    paired = not split and (ours.dataset == theirs.dataset or ours.shares_questions(theirs))
    mine, yours = _part(ours, category), _part(theirs, category, others=split)
    if metric == second == "tokens_per_s" and "over_at" not in test and _beside_baseline(mine, yours):
        metric = second = "speed_up"  # the same ratio, without what the machine's speed did between a cell's blocks
    rates = rate(ours, metric), rate(theirs, second)
    effect = estimate_contrast(rates[0], mine, yours, not is_difference(test), rates[1], paired, seed)
    size = _size(known, metric, None if split else category, ours, theirs)
    if split:
        size = _least([size, *(Comparison(done=len(side.questions), planned=QUESTIONS) for side in (mine, yours))])
    if effect is None:
        return None, replace(size, reason="no questions of both sides")
    return with_seeds(effect, [(rates[0], seeds_of(ours)), (rates[1], seeds_of(theirs))]), size


def _no_rows(arm: str, at: Mapping[str, Any], known: Evidence) -> str:
    """Of which arm, and where that is not the study's first cell, of which cell."""
    first = known.place(None)
    where = ", ".join(f"{name}={value}" for name, value in at.items() if first.get(name) != value)
    return f"no rows of {arm}{f' at {where}' if where else ''}"


def _beside_baseline(*sides: Totals) -> bool:
    """Was every question decoded plainly as well, in the same block?"""
    return all(np.all(side.sums["base_seconds"] > 0) for side in sides)


def _size(known: Evidence, metric: str, category: str | None, *entries: Entry) -> Comparison:
    """Questions that these entries have, and those planned, of the one that lacks most; and what makes them doubtful."""
    if metric in EXACT:
        return Comparison()
    sizes = [known.size(e) for e in entries]
    if category is not None:
        sizes += [(len(_part(e, category).questions), QUESTIONS) for e in entries]
    done, planned = min(sizes, key=lambda size: size[0] - size[1])
    doubts = [known.doubt(e, metric in SPEEDS) for e in entries]
    return Comparison(done=done, planned=planned, doubt=next(filter(None, doubts), ""))


def _least(sizes: Iterable[Comparison]) -> Comparison:
    """Of several sizes the most preliminary one."""
    return min(sizes, key=lambda one: (min(one.done - one.planned, 0), not one.doubt), default=Comparison())


def _part(e: Entry, category: str | None, others: bool = False) -> Totals:
    """Sums over the questions of one category, or of all others; over all questions without a category."""
    return e.totals if category is None else e.among(category, others)


def _compare_measured(test: Mapping[str, Any], known: Evidence) -> Comparison:
    """A median over repetitions, relative to a number or to another arm's median."""
    quantity, _, name = test["measured"].partition(".")
    sides = []
    for side in ("of",) if "than" in test else ("of", "over"):
        arm = test.get(side, test["of"])
        entry = known.measured(arm, quantity)
        if entry is None:
            return Comparison(reason=f"no measurement of {arm}")
        values = [v for v in (_measured_value(m, name) for m in entry.measured[quantity]) if v is not None]
        if len(values) < FEWEST:
            return Comparison(reason=f"{len(values)} repetitions, where {FEWEST} make an interval")
        sides.append((entry, values))
    (ours, a), (theirs, b) = sides[0], sides[-1]
    planned = known.study.get("measure", {}).get(quantity, FEWEST)
    size = Comparison(done=min(len(a), len(b)), planned=planned, doubt=known.engine_doubt(ours, quantity in OF_ENGINE))
    if "than" in test:
        return replace(size, effect=_relative(repeated(a), test))
    if problem := known.incomparable(ours, theirs, timed=True):
        return Comparison(reason=problem)
    low, high = np.percentile(medians(a, seed=0) / medians(b, seed=1), LEVEL)
    return replace(size, effect=Interval(float(np.median(a) / np.median(b)), float(low), float(high)))


def _measured_value(measured: Mapping[str, float], name: str) -> float | None:
    """One value of a measurement, or one over another, as `ms_8/ms_1`; None if it is not there."""
    parts = name.split("/")
    return measured[parts[0]] / (measured[parts[1]] if parts[1:] else 1.0) if measured.keys() >= {*parts} else None


def _relative(value: Interval, test: Mapping[str, Any]) -> Interval:
    """A value as the effect relative to the test's number."""
    number, difference = test["than"], is_difference(test)
    return Interval(*(v - number if difference else v / number for v in (value.value, value.low, value.high)))


def judge(test: Mapping[str, Any], found: Comparison) -> str:
    """The verdict of one test."""
    if (effect := found.effect) is None:
        return NOT_RUN
    if found.preliminary:
        return PRELIMINARY
    neutral = 0.0 if is_difference(test) else 1.0
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


def judge_study(name: str, study: Study, entries: Sequence[Entry], cuda: bool = False) -> list[ClaimVerdict]:
    """Verdicts on all claims of a study: reproduced if all tests are, not reproduced if one is not.

    Args:
        entries: of one target; those of other studies are ignored. cuda: is there a GPU, if nothing was run?
    """
    known = Evidence(study, [e for e in entries if e.study == name])
    header: Any = known.entries[0].header if known.entries else None
    verdicts = []
    for claim in study.get("claims", []):
        results = [(test, compare(test, known)) for test in claim["tests"]]
        effects = tuple(found.effect for _, found in results)
        missing = unmet(claim_needs(study, claim), header, cuda, compared_arms(claim))
        judged = {judge(test, found) for test, found in results}
        order = (NOT_RUN, NOT_REPRODUCED, PRELIMINARY, INCONCLUSIVE, REPRODUCED)
        verdict = NOT_TESTABLE if missing else next(v for v in order if v in judged)
        summary = "; ".join(claim_text.describe(test, found.effect, found.reason, known.place) for test, found in results)
        least = _least(found for _, found in results)
        if missing:
            shown = f". Measured nevertheless: {summary}" if any(effects) else ""
            summary = f"needs {', '.join(missing)}{shown}"
        elif not known.entries:
            summary = f"study {name} was not run"
        else:
            notes = [_unequal(known, claim), *(["one seed"] if _trained_once(known, claim) else [])]
            summary += f" ({'; '.join(filter(None, notes))})" if any(notes) else ""
        size = least.size if verdict == PRELIMINARY else ""
        verdicts.append(ClaimVerdict(name, claim, effects, verdict, summary, size))
    return verdicts


def _unequal(known: Evidence, claim: Mapping[str, Any]) -> str:
    """The trained parameters of compared arms, where a claim wants arms trained alike and they differ by over 10%."""
    if not claim.get("needs", {}).get("alike"):
        return ""
    named = compared_arms(claim)
    sizes = {e.name: e.weights["parameters"] for e in known.entries if e.name in named and e.weights.get("parameters")}
    if not sizes or max(sizes.values()) <= 1.1 * min(sizes.values()):
        return ""
    return "trained parameters: " + ", ".join(f"{name} {size / 1e6:.1f} M" for name, size in sizes.items())


def _trained_once(known: Evidence, claim: Mapping[str, Any]) -> bool:
    """Was an arm of this claim trained for the study with a single seed?"""
    named = compared_arms(claim)
    return any(e.name in named and "of" in e.arm and e.seeds < 2 for e in known.entries)


COLUMNS = ("claim", "source", "published", "measured", "verdict")


def cells(v: ClaimVerdict) -> list[str]:
    """One line of the table of claims, in the order of `COLUMNS`."""
    return [v.claim["says"], v.claim["source"], v.claim["published"], v.summary, v.shown]


def tally(verdicts: Sequence[ClaimVerdict]) -> dict[str, int]:
    """Number of claims by verdict, without zeros."""
    counts = {kind: sum(v.verdict == kind for v in verdicts) for kind in VERDICTS}
    return {kind: count for kind, count in counts.items() if count}


def is_goal(v: ClaimVerdict) -> bool:
    """Is it a goal of this project instead of a paper's claim?"""
    return "this project" in v.claim["source"]
