"""What rows hold beyond tau: where drafts are accepted, how sure drafters are, tau under every convention.

Pure functions from entries and rows to numbers. Every rate is a ratio of sums over cycles or nodes, with a 95% bootstrap
interval over questions as in `specbench.records.statistics`. A rate that rests on few tries is marked (`few`). Entries that
are compared should come from one group (`groups.groups`).
"""

from dataclasses import dataclass, replace

import numpy as np

from specbench.records.metrics import RATES, sum_rows
from specbench.records.rows import BINS, Row
from specbench.records.statistics import Interval, Rate, Totals, interval
from specbench.reporting.cells import Entry

FEWEST = 10  # tries, for a rate to be shown
FEW = "few tries"  # what stands in its place
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


# How sure drafters are -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """A drafter's probability for a candidate against how often the target took it.

    The candidates are the children of accepted nodes, see `trace.CalibratedDrafter`; others the target never judged.

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
