"""The time that a command may measure for, and estimates of how long a question takes, so that whole questions fit."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Time to measure in, from the making of this object on.

    Attributes:
        seconds: None for as long as it takes.
    """

    seconds: float | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float | None:
        """Seconds; None without a limit."""
        return None if self.seconds is None else self.started + self.seconds - time.monotonic()

    def allows(self, seconds: float | None) -> bool:
        """Does work of so many seconds fit? None: unknown, which fits while any time is left."""
        left = self.left
        return left is None or (left > 0 and (seconds is None or seconds <= left))

    @classmethod
    def of_minutes(cls, minutes: float | None) -> "Budget":
        return cls(None if minutes is None else 60 * minutes)


class Pace:
    """Mean seconds of the generations that this process decoded; unknown before the first, so that one always begins.

    Times of earlier runs are not used: they could keep a slow question from ever beginning.
    """

    def __init__(self) -> None:
        self.generations, self.seconds = 0, 0.0

    def add(self, generations: int, seconds: float) -> None:
        self.generations, self.seconds = self.generations + generations, self.seconds + seconds

    def of(self, generations: int) -> float | None:
        """Seconds that so many are likely to take; None: unknown."""
        return self.seconds / self.generations * generations if self.generations else None


def longest(missing: Iterable[Sequence[tuple[str, int]]], pace: Mapping[str, float], tokens: int, budget: Budget) -> float:
    """An upper bound of decoding's seconds: every answer at full length, within the budget.

    Args:
        missing: labels and turns, question by question. Where any of a turn is missing the baseline decodes it as well.
        pace: seconds a token, by label, the baseline's first. tokens: of an answer at most.
    """
    first = next(iter(pace))
    decoded = ({*found, *((first, turn) for _, turn in found)} for found in missing)
    seconds = sum(tokens * pace.get(label, 0.0) for found in decoded for label, _ in found)
    return seconds if budget.left is None else min(seconds, max(budget.left, 0.0))
