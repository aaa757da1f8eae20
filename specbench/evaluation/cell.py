"""One cell as the commands run it: decode what its arms lack, measure what belongs beside the rows, write traces."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specbench.common.budget import Budget
from specbench.config.run_spec import RunSpec
from specbench.data.chat import Chat, answer_text
from specbench.data.prompts import Question
from specbench.engine.drafter import ServedEngine
from specbench.engine.target import Target
from specbench.evaluation import arms, measurements, trace
from specbench.evaluation.arms import Arm
from specbench.evaluation.batch_runner import BatchBench
from specbench.evaluation.measurements import PROMPTS, TOKENS, Workload
from specbench.evaluation.runner import Bench
from specbench.records import blocks, identity, shared_rows
from specbench.records.blocks import Ledger, locked
from specbench.records.metrics import BASELINE

Live = Callable[[Ledger, Sequence[str]], str]  # the table so far, from a cell's rows and the digests of its questions


@dataclass(frozen=True)
class CellResult:
    """What a cell holds now, and what it still lacks.

    Attributes:
        arms: number of drafters, without the baseline. digests: of all its questions.
        failed: generations that raised. unmeasured: pairs of arm and quantity that could not be measured.
        waiting: measurements that there was no time for. left: questions that lack a generation.
        seconds: estimate of the time that these take; None: unknown.
        text: decodes an answer's ids. earlier: results of groups of the same cell's arms that were decoded before these.
    """

    ledger: Ledger
    arms: int
    digests: Sequence[str]
    failed: int
    unmeasured: int
    waiting: int
    left: int
    seconds: float | None
    text: Callable[[list[int]], str]
    earlier: Sequence["CellResult"] = ()

    @property
    def parts(self) -> Sequence["CellResult"]:
        """The results of all groups, each with a ledger of its own."""
        return (*self.earlier, self)


def progress(results: Sequence[CellResult]) -> str:
    """`24 of 80 questions, about 34 minutes more`, of some cells together."""
    total, left = sum(len(result.digests) for result in results), sum(result.left for result in results)
    seconds = sum(result.seconds or 0 for result in results if result.left)
    waiting = sum(result.waiting for result in results)
    more = f", {waiting} measurements left" if waiting else ""
    return f"{total - left} of {total} questions{more}" + (f", about {seconds / 60:.0f} minutes more" if seconds else "")


def together(results: Sequence[CellResult]) -> CellResult:
    """One result of a cell whose arms were decoded in groups. Its ledger is the last one's, with the arms of all."""
    *earlier, last = results
    if not earlier:
        return last
    for result in earlier:
        last.ledger.arms |= result.ledger.arms
    seconds = [result.seconds for result in results if result.seconds is not None]
    return replace(
        last,
        arms=sum(result.arms for result in results),
        failed=sum(result.failed for result in results),
        unmeasured=sum(result.unmeasured for result in results),
        waiting=sum(result.waiting for result in results),
        left=max(result.left for result in results),
        seconds=sum(seconds) if seconds else None,
        earlier=earlier,
    )


def run(
    spec: RunSpec,
    target: Target,
    chat: Chat,
    cell_arms: list[Arm],
    questions: list[Question],
    study: str | None = None,
    repetitions: Mapping[str, int] | None = None,
    budget: Budget | None = None,
    live: Live | None = None,
    total_work: float = 1.0,
) -> CellResult:
    """Decode and measure what the cell of these arms lacks, in a block of its own.

    Args:
        spec: what the arms have in common. cell_arms: the baseline first.
        repetitions: by measured quantity; None: of peak memory, as the run says.
        live: makes the table that a terminal shows while decoding.
        total_work: work of this cell and all later ones, in units of this cell's; only announced.
    """
    budget = budget or Budget()
    header = arms.header(spec, target, chat, cell_arms, questions, study)
    if repetitions is None:
        repetitions = {"memory": 0 if spec.replay or spec.batch > 1 else spec.memory}
    if spec.model.variant is not None and not spec.replay:
        repetitions = {"quality": 1, **repetitions}
    digests = [question.digest for question in questions]
    bench = _bench(spec, target, chat, cell_arms)
    with _exclusive(spec, bench, budget) as ours:
        begin, unmeasured, waiting = time.monotonic(), 0, 0
        ledger = _ledger(spec, header)
        if ours:
            _copy_shared(spec, study, ledger, digests)
            bench.run(questions, ledger, budget, None if live is None else partial(live, ledger, digests), total_work)
            prompts = [chat.opening(question.turns[0]) for question in questions]
            tokens = min(TOKENS, spec.decode.max_new_tokens)
            workload = Workload(target, prompts[:PROMPTS], tokens, cell_arms[0].bound, prompts)
            unmeasured, waiting = measurements.measure(repetitions, ledger, workload, cell_arms, budget)
        left = sum(bool(bench.missing([question], ledger)) for question in questions)
        if ours and not left and not waiting:
            seconds = time.monotonic() - begin
            print(f"{spec.cell_folder}: complete ({seconds:.0f} s; rerun=all measures again)", file=sys.stderr)
            _trace(spec, target, chat, cell_arms, questions)
    pace = ledger.pace()
    remaining = None if pace is None else pace * bench.missing(questions, ledger)
    failed = sum(text in digests for _, text, _ in ledger.failed())  # others are of questions that are not asked now
    text = partial(answer_text, chat.tokenizer, target.stop_ids)
    return CellResult(ledger, len(cell_arms) - 1, digests, failed, unmeasured, waiting, left, remaining, text)


def decode_early(
    spec: RunSpec,
    target: Target,
    chat: Chat,
    cell_arms: list[Arm],
    question: Question,
    study: str,
    live: Live,
    budget: Budget,
) -> str:
    """Decode one question with the arms that are ready, while others still have to be prepared for minutes.

    It has a block of its own; the other arms meet the question later beside a baseline that is decoded again, since
    seconds are compared inside one block.
    Returns the table of it; empty where nothing was missing or no time is left.
    """
    bench, header = _bench(spec, target, chat, cell_arms), arms.header(spec, target, chat, cell_arms, [question], study)
    with _exclusive(spec, bench, budget) as ours:
        ledger = _ledger(spec, header)
        if not ours or not bench.missing([question], ledger):
            return ""
        bench.run([question], ledger, budget)
        arms.require_lossless(ledger.block.path)
        return live(ledger, [question.digest])


def _bench(spec: RunSpec, target: Target, chat: Chat, cell_arms: Sequence[Arm]) -> Bench:
    bound = [arm.bound for arm in cell_arms]
    if spec.batch > 1:
        return BatchBench(target, chat, bound, spec.sampler, spec.decode, batch=spec.batch)
    return Bench(target, chat, bound, spec.sampler, spec.decode, spec.replay)


def _ledger(spec: RunSpec, header: Mapping[str, Any]) -> Ledger:
    return Ledger(spec.cell_folder, header, BASELINE, timed=not spec.replay, fresh=spec.rerun == "all")


def _copy_shared(spec: RunSpec, study: str | None, ledger: Ledger, digests: Sequence[str]) -> None:
    """Take over what other studies have replayed of a study's cell, see `shared_rows`."""
    if study is None or not spec.replay or spec.rerun == "all":
        return
    name = spec.cell_folder.relative_to(spec.results)
    others = (folder for folder in sorted(spec.results.parent.glob(f"*/{name}")) if folder != spec.cell_folder)
    if copied := shared_rows.copy_missing(ledger, others, digests):
        print(f"{spec.cell_folder}: {copied} generations are those of other studies", file=sys.stderr, flush=True)


def _exclusive(spec: RunSpec, bench: Bench, budget: Budget) -> AbstractContextManager[bool]:
    """Wait until no other process does timed work, or work that depends on the order of prompts, in this cell.

    Replays share a cell, question by question. Yields False if another process still holds it when the time is over.
    """
    ordered = any(bound.drafter.state == "run" for bound in bench.bound_drafters)
    if spec.replay and not ordered:
        return nullcontext(True)
    return locked(spec.cell_folder, "whole", wait=True, seconds=budget.left)


def _trace(spec: RunSpec, target: Target, chat: Chat, cell_arms: Sequence[Arm], questions: Sequence[Question]) -> None:
    """Decode the first turns of `spec.trace` questions once more, untimed, and write their trees, one file an arm.

    A file stays as long as it is of the same arm: drafter, weights and tree.
    """
    local = [arm for arm in cell_arms if not isinstance(arm.bound.drafter, ServedEngine)]
    for arm in (arm for arm in local if arm.label != BASELINE and spec.trace):
        path = blocks.trace_path(spec.cell_folder, arm.label)
        own = identity.digest(identity.arm_key(arm.description))
        if spec.rerun != "all" and trace.arm_of(path) == own:
            continue
        traces = []
        for question in questions[: spec.trace]:
            drafter, rule, prompt = arm.bound.drafter, arm.bound.rule, chat.opening(question.turns[0])
            seed, tokens = spec.decode.seed, spec.decode.max_new_tokens
            traced = trace.trace(target, chat, drafter, prompt, rule, spec.sampler, seed, tokens)
            traces.append({"question": question.id, **traced, "drafter": arm.label, "arm": own})
        trace.write(path, traces)
