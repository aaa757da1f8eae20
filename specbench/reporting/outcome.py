"""Files that a run leaves for other programs: `summary.json`, the table's numbers, and `answers.jsonl`, the texts.

Both are of the last command that decoded in the cell.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.common.storage import write_file
from specbench.records.metrics import BASELINE
from specbench.records.statistics import Interval
from specbench.reporting import console, fastest
from specbench.reporting.cells import Entry
from specbench.reporting.groups import groups
from specbench.reporting.names import labelled

SUMMARY, ANSWERS = "summary.json", "answers.jsonl"

Decode = Callable[[list[int]], str]  # ids -> text


def write(folder: Path, entries: Sequence[Entry], decode: Decode) -> None:
    """Write both files into a cell's folder."""
    tables = []
    for group in groups(labelled(entries)):
        rows = list(map(_row, group))
        tables.append({"title": console.caption(group), "verdict": fastest.sentence(group), "rows": rows})
    write_file(folder / SUMMARY, json.dumps(tables, indent=1, ensure_ascii=False) + "\n")
    lines = (json.dumps(answer, ensure_ascii=False) for answer in answers(entries, decode))
    write_file(folder / ANSWERS, "".join(f"{line}\n" for line in lines))


def _row(e: Entry) -> Mapping[str, Any]:
    s = e.summary
    return {
        "drafter": e.title,
        "arm": e.name,
        "generations": s.prompts,
        "failed": e.failed,
        "tokens_per_s": _number(s.speed),
        "speed_up": None if e.name == BASELINE else _interval(s.speed_up),
        "tokens_per_pass": _interval(s.tau_interval),
        "cost": _number(console.cost(e)),
        "drafted": _number(s.nodes),
        "accepted_by_step": [_number(a) for a in s.alphas],
        "output": console.output(e),
        "peak_bytes": s.peak_bytes or None,
    }


def _interval(value: Interval | None) -> list[float] | None:
    """Value and both ends of its 95% interval."""
    return None if value is None else [value.value, value.low, value.high]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def answers(entries: Sequence[Entry], decode: Decode) -> Iterator[Mapping[str, Any]]:
    """Every answer of the baseline, and the drafters' answers that differ from it in an id."""
    plain = {(r.asked, r.turn): r.tokens for e in entries if e.name == BASELINE for r in e.rows}
    for e in sorted(entries, key=lambda e: e.name != BASELINE):
        for r in e.rows:
            ids = r.tokens + r.alone
            if e.name == BASELINE or (not r.replayed and ids != plain.get((r.asked, r.turn))):
                yield {"question": r.question, "turn": r.turn, "drafter": e.title, "text": decode(ids), "ids": ids}
