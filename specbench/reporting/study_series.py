"""The kinds of figures that a study can declare (`specbench/records/figures.py`), one function each.

Values come from the study's own entries alone; a paper's printed numbers stand beside them if they are of the same target,
arm, data set and temperature.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specbench.records.metrics import BASELINE, DEPTHS, METRICS, PHASES, step_alpha
from specbench.records.statistics import Interval, interval, repeated
from specbench.records.studies import PLACE
from specbench.records.totals import Rate
from specbench.reporting import beside, leviathan
from specbench.reporting.cells import Entry
from specbench.reporting.charts import Chart, Panel, Point, Series
from specbench.reporting.evidence import target_pass_ms
from specbench.reporting.study_rows import Rows, option_of, place_label, value
from specbench.reporting.tables import known_depths

TRAINED = {"tokens": ("training tokens seen (millions)", 1e6), "step": ("training steps", 1)}
METRIC_LABELS = {
    "tau": "tau, tokens a target pass",
    "speed_up": "speed-up over plain decoding",
    "tokens_per_s": "tokens a second",
    "token_ms": "ms until a sequence's next token",
    "draft_ms": "milliseconds of drafting a cycle",
    "answer_perplexity": "perplexity of the answers under the target",
    "answer_kl": "KL to the target, nats a token",
    "solved": "share of problems solved",
    "rouge_l": "ROUGE-L of summaries",
}
HISTORY_LABELS = {  # of what a training's history holds, besides acceptance by step
    "tau": METRIC_LABELS["tau"],
    "alpha0_top4": "first token among the 4 likeliest",
    "alpha0_top10": "first token among the 10 likeliest",
    "classification": "training loss, cross-entropy",
    "regression": "training loss, regression of states",
}
METRIC_LABELS |= {f"alpha{i}": f"step {i + 1} accepted, given the one before" for i in range(6)}
MEASURED_LABELS = {  # quantity -> label, unit
    "training.peak": ("peak memory of a training step, GiB", 2**30),
    "training.seconds": ("seconds a training step", 1),
    "memory.peak": ("peak memory while decoding, GiB", 2**30),
}
OPTION_LABELS = {
    "ids": "ids that the head is multiplied for",
    "nodes": "draft nodes a cycle",
    "parameters": "parameters that a draft pass multiplies",
    "drafter.steps": "simulated steps in training",
    "drafter.topk": "K of the Top-K loss",
    "drafter.topk_weight": "weight of the Top-K loss",
    "drafter.active": "active groups",
    "drafter.groups": "groups",
}
DRAFTING = {"head": "LM head", "network": "the drafter's layers", "rest": "growth and caches"}

Groups = Mapping[str, Sequence[str]]  # series -> arms


def _progress(figure: Mapping[str, Any], groups: Groups, rows: Rows) -> Chart:
    """Held-out curves; at their ends what was measured when decoding, of chains.

    A training that goes on from another arm's begins where that one ended, and is left out where that one has no rows.
    """
    x = figure.get("x", "tokens")
    label, unit = TRAINED[x]
    panels = []
    for metric in figure.get("y", ["alpha0", "alpha1", "alpha2"]):
        series = []
        for title, arms in groups.items():
            entries = [(e, _before(rows, arm, x)) for arm in arms if (e := rows.find(arm, {}))]
            found = [(e, before) for e, before in entries if math.isfinite(before)]
            curves = [[((at + before) / unit, v) for at, v in curve]
                      for e, before in found for curve in _histories(e, x, metric)]  # fmt: skip
            ends = [((_trained(e, x) + before) / unit, v) for e, before in found if beside.is_chain(e)
                    and _trained(e, x) and metric in METRICS and (v := value(e, metric))]  # fmt: skip
            series.append(Series(title, ends, curves, joined=False))
        step = "" if metric in HISTORY_LABELS else f"step {int(metric[5:]) + 1}"
        name = HISTORY_LABELS.get(metric, "accepted, given the step before")
        panels.append(Panel(label, name, series, step, share=metric.startswith("alpha")))
    notes = [
        "lines and small marks: held-out answers, or losses of training; with intervals: decoding with the trained drafter"
    ]
    short = [panel.title or panel.y for panel in panels if _longest(panel) == 1]
    notes += [f"known at the end of each training alone: {'; '.join(short)}"] if short else []
    return Chart(panels, notes)


def _longest(panel: Panel) -> int:
    """Points of the longest curve."""
    return max((len(curve) for s in panel.series for curve in s.curves), default=0)


def _histories(e: Entry, x: str, metric: str) -> Iterator[list[tuple[float, float]]]:
    """The learning curve of each training seed of an entry."""
    for label, arm in e.header["arms"].items():
        if arm.get("of", label) == e.name:
            history: Any = arm["weights"].get("history", [])
            points = [(float(point[x]), _at_point(point, metric)) for point in history if x in point]
            yield [p for p in points if math.isfinite(p[1])]


def _at_point(point: Mapping[str, Any], metric: str) -> float:
    if metric in HISTORY_LABELS:
        return float(point.get("chain_tau" if metric == "tau" else metric, math.nan))
    alphas, depth = point.get("n_alpha", []), int(metric.removeprefix("alpha"))
    return float(alphas[depth]) if depth < len(alphas) else math.nan


def _trained(e: Entry, x: str) -> float:
    """Tokens or steps of an arm's training; 0 if unknown."""
    return float(e.weights.get("tokens_seen" if x == "tokens" else "steps", 0))


def _before(rows: Rows, arm: str, x: str) -> float:
    """Tokens or steps of the trainings from which an arm's goes on; NaN if one of those has no rows."""
    start = rows.study["arms"][arm].get("start")
    if start is None:
        return 0.0
    e = rows.find(start, {})
    return _before(rows, start, x) + _trained(e, x) if e else math.nan


def _by_position(figure: Mapping[str, Any], groups: Groups, rows: Rows) -> Chart:
    panels = []
    for at in figure.get("panels", [{}]):
        series = []
        for title, (arm,) in groups.items():
            e = rows.find(arm, at)
            depths = min(known_depths(e), DEPTHS) if e else 0
            points = [(i + 1, v) for i in range(depths) if e and (v := interval(step_alpha(i), e.totals))]
            printed = [(i + 1, p) for i in range(DEPTHS) for p in rows.printed(arm, f"alpha{i}", at)]
            series.append(Series(title, points, printed=printed))
        panels.append(Panel("position in the draft", "accepted, given the one before", series, place_label(at), share=True))
    return Chart(panels)


def _stack(figure: Mapping[str, Any], groups: Groups, rows: Rows) -> Chart:
    if figure["parts"] == "drafting":
        return _drafting(groups, rows)
    per = "cycles" if figure["parts"] == "cycle" else "tokens"
    found = {title: e for title, (arm,) in groups.items() if (e := rows.find(arm, {}, "speed_up"))}

    def part(name: str) -> Rate:
        return lambda s: 1000 * s[name] / s[per]

    rates: dict[str, Rate] = {"drafting": part("draft"), "target": part("target"), "verification": part("verify")}
    rates["everything else"] = lambda s: 1000 * (s["seconds"] - sum(s[phase] for phase in PHASES)) / s[per]
    rates["whole"] = part("seconds")
    label = f"milliseconds a {'cycle' if per == 'cycles' else 'token'}"
    stacks = {t: {n: interval(r, e.totals) for n, r in rates.items()} for t, e in found.items()}
    return Chart([_stacked(label, stacks, groups)])


def _drafting(groups: Groups, rows: Rows) -> Chart:
    """Parts of the median repetition; the whole with its interval over repetitions."""
    stacks = {}
    for title, (arm,) in groups.items():
        repetitions = [values for values in rows.measured(arm, "drafting") if {"ms", *DRAFTING} <= set(values)]
        if repetitions:
            middle = sorted(repetitions, key=lambda values: values["ms"])[len(repetitions) // 2]
            parts = {name: middle["ms"] * middle[part] for part, name in DRAFTING.items()}
            stacks[title] = {name: Interval(ms, ms, ms) for name, ms in parts.items()}
            stacks[title]["whole"] = repeated([values["ms"] for values in repetitions])
    return Chart([_stacked("milliseconds of drafting a cycle", stacks, groups)])


def _stacked(label: str, stacks: Mapping[str, Mapping[str, Interval | None]], groups: Groups) -> Panel:
    """stacks: bar -> part -> value; the last part is the whole."""
    whole = {title: {n: v for n, v in parts.items() if v} for title, parts in stacks.items() if all(parts.values())}
    names = dict.fromkeys(name for parts in whole.values() for name in parts)
    series = [Series(name, [(i, parts[name]) for i, parts in enumerate(whole.values())]) for name in names]
    absent = [arm for title, arms in groups.items() for arm in arms if title not in whole]
    return Panel(label, "", series, shape="stack", ticks=list(whole), absent=absent)


def _bars(figure: Mapping[str, Any], groups: Groups, rows: Rows) -> Chart:
    by = figure["by"]
    temperatures = [None] if by == "temperature" else rows.values("temperature")
    panels = [_bar_panel(by, metric, {} if t is None else {"temperature": t}, groups, rows)
              for metric in figure["y"] for t in temperatures]  # fmt: skip
    titles = [f"T={t:g}" if len(temperatures) > 1 else "" for _ in figure["y"] for t in temperatures]
    return Chart([replace(panel, title=title) for panel, title in zip(panels, titles, strict=True)])


def _bar_panel(by: str, metric: str, at: Mapping[str, Any], groups: Groups, rows: Rows) -> Panel:
    """One metric; groups of bars by `by`, of which those without any value are left out."""
    arms = {title: arm for title, (arm,) in groups.items()}
    ticks: list[Any] = (
        list(arms) if by == "arm" else _categories(arms, metric, at, rows) if by == "category" else rows.values(by)
    )
    made: dict[str, list[tuple[Any, Interval | None, list[float]]]] = {}
    for title, arm in arms.items():
        for tick in ticks if by != "arm" else [title]:
            place = {**at, by: tick} if by in PLACE else at
            e = rows.find(arm, place, metric)
            printed = [] if by == "category" else rows.printed(arm, metric, place)
            made.setdefault(title, []).append((tick, value(e, metric, tick if by == "category" else None), printed))
    kept = [tick for tick in ticks if any(t == tick and (v or p) for line in made.values() for t, v, p in line)]
    place_of = {tick: float(i) for i, tick in enumerate(kept)}
    series = [
        Series(
            title, [(place_of[t], v) for t, v, _ in line if v], printed=[(place_of[t], n) for t, _, p in line for n in p]
        )
        for title, line in made.items()
    ]
    names = [tick_label(by, tick) for tick in kept]
    one = {"": [(-0.5, 1.0), (len(kept) - 0.5, 1.0)]} if metric == "speed_up" else None
    labels = {
        "dataset": "data set",
        "category": "category of the prompts",
        "batch": "sequences at once",
        "quantised": "weights",
        "adapted": "adapter of the target",
        "cut_after": "tokens until the link breaks",
    }
    label = labels.get(by, "")
    absent = [tick_label(by, tick) for tick in ticks if tick not in kept]
    return Panel(label, METRIC_LABELS.get(metric, metric), series, shape="bars", ticks=names, guides=one, absent=absent)


def tick_label(by: str, tick: Any) -> str:
    """The name of a group of bars."""
    if by in ("quantised", "adapted"):
        return tick or "original"
    if tick is None:
        return "never"
    return f"T={tick:g}" if by == "temperature" else str(tick)


def _categories(arms: Mapping[str, str], metric: str, at: Mapping[str, Any], rows: Rows) -> list[str]:
    """Categories of the prompts, in the order of the rows."""
    found = (e for arm in arms.values() if (e := rows.find(arm, at, metric)))
    return list(dict.fromkeys(row.category for e in found for row in e.rows))


def option_label(name: str) -> str:
    return OPTION_LABELS.get(name, name.rpartition(".")[2])


def _steps(figure: Mapping[str, Any], groups: Groups, rows: Rows) -> Chart:
    label = option_label(figure["x"])
    panels = []
    for metric in figure["y"]:
        for at in figure.get("panels", [{}]) if metric in METRICS else [{}]:
            series = []
            for title, arms in groups.items():
                points, printed = [], []
                for arm in arms:
                    e = rows.find(arm, at, metric)
                    x = option_of(e, figure["x"]) if e else None
                    if x is None:
                        continue
                    points += [(x, v) for v in [_any_value(e, arm, metric, rows)] if v]
                    printed += [(x, p) for p in rows.printed(arm, metric, at)]
                series.append(Series(title, sorted(points, key=lambda p: p[0]), printed=printed))
            y = MEASURED_LABELS.get(metric, (METRIC_LABELS.get(metric, metric), 1))[0]
            panels.append(Panel(label, y, series, place_label(at), log=figure.get("log", False)))
    return Chart(panels)


def _any_value(e: Entry | None, arm: str, metric: str, rows: Rows) -> Interval | None:
    """A metric of rows, or the median of a measurement's repetitions."""
    if metric in METRICS:
        return value(e, metric)
    quantity, _, name = metric.partition(".")
    unit = MEASURED_LABELS.get(metric, ("", 1))[1]
    values = [repetition[name] / unit for repetition in rows.measured(arm, quantity) if name in repetition]
    return repeated(values) if values else None


def _heatmap(figure: Mapping[str, Any], groups: Groups, rows: Rows) -> Chart:
    panels = []
    for metric in figure["value"]:
        for title, arms in groups.items():
            cells: dict[tuple[float, float], tuple[Interval | None, list[float]]] = {}
            for arm in arms:
                e = rows.find(arm, {}, metric)
                x, y = (option_of(e, figure[axis]) if e else None for axis in ("x", "y"))
                if x is not None and y is not None:
                    cells[y, x] = value(e, metric), rows.printed(arm, metric, {})
            columns = sorted({x for _, x in cells})
            series = [
                Series(
                    f"{row:g}",
                    [(columns.index(x), v) for (y, x), (v, _) in cells.items() if y == row and v],
                    printed=[(columns.index(x), p) for (y, x), (_, printed) in cells.items() if y == row for p in printed],
                )
                for row in sorted({y for y, _ in cells})
            ]  # fmt: skip
            name = METRIC_LABELS.get(metric, metric).partition(",")[0]
            labels = [option_label(figure[axis]) for axis in ("x", "y")]
            ticks = [f"{x:g}" for x in columns]
            panels.append(Panel(labels[0], labels[1], series, f"{title}: {name}", "grid", ticks))
    return Chart(panels)


def _scatter(_: Mapping[str, Any], groups: Groups, rows: Rows) -> Chart:
    """Milliseconds of a pass over parameters: drafters, the target, and the line that the target's share gives."""
    found = {title: e for title, (arm,) in groups.items() if (e := rows.find(arm, {}, "draft_ms"))}
    arms = {title: arm for title, (arm,) in groups.items()} | {"target": BASELINE}
    points = {title: (e.parameters / 1e6, v) for title, e in found.items() if (v := value(e, "pass_ms"))}
    guides = {}
    for e in list(found.values())[:1]:
        if pass_ms := interval(target_pass_ms, e.totals):
            points["target"] = e.header["target"]["parameters"] / 1e6, pass_ms
            guides[""] = [(0.0, 0.0), (points["target"][0], pass_ms.value)]
    series = [Series(title, [points[title]] if title in points else [], printed=_printed_pass(arm, rows))
              for title, arm in arms.items()]  # fmt: skip
    panel = Panel("parameters that a pass multiplies (millions)", "milliseconds a pass", series, guides=guides)
    return Chart([panel], ["line: time in proportion to parameters"])


def _printed_pass(arm: str, rows: Rows) -> list[Point]:
    """Parameters, in millions, and milliseconds that a source printed of the same pass."""
    at = {"dataset": ""}
    return list(zip(rows.printed(arm, "parameters", at), rows.printed(arm, "pass_ms", at), strict=False))


def _best_gamma(_: Mapping[str, Any], groups: Groups, rows: Rows) -> Chart:
    """Chains by cell, beside the theory; with the slides' numerical predictions."""
    found: dict[str, list[leviathan.Chain]] = {}
    for title, arms in groups.items():
        for at in rows.places():
            chains = [c for arm in arms if (c := leviathan.chain(rows.find(arm, at), rows.find(arm, at, "speed_up")))]
            label = place_label(at) if len(groups) == 1 else f"{title}: {place_label(at)}"
            if chains:
                found[label] = chains
    return leviathan.chart(found, rows.numbers)


KINDS: Mapping[str, Callable[[Mapping[str, Any], Groups, Rows], Chart]] = {
    "progress": _progress,
    "by_position": _by_position,
    "stack": _stack,
    "bars": _bars,
    "steps": _steps,
    "heatmap": _heatmap,
    "scatter": _scatter,
    "best_gamma": _best_gamma,
}
