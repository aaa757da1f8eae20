"""A study's cells, one after the other: bind the arms of each, decode what is missing, say what is left."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from specbench.evaluation.cell import Ran
from specbench.evaluation.study_runs import Side, StudyCell
from specbench.evaluation.study_training import Member, Trained
from specbench.records import studies
from specbench.records.blocks import Ledger
from specbench.records.studies import Study

NOT_OF_ARMS = ("study", "arms", "seeds", "cells", "datasets", "minutes")  # options of the command alone
Live = Callable[[Ledger, Sequence[str]], str]  # see `cell.run`


@dataclass(frozen=True)
class StudyRun:
    """A study as it was asked for.

    Attributes:
        study: with the arms that were asked for. overrides: what the command line says for all arms.
        members: its arms, each with its seeds. cells: those that were asked for, with the run of every member.
    """

    name: str
    study: Study
    overrides: Sequence[str]
    members: Sequence[Member]
    cells: Sequence[StudyCell]


@dataclass(frozen=True)
class Ready:
    """A cell whose prompts are there. place: `bench, cell 1 of 3`."""

    place: str
    cell: StudyCell
    questions: Sequence[Question]


Decoded = Sequence[tuple[StudyCell, Ran]]


def prepare(name: str, options: Mapping[str, Any]) -> StudyRun:
    """Check the study, cells and members that are asked for, as far as that needs no weights. options: of the command.

    Raises:
        SpecBenchError: this machine cannot run the study, or there is no such arm or cell.
    """
    overrides = _overrides()
    study = study_runs.chosen(studies.check(options["study"], name), options["arms"], name)
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


def _overrides() -> list[str]:
    """What the command line says for all arms."""
    typed = typed_overrides()
    if any(key in ("drafter", "drafters") for key, _ in typed):
        raise SpecBenchError("drafter: a study has its own arms; choose among them with arms=[NAME,…]")
    return [override for key, override in typed if key.split(".")[0] not in NOT_OF_ARMS]


def decode(run: StudyRun, trained: Trained, budget: Budget, live: Live) -> Decoded:
    """Decode what is missing of every cell whose prompts are there, as long as the budget lasts.

    A target stays loaded from one cell to the next, unless that one needs another precision.

    Raises:
        SpecBenchError: no cell has its prompts, or the target cannot be loaded.
    """
    absent = trained.failed | trained.unfinished
    loaded, target, chat = run.cells[0].base.model, *_load(run, run.cells[0], absent)
    ready = list(_ready(run))
    work = [one.cell.work(one.questions) for one in ready]
    decoded = []
    for number, one in enumerate(ready):
        if one.cell.base.model != loaded:
            del target
            loaded, target, chat = one.cell.base.model, *_load(run, one.cell, absent)
        times = sum(work[number:]) / work[number]
        decoded.append((one.cell, _decode(run, one, target, chat, absent, budget, live, times)))
    if not decoded:
        raise SpecBenchError(f"study {run.name}: no cell has its prompts, see above")
    return decoded


def _load(run: StudyRun, one: StudyCell, absent: Collection[str]) -> tuple[Target, Chat]:
    return arms.load(one.base, study_runs.largest(run.cells, one, absent))


def _ready(run: StudyRun) -> Iterator[Ready]:
    """The cells with their questions; without those whose prompts cannot be had, since the others are worth having."""
    for number, one in enumerate(run.cells, 1):
        place = f"{run.name}, cell {number} of {len(run.cells)}"
        try:
            yield Ready(place, one, study_runs.spread(one.base.dataset.load()))
        except SpecBenchError as error:
            print(visible(f"specbench: {place}: {error}"), file=sys.stderr)


def _decode(
    run: StudyRun, one: Ready, target: Target, chat: Chat, absent: Collection[str], budget: Budget, live: Live, times: float
) -> Ran:
    """One cell; its arms go with it. times: how many times its work is ahead, with the cells behind it."""
    base = one.cell.base
    sides = _bind(run, one, target, chat, absent, live)
    print(f"{one.place}: {one.cell.title}", file=sys.stderr, flush=True)
    measured = one.cell.number == studies.measuring_cell(run.study)
    repetitions = study_runs.repetitions(run.study, base, run.overrides) if measured else {}
    ran = cell.run(base, target, chat, sides, list(one.questions), run.name, repetitions, budget, live, times)
    if ran.failed:
        print(f"specbench: {ran.failed} generations failed; rows in {ran.ledger.folder} say why", file=sys.stderr)
    return ran


def _bind(run: StudyRun, one: Ready, target: Target, chat: Chat, absent: Collection[str], live: Live) -> list[Arm]:
    """A cell's arms, the baseline first; those that cannot be bound are left out.

    Where trees of some arms have yet to be fitted, the others answer the first question before that.
    """
    sides = [side for side in one.cell.sides if side.member.label not in absent]
    places = {side.member.label: f"arm {number} of {len(sides)}" for number, side in enumerate(sides, 1)}
    baseline = arms.baseline(one.cell.base, target)
    early = study_runs.ready_early(sides, target)
    bound = _bind_all(early, target, places)
    if early:
        _decode_early(run, one, target, chat, [baseline, *bound.values()], live)
    bound |= _bind_all([side for side in sides if side not in early], target, places)
    return [baseline, *(bound[side.member.label] for side in sides if side.member.label in bound)]


def _bind_all(sides: Sequence[Side], target: Target, places: Mapping[str, str]) -> dict[str, Arm]:
    """Arms by label."""
    bound = {side.member.label: study_runs.bind(side, target, places[side.member.label]) for side in sides}
    return {label: arm for label, arm in bound.items() if arm is not None}


def _decode_early(run: StudyRun, one: Ready, target: Target, chat: Chat, sides: list[Arm], live: Live) -> None:
    print(f"{run.name}: one question with arms that are ready, before trees are fitted", file=sys.stderr, flush=True)
    table = cell.decode_early(one.cell.base, target, chat, sides, one.questions[0], run.name, live)
    if table:
        print(table, file=sys.stderr, flush=True)


def waiting(run: StudyRun, decoded: Decoded, trained: Trained) -> str:
    """`bench: 24 of 80 questions, about 34 minutes more`; empty where nothing is left."""
    if not trained.unfinished and not any(ran.left for _, ran in decoded):
        return ""
    trainings = f", trainings to finish: {', '.join(sorted(trained.unfinished))}" if trained.unfinished else ""
    return f"{run.name}: {cell.progress([ran for _, ran in decoded])}{trainings}"


def require_complete(run: StudyRun, decoded: Decoded, trained: Trained) -> None:
    """Raises `SpecBenchError` for what failed, but not for what there was no time for."""
    for _, ran in decoded:
        arms.require_lossless(ran.ledger.block.path)
    failed, unmeasured = sum(ran.failed for _, ran in decoded), sum(ran.unmeasured for _, ran in decoded)
    absent = max(one.wanted - len(trained.unfinished) - ran.arms for one, ran in decoded)
    dropped = len(run.cells) - len(decoded)
    if failed or unmeasured or absent or dropped:
        raise SpecBenchError(
            f"{failed} generations and {unmeasured} measurements failed, {dropped} cells and {absent} arms are missing, "
            "named above; run it again to retry them"
        )
