"""One cell as the doors run it: where it lies, what it lacks, its peaks of memory, its traces."""

import sys
import time
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from specbench import apart, arms, trace
from specbench.arms import Arm
from specbench.bench import Bench
from specbench.datasets import Chat, Question
from specbench.engine.target import Target
from specbench.errors import visible
from specbench.faults import told
from specbench.metrics import BASELINE
from specbench.progress import progress
from specbench.records import Cell, Measurement, held, identity

MEMORY = "memory"  # a measurement's name
TOKENS = 64  # decoded while the peak of memory is taken


def run(
    config: DictConfig,
    target: Target,
    chat: Chat,
    sides: list[Arm],
    questions: list[Question],
    study: str | None = None,
) -> tuple[Cell, int]:
    """Decode what the cell of these arms lacks; the cell, and how many of its generations failed.

    Args:
        config: what the arms have in common. sides: the baseline first.
    """
    described = arms.header(config, target, sides, questions, study)
    name = ("replay" if config.replay else "decode") if study else sides[-1].label
    folder = arms.folder(config) / f"{name}-{identity(described)}"
    with held(folder):
        cell = Cell(folder, described, fresh=config.rerun == "all")
        begin = time.monotonic()
        sampler, settings = instantiate(config.sampler), instantiate(config.decode)
        bench = Bench(target, chat, [side.contender for side in sides], sampler, settings, config.replay)
        failed = bench.run(questions, cell)
        _remember(config, chat, sides, questions, cell)
        if all(cell.done((s.label, q.id, t)) for s in sides for q in questions for t in range(len(q.turns))):
            seconds = f"{time.monotonic() - begin:.0f} s"
            print(f"{cell.path}: complete ({seconds}; rerun=all measures again)", file=sys.stderr)
        _trace(config, target, chat, sides, questions, folder / "trace.json")
    return cell, failed


def _remember(config: DictConfig, chat: Chat, sides: list[Arm], questions: list[Question], cell: Cell) -> None:
    """Peak memory of each drafter alone: a process that ran one before would show that one's peak."""
    wanted = [
        Measurement(side.label, MEMORY, repetition, {})
        for repetition in range(0 if config.replay else config.memory)
        for side in sides
    ]
    missing = [m for m in wanted if m.key not in cell.measured]
    if not missing:
        return
    prompt = chat.encode([{"role": "user", "content": questions[0].turns[0]}])
    tokens, own = min(TOKENS, config.decode.max_new_tokens), {side.label: side.config for side in sides}
    with progress("peak memory", len(missing), "processes") as reached:
        for number, measurement in enumerate(missing, 1):
            plain = arms.plain(own[measurement.drafter])
            try:
                measurement.values.update(apart.call(apart.memory, plain, prompt, tokens))
                cell.write(measurement)
            except Exception as error:  # the rows are worth having without it
                print(visible(f"specbench: no peak memory of {measurement.drafter}: {told(error)}"), file=sys.stderr)
            reached(number)


def _trace(config: DictConfig, target: Target, chat: Chat, sides: list[Arm], questions: list[Question], path: Any) -> None:
    """The first turns of some questions once more, untimed, with every draft tree kept for the report."""
    if not config.trace or path.exists():
        return
    traces = []
    sampler = instantiate(config.sampler)
    for side in (s for s in sides if s.label != BASELINE):
        for question in questions[: config.trace]:
            prompt = chat.encode([{"role": "user", "content": question.turns[0]}])
            drafter, rule = side.contender.drafter, side.contender.rule
            found = trace.trace(target, chat, drafter, prompt, rule, sampler, config.decode.seed)
            traces.append({"question": question.id, **found, "drafter": side.label})
    if traces:
        trace.write(path, traces)
