"""Which drafter of a group is fastest, with simultaneous intervals.

A verdict needs at least `QUESTIONS` questions and an otherwise idle machine. The speeds of all pairs of arms, plain
decoding included, are compared at once (max-t over paired bootstrap samples of questions), so that the best of many equal
arms is not declared the winner. Arms that do not differ from the fastest are named together. Simulated and lossy arms are
not ranked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.records.metrics import BASELINE, RATES
from specbench.records.simultaneous import all_pairs
from specbench.reporting.cells import Entry
from specbench.reporting.tables import shown

QUESTIONS = 20  # needed for a verdict
BUSY = "the machine did other work meanwhile, so there is no verdict"
NOT_RANKED = "lossy and simulated arms and other engines are not ranked, and there is no other"
MAX_NAMED = 4  # drafters in one sentence
MAX_COMPARED = 100  # drafters at once; the time of all pairs grows with their square


@dataclass(frozen=True)
class Fastest:
    """The fastest of a group.

    Attributes:
        best: entries that do not differ from the fastest, in order of speed; the baseline may be one of them.
        reason: why there is no verdict; best is empty then.
    """

    best: tuple[Entry, ...] = ()
    reason: str = ""


def ranked(group: Sequence[Entry]) -> list[Entry]:
    """Drafters whose speeds are comparable, fastest first, without the baseline."""
    fit = [e for e in group if e.name != BASELINE and e.summary.speed_up is not None and not unranked(e)]
    return sorted(fit, key=speed_up, reverse=True)


def unranked(e: Entry) -> bool:
    """Are an entry's speeds not comparable: lossy, simulated, replayed or from another engine?"""
    return e.lossy or e.served or e.replayed or bool(e.header.get("simulated"))


def speed_up(e: Entry) -> float:
    """Over plain decoding: 1 for the baseline, -1 if unknown."""
    return 1.0 if e.name == BASELINE else e.summary.speed_up.value if e.summary.speed_up else -1.0


def fastest(group: Sequence[Entry]) -> Fastest:
    """The fastest of a group of `groups.groups`."""
    drafters = ranked(group)
    if not drafters:
        kept_out = [e for e in group if e.name != BASELINE and e.summary.speed_up is not None]
        return Fastest(reason=NOT_RANKED if kept_out else "no speed-up was measured here")
    many = f"{len(drafters)} drafters: too many for a verdict, which compares {MAX_COMPARED} at most"
    busy = BUSY if any(e.busy for e in group) else ""
    if reason := too_little(drafters) or busy or (many if len(drafters) > MAX_COMPARED else ""):
        return Fastest(reason=reason)
    arms = [*drafters, next(e for e in group if e.name == BASELINE)]
    best = [e for e, beaten in zip(arms, _beaten(drafters), strict=True) if not beaten]
    return Fastest(tuple(sorted(best, key=speed_up, reverse=True)))


def too_little(entries: Sequence[Entry]) -> str:
    """Why no conclusion can be drawn from the rows of these entries; empty if one can."""
    questions = min(len(e.totals.questions) for e in entries)
    if questions < QUESTIONS:
        return f"{questions} question{'s' * (questions > 1)}: too few for a verdict, which takes {QUESTIONS}"
    return BUSY if any(e.busy and not e.replayed for e in entries) else ""


def _beaten(drafters: Sequence[Entry]) -> list[bool]:
    """Is each drafter, and finally plain decoding, significantly slower than another one?"""
    pairs = all_pairs(RATES["speed_up"], [e.totals for e in drafters], log=True, zero=True)
    beaten = np.logical_and(pairs.lead > pairs.bound, pairs.lead > 0)
    return [bool(column.any()) for column in beaten.T]


def sentence(group: Sequence[Entry]) -> str:
    """The verdict in one sentence."""
    result, drafters = fastest(group), ranked(group)
    reason = f"{result.reason[:1].upper()}{result.reason[1:]}."
    if not drafters:
        return reason
    first = drafters[0]
    top = f"{first.title} ran at {shown(first.summary.speed_up)} times the speed of plain decoding"
    if result.reason:
        top = f"{top}, the most here" if speed_up(first) > 1 else f"No drafter ran faster than plain decoding: {top}"
        return f"{top}. {reason}"
    best = [e for e in result.best if e.name != BASELINE]
    if not best:
        return f"No drafter pays here: plain decoding is faster than every one of them; {top}."
    if len(best) < len(result.best):
        return f"No drafter is surely faster than plain decoding here: {top}."
    if len(best) == 1:
        return f"{first.title} is fastest: {shown(first.summary.speed_up)} times as fast as plain decoding."
    listed = ", ".join(f"{e.title} ({speed_up(e):.2f})" for e in best[:MAX_NAMED])
    more = f" and {len(best) - MAX_NAMED} more" if len(best) > MAX_NAMED else ""
    unit = "in multiples of plain decoding's speed"
    return f"Fastest, with no significant difference on these questions: {listed}{more}, {unit}."
