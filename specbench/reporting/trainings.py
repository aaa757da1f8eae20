"""Tables of trainings, from the provenance of weights: their cost and held-out acceptance."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbench.common.io import read_json, readable
from specbench.records.metrics import RATES
from specbench.records.schema import PROVENANCE, Provenance, all_tokens
from specbench.records.statistics import interval
from specbench.records.totals import Totals
from specbench.records.trainings import weights_read
from specbench.reporting.cells import Entry
from specbench.reporting.names import SEPARATOR
from specbench.reporting.tables import ABSENT, number

COST = (
    "drafter", "trained parameters", "parameters used per draft pass", "distinct training tokens", "tokens seen", "steps",
    "hours", "held-out chain tau", "trained on",
)  # fmt: skip
HELD_OUT = (
    "drafter", "trained parameters", "distinct training tokens", "tokens seen", "steps", "hours",
    "held-out chain tau [95%]", "0-alpha … 4-alpha", "held-out tau, its own tree", "trained on",
)  # fmt: skip


def below(folder: Path, problems: list[str] | None = None) -> dict[str, Mapping[str, Any]]:
    """Provenance of all weights trained here below a folder, by name. problems: see `specbench.common.io.readable`."""
    files = readable(sorted(folder.rglob(PROVENANCE)), lambda path: read_json(path, Provenance), problems)
    return {path.parent.name: provenance for path, provenance in files if provenance.get("history")}


def _stages(weights: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Provenance of weights, and of those below them that were trained here as well."""
    stages = [weights]
    while stages[-1].get("base", {}).get("history"):
        stages.append(stages[-1]["base"])
    return stages


def amounts(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Different tokens of the stage with most; tokens seen, steps and hours of all stages.

    Where a training went on from other weights, their tokens and, if known, hours are named beside its own.
    """
    tokens, steps, hours = (sum(stage[key] for stage in stages) for key in ("tokens_seen", "steps", "hours"))
    tokens_before, hours_before = (sum(stage.get(key, 0) for stage in stages) for key in ("tokens_before", "hours_before"))
    return [
        f"{max(stage['data']['unique_tokens'] for stage in stages):,}",
        f"{tokens:,}" + f" after {tokens_before:,}" * bool(tokens_before),
        f"{steps:,}",
        f"{hours:.2f}" + f" after {hours_before:.2f}" * bool(hours_before),
    ]


def _processes(provenance: Mapping[str, Any]) -> str:
    """`, 4 processes`, each with a GPU or a share of the cores of its own; empty for one."""
    count = provenance.get("processes", 1)
    return f", {count} processes" if count > 1 else ""


def trained(entries: Sequence[Entry]) -> dict[str, Entry]:
    """An entry for each of the weights trained here, by the names of all drafters that use them."""
    by_weights: dict[str, list[Entry]] = {}
    for e in entries:
        if e.weights.get("history"):
            read = weights_read(e.arm) or e.weights
            by_weights.setdefault(json.dumps([e.model, read], sort_keys=True), []).append(e)
    several = len({e.model for e in entries}) > 1
    named: dict[str, Entry] = {}
    for first, *others in by_weights.values():
        name = ", ".join(dict.fromkeys(e.title.partition(SEPARATOR)[0] for e in (first, *others)))
        name += f" ({first.model})" if several else ""
        while name in named:  # the same drafter, trained again
            name += f", {first.weights['tokens_seen']:,} tokens"
        named[name] = first
    return named


def about(group: Sequence[Entry]) -> list[str]:
    """What is not alike of the drafters of a table: tokens seen in training, and ids that they draft from."""
    by_size: dict[int, list[str]] = {}
    for e in group:
        drafter: Mapping[str, Any] = e.arm["drafter"]
        size = drafter.get("vocabulary") or (drafter.get("base") or {}).get("vocabulary")
        if isinstance(size, int):
            by_size.setdefault(size, []).append(e.title)
    limited = [f"Drafted from the {size:,} most frequent ids alone: {', '.join(by)}." for size, by in by_size.items()]
    return [*tokens_seen(group), *limited]


def tokens_seen(group: Sequence[Entry]) -> list[str]:
    """How many tokens the drafters were trained on: one drafter has several trainings, which studies chose among."""
    by_tokens: dict[int, list[str]] = {}
    for e in group:
        if seen := sum(map(all_tokens, _stages(e.weights))):
            by_tokens.setdefault(seen, []).append(e.title)
    parts = [f"{', '.join(titles)} on {seen / 1e6:.1f} million" for seen, titles in by_tokens.items()]
    return [f"Tokens seen in training: {'; '.join(parts)}."] if parts else []


def cost_lines(entries: Sequence[Entry]) -> list[list[str]]:
    """What the weights of entries cost, in the order of `COST`: one line for all drafters with the same weights.

    Weights trained on top of another drafter's are counted together with these.
    """
    lines = []
    for name, first in trained(entries).items():
        stages, machine = _stages(first.weights), first.weights["machine"]
        lines.append(
            [
                name,
                f"{sum(stage['parameters'] for stage in stages):,}",
                f"{first.parameters:,}",
                *amounts(stages),
                number("{:.2f}", first.weights["history"][-1].get("chain_tau", math.nan)),
                f"{machine['device']}, {machine['cores']} cores{_processes(first.weights)}",
            ]
        )
    return lines


def held_out_lines(folder: Path, problems: list[str] | None = None) -> list[list[str]]:
    """One line a drafter, in the order of `HELD_OUT`. problems: see `specbench.common.io.readable`."""
    lines = []
    for name, provenance in below(folder, problems).items():
        last = provenance.get("held_out") or provenance["history"][-1]  # older files have no answers: no interval
        tau = number("{:.2f}", last.get("chain_tau", math.nan))
        if any(cycles for _, cycles in last.get("answers", [])):
            tau += _tau_bounds(last["answers"])
        alphas = " ".join(number("{:.2f}", a) for a in last.get("n_alpha", [])) or ABSENT
        tree = number("{:.2f}", provenance["history"][-1].get("tree_tau", math.nan))
        parameters, device = f"{provenance['parameters']:,}", provenance["machine"]["device"] + _processes(provenance)
        lines.append([name, parameters, *amounts([provenance]), tau, alphas, tree, device])
    return lines


def _tau_bounds(answers: Sequence[tuple[int, int]]) -> str:
    """The 95% interval of tau over answers, each with its tokens and cycles."""
    tokens, cycles = np.asarray(answers, dtype=float).T
    totals = Totals(tuple(map(str, range(len(answers)))), {"tokens": tokens, "cycles": cycles})
    tau = interval(RATES["tau"], totals)
    assert tau is not None  # there are cycles
    return f" [{tau.low:.2f}, {tau.high:.2f}]"
