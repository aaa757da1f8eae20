"""Charts: panels of series as plain data, and their drawing. Who makes them: `specbench.reporting.study_series`."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from specbench.records.statistics import Interval
from specbench.reporting import styles
from specbench.reporting.document import Table
from specbench.reporting.study_figures import error_bars, new_axes
from specbench.reporting.text import mathtext

ACROSS = 3  # panels in a row
OPAQUE = 0.85  # bars
PARTS = "#3d5a80", "#8fa3bf", "#d5dbe3", "#e0c9a6"  # colours of stacked bars; no drafter has them
PRINTED = "printed by the source"  # in legends: open markers
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One drafter, or several arms that belong together.

    Attributes:
        points: x and the measured value with its interval. joined: by a line.
        curves: lines of values without intervals, as histories of trainings. printed: numbers of the paper.
    """

    label: str
    points: Sequence[tuple[float, Interval]] = ()
    curves: Sequence[Sequence[Point]] = ()
    printed: Sequence[Point] = ()
    joined: bool = True

    def __bool__(self) -> bool:
        """Was anything measured?"""
        return bool(self.points or any(self.curves))


@dataclass(frozen=True)
class Panel:
    """Axes with their series.

    Attributes:
        x, y: labels of the axes. shape: of the marks. A stack has a series a part, the last one is the whole; a grid one a
            row. ticks: names of x = 0, 1, …. guides: label -> curve of a theory. top: upper limit of y. log: x to base 2.
            share: y is from 0 to 1. absent: what has no value yet, in words.
    """

    x: str
    y: str
    series: Sequence[Series]
    title: str = ""
    shape: Literal["lines", "bars", "stack", "grid"] = "lines"
    ticks: Sequence[str] = ()
    guides: Mapping[str, Sequence[Point]] | None = None
    top: float | None = None
    log: bool = False
    share: bool = False
    absent: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """What one figure shows. notes: for its caption. tables: beside it."""

    panels: Sequence[Panel]
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()


def draw(chart: Chart) -> Figure:
    """The figure of a chart; a label has one style in all panels."""
    across = min(ACROSS, len(chart.panels))
    down = -(-len(chart.panels) // across)
    if len(chart.panels) == 4:
        across = down = 2
    height = max(map(_height, chart.panels))
    longest = max(len(s.label) for panel in chart.panels for s in panel.series)
    width = (4.6 if across == 1 else 3.2 * across) + 0.6 + 0.065 * max(longest, 12)  # with the legend
    figure, grid = new_axes(width, height * down, nrows=down, ncols=across, squeeze=False)
    looks = styles.distinct(dict.fromkeys(s.label for panel in chart.panels for s in panel.series))
    panels: list[Axes] = list(grid.flat)
    for axes, panel in zip(panels, chart.panels, strict=False):
        DRAWN[panel.shape](axes, panel, looks)
        axes.set(xlabel=mathtext(panel.x), ylabel=mathtext(panel.y))
        axes.set_title(mathtext(panel.title), fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    _same_height(panels, chart.panels)
    for empty in panels[len(chart.panels) :]:
        empty.remove()
    _legend(figure, chart, looks)
    return figure


def _same_height(drawn: Sequence[Axes], panels: Sequence[Panel]) -> None:
    """One scale for the bars of one quantity, so that panels can be compared."""
    by_quantity: dict[str, list[Axes]] = {}
    for axes, panel in zip(drawn, panels, strict=False):
        if panel.shape == "bars":
            by_quantity.setdefault(panel.y, []).append(axes)
    for alike in by_quantity.values():
        top = max(axes.get_ylim()[1] for axes in alike)
        for axes in alike:
            axes.set_ylim(top=top)


def _height(panel: Panel) -> float:
    """In inches."""
    if panel.shape == "stack":
        return 0.3 * len(panel.ticks) + 1.3
    return 0.4 * len(panel.series) + 1.4 if panel.shape == "grid" else 3.3


def _legend(figure: Figure, chart: Chart, looks: Mapping[str, dict[str, Any]]) -> None:
    """Outside of the axes: series, parts of stacks, and what open markers are."""
    shapes = {panel.shape for panel in chart.panels}
    if shapes <= {"grid"} or all([s.label for s in panel.series] == list(panel.ticks) for panel in chart.panels):
        return  # the axes name the series
    if shapes == {"stack"}:
        parts, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(parts, labels, fontsize="small", ncols=len(labels), loc="outside upper center", frameon=False)
        return
    shown = {s.label: looks[s.label] for panel in chart.panels for s in panel.series if s}
    handles: list[Artist] = [
        Patch(color=look["color"], alpha=OPAQUE, label=mathtext(label))
        if shapes == {"bars"}
        else Line2D([], [], **look, label=mathtext(label))
        for label, look in shown.items()
    ]
    if any(s.printed for panel in chart.panels for s in panel.series):
        handles.append(Line2D([], [], color="black", label=PRINTED, **OPEN))
    if len(handles) > 1:
        figure.legend(handles=handles, fontsize="small", loc="outside right upper", frameon=False)


OPEN: dict[str, Any] = {"linestyle": "", "marker": "o", "markerfacecolor": "none", "markersize": 7.5}


def _lines(axes: Axes, panel: Panel, looks: Mapping[str, dict[str, Any]]) -> None:
    for number, (label, guide) in enumerate((panel.guides or {}).items()):
        _guide(axes, label, guide, number)
    for s, aside in zip(panel.series, _asides(panel), strict=True):
        look = looks[s.label]
        for curve in s.curves:
            small = 2.5 if len(curve) > 1 else 4
            axes.plot([x for x, _ in curve], [y for _, y in curve], linewidth=1.1, markersize=small, **look)
        if s.points:
            xs, values = [aside(x) for x, _ in s.points], [value for _, value in s.points]
            line = look if s.joined else look | {"linestyle": ""}
            axes.errorbar(xs, [v.value for v in values], yerr=_errors(values), capsize=2, linewidth=1.2, **line)
        _printed(axes, [(aside(x), y) for x, y in s.printed], look)
    if panel.top is not None:
        axes.set_ylim(top=panel.top)
    else:
        _limit(axes, panel)
    xs = sorted({x for s in panel.series for x, _ in (*s.points, *s.printed)})
    if panel.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:,.0f}" for x in xs], rotation=45, ha="right")
        axes.minorticks_off()
    elif xs and not any(s.curves for s in panel.series) and all(float(x).is_integer() for x in xs) and xs[-1] < 100:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _grid(axes)


def _asides(panel: Panel) -> list[Callable[[float], float]]:
    """For each series a slight shift along x where several have intervals at one x, so that none covers another."""
    at = Counter(x for s in panel.series for x, _ in s.points)
    if max(at.values(), default=0) < 2:
        return [lambda x: x for _ in panel.series]
    span = math.log2(max(at) / min(at)) if panel.log else max(at) - min(at)
    steps = [0.012 * (span or 1.0) * (number - (len(panel.series) - 1) / 2) for number in range(len(panel.series))]
    return [lambda x, step=step: x * 2**step if panel.log else x + step for step in steps]  # type: ignore[misc]


def _limit(axes: Axes, panel: Panel) -> None:
    """No interval, however wide, makes the values small; none of them is below zero."""
    values = [v.value for s in panel.series for _, v in s.points] + [y for s in panel.series for _, y in s.printed]
    values += [y for s in panel.series for curve in s.curves for _, y in curve]
    low, high = axes.get_ylim()
    highest = 1.0 if panel.share else 2 * max(values, default=high)
    bottom = 0.0 if panel.share or panel.shape == "bars" else max(low, 0.0)
    axes.set_ylim(bottom, max(min(high, highest), bottom + 1e-6))


def _errors(values: Sequence[Interval]) -> np.ndarray:
    """Error bars; none where there are too few questions for an interval."""
    exact = [v.low == v.high for v in values]
    return np.where(exact, np.nan, error_bars(values))


def _guide(axes: Axes, label: str, guide: Sequence[Point], number: int) -> None:
    """A theory's curve, labelled on itself, lower with every curve, so that labels do not meet."""
    axes.plot([x for x, _ in guide], [y for _, y in guide], color="0.6", linewidth=1, zorder=1)
    if label and guide:
        height = max(y for _, y in guide) * (0.97 - 0.09 * number)
        at = min(guide, key=lambda point: abs(point[1] - height))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axes.text(*at, mathtext(label), fontsize="small", color="0.4", ha="center", va="center", bbox=box, zorder=1.5)


def _printed(axes: Axes, points: Sequence[Point], look: Mapping[str, Any]) -> None:
    if points:
        style = OPEN | {"color": look["color"], "marker": look["marker"]}
        axes.plot([x for x, _ in points], [y for _, y in points], zorder=4, **style)


def _bars(axes: Axes, panel: Panel, looks: Mapping[str, dict[str, Any]]) -> None:
    """Bars side by side within a group; open markers stand at their bar."""
    sizes = Counter(x for s in panel.series for x in {x for x, _ in (*s.points, *s.printed)})
    width, used = 0.8 / max(sizes.values(), default=1), Counter[float]()
    for s in panel.series:
        look = looks[s.label]
        places = {}
        for x in dict.fromkeys(x for x, _ in (*s.points, *s.printed)):
            places[x] = x + (used[x] - (sizes[x] - 1) / 2) * width
            used[x] += 1
        values = [value for _, value in s.points]
        thin = {"linewidth": 0.9, "ecolor": "#222222"}
        axes.bar([places[x] for x, _ in s.points], [v.value for v in values], 0.92 * width, yerr=_errors(values),
                 capsize=2, error_kw=thin, color=look["color"], alpha=OPAQUE)  # fmt: skip
        _printed(axes, [(places[x], y) for x, y in s.printed], {"color": "black", "marker": OPEN["marker"]})
    for guide in (panel.guides or {}).values():
        axes.plot([x for x, _ in guide], [y for _, y in guide], color="black", linewidth=1)
    crowded = sum(map(len, panel.ticks)) > 30
    turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if crowded else {}
    axes.set_xticks(range(len(panel.ticks)), list(map(mathtext, panel.ticks)), fontsize="small", **turned)
    _limit(axes, panel)
    axes.set_xlim(min(-0.6, len(panel.ticks) / 2 - 1.5), max(len(panel.ticks) - 0.4, len(panel.ticks) / 2 + 0.5))
    _grid(axes, "y")


def _stack(axes: Axes, panel: Panel, _: Mapping[str, dict[str, Any]]) -> None:
    """Horizontal bars of parts, with the interval of the whole."""
    *parts, whole = panel.series
    left = np.zeros(len(panel.ticks))
    for part, colour in zip(parts, PARTS, strict=False):
        widths = np.array([value.value for _, value in part.points])
        axes.barh(range(len(widths)), widths, left=left, color=colour, label=mathtext(part.label))
        left += widths
    values = [value for _, value in whole.points]
    places = range(len(values))
    axes.errorbar([v.value for v in values], places, xerr=error_bars(values), fmt="none", ecolor="black", capsize=2)
    axes.set_yticks(range(len(panel.ticks)), list(map(mathtext, panel.ticks)))
    axes.invert_yaxis()
    _grid(axes, "x")


def _cells(axes: Axes, panel: Panel, _: Mapping[str, dict[str, Any]]) -> None:
    """Coloured cells with their values; printed ones in brackets below."""
    values = np.full((len(panel.series), len(panel.ticks)), np.nan)
    printed: dict[tuple[int, int], float] = {}
    for row, s in enumerate(panel.series):
        for x, value in s.points:
            values[row, int(x)] = value.value
        printed |= {(row, int(x)): y for x, y in s.printed}
    axes.imshow(values, cmap="Blues", aspect="auto", alpha=0.6)
    for row, column in np.ndindex(values.shape):
        lines = [f"{values[row, column]:.2f}"] if np.isfinite(values[row, column]) else []
        lines += [f"[{printed[row, column]:.2f}]"] if (row, column) in printed else []
        axes.text(column, row, "\n".join(lines), ha="center", va="center", fontsize="small")
    axes.set_xticks(range(len(panel.ticks)), list(map(mathtext, panel.ticks)))
    axes.set_yticks(range(len(panel.series)), [mathtext(s.label) for s in panel.series])


def _grid(axes: Axes, axis: Literal["both", "x", "y"] = "both") -> None:
    axes.grid(axis=axis, alpha=0.3)
    axes.set_axisbelow(True)


Draw = Callable[[Axes, Panel, Mapping[str, dict[str, Any]]], None]
DRAWN: Mapping[str, Draw] = {"lines": _lines, "bars": _bars, "stack": _stack, "grid": _cells}
