"""A study's cells, one after the other: bind the arms of each, decode what is missing, report what is left."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError, visible
from specbench.config.cli import typed_overrides
from specbench.data.chat import Chat
from specbench.data.prompts import Question
from specbench.engine.device import pick_device
from specbench.engine.target import Target
from specbench.evaluation import arms, cell, study_runs
from specbench.evaluation.arms import Arm
from specbench.evaluation.cell import CellResult, Live
from specbench.evaluation.study_runs import PlannedArm, StudyCell
from specbench.evaluation.study_training import Member, Trained
from specbench.records import studies
from specbench.records.studies import Study

COMMAND_ONLY = ("study", "arms", "seeds", "cells", "datasets", "minutes")  # options that are no overrides of arms


@dataclass(frozen=True)
class StudyRun:
    """A study as the command line asks for it.

    Attributes:
        study: with the chosen arms. overrides: of the command line, for all arms.
        members: its arms, each with its seeds. cells: the chosen ones, with the run of every member.
    """

    name: str
    study: Study
    overrides: Sequence[str]
    members: Sequence[Member]
    cells: Sequence[StudyCell]


@dataclass(frozen=True)
class Ready:
    """A cell whose prompts are loaded. title: `bench, cell 1 of 3`."""

    title: str
    cell: StudyCell
    questions: Sequence[Question]


Decoded = Sequence[tuple[StudyCell, CellResult]]


def prepare(name: str, options: Mapping[str, Any]) -> StudyRun:
    """Check the study, its cells and members, as far as that needs no weights. options: of the command.

    Raises:
        SpecBenchError: this machine cannot run the study, or there is no such arm or cell.
    """
    typed = typed_overrides()
    if any(key in ("drafter", "drafters") for key, _ in typed):
        raise SpecBenchError("drafter: a study has its own arms; choose among them with arms=[NAME,…]")
    overrides = [override for key, override in typed if key.split(".")[0] not in COMMAND_ONLY]
    study = study_runs.choose_arms(studies.check(options["study"], name), options["arms"], name)
    missing = studies.unmet(study.get("needs", {}), None, pick_device(options["model"]["device"]).type == "cuda")
    if missing:
        raise SpecBenchError(f"study {name} is not testable here: it needs {', '.join(missing)}")
    members = list(study_runs.members(study, options["seeds"]))
    folder = Path(options["results"]) / name
    cells = [
        study_runs.prepare(number, words, members, overrides, study, folder)
        for number, words in study_runs.cell_overrides(study, options["cells"], options["datasets"])
    ]
    return StudyRun(name, study, overrides, members, cells)


def decode(run: StudyRun, trained: Trained, budget: Budget, live: Live) -> Decoded:
    """Decode what is missing of every cell whose prompts can be loaded, as long as the budget lasts.

    The target stays loaded from one cell to the next, unless that one needs another precision.

    Raises:
        SpecBenchError: no cell has its prompts, or the target cannot be loaded.
    """
    absent = trained.failed | trained.unfinished
    model, target, chat = run.cells[0].base.model, *_load(run, run.cells[0], absent)
    ready = list(_ready(run))
    work = [one.cell.work(one.questions) for one in ready]
    decoded = []
    for number, one in enumerate(ready):
        if one.cell.base.model != model:
            del target
            model, target, chat = one.cell.base.model, *_load(run, one.cell, absent)
        total_work = sum(work[number:]) / work[number]
        decoded.append((one.cell, _decode(run, one, target, chat, absent, budget, live, total_work)))
    if not decoded:
        raise SpecBenchError(f"study {run.name}: no cell has its prompts, see above")
    return decoded


def _load(run: StudyRun, study_cell: StudyCell, absent: Collection[str]) -> tuple[Target, Chat]:
    return arms.load(study_cell.base, study_runs.largest(run.cells, study_cell, absent))


def _ready(run: StudyRun) -> Iterator[Ready]:
    """The cells whose prompts can be loaded; a line on each other one."""
    for number, study_cell in enumerate(run.cells, 1):
        title = f"{run.name}, cell {number} of {len(run.cells)}"
        try:
            yield Ready(title, study_cell, study_runs.spread(study_cell.base.dataset.load()))
        except SpecBenchError as error:
            print(visible(f"specbench: {title}: {error}"), file=sys.stderr)


def _decode(
    run: StudyRun,
    ready: Ready,
    target: Target,
    chat: Chat,
    absent: Collection[str],
    budget: Budget,
    live: Live,
    total_work: float,
) -> CellResult:
    """Decode one cell, whose arms are freed afterwards. total_work: see `cell.run`."""
    base = ready.cell.base
    cell_arms = _bind(run, ready, target, chat, absent, live)
    print(f"{ready.title}: {ready.cell.title}", file=sys.stderr, flush=True)
    measured = ready.cell.number == studies.measuring_cell(run.study)
    repetitions = study_runs.repetitions(run.study, base, run.overrides) if measured else {}
    questions = list(ready.questions)
    result = cell.run(base, target, chat, cell_arms, questions, run.name, repetitions, budget, live, total_work)
    if result.failed:
        print(f"specbench: {result.failed} generations failed; rows in {result.ledger.folder} say why", file=sys.stderr)
    return result


def _bind(run: StudyRun, ready: Ready, target: Target, chat: Chat, absent: Collection[str], live: Live) -> list[Arm]:
    """A cell's arms, the baseline first; those that cannot be bound are left out.

    Where trees of some arms have yet to be fitted, the others answer the first question before that.
    """
    planned = [arm for arm in ready.cell.arms if arm.label not in absent]
    baseline = arms.baseline(ready.cell.base, target)
    early = study_runs.ready_early(planned, target)
    bound: dict[str, Arm] = {}

    def bind(chosen: Sequence[PlannedArm]) -> None:
        for arm in chosen:
            print(f"arm {planned.index(arm) + 1} of {len(planned)}: {arm.label}", file=sys.stderr, flush=True)
            if (ready_arm := study_runs.bind(arm, target)) is not None:
                bound[arm.label] = ready_arm

    bind(early)
    if early:
        print(f"{run.name}: one question with arms that are ready, before trees are fitted", file=sys.stderr, flush=True)
        first = [baseline, *bound.values()]
        if table := cell.decode_early(ready.cell.base, target, chat, first, ready.questions[0], run.name, live):
            print(table, file=sys.stderr, flush=True)
    bind([arm for arm in planned if arm not in early])
    return [baseline, *(bound[arm.label] for arm in planned if arm.label in bound)]


def unfinished(run: StudyRun, decoded: Decoded, trained: Trained) -> str:
    """`bench: 24 of 80 questions, about 34 minutes more`; empty where nothing is left."""
    if not trained.unfinished and not any(result.left for _, result in decoded):
        return ""
    trainings = f", trainings to finish: {', '.join(sorted(trained.unfinished))}" if trained.unfinished else ""
    return f"{run.name}: {cell.progress([result for _, result in decoded])}{trainings}"


def require_complete(run: StudyRun, decoded: Decoded, trained: Trained) -> None:
    """Raises `SpecBenchError` for what failed, but not for what there was no time for."""
    results = [result for _, result in decoded]
    for result in results:
        arms.require_lossless(result.ledger.block.path)
    failed, unmeasured = sum(result.failed for result in results), sum(result.unmeasured for result in results)
    absent = max(one.expected - len(trained.unfinished) - result.arms for one, result in decoded)
    dropped = len(run.cells) - len(decoded)
    if failed or unmeasured or absent or dropped:
        raise SpecBenchError(
            f"{failed} generations and {unmeasured} measurements failed, {dropped} cells and {absent} arms are missing, "
            "named above; run it again to retry them"
        )
