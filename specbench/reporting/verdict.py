"""Which drafter of a group is fastest, said only as far as its rows bear it.

A verdict needs at least `QUESTIONS` questions, a machine that did nothing else, and simultaneous intervals: speeds of all
pairs of arms, plain decoding among them, are compared at once (max-t over paired bootstrap samples of questions), so that
the best of many equal arms is not taken for a winner. Arms that no such interval tells from the fastest are named
together. Simulated and lossy arms are never ranked with others. Without a verdict the reason is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.records.metrics import BASELINE
from specbench.records.statistics import Totals, resamples
from specbench.reporting.cells import Entry
from specbench.reporting.tables import shown

QUESTIONS = 20  # for any verdict
CONFIDENCE = 0.95
BUSY = "the machine did other work meanwhile, so there is no verdict"
NAMED = 4  # drafters in one sentence, at most


@dataclass(frozen=True)
class Verdict:
    """What a group says about speed.

    Attributes:
        best: entries that nothing tells from the fastest, fastest first; the baseline among them if no drafter is surely
            faster than plain decoding. Empty without a verdict. reason: why there is none.
    """

    best: tuple[Entry, ...] = ()
    reason: str = ""


def ranked(group: Sequence[Entry]) -> list[Entry]:
    """Drafters whose speeds may be held against each other, fastest first, without the baseline."""
    fit = [e for e in group if e.name != BASELINE and e.summary.speed_up is not None and not unranked(e)]
    return sorted(fit, key=lambda e: -e.summary.speed_up.value)  # type: ignore[union-attr]


def unranked(e: Entry) -> bool:
    """Is this no drafter that emits what the target would, by this engine's clock?"""
    return e.lossy or e.served or e.replayed or bool(e.header.get("simulated"))


def verdict(group: Sequence[Entry]) -> Verdict:
    """Who is fastest of a group, see `cells.groups`."""
    drafters = ranked(group)
    if not drafters:
        return Verdict(reason="no speed-up was measured here")
    if reason := too_little(drafters) or (BUSY if any(e.busy for e in group) else ""):
        return Verdict(reason=reason)
    base = next(e for e in group if e.name == BASELINE)
    beaten = _beaten(drafters)
    order = [*drafters, base]
    best = tuple(e for e, lost in zip(order, beaten, strict=True) if not lost)
    return Verdict(tuple(sorted(best, key=lambda e: -_value(e))))


def too_little(entries: Sequence[Entry]) -> str:
    """Why nothing may be concluded from the rows of these; empty if something may."""
    questions = min(len(e.totals.questions) for e in entries)
    if questions < QUESTIONS:
        return f"{questions} question{'s' * (questions > 1)}: too few for a verdict, which takes {QUESTIONS}"
    if any(e.busy and not e.replayed for e in entries):
        return BUSY
    return ""


def _value(e: Entry) -> float:
    return 1.0 if e.name == BASELINE or e.summary.speed_up is None else e.summary.speed_up.value


def _beaten(drafters: Sequence[Entry]) -> list[bool]:
    """Is each of these, and plain decoding behind them, surely slower than another one?

    Studentised: every bootstrap sample's leads are measured in standard errors of its own, so that few questions with
    skewed seconds do not make a bound too narrow. The bound is the quantile of the largest of all pairs.
    """
    shared = sorted(set.intersection(*(set(e.totals.questions) for e in drafters)))
    parts = [e.totals.among(shared) for e in drafters]
    weights = np.concatenate([np.ones((1, len(shared))), resamples(len(shared))])  # [1 + S, Q], the rows themselves first
    speeds = [_log_speed_up(part, weights) for part in parts]
    value = np.stack([*(v for v, _ in speeds), np.zeros(len(weights))], 1)  # [1 + S, A]
    own = np.stack([*(u for _, u in speeds), np.zeros(weights.shape)], 1)  # [1 + S, A, Q]
    whole = np.isfinite(value).all(1)
    value, own, weights = value[whole], own[whole], weights[whole]
    largest, leads, errors = np.zeros(len(value) - 1), [], []
    for i in range(value.shape[1]):  # of this arm over every one; all pairs at once would fill the memory
        over, error = value[:, i, None] - value, _difference_error(own, weights, i)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.nan_to_num(np.abs(over[1:] - over[0]) / error[1:], posinf=0)
        largest = np.maximum(largest, each.max(1))
        leads.append(over[0])
        errors.append(error[0])
    lead, bound = np.stack(leads), np.quantile(largest, CONFIDENCE) * np.stack(errors)
    lost = np.logical_and(lead > bound, lead > 0)
    return [bool(column.any()) for column in lost.T]


def _difference_error(own: np.ndarray, weights: np.ndarray, i: int) -> np.ndarray:
    """[1 + S, A]: standard errors of an arm's leads over all. own: [1 + S, A, Q]; weights: [1 + S, Q]."""
    found: np.ndarray = np.sqrt(np.einsum("saq,sq->sa", (own[:, i, None] - own) ** 2, weights))
    return found


def _log_speed_up(part: Totals, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[S] of samples with so many of each question, and [S, Q]: how much each question moves it (delta method)."""
    value, moved = np.zeros(len(weights)), np.zeros(weights.shape)
    for name, sign in (("tokens", 1), ("seconds", -1), ("base_tokens", -1), ("base_seconds", 1)):
        total = weights @ part.sums[name]
        with np.errstate(divide="ignore", invalid="ignore"):
            value += sign * np.log(total)
            moved += sign * part.sums[name] / total[:, None]
    return value, moved


def sentence(group: Sequence[Entry]) -> str:
    """The verdict in one sentence."""
    found, drafters = verdict(group), ranked(group)
    if not drafters:
        return f"{found.reason[0].upper()}{found.reason[1:]}."
    first = drafters[0]
    top = f"{first.title} ran at {shown(first.summary.speed_up)} times the speed of plain decoding"
    if found.reason:
        most = f"{top}, the most here" if _value(first) > 1 else f"No drafter ran faster than plain decoding: {top}"
        return f"{most}. {found.reason[0].upper()}{found.reason[1:]}."
    best = [e for e in found.best if e.name != BASELINE]
    if not best:
        return f"No drafter pays here: plain decoding is faster than every one of them; {top}."
    if len(best) < len(found.best):
        return f"No drafter is surely faster than plain decoding here: {top}."
    if len(best) == 1:
        return f"{first.title} is fastest: {shown(first.summary.speed_up)} times as fast as plain decoding."
    listed = [f"{e.title} ({_value(e):.2f})" for e in best[:NAMED]]
    more = f" and {len(best) - NAMED} more" if len(best) > NAMED else ""
    return f"Fastest, and not told apart by these questions: {', '.join(listed)}{more} times as fast as plain decoding."
