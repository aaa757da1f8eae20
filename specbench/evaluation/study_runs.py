"""From a study to runs: which arms and seeds, which cells, each with the run that every arm decodes there."""

import copy
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.common.errors import SpecBenchError, format_exception, visible
from specbench.config import run_spec, validation
from specbench.config.cli import CONF
from specbench.config.run_spec import GreedyOnly, RunSpec
from specbench.data.prompts import Question
from specbench.engine.target import Target
from specbench.engine.verify import Rule
from specbench.evaluation import arms, fitting
from specbench.evaluation.arms import Arm
from specbench.evaluation.study_training import Member, weights_folder
from specbench.records.metrics import BASELINE
from specbench.records.rows import CellFailure
from specbench.records.studies import Study

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Side:
    """A member in one cell, ready to be bound.

    Attributes:
        made: its drafter and rule. failure: what is written down, and where, if it cannot be bound.
    """

    member: Member
    spec: RunSpec
    made: tuple[Any, Rule]
    failure: CellFailure
    path: Path


@dataclass(frozen=True)
class StudyCell:
    """One cell of a study.

    Attributes:
        number: in the study's list. base: what its arms have in common. wanted: how many arms there should be; one that
            cannot sample has no place where the others do.
    """

    number: int
    base: RunSpec
    sides: Sequence[Side]
    wanted: int

    @property
    def title(self) -> str:
        temperature = self.base.sampler.temperature
        drawn = "greedy" if temperature == 0 else f"T={temperature}"
        return f"{self.base.dataset.name}, {drawn}{', replayed' if self.base.replay else ''}"

    def work(self, questions: Sequence[Question]) -> int:
        """Tokens that decoding it takes at most, with all arms: what cells are weighed by."""
        turns = sum(len(question.turns) for question in questions)
        return max(1, turns * (1 + len(self.sides)) * self.base.decode.max_new_tokens)


def chosen(study: Study, wanted: Sequence[str] | None, name: str) -> Study:
    """The study with the arms that were asked for; a drafter's name that is no arm's is an arm by itself."""
    if wanted is None:
        return study
    known = dict(study["arms"])
    for arm in wanted:
        if arm not in known and arm != BASELINE:
            if not (Path(CONF) / "drafter" / f"{arm}.yaml").is_file():
                near = validation.nearest(arm, known)
                raise SpecBenchError(f"arms: study {name} has no arm {visible(arm)}, and there is no such drafter{near}")
            known[arm] = {"run": [f"drafter={arm}"]}
    return {**study, "arms": {arm: known[arm] for arm in wanted if arm != BASELINE}}


def members(study: Study, seeds: Sequence[int] | None) -> Iterator[Member]:
    """Every arm with each of its seeds; one that is not trained here has none."""
    for name, spec in study["arms"].items():
        trained = spec if "train" in spec else study["arms"].get(spec.get("weights", ""), spec)
        if "train" not in trained:
            yield Member(name, None, name, spec)
            continue
        for seed in seeds if seeds is not None else trained.get("seeds", [0]):
            yield Member(name, seed, f"{name}@{seed}", spec)


def cell_overrides(
    study: Study, cells: Sequence[int] | None, datasets: Sequence[str] | None
) -> Iterator[tuple[int, list[str]]]:
    """What each chosen cell says, with its number; with other datasets, each cell for each of them."""
    count = len(study["cells"])
    for number in range(count) if cells is None else cells:
        if number >= count:
            raise SpecBenchError(f"cells: this study has no cell {number}; there are 0 to {count - 1}")
        overrides = study["cells"][number]
        if datasets is None:
            yield number, overrides
        else:
            rest = [o for o in overrides if not o.startswith("dataset=")]
            yield from ((number, [*rest, f"dataset={dataset}"]) for dataset in datasets)


def base_of(overrides: Sequence[str], results: Path) -> RunSpec:
    """What a cell's arms have in common."""
    config = run_spec.compose_run(overrides)
    config.results = str(results)
    return run_spec.from_config(config)


def prepare(
    number: int, overrides: list[str], members: Sequence[Member], users: list[str], study: Study, results: Path
) -> StudyCell:
    """A cell and its members, as far as they can be checked without target and weights.

    Args:
        overrides: of the cell. users: what the command line says for all arms. results: the study's folder.
    """
    base = base_of([*overrides, *users], results)
    sides, wanted = [], len(members)
    for member in members:
        config = run_spec.compose_run([*overrides, *member.spec["run"], *users])
        config.results = str(results)
        path = run_spec.failure_path(config, member.label)
        try:
            trained = weights_folder(member, study, users)
            spec = run_spec.from_config(config, weights=None if trained is None else str(trained))
            if spec.model != base.model:
                raise SpecBenchError(f"arm {member.label} names another model; all arms of a study share one")
            failure = run_spec.failure(config, "", member.label)
            sides.append(Side(member, spec, arms.make(spec), failure, path))
        except GreedyOnly as error:
            wanted -= 1
            print(
                visible(f"specbench: {member.label} is left out at T={base.sampler.temperature}: {error}"), file=sys.stderr
            )
        except Exception as error:
            _fail(run_spec.failure(config, format_exception(error), member.label), path)
    return StudyCell(number, base, sides, wanted)


def largest(cells: Sequence[StudyCell], loaded: StudyCell, absent: Collection[str]) -> list[Any]:
    """The drafters of the cell that has most of them, of those that share a cell's target. absent: labels left out."""
    alike = [
        [s.made[0] for s in c.sides if s.member.label not in absent] for c in cells if c.base.model == loaded.base.model
    ]
    return max(alike, key=len)


def ready_early(sides: Sequence[Side], target: Target) -> list[Side]:
    """Those that can decode at once, if others cannot; none where all can, or where there is no clock.

    A drafter that remembers earlier prompts is none of them: it answers all questions in one go.
    """
    slow = [side for side in sides if fitting.takes_time(side.made[0], side.spec, target, side.member.label)]
    if not slow or slow[0].spec.replay:
        return []
    return [side for side in sides if side not in slow and side.made[0].state != "run"]


def bind(side: Side, target: Target, place: str) -> Arm | None:
    """A member bound to the target; None, and its failure written down, where that cannot be. place: `arm 1 of 7`.

    What is bound is a copy, so that it goes with its cell.
    """
    member = side.member
    print(f"{place}: {member.label}", file=sys.stderr, flush=True)
    more = {} if member.seed is None else {"of": member.name, "seed": member.seed}
    try:
        arm = arms.build(side.spec, target, member.label, copy.deepcopy(side.made), **more)
    except Exception as error:
        side.failure.error = format_exception(error)
        _fail(side.failure, side.path)
        return None
    side.path.unlink(missing_ok=True)
    return arm


def _fail(failure: CellFailure, path: Path) -> None:
    """The others are worth having."""
    failure.write(path)
    print(visible(f"specbench: {failure.drafter} on {failure.dataset}: {failure.error}"), file=sys.stderr)


def repetitions(study: Study, base: RunSpec, users: Sequence[str]) -> dict[str, int]:
    """How many times over each quantity is measured. Peak memory is beside timed rows, unless the study or the command
    line says otherwise."""
    times: dict[str, int] = {"memory": 0 if base.replay else base.memory}
    times |= {str(what): count for what, count in study.get("measure", {}).items()}
    return times | ({"memory": base.memory} if any(o.startswith("memory=") for o in users) else {})


def spread(questions: Sequence[Question]) -> list[Question]:
    """The same questions in an order whose beginnings are spread over the whole set, as its categories are."""
    return [questions[i] for i in sorted(range(len(questions)), key=lambda i: i * GOLDEN % 1)]
