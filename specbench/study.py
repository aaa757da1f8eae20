"""Run a study, one table or figure of a paper, and say what became of its claims.

python -m specbench.study study=bench
python -m specbench.study study=bench minutes=20                      # whole questions, as long as they fit
python -m specbench.study study=coral_table3,hass_steps minutes=120   # one after the other, the time shared
python -m specbench.study study=coral_table3 seeds=[0]
python -m specbench.study study=bench model=llama2-7b arms=[none,eagle2] datasets=[mtbench,gsm8k]
"""

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError, visible
from specbench.common.storage import require_writable
from specbench.common.types import Name, Natural
from specbench.config import run_spec
from specbench.config.cli import choice, command, run_cli, typed_overrides
from specbench.config.run_spec import RunOptions
from specbench.data.chat import Chat
from specbench.data.prompts import Question
from specbench.engine.device import pick_device
from specbench.engine.target import Target
from specbench.evaluation import arms, cell, several, study_runs
from specbench.evaluation.arms import Arm
from specbench.evaluation.study_runs import StudyCell
from specbench.evaluation.study_training import Trained, train_missing
from specbench.records import blocks, studies
from specbench.records.studies import Study
from specbench.reporting import cells, claims, console, outcome
from specbench.reporting.groups import Asked, measured


@dataclass(frozen=True)
class Options(RunOptions):
    """What `conf/study.yaml` may say beside what goes for every arm; what each means stands there."""

    study: Study
    arms: list[Name] | None
    seeds: list[Natural] | None
    cells: list[Natural] | None
    datasets: list[Name] | None


OURS = ("study", "arms", "seeds", "cells", "datasets", "minutes")


@command("study")
def main(config: Any) -> None:
    """Train what is to be trained, decode what is missing, judge."""
    asked, name = run_spec.checked(config, Options), choice("study")
    budget = Budget.of_minutes(asked["minutes"])
    study = study_runs.chosen(studies.check(asked["study"], name), asked["arms"], name)
    require_writable(Path(asked["results"]))
    missing = studies.unmet(study.get("needs", {}), None, pick_device(asked["model"]["device"]).type == "cuda")
    if missing:
        raise SpecBenchError(f"study {name} is not testable here: it needs {', '.join(missing)}")
    users, members = _users(), list(study_runs.members(study, asked["seeds"]))
    folder = Path(asked["results"]) / name
    prepared = [
        study_runs.prepare(number, overrides, members, users, study, folder)
        for number, overrides in study_runs.cell_overrides(study, asked["cells"], asked["datasets"])
    ]
    trained = train_missing(name, members, study, users, budget)
    torch.set_num_threads(asked["threads"] or torch.get_num_threads())
    found = _decode(name, study, prepared, trained, users, budget)
    _show(name, study, found)
    _conclude(name, prepared, found, trained, budget)


def _users() -> list[str]:
    """What the command line says for all arms."""
    typed = typed_overrides()
    if any(key in ("drafter", "drafters") for key, _ in typed):
        raise SpecBenchError("drafter: a study has its own arms; choose among them with arms=[NAME,…]")
    return [override for key, override in typed if key.split(".")[0] not in OURS]


def _decode(
    name: str, study: Study, prepared: Sequence[StudyCell], trained: Trained, users: list[str], budget: Budget
) -> list[tuple[StudyCell, cell.Ran]]:
    """What is missing of every cell whose prompts are to be had, as long as the budget lasts."""
    measured = studies.measuring_cell(study)
    absent = trained.failed | trained.unfinished
    found: list[tuple[StudyCell, cell.Ran]] = []
    target, chat, loaded = (
        *arms.load(prepared[0].base, study_runs.largest(prepared, prepared[0], absent)),
        prepared[0].base.model,
    )
    asked = list(_asked(name, prepared))
    ahead = [one.work(questions) for _, one, questions in asked]
    for place, (where, one, questions) in enumerate(asked):
        if one.base.model != loaded:  # of another precision
            del target
            target, chat, loaded = *arms.load(one.base, study_runs.largest(prepared, one, absent)), one.base.model
        built = _bound(name, one, target, chat, questions, absent)
        print(f"{where}: {one.title}", file=sys.stderr, flush=True)
        measure = study_runs.repetitions(study, one.base, users) if one.number == measured else {}
        ran = cell.run(
            one.base, target, chat, built, questions, name, measure, budget, console.live, sum(ahead[place:]) / ahead[place]
        )
        if ran.failed:
            print(f"specbench: {ran.failed} generations failed; rows in {ran.ledger.folder} say why", file=sys.stderr)
        found.append((one, ran))
        del built  # before those of the next cell are bound
    if not found:
        raise SpecBenchError(f"study {name}: no cell has its prompts, see above")
    return found


def _asked(name: str, prepared: Sequence[StudyCell]) -> Iterator[tuple[str, StudyCell, list[Question]]]:
    """Where each cell is in the study, the cell, and its questions; without cells whose prompts are not to be had."""
    for place, one in enumerate(prepared, 1):
        where = f"{name}, cell {place} of {len(prepared)}"
        try:
            yield where, one, study_runs.spread(one.base.dataset.load())
        except SpecBenchError as error:  # the other cells are worth having
            print(visible(f"specbench: {where}: {error}"), file=sys.stderr)


def _bound(
    name: str, one: StudyCell, target: Target, chat: Chat, questions: Sequence[Question], absent: Collection[str]
) -> list[Arm]:
    """A cell's arms, the baseline first. Where some have to be timed before, the others answer the first question first."""
    there = [side for side in one.sides if side.member.label not in absent]
    places = {side.member.label: f"arm {n} of {len(there)}" for n, side in enumerate(there, 1)}
    base = arms.baseline(one.base, target)
    early = study_runs.ready_early(there, target)
    found = {side.member.label: study_runs.bind(side, target, places[side.member.label]) for side in early}
    if early:
        ready = [base, *(arm for arm in found.values() if arm is not None)]
        print(f"{name}: one question with arms that are ready, before trees are fitted", file=sys.stderr, flush=True)
        if table := cell.decode_early(one.base, target, chat, ready, questions[0], name, console.live):
            print(table, file=sys.stderr, flush=True)
    for side in there:
        if side not in early:
            found[side.member.label] = study_runs.bind(side, target, places[side.member.label])
    return [base, *(arm for side in there if (arm := found[side.member.label]) is not None)]


def _show(name: str, study: Study, found: Sequence[tuple[StudyCell, cell.Ran]]) -> None:
    """The cells as tables, and what became of the study's claims."""
    base = found[0][0].base
    entries = []
    for one, ran in found:
        entries += (mine := measured([Asked.of(ran.ledger, ran.asked)]))
        outcome.write(one.base.cell_folder, mine, ran.text)
    if base.show:
        console.show(entries, base.details, console.how_to_report(base.results.parent))
    folders = dict.fromkeys(one.base.cell_folder for one, _ in found)
    entries = cells.collect([path for folder in folders for path in blocks.below(folder)])
    console.show_claims(claims.judge_study(name, study, entries), study["arms"])


def _conclude(
    name: str,
    prepared: Sequence[StudyCell],
    found: Sequence[tuple[StudyCell, cell.Ran]],
    trained: Trained,
    budget: Budget,
) -> None:
    """How much there is; raises `SpecBenchError` for what failed, but not for what there was no time for."""
    for _, ran in found:
        arms.require_lossless(ran.ledger.block.path)
    ran_all = [ran for _, ran in found]
    if budget.seconds is not None and (trained.unfinished or any(ran.left for ran in ran_all)):
        waiting = f", trainings to finish: {', '.join(sorted(trained.unfinished))}" if trained.unfinished else ""
        print(f"{name}: {cell.progress(ran_all)}{waiting}")
    failed, unmeasured = sum(ran.failed for _, ran in found), sum(ran.unmeasured for _, ran in found)
    absent = max(one.wanted - len(trained.unfinished) - ran.arms for one, ran in found)
    dropped = len(prepared) - len(found)
    if failed or unmeasured or absent or dropped:
        raise SpecBenchError(
            f"{failed} generations and {unmeasured} measurements failed, {dropped} cells and {absent} arms are missing, "
            "named above; run it again to retry them"
        )


def typed() -> None:
    """The command as typed: one study, or several."""
    if asked := several.named(sys.argv[1:]):
        sys.exit(several.run(*asked))
    main()


if __name__ == "__main__":
    run_cli(typed, "study")
