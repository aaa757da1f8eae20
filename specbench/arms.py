"""One side of a comparison: a drafter from its configuration, bound to the target, with its rule of acceptance.

What every door that decodes does with a run configuration: settle it, build the drafter, say in a header what it was.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field

from specbench import acceptance, checkpoints, contents, measure, price, serving
from specbench.bench import Contender, RunSettings
from specbench.datasets import Chat, PromptSet, Question
from specbench.door import composed, sweeping
from specbench.engine.grow import Growth
from specbench.engine.interface import Drafter
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target, pick_device
from specbench.engine.verify import Alphas, Rule
from specbench.engine.weights import PROJECT
from specbench.errors import SpecBenchError, one_line
from specbench.link import Link
from specbench.models import ModelSpec
from specbench.options import Count, Natural, Text
from specbench.records import Cell, CellFailure, Row

OWN = ("drafter", "tree", "verify", "checkpoint")  # what drafters of one cell may differ in
ASIDE = ("baseline", "results", "rerun", "show", "trace", "memory")  # what cannot change a row


class GreedyOnly(SpecBenchError):
    """A drafter that cannot sample was asked to."""


@dataclass(frozen=True)
class Data:
    """Where prompts come from: a folder with `<dataset>.jsonl` instead of wheel and hub; so many of them."""

    root: Text | None
    limit: Count | None


@dataclass(frozen=True)
class RunOptions:
    """What `conf/run.yaml` and its groups may say; what each means stands there."""

    threads: Annotated[int, Field(ge=1, le=4096)] | None
    results: Text
    rerun: Literal["missing", "failed", "all"]
    show: bool
    trace: Natural
    memory: Natural
    replay: bool
    backend: Literal["eager", "compile"]
    checkpoint: Text | None
    alpha: Alphas | None
    data: Data
    decode: RunSettings
    sampler: Sampler
    verify: Rule
    link: Link
    model: ModelSpec
    tree: Growth
    baseline: Drafter
    drafter: Drafter
    dataset: PromptSet


@dataclass(frozen=True)
class Arm:
    """A drafter that is ready, and what a header says of it.

    Attributes:
        contender: what decodes. config: its run configuration, settled. said: its part of the header.
    """

    contender: Contender
    config: DictConfig
    said: Mapping[str, Any]

    @property
    def label(self) -> str:
        return self.contender.label


_absent: dict[str, str] = {}  # targets that this process could not load, and why


def load(config: DictConfig) -> tuple[Target, Chat]:
    """Target and chat format. A target that is not to be had is looked for once a sweep, not once a cell."""
    if config.backend == "compile" and pick_device(config.model.get("device", "auto")).type == "cpu":
        raise SpecBenchError("backend=compile is for GPUs: on a CPU its passes take longer than eager ones; leave it out")
    wanted = f"{config.model} {config.link}"
    if wanted in _absent:
        raise SpecBenchError(_absent[wanted])
    spec: ModelSpec = instantiate(config.model)
    try:
        target, chat = spec.load(link=_served(config, spec))
    except SpecBenchError as error:
        if sweeping():
            print(f"specbench: {one_line(error)}", file=sys.stderr)
        _absent[wanted] = one_line(error)
        raise
    if config.backend == "compile":
        torch._dynamo.config.recompile_limit = 64  # trees of several sizes, the baseline's among them
        target.compile()
    elif spec.forward == "lean":
        target.hasten()
    return target, chat


def _served(config: DictConfig, model: ModelSpec) -> Link | None:
    """The link to the target's server, which this process starts if no address is given; None: the target is here."""
    link: Link = instantiate(config.link)
    if link.local or link.to is not None:
        return None if link.local else link
    return replace(link, to=serving.beside(model, config.threads, condensers(link.condense, config.model)))


def condensers(name: str | None, model: DictConfig) -> list[Any]:
    """The drafter of this name, not yet bound, with which a server condenses states; none for None. model: its node."""
    if name is None:
        return []
    config = composed("run", [f"drafter={name}"])
    config.model = model
    drafter: Any = instantiate(config.drafter)
    if not hasattr(drafter, "condense"):
        raise SpecBenchError(f"condense={name}: this drafter makes nothing shorter of states; leave condense out")
    return [drafter]


def lost(error: str) -> bool:
    """Was this said of a target already?"""
    return error in _absent.values()


def settle(config: DictConfig) -> None:
    """Write into a run configuration what follows from the rest of it, so that headers say it."""
    own, published = bearer(config.drafter), config.model.get("published") or {}
    if config.replay and (config.sampler.temperature > 0 or config.model.get("weights") == "random"):
        raise SpecBenchError(
            "replay=true follows the target's own greedy answers; set sampler.temperature=0, or replay=false"
        )
    if config.replay and config.model.get("dtype") == "auto":
        config.model.dtype = "float32"  # in others answers part at ties
    if config.link.name != "local":
        _settle_link(config)
    if config.model.get("weights") == "random":
        _assume(config)
    elif config.alpha is not None:
        raise SpecBenchError("alpha= assumes an acceptance, which only model.weights=random needs; leave it out")
    elif config.checkpoint is None and own.get("weights") and not (PROJECT / own.weights).exists():
        config.checkpoint = published.get(own.name)


def bearer(drafter: DictConfig) -> DictConfig:
    """The part of a drafter's configuration that names weights: its own, or those of the trained drafter that it asks."""
    if "weights" in drafter or "base" not in drafter:
        return drafter
    OmegaConf.resolve(drafter)  # a part that another file has would be read anew at every look
    return drafter.base


def _settle_link(config: DictConfig) -> None:
    """What a target on a server cannot do is refused; memory is measured where both sides are one process."""
    if config.replay:
        raise SpecBenchError(
            "replay=true runs no target passes, so there is nothing to send; set replay=false or link=local"
        )
    if config.backend == "compile":
        raise SpecBenchError("backend=compile is for a target in this process; set link=local, or leave it out")
    if config.link.name == "direct" and config.link.to is None:
        raise SpecBenchError("link.to is missing: link=tcp://host:port of a server that runs")
    config.memory = config.trace = 0


def _assume(config: DictConfig) -> None:
    """Without the target's weights nobody knows what it would accept: a coin decides, and the drafter is random too."""
    if config.alpha is None:
        raise SpecBenchError("model.weights=random accepts nothing by itself; give alpha=[0.8,0.7,…], one number a depth")
    OmegaConf.resolve(config.drafter)  # as in `bearer`
    part: Any = config.drafter
    while part:
        for files in ("weights", "searched"):
            if files in part:
                part[files] = None
        part = part.get("base")
    config.verify = {
        "_target_": "specbench.engine.verify.Simulated",
        "alpha": list(config.alpha),
    }


def make(config: DictConfig) -> tuple[Any, Rule]:
    """Drafter and rule as a run configuration says, refused before any target is loaded if they cannot be."""
    drafter: Any = instantiate(config.drafter)
    if config.sampler.temperature > 0 and getattr(drafter, "greedy_only", False):
        raise GreedyOnly(f"drafter={config.drafter.name} is for greedy decoding; set sampler.temperature=0")
    if config.checkpoint is not None:
        trained = drafter if bearer(config.drafter) is config.drafter else drafter.base
        if not hasattr(trained, "official"):
            raise SpecBenchError(f"drafter={config.drafter.name} takes no checkpoint; leave checkpoint out")
        trained.checkpoint = checkpoints.read(config.checkpoint)
    return drafter, instantiate(config.verify)


def build(
    config: DictConfig, target: Target, label: str | None = None, made: tuple[Any, Rule] | None = None, **more: Any
) -> Arm:
    """What was made of a run configuration, bound to the target. more: goes into its part of the header."""
    drafter, rule = made or make(config)
    drafter.bind(target)
    if config.backend == "compile" and hasattr(drafter, "compile_network"):
        drafter.compile_network()
    elif config.model.forward == "lean" and hasattr(drafter, "hasten"):
        drafter.hasten()
    settings = plain(config)
    own = {key: settings[key] for key in OWN}
    fitted = _fit(drafter, config, target)
    own["drafter"].setdefault("name", drafter.name)  # the baseline's is not in its configuration
    said = own | {
        "parameters": drafter.active_parameters,
        "bytes": _bytes(drafter, trained_only=True),
        "passes": drafter.passes,
        "lossy": rule.lossy,
        "weights": getattr(drafter, "provenance", {}),
        "contents": getattr(drafter, "contents", {}),
    }
    return Arm(Contender(label or drafter.name, drafter, rule), config, said | fitted | more)


def _fit(drafter: Any, config: DictConfig, target: Target) -> dict[str, Any]:
    """Fit a drafter's growth to the machine, if it can be; what was chosen, and from which costs.

    Of a drafter that asks a trained one it is that one's growth: what both of them do is not predicted.

    Raises:
        SpecBenchError: acceptance was not measured with these weights, or cannot be.
    """
    own: dict[str, Any] = plain(config)["drafter"]
    if hasattr(drafter, "grower"):
        drafter, own = drafter.grower, own["base"]
    growth: Any = getattr(drafter, "growth", None)
    if not hasattr(growth, "fit"):
        return {}
    if config.model.get("weights") == "random" or drafter.weights is None:
        raise SpecBenchError(f"drafter={drafter.name}: a tree can be fitted to trained weights only; choose another tree=")
    if config.link.name != "local":
        raise SpecBenchError("tree=: costs are timed of a target in this process; choose another tree=, or link=local")
    followed = acceptance.read(PROJECT / drafter.weights)
    said = {k: v for k, v in own.items() if k != "growth"}
    costs = price.of(target, drafter, config.model.name, {"drafter": said, "backend": config.backend})
    growth.fit(followed, costs)
    drafter.regrow(growth)
    return {"fitted": {**growth.chosen, "costs": asdict(costs)}}


def baseline(config: DictConfig, target: Target) -> Arm:
    """Plain decoding, against which every arm is held."""
    alone = config.copy()
    alone.drafter, alone.checkpoint = config.baseline, None
    return build(alone, target)


def header(
    config: DictConfig, target: Target, arms: Iterable[Arm], questions: list[Question], study: str | None = None
) -> dict[str, Any]:
    """Everything that can change a row of these arms: the header of their cell, and its identity."""
    arms = list(arms)
    return {
        "study": study,
        "config": {key: value for key, value in plain(config).items() if key not in OWN},
        "replay": config.replay,
        "arms": {arm.label: dict(arm.said) for arm in arms},
        "target": {
            "fingerprint": target.fingerprint(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "parameters": sum(p.numel() for p in target.decoder.layers.parameters()) + target.head.weight.numel(),
            "bytes": _bytes(target.model),
            "vocabulary": target.vocab_size,
            "contents": target.contents(),
        },
        "prompts": contents.of([asdict(question) for question in questions]),
        "simulated": any(arm.contender.rule.simulated for arm in arms),
        "commit": measure.commit(),
        "source": measure.source_digest(),
        "versions": measure.versions(),
        "hardware": measure.hardware(target.device),
    }


def _bytes(model: Any, trained_only: bool = False) -> int:
    """Of a model's parameters; of a drafter's only its own, since the rest is the target's."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else []
    return sum(p.nbytes for p in parameters if p.requires_grad or not trained_only)


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration without what cannot change a row."""
    said: Any = OmegaConf.to_container(config, resolve=True)
    return {key: value for key, value in said.items() if key not in ASIDE}


def folder(config: DictConfig) -> Path:
    """Where cells of this target and these prompts lie."""
    return Path(config.results) / config.model.name / config.dataset.name


def names(config: DictConfig) -> list[str]:
    """Of model, dataset and drafter, whatever a configuration calls them."""
    return [str(OmegaConf.select(config, f"{part}.name")) for part in ("model", "dataset", "drafter")]


def failure_path(config: DictConfig, drafter: str | None = None, below: Path | None = None) -> Path:
    """Where the failure of this configuration is written down, also where it is not fit to run.

    Args:
        drafter: by another name than its own. below: a folder instead of that of its cells.
    """
    model, dataset, own = (re.sub(r"[^\w.+=@-]", "_", name) for name in names(config))
    results = OmegaConf.select(config, "results") or "results/local"
    said = OmegaConf.to_yaml(config, resolve=False)
    try:
        settings = plain(config)
    except OmegaConfBaseException:  # an interpolation into nothing
        settings = {"unresolved": said}
    return CellFailure.path(below or Path(str(results)) / model / dataset, drafter or own, settings)


def failure(config: DictConfig, said: str, drafter: str | None = None) -> CellFailure:
    """What stands there."""
    model, dataset, own = names(config)
    heat = OmegaConf.select(config, "sampler.temperature")
    return CellFailure(model, dataset, drafter or own, heat if isinstance(heat, (int, float)) else str(heat), said)


def require_lossless(cell: Cell) -> None:
    """Raises `SpecBenchError` if a greedy answer is not the baseline's, and no numerical tie explains it."""
    rows = [r for r in cell.rows.values() if isinstance(r, Row)]
    wrong = [r for r in rows if r.audit and r.audit["verdict"] == "bug"]
    if wrong:
        first = wrong[0]
        raise SpecBenchError(
            f"{len(wrong)} greedy answers differ from the baseline's beyond a numerical tie, first {first.drafter}'s to "
            f"question {first.question} turn {first.turn}: verification or a cache is wrong; rows in {cell.path}"
        )
