"""Figures of the studies: costs, training, chains, vocabularies. Each function returns None if nothing was measured."""

import io
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
from specbench.records.metrics import BASELINE, RATES
from specbench.records.statistics import Interval, interval, repeated
from specbench.reporting import styles
from specbench.reporting.cells import Entry
from specbench.reporting.text import mathtext

VOCABULARY = "vocabulary"  # the study of draft vocabularies
PARTS = "#3d5a80", "#8fa3bf", "#d5dbe3"  # colours of stacked bars; no drafter has them
COST = 0.1  # of a draft step, in target passes, for theoretical curves
MAX_ARMS = 40  # in a figure, the first ones
LEVELS = {"first": "first level, observing included", "level": "one level more"}  # of drafting


def _styles(names: Iterable[str]) -> list[dict[str, Any]]:
    """Colour, marker, line and label of every series."""
    return [styles.line(n) | {"label": mathtext(n)} for n in names]


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


def head_share(entries: Sequence[Entry]) -> Figure | None:
    """Time of drafting a cycle: LM head, the drafter's own network, the rest (CORAL, Figure 2)."""
    parts = {"head": "LM head", "network": "the drafter's layers", "rest": "growth and caches"}
    measured = _measured(entries, "drafting", ("ms", *parts))
    measured = measured[:MAX_ARMS]
    if not measured:
        return None
    middle = [sorted(values, key=lambda v: v["ms"])[len(values) // 2] for _, values in measured]
    figure, axes = new_axes(6.4, 0.3 * len(measured) + 1.2)
    lines, left = range(len(measured)), np.zeros(len(measured))
    for (part, title), colour in zip(parts.items(), PARTS, strict=True):
        widths = np.array([v["ms"] * v[part] for v in middle])
        axes.barh(lines, widths, left=left, color=colour, label=title)
        left += widths
    axes.set_yticks(lines, [mathtext(e.title) for e, _ in measured])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of drafting a cycle")
    _legend(figure, axes, "outside upper center", len(parts))
    whole = [repeated([v["ms"] for v in values]) for _, values in measured]
    axes.errorbar([w.value for w in whole], lines, xerr=error_bars(whole), fmt="none", ecolor="black", capsize=2)
    return figure


def _measured(
    entries: Sequence[Entry], quantity: str, names: Iterable[str]
) -> list[tuple[Entry, list[Mapping[str, float]]]]:
    """The arms of the cell in which a quantity was measured most often, with the repetitions that have all names."""
    cells: dict[Path, list[tuple[Entry, list[Mapping[str, float]]]]] = {}
    for e in entries:
        if complete := [values for values in e.measured.get(quantity, ()) if set(names) <= set(values)]:
            cells.setdefault(e.path, []).append((e, complete))
    return max(cells.values(), key=len, default=[])


def learning_curves(weights: Mapping[str, Mapping[str, Any]]) -> Figure | None:
    """Held-out chain tau and 0-alpha against tokens seen (Beagle, Figures 5-9). weights: drafter -> provenance."""
    histories = {n: [h for h in p["history"] if "chain_tau" in h and "n_alpha" in h] for n, p in weights.items()}
    histories = dict([(n, points) for n, points in histories.items() if points][:MAX_ARMS])
    if not histories:
        return None
    figure, (left, right) = new_axes(8.0, 3.4, ncols=2)
    for points, style in zip(histories.values(), _styles(histories), strict=True):
        tokens = [h["tokens"] / 1e6 for h in points]
        left.plot(tokens, [h["chain_tau"] for h in points], markersize=3.5, linewidth=1.1, **style)
        right.plot(tokens, [h["n_alpha"][0] for h in points], markersize=3.5, linewidth=1.1, **style | {"label": None})
    left.set(xlabel="training tokens seen (millions)", ylabel="held-out tau, chain of 5")
    right.set(xlabel="training tokens seen (millions)", ylabel="held-out 0-alpha")
    _legend(figure, left)
    return figure


def training_memory(entries: Sequence[Entry]) -> Figure | None:
    """Peak memory and seconds of a training step against simulated steps (Beagle, section 4)."""
    series: dict[str, dict[int, list[Mapping[str, float]]]] = {}
    for e, values in _measured([e for e in entries if _steps(e)], "training", ("peak", "seconds")):
        series.setdefault(e.arm["drafter"]["name"], {})[_steps(e)] = values
    if not series:
        return None
    figure, (left, right) = new_axes(8.0, 3.0, ncols=2)
    for points, style in zip(series.values(), _styles(series), strict=True):
        steps = sorted(points)
        for axes, name, unit in ((left, "peak", 2**30), (right, "seconds", 1)):
            _points(axes, steps, [repeated([v[name] / unit for v in points[n]]) for n in steps], **style)
    left.set(xlabel="simulated steps", ylabel="peak memory of a step, GiB", ylim=(0, None))
    right.set(xlabel="simulated steps", ylabel="seconds a training step", ylim=(0, None))
    _legend(figure, left)
    return figure


def _steps(e: Entry) -> int:
    """Simulated steps of a drafter's training; 0 if unknown."""
    steps: Any = e.arm["drafter"].get("steps")
    return steps if isinstance(steps, int) and 0 < steps < 100 else 0


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


def theory(entries: Sequence[Entry]) -> Figure | None:
    """Leviathan et al.: tokens a pass and speed-up of a chain by acceptance alpha; measured greedy chains as points."""
    chains = _chains(entries)[:MAX_ARMS]
    if not chains:
        return None
    alpha = np.linspace(0.01, 0.99, 99)
    figure, (left, right) = new_axes(8.0, 3.4, ncols=2)
    for gamma in sorted({2, 5, *map(_gamma, chains)}):
        expected = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        for axes, curve, top in ((left, expected, 6.0), (right, expected / (gamma * COST + 1), 4.0)):
            inside = curve < 0.97 * top
            axes.plot(alpha, curve, color="0.6", linewidth=1)
            axes.text(alpha[inside][-1], curve[inside][-1], f"$\\gamma$={gamma}", fontsize="small", ha="right", va="bottom")
    for e, style in zip(chains, _styles(e.title for e in chains), strict=True):
        mean = interval(RATES["alpha"], e.totals)
        assert mean is not None
        left.plot(mean.value, e.summary.tau, **style | {"linestyle": ""})
        if e.summary.speed_up and not e.replayed:
            right.plot(mean.value, e.summary.speed_up.value, **style | {"linestyle": "", "label": None})
    left.set(xlabel="alpha, share of tried tokens that are accepted", ylabel="tokens a target pass", ylim=(1, 6))
    right.set(xlabel=f"alpha; curves at {COST:g} target passes a draft step", ylabel="speed-up", ylim=(0, 4))
    _legend(figure, left)
    return figure


def _chains(entries: Sequence[Entry]) -> list[Entry]:
    """Greedy chains with an acceptance."""
    return [e for e in entries if _gamma(e) and e.temperature == 0 and interval(RATES["alpha"], e.totals) is not None]


def draft_vocabularies(entries: Sequence[Entry]) -> Figure | None:
    """tau and speed-up by the number of ids for which a drafter's head is multiplied."""
    arms = sorted(((e, ids) for e in entries if (ids := _ids(e))), key=lambda arm: arm[1])
    names = list(dict.fromkeys(str(e.arm["drafter"]["name"]) for e in entries if _ids(e)))
    sizes = sorted({ids for _, ids in arms})
    if len(sizes) < 2:
        return None
    kinds = [timed for timed in (False, True) if any(e.replayed != timed for e, _ in arms)]  # no panel without rows
    figure, grid = new_axes(4.0 * len(kinds), 3.4, ncols=len(kinds), squeeze=False)
    for panel, timed in zip(grid[0], kinds, strict=True):
        for name, style in zip(names, _styles(names), strict=True):
            own = [(ids, e.summary) for e, ids in arms if e.arm["drafter"]["name"] == name and e.replayed != timed]
            points = [(ids, value) for ids, s in own if (value := s.speed_up if timed else s.tau_interval)]
            if points:
                _points(panel, [ids for ids, _ in points], [value for _, value in points], **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{ids:,}" for ids in sizes], rotation=45, ha="right")
        panel.minorticks_off()
        label = "speed-up over plain decoding" if timed else "tau, tokens a target pass"
        panel.set(xlabel="ids that the head is multiplied for", ylabel=label)
    _legend(figure, grid[0][0])
    return figure


def _ids(e: Entry) -> int:
    """Number of ids for which an arm of the study of vocabularies multiplies the LM head; 0 for other entries."""
    if e.study != VOCABULARY or e.name == BASELINE:
        return 0
    drafter: Mapping[str, Any] = e.arm["drafter"]
    target = e.header["target"].get("vocabulary", 0)
    groups, active = drafter.get("groups"), drafter.get("active")
    if isinstance(groups, int) and isinstance(active, int):  # a router
        return target * active // groups
    return int(drafter.get("vocabulary") or target)


def _gamma(e: Entry) -> int:
    """Length of the chain that an arm drafts; 0 for other trees."""
    gamma = e.growth.get("gamma", 0) if str(e.growth.get("_target_")).endswith(".Chain") else 0
    return gamma if isinstance(gamma, int) else 0


def draw(
    entries: Sequence[Entry], chains: Sequence[Entry], weights: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[Figure | None, str]]:
    """Name -> figure and title. entries: of one target. weights: drafter -> provenance."""
    drafting = _measured(entries, "drafting", ("ms",))
    vocabularies = "Draft vocabularies: what few ids keep of tau, and what they bring in speed"
    return {
        "target_pass": (tree_cost(entries), "Cost of a target pass by tree size"),
        "head_share": (head_share(entries), f"The LM head's share of drafting{left_out(len(drafting))}"),
        "vocabularies": (draft_vocabularies(entries), vocabularies),
        "theory": (
            theory(chains),
            f"Leviathan's theory of chains (curves), with measured chains (points){left_out(len(_chains(chains)))}",
        ),
        "learning_curves": (learning_curves(weights), f"Learning curves on held-out answers{left_out(len(weights))}"),
        "training_memory": (training_memory(entries), "What simulated steps cost in training"),
    }
