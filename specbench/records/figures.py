"""Figures of a study in the shape of its paper's, as the study's YAML declares them under `figures`.

    - {kind: progress, title: …, source: […], arms: […], y: [alpha0, alpha1, alpha2]}   acceptance over training tokens
    - {kind: by_position, …, panels: [{dataset: gsm8k}, {temperature: 1}]}              acceptance by position in the draft
    - {kind: steps, …, x: drafter.steps, y: [tau]}                                      a metric by a numeric option
    - {kind: bars, …, by: temperature, y: [speed_up]}                                   grouped bars
    - {kind: stack, …, parts: drafting}                                                 what a cycle's time consists of
    - {kind: heatmap, …, x: drafter.active, y: drafter.groups, value: [tau]}            a grid of two options
    - {kind: scatter, …}                                                                a pass's time by its parameters
    - {kind: best_gamma, …}                                                             chains beside Leviathan's theory

`arms`: names, each of which is a series; or a mapping from a series' title to its arms. By default every arm is a series.
Bars may stand for the baseline, `none`, too.
Drawing: `specbench.reporting.study_series` and `charts`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import MinLen
from pydantic import Discriminator, StringConstraints
from typing_extensions import TypedDict

from specbench.common.errors import SpecBenchError
from specbench.common.types import Name, Temperature, Text
from specbench.records.metrics import BASELINE, METRICS

Quantity = Annotated[str, StringConstraints(pattern=r"^\w+(\.\w+)+$")]  # of a measurement, as `memory.peak`
# What an arm sets: an option of its drafter or tree; ids: for which its LM head is multiplied; nodes: drafted a cycle.
Option = Annotated[str, StringConstraints(pattern=r"^((drafter|tree|verify)\.\w+|ids|nodes|parameters)$")]
# What the history of a training holds: acceptance of held-out answers (topK: among the K likeliest), and training losses.
Progressing = Literal[
    "alpha0", "alpha1", "alpha2", "alpha3", "alpha4", "alpha0_top4", "alpha0_top10", "tau", "classification", "regression"
]
Metric = Literal[METRICS]  # type: ignore[valid-type]


class Panel(TypedDict, total=False):
    """One of the study's cells; by default the first one's dataset, greedy."""

    dataset: Name
    temperature: Temperature


class _Figure(TypedDict):
    """source: which of the study's sources have this figure."""

    title: Text
    source: Annotated[list[Text], MinLen(1)]
    arms: NotRequired[Annotated[list[Name], MinLen(1)] | Mapping[Text, Annotated[list[Name], MinLen(1)]]]


class Progress(_Figure):
    """Acceptance or losses over training, a panel a metric, from the histories of the arms' trainings."""

    kind: Literal["progress"]
    x: NotRequired[Literal["tokens", "step"]]
    y: NotRequired[Annotated[list[Progressing], MinLen(1)]]


class ByPosition(_Figure):
    """Acceptance by position in the draft, given the position before; a panel a cell."""

    kind: Literal["by_position"]
    panels: NotRequired[Annotated[list[Panel], MinLen(1)]]


class Stack(_Figure):
    """Stacked times. cycle, token: draft, target, verify and rest of a cycle, or of a token; drafting: its measurement."""

    kind: Literal["stack"]
    parts: Literal["cycle", "token", "drafting"]


class Bars(_Figure):
    """Grouped bars: a panel a metric and (unless grouped by it) temperature, a group a value of `by`, a bar a series."""

    kind: Literal["bars"]
    by: Literal["arm", "dataset", "temperature", "category", "batch", "quantised", "adapted", "cut_after"]
    y: Annotated[list[Metric], MinLen(1)]


class Steps(_Figure):
    """Metrics, or medians of what is `measured`, by a numeric option; a panel each, and a cell. log: x to base 2."""

    kind: Literal["steps"]
    panels: NotRequired[Annotated[list[Panel], MinLen(1)]]
    x: Option
    y: Annotated[list[Metric | Quantity], MinLen(1)]
    log: NotRequired[bool]


class BestGamma(_Figure):
    """Chains beside the theory: tokens a pass, speed-up, operations and the best length by acceptance."""

    kind: Literal["best_gamma"]


class Heatmap(_Figure):
    """A grid of two numeric options; a panel a series and metric."""

    kind: Literal["heatmap"]
    x: Option
    y: Option
    value: Annotated[list[Metric], MinLen(1)]


class Scatter(_Figure):
    """Milliseconds of a pass by the parameters that it multiplies, of drafters and target."""

    kind: Literal["scatter"]


Figure = Annotated[
    Progress | ByPosition | Stack | Bars | Steps | BestGamma | Heatmap | Scatter,
    Discriminator("kind"),
]


def series(figure: Mapping[str, Any], arms: Iterable[str]) -> dict[str, Sequence[str]]:
    """The figure's series: title -> arms. arms: all of the study's."""
    chosen = figure.get("arms", list(arms))
    return dict(chosen) if isinstance(chosen, Mapping) else {name: [name] for name in chosen}


def check(figures: Sequence[Mapping[str, Any]], study: Mapping[str, Any], name: str) -> None:
    """Check that the sources, arms and options that figures name are the study's. Raises `SpecBenchError`."""
    for figure in figures:
        where = f"study {name}: figure {figure['title']!r}"
        if unknown := [source for source in figure["source"] if source not in study["source"]]:
            known = "; ".join(study["source"])
            raise SpecBenchError(f"{where} has the source {unknown[0]!r}, which the study does not name; it names {known}")
        allowed = [BASELINE] * (figure["kind"] == "bars")
        arms = [arm for group in series(figure, study["arms"]).values() for arm in group]
        if unknown := [arm for arm in arms if arm not in (*study["arms"], *allowed)]:
            raise SpecBenchError(f"{where}: no arm is called {unknown[0]}; there are {', '.join(study['arms'])}")
        several = [title for title, group in series(figure, study["arms"]).items() if len(group) > 1]
        if several and figure["kind"] in ("by_position", "stack", "bars", "scatter"):
            raise SpecBenchError(f"{where}: series {several[0]!r} has several arms, of which {figure['kind']} draws one")
        if figure["kind"] in ("steps", "heatmap"):
            runs = [override for arm in arms for override in study["arms"][arm]["run"]]
            for axis in ("x", "y") if figure["kind"] == "heatmap" else ("x",):
                _check_option(f"{where}: {axis}={figure[axis]}", figure[axis], runs)


def _check_option(where: str, option: str, runs: Sequence[str]) -> None:
    """Raises `SpecBenchError` for an option that no arm sets."""
    own = {override.lstrip("+~").partition("=")[0] for override in runs}
    if "." in option and option not in own:
        raise SpecBenchError(f"{where}, which none of its arms sets; they set {', '.join(sorted(own))}")
