"""Figures of the main result: speed-ups, cost against tokens a pass, acceptance by step; and writing of all figures.

Each function returns its figure, or None if nothing was measured. Points and lines are labelled directly, without a legend.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from specbench.records.metrics import BASELINE
from specbench.reporting import analysis_figures, charts, names, study_figures, styles
from specbench.reporting.cells import Entry
from specbench.reporting.console import cost
from specbench.reporting.declared import StudyFigure
from specbench.reporting.overview import Overview, chosen, families, ranking, where
from specbench.reporting.study_figures import MAX_ARMS, error_bars, left_out, new_axes, save
from specbench.reporting.tables import known_depths
from specbench.reporting.text import mathtext

OWN, PAPER = "#0072B2", "#9cc3dd"  # colours of other trees and of the papers' trees
MAX_STEPS = 8  # of a draft
SPEED_UPS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6)  # with a line each
TICKS = (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 50)


def _colour(e: Entry) -> str:
    if e.name == BASELINE:
        return "black"
    return PAPER if names.tree_name(e) == names.PAPER and names.SEPARATOR in e.title else OWN


def speed_up_bars(entries: Sequence[Entry]) -> Figure | None:
    """Speed-up over plain decoding with 95% intervals, fastest first; a drafter's trees side by side."""
    fastest = [e for e in ranking(entries) if e.name != BASELINE and e.summary.speed_up is not None]
    if not fastest:
        return None
    figure, axes = new_axes(6.2, 0.235 * len(fastest) + 0.9)
    thin = {"linewidth": 0.9, "ecolor": "#222222"}
    y, ticks = 0.0, {}
    for arms in families(fastest):
        for e in arms:
            up = e.summary.speed_up
            assert up is not None
            axes.barh(y, up.value, 0.8, xerr=error_bars([up]), capsize=2, error_kw=thin, color=_colour(e))
            ticks[y] = mathtext(e.title)
            y += 0.85
        y += 0.3
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize="small")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(y - 0.5, -0.8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("speed-up over plain decoding (1)")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def cost_against_tau(entries: Sequence[Entry]) -> Figure | None:
    """Cost of a drafter's cycle against tokens a pass; their ratio is the speed-up, with a line for each of `SPEED_UPS`."""
    arms = [e for e in entries if e.summary.tau > 0 and cost(e) > 0]
    if not any(e.name != BASELINE for e in arms):
        return None
    figure, axes = new_axes(7.4, 4.6)
    x, y = np.array([cost(e) for e in arms]), np.array([e.summary.tau for e in arms])
    axes.set(xscale="log", yscale="log", xlim=(0.92 * min(x), 1.15 * max(x)), ylim=(0.92 * min(y), 1.2 * max(y)))
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(FixedLocator([n for n in TICKS if n < limits[1]]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    for s in SPEED_UPS:
        _equal_speed(axes, s)
    for e, a, b in zip(arms, x, y, strict=True):
        axes.plot(a, b, "o", color=_colour(e), markersize=5.5, markeredgecolor="white", markeredgewidth=0.5, zorder=3)
    axes.set(xlabel="cost: a cycle's time over that of a plain cycle", ylabel="tokens a pass (tau)")
    axes.spines[["top", "right"]].set_visible(False)
    label(axes, [(a, b, e.title, "black") for e, a, b in zip(arms, x, y, strict=True)])
    return figure


def _equal_speed(axes: Axes, speed_up: float) -> None:
    """The line of one speed-up, labelled at its end, if it crosses the axes."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    begin, end = max(left, low / speed_up), min(right, high / speed_up)
    if begin >= 0.9 * end:
        return
    plain = speed_up == 1
    axes.plot([begin, end], [speed_up * begin, speed_up * end], color="#555555", linewidth=1.1 if plain else 0.7,
              linestyle="-" if plain else ":", zorder=1)  # fmt: skip
    side = {"ha": "left", "va": "center"} if end == right else {"ha": "center", "va": "bottom"}
    shift = (4, 0) if end == right else (0, 3)
    axes.annotate(f"{speed_up:g}x", (end, speed_up * end), xytext=shift, textcoords="offset points", fontsize="small",
                  color="#555555", annotation_clip=False, **side)  # type: ignore[arg-type] # fmt: skip


def step_alphas(entries: Sequence[Entry]) -> Figure | None:
    """Acceptance by draft step, given that the step before was accepted (Beagle, Figures 3-4; CORAL, Figure 6)."""
    arms = [(e, min(MAX_STEPS, known_depths(e))) for e in entries if e.name != BASELINE and known_depths(e)]
    if not arms:
        return None
    figure, axes = new_axes(7.4, 3.5)
    ends, lines = [], []
    for e, depths in arms:
        steps, alphas = np.arange(1, depths + 1), np.array(e.summary.alphas[:depths])
        style = styles.line(e.title)
        axes.plot(steps, alphas, markersize=5, linewidth=1.3, **style)
        ends.append((steps[-1], alphas[-1], e.title, style["color"]))
        dense = np.linspace(1, depths, 12 * depths)
        lines += list(zip(dense, np.interp(dense, steps, alphas), strict=True))
    deepest = max(depths for _, depths in arms)
    limits = {"ylim": (0, 1.04), "xlim": (0.8, deepest + 0.25 * deepest)}
    axes.set(xlabel="draft step", ylabel="accepted, given the step before", **limits)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    label(axes, ends, lines)
    return figure


RADII, ANGLES = (7, 14, 22, 32, 44, 58, 74, 92), np.linspace(0, 2 * np.pi, 16, endpoint=False)  # of labels around a point


def label(axes: Axes, points: Sequence[tuple[float, float, str, str]], covered: Sequence[tuple[float, float]] = ()) -> None:
    """Write names beside points, without overlap; a line joins a point to a name that is not next to it.

    Args:
        points: x, y, name, colour. covered: further coordinates that no name may hide.
    """
    figure = axes.figure.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # positions in pixels stay valid
    unit = figure.dpi / 72
    pixels = axes.transData.transform([(x, y) for x, y, *_ in points] + [tuple(p) for p in covered])
    used = [np.concatenate([p - 3.5 * unit, p + 3.5 * unit]) for p in pixels]
    for (x, y, name, colour), point in zip(points, pixels, strict=False):
        text = axes.annotate(analysis_figures.short(name), (x, y), xytext=(0, 0), textcoords="offset points",
                             fontsize="small", color=colour, ha="center", va="center", zorder=4)  # fmt: skip
        extent = text.get_window_extent()
        shift, box = _place(point, np.array([extent.width, extent.height]), axes.bbox, np.array(used), unit)
        text.set_position(tuple(shift / unit))
        nearest = np.clip(point, box[:2], box[2:])
        if np.hypot(*(nearest - point)) > 6 * unit:
            edge = axes.transData.inverted().transform(nearest)
            axes.plot([x, edge[0]], [y, edge[1]], color="#999999", linewidth=0.6, zorder=2, scalex=False, scaley=False)
        used.append(box)


def _place(point: Any, size: np.ndarray, inside: Bbox, used: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """The nearest shift of a name from its point, in pixels, at which it hides least; and its box there.

    Boxes are [x0, y0, x1, y1]; used: [N, 4].
    """
    fewest, best = math.inf, (point, used[0])
    for radius in RADII:
        for angle in ANGLES:
            direction = np.array([np.cos(angle), np.sin(angle)])
            shift = direction * (radius * unit + np.abs(direction) * size / 2)
            x0, y0, x1, y1 = box = np.concatenate([point + shift - size / 2, point + shift + size / 2])
            hidden = int(((box[:2] <= used[:, 2:]) & (used[:, :2] <= box[2:])).all(1).sum())
            hidden += 5 * (not (inside.x0 < x0 and x1 < inside.x1 + 30 * unit and inside.y0 < y0 and y1 < inside.y1))
            if hidden < fewest:
                fewest, best = hidden, (shift, box)
            if not hidden:
                return best
    return best


def _fastest(group: Sequence[Entry]) -> list[Entry]:
    """The first `MAX_ARMS` drafters of a ranking, and plain decoding."""
    drafters = itertools.islice((e for e in group if e.name != BASELINE), MAX_ARMS)
    kept = {id(e) for e in (*drafters, *(e for e in group if e.name == BASELINE))}
    return [e for e in group if id(e) in kept]


def draw_all(
    view: Overview, everything: Sequence[Entry], weights: Mapping[str, Mapping[str, Any]], folder: Path
) -> dict[str, str]:
    """Write every figure that has data as PNG and SVG; returns their titles by name.

    Args:
        view: the main result. everything: all entries; those of the view's target and machine are drawn.
    """
    timed, accepting = _fastest(view.timed(view.first)), chosen(view)
    alike = {where(e) for e in view.entries if not e.replayed}
    everything = [e for e in everything if where(e) in alike]
    part = left_out(sum(e.name != BASELINE for e in view.timed(view.first)))
    made = {
        "speed_up": (
            speed_up_bars(timed),
            f"Speed-up with 95% intervals. Light: a paper's tree beside one for this machine; dark: all others{part}",
        ),
        "cost": (
            cost_against_tau(timed),
            f"Cost against tokens a pass, on logarithmic axes; lines join equal speed-ups{part}",
        ),
        "step_alpha": (
            step_alphas(accepting),
            "Acceptance by draft step, given that the step before was accepted; the paper's tree where there are several",
        ),
    }
    made |= study_figures.draw(everything, weights)
    made |= analysis_figures.draw(accepting)
    return write({name: (figure, title) for name, (figure, title) in made.items() if figure is not None}, folder)


def draw_declared(declared: Sequence[StudyFigure], folder: Path) -> dict[str, str]:
    """Write the figures of studies that have rows; returns their captions by name."""
    titles: dict[str, str] = {}
    for figure in declared:
        if figure.chart is not None:
            titles |= write({figure.name: (charts.draw(figure.chart), figure.caption)}, folder)
    return titles


def write(made: Mapping[str, tuple[Figure, str]], folder: Path) -> dict[str, str]:
    """Write figures as PNG and SVG, and close them; returns their titles by name."""
    with matplotlib.rc_context({"svg.hashsalt": "specbench", "svg.fonttype": "path"}):
        for name, (figure, _) in made.items():
            save(figure, folder / f"{name}.png", folder.parent, dpi=150, metadata={"Software": None})
            save(figure, folder / f"{name}.svg", folder.parent, metadata={"Date": None, "Creator": None})
    return {name: title for name, (_, title) in made.items()}
