"""One training as a frozen `TrainJob`, from a composed configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig
from pydantic import Field

from specbench.common.errors import SpecBenchError
from specbench.common.storage import project_path, require_writable
from specbench.common.types import Duration, Name, Rows, Text, Threads, Tokens
from specbench.config import catalog, validation
from specbench.data.conversations import Conversations
from specbench.engine import adapters
from specbench.engine.drafter import Drafter
from specbench.engine.loading import ModelSpec
from specbench.engine.policies import TreePolicy
from specbench.records.schema import SKIP, WEIGHTS
from specbench.training.corpus import CorpusSettings
from specbench.training.job import IN_ONE_PROCESS, WITH_DRAFTER, Stage, TrainJob
from specbench.training.overwriting import made_by, refuse_overwriting
from specbench.training.recipe import TrainSettings


@dataclass(frozen=True)
class Train:
    """The options of `conf/train/*.yaml` and `conf/recipe/*.yaml`, explained in `conf/train/small.yaml`."""

    name: Name | None
    out: Text
    start: Text | None
    missing: bool
    overwrite: bool
    minutes: Duration | None
    build: bool
    until: Stage
    packed: Text
    pack: Text | None
    shard_target: bool
    online: bool
    follow: bool
    batch: Rows
    row_tokens: Annotated[Tokens, Field(ge=2)] | None
    answers_only: bool
    settings: TrainSettings
    corpus: CorpusSettings
    text: Conversations


@dataclass(frozen=True)
class TrainOptions:
    """The options of `conf/train.yaml` and its groups."""

    threads: Threads | None
    model: ModelSpec
    tree: TreePolicy
    drafter: Drafter
    train: Train


def from_config(config: DictConfig) -> TrainJob:
    """The training of a composed configuration.

    Raises `SpecBenchError` for invalid options, contradictions among them, or weights that would be overwritten.
    """
    options = validation.check(config, TrainOptions)
    recipe, drafter = options["train"], options["drafter"]
    catalog.require_own_name(drafter)
    for name in ("quantised", "adapter"):
        if options["model"].get(name):
            raise SpecBenchError(f"model.{name}: drafters are trained from the original target; leave it out")
    drafter_class: Any = get_class(drafter["_target_"])
    _require_trainable(recipe, drafter, drafter_class)
    made: dict[str, Any] = {name: instantiate(recipe[name]) for name in ("settings", "corpus", "text")}
    for number, phase in enumerate(recipe["settings"]["phases"]):
        key = f"train.settings.phases[{number}].drafter"
        validation.check_some(phase.get("drafter", {}), drafter_class, drafter_class.phased, key)
    if not (recipe["overwrite"] or recipe["missing"]):
        if recipe["until"] == "search":
            refuse_overwriting(project_path(recipe["out"]) / SKIP)
        elif recipe["until"] == "weights":
            refuse_overwriting(project_path(recipe["out"]) / WEIGHTS, made_by(drafter, recipe))
    plain = {field.name: recipe[field.name] for field in fields(TrainJob) if field.name in recipe}
    folders = {name: project_path(recipe[name]) for name in ("out", "packed")}
    return TrainJob(
        **plain | made | folders,
        threads=options["threads"],
        model=instantiate(options["model"]),
        drafter=drafter,
        make_drafter=partial(instantiate, drafter),
        recipe=recipe,
    )


def _require_trainable(recipe: Mapping[str, Any], drafter: Mapping[str, Any], drafter_class: Any) -> None:
    """Raises `SpecBenchError`, before anything is loaded, for a training that would fail."""
    if recipe["shard_target"] and recipe["build"]:
        raise SpecBenchError(
            "a target spread over processes runs in all of them at once and writes no corpus; write it before, in one "
            "process (model.device_map=auto), then train with train.build=false"
        )
    if recipe["shard_target"] and recipe["until"] != "weights":
        raise SpecBenchError(f"train.until={recipe['until']}: {IN_ONE_PROCESS}")
    if recipe["until"] not in WITH_DRAFTER:
        return
    if drafter.get("vocabulary") is not None:
        raise SpecBenchError("drafter.vocabulary needs no training; train without it, and draft with it")
    if drafter_class.trains_target:
        adapters.require_peft()
        if recipe["shard_target"]:
            raise SpecBenchError(f"drafter={drafter['name']} trains the target, too; leave out train.shard_target")
        if recipe["until"] == "acceptance":
            raise SpecBenchError(
                f"train.until=acceptance: drafter={drafter['name']} measures it at the end of its training"
            )
    option, verb = ("searched", "search") if recipe["until"] == "search" else ("weights", "train")
    if option not in drafter:
        raise SpecBenchError(f"drafter={drafter['name']} has nothing to {verb}; choose another drafter=")
    require_writable(project_path(recipe["out"]))
