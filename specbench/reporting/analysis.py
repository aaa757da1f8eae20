"""Acceptance by category and position, calibration of drafters' probabilities, tau under every convention.

Every rate is a ratio of sums over cycles or nodes, with a 95% bootstrap interval over questions. Compare only entries of
one group (`groups.groups`).
"""

from dataclasses import dataclass, replace

import numpy as np

from specbench.records.metrics import RATES, sum_rows
from specbench.records.rows import BINS, Row
from specbench.records.statistics import Interval, interval
from specbench.records.totals import Rate, Totals
from specbench.reporting.cells import Entry

FEWEST = 10  # tries needed to show a rate
FEW = "few tries"  # shown instead of the rate
STRETCH = 16  # tokens of output in one position


@dataclass(frozen=True)
class Rated:
    """A rate with its interval, and the number of tries (cycles or nodes)."""

    interval: Interval | None
    tries: int

    @property
    def shown(self) -> Interval | None:
        """The rate; None with too few tries."""
        return None if self.tries < FEWEST else self.interval


def rated(rate: Rate, totals: Totals, tries: str) -> Rated:
    """A rate; `tries` names the sum of its tries."""
    return Rated(interval(rate, totals), int(totals.sums[tries].sum()))


# Where drafts are accepted -------------------------------------------------------------------------------------------


def by_category(e: Entry) -> dict[str, Rated]:
    """tau (pooled, bonus included) of the questions of each category."""
    categories = dict.fromkeys(r.category for r in e.rows)
    totals = {category: sum_rows([r for r in e.rows if r.category == category]) for category in categories}
    return {category: rated(RATES["tau"], part, "cycles") for category, part in totals.items()}


def by_position(e: Entry, stretch: int = STRETCH) -> list[Rated]:
    """tau of the cycles that begin in each stretch of so many output tokens.

    A cycle begins at the first token that it emits; the prefill's token is number 0. The end of an answer truncates its
    last cycle, the more likely the more it would have emitted. To avoid that bias, cycles that begin within the deepest
    draft's reach of the end are left out. Later stretches contain only questions with answers that long.
    """
    reach = 1 + max((d for r in e.rows for d in r.drafted), default=0)
    stretches = -(-max((len(r.tokens) for r in e.rows), default=0) // stretch)

    def count(row: Row) -> dict[str, np.ndarray]:
        begins, emitted = cycle_bounds(row)[:-1] + 1, np.array(row.accepted, int) + 1
        whole = begins <= len(row.tokens) - reach
        positions = begins[whole] // stretch
        return {
            "tokens": np.bincount(positions, emitted[whole], minlength=stretches),
            "cycles": np.bincount(positions, minlength=stretches),
        }

    totals = Totals.add_up((row.asked, count(row)) for row in e.rows)
    return [rated(RATES["tau"], totals.part(i), "cycles") for i in range(stretches)]


def cycle_bounds(row: Row) -> np.ndarray:
    """[cycles + 1]: index in `row.tokens` of each cycle's root, and of the last token."""
    return np.cumsum([0, *(a + 1 for a in row.accepted)])


# Calibration of drafters' probabilities ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """A drafter's probability for a candidate against the share that the target accepted.

    The candidates are the children of accepted nodes (see `trace.CalibratedDrafter`); the target did not judge others.

    Attributes:
        curve: by tenth of probability, the mean probability and the share accepted.
        error: expected calibration error: mean distance of the two, weighted by candidates. Never negative, so sampling
            alone makes it positive.
        excess: mean probability minus share accepted, over all candidates; positive for an overconfident drafter.
    """

    curve: tuple[tuple[float, Rated], ...]
    error: Interval
    excess: Interval

    @property
    def candidates(self) -> int:
        return sum(point.tries for _, point in self.curve)


def calibration(e: Entry) -> Calibration | None:
    """From the confidences of replayed rows; None without any, as of drafters without probabilities."""
    names = ("nodes", "accepted", "probability")
    confidences = [(r.asked, np.array(r.confidence, float).T) for r in e.rows if len(r.confidence) == BINS]
    totals = Totals.add_up((question, dict(zip(names, bins, strict=True))) for question, bins in confidences)
    if not confidences or not totals.sums["nodes"].any():
        return None
    nodes, probability = totals.pooled["nodes"], totals.pooled["probability"]
    means = [float(p / n) if n else float("nan") for p, n in zip(probability, nodes, strict=True)]
    points = [rated(lambda s: s["accepted"] / s["nodes"], totals.part(i), "nodes") for i in range(BINS)]
    error = interval(lambda s: np.abs(s["probability"] - s["accepted"]).sum(-1) / s["nodes"].sum(-1), totals)
    excess = interval(lambda s: (s["probability"] - s["accepted"]).sum(-1) / s["nodes"].sum(-1), totals)
    assert error is not None and excess is not None  # there are nodes
    return Calibration(tuple(zip(means, points, strict=True)), error, excess)


# tau as papers and programs count it ---------------------------------------------------------------------------------

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
    """tau of the same cycles under each convention in use; values of different conventions are not comparable.

    pooled: emitted tokens / target passes, the bonus included; this project, EAGLE's paper, Spec-Bench (mean of
        `accept_lengths`), SGLang's log.
    mean over answers: mean of each answer's tau, so short answers count as much as long ones; SpecForge.
    mean over questions: turns pooled, then a mean; HASS's script.
    without the bonus: accepted draft tokens a pass, one less than pooled; MoA's text, vLLM before May 2025.
    drafted cycles only: without passes that verified no draft; vLLM. Differs for drafters that do not always draft.
    with the prefill's token: the first token of an answer counts too; SGLang's number of a single request, here pooled.
    cycles counted from 0: EAGLE's scripts write the index of an answer's last cycle (`idx`), one less than its cycles.

    EAGLE's scripts also count tokens after a stop token and beyond the cap, which rows do not hold.
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

    totals = Totals.add_up((row.asked, count(row)) for row in e.rows)
    if not totals.questions:
        return dict.fromkeys(CONVENTIONS)
    tokens, cycles = totals.sums["tokens"], totals.sums["cycles"]
    means = {"question_taus": tokens / np.maximum(cycles, 1), "questions": (cycles > 0).astype(float)}
    totals = replace(totals, sums={**totals.sums, **means})
    return {name: interval(rate, totals) for name, rate in CONVENTIONS.items()}
