"""What tables say of rows of another engine: whose they are, how fast, how many are alike."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from specbench.records.metrics import equal_answers, speed
from specbench.records.rows import Row


def said(arm: Mapping[str, Any], rows: Sequence[Row], baseline: Sequence[Row]) -> str | None:
    """What stands beside every table that shows such rows: whose they are, how fast, and how many are the baseline's.

    None for rows of this engine. arm: its part of the header.
    """
    if not any(row.served for row in rows):
        return None
    drafter, known = arm["drafter"], arm.get("served") or {}
    engine = f", {drafter['engine']}" if drafter.get("engine") else ""
    asked = {(row.text or row.question, row.turn) for row in rows}
    here = [row for row in baseline if (row.text or row.question, row.turn) in asked]
    parts = [(row.served.at, row.question) for row in rows if row.served and row.served.at is not None]
    where = ", the earliest difference at token {} of question {}".format(*min(parts)) if parts else ""
    counted = "; tokens counted anew from its text" if any(row.served and row.served.counted for row in rows) else ""
    return (
        f"{drafter['name']}: answers of {known.get('id')} at {drafter.get('endpoint')}{engine}, timed by another engine's "
        f"clock and compared with no drafter here. First token after {_pace(rows)}; plain decoding here: {_pace(here)}. "
        f"{equal_answers(rows)}{where}{counted}."
    )


def _pace(rows: Sequence[Row]) -> str:
    if not rows:
        return "unknown"
    return f"{1000 * median(row.prefill_s for row in rows):.0f} ms (median), then {speed(rows):.1f} tokens/s"
