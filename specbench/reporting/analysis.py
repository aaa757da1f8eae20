"""What rows hold beyond tau: where drafts are accepted, what is wasted, how drafters could be combined, how sure they are.

Pure functions from entries and rows to numbers. Every rate is a ratio of sums over cycles or nodes, with a 95% bootstrap
interval over questions as in `specbench.records.statistics`. A rate that rests on few tries is marked (`few`). Entries that
are compared should come from one group (`groups.groups`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from specbench.records.metrics import RATES, sum_rows
from specbench.records.rows import BINS, Row
from specbench.records.statistics import Interval, Rate, Totals, contrast, interval
from specbench.reporting.cells import Entry

FEWEST = 10  # tries, for a rate to be shown
FEW = "few tries"  # what stands in its place
LONGEST = 8  # accepted lengths from here on are counted together
STRETCH = 16  # tokens of output that make one position


def few(tries: float) -> bool:
    """Do too few tries lie behind a rate for anybody to read it?"""
    return tries < FEWEST


@dataclass(frozen=True)
class Rated:
    """A rate with its interval, and the tries behind it: cycles or nodes."""

    found: Interval | None
    tries: int

    @property
    def shown(self) -> Interval | None:
        """The rate, where enough tries lie behind it."""
        return None if few(self.tries) else self.found


def rated(rate: Rate, totals: Totals, tries: str, at: int | None = None) -> Rated:
    """A rate, its tries being a sum of that name. at: place of both in sums that are arrays."""
    if not totals.questions:
        return Rated(None, 0)
    if at is not None:
        totals = totals.part(at)
    return Rated(interval(rate, totals), int(totals.sums[tries].sum()))


# Where drafts are accepted -------------------------------------------------------------------------------------------


def by_category(e: Entry) -> dict[str, Rated]:
    """tau (pooled, bonus included) of the questions of each category, in the order of their first row."""
    found = {}
    for category in dict.fromkeys(r.category for r in e.rows):
        totals = sum_rows([r for r in e.rows if r.category == category])
        found[category] = rated(RATES["tau"], totals, "cycles")
    return found


def by_position(e: Entry, stretch: int = STRETCH) -> list[Rated]:
    """tau of the cycles that begin in each stretch of so many tokens of the output, from its beginning on.

    A cycle begins at the first token that it emits, and the prefill's token is number 0. The end of an answer cuts its
    last cycle, the more likely the more it would have emitted; so cycles that begin where the deepest draft could reach
    the end are left out, cut or not. Later stretches hold only the questions whose answers are long enough.
    """
    reach = 1 + max((d for r in e.rows for d in r.drafted), default=0)
    stretches = -(-max((len(r.tokens) for r in e.rows), default=0) // stretch)

    def count(row: Row) -> dict[str, np.ndarray]:
        begins, emitted = cycle_bounds(row)[:-1] + 1, np.array(row.accepted, int) + 1
        free = begins <= len(row.tokens) - reach
        at = begins[free] // stretch
        return {
            "tokens": np.bincount(at, emitted[free], minlength=stretches),
            "cycles": np.bincount(at, minlength=stretches),
        }

    totals = Totals.count(e.rows, count)
    return [rated(RATES["tau"], totals, "cycles", at) for at in range(stretches)]


def cycle_bounds(row: Row) -> np.ndarray:
    """[cycles + 1]: places in `row.tokens` of each cycle's root, and of the last token behind the last cycle."""
    return np.cumsum([0, *(a + 1 for a in row.accepted)])


def accepted_lengths(e: Entry) -> list[Rated]:
    """Shares of all cycles that accepted 0, 1, 2, … draft tokens; from `LONGEST` on together, as the last one.

    Cycles that the end of an answer cut count with what they emitted, as in tau, which is 1 + the mean of these lengths.
    """
    longest = min(LONGEST, max((a for r in e.rows for a in r.accepted), default=-1))

    def count(row: Row) -> dict[str, float | np.ndarray]:
        lengths = np.minimum(np.array(row.accepted, int), longest)
        cycles = np.full(longest + 1, len(lengths))
        return {"of": np.bincount(lengths, minlength=longest + 1), "cycles": cycles}

    totals = Totals.count(e.rows, count)
    return [rated(lambda s: s["of"] / s["cycles"], totals, "cycles", at) for at in range(longest + 1)]


# What is wasted ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waste:
    """Draft nodes that the target verified, the root not counted.

    a_cycle: nodes. per_accepted: nodes verified for one accepted token. share: of the nodes that were accepted.
    """

    a_cycle: Interval
    per_accepted: Interval | None
    share: Interval


def waste(e: Entry) -> Waste | None:
    """None for what drafts nothing, such as the baseline. A chain can do with one node an accepted token, a tree cannot."""
    totals = Totals.count(e.rows, lambda r: {"nodes": sum(r.nodes), "accepted": sum(r.accepted), "cycles": len(r.nodes)})
    share = interval(lambda s: s["accepted"] / s["nodes"], totals)
    a_cycle = interval(lambda s: s["nodes"] / s["cycles"], totals)
    if share is None or a_cycle is None:
        return None
    return Waste(a_cycle, interval(lambda s: s["nodes"] / s["accepted"], totals), share)


# Oracles -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OracleDrafter:
    """tau of a set of drafters with the choice among them left to somebody who knows the answer.

    Attributes:
        generations: that all drafters answered, with the same ids. left_out: that some answered otherwise, or not at all.
        best: the drafter that accepts most over all generations, `fixed` its tau on them.
        by_generation: the best drafter for each generation. by_cycle: the shortest way through each answer.
        gain_by_generation, gain_by_cycle: differences to `fixed`, paired.
        wins: drafter -> generations in which none needs fewer cycles; ties count for each.
    """

    generations: int
    left_out: int
    best: str
    fixed: Interval
    by_generation: Interval
    by_cycle: Interval
    gain_by_generation: Interval
    gain_by_cycle: Interval
    wins: Mapping[str, int]


def oracle_drafter(entries: Sequence[Entry]) -> OracleDrafter | None:
    """Which tau perfect choices among these drafters would reach, from recorded cycles alone. Greedy answers only.

    Every lossless drafter spells the baseline's answer, so cycles of all of them lie on one line: a cycle leads from the
    place of its root to the place of its bonus. `by_cycle` goes from the prefill's token to the answer's end in as few
    recorded cycles as possible, changing the drafter wherever another one's cycle begins at the same place; the
    baseline's plain passes, if it is among the entries, begin everywhere.

    Limits: a drafter was recorded only at the places that its own decoding came to, so a switching decoder could do
    better than `by_cycle`: it is a lower bound of the true oracle. It can be walked as told where a draft depends on the
    text before it alone and not on the cycles that led there, which holds for drafters that keep nothing but the target's
    states of accepted tokens. Seeds of an arm count as drafters of their own. None where fewer than two drafters answered
    any generation alike.
    """
    arms = [(e.title, [r for r in e.rows if r.drafter == label]) for e in entries for label in _labels(e)]
    if len(arms) < 2 or any(e.temperature > 0 for e in entries):
        return None
    answered = [{(r.question, r.turn): r for r in rows} for _, rows in arms]
    asked = sorted(set().union(*answered))
    beside = [[rows[key] for rows in answered] for key in asked if all(key in rows for rows in answered)]
    alike = [rows for rows in beside if all(r.tokens == rows[0].tokens for r in rows)]
    if not alike:
        return None
    used = np.array([[len(r.accepted) for r in rows] for rows in alike])  # [generations, arms] cycles
    fewest = used.min(1)
    best = int(used.sum(0).argmin())  # over the same tokens
    always = _spending(alike, used[:, best])
    by_generation, by_cycle = _spending(alike, fewest), _spending(alike, [fewest_cycles(rows) for rows in alike])
    fixed, generation, cycle = (interval(RATES["tau"], t) for t in (always, by_generation, by_cycle))
    gain_generation, gain_cycle = (contrast(RATES["tau"], t, always) for t in (by_generation, by_cycle))
    if fixed is None or generation is None or cycle is None or gain_generation is None or gain_cycle is None:
        return None
    names = [name for name, _ in arms]
    wins = {n: int((used[:, [n == name for name in names]].min(1) == fewest).sum()) for n in names}
    left_out = len(asked) - len(alike)
    return OracleDrafter(len(alike), left_out, names[best], fixed, generation, cycle, gain_generation, gain_cycle, wins)


def _spending(generations: Sequence[Sequence[Row]], cycles: Iterable[int]) -> Totals:
    """The tokens of each generation, in so many cycles."""
    spent = {rows[0].key: n for rows, n in zip(generations, cycles, strict=True)}
    firsts = [rows[0] for rows in generations]
    return Totals.count(firsts, lambda r: {"tokens": len(r.tokens) - 1, "cycles": spent[r.key]})


def _labels(e: Entry) -> list[str]:
    return sorted({r.drafter for r in e.rows})


def fewest_cycles(rows: Sequence[Row]) -> int:
    """Recorded cycles on the shortest way through one answer, of whatever row: a shortest path, solved from its end."""
    end = len(rows[0].tokens) - 1
    leads: list[set[int]] = [set() for _ in range(end)]  # from each place to these
    for row in rows:
        for begin, stop in pairwise(cycle_bounds(row).tolist()):
            leads[begin].add(stop)
    far = end + 1  # more than any way takes
    left = [far] * end + [0]
    for place in reversed(range(end)):
        left[place] = 1 + min((left[stop] for stop in leads[place]), default=far)
    return left[0]


# How sure drafters are -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """A drafter's probability for a candidate against how often the target took it.

    The candidates are the children of accepted nodes, see `trace.Watched`; others the target never judged.

    Attributes:
        curve: by tenth of probability, the mean probability and the share that was accepted.
        error: expected calibration error, the mean distance of the two weighted by candidates. It cannot be negative, so
            sampling alone makes it positive.
        excess: mean probability minus share accepted, over all candidates; positive where the drafter is too sure.
    """

    curve: tuple[tuple[float, Rated], ...]
    error: Interval
    excess: Interval

    @property
    def candidates(self) -> int:
        return sum(point.tries for _, point in self.curve)


def calibration(e: Entry) -> Calibration | None:
    """From the confidences of replayed rows; None where there are none, as of drafters that give no probabilities."""
    rows = [r for r in e.rows if len(r.confidence) == BINS]
    totals = Totals.count(
        rows, lambda r: dict(zip(("nodes", "right", "sure"), np.array(r.confidence, float).T, strict=True))
    )
    if not rows or not totals.sums["nodes"].any():
        return None
    nodes, sure = totals.sums["nodes"].sum(0), totals.sums["sure"].sum(0)
    means = [float(s / n) if n else float("nan") for s, n in zip(sure, nodes, strict=True)]
    points = [rated(lambda s: s["right"] / s["nodes"], totals, "nodes", at) for at in range(BINS)]
    error = interval(lambda s: np.abs(s["sure"] - s["right"]).sum(-1) / s["nodes"].sum(-1), totals)
    excess = interval(lambda s: (s["sure"] - s["right"]).sum(-1) / s["nodes"].sum(-1), totals)
    assert error is not None and excess is not None  # there are nodes
    return Calibration(tuple(zip(means, points, strict=True)), error, excess)


# tau as others count it ----------------------------------------------------------------------------------------------

CONVENTIONS: dict[str, Rate] = {
    "pooled": lambda s: s["tokens"] / s["cycles"],
    "mean over answers": lambda s: s["answer_taus"] / s["answers"],
    "mean over questions": lambda s: s["question_taus"] / s["questions"],
    "without the bonus": lambda s: s["accepted"] / s["cycles"],
    "drafted cycles only": lambda s: 1 + s["accepted"] / s["drafted_cycles"],
    "with the prefill's token": lambda s: (s["tokens"] + s["answers"]) / s["cycles"],
    "cycles counted from 0": lambda s: s["tokens"] / (s["cycles"] - s["answers"]),
}


def conventions(e: Entry) -> dict[str, Interval | None]:
    """One run's tau under each convention that is in use: numbers of different names must not be compared.

    pooled: emitted tokens / target passes, the bonus included; as everywhere in this project, and in EAGLE's paper,
        Spec-Bench (mean of `accept_lengths`) and SGLang's log.
    mean over answers: of each answer's own tau; SpecForge. Short answers count as much as long ones.
    mean over questions: turns pooled, then a mean; HASS's script.
    without the bonus: accepted draft tokens a pass, one less than pooled; MoA's wording, and vLLM before May 2025.
    drafted cycles only: passes that verified no draft are left out; vLLM, whose metric counts drafts. Differs for drafters
        that do not always draft, such as those that copy from the text.
    with the prefill's token: the first token of an answer, which no cycle emits, counts too; SGLang's
        number of a single request, here pooled.
    cycles counted from 0: EAGLE's scripts write the index of an answer's last cycle (`idx`), one less than its cycles;
        whoever divides by it gets this.

    EAGLE's scripts also count tokens behind a stop token and beyond the cap, which rows do not hold.
    """

    def count(row: Row) -> dict[str, float]:
        emitted, cycles = len(row.tokens) - 1, len(row.accepted)
        return {
            "tokens": emitted,
            "cycles": cycles,
            "accepted": sum(row.accepted),
            "drafted_cycles": sum(n > 0 for n in row.nodes),
            "answers": cycles > 0,
            "answer_taus": emitted / cycles if cycles else 0.0,
        }

    totals = Totals.count(e.rows, count)
    if not totals.questions:
        return dict.fromkeys(CONVENTIONS)
    tokens, cycles = totals.sums["tokens"], totals.sums["cycles"]
    means = {"question_taus": tokens / np.maximum(cycles, 1), "questions": (cycles > 0).astype(float)}
    totals = replace(totals, sums={**totals.sums, **means})
    return {name: interval(rate, totals) for name, rate in CONVENTIONS.items()}
