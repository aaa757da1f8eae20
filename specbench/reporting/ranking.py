"""Drafters of a study in the order of one metric, with the places that simultaneous intervals of all pairs leave open."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbench.records.metrics import BASELINE, RATES
from specbench.records.schema import all_hours, all_tokens
from specbench.records.simultaneous import all_pairs
from specbench.records.statistics import estimate_contrast, interval, pooled, repeated, with_seeds
from specbench.records.totals import Rate
from specbench.reporting import console, tables
from specbench.reporting.cells import Entry
from specbench.reporting.document import Block, Paragraph, Table
from specbench.reporting.evidence import TIMED, Evidence, seeds_of
from specbench.reporting.fastest import too_little

SHIPPED = "As shipped: greedy, with whichever tree of study bench was fastest."
NORMAL = 1.96  # quantile of a single 95% interval
RULE = "Place: those that 95% simultaneous intervals of all pairs leave open, seeds of training included."
MEASURED = (  # heading, quantity, value, units of it in one shown
    ("a training step, s", "training", "seconds", 1.0),
    ("peak memory of training, MiB", "training", "peak", 2.0**20),
    ("peak memory of decoding, MiB", "memory", "peak", 2.0**20),
    ("drafting a cycle, ms", "drafting", "ms", 1.0),
)


def places(entries: Sequence[Entry], rate: Rate) -> list[tuple[int, int]]:
    """For each entry the best and the worst place that it may have."""
    pairs = all_pairs(rate, [e.totals for e in entries])
    bound = np.hypot(pairs.bound, pairs.quantile / NORMAL * _seed_reaches(entries, rate))
    better = pairs.lead > np.maximum(bound, 0)
    return [(1 + int(better[:, i].sum()), len(entries) - int(better[i].sum())) for i in range(len(entries))]


def _seed_reaches(entries: Sequence[Entry], rate: Rate) -> np.ndarray:
    """[A, A]: what seeds add to half of each pair's 95% interval."""
    reaches = np.zeros((len(entries), len(entries)))
    for i, a in enumerate(entries):
        for j, b in enumerate(entries[:i]):
            if a.seeds > 1 or b.seeds > 1:
                found = estimate_contrast(rate, a.totals, b.totals)
                reaches[i, j] = with_seeds(found, [(rate, seeds_of(a)), (rate, seeds_of(b))]).seed_reach if found else 0.0
    return reaches + reaches.T


def blocks(known: Evidence, shipped: Evidence | None = None) -> list[Block]:
    """The ranking of a study by the metric that it names, if that was measured.

    shipped: a study whose timed rows say how fast each drafter is with the tree that suits it best.
    """
    metric = known.study.get("ranks", "")
    arms = [known.find(name, None, metric in TIMED) for name in known.study["arms"]] if metric else []
    rate = RATES.get(metric, RATES["tau"])
    found = sorted((e for e in arms if e is not None), key=lambda e: pooled(rate, e.totals), reverse=True)
    if len(found) < 2:
        return []
    reason = too_little(found)
    shown = [tables.ABSENT] * len(found) if reason else [_place(*place) for place in places(found, rate)]
    heads = ("place", "drafter", f"{metric} [95%]", "0-alpha", "multiplied a draft pass", "tokens seen", "seeds")
    more = {what[0]: [_median(_values(known, e.name, *what[1:3]), what[3]) for e in found] for what in MEASURED}
    columns = _beside(known, shipped, found, metric, rate) | more
    kept = {head: cells for head, cells in columns.items() if set(cells) != {tables.ABSENT}}
    lines = [
        [place, e.title, tables.shown(interval(rate, e.totals)), *_about(e), *(cells[number] for cells in kept.values())]
        for number, (e, place) in enumerate(zip(found, shown, strict=True))
    ]
    caption = f"{known.study['title']}: {console.caption(found)}"
    note = f"No places: {reason}." if reason else RULE
    note += f" {SHIPPED}" * ("speed-up as shipped [95%]" in kept)
    return [Table((*heads, *kept), lines, caption), Paragraph(note, "note")]


def _beside(
    known: Evidence, shipped: Evidence | None, found: Sequence[Entry], metric: str, rate: Rate
) -> dict[str, list[str]]:
    """By heading a cell for each entry: what else its rows, its weights and rows of `shipped` say of the drafter."""
    sampled = [known.find(e.name, {"temperature": 1}, metric in TIMED) for e in found]
    own = {name for name, arm in known.study["arms"].items() if "train" in arm or "weights" in arm}
    beside_shipped = own < set(known.study["arms"])  # a reader would take the shipped drafter's speed for the arm's
    fastest = [None if beside_shipped and e.name in own else _fastest(shipped, e) for e in found]

    def cells(entries: Sequence[Entry | None], rate: Rate) -> list[str]:
        return [tables.ABSENT if e is None else tables.shown(interval(rate, e.totals)) for e in entries]

    return {
        f"{metric} at T=1 [95%]": cells(sampled, rate),
        "speed-up as shipped [95%]": cells(fastest, RATES["speed_up"]),
        "its tau [95%]": cells(fastest, RATES["tau"]),
        "hours of training": [_hours(e.weights) for e in found],
    }


def _hours(weights: Mapping[str, Any]) -> str:
    """Hours of training; a lower bound where those of the weights that a training went on from are not known."""
    hours = all_hours(weights)
    if math.isnan(hours) and "hours" in weights:
        return f"more than {weights['hours']:.1f}"
    return tables.number("{:.1f}", hours)


def _fastest(shipped: Evidence | None, e: Entry) -> Entry | None:
    """Of the arms of `shipped` the fastest with the same drafter."""
    names = [] if shipped is None else [name for name in shipped.study["arms"] if name != BASELINE]
    timed = [shipped.find(name, None, timed=True) for name in names if shipped is not None]
    same = [t for t in timed if t is not None and t.arm["drafter"].get("name") == e.arm["drafter"].get("name")]
    return max(same, key=lambda t: float(pooled(RATES["speed_up"], t.totals)), default=None)


def _place(best: int, worst: int) -> str:
    return str(best) if best == worst else f"{best} to {worst}"


def _about(e: Entry) -> list[str]:
    """0-alpha, parameters, tokens and seeds."""
    seen = all_tokens(e.weights)
    alpha = tables.number("{:.2f}", *e.summary.alphas[:1])
    return [
        alpha,
        f"{e.parameters:,}",
        f"{seen:,}" if seen else tables.ABSENT,
        str(e.seeds) if seen else tables.ABSENT,
    ]


def _values(known: Evidence, name: str, quantity: str, value: str) -> list[float]:
    """What was measured of an arm beside decoding."""
    e = None if name == BASELINE else known.measured(name, quantity)
    return [] if e is None else [m[value] for m in e.measured[quantity] if value in m]


def _median(values: Sequence[float], unit: float) -> str:
    return f"{repeated(values).value / unit:,.3g}" if values else tables.ABSENT
