"""Rates as ratios of sums by question, with 95% bootstrap intervals over questions.

A bootstrap sample draws whole questions, so the turns of a question and the seeds of an arm stay together. Intervals are
studentised and symmetric (Hall, "On symmetric bootstrap confidence intervals", JRSS B 1988): the deviation of every sample
is divided by its own standard error, which follows from the influence of each question on the rate (delta method). With 20
questions of skewed length they cover 95%, percentile and BCa intervals 90%. Ratios have theirs on a logarithmic scale. An
undefined rate (nothing was counted) is NaN, or None in place of an interval.

The seeds of a trained arm are a second source of chance, see `with_seeds`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specbench.records.totals import SAMPLES, Rate, Sums, Totals, weights

LEVEL = (2.5, 97.5)  # percent, of a 95% interval
# Questions that an interval needs. Samples of three or fewer different questions have errors near zero, so their deviations
# are huge. They are 7.7% of the samples of seven questions, and would make the 95% quantile; of eight questions 1.9%.
MIN_QUESTIONS = 8
TINY = 1e-6  # an error below this part of another one is none, but for rounding
REGULAR = 0.9  # share of samples with a standard error that a studentised interval needs
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 97.5% quantiles of t by its freedom


class Ratio:
    """A rate that is a ratio of positive quantities, as a speed: its interval is symmetric on a logarithmic scale.

    So it stays above zero, however few the questions.
    """

    def __init__(self, rate: Rate):
        self.rate = rate

    def __call__(self, sums: Sums) -> np.ndarray:
        return self.rate(sums)


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval; low = value = high where there are too few questions for one."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A quantity with its bootstrap samples.

    Attributes:
        value: [1 + S] of all questions, then of each sample. error: [1 + S] its standard error there.
        questions: smallest number that any part of it rests on. log: is it the logarithm of the quantity?
        seed_reach: half of the 95% interval that the seeds of training alone would have.
    """

    value: np.ndarray
    error: np.ndarray
    questions: int
    log: bool = False
    seed_reach: float = 0.0

    def logarithm(self) -> "Estimate":
        """The same quantity's logarithm."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return replace(self, value=np.log(self.value), error=self.error / self.value, log=True)

    def interval(self) -> Interval | None:
        """The studentised 95% interval; None where the quantity is undefined."""
        if not np.isfinite(self.value[0]):
            return None
        few = self.questions < MIN_QUESTIONS
        low, high = (self.value[0], self.value[0]) if few else self._bounds()
        if self.seed_reach and not few:
            low = self.value[0] - np.hypot(self.value[0] - low, self.seed_reach)
            high = self.value[0] + np.hypot(high - self.value[0], self.seed_reach)
        return Interval(*(float(np.exp(x) if self.log else x) for x in (self.value[0], low, high)))

    def _bounds(self) -> tuple[float, float]:
        """The studentised symmetric interval; percentiles where too many samples have no error (see `REGULAR`)."""
        value, error = self.value[0], self.error[0]
        if error <= TINY * (1.0 if self.log else abs(value)):  # all questions are alike, but for rounding
            return float(value), float(value)
        samples = self.value[1:][np.isfinite(self.value[1:])]
        spread = self.error[1:] > TINY * error
        deviations = (self.value[1:][spread] - value) / self.error[1:][spread]
        if len(deviations) < REGULAR * SAMPLES:  # in many samples all questions are alike, as with one failure in 80
            low, high = np.percentile(samples, LEVEL) if samples.size else (value, value)
            return float(low), float(high)
        reach = float(np.quantile(np.abs(deviations), 0.95)) * error
        return value - reach, value + reach


def linearise(rate: Rate, totals: Totals, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A rate of all questions and of each sample, [1 + S], and the influence of each question on it, [1 + S, Q].

    The influence is the derivative by the question's weight: by the sums that the rate reads, numerically, times the
    question's own sums.
    """
    weighted, read = totals.weighted(seed), _Recording(totals.pooled)
    rate(read)
    value = np.asarray(rate(weighted), float)
    slopes, own = [], []
    for name in read.names:
        each = totals.sums[name].reshape(len(totals.questions), -1)
        for part in np.flatnonzero(each.any(0)):
            if _slope(rate, {n: s[None] for n, s in totals.pooled.items()}, name, int(part)).any():
                slopes.append(_slope(rate, weighted, name, int(part)))
                own.append(each[:, part])
    if not own:
        return value, np.zeros((len(value), len(totals.questions)))
    return value, np.stack(slopes, 1) @ np.stack(own)


class _Recording(dict[str, np.ndarray]):
    """Sums that remember which of them were read."""

    def __init__(self, sums: Sums):
        super().__init__(sums)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.names:
            self.names.append(name)
        return super().__getitem__(name)


def _slope(rate: Rate, sums: Sums, name: str, part: int) -> np.ndarray:
    """[1 + S]: the derivative of a rate by one part of one sum, by central differences."""
    around = []
    flat = sums[name].reshape(len(sums[name]), -1)
    step = 1e-4 * np.maximum(np.abs(flat[:, part]), 1e-4 * np.abs(flat[:, part]).max() + 1e-12)
    for sign in (1, -1):
        moved = flat.copy()
        moved[:, part] += sign * step
        around.append(rate({**sums, name: moved.reshape(sums[name].shape)}))
    return np.asarray((around[0] - around[1]) / (2 * step))


def _error(influence: np.ndarray, questions: int, seed: int) -> np.ndarray:
    """[1 + S]: standard errors from influences."""
    inside = np.where(np.isfinite(influence), influence, 0.0) ** 2 * weights(questions, seed)
    return np.asarray(np.sqrt(inside.sum(1) * questions / max(questions - 1, 1)))


def estimate(rate: Rate, totals: Totals, seed: int = 0) -> Estimate | None:
    """A rate over all questions, a `Ratio` as its logarithm; None without questions.

    seed: of the samples, another one for independent questions.
    """
    found = _estimate(rate, totals, seed)
    return found.logarithm() if found and isinstance(rate, Ratio) and found.value[0] > 0 else found


def _estimate(rate: Rate, totals: Totals, seed: int = 0) -> Estimate | None:
    if not totals.questions:
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        value, influence = linearise(rate, totals, seed)
    return Estimate(value, _error(influence, len(totals.questions), seed), len(totals.questions))


def estimate_contrast(
    rate: Rate,
    ours: Totals,
    theirs: Totals,
    ratio: bool = False,
    other: Rate | None = None,
    paired: bool = True,
    seed: int = 0,
) -> Estimate | None:
    """Difference (or ratio) of a rate between two drafters on the questions they share, with paired resampling.

    Args:
        other: rate of the second drafter, if different. paired: False: the sides have different questions, which are
            resampled independently. seed: see `estimate`.
    """
    if paired and ours.questions != theirs.questions:
        shared = sorted({*ours.questions} & {*theirs.questions})
        ours, theirs = ours.among(shared), theirs.among(shared)
    sizes = len(ours.questions), len(theirs.questions)
    if not min(sizes):
        return None
    seeds = seed, seed if paired else seed + 1
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        (a, by_a), (b, by_b) = linearise(rate, ours, seeds[0]), linearise(other or rate, theirs, seeds[1])
        if log := bool(ratio and a[0] > 0 and b[0] > 0):
            a, by_a, b, by_b = np.log(a), by_a / a[:, None], np.log(b), by_b / b[:, None]
        if paired:
            error = _error(by_a - by_b, sizes[0], seed)
        else:
            error = np.hypot(_error(by_a, sizes[0], seeds[0]), _error(by_b, sizes[1], seeds[1]))
        value = a / b if ratio and not log else a - b
    return Estimate(value, error, min(sizes), log)


def with_seeds(found: Estimate, sides: Sequence[tuple[Rate, Sequence[Totals]]]) -> Estimate:
    """An estimate whose interval allows for the seeds of training as well.

    Questions and seeds are crossed, so that variances add as in two-way clustering (Cameron, Gelbach, Miller, JBES 2011):
    over questions, plus between seeds, less that of single answers, which both contain. The seeds' part is multiplied by
    Student's t, whose degrees of freedom for two trained sides follow Welch and Satterthwaite; half intervals add as
    squares. A side with one seed adds nothing, which has to be stated.

    sides: of a contrast, each with its rate and the sums of every seed.
    """
    parts = [_between(rate, seeds, found.log) for rate, seeds in sides if len(seeds) > 1]
    total, answers = sum(between for between, _, _ in parts), sum(within for _, within, _ in parts)
    if not total > answers:
        return found
    freedom = int(total**2 / sum(between**2 / free for between, _, free in parts))
    return replace(found, seed_reach=float(np.sqrt(total - answers)) * STUDENT[min(freedom, len(STUDENT)) - 1])


def _between(rate: Rate, seeds: Sequence[Totals], log: bool) -> tuple[float, float, int]:
    """Variance of the mean over seeds by their differences, its part that single answers make, degrees of freedom."""
    found = [e for e in (_estimate(rate, totals) for totals in seeds) if e is not None]
    values, errors = (np.array([getattr(e, name)[0] for e in found]) for name in ("value", "error"))
    if log:
        values, errors = np.log(values), errors / values
    return float(np.var(values, ddof=1)) / len(values), float(np.sum(errors**2)) / len(values) ** 2, len(values) - 1


def average(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates on one scale, as of several data sets: geometric for ratios.

    Data sets have their own questions but the same seeds, whose effects therefore do not average out.
    """
    value = np.mean([e.value for e in estimates], axis=0)
    error = np.sqrt(np.sum([e.error**2 for e in estimates], axis=0)) / len(estimates)
    reach = float(np.mean([e.seed_reach for e in estimates]))
    return Estimate(value, error, min(e.questions for e in estimates), estimates[0].log, reach)


def interval(rate: Rate, totals: Totals) -> Interval | None:
    """A rate over all questions with its interval; None where nothing was counted."""
    found = estimate(rate, totals)
    return None if found is None else found.interval()


def contrast(rate: Rate, ours: Totals, theirs: Totals, ratio: bool = False) -> Interval | None:
    """The interval of `estimate_contrast`."""
    found = estimate_contrast(rate, ours, theirs, ratio)
    return None if found is None else found.interval()


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
    low, high = np.percentile(medians(values), LEVEL)
    return Interval(float(np.median(values)), float(low), float(high))


def medians(values: Sequence[float], seed: int = 0) -> np.ndarray:
    """[S]: medians of bootstrap samples of repetitions."""
    samples = np.random.default_rng(seed).choice(values, (SAMPLES, len(values)))
    return np.asarray(np.median(samples, axis=1))
