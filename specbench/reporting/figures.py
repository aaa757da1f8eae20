"""The papers' figures, redrawn from our own rows and what was measured beside them.

Every function draws one figure from what is there and returns it, or None where nothing of the kind was measured. A drafter
looks the same in all of them (`specbench/reporting/look.py`); no legend lies over data.
"""

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
from specbench.reporting import insight_figures, look
from specbench.reporting.cells import Entry
from specbench.reporting.overview import Overview, families, ranking
from specbench.reporting.tables import known_depths, shown
from specbench.reporting.text import mathtext

COLOURS = look.COLOURS
LEVIATHAN = "leviathan"  # the study of chains, where it was run
VOCABULARY = "vocabulary"  # and that of draft vocabularies
PHASES = ("draft", "target", "verify", "rest")
PARTS = (("#3d5a80", ""), ("#b8c4d6", ""), ("#7a7a7a", "//"), ("#e3ddd3", ".."))  # of a whole: no drafter's colour


def _styles(names: Iterable[str]) -> list[dict[str, Any]]:
    """Colour, marker and line of every series."""
    return [look.line(n) | {"label": mathtext(n)} for n in names]


def _axes(width: float = 6.4, height: float = 3.8, **options: Any) -> tuple[Figure, Any]:
    return plt.subplots(figsize=(width, height), layout="constrained", **options)


def _room(series: Sequence[Any]) -> float:
    """Inches for a legend of so many lines beside the axes."""
    return max(3.8, 0.19 * len(series) + 0.6)


def _grid(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def _legend(axes: Axes, columns: int = 1) -> None:
    """Beside the axes: over data it would hide some."""
    _grid(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(*axes.get_legend_handles_labels(), fontsize="small", ncols=columns, loc="outside right upper",
                           frameon=False)  # fmt: skip


def _legend_above(figure: Figure, axes: Axes) -> None:
    """Above the axes, where they need the whole width."""
    _grid(axes)
    handles, labels = axes.get_legend_handles_labels()
    room = figure.get_figwidth() * 12  # letters of this size, handles included
    columns = max(1, min(4, int(room / (max(map(len, labels), default=1) + 7))))
    figure.legend(handles, labels, fontsize="small", ncols=columns, loc="outside upper center", frameon=False)


def speed_up_bars(entries: Sequence[Entry]) -> Figure | None:
    """Speed-up over plain decoding with 95% intervals, fastest first; a drafter's trees side by side."""
    found = [e for e in ranking(entries) if e.name != BASELINE and e.summary.speed_up is not None]
    if not found:
        return None
    figure, axes = _axes(6.4, 0.3 * len(found) + 0.9)
    place, ticks = 0.0, []
    right = max(max(e.summary.speed_up.high for e in found if e.summary.speed_up), 1.0)
    for arms in families(found):
        for e in arms:
            up = e.summary.speed_up
            assert up is not None
            axes.barh(place, up.value, 0.8, xerr=_errors(up), capsize=2.5, error_kw={"linewidth": 1}, **look.bar(e.title))
            sure = "bold" if up.low > 1 else "normal"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # the line at 1 passes behind
            at = max(up.high, up.value) + 0.02 * right
            axes.text(at, place, shown(up), va="center", fontsize="small", weight=sure, bbox=box)
            ticks.append(place)
            place += 0.85 if len(arms) > 1 else 1.0
        place += 0.15 * (len(arms) > 1)
    axes.set_yticks(ticks, [mathtext(e.title) for arms in families(found) for e in arms])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1, linestyle="--", zorder=1.5)
    axes.text(1, axes.get_ylim()[1], "plain decoding", ha="center", va="bottom", fontsize="small")
    axes.set_xlim(0, 1.28 * right)
    axes.set_xlabel("speed-up over plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def step_alphas(entries: Sequence[Entry]) -> Figure | None:
    """Acceptance by draft step, given that the step before was accepted (Beagle, Figures 3-4; CORAL, Figure 6)."""
    found = [(e, known_depths(e)) for e in entries if e.name != BASELINE and known_depths(e)]
    if not found:
        return None
    figure, axes = _axes(height=_room(found))
    for (e, depths), style in zip(found, _styles(e.title for e, _ in found), strict=True):
        axes.plot(range(1, depths + 1), e.summary.alphas[:depths], markersize=5, linewidth=1.2, **style)
    axes.set(xlabel="draft step", ylabel="accepted, given the step before", ylim=(0, 1))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    _legend(axes)
    return figure


def tau_against_speed_up(entries: Sequence[Entry]) -> Figure | None:
    """Accepting more is not yet being faster."""
    found = [e for e in entries if e.name != BASELINE and e.summary.speed_up and e.summary.tau_interval]
    if not found:
        return None
    figure, axes = _axes(height=_room(found))
    for e, style in zip(found, _styles(e.title for e in found), strict=True):
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
    _legend(axes)
    return figure


def time_split(entries: Sequence[Entry]) -> Figure | None:
    """Milliseconds a cycle by phase."""
    found = [e for e in entries if e.summary.split["target"] > 0]
    if not found:
        return None
    sums = [e.totals.pooled() for e in found]
    cycle = np.array([1000 * float(s["seconds"] / s["cycles"]) for s in sums])
    parts = {phase: cycle * [e.summary.split[phase] for e in found] for phase in PHASES}
    return _stacked([e.title for e in found], parts, "milliseconds a cycle")


def head_share(entries: Sequence[Entry]) -> Figure | None:
    """What drafting a cycle costs: LM head, the drafter's own network, the rest (CORAL, Figure 2)."""
    labels = {"head": "LM head", "network": "the drafter's layers", "rest": "growth and caches"}
    found = _measured(entries, "drafting", ("ms", *labels))
    if not found:
        return None
    middle = [sorted(values, key=lambda v: v["ms"])[len(values) // 2] for _, values in found]
    parts = {label: np.array([v["ms"] * v[part] for v in middle]) for part, label in labels.items()}
    figure = _stacked([e.title for e, _ in found], parts, "milliseconds of drafting a cycle")
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
    figure, axes = _axes(6.4, 0.3 * len(names) + 1.2)
    left = np.zeros(len(names))
    for (part, values), (colour, hatch) in zip(parts.items(), PARTS, strict=False):
        axes.barh(range(len(names)), values, left=left, color=colour, hatch=hatch, label=part, edgecolor="white")
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
    """A rate over groups x active groups of the LM-head router (CORAL, Table 4), where most of them were decoded.

    Colours run from the lowest end of an interval to the highest: what looks different is.
    """
    by_cell: dict[Any, dict[tuple[int, int], Interval]] = {}
    for e in entries:
        drafter: Mapping[str, Any] = e.arm["drafter"]
        n, g, base = drafter.get("groups"), drafter.get("active"), str(drafter.get("base"))
        found = interval(RATES[metric], e.totals)
        if isinstance(n, int) and isinstance(g, int) and found and not (metric == "speed_up" and e.replayed):
            of = e.study, e.collection, e.dataset, e.temperature, e.replayed, base
            by_cell.setdefault(of, {})[n, g] = found
    grid = max(by_cell.values(), key=len, default={})
    if len(grid) < 2:
        return None
    rows, columns = sorted({n for n, _ in grid}), sorted({g for _, g in grid})
    low, high = min(f.low for f in grid.values()), max(f.high for f in grid.values())
    values = np.array([[grid[n, g].value if (n, g) in grid else float("nan") for g in columns] for n in rows])
    figure, axes = _axes(1.1 * len(columns) + 2.4, 0.62 * len(rows) + 1.2)
    image = axes.imshow(values, cmap="cividis", aspect="auto", vmin=low, vmax=high)
    for (n, g), found in grid.items():
        dark = found.value < (low + high) / 2
        said = f"{found.value:.2f}\n[{found.low:.2f}, {found.high:.2f}]"
        axes.text(columns.index(g), rows.index(n), said, ha="center", va="center", fontsize="small",
                  color="white" if dark else "black")  # fmt: skip
    axes.set_xticks(range(len(columns)), list(map(str, columns)))
    axes.set_yticks(range(len(rows)), list(map(str, rows)))
    axes.set(xlabel="active groups", ylabel="groups")
    figure.colorbar(image, label=METRICS.get(metric, metric))
    return figure


METRICS = {"speed_up": "speed-up", "tau": "tau"}


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
    _legend(left)
    _grid(right)
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
    _grid(right)
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


def cost_of_cycles(passes: Mapping[int, Mapping[str, float]], parts: Mapping[str, Mapping[int, float]]) -> Figure:
    """What a cycle is made of: the target's pass by nodes and context, a draft level by its width.

    passes: by tokens before the tree, `ms_<nodes>`. parts: `first` and `level`, seconds by width.
    """
    figure, (left, right) = _axes(8.0, 3.4, ncols=2)
    for number, (context, found) in enumerate(passes.items()):
        points = {int(name[3:]): ms for name, ms in found.items()}
        left.plot(
            list(points),
            list(points.values()),
            color=COLOURS[number % len(COLOURS)],
            marker="o",
            label=f"{context} tokens before",
        )
    for number, (name, title) in enumerate((("first", "first level, observing included"), ("level", "one level more"))):
        found_s = parts[name]
        right.plot(list(found_s), [1000 * s for s in found_s.values()], color=COLOURS[number], marker="o", label=title)
    left.set(xlabel="nodes in the pass, root included", ylabel="milliseconds", ylim=(0, None))
    right.set(xlabel="nodes of a level", ylabel="milliseconds", ylim=(0, None))
    for axes in (left, right):
        _grid(axes)
        axes.legend(fontsize="small", frameon=False)
    return figure


def theory(entries: Sequence[Entry]) -> Figure | None:
    """Leviathan et al.: tokens a pass and speed-up of a chain by acceptance alpha, with measured greedy chains."""
    chains = [e for e in entries if _gamma(e) and e.temperature == 0 and interval(RATES["alpha"], e.totals) is not None]
    if not chains:
        return None
    alpha = np.linspace(0.01, 0.99, 99)
    figure, (left, right) = _axes(8.0, 3.4, ncols=2)
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
    _legend(left)
    _grid(right)
    return figure


def draft_vocabularies(entries: Sequence[Entry]) -> Figure | None:
    """Tau and speed-up by how many ids a drafter's head is multiplied for; a router by the share that it chooses."""
    found = [(e, ids) for e in entries if (ids := _ids(e))]
    names = list(dict.fromkeys(str(e.arm["drafter"]["name"]) for e, _ in found))
    if len({ids for _, ids in found}) < 2:
        return None
    kinds = [timed for timed in (False, True) if any(e.replayed != timed for e, _ in found)]  # no panel without rows
    figure, grid = _axes(4.0 * len(kinds), 3.4, ncols=len(kinds), squeeze=False)
    panels = grid[0]
    sizes = sorted({ids for _, ids in found})
    found.sort(key=lambda pair: pair[1])
    for panel, timed in zip(panels, kinds, strict=True):
        for name, style in zip(names, _styles(names), strict=True):
            own = [(ids, e.summary) for e, ids in found if e.arm["drafter"]["name"] == name and e.replayed != timed]
            points = [(ids, value) for ids, s in own if (value := s.speed_up if timed else s.tau_interval)]
            if points:
                values = [value for _, value in points]
                bars = {"yerr": _bars(values), "capsize": 2}
                panel.errorbar([ids for ids, _ in points], [v.value for v in values], **bars, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{ids:,}" for ids in sizes], rotation=45, ha="right")
        panel.minorticks_off()
        label = "speed-up over plain decoding" if timed else "tau, tokens a target pass"
        panel.set(xlabel="ids that the head is multiplied for", ylabel=label)
        _grid(panel)
    _legend(panels[0])
    return figure


def _ids(e: Entry) -> int:
    """For how many ids an arm of the study of vocabularies multiplies the LM head; 0 for others."""
    if e.study != VOCABULARY or e.name == BASELINE:
        return 0
    drafter: Mapping[str, Any] = e.arm["drafter"]
    every = e.header["target"].get("vocabulary", 0)
    groups, active = drafter.get("groups"), drafter.get("active")
    if isinstance(groups, int) and isinstance(active, int):
        return every * active // groups
    return int(drafter.get("vocabulary") or every)


COST = 0.1  # of a draft step in target passes, for the curves


def _gamma(e: Entry) -> int:
    """Length of the chain that an arm drafts; 0 if it drafts no chain, or nobody knows."""
    gamma = e.growth.get("gamma", 0) if str(e.growth.get("_target_")).endswith(".Chain") else 0
    return gamma if isinstance(gamma, int) else 0


def draw_all(
    view: Overview,
    everything: Sequence[Entry],
    weights: Mapping[str, Mapping[str, Any]],
    folder: Path,
) -> dict[str, str]:
    """Every figure that can be drawn, as PNG and SVG in a folder.

    Args:
        view: of the benchmark itself, of the target that matters most: curves of two would hide each other. everything:
            the studies' entries too.

    Returns:
        name -> what it shows, of those drawn.
    """
    timed, accepting = view.timed(view.first), view.accepting(view.first)
    everything = [e for e in everything if not view.entries or e.model == view.entries[0].model]
    leviathan = Overview(e for e in everything if e.study == LEVIATHAN)
    chains = leviathan.timed(leviathan.first) or timed
    made = {
        "speed_up": (
            speed_up_bars(timed),
            "Speed-up over plain decoding, with 95% intervals; a drafter's trees stand together",
        ),
        "step_alpha": (step_alphas(accepting), "Acceptance by draft step, given that the step before was accepted"),
        "tau_speed_up": (tau_against_speed_up(timed), "Accepting more is not yet being faster"),
        "time_split": (time_split(timed), "Where a cycle's time goes"),
        "head_share": (head_share(everything), "The LM head's share of drafting"),
        "router_speed_up": (
            router_grid(everything, "speed_up"),
            "LM-head router: speed-up; the scale runs from the lowest to the highest end of an interval",
        ),
        "router_tau": (
            router_grid(everything, "tau"),
            "LM-head router: tau; the scale runs from the lowest to the highest end of an interval",
        ),
        "learning_curves": (learning_curves(weights), "Learning curves on held-out answers"),
        "training_memory": (training_memory(everything), "What simulated steps cost in training"),
        "target_pass": (tree_cost(everything), "Cost of a target pass by tree size"),
        "vocabularies": (
            draft_vocabularies(everything),
            "Draft vocabularies: what few ids keep of tau, and what they bring in speed",
        ),
        "theory": (theory(chains), "Leviathan's theory of chains (curves), with measured chains (points)"),
    }
    made |= {name: (figure, title) for name, title, figure in insight_figures.draw(view.known(view.first), timed)}
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
