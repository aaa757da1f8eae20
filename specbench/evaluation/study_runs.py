"""From a study to runs: its arms with their seeds, its cells, and the run of every arm in every cell."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.common.errors import SpecBenchError, visible, warn
from specbench.config import catalog, listing, run_spec, validation
from specbench.config.cli import CONF, composed
from specbench.config.run_spec import FailureRecord, GreedyOnly, RunSpec
from specbench.data.prompts import Question
from specbench.engine.memory import NoRoom
from specbench.engine.target import Target
from specbench.engine.verify import Rule
from specbench.evaluation import arms, fitting
from specbench.evaluation.arms import Arm
from specbench.records import studies
from specbench.records.cell_options import option
from specbench.records.metrics import BASELINE
from specbench.records.studies import Study, absent_packages, arms_here, cell_needs, cell_runs, takes_part, unmet
from specbench.records.trainings import Member, weights_folder

GOLDEN = (5**0.5 - 1) / 2
# Options that say where an arm's weights come from.
WEIGHTS_OPTIONS = {"checkpoint", "model.weights"} | {
    f"drafter.{name}" for name in ("weights", "path", "trained", "corpus", "base.weights", "base.path")
}


@dataclass(frozen=True)
class PlannedArm:
    """A member in one cell, not yet bound. made: see `arms.make`. failure: to be written if it cannot be bound."""

    member: Member
    spec: RunSpec
    made: tuple[Any, Rule]
    failure: FailureRecord

    @property
    def label(self) -> str:
        return self.member.label


@dataclass(frozen=True)
class StudyCell:
    """One cell of a study.

    Attributes:
        number: in the study's list. base: what its arms have in common.
        expected: how many arms it should have, without those that cannot sample where the others do.
    """

    number: int
    base: RunSpec
    arms: Sequence[PlannedArm]
    expected: int

    @property
    def title(self) -> str:
        temperature = self.base.sampler.temperature
        drawn = "greedy" if temperature == 0 else f"T={temperature}"
        batch = f", batch of {self.base.batch}" if self.base.batch > 1 else ""
        return f"{self.base.dataset.name}, {drawn}{', replayed' if self.base.replay else ''}{batch}"

    def work(self, questions: Sequence[Question]) -> int:
        """The most tokens that all arms can decode in it, as the cell's share of the study's duration."""
        turns = sum(len(question.turns) for question in questions)
        return max(1, turns * (1 + len(self.arms)) * self.base.decode.max_new_tokens)


def choose_arms(study: Study, names: Sequence[str] | None, name: str, cuda: bool) -> tuple[Study, list[str]]:
    """The study, and the arms to decode. names: the name of a drafter that is no arm becomes an arm; None: all arms.

    cuda: is the target on a GPU? Without names, arms whose needs are not met are left out.
    """
    if names is None:
        return study, arms_here(study, cuda)
    known = dict(study["arms"])
    for arm in names:
        if arm not in known and arm != BASELINE:
            if not (Path(CONF) / "drafter" / f"{arm}.yaml").is_file():
                near = validation.nearest(arm, known)
                raise SpecBenchError(f"arms: study {name} has no arm {visible(arm)}, and there is no such drafter{near}")
            known[arm] = {"run": [f"drafter={arm}"]}
    return {**study, "arms": known}, [arm for arm in names if arm != BASELINE]


def untrained(
    study: Study, names: Sequence[str], model: str, published: Mapping[str, str], typed: Sequence[str]
) -> list[str]:
    """Those of the named arms whose weights, or corpus, are not there, and that the study does not train.

    model: the target's name. published: of its configuration. typed: overrides for all arms.
    """

    def lacks(arm: studies.StudyArm) -> bool:
        own = {override.lstrip("+~").partition("=")[0] for override in (*arm["run"], *typed)}
        drafter = option(arm["run"], "drafter", BASELINE)
        if "train" in arm or "weights" in arm or own & WEIGHTS_OPTIONS or drafter not in catalog.names("drafter"):
            return False
        return listing.drafter_here(catalog.file("drafter", drafter), model, published) == "no"

    return [name for name in names if lacks(study["arms"][name])]


def without_untrained(
    study: Study, names: Sequence[str], model: Mapping[str, Any], typed: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Arms that can be decoded, and the others, see `untrained`. Raises `SpecBenchError` if all are of the others."""
    absent = untrained(study, names, model["name"], model.get("published") or {}, typed)
    kept = [name for name in names if name not in absent]
    if absent and not kept:
        raise SpecBenchError(untrained_line(absent))
    return kept, absent


def untrained_line(names: Sequence[str]) -> str:
    """A line on arms that are left out since nobody trained them, or nothing."""
    if not names:
        return ""
    listed = ",".join(names)
    left = f"arms left out, whose weights are not there: {', '.join(names)}"
    return f"{left}; make train makes them, arms=[{listed}] asks for them"


def choose_cells(study: Study, numbers: Sequence[int] | None, cuda: bool) -> Sequence[int]:
    """The numbers of the cells to decode; None: all whose needs are met. cuda: is the target on a GPU?"""
    there = range(len(cell_runs(study)))
    if numbers is None:
        return [number for number in there if not unmet(cell_needs(study, number), None, cuda)]
    if wrong := [number for number in numbers if number not in there]:
        raise SpecBenchError(f"cells: this study has no cell {wrong[0]}; there are 0 to {len(there) - 1}")
    return numbers


def left_out(what: str, names: Sequence[object], here: Collection[object]) -> str:
    """A line on the arms or cells that this machine cannot run, or nothing. Raises `SpecBenchError` if it can run none."""
    left = [str(name) for name in names if name not in here]
    line = f"{what} left out, which need a GPU or what this project lacks: {', '.join(left)}"
    line += f"; {what}=[{','.join(left)}] decodes them anyway"
    if not here:
        raise SpecBenchError(line)
    return line if left else ""


def arms_left_out(study: Study, here: Collection[str]) -> list[str]:
    """A line on the arms that this machine cannot run, and one on each package that others lack. here: all others."""
    absent = absent_packages(study, [arm for arm in study["arms"] if arm not in here])
    lines = [_install(package, arms) for package, arms in absent.items()]
    unfit = [arm for arm in study["arms"] if not any(arm in arms for arms in absent.values())]
    return [left_out("arms", unfit, here), *lines]


def require_packages(study: Study, arms: Sequence[str]) -> None:
    """Raises `SpecBenchError` if a package that one of these arms needs is not installed."""
    for package, needing in absent_packages(study, arms).items():
        raise SpecBenchError(_install(package, needing))


def _install(package: str, arms: Sequence[str]) -> str:
    return f"arms left out without the package {package}: {', '.join(arms)}; pip install -e '.[peers]' installs it"


def cell_overrides(study: Study, numbers: Sequence[int], datasets: Sequence[str] | None) -> Iterator[tuple[int, list[str]]]:
    """Numbers and overrides of these cells; with `datasets`, each cell once for each of these, and none twice."""
    runs, seen = cell_runs(study), list[list[str]]()
    for number in numbers:
        if datasets is None:
            yield number, runs[number]
            continue
        rest = [o for o in runs[number] if not o.startswith("dataset=")]
        for dataset in datasets:
            if (overrides := [*rest, f"dataset={dataset}"]) not in seen:
                seen.append(overrides)
                yield number, overrides


def base_of(overrides: Sequence[str], results: Path) -> RunSpec:
    """The run that a cell's arms have in common."""
    config = composed("run", list(overrides))
    config.results = str(results)
    return run_spec.from_config(config)


def prepare(
    number: int, overrides: list[str], members: Sequence[Member], typed: list[str], study: Study, results: Path
) -> StudyCell:
    """A cell and its members, as far as they can be checked without target and weights.

    overrides: of the cell. typed: overrides of the command line, for all arms. results: the study's folder.
    """
    base = base_of([*overrides, *typed], results)
    members = [member for member in members if takes_part(member.spec, base.model.adapter)]
    planned, expected = [], len(members)
    for member in members:
        config = composed("run", [*overrides, *member.spec["run"], *typed])
        config.results = str(results)
        failure = FailureRecord(config, member.label)
        try:
            trained = weights_folder(member, study, typed)
            spec = run_spec.from_config(config, weights=None if trained is None else str(trained))
            if spec.model != base.model:
                raise SpecBenchError(f"arm {member.label} names another model; all arms of a study share one")
            planned.append(PlannedArm(member, spec, arms.make(spec), failure))
        except GreedyOnly as error:
            expected -= 1
            warn(f"{member.label} is left out at T={base.sampler.temperature}: {error}")
        except Exception as error:
            failure.write(error)
    return StudyCell(number, base, planned, expected)


def groups(cell: StudyCell, absent: Collection[str]) -> list[list[PlannedArm]]:
    """A cell's arms, without those labelled `absent`, in groups that memory holds at once; at least one, if an empty one.

    Of an arm that does not fit beside the target even alone the failure is recorded.
    """
    planned = [arm for arm in cell.arms if arm.label not in absent]
    if not planned:
        return [[]]
    found = arms.groups(cell.base, [arm.made[0] for arm in planned])
    for index in set(range(len(planned))) - {index for group in found for index in group}:
        planned[index].failure.write(NoRoom(f"it does not fit into memory beside {cell.base.model.name}"))
    return [[planned[index] for index in group] for group in found] or [[]]


def ready_early(planned: Sequence[PlannedArm], target: Target) -> list[PlannedArm]:
    """The arms that can decode at once while trees of others have to be fitted; none if all can, in a replay or a batch.

    A `state=run` drafter is not among them, since it answers all questions in one go.
    """
    slow = [arm for arm in planned if fitting.takes_time(arm.made[0], arm.spec, target, arm.label)]
    if not slow or slow[0].spec.replay or slow[0].spec.batch > 1:
        return []
    return [arm for arm in planned if arm not in slow and arm.made[0].state != "run"]


def bind(planned: PlannedArm, target: Target) -> Arm | None:
    """A copy of an arm, which is freed with its cell, bound to the target; None, with its failure recorded, on errors."""
    member = planned.member
    more = {} if member.seed is None else {"of": member.name, "seed": member.seed}
    try:
        arm = arms.build(planned.spec, target, member.label, copy.deepcopy(planned.made), **more)
    except Exception as error:
        planned.failure.write(error)
        return None
    planned.failure.clear()
    return arm


def repetitions(study: Study, number: int, base: RunSpec, typed: Sequence[str]) -> dict[str, int]:
    """Repetitions by quantity in a cell.

    Unless study or command line say otherwise, peak memory is measured once beside timed rows, and so is the least time of
    a local target's plain pass.
    """
    counts = studies.measured_in(study, number)
    if number == studies.measuring_cell(study):
        local = base.link.local and not base.replay
        counts = {"memory": 0 if base.replay else base.memory, "bandwidth": int(local)} | counts
    given = "memory" in counts and any(o.startswith("memory=") for o in typed)
    return counts | ({"memory": base.memory} if given else {})


def spread(questions: Sequence[Question]) -> list[Question]:
    """The questions in an order of which every beginning is spread evenly over the whole set."""
    return [questions[i] for i in sorted(range(len(questions)), key=lambda i: i * GOLDEN % 1)]
