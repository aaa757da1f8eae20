"""The report's figures: speed-ups as bars, cost against tokens a pass, acceptance by step; and all others drawn with them.

Every function draws one figure from what is there and returns it, or None where nothing of the kind was measured. Points
and lines are labelled directly, so that nobody looks colours up; no legend lies over data.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from specbench.records.metrics import BASELINE
from specbench.reporting import analysis_figures, names, study_figures, styles
from specbench.reporting.cells import Entry
from specbench.reporting.console import cost
from specbench.reporting.overview import Overview, chosen, families, ranking
from specbench.reporting.study_figures import error_bars, new_axes
from specbench.reporting.tables import known_depths
from specbench.reporting.text import mathtext

LEVIATHAN = "leviathan"  # the study of chains, where it was run
OWN, PAPER = "#0072B2", "#9cc3dd"  # trees of this machine, and those of the papers
STEPS = 8  # of a draft, at most
SPEED_UPS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6)  # that lines are drawn of


def _colour(e: Entry) -> str:
    return PAPER if names.tree_name(e) == names.PAPER and names.SEPARATOR in e.title else OWN


def speed_up_bars(entries: Sequence[Entry]) -> Figure | None:
    """Speed-up over plain decoding with 95% intervals, fastest first; a drafter's trees side by side."""
    found = [e for e in ranking(entries) if e.name != BASELINE and e.summary.speed_up is not None]
    if not found:
        return None
    figure, axes = new_axes(6.2, 0.235 * len(found) + 0.9)
    place, ticks = 0.0, []
    for arms in families(found):
        for e in arms:
            up = e.summary.speed_up
            assert up is not None
            thin = {"linewidth": 0.9, "ecolor": "#222222"}
            axes.barh(place, up.value, 0.8, xerr=error_bars([up]), capsize=2, error_kw=thin, color=_colour(e))
            ticks.append(place)
            place += 0.85
        place += 0.3
    axes.set_yticks(ticks, [mathtext(e.title) for arms in families(found) for e in arms], fontsize="small")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 0.5, -0.8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("speed-up over plain decoding (1)")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def cost_against_tau(entries: Sequence[Entry]) -> Figure | None:
    """What a drafter's cycle costs and what it yields: speed-up = tokens a pass / cost, so lines are of equal speed-up."""
    found = [e for e in entries if e.summary.tau > 0 and cost(e) > 0]
    if not any(e.name != BASELINE for e in found):
        return None
    figure, axes = new_axes(7.4, 4.6)
    x, y = np.array([cost(e) for e in found]), np.array([e.summary.tau for e in found])
    axes.set(xscale="log", yscale="log", xlim=(0.92 * min(x), 1.15 * max(x)), ylim=(0.92 * min(y), 1.2 * max(y)))
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(FixedLocator([n for n in (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 50) if n < limits[1]]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    for s in SPEED_UPS:
        _equal_speed(axes, s)
    for e, a, b in zip(found, x, y, strict=True):
        colour = "black" if e.name == BASELINE else _colour(e)
        axes.plot(a, b, "o", color=colour, markersize=5.5, markeredgecolor="white", markeredgewidth=0.5, zorder=3)
    axes.set(xlabel="cost: a cycle's time over that of a plain cycle", ylabel="tokens a pass (tau)")
    axes.spines[["top", "right"]].set_visible(False)
    label(axes, [(a, b, e.title, "black") for e, a, b in zip(found, x, y, strict=True)])
    return figure


def _equal_speed(axes: Axes, speed_up: float) -> None:
    """The line of one speed-up, named at its end; where it does not cross the axes, nothing."""
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
    found = [(e, min(STEPS, known_depths(e))) for e in entries if e.name != BASELINE and known_depths(e)]
    if not found:
        return None
    figure, axes = new_axes(7.4, 3.5)
    ends, lines = [], []
    for e, depths in found:
        steps, alphas = np.arange(1, depths + 1), np.array(e.summary.alphas[:depths])
        style = styles.line(e.title)
        axes.plot(steps, alphas, markersize=5, linewidth=1.3, **style)
        ends.append((steps[-1], alphas[-1], e.title, style["color"]))
        dense = np.linspace(1, depths, 12 * depths)
        lines += list(zip(dense, np.interp(dense, steps, alphas), strict=True))
    most = max(depths for _, depths in found)
    axes.set(xlabel="draft step", ylabel="accepted, given the step before", ylim=(0, 1.04), xlim=(0.8, most + 0.25 * most))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    label(axes, ends, lines)
    return figure


RADII, ANGLES = (7, 14, 22, 32, 44, 58, 74, 92), np.linspace(0, 2 * np.pi, 16, endpoint=False)  # points around a point


def label(axes: Axes, points: Sequence[tuple[float, float, str, str]], taken: Sequence[tuple[float, float]] = ()) -> None:
    """Names beside points, with a line to those that find no room close by; none lies over another or over a point.

    Args:
        points: x, y, name, colour. taken: other places that no name may hide.
    """
    figure = axes.figure.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what is measured now stays
    unit = figure.dpi / 72
    places = axes.transData.transform([(x, y) for x, y, *_ in points] + [tuple(p) for p in taken])
    used = [np.concatenate([p - 3.5 * unit, p + 3.5 * unit]) for p in places]
    for (x, y, name, colour), place in zip(points, places, strict=False):
        text = axes.annotate(analysis_figures.short(name), (x, y), xytext=(0, 0), textcoords="offset points",
                             fontsize="small", color=colour, ha="center", va="center", zorder=4)  # fmt: skip
        box = text.get_window_extent()
        shift, where = _free(place, np.array([box.width, box.height]), axes.bbox, np.array(used), unit)
        text.set_position(tuple(shift / unit))
        nearest = np.clip(place, where[:2], where[2:])
        if np.hypot(*(nearest - place)) > 6 * unit:
            edge = axes.transData.inverted().transform(nearest)
            axes.plot([x, edge[0]], [y, edge[1]], color="#999999", linewidth=0.6, zorder=2, scalex=False, scaley=False)
        used.append(where)


def _free(place: Any, size: np.ndarray, inside: Bbox, used: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """The nearest shift of a name from its point, in pixels, at which its box hides least, and that box.

    Boxes are [x0, y0, x1, y1]; used: [N, 4].
    """
    fewest, best = math.inf, (place, used[0])
    for radius in RADII:
        for angle in ANGLES:
            way = np.array([np.cos(angle), np.sin(angle)])
            shift = way * (radius * unit + np.abs(way) * size / 2)
            where = np.concatenate([place + shift - size / 2, place + shift + size / 2])
            hidden = int(((where[:2] <= used[:, 2:]) & (used[:, :2] <= where[2:])).all(1).sum())
            x0, y0, x1, y1 = where
            hidden += 5 * (not (inside.x0 < x0 and x1 < inside.x1 + 30 * unit and inside.y0 < y0 and y1 < inside.y1))
            if hidden < fewest:
                fewest, best = hidden, (shift, where)
            if not hidden:
                return best
    return best


def draw_all(
    view: Overview, everything: Sequence[Entry], weights: Mapping[str, Mapping[str, Any]], folder: Path
) -> dict[str, str]:
    """Every figure that can be drawn, as PNG and SVG in a folder.

    Args:
        view: what the answer is about. everything: the studies' entries too; those of its target are drawn.

    Returns:
        name -> what it shows, of those drawn.
    """
    timed = view.timed(view.first)
    everything = [e for e in everything if not view.entries or e.model == view.entries[0].model]
    leviathan = Overview(e for e in everything if e.study == LEVIATHAN)
    made = {
        "speed_up": (
            speed_up_bars(timed),
            "Speed-up with 95% intervals. Light: a paper's tree beside one for this machine; dark: all others",
        ),
        "cost": (
            cost_against_tau(timed),
            "Cost against tokens a pass, on logarithmic axes; lines join equal speed-ups",
        ),
        "step_alpha": (
            step_alphas(chosen(view)),
            "Acceptance by draft step, given that the step before was accepted; the paper's tree where there are several",
        ),
    }
    made |= study_figures.draw(everything, leviathan.timed(leviathan.first) or timed, weights)
    made |= analysis_figures.draw(chosen(view))
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    with matplotlib.rc_context({"svg.hashsalt": "specbench", "svg.fonttype": "path"}):
        for name, (figure, title) in made.items():
            if figure is None:
                continue
            figure.savefig(folder / f"{name}.png", dpi=150, metadata={"Software": None})
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)
            drawn[name] = title
    return drawn
