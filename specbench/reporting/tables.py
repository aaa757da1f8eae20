"""Tables of entries: decoding, acceptance by step, memory; and the notes below them."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from specbench.records.metrics import BASELINE, PHASES, RATES, equal_answers, speed
from specbench.records.rows import Row
from specbench.records.statistics import Interval, interval
from specbench.reporting import document, text
from specbench.reporting.analysis import FEWEST
from specbench.reporting.cells import Entry
from specbench.reporting.groups import groups

ABSENT = "-"
STEPS = 6  # draft steps with a column of their own
ALPHAS = ("drafter", "tau [95%]", *(f"step {i + 1} [95%]" for i in range(STEPS)))
MEMORY = ("drafter", "target's weights", "drafter's weights", "KV caches", "everything else", "peak", "processes")


# Cells ----------------------------------------------------------------------------------------------------------------


def number(form: str, *values: float) -> str:
    """Formatted values; absent unless all are finite."""
    return form.format(*values) if all(map(math.isfinite, values)) else ABSENT


def shown(value: Interval | None) -> str:
    """A value with its interval; without the interval if that has no width."""
    if value is None:
        return ABSENT
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]" if value.low < value.high else f"{value.value:.2f}"


def direction(effect: Interval | None, neutral: float, above: str, below: str) -> str:
    """The word for an effect whose interval lies above or below the neutral value; else "not shown"."""
    if effect is None:
        return "not compared"
    if effect.low == effect.high:  # resampling a single question gives no interval
        return "not shown"
    return above if effect.low > neutral else below if effect.high < neutral else "not shown"


def title(e: Entry) -> str:
    """An entry's name, with its failures."""
    return e.title + (f" ({e.failed} FAILED)" if e.failed else "")


def known_depths(e: Entry) -> int:
    """Number of draft steps that were tried often enough to show their acceptance."""
    return int((e.totals.pooled["tried"] >= FEWEST).cumprod().sum())


def alphas_by_step(e: Entry) -> str:
    """Acceptance by draft step."""
    return " ".join(f"{alpha:.2f}" for alpha in e.summary.alphas[: known_depths(e)]) or ABSENT


def split(e: Entry, form: str) -> str:
    """Shares of the decode time by phase, in percent."""
    return number(form, *(100 * e.summary.split[phase] for phase in (*PHASES, "rest")))


def peak(e: Entry) -> str:
    """Peak memory while decoding."""
    return f"{e.summary.peak_bytes / 2**20:,.0f} MiB" if e.summary.peak_bytes else ABSENT


def _expected(e: Entry) -> str:
    by_times, by_parameters = (number("{:.2f}", v) for v in (e.summary.expected, e.summary.expected_by_parameters))
    return ABSENT if by_times == by_parameters == ABSENT else f"{by_times} ({by_parameters})"


# Tables ---------------------------------------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[Entry], str]] = {
    "drafter": title,
    "tok/s": lambda e: number("{:.1f}", e.summary.speed),
    "speed-up [95%]": lambda e: shown(e.summary.speed_up),
    "tau [95%] (macro)": lambda e: number(f"{shown(e.summary.tau_interval)} ({{:.2f}})", e.summary.tau_macro),
    "alpha per step": alphas_by_step,
    "nodes": lambda e: number("{:.1f}", e.summary.nodes),
    "draft/target/verify/rest": lambda e: split(e, "{:.0f}%/{:.0f}%/{:.0f}%/{:.0f}%"),
    "expected (by params)": _expected,
    "peak": peak,
    "lossless": lambda e: e.summary.lossless,
}


def cells(e: Entry) -> list[str]:
    """One line of the decoding table, in the order of `COLUMNS`."""
    return [column(e) for column in COLUMNS.values()]


def alphas(e: Entry) -> list[str]:
    """tau and acceptance by step with intervals, in the order of `ALPHAS`."""
    depths = known_depths(e)
    steps = [shown(interval(RATES[f"alpha{i}"], e.totals)) if i < depths else ABSENT for i in range(STEPS)]
    return [e.title, shown(e.summary.tau_interval), *steps]


def memory_lines(group: Sequence[Entry]) -> list[list[str]]:
    """Parts of the peak while decoding, in MiB, of the median process of each drafter; in the order of `MEMORY`.

    On a CPU the peak is that of the process, Python and its libraries included.
    """
    lines = []
    for e in group:
        processes = [values for values in e.measured.get("memory", ()) if {"peak", "kv"} <= set(values)]
        if not processes or "bytes" not in e.arm or "bytes" not in e.header["target"]:
            continue
        middle = sorted(processes, key=lambda values: values["peak"])[len(processes) // 2]
        target, drafter = e.header["target"]["bytes"], 0 if e.name == BASELINE else e.arm["bytes"]
        parts = (target, drafter, middle["kv"], middle["peak"] - target - drafter - middle["kv"], middle["peak"])
        lines.append([e.title, *(f"{part / 2**20:,.0f}" for part in parts), str(len(processes))])
    return lines


# Notes ----------------------------------------------------------------------------------------------------------------


def notes(group: Sequence[Entry]) -> list[str]:
    """Notes below a table: the machine was busy, rows are another engine's.

    Of notes on several blocks that differ only in their numbers, the last in order is given.
    """
    busy = {re.sub(r"[\d.]+", "", note): note for note in sorted(e.busy for e in group if e.busy)}
    served = (_served_note(e.arm, e.rows, e.baseline) for e in group if e.served)
    return list(dict.fromkeys((*busy.values(), *served)))


def _served_note(arm: Mapping[str, Any], rows: Sequence[Row], baseline: Sequence[Row]) -> str:
    """On another engine's rows: its name, its speed, how many answers equal the baseline's. arm: of the header."""
    drafter, engine = arm["drafter"], arm.get("served") or {}
    turns = {(row.text or row.question, row.turn) for row in rows}
    base = [row for row in baseline if (row.text or row.question, row.turn) in turns]
    different = [(row.served.at, row.question) for row in rows if row.served and row.served.at is not None]
    where = ", the earliest difference at token {} of question {}".format(*min(different)) if different else ""
    counted = "; tokens counted anew from its text" if any(row.served and row.served.counted for row in rows) else ""
    return (
        f"{drafter['name']}: answers of {engine.get('id')} {_where(drafter, engine)} and compared with no drafter here. "
        f"First token after {_pace(rows)}; plain decoding here: {_pace(base)}. {equal_answers(rows)}{where}{counted}."
    )


def _where(drafter: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Which engine answered and by whose clock: one in this process, see `specbench.engine.peer`, or at an endpoint."""
    if "engine" in engine:
        other = "" if engine.get("exact") else ", another target"
        weights = f"{engine.get('precision')}{other}"
        return f"by {engine['engine']} {engine.get('version')} ({weights}), timed in this process"
    version = f", {drafter['engine']}" if drafter.get("engine") else ""
    return f"at {drafter.get('endpoint')}{version}, timed by another engine's clock"


def _pace(rows: Sequence[Row]) -> str:
    if not rows:
        return "unknown"
    return f"{1000 * median(row.prefill_s for row in rows):.0f} ms (median), then {speed(rows):.1f} tokens/s"


# Markdown -------------------------------------------------------------------------------------------------------------


def markdown(entries: list[Entry], problems: Sequence[str] = ()) -> str:
    """The decoding tables as Markdown, below the problems with files."""
    parts = list(map(markdown_problem, problems))
    for group in groups(entries):
        heading = text.markdown(f"{group[-1].caption}, {group[0].summary.prompts} generations")
        parts.append(f"{heading}\n\n{markdown_table(list(COLUMNS), map(cells, group))}")
        parts += map(text.markdown, notes(group))
    return "\n\n".join(parts) + "\n"


def markdown_problem(problem: str) -> str:
    """A line on a file that was left out."""
    return f"**LEFT OUT** {text.markdown(problem)}"


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table as Markdown, its texts escaped."""
    return document.table(document.Table(columns, list(lines)))
