"""Rates as ratios of sums by question, with 95% bootstrap intervals over questions.

A bootstrap sample draws whole questions, so the turns of a question and the seeds of an arm stay together. An undefined
rate (nothing was counted) is NaN, or None in place of an interval.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

SAMPLES = 2000

Sums = Mapping[str, np.ndarray]
Rate = Callable[[Sums], np.ndarray]
Counts = Mapping[str, float | np.ndarray]


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Totals:
    """Sums by question, from which rates are pooled and resampled.

    Attributes:
        questions: their names, in the order of the arrays.
        sums: name -> [Q], or [Q, N] for quantities with N parts.
    """

    questions: tuple[str, ...]
    sums: Sums

    @classmethod
    def add_up(cls, counts: Iterable[tuple[str, Counts]], zeros: Counts | None = None) -> "Totals":
        """Sums of (question, counts) pairs. zeros: names and shapes of sums that exist even if nothing counts them."""
        counts = list(counts)
        questions = tuple(sorted({question for question, _ in counts}))
        index = {question: i for i, question in enumerate(questions)}
        sums = {name: np.zeros((len(questions), *np.shape(value))) for name, value in (zeros or {}).items()}
        for question, values in counts:
            for name, value in values.items():
                if name not in sums:
                    sums[name] = np.zeros((len(questions), *np.shape(value)))
                sums[name][index[question]] += value
        return cls(questions, sums)

    def among(self, questions: Sequence[str]) -> "Totals":
        """The sums of these questions only, in this order."""
        if tuple(questions) == self.questions:
            return self
        index = {question: i for i, question in enumerate(self.questions)}
        chosen = [index[question] for question in questions]
        return Totals(tuple(questions), {name: sums[chosen] for name, sums in self.sums.items()})

    def part(self, index: int) -> "Totals":
        """One of the N parts: [Q, N] -> [Q]."""
        return Totals(self.questions, {name: sums[:, index] for name, sums in self.sums.items()})

    @cached_property
    def pooled(self) -> Sums:
        """Sums over all questions: numbers, or [N]."""
        return {name: sums.sum(0) for name, sums in self.sums.items()}

    @cached_property
    def resampled(self) -> Sums:
        """Sums over each bootstrap sample of questions: [S] or [S, N]."""
        return _Resampled(self)


class _Resampled(dict[str, np.ndarray]):
    """Sums over bootstrap samples by name, each computed when it is first read."""

    def __init__(self, totals: Totals):
        self.totals = totals

    def __missing__(self, name: str) -> np.ndarray:
        sums = self.totals.sums[name]
        samples = resamples(len(sums)) @ sums.reshape(len(sums), -1)
        self[name] = samples.reshape(len(samples), *sums.shape[1:])
        return self[name]


@lru_cache(maxsize=8)
def draws(questions: int) -> np.ndarray:
    """[S, Q] indices: bootstrap samples of questions, the same for every call with this number of questions."""
    return np.random.default_rng(0).integers(questions, size=(SAMPLES, questions))


@lru_cache(maxsize=8)
def resamples(questions: int) -> np.ndarray:
    """[S, Q]: how often each question occurs in a sample."""
    return np.stack([np.bincount(sample, minlength=questions) for sample in draws(questions)]).astype(float)


def interval(rate: Rate, totals: Totals) -> Interval | None:
    """A rate over all questions with its 95% bootstrap interval over questions; None where nothing was counted."""
    if not totals.questions:
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return _bounded(float(rate(totals.pooled)), lambda: rate(totals.resampled))


def contrast(
    rate: Rate, ours: Totals, theirs: Totals, ratio: bool = False, other: Rate | None = None, paired: bool = True
) -> Interval | None:
    """Difference (or ratio) of a rate between two drafters on the questions they share, with paired resampling.

    Args:
        other: rate of the second drafter, if different. paired: False: the sides have different questions, which are
            resampled independently.
    """
    if paired and ours.questions != theirs.questions:
        shared = sorted({*ours.questions} & {*theirs.questions})
        ours, theirs = ours.among(shared), theirs.among(shared)
    if not ours.questions or not theirs.questions:
        return None
    second = other or rate

    def effect(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a / b if ratio else a - b

    def samples() -> np.ndarray:
        others = second(theirs.resampled)
        # Sides of equal length share their samples (`draws`); in reverse order they are independent.
        return effect(rate(ours.resampled), others if paired else others[::-1])

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return _bounded(float(effect(rate(ours.pooled), second(theirs.pooled))), samples)


def _bounded(value: float, sample: Callable[[], np.ndarray]) -> Interval | None:
    """A value with its 95% bounds over the samples in which it is defined."""
    if not np.isfinite(value):
        return None
    samples = sample()
    samples = samples[np.isfinite(samples)]
    low, high = np.percentile(samples, [2.5, 97.5]) if samples.size else (value, value)
    return Interval(value, float(low), float(high))


def pooled(rate: Rate, totals: Totals) -> float:
    """A rate over all questions; NaN where it is undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(rate(totals.pooled))


def macro(rate: Rate, totals: Totals) -> float:
    """The mean over questions of each question's own rate."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = rate(totals.sums)
    return mean(values[np.isfinite(values)])


def mean(values: Iterable[float]) -> float:
    """The mean; NaN without values."""
    values = list(values)
    return float(np.mean(values)) if values else float("nan")


def repeated(values: Sequence[float]) -> Interval:
    """The median of a measurement's repetitions, with its 95% bootstrap interval."""
    low, high = np.percentile(medians(values), [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))


def medians(values: Sequence[float], seed: int = 0) -> np.ndarray:
    """[S]: medians of bootstrap samples of repetitions."""
    samples = np.random.default_rng(seed).choice(values, (SAMPLES, len(values)))
    return np.asarray(np.median(samples, axis=1))
