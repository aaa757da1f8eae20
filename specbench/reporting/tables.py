"""Entries to tables of the report: decoding, acceptance by step, memory, training."""

import json
import math
import re
from collections.abc import Iterable, Sequence

from specbench.records.metrics import BASELINE, PHASES, RATES
from specbench.records.statistics import Interval, interval
from specbench.reporting import document, served, text
from specbench.reporting.analysis import FEWEST
from specbench.reporting.cells import Entry
from specbench.reporting.groups import groups

ABSENT = "-"

COLUMNS = (
    "drafter",
    "tok/s",
    "speed-up [95%]",
    "tau [95%] (macro)",
    "alpha per step",
    "nodes",
    "draft/target/verify/rest",
    "expected (by params)",
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


def cells(entry: Entry) -> list[str]:
    """One table line, in the order of `COLUMNS`."""
    s = entry.summary
    return [
        entry.title + (f" ({entry.failed} FAILED)" if entry.failed else ""),
        number("{:.1f}", s.speed),
        shown(s.speed_up),
        number(f"{shown(s.tau_interval)} ({{:.2f}})", s.tau_macro),
        alphas_by_step(entry),
        number("{:.1f}", s.nodes),
        number("{:.0f}%/{:.0f}%/{:.0f}%/{:.0f}%", *(100 * s.split[phase] for phase in (*PHASES, "rest"))),
        _expected(s.expected, s.expected_by_parameters),
        peak(entry),
        s.lossless,
    ]


def alphas_by_step(entry: Entry) -> str:
    """Acceptance by draft step, of the steps that were tried often enough."""
    return " ".join(f"{alpha:.2f}" for alpha in entry.summary.alphas[: known_depths(entry)]) or ABSENT


def peak(entry: Entry) -> str:
    """Peak memory while decoding."""
    return f"{entry.summary.peak_bytes / 2**20:,.0f} MiB" if entry.summary.peak_bytes else ABSENT


def _expected(by_times: float, by_parameters: float) -> str:
    """Two numbers of which either may be absent, the second one in brackets."""
    first, second = number("{:.2f}", by_times), number("{:.2f}", by_parameters)
    return ABSENT if first == second == ABSENT else f"{first} ({second})"


def number(form: str, *values: float) -> str:
    """Values in their form; absent where there is none of one of them, as without any cycle."""
    return form.format(*values) if all(map(math.isfinite, values)) else ABSENT


def shown(found: Interval | None) -> str:
    """A value with its interval; one that has none, or no width, alone."""
    if found is None:
        return ABSENT
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]" if found.low < found.high else f"{found.value:.2f}"


def called(effect: Interval | None, neutral: float, above: str, below: str) -> str:
    """What may be said of an effect: nothing while its interval holds the neutral value."""
    if effect is None:
        return "not compared"
    if effect.low == effect.high:  # a single question, resampled
        return "not shown"
    return above if effect.low > neutral else below if effect.high < neutral else "not shown"


def known_depths(entry: Entry) -> int:
    """So many draft steps were tried often enough for a share to say anything."""
    return int((entry.totals.pooled()["tried"] >= FEWEST).cumprod().sum())


ALPHAS = ("drafter", "tau [95%]", *(f"step {i + 1} [95%]" for i in range(6)))


def alphas(entry: Entry) -> list[str]:
    """tau and per-step acceptance with their intervals, in the order of `ALPHAS`; steps that hardly occurred are absent."""
    depths = known_depths(entry)
    steps = [shown(interval(RATES[f"alpha{i}"], entry.totals)) if i < depths else ABSENT for i in range(6)]
    return [entry.title, shown(entry.summary.tau_interval), *steps]


MEMORY = ("drafter", "target's weights", "drafter's weights", "KV caches", "everything else", "peak", "processes")


def memory_lines(group: Sequence[Entry]) -> list[list[str]]:
    """Where the peak of decoding goes, in MiB, each drafter in processes of its own; the median of those.

    On a CPU the peak is the process's, Python and libraries in it.
    """
    lines = []
    for e in group:
        found = [values for values in e.measured.get("memory", ()) if {"peak", "kv"} <= set(values)]
        if not found or "bytes" not in e.arm:
            continue
        middle = sorted(found, key=lambda values: values["peak"])[len(found) // 2]
        target, drafter = e.header["target"]["bytes"], 0 if e.name == BASELINE else e.arm["bytes"]
        parts = (target, drafter, middle["kv"], middle["peak"] - target - drafter - middle["kv"], middle["peak"])
        lines.append([e.title, *(f"{part / 2**20:,.0f}" for part in parts), str(len(found))])
    return lines


def training_cells(drafters: str, entry: Entry) -> list[str]:
    """What weights cost, in the order of `TRAINING`; with a second stage on top of another drafter, both together."""
    parts, last = [entry.weights], entry.weights["history"][-1]
    while parts[-1].get("base", {}).get("history"):
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
        number("{:.2f}", last.get("chain_tau", math.nan)),
        f"{entry.weights['machine']['device']}, {entry.weights['machine']['cores']} cores",
    ]


def training_lines(entries: list[Entry]) -> list[list[str]]:
    """One line for all drafters that use the same weights, if their training is on record."""
    groups: dict[str, list[Entry]] = {}
    for e in entries:
        if e.weights.get("history"):
            groups.setdefault(json.dumps(e.weights, sort_keys=True), []).append(e)
    several = len({e.model for e in entries}) > 1
    lines = []
    for group in groups.values():
        names = ", ".join(dict.fromkeys(e.summary.drafter for e in group))
        lines.append(training_cells(f"{names} ({group[0].model})" if several else names, group[0]))
    return lines


def disturbances(group: Sequence[Entry]) -> list[str]:
    """What stands under a table: that it was timed on a busy machine, and what by another engine.

    Of lines that differ in their numbers alone, block by block, the worst stands for all.
    """
    worst = {re.sub(r"[\d.]+", "", line): line for line in sorted(e.busy for e in group if e.busy)}
    others = (served.said(e.arm, e.rows, e.baseline) for e in group)
    return list(dict.fromkeys(filter(None, (*worst.values(), *others))))


def markdown(entries: list[Entry], problems: Sequence[str] = ()) -> str:
    """The decoding tables as Markdown, what could not be read on top."""
    parts = list(map(markdown_problem, problems))
    for caption, group in groups(entries):
        heading = text.markdown(f"{caption}, {group[0].summary.prompts} generations")
        parts.append(f"{heading}\n\n{markdown_table(COLUMNS, map(cells, group))}")
        parts += map(text.markdown, disturbances(group))
    return "\n\n".join(parts) + "\n"


def markdown_problem(problem: str) -> str:
    """A file that is left out, or a part of it, as a line."""
    return f"**LEFT OUT** {text.markdown(problem)}"


def training_markdown(entries: list[Entry]) -> str:
    """What the drafters of these entries cost to train, as Markdown."""
    return markdown_table(TRAINING, training_lines(entries)) + "\n"


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of texts that may hold anything."""
    return document.table(document.Table(columns, list(lines)))
