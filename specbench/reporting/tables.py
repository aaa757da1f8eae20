"""Rows to tables: collects cells, summarises them, shows them on a terminal or as Markdown."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specbench.metrics import BASELINE, Summary, summarise
from specbench.records import Failure, Row, read_cell

COLUMNS = (
    "drafter",
    "tok/s",
    "speed-up [95%]",
    "tau (macro)",
    "alpha per step",
    "nodes",
    "draft/target/verify/rest",
    "predicted (by params)",
    "peak",
    "lossless",
)
TRAINING = (
    "drafter",
    "trained parameters",
    "multiplied a draft pass",
    "different tokens",
    "tokens seen",
    "steps",
    "hours",
    "held-out chain tau",
    "trained on",
)


@dataclass(frozen=True)
class Entry:
    """One drafter of one cell, ready to be shown."""

    model: str
    dataset: str
    temperature: float
    machine: str
    dtype: str
    summary: Summary
    failed: int
    parameters: int  # that one draft pass multiplies, the shared LM head included
    weights: dict[str, Any]  # provenance, empty where the drafter brings no weights of ours


def collect(paths: list[Path]) -> list[Entry]:
    """Summaries of all drafters of all cells; the baseline's rows of several cells on a dataset are shown once each."""
    entries = []
    for path in paths:
        header, records = read_cell(path)
        latest: dict[tuple[str, str, int], Row | Failure] = {r.key: r for r in records}
        rows = [r for r in latest.values() if isinstance(r, Row)]
        own = header["config"]["drafter"]["name"]
        baseline = [r for r in rows if r.drafter == BASELINE]
        for drafter in dict.fromkeys([BASELINE, own]):
            mine = [r for r in rows if r.drafter == drafter]
            failed = sum(isinstance(r, Failure) and r.drafter == drafter for r in latest.values())
            if mine or failed:
                entries.append(_entry(header, summarise(header, drafter, mine, baseline), failed))
    return entries


def _entry(header: dict[str, Any], summary: Summary, failed: int) -> Entry:
    config, hardware = header["config"], header["hardware"]
    return Entry(
        model=config["model"]["name"],
        dataset=config["dataset"]["name"],
        temperature=config["sampler"]["temperature"],
        machine=f"{hardware['device']}, {hardware['cores']} cores, torch {header['versions']['torch']}",
        dtype=header["target"]["dtype"],
        summary=summary,
        failed=failed,
        parameters=header["parameters"]["drafter"],
        weights=header["weights"] if summary.drafter != BASELINE else {},
    )


def cells(entry: Entry) -> list[str]:
    """One table line, in the order of `COLUMNS`."""
    s = entry.summary
    up = s.speed_up
    return [
        s.drafter + (f" ({entry.failed} FAILED)" if entry.failed else ""),
        f"{s.speed:.1f}",
        f"{up.value:.2f} [{up.low:.2f}, {up.high:.2f}]" if up else "-",
        f"{s.tau:.2f} ({s.tau_macro:.2f})",
        " ".join(f"{a:.2f}" for a in s.alphas) or "-",
        f"{s.nodes:.1f}",
        "/".join(f"{100 * s.split[p]:.0f}%" for p in ("draft", "target", "verify", "rest")),
        f"{s.predicted:.2f} ({s.predicted_by_parameters:.2f})",
        f"{s.peak_bytes / 2**20:,.0f} MiB",
        s.lossless,
    ]


def training_cells(drafters: str, entry: Entry) -> list[str]:
    """What weights cost, in the order of `TRAINING`; with a second stage on top of another drafter, both together."""
    parts, last = [entry.weights], entry.weights["history"][-1]
    while "base" in parts[-1]:
        parts.append(parts[-1]["base"])

    def total(key: str) -> float:
        return sum(part[key] for part in parts)

    return [
        drafters,
        f"{total('parameters'):,}",
        f"{entry.parameters:,}",
        f"{entry.weights['data']['unique_tokens']:,}",
        f"{total('tokens_seen'):,}",
        f"{total('steps'):,}",
        f"{total('hours'):.2f}",
        f"{last['chain_tau']:.2f}",
        f"{entry.weights['machine']['device']}, {entry.weights['machine']['cores']} cores",
    ]


def training_lines(entries: list[Entry]) -> list[list[str]]:
    """One line for all drafters that use the same weights, if their training is on record."""
    groups: dict[str, list[Entry]] = {}
    for e in entries:
        if e.weights.get("history"):
            groups.setdefault(json.dumps(e.weights, sort_keys=True), []).append(e)
    return [
        training_cells(", ".join(dict.fromkeys(e.summary.drafter for e in group)), group[0]) for group in groups.values()
    ]


def _groups(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Entries under one caption: same model, dataset, temperature, machine. One baseline line is enough."""
    groups: dict[str, list[Entry]] = {}
    for e in entries:
        mode = "greedy" if e.temperature == 0 else f"T={e.temperature}"
        caption = f"{e.model}, {e.dataset}, {mode}, {e.dtype}, {e.machine}"
        group = groups.setdefault(caption, [])
        if e.summary.drafter != BASELINE or not any(x.summary.drafter == BASELINE for x in group):
            group.append(e)
    return groups


def show(entries: list[Entry], console: Console | None = None) -> None:
    """Print to the terminal."""
    console = console or Console(width=190)
    for caption, group in _groups(entries).items():
        console.print(_terminal(f"{caption}, {group[0].summary.prompts} generations", COLUMNS, map(cells, group)))
    if training_lines(entries):
        console.print(_terminal("training", TRAINING, training_lines(entries)))


def _terminal(title: str, columns: Iterable[str], lines: Iterable[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def markdown(entries: list[Entry]) -> str:
    """The decoding tables as Markdown."""
    parts = []
    for caption, group in _groups(entries).items():
        parts.append(f"{caption}, {group[0].summary.prompts} generations\n\n{_markdown(COLUMNS, map(cells, group))}")
    return "\n\n".join(parts) + "\n"


def training_markdown(entries: list[Entry]) -> str:
    """What the drafters of these entries cost to train, as Markdown."""
    return _markdown(TRAINING, training_lines(entries)) + "\n"


def _markdown(columns: Sequence[str], lines: Iterable[list[str]]) -> str:
    heading, *rest = ("| " + " | ".join(line) + " |" for line in (columns, *lines))
    return "\n".join([heading, "|---" * len(columns) + "|", *rest])
