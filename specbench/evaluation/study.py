"""A study's cells, one after the other: bind the arms of each, decode what is missing, report what is left."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError, warn
from specbench.common.types import is_name
from specbench.config.cli import typed_overrides
from specbench.data.prompts import Question
from specbench.engine.device import free_unused, pick_device
from specbench.evaluation import arms, cell, study_runs
from specbench.evaluation.arms import Arm
from specbench.evaluation.cell import CellResult, Live
from specbench.evaluation.study_runs import PlannedArm, StudyCell
from specbench.evaluation.study_training import TrainingOutcome
from specbench.records import studies, trainings
from specbench.records.studies import Study
from specbench.records.trainings import Member

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

    Raises `SpecBenchError` if this machine cannot run the study, or there is no such arm or cell.
    """
    if not is_name(name):  # of the folder of its rows
        raise SpecBenchError(f"study={name}: must be the name of a file in conf/study, without a folder")
    typed = typed_overrides()
    if any(key in ("drafter", "drafters") for key, _ in typed):
        raise SpecBenchError("drafter: a study has its own arms; choose among them with arms=[NAME,…]")
    overrides = [override for key, override in typed if key.split(".")[0] not in COMMAND_ONLY]
    cuda = pick_device(options["model"]["device"]).type == "cuda"
    study, chosen = study_runs.choose_arms(studies.check(options["study"], name), options["arms"], name, cuda)
    if missing := studies.unmet(study.get("needs", {}), None, cuda):
        raise SpecBenchError(f"study {name} is not testable here: it needs {', '.join(missing)}")
    absent: list[str] = []
    if options["arms"] is None:
        chosen, absent = study_runs.without_untrained(study, chosen, options["model"], overrides)
    else:
        study_runs.require_packages(study, chosen)
    members = list(trainings.members(study, options["seeds"], chosen))
    folder = Path(options["results"]) / name
    numbers = study_runs.choose_cells(study, options["cells"], cuda)
    lines = study_runs.arms_left_out(study, [*chosen, *absent]) if options["arms"] is None else []
    lines.append(study_runs.untrained_line(absent))
    if options["cells"] is None:
        lines.append(study_runs.left_out("cells", range(len(studies.cell_runs(study))), numbers))
    cells = [
        study_runs.prepare(number, words, members, overrides, study, folder)
        for number, words in study_runs.cell_overrides(study, numbers, options["datasets"])
    ]
    for line in filter(None, lines):  # behind whatever is wrong with a cell or an arm
        warn(line)
    return StudyRun(name, study, overrides, members, cells)


def decode(run: StudyRun, trained: TrainingOutcome, budget: Budget, live: Live) -> Decoded:
    """Decode what is missing of every cell whose prompts can be loaded, as long as the budget lasts.

    Raises `SpecBenchError` if no cell has its prompts or could be decoded, or the target cannot be loaded.
    """
    decoder = _Decoder(run, trained.failed | trained.unfinished, budget, live)
    ready = list(_ready(run))
    if not ready:
        raise SpecBenchError(f"study {run.name}: no cell has its prompts, see above")
    work = [one.cell.work(one.questions) for one in ready]
    decoded = [(one.cell, decoder.decode(one, sum(work[n:]) / work[n])) for n, one in enumerate(ready)]
    found = [(one, result) for one, result in decoded if result is not None]
    if not found:
        raise SpecBenchError(f"study {run.name}: no cell could be decoded, see above")
    return found


def _ready(run: StudyRun) -> Iterator[Ready]:
    """The cells whose prompts can be loaded; a line on each other one."""
    for number, study_cell in enumerate(run.cells, 1):
        title = f"{run.name}, cell {number} of {len(run.cells)}"
        try:
            yield Ready(title, study_cell, study_runs.spread(study_cell.base.dataset.load()))
        except SpecBenchError as error:
            warn(f"{title}: {error}")


def _target_of(study_cell: StudyCell) -> tuple[Any, ...]:
    """Cells in which this is equal have the same target: how it is loaded, reached and run, and how much room it needs."""
    base = study_cell.base
    return base.model, base.link, base.backend, base.batch


class _Decoder:
    """Decodes the cells of a study. The target stays until a cell needs another one, see `_target_of`.

    Raises `SpecBenchError` if the first cell's target cannot be loaded.
    """

    target: Any = None
    loaded: Any = None  # `_target_of` the target; None: the last one could not be loaded

    def __init__(self, run: StudyRun, absent: Collection[str], budget: Budget, live: Live):
        self.run, self.absent, self.budget, self.live = run, absent, budget, live
        self.reused = arms.Reused()
        self._load(run.cells[0])

    def _load(self, study_cell: StudyCell) -> None:
        """Load a cell's target, once the last one is freed: memory may not hold both."""
        self.target = self.loaded = None
        free_unused()
        cells = [one for one in self.run.cells if _target_of(one) == _target_of(study_cell)]
        self.groups = {one.base.cell_folder: study_runs.groups(one, self.absent) for one in cells}
        largest = max((group for groups in self.groups.values() for group in groups), key=len)
        self.target, self.chat = arms.load(study_cell.base, [arm.made[0] for arm in largest], self.reused)
        self.loaded = _target_of(study_cell)

    def decode(self, ready: Ready, total_work: float) -> CellResult | None:
        """Decode one cell, whose arms are freed afterwards; None, with a line, if its target cannot be loaded.

        total_work: see `cell.run`.
        """
        try:
            if _target_of(ready.cell) != self.loaded:
                self._load(ready.cell)
        except SpecBenchError as error:
            warn(f"{ready.title}: {error}")
            return None
        return self._decode(ready, total_work)

    def _decode(self, ready: Ready, total_work: float) -> CellResult:
        """Decode a cell group by group of the arms that memory holds at once, of which most cells have one."""
        groups, results = self.groups[ready.cell.base.cell_folder], []
        for number, planned in enumerate(groups, 1):
            if len(groups) > 1:
                names = ", ".join(arm.label for arm in planned)
                print(f"{ready.title}, arms {number} of {len(groups)} that fit into memory: {names}", file=sys.stderr)
            results.append(self._decode_group(ready, planned, total_work))
            free_unused()
        return cell.together(results)

    def _decode_group(self, ready: Ready, planned: Sequence[PlannedArm], total_work: float) -> CellResult:
        base, run = ready.cell.base, self.run
        cell_arms = self._bind(ready, planned)
        print(f"{ready.title}: {ready.cell.title}", file=sys.stderr, flush=True)
        counts = study_runs.repetitions(run.study, ready.cell.number, base, run.overrides)
        questions = list(ready.questions)
        result = cell.run(
            base, self.target, self.chat, cell_arms, questions, run.name, counts, self.budget, self.live, total_work
        )
        if result.failed:
            warn(f"{result.failed} generations failed; rows in {result.ledger.folder} say why")
        return result

    def _bind(self, ready: Ready, planned: Sequence[PlannedArm]) -> list[Arm]:
        """Some of a cell's arms, the baseline first; those that cannot be bound are left out.

        Where trees of some arms have yet to be fitted, the others answer the first question before that.
        """
        baseline = arms.baseline(ready.cell.base, self.target)
        early = study_runs.ready_early(planned, self.target)
        bound = self._bind_some(early, planned)
        if early:
            title = f"{self.run.name}: one question with arms that are ready, before trees are fitted"
            print(title, file=sys.stderr, flush=True)
            first, question = [baseline, *bound.values()], ready.questions[0]
            base, name = ready.cell.base, self.run.name
            table = cell.decode_early(base, self.target, self.chat, first, question, name, self.live, self.budget)
            if table:
                print(table, file=sys.stderr, flush=True)
        bound |= self._bind_some([arm for arm in planned if arm not in early], planned)
        return [baseline, *(bound[arm.label] for arm in planned if arm.label in bound)]

    def _bind_some(self, chosen: Sequence[PlannedArm], planned: Sequence[PlannedArm]) -> dict[str, Arm]:
        """Some of the planned arms, bound, by label."""
        bound = {}
        for arm in chosen:
            print(f"arm {planned.index(arm) + 1} of {len(planned)}: {arm.label}", file=sys.stderr, flush=True)
            if (bound_arm := study_runs.bind(arm, self.target)) is not None:
                bound[arm.label] = bound_arm
        return bound


def unfinished(run: StudyRun, decoded: Decoded, trained: TrainingOutcome) -> str:
    """`bench: 24 of 80 questions, about 34 minutes more`; empty where nothing is left."""
    if not trained.unfinished and not any(result.left or result.waiting for _, result in decoded):
        return ""
    trainings = f", trainings to finish: {', '.join(sorted(trained.unfinished))}" if trained.unfinished else ""
    return f"{run.name}: {cell.progress([result for _, result in decoded])}{trainings}"


def _unfinished(study_cell: StudyCell, trained: TrainingOutcome) -> int:
    """How many arms of a cell wait for their training."""
    return sum(arm.label in trained.unfinished for arm in study_cell.arms)


def require_complete(run: StudyRun, decoded: Decoded, trained: TrainingOutcome) -> None:
    """Raises `SpecBenchError` for what failed, but not for what there was no time for."""
    results = [result for _, result in decoded]
    for result in (part for whole in results for part in whole.parts):
        arms.require_lossless(result.ledger.block.path)
    failed, unmeasured = sum(result.failed for result in results), sum(result.unmeasured for result in results)
    absent = max(one.expected - _unfinished(one, trained) - result.arms for one, result in decoded)
    dropped = len(run.cells) - len(decoded)
    if failed or unmeasured or absent or dropped:
        raise SpecBenchError(
            f"{failed} generations and {unmeasured} measurements failed, {dropped} cells and {absent} arms are missing, "
            "named above; run it again to retry them"
        )
