"""Rates as ratios of sums by question, with 95% bootstrap intervals over questions. Knows no row but by its question.

Turns of a question stay together, and so do the seeds of an arm: a bootstrap sample draws whole questions. A rate that is
undefined, because nothing of its kind was counted, is NaN, or None where there would be an interval.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, TypeVar

import numpy as np

SAMPLES = 2000

Sums = Mapping[str, np.ndarray]
Rate = Callable[[Sums], np.ndarray]


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


class HasQuestion(Protocol):
    """Whatever belongs to a question, such as a row."""

    @property
    def question(self) -> str: ...


Record = TypeVar("Record", bound=HasQuestion)


@dataclass(frozen=True)
class Totals:
    """Sums by question, from which rates are pooled and resampled.

    Attributes:
        questions: their names, in the order of the arrays. sums: name -> [Q], or [Q, N] of quantities with N parts.
    """

    questions: tuple[str, ...]
    sums: Sums

    @classmethod
    def count(cls, records: Sequence[Record], count: Callable[[Record], Mapping[str, float | np.ndarray]]) -> "Totals":
        """Sums by question of whatever is counted in each record."""
        questions = tuple(sorted({r.question for r in records}))
        index = {question: i for i, question in enumerate(questions)}
        sums: dict[str, np.ndarray] = {}
        for record in records:
            for name, value in count(record).items():
                if name not in sums:
                    sums[name] = np.zeros((len(questions), *np.shape(value)))
                sums[name][index[record.question]] += value
        return cls(questions, sums)

    def among(self, questions: Sequence[str]) -> "Totals":
        """The same for these questions only, in this order."""
        if tuple(questions) == self.questions:
            return self
        index = {question: i for i, question in enumerate(self.questions)}
        chosen = [index[question] for question in questions]
        return Totals(tuple(questions), {name: sums[chosen] for name, sums in self.sums.items()})

    def part(self, at: int) -> "Totals":
        """One of the N parts of quantities that have them: [Q, N] -> [Q]."""
        return Totals(self.questions, {name: sums[:, at] for name, sums in self.sums.items()})

    @cached_property
    def _pooled(self) -> Sums:
        return {name: sums.sum(0) for name, sums in self.sums.items()}

    def pooled(self) -> Sums:
        """Sums over all questions: numbers, or [N]."""
        return self._pooled

    @cached_property
    def resampled(self) -> Sums:
        """The same over every bootstrap sample of questions, computed where they are asked for: [S] or [S, N]."""
        return _Resampled(self)


class _Resampled(dict[str, np.ndarray]):
    """Sums over bootstrap samples, each computed once, at its first use."""

    def __init__(self, totals: Totals):
        self.totals = totals

    def __missing__(self, name: str) -> np.ndarray:
        sums = self.totals.sums[name]
        drawn = resamples(len(sums)) @ sums.reshape(len(sums), -1)
        self[name] = drawn.reshape(len(drawn), *sums.shape[1:])
        return self[name]


@lru_cache(maxsize=8)
def draws(questions: int) -> np.ndarray:
    """Bootstrap samples of questions, [S, Q] indices; the same ones whenever there are as many questions."""
    return np.random.default_rng(0).integers(questions, size=(SAMPLES, questions))


@lru_cache(maxsize=8)
def resamples(questions: int) -> np.ndarray:
    """[S, Q]: how often a sample holds each question."""
    return np.stack([np.bincount(sample, minlength=questions) for sample in draws(questions)]).astype(float)


def interval(rate: Rate, totals: Totals) -> Interval | None:
    """A rate over all questions with its 95% bootstrap interval over questions; None where nothing was counted."""
    if not totals.questions:
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return _bounded(float(rate(totals.pooled())), lambda: rate(totals.resampled))


def contrast(
    rate: Rate, ours: Totals, theirs: Totals, ratio: bool = False, other: Rate | None = None, paired: bool = True
) -> Interval | None:
    """Difference (or ratio) of a rate between two drafters on the questions they share, resampled alike for both.

    other: the rate of the second drafter, if it is another one. paired: False: each side has questions of its own, which
    are resampled independently.
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
        drawn = second(theirs.resampled)
        # As many questions on both sides have the same samples: reversed, they are unrelated.
        return effect(rate(ours.resampled), drawn if paired else drawn[::-1])

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return _bounded(float(effect(rate(ours.pooled()), second(theirs.pooled()))), samples)


def _bounded(value: float, draw: Callable[[], np.ndarray]) -> Interval | None:
    """A value with its bounds over samples; samples that leave it undefined do not count."""
    if not np.isfinite(value):
        return None
    samples = draw()
    samples = samples[np.isfinite(samples)]
    low, high = np.percentile(samples, [2.5, 97.5]) if samples.size else (value, value)
    return Interval(value, float(low), float(high))


def pooled(rate: Rate, totals: Totals) -> float:
    """A rate over all questions; NaN where it is undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(rate(totals.pooled()))


def macro(rate: Rate, totals: Totals) -> float:
    """The mean over questions of a rate taken question by question."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = rate(totals.sums)
    return mean(values[np.isfinite(values)])


def mean(values: Iterable[float]) -> float:
    """NaN of nothing."""
    values = list(values)
    return float(np.mean(values)) if values else float("nan")


def repeated(values: Sequence[float]) -> Interval:
    """The median of a measurement's repetitions, with its 95% interval over these."""
    low, high = np.percentile(medians(values), [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))


def medians(values: Sequence[float], seed: int = 0) -> np.ndarray:
    """[S] of bootstrap samples of repetitions."""
    found: np.ndarray = np.median(np.random.default_rng(seed).choice(values, (SAMPLES, len(values))), axis=1)
    return found
