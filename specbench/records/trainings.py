"""The trainings that make the weights of a study's arms: their names, overrides and folders.

A training is named by a digest of its overrides and its objective's version, so that studies with the same recipe share it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.common import hashing, storage
from specbench.common.storage import cache_root
from specbench.records import identity, studies
from specbench.records.schema import WEIGHTS, ArmHeader
from specbench.records.studies import Study

DEFAULT_MODEL = "model=smollm2-135m"  # of conf/train.yaml; named or not, the training is the same


@dataclass(frozen=True)
class Member:
    """An arm with one of its seeds. label: as rows call it."""

    name: str
    seed: int | None
    label: str
    spec: studies.StudyArm


def members(study: Study, seeds: Sequence[int] | None, names: Sequence[str]) -> Iterator[Member]:
    """Every named arm with each of its seeds; an arm that the study does not train has none."""
    for name in dict.fromkeys(names):
        spec = study["arms"][name]
        trained = spec if "train" in spec else study["arms"].get(spec.get("weights", ""), spec)
        if "train" not in trained:
            yield Member(name, None, name, spec)
            continue
        for seed in seeds if seeds is not None else trained.get("seeds", [0]):
            yield Member(name, seed, f"{name}@{seed}", spec)


def training_of(member: Member, study: Study, typed: Sequence[str]) -> tuple[str, list[str]] | None:
    """Name and overrides of a member's training; None if the member takes weights that are there.

    The name is a digest of the overrides, the weights that the training starts from, and the version of the drafter's
    objective (`identity.OBJECTIVES`), so that it is unique.
    """
    if member.seed is None:
        return None
    source = _source(member, study)
    keys = {o: o.lstrip("+~").split("=")[0] for o in source["run"]}
    # training does not depend on the draft vocabulary
    own = [o for o, key in keys.items() if key.split(".")[0] == "drafter" and key != "drafter.vocabulary"]
    model = [o for o in typed if o.split("=")[0].split(".")[0] in ("model", "threads")]
    overrides = [*model, *own, *source.get("train", []), f"train.settings.seed={member.seed}"]
    drafter = next(o for o in own if o.startswith("drafter=")).partition("=")[2]
    target = next((o for o in reversed(model) if o.startswith("model=")), DEFAULT_MODEL).partition("=")[2]
    left_out = {DEFAULT_MODEL, *(o for o in model if o.startswith("threads="))}
    named_by = sorted({o.replace("${model.name}", target) for o in overrides} - left_out)  # in any order
    starts = [o.partition("=")[2] for o in named_by if o.startswith("train.start=")]
    files = [storage.project_path(start) / WEIGHTS for start in starts]
    started = [hashing.of_file(path) for path in files if path.is_file()]
    if objective := identity.OBJECTIVES.get(drafter):
        named_by.append(f"objective={objective}")
    if (start := start_of(member, study)) is not None and (before := training_of(start, study, typed)):
        started.append(before[0])
        overrides.append(f"train.start={folder_of(before[0])}")
    return f"{drafter}-{hashing.of([named_by, started])[:12]}", overrides


def current_trainings(arm: str, study: Study, model: str) -> set[str]:
    """Names of the trainings, one a seed, by which the study would make an arm's weights today; empty if it trains none."""
    typed = [f"model={model}"]
    named = (training_of(member, study, typed) for member in members(study, None, [arm]))
    return {training[0] for training in named if training is not None}


def is_of(arm: ArmHeader, training: str) -> bool:
    """Are an arm's weights, or its draft model's, of this training? arm: its part of a block's header."""
    return training in str(arm["drafter"])


def weights_read(arm: ArmHeader) -> dict[str, str]:
    """SHA-256 of an arm's weights, and of those of the drafter below it, by the folder that they came from."""
    drafter, contents = arm["drafter"], arm.get("contents") or {}
    below: Any = drafter.get("base") or {}
    read = {str(drafter.get("weights")): contents.get(WEIGHTS), str(below.get("weights")): contents.get(f"base/{WEIGHTS}")}
    return {folder: digest for folder, digest in read.items() if digest is not None}


def studies_folder() -> Path:
    """Where the weights are that studies trained."""
    return cache_root() / "studies"


def _source(member: Member, study: Study) -> studies.StudyArm:
    """The arm whose training makes a member's weights."""
    return study["arms"][member.spec["weights"]] if "weights" in member.spec else member.spec


def start_of(member: Member, study: Study) -> Member | None:
    """The member from whose weights a member's training goes on."""
    name = _source(member, study).get("start")
    return None if name is None else Member(name, member.seed, f"{name}@{member.seed}", study["arms"][name])


def weights_folder(member: Member, study: Study, typed: Sequence[str]) -> Path | None:
    """The folder of a member's weights, trained or not; None if its study trains none."""
    training = training_of(member, study, typed)
    return None if training is None else folder_of(training[0])


def folder_of(training: str) -> Path:
    """The folder of the weights of a training with this name."""
    return studies_folder() / training
