"""Answer files of other harnesses, restated under this project's definitions, with what cannot be restated said.

    spec-bench  `choices[0]`: new_tokens, decoding_steps, wall_time by turn, accept_lengths by cycle (bonus included)
    eagle       `choices[0]`: new_tokens, idxs (of the last cycle, from 0), wall_time by turn
    hass        as eagle; its own script averages acceptance over questions, here that is the macro figure

tau is restated exactly: tokens a target pass, bonus included, pooled. Seconds are theirs: prefill included, and a stop
token's rest or an overrun cap may be counted. A speed-up needs their plain decoding as `baseline`, whose ids are counted
as written in its file, never by tokenising text again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import MinLen
from pydantic import with_config
from typing_extensions import TypedDict

from specbench.common.errors import SpecBenchError
from specbench.common.io import OPEN, read_bytes, read_json_lines
from specbench.records.metrics import RATES
from specbench.records.schema import Natural, Seconds
from specbench.records.statistics import Totals, contrast, interval, macro
from specbench.reporting.tables import markdown_table, shown


@with_config(OPEN)
class Choice(TypedDict):
    """An answer, its numbers by turn."""

    new_tokens: list[Natural]
    wall_time: list[Seconds]


@with_config(OPEN)
class SpecBenchChoice(Choice):
    """As Spec-Bench writes it."""

    decoding_steps: list[Natural]


@with_config(OPEN)
class EagleChoice(Choice):
    """As EAGLE and HASS write it."""

    idxs: list[Natural]


@with_config(OPEN)
class SpecBenchAnswer(TypedDict):
    """A line of Spec-Bench's file."""

    question_id: str | int
    choices: Annotated[list[SpecBenchChoice], MinLen(1)]


@with_config(OPEN)
class EagleAnswer(TypedDict):
    """A line of EAGLE's or HASS's file."""

    question_id: str | int
    choices: Annotated[list[EagleChoice], MinLen(1)]


SHAPES: dict[str, Any] = {"spec-bench": SpecBenchAnswer, "eagle": EagleAnswer, "hass": EagleAnswer}
CYCLES = {
    "spec-bench": lambda choice: sum(choice["decoding_steps"]),
    "eagle": lambda choice: sum(i + 1 for i in choice["idxs"]),
    "hass": lambda choice: sum(i + 1 for i in choice["idxs"]),
}
CONVENTION = "tau: bonus included, pooled over cycles (in brackets: mean over questions); seconds: theirs, prefill included"


def read(path: Path, harness: str) -> Totals:
    """Sums by question of an answer file; a question answered twice counts once, the last time.

    Raises:
        SpecBenchError: an unknown harness, no file, a damaged line, or one without the harness's fields; it names the line.
    """
    if harness not in CYCLES:
        raise SpecBenchError(f"format={harness}: use {', '.join(CYCLES)} for an answer file of another harness")
    found: dict[str, tuple[float, float, float]] = {}
    for number, answer in read_json_lines(path, SHAPES[harness]):
        choice = answer["choices"][0]
        sums = sum(choice["new_tokens"]), CYCLES[harness](choice), sum(choice["wall_time"])
        if min(sums) <= 0:
            raise SpecBenchError(f"{path} line {number}: {sums} tokens, cycles and seconds cannot be; remove that line")
        found[str(answer["question_id"])] = sums
    if not found:
        raise SpecBenchError(f"{path} holds no answers")
    questions = tuple(sorted(found))
    columns = np.array([found[q] for q in questions], float).T
    return Totals(questions, dict(zip(("tokens", "cycles", "seconds"), columns, strict=True)))


def plain(path: Path) -> Totals:
    """Plain decoding of the same questions, from either harness: a cycle a token, whatever its file says of steps."""
    harness = "spec-bench" if b'"decoding_steps"' in read_bytes(path) else "eagle"
    found = read(path, harness)
    return Totals(found.questions, {**found.sums, "cycles": found.sums["tokens"]})


def markdown(path: Path, harness: str, baseline: str | None = None) -> str:
    """The file as one table line, its conventions below."""
    totals = read(path, harness)
    columns = ["answers", "harness", "questions", "tok/s", "speed-up [95%]", "tau [95%] (macro)"]
    up = "-"
    if baseline is not None:
        up = shown(contrast(RATES["tokens_per_s"], totals, plain(Path(baseline)), ratio=True))
    line = [
        path.stem,
        harness,
        str(len(totals.questions)),
        f"{float(RATES['tokens_per_s'](totals.pooled())):.1f}",
        up,
        f"{shown(interval(RATES['tau'], totals))} ({macro(RATES['tau'], totals):.2f})",
    ]
    lines: Sequence[list[str]] = [line]
    return f"{markdown_table(columns, lines)}\n\n{CONVENTION}\n"
