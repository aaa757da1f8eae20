"""One cell as the doors run it: where it lies, what it lacks, what is measured beside its rows, its traces."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from specbench import arms, measurements, trace
from specbench.arms import Arm
from specbench.bench import Bench
from specbench.datasets import Chat, Question
from specbench.engine.target import Target
from specbench.measurements import PROMPTS, TOKENS, Setting
from specbench.metrics import BASELINE
from specbench.records import Cell, held, identity


@dataclass(frozen=True)
class Ran:
    """A cell, and what it lacks still: generations that failed, arms of which something could not be measured."""

    cell: Cell
    failed: int
    unmeasured: int


def run(
    config: DictConfig,
    target: Target,
    chat: Chat,
    sides: list[Arm],
    questions: list[Question],
    study: str | None = None,
    measure: Mapping[str, int] | None = None,
) -> Ran:
    """Decode and measure what the cell of these arms lacks.

    Args:
        config: what the arms have in common. sides: the baseline first.
        measure: repetitions by quantity; None: of peak memory, as the configuration says.
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
        if measure is None:
            measure = {"memory": 0 if config.replay else config.memory}
        unmeasured = measurements.take(measure, cell, _setting(config, target, chat, questions), sides)
        if all(cell.done((s.label, q.id, t)) for s in sides for q in questions for t in range(len(q.turns))):
            seconds = f"{time.monotonic() - begin:.0f} s"
            print(f"{cell.path}: complete ({seconds}; rerun=all measures again)", file=sys.stderr)
        _trace(config, target, chat, sides, questions, folder / "trace.json")
    return Ran(cell, failed, unmeasured)


def _setting(config: DictConfig, target: Target, chat: Chat, questions: list[Question]) -> Setting:
    prompts = [chat.encode([{"role": "user", "content": question.turns[0]}]) for question in questions[:PROMPTS]]
    return Setting(target, prompts, min(TOKENS, config.decode.max_new_tokens))


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
            found = trace.trace(
                target, chat, drafter, prompt, rule, sampler, config.decode.seed, config.decode.max_new_tokens
            )
            traces.append({"question": question.id, **found, "drafter": side.label})
    if traces:
        trace.write(path, traces)
