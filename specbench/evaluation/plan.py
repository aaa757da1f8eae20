"""What all studies plan, what of it is there, and about how long the rest takes: read off blocks, without any model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from specbench.common import environment, hashing
from specbench.common.errors import SpecBenchError
from specbench.common.storage import PROJECT
from specbench.evaluation import study_runs
from specbench.records import blocks, identity, studies
from specbench.records.blocks import BlockIndex
from specbench.records.metrics import BASELINE
from specbench.records.schema import WEIGHTS
from specbench.records.studies import Study, measuring_cell, option, replayed

Kind = Literal["replayed", "trained", "timed"]
ORDER: Mapping[str, int] = {"replayed": 0, "trained": 1, "timed": 2}


@dataclass(frozen=True)
class Task:
    """One cell of one study.

    Attributes:
        cell: its number in the study. kind: replayed; trained, where arms are trained for the study; timed, where seconds
            count. planned, done: questions that every arm has decoded. measured: are the quantities beside them there?
        generations: that are missing. pace: seconds of one, trainings not counted; None: none was decoded for this cell.
        waiting: claims of the study that its rows decide. missing: what keeps it from being testable here.
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
    waiting: int
    missing: tuple[str, ...] = ()

    @property
    def open(self) -> bool:
        """Is there anything left to do, and can it be done here?"""
        return not self.missing and (self.done < self.planned or not self.measured)

    @property
    def seconds(self) -> float | None:
        """That the rest is likely to take."""
        return None if self.pace is None else self.pace * self.generations

    @property
    def dataset(self) -> str:
        return option(self.words, "dataset", "mtbench")

    @property
    def folder(self) -> str:
        """Of the cell, by its name."""
        return folder_name(self.words)


def folder_name(words: Sequence[str]) -> str:
    """The folder of a study's cell, as `RunSpec.cell_folder` names it."""
    temperature, top_p = float(option(words, "sampler.temperature", "0")), float(option(words, "sampler.top_p", "1"))
    drawn = temperature, top_p, int(option(words, "sampler.top_k", "0"))
    tokens, link = int(option(words, "decode.max_new_tokens", "1024")), option(words, "link", "local")
    return blocks.cell_name(option(words, "dataset", "mtbench"), drawn, tokens, link, replayed(words))


@dataclass(frozen=True)
class Scope:
    """Whose plan it is.

    Attributes:
        results: folder of blocks. model: target of all cells that name no other. overrides: what every study is told
            beside. folder: of the studies.
    """

    results: Path
    model: str
    overrides: tuple[str, ...] = ()
    folder: Path = studies.FOLDER


def all_tasks(scope: Scope, only: Sequence[str] | None = None) -> list[Task]:
    """Every cell of every study that is asked for, in the order in which it is worth measuring.

    Raises:
        SpecBenchError: a study that is not there.
    """
    listed = studies.load(scope.folder)
    unknown = [name for name in only or () if name not in listed]
    if unknown:
        raise SpecBenchError(f"studies: there is no study {unknown[0]}; there are {', '.join(listed)}")
    tasks = [
        _task(name, study, number, [*words, *scope.overrides], scope)
        for name, study in listed.items() if only is None or name in only
        for number, words in enumerate(study["cells"])
    ]  # fmt: skip
    tasks = _paced(tasks)
    return sorted(tasks, key=lambda task: (task.priority, ORDER[task.kind], task.study, task.cell))


def _paced(tasks: Sequence[Task]) -> list[Task]:
    """Where a cell says nothing of how long a generation takes, cells of its kind do."""
    found = []
    for task in tasks:
        alike = [t.pace for t in tasks if t.kind == task.kind and t.pace is not None]
        usual = sum(alike) / len(alike) if alike else None
        found.append(replace(task, pace=task.pace if task.pace is not None else usual))
    return found


def kind_of(study: Study, words: Sequence[str]) -> Kind:
    if not replayed(words):
        return "timed"
    return "trained" if any("train" in arm for arm in study["arms"].values()) else "replayed"


def _task(name: str, study: Study, number: int, words: list[str], scope: Scope) -> Task:
    kind = kind_of(study, words)
    planned = int(option(words, "data.limit", "80"))
    target = option(words, "model.name", option(words, "model", scope.model))
    known = _there(scope.results / name / target / folder_name(words), kind)
    labels = _labels(study, words, known)
    turns = 1 + max((turn for k in known for _, _, turn in k.rows), default=0)
    done = min(planned, _done(known, labels, turns))
    return Task(
        study=name,
        cell=number,
        kind=kind,
        priority=study.get("priority", 5),
        words=tuple(words),
        planned=planned,
        done=done,
        measured=number != measuring_cell(study) or _measured(known, study),
        generations=(planned - done) * len(labels) * turns,
        pace=blocks.pace(known),
        waiting=len(study.get("claims", [])),
        missing=tuple(studies.unmet(study.get("needs", {}), None, torch.cuda.is_available())),
    )


def _there(folder: Path, kind: Kind) -> list[BlockIndex]:
    """Blocks of a cell that count here: of timed ones those of this kind of machine."""
    known = [k for k in blocks.scan_all(folder, BASELINE) if k.header["decoding"] == identity.DECODING]
    if kind != "timed":
        return known
    hardware: Any = environment.hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return [
        k for k in known
        if identity.machine_key({**k.header, "hardware": hardware, "timing": identity.TIMING}) == k.machine
    ]  # fmt: skip


def _labels(study: Study, words: Sequence[str], known: Sequence[BlockIndex]) -> list[str]:
    """Which arms a question needs; of those that cannot sample none is wanted where the others do."""
    labels = [member.label for member in study_runs.members(study, None)]
    if float(option(words, "sampler.temperature", "0")) > 0 and known:
        labels = [label for label in labels if label in known[-1].arms]
    return [BASELINE, *labels]


def _done(known: Sequence[BlockIndex], labels: Sequence[str], turns: int) -> int:
    """Questions of which every arm, as it is now, has every turn."""
    rows: dict[str, set[tuple[str, int]]] = {label: set() for label in labels}
    for label in labels:
        newest = next((k for k in reversed(known) if label in k.arms), None)
        if newest is None or _stale(newest.header["arms"][label]):
            return 0
        recipe = newest.arms[label][0]
        by_tree: dict[str, set[tuple[str, int]]] = {}
        for k in known:
            if label in k.arms and k.arms[label][0] == recipe:
                mine = {(text, turn) for who, text, turn in k.rows if who == label}
                by_tree[k.arms[label][1]] = by_tree.get(k.arms[label][1], set()) | mine
        rows[label] = max(by_tree.values(), key=len)
    common = set.intersection(*rows.values())
    return sum(all((text, turn) in common for turn in range(turns)) for text in {text for text, _ in common})


def _stale(arm: Any) -> bool:
    """Do the weights that the arm names hold something else by now?"""
    path = PROJECT / str(arm["drafter"].get("weights")) / WEIGHTS
    known = (arm.get("contents") or {}).get(WEIGHTS)
    return known is not None and path.is_file() and hashing.of_file(path) != known


def _measured(known: Sequence[BlockIndex], study: Study) -> bool:
    """Has every quantity of the study all of its repetitions, of every arm of which it was taken at all?"""
    for what, times in study.get("measure", {}).items():
        by_label: dict[str, int] = {}
        for label, quantity, _ in {key for k in known for key in k.measured}:
            if quantity == what:
                by_label[label] = by_label.get(label, 0) + 1
        if times and (not by_label or min(by_label.values()) < times):
            return False
    return True
