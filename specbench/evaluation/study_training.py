"""Training the weights of a study's arms that are missing, within a budget."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError, warn
from specbench.common.processes import dying_with_parent, signal_of, was_interrupted
from specbench.config import train_spec
from specbench.config.cli import composed
from specbench.records.blocks import locked
from specbench.records.schema import PROVENANCE
from specbench.records.studies import Study
from specbench.records.trainings import Member, folder_of, start_of, training_of
from specbench.training.job import Stage
from specbench.training.overwriting import differences, made_by
from specbench.tuning.train_stages import lacking

GRACE = 90  # seconds beyond its time limit after which a training is terminated in the middle of a step


@dataclass(frozen=True)
class TrainingOutcome:
    """Labels of members that have no weights yet: their training failed, or needs more time."""

    failed: frozenset[str]
    unfinished: frozenset[str]


def train_missing(
    name: str, members: Sequence[Member], study: Study, typed: Sequence[str], budget: Budget
) -> TrainingOutcome:
    """Train what is missing, one after the other, each in a process of its own; members may share a training.

    All arms are trained with one seed before any is with the next, so that rows that compare them come early. What another
    process is training already comes last: then that is waited for.
    """
    succeeded: dict[Path, bool] = {}  # by folder
    failed: set[str] = set()
    unfinished: set[str] = set()
    ordered = sorted(_with_starts(members, study), key=lambda member: member.seed or 0)
    queue = [(member, False) for member in ordered]  # and whether to wait for another process
    while queue:
        member, wait = queue.pop(0)
        training, start = training_of(member, study, typed), start_of(member, study)
        if training is None or lacks(*training) is None:
            continue
        folder = folder_of(training[0])
        if start is not None and start.label in failed | unfinished:
            (failed if start.label in failed else unfinished).add(member.label)
            continue
        if start is not None and any(start.label == waiting.label for waiting, _ in queue):
            queue.append((member, wait))
            continue
        if folder not in succeeded and budget.allows(None):
            with locked(folder.parent, folder.name, wait, budget.left) as ours:
                if not ours and not wait:
                    queue.append((member, True))
                    continue
                if ours and lacks(*training) is not None:
                    print(f"{name}: training {member.label}", file=sys.stderr, flush=True)
                    succeeded[folder] = _train(*training, folder, budget)
        if (left := lacks(*training)) is None:
            continue
        if succeeded.get(folder, True):
            unfinished.add(member.label)
        elif left == "weights":
            failed.add(member.label)
            warn(f"{name}: the training of {member.label} failed; see above")
    return TrainingOutcome(frozenset(failed), frozenset(unfinished))


def lacks(name: str, overrides: Sequence[str]) -> Stage | None:
    """What the folder of a training's weights lacks: also them, where the recipe that made them was edited since."""
    folder = folder_of(name)
    if (left := lacking(folder)) is not None:
        return left
    try:
        return "weights" if differences(folder / PROVENANCE, _recipe(tuple(overrides))) else None
    except SpecBenchError:  # these overrides make nothing today; their training says why
        return "weights"


@cache
def _recipe(overrides: tuple[str, ...]) -> dict[str, Any]:
    """All options by which a training with these overrides makes weights, as conf/ has them now."""
    job = train_spec.from_config(composed("train", [*overrides, "train.missing=true"]))
    return made_by(job.drafter, job.recipe)


def _with_starts(members: Sequence[Member], study: Study) -> list[Member]:
    """The members and those from whose weights they go on, these first; each once."""
    ordered: dict[str, Member] = {}
    for member in members:
        start = start_of(member, study)
        for each in [*(_with_starts([start], study) if start else ()), member]:
            ordered.setdefault(each.label, each)
    return list(ordered.values())


def _train(name: str, overrides: Sequence[str], folder: Path, budget: Budget) -> bool:
    """One training, as long as the budget lasts; False if it failed, `KeyboardInterrupt` if it was interrupted."""
    out = [f"train.name={name}", f"train.out={folder}"]
    out += ["train.missing=true"] if lacking(folder) is not None else ["train.overwrite=true"]  # an earlier recipe's
    command, left = [sys.executable, "-m", "specbench.train", *overrides, *out], budget.left
    if left is not None:
        command.append(f"train.minutes={max(left, 1) / 60:.2f}")
    with subprocess.Popen(command, preexec_fn=dying_with_parent()) as process:
        try:
            code = process.wait(None if left is None else left + GRACE)
        except subprocess.TimeoutExpired:  # in its first step; files that are complete stay
            process.terminate()
            process.wait()
            return True
        except KeyboardInterrupt:
            process.wait()
            raise
    if was_interrupted(code):
        raise KeyboardInterrupt
    if ending := signal_of(code):
        warn(f"{name}: this training was ended by {ending}")
    return code == 0
