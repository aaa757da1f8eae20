"""Door one: decode a dataset with a drafter beside the baseline, and print what came of it.

python -m specbench.run drafter=eagle2 dataset=mtbench
python -m specbench.run -m drafter=none,vanilla,eagle2 dataset=mtbench,humaneval
"""

import sys
import time
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from specbench import measure
from specbench.bench import Bench, RunSettings
from specbench.datasets import PromptSet
from specbench.engine.interface import Drafter
from specbench.errors import SpecBenchError, one_line, run_door, spoken
from specbench.metrics import BASELINE
from specbench.models import ModelSpec
from specbench.records import Cell, identity
from specbench.reporting import tables

_failures: list[str] = []  # of all jobs of a sweep: a failed cell is reported and does not stop the others


@hydra.main(version_base="1.3", config_path="../conf", config_name="run")
@spoken
def job(config: DictConfig) -> None:
    """One cell."""
    try:
        _run(config)
    except (SpecBenchError, HydraException) as error:
        if not _is_sweep():
            raise
        _failures.append(f"{config.drafter.name} on {config.dataset.name}: {one_line(error)}")
        print(f"specbench: {_failures[-1]}", file=sys.stderr)


def _run(config: DictConfig) -> None:
    if config.rerun not in ("missing", "all"):
        raise SpecBenchError(f"rerun={config.rerun}: use missing or all")
    torch.set_num_threads(config.threads or torch.get_num_threads())
    prompts: PromptSet = instantiate(config.dataset)
    questions = prompts.load()
    spec: ModelSpec = instantiate(config.model)
    target, chat = spec.load()
    drafter: Drafter = instantiate(config.drafter)
    drafter.bind(target)
    drafters = [drafter]
    if drafter.name != BASELINE:
        baseline: Drafter = instantiate(config.baseline)
        baseline.bind(target)
        drafters = [baseline, drafter]
    rule, sampler = instantiate(config.verify), instantiate(config.sampler)
    settings: RunSettings = instantiate(config.decode)

    described = _describe(config, target, drafter, rule.lossy)
    folder = Path(config.results) / config.model.name / config.dataset.name
    cell = Cell(folder / f"{drafter.name}-{identity(described)}", described, fresh=config.rerun == "all")
    begin = time.monotonic()
    failed = Bench(target, chat, drafters, rule, sampler, settings).run(questions, cell)
    if all(cell.done((d.name, q.id, t)) for d in drafters for q in questions for t in range(len(q.turns))):
        print(f"{cell.path}: complete ({time.monotonic() - begin:.0f} s; rerun=all measures again)", file=sys.stderr)
    if config.show:
        tables.show(tables.collect([cell.path]))
    if failed:
        raise SpecBenchError(f"{failed} generations failed; their rows in {cell.path} say why; run again to retry them")
    _require_lossless(cell)


def _describe(config: DictConfig, target: Any, drafter: Drafter, lossy: bool) -> dict[str, Any]:
    """Everything that can change a row: the header, and the identity of the cell."""
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    for irrelevant in ("results", "rerun", "show"):
        plain.pop(irrelevant)
    return {
        "config": plain,
        "target": {
            "fingerprint": target.fingerprint(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
        },
        "parameters": {
            "target": sum(p.numel() for p in target.decoder.layers.parameters()) + target.head.weight.numel(),
            "drafter": drafter.active_parameters,
        },
        "draft_passes": drafter.passes,
        "weights": getattr(drafter, "provenance", {}),
        "lossy": lossy,
        "commit": measure.commit(),
        "source": measure.source_digest(),
        "versions": measure.versions(),
        "hardware": measure.hardware(target.device),
    }


def _require_lossless(cell: Cell) -> None:
    wrong = [r for r in cell.rows.values() if getattr(r, "audit", None) and r.audit["verdict"] == "bug"]  # type: ignore[union-attr, index]
    if wrong:
        first = wrong[0]
        raise SpecBenchError(
            f"{len(wrong)} greedy answers differ from the baseline's beyond a numerical tie, first question "
            f"{first.question} turn {first.turn}: verification or a cache is wrong; rows in {cell.path}"
        )


def _is_sweep() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def main() -> None:
    """Run the job or the sweep; exit code 2 if any cell failed, failures named last."""
    job()
    if _failures:
        raise SpecBenchError(f"{len(_failures)} of the sweep's cells failed: " + "; ".join(_failures))


if __name__ == "__main__":
    run_door(main)
