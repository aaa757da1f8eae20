"""What a run leaves for other programs: `summary.json`, the table's numbers, and `answers.jsonl`, the texts.

Both are of the last command that decoded in this cell, and are written anew by the next one.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.common.storage import atomic_path
from specbench.records.metrics import BASELINE
from specbench.records.statistics import Interval
from specbench.reporting import console, verdict
from specbench.reporting.cells import Entry
from specbench.reporting.groups import groups
from specbench.reporting.names import labelled

SUMMARY, ANSWERS = "summary.json", "answers.jsonl"


Decode = Callable[[list[int]], str]  # ids -> the text that a reader sees


def write(folder: Path, entries: Sequence[Entry], decode: Decode) -> None:
    """Both files into a cell's folder."""
    tables = [{"title": console.caption(group), "verdict": verdict.sentence(group), "rows": list(map(_row, group))}
              for group in groups(labelled(entries))]  # fmt: skip
    _write(folder / SUMMARY, json.dumps(tables, indent=1, ensure_ascii=False) + "\n")
    lines = (json.dumps(answer, ensure_ascii=False) for answer in answers(entries, decode))
    _write(folder / ANSWERS, "".join(f"{line}\n" for line in lines))


def _row(e: Entry) -> Mapping[str, Any]:
    """One line of the table."""
    s, is_base = e.summary, e.name == BASELINE
    return {
        "drafter": e.title,
        "arm": e.name,
        "generations": s.prompts,
        "failed": e.failed,
        "tokens_per_s": _number(s.speed),
        "speed_up": _interval(s.speed_up) if not is_base else None,
        "tokens_per_pass": _interval(s.tau_interval),
        "cost": _number(console.cost(e)),
        "drafted": _number(s.nodes),
        "accepted_by_step": [_number(a) for a in s.alphas],
        "output": console.output(e),
        "peak_bytes": s.peak_bytes or None,
    }


def _interval(found: Interval | None) -> list[float] | None:
    """Value and both ends of its 95% interval."""
    return None if found is None else [found.value, found.low, found.high]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def answers(entries: Sequence[Entry], decode: Decode) -> Iterator[Mapping[str, Any]]:
    """Every answer of the baseline, and of the drafters those that are not the same, ids for ids."""
    plain = {(r.text or r.question, r.turn): r.tokens for e in entries if e.name == BASELINE for r in e.rows}
    for e in sorted(entries, key=lambda e: e.name != BASELINE):
        for r in e.rows:
            tokens = r.tokens + r.alone
            if e.name == BASELINE or (not r.replayed and tokens != plain.get((r.text or r.question, r.turn))):
                yield {
                    "question": r.question, "turn": r.turn, "drafter": e.title, "text": decode(tokens), "ids": tokens,
                }  # fmt: skip


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as new:
        new.write_text(text, encoding="utf-8")
