"""Sums by question, over all questions and over bootstrap samples of them; rates are functions of such sums."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

SAMPLES = 2000  # bootstrap samples

Sums = Mapping[str, np.ndarray]
Rate = Callable[[Sums], np.ndarray]
Counts = Mapping[str, float | np.ndarray]


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
    def _weighted(self) -> "dict[int, _Weighted]":
        return {}

    def weighted(self, seed: int = 0) -> "_Weighted":
        """Sums over all questions, and over each bootstrap sample: [1 + S] or [1 + S, N]."""
        return self._weighted.setdefault(seed, _Weighted(self, weights(len(self.questions), seed)))


class _Weighted(dict[str, np.ndarray]):
    """Weighted sums over questions by name, each computed when it is first read."""

    def __init__(self, totals: Totals, weights: np.ndarray):
        self.totals, self.weights = totals, weights

    def __missing__(self, name: str) -> np.ndarray:
        sums = self.totals.sums[name]
        samples = self.weights @ sums.reshape(len(sums), -1)
        self[name] = samples.reshape(len(samples), *sums.shape[1:])
        return self[name]


@lru_cache(maxsize=16)
def draws(questions: int, seed: int = 0) -> np.ndarray:
    """[S, Q] indices: bootstrap samples of questions, the same for every call with this number of questions."""
    return np.random.default_rng(seed).integers(questions, size=(SAMPLES, questions))


@lru_cache(maxsize=16)
def weights(questions: int, seed: int = 0) -> np.ndarray:
    """[1 + S, Q]: how often each question counts, in all questions (once) and in each sample."""
    samples = [np.bincount(sample, minlength=questions) for sample in draws(questions, seed)]
    return np.stack([np.ones(questions, int), *samples]).astype(float)
