"""Weights of a study's arms: where each training lies, and training what is missing, within a budget.

A training is named by all that it is told, so that studies with the same recipe share it.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.common import hashing, storage
from specbench.common.budget import Budget
from specbench.common.processes import dying_with_parent
from specbench.common.storage import cache_root
from specbench.records import studies
from specbench.records.schema import WEIGHTS
from specbench.records.studies import Study

GRACE = 90  # seconds beyond its minutes, after which a training that is not through with a step is interrupted


@dataclass(frozen=True)
class Member:
    """An arm with one of its seeds. label: as rows call it."""

    name: str
    seed: int | None
    label: str
    spec: studies.Arm


@dataclass(frozen=True)
class Trained:
    """What became of a study's trainings: labels of members without weights, whose training failed or needs more time."""

    failed: frozenset[str]
    unfinished: frozenset[str]


def training_of(member: Member, study: Study, users: Sequence[str]) -> tuple[str, list[str]] | None:
    """A member's training: its name, and what it is told; None if the member takes weights that lie there.

    It is named by all that it is told, and by the weights that it starts from as they are now, so that no other training is
    ever taken for it.
    """
    if member.seed is None:
        return None
    source = study["arms"][member.spec["weights"]] if "weights" in member.spec else member.spec
    keys = {o: o.lstrip("+~").split("=")[0] for o in source["run"]}
    # from how many ids it will draft is nothing that a training knows of
    own = [o for o, key in keys.items() if key.split(".")[0] == "drafter" and key != "drafter.vocabulary"]
    model = [o for o in users if o.split("=")[0].split(".")[0] in ("model", "threads")]
    overrides = [*model, *own, *source.get("train", []), f"train.settings.seed={member.seed}"]
    drafter = next(o for o in own if o.startswith("drafter=")).partition("=")[2]
    starts = [storage.PROJECT / o.partition("=")[2] / WEIGHTS for o in overrides if o.startswith("train.start=")]
    named_by = [
        [o for o in overrides if not o.startswith("threads=")],
        [hashing.of_file(path) for path in starts if path.is_file()],
    ]
    return f"{drafter}-{hashing.of(named_by)[:12]}", overrides


def weights_folder(member: Member, study: Study, users: Sequence[str]) -> Path | None:
    """Where a member's weights lie once they are trained; None if its study trains none."""
    training = training_of(member, study, users)
    return None if training is None else cache_root() / "studies" / training[0]


def train_missing(name: str, members: Sequence[Member], study: Study, users: Sequence[str], budget: Budget) -> Trained:
    """Train, one after the other, each in a process of its own, what is not there; of several that share a training one."""
    done: dict[Path, bool] = {}  # by folder: is there nothing wrong with it?
    failed: set[str] = set()
    unfinished: set[str] = set()
    for member in members:
        training, folder = training_of(member, study, users), weights_folder(member, study, users)
        if training is None or folder is None or (folder / WEIGHTS).exists():
            continue
        if folder not in done and budget.allows(None):
            print(f"{name}: training {member.label}", file=sys.stderr, flush=True)
            done[folder] = _train(*training, folder, budget)
        if not (folder / WEIGHTS).exists():
            (unfinished if done.get(folder, True) else failed).add(member.label)
            if not done.get(folder, True):
                print(f"specbench: {name}: the training of {member.label} failed; see above", file=sys.stderr)
    return Trained(frozenset(failed), frozenset(unfinished))


def _train(name: str, overrides: Sequence[str], folder: Path, budget: Budget) -> bool:
    """One training, as far as the budget lasts; False if it failed.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    command = [sys.executable, "-m", "specbench.train", *overrides, f"train.name={name}", f"train.out={folder}"]
    command.append("train.missing=true")
    left = budget.left
    if left is not None:
        command.append(f"train.minutes={max(left, 1) / 60:.2f}")
    with subprocess.Popen(command, preexec_fn=dying_with_parent()) as process:
        try:
            code = process.wait(None if left is None else left + GRACE)
        except subprocess.TimeoutExpired:  # before its first step: what it has written by then stays
            process.terminate()
            process.wait()
            return True
        except KeyboardInterrupt:
            process.wait()
            raise
    if code < 0 or code == 130:
        raise KeyboardInterrupt
    return code == 0
