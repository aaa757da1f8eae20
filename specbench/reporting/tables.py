"""Tables of entries: decoding, acceptance by step, memory; and the notes below them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from specbench.records.metrics import BASELINE, PHASES, RATES, equal_answers, speed
from specbench.records.rows import Row
from specbench.records.statistics import MIN_QUESTIONS, Interval, interval
from specbench.reporting import document, text
from specbench.reporting.analysis import FEWEST
from specbench.reporting.cells import Entry

ABSENT = "-"
NO_INTERVAL = f"no interval: fewer than {MIN_QUESTIONS} questions"
OUTDATED = (
    "These speeds are of an earlier version of this engine, which has become faster or slower since. They no longer count: "
    "claims about them stay preliminary, and a run measures them again. Acceptance and answers remain valid."
)
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


# Tables ---------------------------------------------------------------------------------------------------------------


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
        target, drafter = e.header["target"]["bytes"], 0.0 if e.name == BASELINE else float(e.arm["bytes"])
        if drafter < e.weights.get("base", {}).get("parameters", 0):  # older rows do not count a frozen drafter below it
            drafter = math.nan
        parts = (target, drafter, middle["kv"], middle["peak"] - target - drafter - middle["kv"], middle["peak"])
        lines.append([e.title, *(number("{:,.0f}", part / 2**20) for part in parts), str(len(processes))])
    return lines


# Notes ----------------------------------------------------------------------------------------------------------------


def notes(group: Sequence[Entry]) -> list[str]:
    """Notes below a table: speeds of an earlier engine or a busy machine, no intervals, rows of another engine.

    Of notes on several blocks that differ only in their numbers, the last in order is given.
    """
    busy = {re.sub(r"[\d.]+", "", note): note for note in sorted(e.busy for e in group if e.busy)}
    served = (_served_note(e) for e in group if e.served)
    outdated = [OUTDATED] if any(e.outdated for e in group) else []
    if earlier := [e.title for e in group if e.superseded]:
        outdated.append(f"Of earlier weights, which decide nothing: {', '.join(earlier)}.")
    few = [f"{NO_INTERVAL.capitalize()}."] if too_few(e for e in group if e.name != BASELINE) else []
    return list(dict.fromkeys((*outdated, *busy.values(), *few, *served)))


def basis(used: Sequence[tuple[Entry, bool]]) -> list[str]:
    """What values rest on: questions, tokens of an answer, doubts. used: entries, each with whether speeds are of it."""
    entries, timed = [e for e, _ in used], [e for e, speeds in used if speeds]
    notes = []
    caps: list[int] = [(e.header["config"].get("decode") or {}).get("max_new_tokens") or 0 for e in entries]
    for unit, numbers in (("question", [len(e.totals.questions) for e in entries]), ("token", caps)):
        if counts := sorted({*numbers} - {0}):
            count = " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1])))
            notes.append(f"{count} {unit}{'s' * (counts[-1] > 1)}{' at most' * (unit == 'token')}")
    notes += ["some values are of earlier weights"] if any(e.superseded for e in entries) else []
    notes += ["some speeds are of a busy machine"] if any(e.busy for e in timed) else []
    return [*notes, "some speeds are of an earlier engine and no longer count"] if any(e.outdated for e in timed) else notes


def too_few(entries: Iterable[Entry]) -> bool:
    """Has any of these entries too few questions for an interval?"""
    return any(0 < len(e.totals.questions) < MIN_QUESTIONS for e in entries)


def _served_note(e: Entry) -> str:
    """On another engine's rows: its name, its speed, how many answers equal the baseline's."""
    drafter, engine, rows, baseline = e.arm["drafter"], e.arm.get("served") or {}, e.rows, e.baseline
    turns = {(row.asked, row.turn) for row in rows}
    base = [row for row in baseline if (row.asked, row.turn) in turns]
    different = [(row.served.at, row.question) for row in rows if row.served and row.served.at is not None]
    where = ", the earliest difference at token {} of question {}".format(*min(different)) if different else ""
    counted = "; tokens counted anew from its text" if any(row.served and row.served.counted for row in rows) else ""
    return (
        f"{e.title}: answers of {engine.get('id')} {_where(drafter, engine)} and compared with no drafter here. "
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


def markdown_problem(problem: str) -> str:
    """A line on a file that was left out."""
    return f"**LEFT OUT** {text.markdown(problem)}"


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table as Markdown, its texts escaped."""
    return document.table(document.Table(columns, list(lines)))
