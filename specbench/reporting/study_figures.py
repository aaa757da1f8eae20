"""Figures of measurements and trainings, and what all figures share. A function returns None if nothing was measured."""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specbench.common.storage import write_file
from specbench.records.statistics import Interval, repeated
from specbench.reporting import styles
from specbench.reporting.cells import Entry
from specbench.reporting.text import mathtext

MAX_ARMS = 40  # in a figure, the first ones
LEVELS = {"first": "first level, observing included", "level": "one level more"}  # of drafting


def new_axes(width: float = 6.4, height: float = 3.8, **options: Any) -> tuple[Figure, Any]:
    """A figure, its size in inches, with its axes."""
    return plt.subplots(figsize=(width, height), layout="constrained", **options)


def save(figure: Figure, path: Path, root: Path | None = None, **options: Any) -> None:
    """Write a figure, in the format that the path's suffix names, and close it. root: see `atomic_path`."""
    drawn = io.BytesIO()  # a library that writes files itself hides why the disk refuses them
    figure.savefig(drawn, format=path.suffix[1:], **options)
    write_file(path, drawn.getvalue(), root)
    plt.close(figure)


def left_out(arms: int) -> str:
    """The end of a figure's title if not all arms are in it."""
    return f"; the first {MAX_ARMS} of {arms:,} drafters" if arms > MAX_ARMS else ""


def _legend(figure: Figure, axes: Axes, place: Any = "outside right upper", columns: int = 1) -> None:
    """Grids for all axes, and a legend outside of them."""
    for each in figure.axes:
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, fontsize="small", ncols=columns, loc=place, frameon=False)


def error_bars(values: Sequence[Interval]) -> np.ndarray:
    """[2, N]: distances of the bounds, as Matplotlib takes them."""
    return np.array([[max(0.0, v.value - v.low) for v in values], [max(0.0, v.high - v.value) for v in values]])


def _points(axes: Axes, xs: Sequence[float], values: Sequence[Interval], **style: Any) -> None:
    """Values with error bars."""
    axes.errorbar(xs, [v.value for v in values], yerr=error_bars(values), capsize=2, **style)


def _measured(
    entries: Sequence[Entry], quantity: str, names: Iterable[str]
) -> list[tuple[Entry, list[Mapping[str, float]]]]:
    """The arms of the cell in which a quantity was measured most often, with the repetitions that have all names."""
    cells: dict[Path, list[tuple[Entry, list[Mapping[str, float]]]]] = {}
    for e in entries:
        if complete := [values for values in e.measured.get(quantity, ()) if set(names) <= set(values)]:
            cells.setdefault(e.path, []).append((e, complete))
    return max(cells.values(), key=len, default=[])


CURVES = {"chain_tau": "tau, chain of 5", "n_alpha": "0-alpha", "tree_tau": "tau, its own tree"}  # of a training's history


def learning_curves(weights: Mapping[str, Mapping[str, Any]]) -> Figure | None:
    """Held-out tau and 0-alpha against tokens seen (Beagle, Figures 5-9). weights: drafter -> provenance.

    Without second stages, as routers: they stand on another drafter's tokens.
    """
    first = {n: p["history"] for n, p in weights.items() if "base" not in p.get("drafter", {})}
    histories = {n: [h for h in history if "chain_tau" in h and "n_alpha" in h] for n, history in first.items()}
    histories = dict([(n, points) for n, points in histories.items() if points][:MAX_ARMS])
    if not histories:
        return None
    known = {name for points in histories.values() for h in points for name in h}
    shown = {name: label for name, label in CURVES.items() if name in known}
    figure, panels = new_axes(4.0 * len(shown), 3.4, ncols=len(shown))
    looks = styles.distinct(histories)
    for name, points in histories.items():
        style = looks[name] | {"label": mathtext(name)}
        tokens = [(weights[name].get("tokens_before", 0) + h["tokens"]) / 1e6 for h in points]
        for axes, curve in zip(panels, shown, strict=True):
            values = [np.ravel(h.get(curve, math.nan))[0] for h in points]  # of a list the first: 0-alpha
            axes.plot(tokens, values, markersize=3.5, linewidth=1.1, **style)
            style = style | {"label": None}  # one entry in the legend
    for axes, label in zip(panels, shown.values(), strict=True):
        axes.set(xlabel="training tokens seen (millions)", ylabel=f"held-out {label}")
    _legend(figure, panels[0])
    return figure


def tree_cost(entries: Sequence[Entry]) -> Figure | None:
    """Milliseconds of one target pass by its size."""
    measured = _measured(entries, "target_pass", ())
    if not measured:
        return None
    _, repetitions = measured[0]
    sizes = {int(name[3:]): name for name in repetitions[0] if re.fullmatch(r"ms_\d{1,9}", name)}
    points = {n: repeated([v[name] for v in repetitions if name in v]) for n, name in sorted(sizes.items())}
    figure, axes = new_axes()
    _points(axes, list(points), list(points.values()), color=styles.BLUE, marker="o")
    axes.set(xlabel="nodes in the pass, root included", ylabel="milliseconds", ylim=(0, None))
    axes.grid(alpha=0.3)
    return figure


def cost_of_cycles(passes: Mapping[int, Mapping[str, float]], parts: Mapping[str, Mapping[int, float]]) -> Figure:
    """Time of the target's pass by nodes and context, and of a draft level by its width.

    Args:
        passes: by tokens before the tree, `ms_<nodes>`. parts: for each of `LEVELS`, seconds by width.
    """
    figure, (left, right) = new_axes(8.0, 3.4, ncols=2)
    by_context = {f"{n} tokens before": {int(name[3:]): ms for name, ms in own.items()} for n, own in passes.items()}
    by_level = {title: {n: 1000 * s for n, s in parts[name].items()} for name, title in LEVELS.items()}
    for axes, series in ((left, by_context), (right, by_level)):
        for number, (title, points) in enumerate(series.items()):
            colour = styles.COLOURS[number % len(styles.COLOURS)]
            axes.plot(list(points), list(points.values()), color=colour, marker="o", label=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", frameon=False)
    left.set(xlabel="nodes in the pass, root included", ylabel="milliseconds", ylim=(0, None))
    right.set(xlabel="nodes of a level", ylabel="milliseconds", ylim=(0, None))
    return figure


def draw(entries: Sequence[Entry], weights: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Figure | None, str]]:
    """Name -> figure and title. entries: of one target and machine. weights: drafter -> provenance."""
    machine = f" on {entries[0].machine}" if entries else ""
    return {
        "target_pass": (tree_cost(entries), f"Cost of a target pass by tree size{machine}"),
        "learning_curves": (learning_curves(weights), f"Learning curves on held-out answers{left_out(len(weights))}"),
    }
