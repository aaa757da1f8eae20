"""The numbers of `specbench.reporting.analysis` as tables, one line a drafter of a group.

A value that rests on too few tries is replaced by a mark; one that does not exist is absent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specbench.records.metrics import BASELINE, RATES
from specbench.records.rows import BINS
from specbench.records.statistics import Interval, interval
from specbench.reporting import analysis
from specbench.reporting.analysis import FEW, STRETCH, Rated
from specbench.reporting.cells import Entry
from specbench.reporting.names import tree_name
from specbench.reporting.tables import ABSENT, number, shown

MAX_POSITIONS = 8  # columns of a table, or ticks of a figure
POSITIONS = (
    "Cycles by the position in the answer where they begin. Those that begin within the drafter's deepest draft of an "
    "answer's end, which may have cut them, are left out: drafters of long copies, as suffix and hybrid, end early."
)

DRIFT = ("perplexity of its answers [95%]", "KL, nats a token [95%]")

Table = tuple[tuple[str, ...], list[list[str]]]  # columns and lines


def cell(rate: Rated) -> str:
    """A rate with its interval, or the mark for too few tries."""
    return FEW if rate.interval and not rate.shown else shown(rate.interval)


def drafters(group: Sequence[Entry]) -> list[Entry]:
    """A group without the baseline, highest tau first."""
    return sorted((e for e in group if e.name != BASELINE and e.summary.tau_interval), key=lambda e: -e.summary.tau)


def categories(group: Sequence[Entry]) -> Table:
    """tau by category of question."""
    rates = {e.title: analysis.by_category(e) for e in drafters(group)}
    names = list(dict.fromkeys(name for by_category in rates.values() for name in by_category))
    lines = [[title, *(cell(own[name]) if name in own else ABSENT for name in names)] for title, own in rates.items()]
    return ("drafter", *names), lines


def stretch(group: Sequence[Entry]) -> int:
    """Tokens in one position, such that there are at most `MAX_POSITIONS`."""
    longest = max((len(r.tokens) for e in group for r in e.rows), default=0)
    tokens = STRETCH
    while longest > MAX_POSITIONS * tokens:
        tokens *= 2
    return tokens


def positions(group: Sequence[Entry]) -> Table:
    """tau by the position in the output at which a cycle begins."""
    tokens = stretch(group)
    rates = {e.title: analysis.by_position(e, tokens) for e in drafters(group)}
    count = max(map(len, rates.values()), default=0)
    lines = [[title, *map(cell, own), *[ABSENT] * (count - len(own))] for title, own in rates.items()]
    return ("drafter", *(f"from {i * tokens}" for i in range(count))), lines


def calibration(group: Sequence[Entry]) -> Table:
    """Calibration of drafters' probabilities; by tenth of probability, the share accepted."""
    tenths = tuple(f"{i / BINS:.1f}-{(i + 1) / BINS:.1f}" for i in range(BINS))
    columns = ("drafter", "candidates", "calibration error [95%]", "probability - acceptance [95%]", *tenths)
    lines = []
    for e in drafters(group):
        if (result := analysis.calibration(e)) is not None:
            points = [_point(rate) for _, rate in result.curve]
            lines.append([e.title, f"{result.candidates:,}", _error(result.error), _error(result.excess), *points])
    return columns, lines


def _error(value: Interval) -> str:
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _point(rate: Rated) -> str:
    if not rate.tries:
        return ABSENT
    return f"{rate.shown.value:.2f}" if rate.shown else FEW


def conventions(group: Sequence[Entry]) -> Table:
    """tau of the same cycles as different papers and programs count it."""
    columns = ("drafter", *analysis.CONVENTIONS)
    return columns, [[e.title, *map(shown, analysis.conventions(e).values())] for e in drafters(group)]


def fitted(group: Sequence[Entry]) -> Table:
    """Fitted trees of one shape: tau and speed-up expected by held-out answers and measured costs, beside what came out."""
    columns = (
        "drafter", "tree", "tau expected", "tau [95%]",
        "speed-up expected", "speed-up [95%]", "measured / expected", "runner-up",
    )  # fmt: skip
    lines = []
    for e in drafters(group):
        fit, up = e.arm.get("fitted"), e.summary.speed_up
        other = "trained" in e.arm["drafter"] or tree_name(e) == "rate"  # drafts copies too; has a tree for every cycle
        if fit is None or up is None or e.replayed or other:
            continue
        choice, second = fit["choice"], fit.get("runner_up")
        taus = number("{:.2f}", choice["tau"]), shown(e.summary.tau_interval)
        speed_ups = number("{:.2f}", choice["speedup"]), shown(up)
        ratio = number("{:.2f}", up.value / choice["speedup"]) if choice["speedup"] else ABSENT
        runner_up = f"{_shape(second)}: {second['speedup']:.2f}" if second else ABSENT
        lines.append([e.title, _shape(choice), *taus, *speed_ups, ratio, runner_up])
    return columns, lines


def _shape(tree: Mapping[str, Any]) -> str:
    return f"depth {tree['depth']}, top {tree['top_k']}, {tree['nodes']} nodes"


def solved(group: Sequence[Entry]) -> Table:
    """Answers that pass their questions' checks, and the share of tokens that a drafter generated without the target."""
    lines = []
    for e in group:
        if scored := [row for row in e.rows if row.solved is not None]:
            alone = sum(len(row.alone) for row in scored)
            own = f"{alone / (alone + sum(len(row.tokens) for row in scored)):.0%}"
            count = f"{sum(bool(row.solved) for row in scored)} of {len(scored)}"
            lines.append([e.title, count, _percent(interval(RATES["solved"], e.totals)), own])
    return ("drafter", "solved", "share [95%]", "of their tokens drafted alone, after the link broke"), lines


def summaries(group: Sequence[Entry]) -> Table:
    """How near answers come to the summaries that people wrote."""
    lines = []
    for e in group:
        if count := sum(row.rouge_l is not None for row in e.rows):
            lines.append([e.title, str(count), shown(interval(RATES["rouge_l"], e.totals))])
    return ("drafter", "summaries", "ROUGE-L [95%]"), lines


def drift(group: Sequence[Entry]) -> Table:
    """How far sampled answers are from the target's distribution, beside what that brings; none if it was not measured."""
    lines = []
    for e in group:
        found = [interval(RATES[name], e.totals) for name in ("answer_perplexity", "answer_kl")]
        if any(row.drift is not None for row in e.rows):
            speed_up = ABSENT if e.name == BASELINE else shown(e.summary.speed_up)
            rule = "lossy" if e.lossy and e.name != BASELINE else "exact"
            lines.append([e.title, rule, shown(e.summary.tau_interval), speed_up, shown(found[0]), shown(found[1])])
    return ("drafter", "acceptance", "tau [95%]", "speed-up [95%]", *DRIFT), lines


def _percent(share: Interval | None) -> str:
    if share is None:
        return ABSENT
    value, low, high = (100 * x for x in (share.value, share.low, share.high))
    return f"{value:.1f}% [{low:.1f}, {high:.1f}]" if low < high else f"{value:.1f}%"


TABLES: dict[str, tuple[str, Callable[[Sequence[Entry]], Table]]] = {
    "categories": ("tau by category", categories),
    "positions": ("tau by position in the output", positions),
    "calibration": ("Drafters' probabilities against acceptance", calibration),
    "conventions": ("tau of the same runs under each convention", conventions),
    "fitted": ("Fitted trees, expected and measured", fitted),
}
TIMED = ("fitted",)  # made of timed rows; the other tables of the rows with most questions


def all_of(group: Sequence[Entry], timed: Sequence[Entry] | None = None) -> dict[str, tuple[str, Table]]:
    """Every table that is not empty, with its title. timed: the same drafters' timed rows, if group holds replayed ones."""
    timed = group if timed is None else timed
    made = {name: (title, table(timed if name in TIMED else group)) for name, (title, table) in TABLES.items()}
    return {name: (title, table) for name, (title, table) in made.items() if table[1]}
