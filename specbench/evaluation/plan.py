"""The plan of all studies: what their cells have, and about how long the rest takes; read from blocks, without models."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from specbench.common import environment, hashing
from specbench.common.errors import SpecBenchError
from specbench.common.storage import project_path
from specbench.config import catalog
from specbench.evaluation import study_runs
from specbench.evaluation.study_training import lacks
from specbench.records import blocks, identity, studies, trainings
from specbench.records.blocks import BlockIndex
from specbench.records.cell_options import CellOptions, option
from specbench.records.metrics import BASELINE
from specbench.records.schema import WEIGHTS
from specbench.records.studies import ON_DEMAND, Study, measured_in
from specbench.records.trainings import Member, training_of

Kind = Literal["replayed", "trained", "timed"]
ORDER: Mapping[str, int] = {"replayed": 0, "trained": 1, "timed": 2}


@dataclass(frozen=True)
class Task:
    """One cell of one study.

    Attributes:
        cell: its number in the study. kind: `timed`, or replayed with arms that are `trained` for the study or not.
        planned, done: questions, all and those that every arm has decoded. measured: are all other quantities there?
        stale: arms that have other weights now than in their rows. trainings: of its arms, that come first.
        missing: needs of the study that this machine does not meet.
        records: number of rows and measurements that there are, of whichever arms.
        generations: that are missing. pace: seconds of one, without trainings; None: unknown.
        claims: that wait for its rows, if that was looked up, see `specbench.reporting.undecided`.
    """

    study: str
    cell: int
    kind: Kind
    priority: int
    words: tuple[str, ...]
    planned: int
    done: int
    measured: bool
    generations: int
    pace: float | None
    stale: tuple[str, ...] = ()
    trainings: int = 0
    missing: tuple[str, ...] = ()
    records: int = 0
    claims: int = 0

    @property
    def open(self) -> bool:
        """Is anything left to do that can be done here?"""
        return not self.missing and (self.done < self.planned or not self.measured)

    @property
    def seconds(self) -> float | None:
        """Estimate of the time that the rest takes, without trainings."""
        return None if self.pace is None else self.pace * self.generations

    @property
    def options(self) -> CellOptions:
        return CellOptions.of(self.words)


@dataclass(frozen=True)
class Scope:
    """What a plan is made for.

    Attributes:
        results: folder of blocks. model: target of all cells that name no other. overrides: for all studies.
        folder: of the studies' files.
    """

    results: Path
    model: str
    overrides: tuple[str, ...] = ()
    folder: Path = studies.FOLDER


def all_tasks(scope: Scope, only: Sequence[str] | None = None) -> list[Task]:
    """Every cell of these studies, or of all but those `ON_DEMAND`, in the order to measure.

    Raises `SpecBenchError` for an unknown study.
    """
    listed = studies.load(scope.folder)
    unknown = [name for name in only or () if name not in listed]
    if unknown:
        raise SpecBenchError(f"studies: there is no study {unknown[0]}; there are {', '.join(listed)}")
    tasks = [
        _task(name, study, number, [*words, *scope.overrides], scope)
        for name, study in listed.items() if (study.get("priority") != ON_DEMAND if only is None else name in only)
        for number, words in enumerate(studies.cell_runs(study))
    ]  # fmt: skip
    for kind in ORDER:
        paces = [task.pace for task in tasks if task.kind == kind and task.pace is not None]
        usual = sum(paces) / len(paces) if paces else None
        tasks = [replace(t, pace=usual) if t.kind == kind and t.pace is None else t for t in tasks]
    return sorted(tasks, key=lambda task: (task.priority, ORDER[task.kind], task.study, task.cell))


def _task(name: str, study: Study, number: int, words: list[str], scope: Scope) -> Task:
    """The state of one cell by its blocks: questions that every arm has with its newest recipe, pace, what is lacking."""
    cuda = torch.cuda.is_available()
    options = CellOptions.of(words)
    target = option(words, "model.name", option(words, "model", scope.model))
    possible = studies.arms_here(study, cuda)
    published = _published(option(words, "model", scope.model))
    absent = study_runs.untrained(study, possible, target, published, scope.overrides)
    here = [arm for arm in possible if arm not in absent]
    kind: Kind = "timed"
    if options.replayed:
        kind = "trained" if any("train" in study["arms"][label] for label in here) else "replayed"
    newest = _blocks(scope.results / name / target / options.folder)
    known = _of_this_machine(newest) if kind == "timed" else newest
    members = [m for m in trainings.members(study, None, here) if studies.takes_part(m.spec, options.adapted)]
    if options.temperature > 0:
        members = [member for member in members if not _greedy_only(member)]
    labels = [BASELINE, *(member.label for member in members)]
    typed = [f"model={scope.model}", *scope.overrides]
    by_label = {m.label: training for m in members if (training := training_of(m, study, typed)) is not None}
    made_by = {label: training for label, (training, _) in by_label.items()}
    turns = 1 + max((turn for k in known for _, _, turn in k.rows), default=0)
    decoded = [_decoded(known, label, made_by) for label in labels]
    planned, done = options.questions, min(options.questions, _questions(set.intersection(*decoded), turns))
    return Task(
        study=name,
        cell=number,
        kind=kind,
        priority=study.get("priority", 5),
        words=tuple(words),
        planned=planned,
        done=done,
        measured=_measured(known, measured_in(study, number)),
        generations=sum(max(0, planned - _questions(one, turns)) for one in decoded) * turns,
        pace=blocks.pace(known),
        stale=tuple(label for label in labels if _is_stale(newest, label, made_by)),
        trainings=sum(lacks(*training) is not None for training in dict(by_label.values()).items()),
        missing=(
            *studies.unmet(studies.cell_needs(study, number), None, cuda),
            *["trained drafters"] * (absent != [] and not here),
        ),
        records=sum(len(k.rows) + len(k.measured) for k in known),
    )


def _greedy_only(member: Member) -> bool:
    """Is an arm's drafter defined for greedy decoding alone?"""
    return bool(catalog.drafter_class(option(member.spec["run"], "drafter", BASELINE)).greedy_only)


def _published(model: str) -> dict[str, str]:
    """The checkpoints that a target's configuration knows, by drafter."""
    return (model in catalog.names("model") and catalog.file("model", model).content.get("published")) or {}


def _blocks(folder: Path) -> list[BlockIndex]:
    """The blocks of a cell that count: of its newest settings."""
    known = [
        k
        for k in blocks.scan_all(folder, BASELINE)
        if k.header["decoding"] == identity.DECODING and identity.cell_key({**k.header, **identity.SPEEDS}) == k.cell
    ]
    return [k for k in known if k.cell == known[-1].cell]


def _of_this_machine(known: Iterable[BlockIndex]) -> list[BlockIndex]:
    """Those whose seconds compare with seconds measured here."""
    hardware: Any = environment.hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    now = {"hardware": hardware, **identity.SPEEDS}
    return [k for k in known if identity.machine_key({**k.header, **now}) == k.machine]


def _decoded(known: Sequence[BlockIndex], label: str, trained: Mapping[str, str]) -> set[tuple[str, int]]:
    """Text and turn of what an arm, as its newest block describes it, has decoded; nothing if it has other weights now.

    trained: by label, the name of the training that makes its weights.
    """
    latest = _newest(known, label)
    if latest is None or _is_stale(known, label, trained):
        return set()
    recipe = latest.arms[label][0]
    by_tree: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for k in known:
        if label in k.arms and k.arms[label][0] == recipe:
            by_tree[k.arms[label][1]] |= {(text, turn) for drafter, text, turn in k.rows if drafter == label}
    return max(by_tree.values(), key=len)


def _questions(decoded: Collection[tuple[str, int]], turns: int) -> int:
    """How many questions have all turns."""
    return sum(all((text, turn) in decoded for turn in range(turns)) for text in {text for text, _ in decoded})


def _newest(known: Sequence[BlockIndex], label: str) -> BlockIndex | None:
    """The last block that has an arm."""
    return next((k for k in reversed(known) if label in k.arms), None)


def _is_stale(known: Sequence[BlockIndex], label: str, trained: Mapping[str, str]) -> bool:
    """Has an arm other weights now than when its newest block was written? trained: see `_decoded`."""
    if (newest := _newest(known, label)) is None:
        return False
    arm: Any = newest.header["arms"][label]
    if not trainings.is_of(arm, trained.get(label, "")):
        return True
    path = project_path(str(arm["drafter"].get("weights"))) / WEIGHTS
    read = (arm.get("contents") or {}).get(WEIGHTS)
    return read is not None and path.is_file() and hashing.of_file(path) != read


def _measured(known: Sequence[BlockIndex], planned: Mapping[str, int]) -> bool:
    """Has every quantity of a cell all repetitions, for every arm that it was measured of at least once?"""
    measured = {key for k in known for key in k.measured}
    for name, repetitions in planned.items():
        counts = Counter(label for label, quantity, _ in measured if quantity == name)
        if repetitions and min(counts.values(), default=0) < repetitions:
            return False
    return True
