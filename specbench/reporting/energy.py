"""Energy of generations on a GPU, and the state of its clocks, where rows hold what the driver reports."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from specbench.records.rows import GpuUse, Row
from specbench.reporting.cells import Entry
from specbench.reporting.tables import ABSENT

COLUMNS = ("drafter", "J a token", "of plain decoding's", "SM clock, MHz", "clock lowered in answers by", "other processes")


def lines(group: Sequence[Entry]) -> list[list[str]]:
    """A line for each drafter whose rows hold the state of a GPU, in the order of `COLUMNS`.

    The energy of a generation, its prompt included, over the tokens that it emitted, pooled over rows; the ratio is that of
    the same questions by plain decoding. Clocks are those at the end of each answer: their median and range.
    """
    return [[e.title, *_cells(e)] for e in group if _states(e.rows)]


def per_token(rows: Iterable[Row]) -> float | None:
    """Joules a token; None if no row holds any."""
    counted = [(row.gpu.energy_j, len(row.tokens)) for row in rows if row.gpu and row.gpu.energy_j is not None]
    tokens = sum(count for _, count in counted)
    return sum(joules for joules, _ in counted if joules is not None) / tokens if tokens else None


def _cells(e: Entry) -> list[str]:
    states = _states(e.rows)
    own, plain = per_token(e.rows), per_token(e.baseline)
    ratio = ABSENT if own is None or not plain else f"{own / plain:.2f}"
    lowered = Counter(reason for state in states for reason in state.throttled or ())
    reasons = ", ".join(f"{reason} ({count} of {len(states)})" for reason, count in sorted(lowered.items()))
    known = any(state.throttled is not None for state in states)
    others = max((state.others for state in states if state.others is not None), default=None)
    return [
        ABSENT if own is None else f"{own:.2f}",
        ratio,
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
