"""Figures of what rows hold beyond tau. Each is drawn from one group of entries and returned, or None without its data.

Where many drafters would hide each other, each has a panel of its own, the others behind it in grey.
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
LETTERS = 22  # of a name, above a panel or in a legend
BEHIND = "#d0d0d0"


def acceptance_by_position(group: Sequence[Entry]) -> Figure | None:
    """tau by where in the output a cycle begins, a panel a drafter."""
    shown, tokens = drafters(group), stretch(group)
    points = [[((at + 0.5) * tokens, rate.shown) for at, rate in enumerate(analysis.by_position(e, tokens))] for e in shown]
    if not any(len([rate for _, rate in line if rate]) > 1 for line in points):
        return None
    positions = max(map(len, points))
    figure, panels = _panels([e.title for e in shown])
    for panel, e in zip(panels, shown, strict=True):
        _curves(panel, e, shown, points)
        panel.set_xlim(0, tokens * positions)
        panel.xaxis.set_major_locator(MultipleLocator(tokens * -(-positions // 4)))
    figure.supylabel("tau", fontsize="medium")
    figure.supxlabel(f"position in the output, {tokens} tokens together", fontsize="medium")
    return figure


def reliability(group: Sequence[Entry]) -> Figure | None:
    """How often the target took a candidate, by the probability that the drafter gave it, a panel a drafter."""
    found = [(e, c) for e in drafters(group) if (c := analysis.calibration(e)) and any(rate.shown for _, rate in c.curve)]
    if not found:
        return None
    shown = [e for e, _ in found]
    points = [[(mean, rate.shown) for mean, rate in c.curve] for _, c in found]
    figure, panels = _panels([e.title for e in shown], square=True)
    for panel, (e, c) in zip(panels, found, strict=True):
        panel.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--", zorder=1)
        _curves(panel, e, shown, points)
        panel.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), aspect="equal")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(FixedLocator([0, 0.5, 1]))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.text(0.95, 0.06, f"ECE {c.error.value:.3f}", fontsize="x-small", ha="right", transform=panel.transAxes)
    figure.supylabel("share that the target accepted", fontsize="medium")
    figure.supxlabel("probability that the drafter gave", fontsize="medium")
    return figure


def _panels(titles: Sequence[str], square: bool = False) -> tuple[Figure, list[Axes]]:
    """One panel a title, at most `ACROSS` in a row and as many in each as can be, all on the same axes."""
    down = -(-len(titles) // ACROSS)
    across = -(-len(titles) // down)
    size = PANEL[0] * max(across, 2), (PANEL[0] if square else PANEL[1]) * down + 0.5
    layout = "compressed" if square else "constrained"
    figure, grid = plt.subplots(down, across, figsize=size, layout=layout, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title(short(title), fontsize="small")
        panel.tick_params(labelsize="small")
        panel.set_axisbelow(True)
    for empty in panels[len(titles) :]:
        empty.remove()
    for above in panels[len(titles) - across : (down - 1) * across]:  # nothing stands below them
        above.tick_params(labelbottom=True)
    return figure, panels[: len(titles)]


def _curves(panel: Axes, e: Entry, shown: Sequence[Entry], points: Sequence[list[tuple[float, Interval | None]]]) -> None:
    """A drafter's line with the band of its intervals, before those of the others."""
    for other, line in zip(shown, points, strict=True):
        xs, rates = _known(line)
        values = [rate.value for rate in rates]
        if other is not e:
            panel.plot(xs, values, color=BEHIND, linewidth=0.8, zorder=1)
            continue
        style = styles.line(e.title)
        band = [rate.low for rate in rates], [rate.high for rate in rates]
        panel.fill_between(xs, *band, color=style["color"], alpha=0.25, linewidth=0, zorder=2)
        panel.plot(xs, values, markersize=4, linewidth=1.3, zorder=3, **style)
    panel.grid(alpha=0.3)


def _known(line: list[tuple[float, Interval | None]]) -> tuple[list[float], list[Interval]]:
    found = [(x, rate) for x, rate in line if rate is not None]
    return [x for x, _ in found], [rate for _, rate in found]


def short(name: str) -> str:
    """A name, its middle left out where it is long: what tells arms apart often stands at the end."""
    half = LETTERS // 2
    return mathtext(name if len(name) <= LETTERS else f"{name[:half]}…{name[1 - half :]}")


def draw(group: Sequence[Entry]) -> dict[str, tuple[Figure | None, str]]:
    """Name -> figure, or None, and what it shows."""
    return {
        "positions": (acceptance_by_position(group), "tau by position in the output"),
        "reliability": (reliability(group), "Drafters' probabilities against acceptance"),
    }
