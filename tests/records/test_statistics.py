"""Intervals cover what they promise, and are those of the formulas written out."""

import math

import numpy as np
import pytest

from specbench.records import statistics
from specbench.records.metrics import RATES
from specbench.records.statistics import average, contrast, estimate, estimate_contrast, interval, with_seeds
from specbench.records.totals import Totals
from specbench.records.totals import weights as weights_of


def totals_of(rng, questions, ease, pace=0.0, spread=0.3):
    """Tokens, cycles and skewed seconds by question. ease: of each question, alike for all arms; pace: log speed."""
    tokens = rng.integers(20, 65, questions).astype(float)
    tau = 1 + rng.gamma(2, 0.8, questions)
    seconds = tokens * ease * rng.lognormal(-pace, spread, questions) * math.exp(-(spread**2) / 2)
    base = {"base_tokens": tokens, "base_seconds": tokens * ease}
    sums = {"tokens": tokens, "cycles": tokens / tau, "seconds": seconds} | base
    return Totals(tuple(map(str, range(questions))), sums)


@pytest.mark.parametrize("questions", [20, 40, 80])
def test_ninety_five_percent_intervals_cover_the_truth_that_often(questions):
    """Speed-ups of one arm, and of one arm over another, on questions of lognormal length."""
    rng, runs = np.random.default_rng(questions), 500
    alone = paired = 0
    for _ in range(runs):
        ease = rng.lognormal(0, 0.5, questions)
        ours, theirs = (totals_of(rng, questions, ease, pace) for pace in (0.3, 0.0))
        one, ratio = interval(RATES["speed_up"], ours), contrast(RATES["speed_up"], ours, theirs, ratio=True)
        truth = math.exp(0.3)
        alone += one.low <= truth <= one.high
        paired += ratio.low <= truth <= ratio.high
    assert 0.93 <= alone / runs <= 0.97 and 0.93 <= paired / runs <= 0.97, (alone / runs, paired / runs)


def test_a_speed_up_of_few_questions_stays_above_zero():
    """Where one question of eight takes thirty times the seconds of the others."""
    sums = {"tokens": np.full(8, 64.0), "seconds": np.array([1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.0, 30.0])}
    totals = Totals(tuple("abcdefgh"), sums | {"base_tokens": np.full(8, 64.0), "base_seconds": np.full(8, 2.0)})
    found = interval(RATES["speed_up"], totals)
    assert 0 < found.low < found.value < found.high
    assert found.value / found.low == pytest.approx(found.high / found.value)
    assert found.value == pytest.approx(16 / 37)


def test_fewer_than_eight_questions_make_no_interval_not_even_of_seeds():
    """Of seven, so many samples hold three different questions or fewer that the interval reaches everywhere."""
    rng = np.random.default_rng(0)
    for questions, wide in ((8, True), (7, False)):
        seeds = [totals_of(rng, questions, np.ones(questions), pace) for pace in (0.0, 0.5)]
        both = Totals(seeds[0].questions, {n: sum(s.sums[n] for s in seeds) for n in seeds[0].sums})
        estimated = estimate(RATES["speed_up"], both)
        for found in (estimated, with_seeds(estimated, [(RATES["speed_up"], seeds)])):
            bounds = found.interval()
            assert (bounds.low < bounds.value < bounds.high) == wide


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.5])
def test_intervals_of_trained_arms_cover_the_truth_of_all_seeds(spread):
    """Three seeds of two arms, 24 questions; the seeds' own spread below, beside and above that of the questions."""
    rng, runs, covered, narrow = np.random.default_rng(3), 300, 0, 0
    for _ in range(runs):
        ease = rng.lognormal(0, 0.5, 24)
        sides = [[totals_of(rng, 24, ease, pace + spread * rng.standard_normal()) for _ in range(3)] for pace in (0.3, 0.0)]
        ours, theirs = (
            Totals(seeds[0].questions, {n: sum(s.sums[n] for s in seeds) for n in seeds[0].sums}) for seeds in sides
        )
        rate = RATES["speed_up"]
        found = estimate_contrast(rate, ours, theirs, ratio=True)
        both = with_seeds(found, [(rate, seeds) for seeds in sides]).interval()
        covered += both.low <= math.exp(0.3) <= both.high
        narrow += found.interval().low <= math.exp(0.3) <= found.interval().high
    assert 0.93 <= covered / runs <= 0.98, (covered / runs, narrow / runs)
    assert spread < 0.5 or narrow / runs < 0.5, "without the seeds' part it covers far less"


@pytest.mark.parametrize("metric", ["tau", "speed_up", "alpha", "late_alpha"])
def test_the_influence_of_a_question_is_what_its_weight_changes(metric):
    rng = np.random.default_rng(1)
    totals = totals_of(rng, 12, rng.lognormal(0, 0.5, 12))
    tried = rng.integers(20, 40, (12, 5)).astype(float)
    totals = Totals(totals.questions, {**totals.sums, "tried": tried, "passed": np.floor(tried * rng.random((12, 5)))})
    rate = RATES[metric]
    value, influence = statistics.linearise(rate, totals)
    weights = weights_of(12)
    for sample in (0, 1, 777):
        for question in (0, 7):
            around = []
            for step in (1e-5, -1e-5):
                weight = weights[sample] + step * (np.arange(12) == question)
                around.append(float(rate({name: np.tensordot(weight, sums, 1) for name, sums in totals.sums.items()})))
            assert influence[sample, question] == pytest.approx((around[0] - around[1]) / 2e-5, rel=1e-3, abs=1e-9)
        assert value[sample] == pytest.approx(sum(around) / 2, rel=1e-6)


def test_a_rare_failure_gets_an_interval_too():
    """Most samples without the one failure have no spread of their own."""
    fine = np.ones(80)
    totals = Totals(tuple(map(str, range(80))), {"audited": fine, "lossless": np.where(np.arange(80) == 3, 0.0, fine)})
    found = interval(RATES["lossless"], totals)
    assert found.value == 79 / 80 and 0.95 < found.low < found.value < found.high <= 1
    certain = interval(RATES["lossless"], Totals(totals.questions, {"audited": fine, "lossless": fine}))
    assert (certain.low, certain.value, certain.high) == (1, 1, 1)


@pytest.mark.parametrize("questions", [1, 2, 3])
def test_very_few_questions_make_no_interval(questions):
    rng = np.random.default_rng(0)
    found = interval(RATES["tau"], totals_of(rng, questions, np.ones(questions)))
    assert found.low == found.value == found.high


def test_the_mean_of_independent_sets_is_narrower_by_their_number():
    rng = np.random.default_rng(3)
    parts = [totals_of(rng, 60, np.ones(60)) for _ in range(4)]
    each = [estimate(RATES["tau"], part, seed) for seed, part in enumerate(parts)]
    widths = [e.interval().high - e.interval().low for e in each]
    mean = average(each).interval()
    assert mean.value == pytest.approx(np.mean([e.value[0] for e in each]))
    assert mean.high - mean.low == pytest.approx(math.sqrt(sum(w**2 for w in widths)) / 4, rel=0.1)
    ratios = [estimate_contrast(RATES["tau"], parts[0], part, ratio=True, seed=seed) for seed, part in enumerate(parts[1:])]
    geometric = math.exp(np.mean([math.log(r.interval().value) for r in ratios]))
    assert average(ratios).interval().value == pytest.approx(geometric)
