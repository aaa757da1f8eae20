"""Door one: decode a dataset with a drafter beside the baseline, and print what came of it.

python -m specbench.run drafter=eagle2 dataset=mtbench
python -m specbench.run -m drafter=none,vanilla,eagle2 dataset=mtbench,humaneval
"""

import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field

from specbench import checkpoints, contents, measure, schema, sweep, trace
from specbench.assets import require_writable
from specbench.bench import Bench, RunSettings
from specbench.datasets import PromptSet, Question
from specbench.door import CONF, run_door, spoken, sweeping
from specbench.engine.grow import Growth
from specbench.engine.interface import Drafter
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Alphas, Rule
from specbench.engine.weights import PROJECT
from specbench.errors import SpecBenchError, one_line, visible
from specbench.faults import told
from specbench.metrics import BASELINE
from specbench.models import ModelSpec
from specbench.options import Count, Natural, Text
from specbench.records import Cell, CellFailure, has_failed, held, identity
from specbench.reporting import cells, tables


@dataclass(frozen=True)
class Data:
    """Where prompts come from: a folder with `<dataset>.jsonl` instead of wheel and hub; so many of them."""

    root: Text | None
    limit: Count | None


@dataclass(frozen=True)
class Options:
    """What `conf/run.yaml` and its groups may say; what each means stands there."""

    threads: Annotated[int, Field(ge=1, le=4096)] | None
    results: Text
    rerun: Literal["missing", "failed", "all"]
    show: bool
    trace: Natural
    backend: Literal["eager", "compile"]
    checkpoint: Text | None
    alpha: Alphas | None
    data: Data
    decode: RunSettings
    sampler: Sampler
    verify: Rule
    model: ModelSpec
    tree: Growth
    baseline: Drafter
    drafter: Drafter
    dataset: PromptSet


_absent: dict[str, str] = {}  # targets that this process could not load, and why


@hydra.main(version_base="1.3", config_path=CONF, config_name="run")
@spoken
def job(config: DictConfig) -> None:
    """One cell. In a sweep a failure is written down where the cell would be, and the next cell begins."""
    place = _failure_path(config)
    try:
        schema.check(config, Options)
        _settle(config)
        require_writable(_folder(config))
        if config.rerun == "failed" and not place.exists() and not _has_failed_rows(config):
            return
        _run(config)
    except Exception as error:
        if not sweeping():
            raise
        said, (model, dataset, drafter) = told(error), _names(config)
        heat = OmegaConf.select(config, "sampler.temperature")
        CellFailure(model, dataset, drafter, heat if isinstance(heat, (int, float)) else str(heat), said).write(place)
        if said not in _absent.values():  # said once; at the sweep's end all its cells are named
            print(visible(f"specbench: {drafter} on {dataset}: {said}"), file=sys.stderr)
    else:
        place.unlink(missing_ok=True)


def _run(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    prompts: PromptSet = instantiate(config.dataset)
    drafter: Any = instantiate(config.drafter)
    rule, sampler = instantiate(config.verify), instantiate(config.sampler)
    settings: RunSettings = instantiate(config.decode)
    questions = prompts.load()
    if config.checkpoint is not None:
        if not hasattr(drafter, "official"):
            raise SpecBenchError(f"drafter={config.drafter.name} takes no checkpoint; leave checkpoint out")
        drafter.checkpoint = checkpoints.read(config.checkpoint)
    target, chat = _load(config)
    drafter.bind(target)
    drafters = [drafter]
    if drafter.name != BASELINE:
        baseline: Drafter = instantiate(config.baseline)
        baseline.bind(target)
        drafters = [baseline, drafter]
    _compile(config.backend, target, drafter)

    described = _describe(config, target, drafter, rule, questions)
    folder = _folder(config) / f"{drafter.name}-{identity(described)}"
    with held(folder):
        cell = Cell(folder, described, fresh=config.rerun == "all")
        begin = time.monotonic()
        failed = Bench(target, chat, drafters, rule, sampler, settings).run(questions, cell)
        if all(cell.done((d.name, q.id, t)) for d in drafters for q in questions for t in range(len(q.turns))):
            seconds = f"{time.monotonic() - begin:.0f} s"
            print(f"{cell.path}: complete ({seconds}; rerun=all measures again)", file=sys.stderr)
        _trace(config, target, chat, drafter, questions, rule, sampler, folder)
    if config.show:
        tables.show(cells.collect([cell.path]))
    if failed:
        raise SpecBenchError(f"{failed} generations failed; their rows in {cell.path} say why; run again to retry them")
    _require_lossless(cell)


def _load(config: DictConfig) -> tuple[Any, Any]:
    """Target and chat format. A target that is not to be had is looked for once a sweep, not once a cell."""
    wanted = str(config.model)
    if wanted in _absent:
        raise SpecBenchError(_absent[wanted])
    spec: ModelSpec = instantiate(config.model)
    try:
        return spec.load()
    except SpecBenchError as error:
        if sweeping():
            print(f"specbench: {one_line(error)}", file=sys.stderr)
        _absent[wanted] = one_line(error)
        raise


def _compile(backend: str, target: Any, drafter: Any) -> None:
    if backend == "compile":
        if target.device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
            raise SpecBenchError("backend=compile needs a C++ compiler on a CPU; install g++ or leave it out")
        torch._dynamo.config.recompile_limit = 64  # trees of several sizes, the baseline's among them
        target.compile()
        if hasattr(drafter, "compile_network"):
            drafter.compile_network()


def _settle(config: DictConfig) -> None:
    """Write into the configuration what follows from the rest of it, so that headers say it."""
    own, published = config.drafter.get("weights"), config.model.get("published") or {}
    if config.model.get("weights") == "random":
        _assume(config)
    elif config.alpha is not None:
        raise SpecBenchError("alpha= assumes an acceptance, which only model.weights=random needs; leave it out")
    elif config.checkpoint is None and own and not (PROJECT / own).exists():
        config.checkpoint = published.get(config.drafter.name)


def _assume(config: DictConfig) -> None:
    """Without the target's weights nobody knows what it would accept: a coin decides, and the drafter is random too."""
    if config.alpha is None:
        raise SpecBenchError("model.weights=random accepts nothing by itself; give alpha=[0.8,0.7,…], one number a depth")
    parts: list[Any] = [config.drafter, config.drafter.get("base") or {}]
    for part in parts:
        if "weights" in part:
            part.weights = None
    config.verify = {
        "_target_": "specbench.engine.verify.Simulated",
        "alpha": list(config.alpha),
        "seed": config.decode.seed,
    }


def _trace(
    config: DictConfig,
    target: Any,
    chat: Any,
    drafter: Drafter,
    questions: list[Question],
    rule: Any,
    sampler: Any,
    folder: Path,
) -> None:
    """The first turns of some questions once more, untimed, with every draft tree kept for the report."""
    path = folder / "trace.json"
    if drafter.name == BASELINE or not config.trace or path.exists():
        return
    traces = []
    for question in questions[: config.trace]:
        prompt = chat.encode([{"role": "user", "content": question.turns[0]}])
        found = trace.trace(target, chat, drafter, prompt, rule, sampler, config.decode.seed)
        traces.append({"question": question.id, **found})
    trace.write(path, traces)


def _folder(config: DictConfig) -> Path:
    return Path(config.results) / config.model.name / config.dataset.name


def _plain(config: DictConfig) -> dict[str, Any]:
    """The configuration without what cannot change a row."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return {key: value for key, value in plain.items() if key not in ("results", "rerun", "show", "trace")}


def _failure_path(config: DictConfig) -> Path:
    """Of this configuration, also where it is not fit to run."""
    model, dataset, drafter = (re.sub(r"[^\w.+=@-]", "_", name) for name in _names(config))
    results = OmegaConf.select(config, "results") or "results/local"
    said = OmegaConf.to_yaml(config, resolve=False)
    try:
        settings = _plain(config)
    except OmegaConfBaseException:  # an interpolation into nothing
        settings = {"unresolved": said}
    return CellFailure.path(Path(str(results)) / model / dataset, drafter, settings)


def _names(config: DictConfig) -> list[str]:
    """Of model, dataset and drafter, whatever a configuration calls them."""
    return [str(OmegaConf.select(config, f"{part}.name")) for part in ("model", "dataset", "drafter")]


def _has_failed_rows(config: DictConfig) -> bool:
    """Did generations fail in a cell of this very configuration?"""
    return has_failed(_folder(config).glob(f"{config.drafter.name}-*/rows.jsonl"), _plain(config))


def _describe(config: DictConfig, target: Any, drafter: Drafter, rule: Any, questions: list[Question]) -> dict[str, Any]:
    """Everything that can change a row: the header, and the identity of the cell."""
    return {
        "config": _plain(config),
        "target": {
            "fingerprint": target.fingerprint(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
        },
        "contents": {
            "target": target.contents(),
            "drafter": getattr(drafter, "contents", {}),
            "prompts": contents.of([asdict(question) for question in questions]),
        },
        "parameters": {
            "target": sum(p.numel() for p in target.decoder.layers.parameters()) + target.head.weight.numel(),
            "drafter": drafter.active_parameters,
        },
        "bytes": {"target": _bytes(target.model), "drafter": _bytes(drafter, trained_only=True)},
        "draft_passes": drafter.passes,
        "weights": getattr(drafter, "provenance", {}),
        "lossy": rule.lossy,
        "simulated": rule.simulated,
        "commit": measure.commit(),
        "source": measure.source_digest(),
        "versions": measure.versions(),
        "hardware": measure.hardware(target.device),
    }


def _bytes(model: Any, trained_only: bool = False) -> int:
    """Of a model's parameters; of a drafter's only its own, since the rest is the target's."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else []
    return sum(p.nbytes for p in parameters if p.requires_grad or not trained_only)


def _require_lossless(cell: Cell) -> None:
    wrong = [r for r in cell.rows.values() if getattr(r, "audit", None) and r.audit["verdict"] == "bug"]  # type: ignore[union-attr, index]
    if wrong:
        first = wrong[0]
        raise SpecBenchError(
            f"{len(wrong)} greedy answers differ from the baseline's beyond a numerical tie, first question "
            f"{first.question} turn {first.turn}: verification or a cache is wrong; rows in {cell.path}"
        )


def main() -> None:
    """Run the job or the sweep; exit code 2 if any cell failed."""
    job()
    if sweep.failed:
        lost = sum(map(len, sweep.failed.values()))
        raise SpecBenchError(f"{lost} cells failed, named above; the same command tries them again")


if __name__ == "__main__":
    from specbench import run  # under its own name, by which launchers find it in other processes

    run_door(run.main, "run")
