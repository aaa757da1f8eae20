"""Energy of generations on a GPU, and the state of its clocks, where rows hold what the driver reports."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from specbench.records.rows import GpuUse, Row
from specbench.records.statistics import contrast, pooled
from specbench.records.totals import Sums, Totals
from specbench.reporting.cells import Entry
from specbench.reporting.tables import ABSENT, shown

COLUMNS = (
    "drafter",
    "J a token",
    "ratio to plain [95%]",
    "SM clock, MHz",
    "clock lowered in answers by",
    "other processes",
)


def lines(group: Sequence[Entry]) -> list[list[str]]:
    """A line for each drafter whose rows hold the state of a GPU, in the order of `COLUMNS`.

    The energy of a generation, its prompt included, over the tokens that it emitted, pooled over rows; the ratio is that of
    the same questions by plain decoding, with its 95% interval over questions. Clocks are those at the end of each answer:
    their median and range.
    """
    return [[e.title, *_cells(e)] for e in group if _states(e.rows)]


def totals(rows: Iterable[Row]) -> Totals:
    """Joules and tokens of each question whose rows hold an energy."""
    used = [(row, row.gpu.energy_j) for row in rows if row.gpu]
    return Totals.add_up((row.asked, {"joules": j, "tokens": len(row.tokens)}) for row, j in used if j is not None)


def per_token(sums: Sums) -> np.ndarray:
    """Joules a token."""
    return np.asarray(sums["joules"] / sums["tokens"])


def _cells(e: Entry) -> list[str]:
    states = _states(e.rows)
    own, plain = totals(e.rows), totals(e.baseline)
    lowered = Counter(reason for state in states for reason in state.throttled or ())
    reasons = ", ".join(f"{reason} ({count} of {len(states)})" for reason, count in sorted(lowered.items()))
    known = any(state.throttled is not None for state in states)
    others = max((state.others for state in states if state.others is not None), default=None)
    return [
        f"{pooled(per_token, own):.2f}" if own.questions else ABSENT,
        shown(contrast(per_token, own, plain, ratio=True)),
        _clock([state.sm_mhz for state in states if state.sm_mhz is not None]),
        reasons or ("nothing" if known else "unknown"),
        "unknown" if others is None else str(others),
    ]


def _states(rows: Iterable[Row]) -> list[GpuUse]:
    return [row.gpu for row in rows if row.gpu is not None]


def _clock(found: Sequence[int]) -> str:
    """`1,980 (1,755 to 1,980)`; without the range if there is none."""
    if not found:
        return ABSENT
    low, high = min(found), max(found)
    return f"{statistics.median(found):,.0f}" + (f" ({low:,} to {high:,})" if low < high else "")
