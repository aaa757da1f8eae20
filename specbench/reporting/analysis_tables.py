"""The numbers of `specbench.reporting.analysis` as tables: columns and lines of text, one line a drafter of a group.

A value that rests on too few tries is marked, one that does not exist is absent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specbench.records.metrics import BASELINE, RATES
from specbench.records.rows import BINS
from specbench.records.statistics import Interval, interval
from specbench.reporting import analysis
from specbench.reporting.analysis import FEW, STRETCH, Rated, few
from specbench.reporting.cells import Entry
from specbench.reporting.tables import ABSENT, number, shown

MOST = 8  # columns of a table, or of a figure's axis, for positions

Table = tuple[tuple[str, ...], list[list[str]]]


def cell(rate: Rated) -> str:
    """A rate with its interval; a mark in its place where too few tries lie behind it."""
    return FEW if rate.found and few(rate.tries) else shown(rate.found)


def drafters(group: Sequence[Entry]) -> list[Entry]:
    """Without the baseline, the one that accepts most first."""
    return sorted((e for e in group if e.name != BASELINE and e.summary.tau_interval), key=lambda e: -e.summary.tau)


def categories(group: Sequence[Entry]) -> Table:
    """tau by category of question."""
    found = {e.title: analysis.by_category(e) for e in drafters(group)}
    names = list(dict.fromkeys(name for rates in found.values() for name in rates))
    lines = [[name, *(cell(rates[c]) if c in rates else ABSENT for c in names)] for name, rates in found.items()]
    return ("drafter", *names), lines


def stretch(group: Sequence[Entry]) -> int:
    """Tokens that make one position: as many as leave no more than `MOST` positions."""
    longest = max((len(r.tokens) for e in group for r in e.rows), default=0)
    tokens = STRETCH
    while longest > MOST * tokens:
        tokens *= 2
    return tokens


def positions(group: Sequence[Entry]) -> Table:
    """tau by where in the output a cycle begins."""
    tokens = stretch(group)
    found = [(e.title, analysis.by_position(e, tokens)) for e in drafters(group)]
    most = max((len(rates) for _, rates in found), default=0)
    columns = ("drafter", *(f"from {at * tokens}" for at in range(most)))
    return columns, [[name, *map(cell, rates), *[ABSENT] * (most - len(rates))] for name, rates in found]


def percent(found: Interval | None) -> str:
    """A share with its interval, in hundredths."""
    if found is None:
        return ABSENT
    value, low, high = (100 * x for x in (found.value, found.low, found.high))
    return f"{value:.1f}% [{low:.1f}, {high:.1f}]" if low < high else f"{value:.1f}%"


def calibration(group: Sequence[Entry]) -> Table:
    """How far a drafter's probabilities can be believed; by tenth of probability, the share that was accepted."""
    tenths = tuple(f"{i / BINS:.1f}-{(i + 1) / BINS:.1f}" for i in range(BINS))
    columns = ("drafter", "candidates", "calibration error [95%]", "probability - acceptance [95%]", *tenths)
    lines = []
    for e in drafters(group):
        if (found := analysis.calibration(e)) is not None:
            points = [_point(rate) for _, rate in found.curve]
            lines.append([e.title, f"{found.candidates:,}", _small(found.error), _small(found.excess), *points])
    return columns, lines


def _small(found: Interval) -> str:
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _point(rate: Rated) -> str:
    if not rate.tries:
        return ABSENT
    return f"{rate.found.value:.2f}" if rate.found and not few(rate.tries) else FEW


def conventions(group: Sequence[Entry]) -> Table:
    """tau of the same cycles as different papers and programs count it."""
    columns = ("drafter", *analysis.CONVENTIONS)
    return columns, [[e.title, *map(shown, analysis.conventions(e).values())] for e in drafters(group)]


def fitted(group: Sequence[Entry]) -> Table:
    """What fitted trees promised, from held-out answers and timed cycles, beside what they kept."""
    columns = (
        "drafter", "tree", "tau expected", "tau [95%]",
        "speed-up expected", "speed-up [95%]", "measured / expected", "runner-up",
    )  # fmt: skip
    lines = []
    for e in drafters(group):
        fit, up = e.arm.get("fitted"), e.summary.speed_up
        if fit is None or up is None or e.replayed or "trained" in e.arm["drafter"]:  # a hybrid copies, too
            continue
        choice = fit["choice"]
        second = fit.get("runner_up")
        cells = (number("{:.2f}", choice["tau"]), shown(e.summary.tau_interval), number("{:.2f}", choice["speedup"]))
        kept = number("{:.2f}", up.value / choice["speedup"]) if choice["speedup"] else ABSENT
        other = f"{_shape(second)}: {second['speedup']:.2f}" if second else ABSENT
        lines.append([e.title, _shape(choice), *cells, shown(up), kept, other])
    return columns, lines


def solved(group: Sequence[Entry]) -> Table:
    """How many answers pass their questions' checks, the baseline's among them, and how much a drafter said alone."""
    lines = []
    for e in group:
        scored = [row for row in e.rows if row.solved is not None]
        if scored:
            alone = sum(len(row.alone) for row in scored)
            own = f"{alone / (alone + sum(len(row.tokens) for row in scored)):.0%}"
            count = f"{sum(bool(row.solved) for row in scored)} of {len(scored)}"
            lines.append([e.title, count, percent(interval(RATES["solved"], e.totals)), own])
    return ("drafter", "solved", "share [95%]", "of their tokens said alone, without the target"), lines


def _shape(said: Mapping[str, Any]) -> str:
    return f"depth {said['depth']}, top {said['top_k']}, {said['nodes']} nodes"


TABLES: dict[str, tuple[str, Callable[[Sequence[Entry]], Table]]] = {
    "categories": ("tau by category", categories),
    "positions": ("tau by position in the output", positions),
    "calibration": ("Drafters' probabilities against acceptance", calibration),
    "conventions": ("tau of the same runs under each convention", conventions),
    "fitted": ("Fitted trees, expected and measured", fitted),
}
TIMED = ("fitted",)  # of rows with a clock; the others of those with most questions


def all_of(group: Sequence[Entry], timed: Sequence[Entry] | None = None) -> dict[str, tuple[str, Table]]:
    """Every table that has a line: name -> its title, and columns and lines.

    timed: the same drafters with a clock, where the group's rows are others.
    """
    timed = group if timed is None else timed
    made = {name: (title, table(timed if name in TIMED else group)) for name, (title, table) in TABLES.items()}
    return {name: (title, table) for name, (title, table) in made.items() if table[1]}
