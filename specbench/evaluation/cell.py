"""One cell as commands run it: where it lies, what it lacks, what is measured beside its rows, its traces."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from specbench.common.budget import Budget
from specbench.config.run_spec import RunSpec
from specbench.data.chat import Chat
from specbench.data.prompts import Question
from specbench.engine.drafter import ServedEngine
from specbench.engine.target import Target
from specbench.evaluation import arms, measurements, trace
from specbench.evaluation.arms import Arm
from specbench.evaluation.measurements import PROMPTS, TOKENS, Setting
from specbench.evaluation.runner import Bench
from specbench.records import blocks
from specbench.records.blocks import Ledger, locked
from specbench.records.metrics import BASELINE


@dataclass(frozen=True)
class Ran:
    """What a cell has now, and what it lacks still.

    Attributes:
        arms: drafters in it, the baseline not counted. asked: digests of the questions that it should have.
        failed: generations that raised. unmeasured: arms of which something could not be measured.
        left: questions that lack a generation. seconds: that these are likely to take; None: nobody knows.
        text: of an answer's ids.
    """

    ledger: Ledger
    arms: int
    asked: Sequence[str]
    failed: int
    unmeasured: int
    left: int
    seconds: float | None
    text: Callable[[list[int]], str]

    @property
    def questions(self) -> int:
        return len(self.asked)

    @property
    def progress(self) -> str:
        """`24 of 80 questions, about 34 minutes more`."""
        return progress([self])


def progress(ran: Sequence[Ran]) -> str:
    """The same of several cells together."""
    total, left = sum(one.questions for one in ran), sum(one.left for one in ran)
    seconds = sum(one.seconds or 0 for one in ran if one.left)
    return f"{total - left} of {total} questions" + (f", about {seconds / 60:.0f} minutes more" if seconds else "")


def run(
    spec: RunSpec,
    target: Target,
    chat: Chat,
    sides: list[Arm],
    questions: list[Question],
    study: str | None = None,
    measure: Mapping[str, int] | None = None,
    budget: Budget | None = None,
    live: Callable[[Ledger, Sequence[str]], str] | None = None,
    times: float = 1.0,
) -> Ran:
    """Decode and measure what the cell of these arms lacks, in a block of its own.

    Args:
        spec: what the arms have in common. sides: the baseline first.
        measure: repetitions by quantity; None: of peak memory, as the run says. budget: None for as long as it takes.
        live: the table so far, of a cell's rows and the digests of the questions, for a terminal.
        times: how many times this cell's work is ahead, with the cells behind it.
    """
    budget = budget or Budget()
    asked = [question.digest for question in questions]
    described = arms.header(spec, target, chat, sides, questions, study)
    folder = spec.cell_folder
    if measure is None:
        measure = {"memory": 0 if spec.replay else spec.memory}
    bench = _bench(spec, target, chat, sides)
    with _to_itself(spec, bench):
        begin = time.monotonic()
        ledger = _ledger(spec, described)
        bench.run(questions, ledger, budget, None if live is None else partial(live, ledger, asked), times)
        here = [side for side in sides if not isinstance(side.bound.drafter, ServedEngine)]
        unmeasured = measurements.take(measure, ledger, _setting(spec, target, chat, questions), here, budget)
        left = sum(bool(bench.missing([question], ledger)) for question in questions)
        if not left:
            print(f"{folder}: complete ({time.monotonic() - begin:.0f} s; rerun=all measures again)", file=sys.stderr)
            _trace(spec, target, chat, sides, questions)
    pace, missing = ledger.pace(), bench.missing(questions, ledger)
    seconds = None if pace is None else pace * missing
    return Ran(ledger, len(sides) - 1, asked, len(ledger.failed()), unmeasured, left, seconds, bench.text)


def decode_early(
    spec: RunSpec,
    target: Target,
    chat: Chat,
    sides: list[Arm],
    question: Question,
    study: str,
    live: Callable[[Ledger, Sequence[str]], str],
) -> str:
    """One question with those arms that are ready, in a block of its own, while the others have to be prepared for minutes.

    The other arms meet this question later, beside a baseline decoded anew: seconds are compared inside one block.

    Returns:
        The table of it; empty where nothing was missing.
    """
    bench, described = _bench(spec, target, chat, sides), arms.header(spec, target, chat, sides, [question], study)
    with _to_itself(spec, bench):
        ledger = _ledger(spec, described)
        if not bench.missing([question], ledger):
            return ""
        bench.run([question], ledger)
        return live(ledger, [question.digest])


def _bench(spec: RunSpec, target: Target, chat: Chat, sides: Sequence[Arm]) -> Bench:
    return Bench(target, chat, [side.bound for side in sides], spec.sampler, spec.decode, spec.replay)


def _ledger(spec: RunSpec, described: Mapping[str, Any]) -> Ledger:
    return Ledger(spec.cell_folder, described, BASELINE, timed=not spec.replay, fresh=spec.rerun == "all")


def _to_itself(spec: RunSpec, bench: Bench) -> AbstractContextManager[Any]:
    """Timed work and what depends on the order of prompts waits until no other process does such work in this cell.

    Replays share a cell, question by question.
    """
    ordered = any(c.drafter.state == "run" for c in bench.bound_drafters)
    return locked(spec.cell_folder, "whole", wait=True) if ordered or not spec.replay else nullcontext()


def _setting(spec: RunSpec, target: Target, chat: Chat, questions: Sequence[Question]) -> Setting:
    prompts = [chat.encode([{"role": "user", "content": question.turns[0]}]) for question in questions[:PROMPTS]]
    return Setting(target, prompts, min(TOKENS, spec.decode.max_new_tokens))


def _trace(spec: RunSpec, target: Target, chat: Chat, sides: Sequence[Arm], questions: Sequence[Question]) -> None:
    """The first turns of some questions once more, untimed, with every draft tree kept for the report; a file an arm."""
    for side in (s for s in sides if s.label != BASELINE and spec.trace):
        path = blocks.trace_path(spec.cell_folder, side.label)
        if path.exists() or isinstance(side.bound.drafter, ServedEngine):
            continue
        traces = []
        for question in questions[: spec.trace]:
            prompt = chat.encode([{"role": "user", "content": question.turns[0]}])
            drafter, rule = side.bound.drafter, side.bound.rule
            found = trace.trace(
                target, chat, drafter, prompt, rule, spec.sampler, spec.decode.seed, spec.decode.max_new_tokens
            )
            traces.append({"question": question.id, **found, "drafter": side.label})
        trace.write(path, traces)
