"""Answer files of other harnesses, converted to this project's definitions.

    spec-bench  `choices[0]`: new_tokens, decoding_steps, wall_time by turn, accept_lengths by cycle (bonus included)
    eagle       `choices[0]`: new_tokens, idxs (of the last cycle, from 0), wall_time by turn
    hass        as eagle; its own script averages acceptance over questions, which is the macro figure here

tau is exact: tokens a target pass, bonus included, pooled. Seconds are the harness's: they include prefill, and possibly
tokens after a stop token or beyond the cap. A speed-up needs the harness's plain decoding as `baseline`, whose ids are
counted as its file says; text is never tokenized again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from annotated_types import MinLen
from pydantic import with_config
from typing_extensions import TypedDict

from specbench.common.errors import SpecBenchError
from specbench.common.io import OPEN, read_bytes, read_json_lines
from specbench.records.metrics import RATES
from specbench.records.schema import Natural, Seconds
from specbench.records.statistics import contrast, interval, macro, pooled
from specbench.records.totals import Totals
from specbench.reporting.tables import ABSENT, markdown_table, shown


@with_config(OPEN)
class SpecBenchChoice(TypedDict):
    """Spec-Bench's counts by turn."""

    new_tokens: list[Natural]
    wall_time: list[Seconds]
    decoding_steps: list[Natural]


@with_config(OPEN)
class EagleChoice(TypedDict):
    """EAGLE's and HASS's counts by turn."""

    new_tokens: list[Natural]
    wall_time: list[Seconds]
    idxs: list[Natural]


Choice = TypeVar("Choice")


@with_config(OPEN)
class Answer(TypedDict, Generic[Choice]):
    """A line of an answer file."""

    question_id: str | int
    choices: Annotated[list[Choice], MinLen(1)]


def _steps(choice: Any) -> int:
    return sum(choice["decoding_steps"])


def _indices(choice: Any) -> int:
    return sum(i + 1 for i in choice["idxs"])


HARNESSES: dict[str, tuple[Any, Callable[[Any], int]]] = {  # type of a line, and the cycles of a choice
    "spec-bench": (Answer[SpecBenchChoice], _steps),
    "eagle": (Answer[EagleChoice], _indices),
    "hass": (Answer[EagleChoice], _indices),
}
COLUMNS = ("answers", "harness", "questions", "tok/s", "speed-up [95%]", "tau [95%] (macro)")
CONVENTION = "tau: bonus included, pooled over cycles (in brackets: mean over questions); seconds: theirs, prefill included"


def read(path: Path, harness: str) -> Totals:
    """Sums by question of an answer file; of several answers to a question the last one counts.

    Raises:
        SpecBenchError: an unknown harness, no file, or an invalid line, which is named.
    """
    if harness not in HARNESSES:
        raise SpecBenchError(f"format={harness}: use {', '.join(HARNESSES)} for an answer file of another harness")
    shape, cycles = HARNESSES[harness]
    by_question: dict[str, dict[str, float]] = {}
    for number, answer in read_json_lines(path, shape):
        choice = answer["choices"][0]
        sums = sum(choice["new_tokens"]), cycles(choice), sum(choice["wall_time"])
        if min(sums) <= 0:
            raise SpecBenchError(f"{path} line {number}: {sums} tokens, cycles and seconds cannot be; remove that line")
        by_question[str(answer["question_id"])] = dict(zip(("tokens", "cycles", "seconds"), sums, strict=True))
    if not by_question:
        raise SpecBenchError(f"{path} holds no answers")
    return Totals.add_up(by_question.items())


def plain(path: Path) -> Totals:
    """Plain decoding of the same questions, from either harness: one cycle a token, whatever steps its file counts."""
    harness = "spec-bench" if b'"decoding_steps"' in read_bytes(path) else "eagle"
    totals = read(path, harness)
    return Totals(totals.questions, {**totals.sums, "cycles": totals.sums["tokens"]})


def markdown(path: Path, harness: str, baseline: str | None = None) -> str:
    """The file as a table of one line, with the conventions below it."""
    totals, speed, tau = read(path, harness), RATES["tokens_per_s"], RATES["tau"]
    up = ABSENT if baseline is None else shown(contrast(speed, totals, plain(Path(baseline)), ratio=True))
    counts = [path.stem, harness, str(len(totals.questions)), f"{pooled(speed, totals):.1f}", up]
    taus = f"{shown(interval(tau, totals))} ({macro(tau, totals):.2f})"
    return f"{markdown_table(COLUMNS, [[*counts, taus]])}\n\n{CONVENTION}\n"
