"""A command's time limit, and estimates of how long a question takes, so that only whole questions are begun."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

UNFINISHED = "the same command goes on there"  # ends the last line of a command that stopped in time with something left


@dataclass
class Budget:
    """A time limit that begins when this object is made. seconds: None for no limit."""

    seconds: float | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float | None:
        """Seconds; None without a limit."""
        return None if self.seconds is None else self.started + self.seconds - time.monotonic()

    @property
    def over(self) -> bool:
        """Is no time left?"""
        return self.left is not None and self.left <= 0

    def allows(self, seconds: float | None) -> bool:
        """Does work of so many seconds fit? Work of unknown length (None) fits while any time is left."""
        left = self.left
        return left is None or (not self.over and (seconds is None or seconds <= left))

    def cap(self, seconds: float) -> float:
        """Seconds, or the time that is left if that is shorter."""
        return seconds if self.left is None else min(seconds, max(self.left, 0.0))

    def part(self, share: float) -> "Budget":
        """A limit of its own, of this share of what is left."""
        return Budget(None if self.left is None else share * max(self.left, 0.0))

    @classmethod
    def of_minutes(cls, minutes: float | None) -> "Budget":
        return cls(None if minutes is None else 60 * minutes)


class Pace:
    """Mean seconds of the generations that this process decoded; unknown before the first, so that one always begins."""

    def __init__(self) -> None:
        self.generations, self.seconds = 0, 0.0

    def add(self, generations: int, seconds: float) -> None:
        self.generations, self.seconds = self.generations + generations, self.seconds + seconds

    def of(self, generations: int) -> float | None:
        """Seconds that so many generations are likely to take; None: unknown."""
        return self.seconds / self.generations * generations if self.generations else None


def longest(missing: Iterable[Sequence[tuple[str, int]]], pace: Mapping[str, float], tokens: int, budget: Budget) -> float:
    """An upper bound of decoding's seconds: every answer at full length, within the budget.

    Args:
        missing: labels and turns, by question. The baseline decodes every turn of which anything is missing.
        pace: seconds a token, by label, the baseline's first. tokens: the most of an answer.
    """
    baseline = next(iter(pace))
    decoded = ({*lacking, *((baseline, turn) for _, turn in lacking)} for lacking in missing)
    return budget.cap(sum(tokens * pace.get(label, 0.0) for generations in decoded for label, _ in generations))
