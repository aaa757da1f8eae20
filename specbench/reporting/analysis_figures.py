"""Figures of `specbench.reporting.analysis`, from one group of entries; None without data.

Each drafter has a panel of its own, with the others in grey behind it.
"""

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator

from specbench.records.statistics import Interval
from specbench.reporting import analysis, styles
from specbench.reporting.analysis_tables import drafters, stretch
from specbench.reporting.cells import Entry
from specbench.reporting.text import mathtext

PANEL = 2.0, 1.75  # inches
ACROSS = 4  # panels in a row
MAX_NAME = 22  # characters above a panel or beside a point
BEHIND = "#d0d0d0"
Points = list[tuple[float, Interval]]


def acceptance_by_position(group: Sequence[Entry]) -> Figure | None:
    """tau by the position in the output at which a cycle begins."""
    entries, tokens = drafters(group), stretch(group)
    rates = [analysis.by_position(e, tokens) for e in entries]
    points = [[((i + 0.5) * tokens, rate.shown) for i, rate in enumerate(own) if rate.shown] for own in rates]
    if not any(len(own) > 1 for own in points):
        return None
    figure, panels = _panels(entries, points)
    positions = max(map(len, rates))
    for panel in panels:
        panel.set_xlim(0, tokens * positions)
        panel.xaxis.set_major_locator(MultipleLocator(tokens * -(-positions // 4)))
    figure.supylabel("tau", fontsize="medium")
    figure.supxlabel(f"position in the output, {tokens} tokens together", fontsize="medium")
    return figure


def reliability(group: Sequence[Entry]) -> Figure | None:
    """The share of candidates that the target accepted, by the drafter's probability."""
    results = [(e, c) for e in drafters(group) if (c := analysis.calibration(e)) and any(rate.shown for _, rate in c.curve)]
    if not results:
        return None
    points = [[(mean, rate.shown) for mean, rate in c.curve if rate.shown] for _, c in results]
    figure, panels = _panels([e for e, _ in results], points, square=True)
    for panel, (_, c) in zip(panels, results, strict=True):
        panel.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), aspect="equal")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(FixedLocator([0, 0.5, 1]))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.text(0.95, 0.06, f"ECE {c.error.value:.3f}", fontsize="x-small", ha="right", transform=panel.transAxes)
    figure.supylabel("share that the target accepted", fontsize="medium")
    figure.supxlabel("probability that the drafter gave", fontsize="medium")
    return figure


def _panels(entries: Sequence[Entry], points: Sequence[Points], square: bool = False) -> tuple[Figure, list[Axes]]:
    """A panel an entry, all with the same axes, at most `ACROSS` in a row. square: with the diagonal."""
    down = -(-len(entries) // ACROSS)
    across = -(-len(entries) // down)
    size = PANEL[0] * max(across, 2), (PANEL[0] if square else PANEL[1]) * down + 0.5
    layout = "compressed" if square else "constrained"
    figure, grid = plt.subplots(down, across, figsize=size, layout=layout, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for panel, e in zip(panels, entries, strict=False):
        panel.set_title(short(e.title), fontsize="small")
        panel.tick_params(labelsize="small")
        panel.set_axisbelow(True)
    for empty in panels[len(entries) :]:
        empty.remove()
    for above in panels[len(entries) - across : (down - 1) * across]:  # nothing is below them
        above.tick_params(labelbottom=True)
    for panel, e in zip(panels, entries, strict=False):
        if square:
            panel.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--", zorder=1)
        _curves(panel, e, entries, points)
    return figure, panels[: len(entries)]


def _curves(panel: Axes, e: Entry, entries: Sequence[Entry], points: Sequence[Points]) -> None:
    """An entry's line with the band of its intervals, and the lines of the others."""
    for other, own in zip(entries, points, strict=True):
        xs, rates = [x for x, _ in own], [rate for _, rate in own]
        values = [rate.value for rate in rates]
        if other is not e:
            panel.plot(xs, values, color=BEHIND, linewidth=0.8, zorder=1)
            continue
        style = styles.line(e.title)
        band = [rate.low for rate in rates], [rate.high for rate in rates]
        panel.fill_between(xs, *band, color=style["color"], alpha=0.25, linewidth=0, zorder=2)
        panel.plot(xs, values, markersize=4, linewidth=1.3, zorder=3, **style)
    panel.grid(alpha=0.3)


def short(name: str) -> str:
    """A name without its middle if it is long; arms often differ only at the end."""
    half = MAX_NAME // 2
    return mathtext(name if len(name) <= MAX_NAME else f"{name[:half]}…{name[1 - half :]}")


def draw(group: Sequence[Entry]) -> dict[str, tuple[Figure | None, str]]:
    """Name -> figure and title."""
    return {
        "positions": (acceptance_by_position(group), "tau by position in the output"),
        "reliability": (reliability(group), "Drafters' probabilities against acceptance"),
    }
