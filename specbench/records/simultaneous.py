"""All pairs of several arms compared at once, so that the best of many equal arms is not declared the winner."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specbench.records.statistics import linearise
from specbench.records.totals import Rate, Totals, weights

CONFIDENCE = 0.95


class Pairs(NamedTuple):
    """Leads of arms over arms.

    Attributes:
        lead: [A, A] of the row's arm over the column's. error: [A, A] its standard error.
        quantile: of the largest studentised lead of all pairs; times the error it bounds what chance makes of equal arms.
    """

    lead: np.ndarray
    error: np.ndarray
    quantile: float

    @property
    def bound(self) -> np.ndarray:
        return self.quantile * self.error


def all_pairs(rate: Rate, arms: Sequence[Totals], log: bool = False, zero: bool = False) -> Pairs:
    """Compare a rate of all arms on the questions that they share (max-t over paired bootstrap samples).

    Studentised: each sample's leads are divided by their own standard errors, so that few questions with skewed seconds do
    not make a bound too narrow.

    log: of its logarithm. zero: beside an arm whose (log) rate is 0, as plain decoding's speed-up is.
    """
    shared = sorted(set.intersection(*(set(totals.questions) for totals in arms)))
    weight = weights(len(shared))
    found = [_linearised(rate, totals.among(shared), log) for totals in arms]
    found += [(np.zeros(len(weight)), np.zeros(weight.shape))] if zero else []
    value, influence = (np.stack(parts, 1) for parts in zip(*found, strict=True))  # [1 + S, A], [1 + S, A, Q]
    finite = np.isfinite(value).all(1)
    value, influence, weight = value[finite], influence[finite], weight[finite]
    largest, leads, errors = np.zeros(len(value) - 1), [], []
    for i in range(value.shape[1]):  # one arm over all others at a time, to save memory
        lead = value[:, i, None] - value  # [1 + S, A]
        error = np.sqrt(np.einsum("saq,sq->sa", (influence[:, i, None] - influence) ** 2, weight))
        with np.errstate(divide="ignore", invalid="ignore"):
            deviation = np.nan_to_num(np.abs(lead[1:] - lead[0]) / error[1:], posinf=0)
        largest = np.maximum(largest, deviation.max(1))
        leads.append(lead[0])
        errors.append(error[0])
    return Pairs(np.stack(leads), np.stack(errors), float(np.quantile(largest, CONFIDENCE)))


def _linearised(rate: Rate, part: Totals, log: bool) -> tuple[np.ndarray, np.ndarray]:
    """[1 + S]: a rate, or its logarithm, of all questions and each sample; [1 + S, Q]: each question's influence on it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value, influence = linearise(rate, part)
        return (np.log(value), influence / value[:, None]) if log else (value, influence)
