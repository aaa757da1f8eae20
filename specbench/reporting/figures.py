"""The papers' figures, redrawn from our own rows and what was measured beside them. Colours are Okabe and Ito's.

Every function draws one figure from what is there and returns it, or None where nothing of the kind was measured. Text
keeps its size when a figure fills half a page; every series has its own marker or hatch beside its colour.
"""

import itertools
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

from specbench.metrics import BASELINE, RATES, Interval, interval, repeated
from specbench.reporting.cells import Entry
from specbench.reporting.text import mathtext

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX<>*"
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")
PHASES = ("draft", "target", "verify", "rest")


def _styles(names: Iterable[str]) -> list[dict[str, Any]]:
    """Colour, marker and line of every series; the same order gives the same look."""
    marks = zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), itertools.cycle(["-", "--", "-.", ":"]), strict=False)
    return [
        {"color": c, "marker": m, "linestyle": s, "label": mathtext(n)} for n, (c, m, s) in zip(names, marks, strict=False)
    ]


def _axes(width: float = 5.0, height: float = 3.4, **options: Any) -> tuple[Figure, Any]:
    return plt.subplots(figsize=(width, height), layout="constrained", **options)


def _legend(axes: Axes, columns: int = 1) -> None:
    """Inside the axes, where lines leave room."""
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=columns, framealpha=0.6)


def _legend_above(figure: Figure, axes: Axes) -> None:
    """Above the axes, where bars and points leave none."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    room = figure.get_figwidth() * 12  # letters of this size, handles included
    columns = max(1, min(4, int(room / (max(map(len, labels), default=1) + 7))))
    figure.legend(handles, labels, fontsize="small", ncols=columns, loc="outside upper center", frameon=False)


def speed_up_bars(entries: Sequence[Entry]) -> Figure | None:
    """Speed-up over plain decoding by dataset (and target), with 95% intervals."""
    found = [e for e in entries if e.name != BASELINE and e.summary.speed_up is not None]
    if not found:
        return None
    decoded = [setting or e.dataset for e, setting in zip(found, _settings(found), strict=True)]
    bars = {(e.name, setting): e for e, setting in zip(found, decoded, strict=True)}
    settings, names = _unique(decoded), _unique(e.name for e in found)
    figure, axes = _axes(max(5.0, 0.45 * len(names) * len(settings)))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        labelled = False
        for j, setting in enumerate(settings):
            e = bars.get((name, setting))
            if e is None or e.summary.speed_up is None:
                continue
            up = e.summary.speed_up
            axes.bar(
                j - 0.4 + (i + 0.5) * width,
                up.value,
                0.9 * width,
                yerr=_errors(up),
                color=COLOURS[i % len(COLOURS)],
                hatch=HATCHES[i // len(COLOURS) % len(HATCHES)],
                edgecolor="black",
                linewidth=0.4,
                capsize=2,
                label=None if labelled else mathtext(name),
            )
            labelled = True
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(settings)), list(map(mathtext, settings)))
    axes.set_ylabel("speed-up over plain decoding")
    _legend_above(figure, axes)
    return figure


def _settings(entries: Sequence[Entry]) -> list[str]:
    """What was decoded, as far as it differs between the entries: target, dataset, temperature."""
    parts = [(e.model, e.dataset, "greedy" if e.temperature == 0 else f"T={e.temperature}") for e in entries]
    differing = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    return [", ".join(itertools.compress(part, differing)) for part in parts]


def _named(entries: Sequence[Entry]) -> list[str]:
    """The drafters, with their settings where there are several."""
    return [f"{e.name} ({setting})" if setting else e.name for e, setting in zip(entries, _settings(entries), strict=True)]


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def step_alphas(entries: Sequence[Entry]) -> Figure | None:
    """Acceptance by draft step, given that the step before was accepted (Beagle, Figures 3-4; CORAL, Figure 6)."""
    found = [e for e in entries if e.name != BASELINE and e.summary.alphas]
    if not found:
        return None
    figure, axes = _axes()
    for e, style in zip(found, _styles(_named(found)), strict=True):
        tried = e.totals.pooled()["tried"]
        depths = [i for i in range(len(e.summary.alphas)) if i < len(tried) and tried[i] >= 10]  # fewer say nothing
        axes.plot([d + 1 for d in depths], [e.summary.alphas[d] for d in depths], markersize=4, linewidth=1.2, **style)
    axes.set(xlabel="draft step", ylabel="step-alpha", ylim=(0, 1))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    _legend(axes, 2)
    return figure


def tau_against_speed_up(entries: Sequence[Entry]) -> Figure | None:
    """Accepting more is not yet being faster."""
    found = [e for e in entries if e.name != BASELINE and e.summary.speed_up and e.summary.tau_interval]
    if not found:
        return None
    figure, axes = _axes()
    for e, style in zip(found, _styles(_named(found)), strict=True):
        up, tau = e.summary.speed_up, e.summary.tau_interval
        assert up is not None and tau is not None
        axes.errorbar(
            tau.value,
            up.value,
            xerr=_errors(tau),
            yerr=_errors(up),
            capsize=2,
            **style | {"linestyle": ""},
        )
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="tau, tokens a target pass", ylabel="speed-up over plain decoding")
    _legend_above(figure, axes)
    return figure


def time_split(entries: Sequence[Entry]) -> Figure | None:
    """Milliseconds a cycle by phase."""
    found = list(
        {(e.name, e.model, e.dataset, e.temperature): e for e in entries if e.summary.split["target"] > 0}.values()
    )
    if not found:
        return None
    sums = [e.totals.pooled() for e in found]
    cycle = np.array([1000 * float(s["seconds"] / s["cycles"]) for s in sums])
    parts = {phase: cycle * [e.summary.split[phase] for e in found] for phase in PHASES}
    return _stacked(_named(found), parts, "milliseconds a cycle")


def head_share(entries: Sequence[Entry]) -> Figure | None:
    """What drafting a cycle costs: LM head, the drafter's own network, the rest (CORAL, Figure 2)."""
    labels = {"head": "LM head", "network": "the drafter's layers", "rest": "growth and caches"}
    found = _measured(entries, "drafting", ("ms", *labels))
    if not found:
        return None
    middle = [sorted(values, key=lambda v: v["ms"])[len(values) // 2] for _, values in found]
    parts = {label: np.array([v["ms"] * v[part] for v in middle]) for part, label in labels.items()}
    figure = _stacked([e.name for e, _ in found], parts, "milliseconds of drafting a cycle")
    whole = [repeated([v["ms"] for v in values]) for _, values in found]
    figure.axes[0].errorbar(
        [w.value for w in whole], range(len(whole)), xerr=_bars(whole), fmt="none", ecolor="black", capsize=2
    )
    return figure


def _measured(entries: Sequence[Entry], what: str, names: Iterable[str]) -> list[tuple[Entry, list[Mapping[str, float]]]]:
    """The arms of the one cell in which most were measured so, with the repetitions that hold these values."""
    cells: dict[Path, list[tuple[Entry, list[Mapping[str, float]]]]] = {}
    for e in entries:
        if whole := [values for values in e.measured.get(what, ()) if set(names) <= set(values)]:
            cells.setdefault(e.path, []).append((e, whole))
    return max(cells.values(), key=len, default=[])


def _stacked(names: Sequence[str], parts: Mapping[str, np.ndarray], label: str) -> Figure:
    """One horizontal bar a name, made of parts."""
    figure, axes = _axes(5.0, 0.35 * len(names) + 1.2)
    left = np.zeros(len(names))
    for i, (part, values) in enumerate(parts.items()):
        axes.barh(range(len(names)), values, left=left, color=COLOURS[i], hatch=HATCHES[i], label=part, edgecolor="white")
        left += values
    axes.set_yticks(range(len(names)), list(map(mathtext, names)))
    axes.invert_yaxis()
    axes.set_xlabel(label)
    _legend_above(figure, axes)
    return figure


def _errors(found: Interval) -> list[list[float]]:
    """An interval as Matplotlib's error bars want it."""
    return [[max(0.0, found.value - found.low)], [max(0.0, found.high - found.value)]]


def _bars(found: Sequence[Interval]) -> np.ndarray:
    """The same for several, [2, N]."""
    return np.hstack([_errors(each) for each in found])


def router_grid(entries: Sequence[Entry], metric: str = "speed_up") -> Figure | None:
    """A rate over groups x active groups of the LM-head router (CORAL, Table 4)."""
    cells = {}
    for e in entries:
        name, _, rest = e.name.partition("-N")
        n, _, g = rest.partition("-top")
        if name.endswith("router") and n.isdigit() and g.isdigit():
            found = interval(RATES[metric], e.totals)
            cells[int(n), int(g)] = found.value if found else float("nan")
    if not cells:
        return None
    rows, columns = sorted({n for n, _ in cells}), sorted({g for _, g in cells})
    grid = np.array([[cells.get((n, g), float("nan")) for g in columns] for n in rows])
    figure, axes = _axes(4.0, 3.0)
    image = axes.imshow(grid, cmap="cividis", aspect="auto")
    for i, j in itertools.product(range(len(rows)), range(len(columns))):
        dark = grid[i, j] < (np.nanmin(grid) + np.nanmax(grid)) / 2
        axes.text(j, i, f"{grid[i, j]:.2f}", ha="center", va="center", color="white" if dark else "black")
    axes.set_xticks(range(len(columns)), [f"top {g}" for g in columns])
    axes.set_yticks(range(len(rows)), [f"N = {n}" for n in rows])
    axes.set(xlabel="active groups", ylabel="groups")
    figure.colorbar(image, label={"speed_up": "speed-up", "tau": "tau"}.get(metric, metric))
    return figure


def learning_curves(weights: Mapping[str, Mapping[str, Any]]) -> Figure | None:
    """Held-out chain tau and 0-alpha against tokens seen (Beagle, Figures 5-9). weights: drafter -> provenance."""
    measured = {n: [h for h in p["history"] if "chain_tau" in h and "n_alpha" in h] for n, p in weights.items()}
    found = {n: points for n, points in measured.items() if points}
    if not found:
        return None
    figure, (left, right) = _axes(8.0, 3.4, ncols=2)
    for points, style in zip(found.values(), _styles(found), strict=True):
        tokens = [h["tokens"] / 1e6 for h in points]
        left.plot(tokens, [h["chain_tau"] for h in points], markersize=3.5, linewidth=1.1, **style)
        right.plot(tokens, [h["n_alpha"][0] for h in points], markersize=3.5, linewidth=1.1, **style | {"label": None})
    left.set(xlabel="training tokens seen (millions)", ylabel="held-out tau, chain of 5")
    right.set(xlabel="training tokens seen (millions)", ylabel="held-out 0-alpha")
    _legend(left, 2)
    right.grid(alpha=0.3)
    return figure


def training_memory(entries: Sequence[Entry]) -> Figure | None:
    """Peak memory and seconds of a training step against simulated steps (Beagle, section 4)."""
    stepped = [e for e in entries if _steps(e)]
    series: dict[str, dict[int, list[Mapping[str, float]]]] = {}
    for e, values in _measured(stepped, "training", ("peak", "seconds")):
        series.setdefault(e.arm["drafter"]["name"], {})[_steps(e)] = values
    if not series:
        return None
    figure, (left, right) = _axes(8.0, 3.0, ncols=2)
    for points, style in zip(series.values(), _styles(series), strict=True):
        steps = sorted(points)
        for axes, name, unit in ((left, "peak", 2**30), (right, "seconds", 1)):
            found = [repeated([v[name] / unit for v in points[n]]) for n in steps]
            axes.errorbar(steps, [f.value for f in found], yerr=_bars(found), capsize=2, **style)
    left.set(xlabel="simulated steps", ylabel="peak memory of a step, GiB", ylim=(0, None))
    right.set(xlabel="simulated steps", ylabel="seconds a training step", ylim=(0, None))
    _legend(left)
    _legend(right)
    return figure


def _steps(e: Entry) -> int:
    """Simulated steps of a drafter's training; 0 where its configuration does not say."""
    said: Any = e.arm["drafter"].get("steps")
    return said if isinstance(said, int) and 0 < said < 100 else 0


def tree_cost(entries: Sequence[Entry]) -> Figure | None:
    """Milliseconds of one target pass by its size."""
    found = _measured(entries, "target_pass", ())
    if not found:
        return None
    _, repetitions = found[0]
    sizes = {int(name[3:]): name for name in repetitions[0] if re.fullmatch(r"ms_\d{1,9}", name)}
    points = {n: repeated([v[name] for v in repetitions if name in v]) for n, name in sorted(sizes.items())}
    figure, axes = _axes()
    values = [p.value for p in points.values()]
    axes.errorbar(list(points), values, yerr=_bars(list(points.values())), color=COLOURS[0], marker="o", capsize=2)
    axes.set(xlabel="nodes in the pass, root included", ylabel="milliseconds", ylim=(0, None))
    axes.grid(alpha=0.3)
    return figure


def theory(entries: Sequence[Entry]) -> Figure | None:
    """Leviathan et al.: tokens a pass and speed-up of a chain by acceptance alpha, with our chains on the curves."""
    alpha = np.linspace(0.01, 0.99, 99)
    figure, (left, right) = _axes(8.0, 3.4, ncols=2)
    gammas = ("2", "3", "5", "7")
    for gamma, style in zip(gammas, _styles(gammas), strict=True):
        expected = (1 - alpha ** (int(gamma) + 1)) / (1 - alpha)
        look = style | {"marker": "", "label": f"gamma {gamma}"}
        left.plot(alpha, expected, **look)
        right.plot(alpha, expected / (int(gamma) * 0.1 + 1), **look | {"label": f"gamma {gamma}, c 0.1"})
    chains = [e for e in entries if e.name.endswith("-chain") or e.name == "vanilla"]
    for e, style in zip(chains, _styles(_named(chains)), strict=True):
        alpha_here = interval(RATES["alpha"], e.totals)
        if alpha_here is None:
            continue
        mean = alpha_here.value
        left.plot(mean, e.summary.tau, **style | {"linestyle": ""})
        if e.summary.speed_up:
            right.plot(mean, e.summary.speed_up.value, **style | {"linestyle": "", "label": None})
    left.set(xlabel="alpha", ylabel="tokens a target pass", ylim=(1, 6))
    right.set(xlabel="alpha", ylabel="speed-up", ylim=(0, 4))
    for axes in (left, right):
        _legend(axes)
    return figure


def draw_all(
    entries: Sequence[Entry],
    everything: Sequence[Entry],
    weights: Mapping[str, Mapping[str, Any]],
    folder: Path,
) -> dict[str, str]:
    """Every figure that can be drawn, as PNG and SVG in a folder.

    Args:
        entries: of the benchmark itself, the target that matters most first. everything: ablations too.

    Returns:
        name -> what it shows, of those drawn.
    """
    # Of several targets bars stand side by side; curves would hide each other and show the first target alone.
    first = [e for e in entries if e.model == entries[0].model]
    everything = [e for e in everything if not entries or e.model == entries[0].model]
    made = {
        "speed_up": (speed_up_bars(entries), "Speed-up by dataset"),
        "step_alpha": (step_alphas(first), "Acceptance by draft step"),
        "tau_speed_up": (tau_against_speed_up(first), "Accepting more against being faster"),
        "time_split": (time_split(first), "Where a cycle's time goes"),
        "head_share": (head_share(everything), "The LM head's share of drafting"),
        "router_speed_up": (router_grid(everything, "speed_up"), "LM-head router: speed-up by groups and active groups"),
        "router_tau": (router_grid(everything, "tau"), "LM-head router: tau by groups and active groups"),
        "learning_curves": (learning_curves(weights), "Learning curves"),
        "training_memory": (training_memory(everything), "What simulated steps cost in training"),
        "target_pass": (tree_cost(everything), "Cost of a target pass by tree size"),
        "theory": (theory(everything), "Leviathan's theory of chains, with measured chains"),
    }
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
