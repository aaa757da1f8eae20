"""One run as a frozen `RunSpec`, from a composed configuration. Code that uses it imports neither Hydra nor OmegaConf.

Options that follow from others are resolved here: the precision of a replay, the shape of a network with weights, the
published checkpoint of a drafter without weights, the rule where acceptance is simulated, the backend of passes.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench.common.errors import SpecBenchError, format_exception, warn
from specbench.common.storage import project_path
from specbench.common.types import MAX_NODES, Count, Duration, Name, Natural, Repetitions, Text, Threads, is_name
from specbench.config import catalog, validation
from specbench.config.cli import composed, folder_name, selected
from specbench.config.trained_shape import take_shape
from specbench.data.prompts import PromptSet
from specbench.engine import checkpoints
from specbench.engine.decode import RunSettings
from specbench.engine.device import on_cuda
from specbench.engine.drafter import Drafter, ServedEngine
from specbench.engine.loading import ModelSpec
from specbench.engine.policies import TreePolicy
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Alphas, Rule
from specbench.records.blocks import cell_name, link_name
from specbench.records.metrics import BASELINE
from specbench.records.rows import CellFailure
from specbench.records.studies import OWN
from specbench.remote.link import Link

# Options that cannot change a row.
NON_IDENTITY = ("baseline", "drafters", "endpoint", "results", "rerun", "show", "details", "trace", "memory", "minutes")


class GreedyOnly(SpecBenchError):
    """A drafter for greedy decoding at a temperature above 0."""


@dataclass(frozen=True)
class Data:
    """Where prompts come from (a folder of JSONL files before wheel, web and hub), how many, and whether programs run."""

    root: Text | None
    limit: Count | None
    run_programs: bool


@dataclass(frozen=True)
class Common:
    """Fields that `RunOptions` and `RunSpec` share."""

    threads: Threads | None
    rerun: Literal["missing", "all"]
    show: bool
    details: bool
    trace: Natural
    memory: Repetitions
    minutes: Duration | None
    replay: bool
    batch: Count
    backend: Literal["auto", "eager", "graphs"]
    checkpoint: Text | None
    decode: RunSettings
    sampler: Sampler
    link: Link
    model: ModelSpec


@dataclass(frozen=True)
class RunOptions(Common):
    """The options of `conf/run.yaml` and its groups, which explain them."""

    drafters: list[Name] | None
    results: Text
    endpoint: Text | None
    alpha: Alphas | None
    data: Data
    dataset: PromptSet
    verify: Rule
    tree: TreePolicy
    baseline: Drafter
    drafter: Drafter


@dataclass(frozen=True)
class RunSpec(Common):
    """A resolved run.

    Attributes:
        results: the folder that rows are written to.
        drafter, tree, verify, baseline: options as plain values; `_target_` names the class of each.
        shared: options that the drafters of a cell have in common and that can change a row, as plain values.
    """

    results: Path
    dataset: PromptSet
    drafter: Mapping[str, Any]
    tree: Mapping[str, Any]
    verify: Mapping[str, Any]
    baseline: Mapping[str, Any]
    shared: Mapping[str, Any]

    @property
    def has_weights(self) -> bool:
        """Does the drafter have weights of its own?"""
        return "weights" in self.drafter

    @property
    def folder(self) -> Path:
        """The folder of this target's rows."""
        return self.results / self.model.name

    @property
    def cell_folder(self) -> Path:
        """The folder of this cell's blocks."""
        sampling = self.sampler.temperature, self.sampler.top_p, self.sampler.top_k
        tokens, variant = self.decode.max_new_tokens, self.model.variant
        link = link_name(self.link.name, self.link.cut_after)
        name = cell_name(self.dataset.name, sampling, tokens, link, self.replay, self.batch, variant)
        return self.folder / name

    @property
    def own(self) -> dict[str, Any]:
        """The options in which drafters of one cell may differ."""
        return {name: deepcopy(getattr(self, name)) for name in OWN}

    def as_baseline(self) -> "RunSpec":
        """The same run with plain decoding."""
        return replace(self, drafter=self.baseline, checkpoint=None)

    def make_rule(self) -> Rule:
        """The rule of acceptance."""
        return instantiate(self.verify)

    def make_drafter(self, **options: Any) -> Any:
        """The drafter, not yet bound to a target. options: override those of the run.

        Raises `SpecBenchError` if it cannot decode with the run's other options (`GreedyOnly`: at this temperature).
        """
        drafter: Any = instantiate(self.drafter, **options)
        if self.sampler.temperature > 0 and drafter.greedy_only:
            raise GreedyOnly(f"drafter={self.drafter['name']} is for greedy decoding; set sampler.temperature=0")
        if drafter.nodes > MAX_NODES:
            name, nodes = self.drafter["name"], f"{drafter.nodes:,}"
            raise SpecBenchError(f"drafter={name}: trees of up to {nodes} nodes, more than {MAX_NODES:,}; lower its sizes")
        if self.batch > 1:
            drafter.require_batches()
        if drafter.runs_layers and not self.link.local:
            raise SpecBenchError(
                f"drafter={self.drafter['name']} runs layers of the target, which are on the server; choose another "
                "drafter=, or set link=local"
            )
        if isinstance(drafter, ServedEngine):
            self._require_served(drafter)
        if self.checkpoint is not None:
            if not drafter.weights_owner.takes_checkpoint:
                raise SpecBenchError(f"drafter={self.drafter['name']} takes no checkpoint; leave checkpoint out")
            drafter.weights_owner.checkpoint = checkpoints.read(self.checkpoint)
        return drafter

    def _require_served(self, engine: ServedEngine) -> None:
        """Raises `SpecBenchError` for options that do not apply to another engine, or if it is unreachable."""
        for refused, reason in (
            (self.replay, "replay=true: its drafts are not visible, so there is nothing to replay; set replay=false"),
            (not self.link.local, f"link={self.link.name}: it is a server by itself; set link=local"),
            (self.model.weights == "random", "model.weights=random: it serves a real model; choose one that is here, too"),
        ):
            if refused:
                raise SpecBenchError(f"drafter={engine.name} with {reason}")
        engine.find_model()


# From a configuration -------------------------------------------------------------------------------------------------


def from_config(config: DictConfig, declared: type = RunOptions, weights: str | None = None) -> RunSpec:
    """The run of a composed configuration. Raises `SpecBenchError` for invalid options, or contradictions among them.

    Args:
        declared: the dataclass of the command's options, of which only those of a run are used.
        weights: folder of the drafter's weights; overrides the configuration, and any checkpoint.
    """
    options = validation.check(config, declared)
    options = {name: options[name] for name in validation.options(RunOptions)}
    if weights is not None:
        weights_node(options["drafter"])["weights"] = weights
    _require_baseline(options["baseline"])
    catalog.require_own_name(options["drafter"])
    _resolve(options)
    if weights is not None:
        options["checkpoint"] = None
    shared = {name: value for name, value in options.items() if name not in (*OWN, *NON_IDENTITY)}
    made = {name: instantiate(options[name]) for name in ("decode", "sampler", "link", "model", "dataset")}
    plain: dict[str, Any] = {field.name: options.get(field.name) for field in fields(RunSpec)}
    return RunSpec(**plain | made | {"results": Path(options["results"]), "shared": shared})


def weights_node(drafter: Any) -> Any:
    """The part of a drafter's options that names weights: its own, or those of the trained drafter that it wraps."""
    return drafter if "weights" in drafter or "base" not in drafter else drafter["base"]


def state_compressors(name: str | None, model: Mapping[str, Any]) -> list[Any]:
    """The drafter of this name, not yet bound, with which a server condenses states; none for None.

    model: options of the target. Raises `SpecBenchError` if this drafter does not condense states.
    """
    if name is None:
        return []
    config = composed("run", [f"drafter={name}"])
    config.model = model
    drafter: Any = instantiate(config.drafter)
    if not drafter.compresses_states:
        raise SpecBenchError(f"condense={name}: this drafter does not condense states; leave condense out")
    return [drafter]


def _require_baseline(options: Mapping[str, Any]) -> None:
    """Raises `SpecBenchError` unless these are the options of plain decoding."""
    name = options.get("name", BASELINE)
    if name != BASELINE:
        raise SpecBenchError(f"baseline.name={name}: rows of the baseline are called {BASELINE}; leave it out")
    catalog.require_own_name({**options, "name": name}, "baseline")


def _resolve(options: dict[str, Any]) -> None:
    """Set options that follow from others, so that headers record them. Raises `SpecBenchError` for contradictions."""
    model = options["model"]
    if (system := options["dataset"].get("system")) is not None:
        model["system"] = system
    if options["replay"] and (options["sampler"]["temperature"] > 0 or model.get("weights") == "random"):
        raise SpecBenchError(
            "replay=true follows the target's own greedy answers; set sampler.temperature=0, or replay=false"
        )
    if model.get("dtype") == "auto" and (options["replay"] or model.get("quantised")):
        model["dtype"] = "float32"  # in half precision answers differ at ties; quantised targets have no other
    _resolve_backend(options)
    if options["link"]["name"] != "local":
        _resolve_link(options)
    if options["batch"] > 1:
        _resolve_batch(options)
    node = weights_node(options["drafter"])
    if model.get("weights") == "random":
        use_simulated_acceptance(options)
    elif options["alpha"] is not None:
        raise SpecBenchError("alpha= assumes an acceptance, which only model.weights=random needs; leave it out")
    elif options["checkpoint"] is None and node.get("weights"):
        if project_path(node["weights"]).exists():
            take_shape(node)
        elif not node.get("path") and node["weights"].startswith(f"drafters/weights/{model['name']}/"):  # none was named
            options["checkpoint"] = (model.get("published") or {}).get(node["name"])


def _resolve_backend(options: dict[str, Any]) -> None:
    """Choose `eager` or `graphs`, or refuse the latter where passes cannot be captured."""
    model = options["model"]
    obstacles = {
        f"link={options['link']['name']}": options["link"]["name"] != "local",  # its layers are on a server
        f"batch={options['batch']}": options["batch"] > 1,
        f"model.device_map={model.get('device_map')}": model.get("device_map"),
        f"model.quantised={model.get('quantised')}": model.get("quantised"),
    }
    against = [option for option, applies in obstacles.items() if applies]
    if options["backend"] == "auto":
        options["backend"] = "graphs" if on_cuda(model.get("device", "auto")) and not against else "eager"
    elif options["backend"] == "graphs" and against:
        raise SpecBenchError(f"backend=graphs cannot be combined with {against[0]}; leave one of them out")


def _resolve_link(options: dict[str, Any]) -> None:
    """Refuse what a target on a server cannot do; memory and traces need both sides in one process."""
    if options["replay"]:
        raise SpecBenchError(
            "replay=true runs no target passes, so there is nothing to send; set replay=false or link=local"
        )
    for name in ("quantised", "adapter"):
        if options["model"].get(name):
            raise SpecBenchError(f"model.{name} is for a target in this process; set link=local, or leave it out")
    if options["link"]["name"] == "direct" and options["link"]["to"] is None:
        raise SpecBenchError("link.to is missing: link=tcp://host:port of a server that runs")
    options["memory"] = options["trace"] = 0


def _resolve_batch(options: dict[str, Any]) -> None:
    """Refuse what several sequences at once cannot do; memory and traces are those of one."""
    for refused, word in (
        (options["replay"], "replay=true"),
        (options["link"]["name"] != "local", f"link={options['link']['name']}"),
        (options["model"].get("device_map"), "model.device_map"),
    ):
        if refused:
            raise SpecBenchError(f"batch={options['batch']}: {word} is for one sequence at a time; leave one of them out")
    options["memory"] = options["trace"] = 0


def use_simulated_acceptance(options: dict[str, Any]) -> None:
    """Draw acceptance at random by depth, since target and drafter have random weights."""
    if options["alpha"] is None:
        raise SpecBenchError("model.weights=random accepts nothing by itself; give alpha=[0.8,0.7,…], one number a depth")
    part: Any = options["drafter"]
    while part:
        for name in ("weights", "searched"):
            if name in part:
                part[name] = None
        part = part.get("base")
    options["verify"] = {"_target_": "specbench.engine.verify.Simulated", "alpha": list(options["alpha"])}


# Failures -------------------------------------------------------------------------------------------------------------


class FailureRecord:
    """The file that says that a configuration failed, even an invalid one. label: instead of the drafter's name."""

    def __init__(self, config: DictConfig, label: str | None = None):
        names = [str(selected(config, f"{part}.name")) for part in ("model", "dataset", "drafter")]
        temperature = selected(config, "sampler.temperature")
        shown = temperature if isinstance(temperature, (int, float)) else str(temperature)
        self.failure = CellFailure(names[0], names[1], label or names[2], shown, "")
        try:
            options: Any = OmegaConf.to_container(config, resolve=True)
            settings = {key: value for key, value in options.items() if key not in NON_IDENTITY}
        except OmegaConfBaseException:  # an interpolation that cannot be resolved
            settings = {"unresolved": OmegaConf.to_yaml(config, resolve=False)}
        model, dataset, drafter = (name if is_name(name) else folder_name(name, "unnamed") for name in names)
        results = Path(str(selected(config, "results") or "results/local"))
        self.path = CellFailure.path(results / model / dataset, label or drafter, settings)

    def write(self, error: Exception) -> None:
        """Print an error and record it."""
        self.failure.error = format_exception(error)
        warn(f"{self.failure.drafter} on {self.failure.dataset}: {self.failure.error}")
        self.failure.write(self.path)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
