"""Figures of what rows hold beyond tau. Each is drawn from one group of entries and returned, or None without its data.

Where many drafters would hide each other, each has a panel of its own, the others behind it in grey.
"""

from collections.abc import Callable, Iterator, Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator

from specbench.metrics import Interval
from specbench.reporting import insight, look
from specbench.reporting.cells import Entry
from specbench.reporting.insight import Rated
from specbench.reporting.insight_tables import TIMED, drafters, length, stretch
from specbench.reporting.text import mathtext

PANEL = 2.0, 1.75  # inches
ACROSS = 4  # panels in a row
LETTERS = 22  # of a name, above a panel or in a legend
BEHIND = "#d0d0d0"


def category_bars(group: Sequence[Entry]) -> Figure | None:
    """tau by category, a panel each, the drafters in the same order in all of them. None where there is one category."""
    shown = drafters(group)
    rates = {e.title: insight.by_category(e) for e in shown}
    categories = list(dict.fromkeys(c for found in rates.values() for c, rate in found.items() if rate.shown))
    if len(categories) < 2:
        return None
    figure, panels = _panels(categories)
    for panel, category in zip(panels, categories, strict=True):
        for place, e in enumerate(shown):
            rate = rates[e.title].get(category, Rated(None, 0)).shown
            if rate is not None:
                _bar(panel, place, rate, e.title)
        panel.set_xticks([])
        panel.grid(axis="y", alpha=0.3)
    figure.supylabel("tau", fontsize="medium")
    _legend_below(figure, [e.title for e in shown])
    return figure


def acceptance_by_position(group: Sequence[Entry]) -> Figure | None:
    """tau by where in the output a cycle begins, a panel a drafter."""
    shown, tokens = drafters(group), stretch(group)
    points = [[((at + 0.5) * tokens, rate.shown) for at, rate in enumerate(insight.by_position(e, tokens))] for e in shown]
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


def accepted_lengths(group: Sequence[Entry]) -> Figure | None:
    """How many draft tokens a cycle accepts: shares of cycles, a panel a drafter."""
    shown = drafters(group)
    rates = [insight.accepted_lengths(e) for e in shown]
    if not any(rate.shown for found in rates for rate in found):
        return None
    longest = max(map(len, rates))
    figure, panels = _panels([e.title for e in shown])
    for panel, e, found in zip(panels, shown, rates, strict=True):
        for accepted, rate in enumerate(found):
            if rate.shown is not None:
                _bar(panel, accepted, rate.shown, e.title)
        panel.set_xticks(range(longest), [length(n).replace(" or more", "+") for n in range(longest)])
        panel.set_xlim(-0.6, longest - 0.4)
        panel.grid(axis="y", alpha=0.3)
    figure.supylabel("share of cycles", fontsize="medium")
    figure.supxlabel("draft tokens accepted", fontsize="medium")
    return figure


def reliability(group: Sequence[Entry]) -> Figure | None:
    """How often the target took a candidate, by the probability that the drafter gave it, a panel a drafter."""
    found = [(e, c) for e in drafters(group) if (c := insight.calibration(e)) and any(rate.shown for _, rate in c.curve)]
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


def free_width_against_measured(group: Sequence[Entry]) -> Figure | None:
    """Measured speed-up against what it would be if wide passes cost no more than narrow ones, a point a drafter.

    How far a point lies below the diagonal is what the width of its trees costs.
    """
    found = [(e, p) for e in drafters(group) if (p := insight.expected(e))]
    if not found:
        return None
    high = max(4.0, 0.22 * len(found))  # inches: a line a drafter beside the axes
    figure, axes = plt.subplots(figsize=(5.6, high), layout="constrained")
    most = max(max(p.free_width.high, p.measured.high) for _, p in found) * 1.06
    axes.plot([0, most], [0, most], color="black", linewidth=0.8, linestyle="--", zorder=1)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle=":", zorder=1)
    handles = []
    for e, p in found:
        style = {**look.line(e.title), "linestyle": "", "markersize": 6}
        x, y = p.free_width, p.measured
        axes.errorbar(x.value, y.value, xerr=_errors(x), yerr=_errors(y), elinewidth=1, capsize=2, **style)
        handles.append(Line2D([], [], label=_label(e.title), **style))
    axes.set(xlim=(0, most), ylim=(0, most))
    axes.set(xlabel="speed-up if a wide pass cost no more than a narrow one", ylabel="measured speed-up")
    axes.grid(alpha=0.3)
    figure.legend(handles=handles, fontsize="small", loc="outside right upper", frameon=False)
    return figure


FIGURES: dict[str, tuple[str, Callable[[Sequence[Entry]], Figure | None]]] = {
    "categories": ("tau by category", category_bars),
    "positions": ("tau by position in the output", acceptance_by_position),
    "lengths": ("Accepted tokens a cycle", accepted_lengths),
    "reliability": ("Drafters' probabilities against acceptance", reliability),
    "predictions": ("What wide passes cost", free_width_against_measured),
}


def _bar(panel: Axes, place: int, rate: Interval, name: str) -> None:
    """A drafter's bar, with its interval if it has one: of a single question there is none."""
    style = look.bar(name)
    panel.bar(place, rate.value, 0.85, **style)
    if rate.low < rate.high:
        colour = look.GREY if style["color"] == look.BLACK else "black"
        panel.errorbar(place, rate.value, yerr=_errors(rate), color=colour, elinewidth=0.8, capsize=1.5, capthick=0.8)


def _panels(titles: Sequence[str], square: bool = False) -> tuple[Figure, list[Axes]]:
    """One panel a title, at most `ACROSS` in a row and as many in each as can be, all on the same axes."""
    down = -(-len(titles) // ACROSS)
    across = -(-len(titles) // down)
    size = PANEL[0] * max(across, 2), (PANEL[0] if square else PANEL[1]) * down + 0.5
    layout = "compressed" if square else "constrained"
    figure, grid = plt.subplots(down, across, figsize=size, layout=layout, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title(_label(title), fontsize="small")
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
        style = look.line(e.title)
        band = [rate.low for rate in rates], [rate.high for rate in rates]
        panel.fill_between(xs, *band, color=style["color"], alpha=0.25, linewidth=0, zorder=2)
        panel.plot(xs, values, markersize=4, linewidth=1.3, zorder=3, **style)
    panel.grid(alpha=0.3)


def _known(line: list[tuple[float, Interval | None]]) -> tuple[list[float], list[Interval]]:
    found = [(x, rate) for x, rate in line if rate is not None]
    return [x for x, _ in found], [rate for _, rate in found]


def _errors(found: Interval) -> list[list[float]]:
    """An interval as Matplotlib's error bars want it."""
    return [[max(0.0, found.value - found.low)], [max(0.0, found.high - found.value)]]


def _legend_below(figure: Figure, names: Sequence[str]) -> None:
    """A bar's look for each name below all panels, for which the figure grows."""
    labels, handles = list(map(_label, names)), []
    for name, label in zip(names, labels, strict=True):
        found = look.bar(name)
        found["facecolor"] = found.pop("color")
        handles.append(Patch(label=label, **found))
    letters = max(map(len, labels)) + 7  # of the widest entry, its handle included
    columns = max(1, min(len(handles), int(figure.get_figwidth() * 12 / letters)))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(handles) // columns))
    figure.legend(handles=handles, fontsize="small", ncols=columns, loc="outside lower center", frameon=False)


def _label(name: str) -> str:
    """A name, its middle left out where it is long: what tells arms apart often stands at the end."""
    half = LETTERS // 2
    return mathtext(name if len(name) <= LETTERS else f"{name[:half]}…{name[1 - half :]}")


def draw(group: Sequence[Entry], timed: Sequence[Entry] | None = None) -> Iterator[tuple[str, str, Figure]]:
    """Every figure that can be drawn of a group: its name, what it shows, and the figure, to be closed by the caller.

    timed: the same drafters with a clock, where the group's rows are others.
    """
    for name, (title, function) in FIGURES.items():
        figure = function(group if timed is None or name not in TIMED else timed)
        if figure is not None:
            yield name, title, figure
