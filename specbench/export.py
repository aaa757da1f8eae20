"""Door four: a trained drafter, as a serving engine reads it.

python -m specbench.export drafter=eagle2 format=sglang
python -m specbench.export drafter=medusa format=vllm out=FOLDER
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from safetensors.torch import save_file

from specbench import schema
from specbench.assets import atomic_path, require_writable
from specbench.door import CONF, run_door, spoken
from specbench.engine.grow import Growth
from specbench.engine.interface import Drafter
from specbench.errors import SpecBenchError
from specbench.models import ModelSpec
from specbench.options import Text


@dataclass(frozen=True)
class Options:
    """What `conf/export.yaml` and its groups may say."""

    format: Literal["vllm", "sglang"]
    out: Text
    model: ModelSpec
    tree: Growth
    drafter: Drafter


@hydra.main(version_base="1.3", config_path=CONF, config_name="export")
@spoken
def main(config: DictConfig) -> None:
    """Load the drafter beside its target, rename its tensors, write `config.json` and `model.safetensors`."""
    schema.check(config, Options)
    out = Path(config.out)
    require_writable(out.parent)
    if config.drafter.get("weights", "") is None:
        raise SpecBenchError("drafter.weights=null would export random weights; name the folder of trained ones")
    if config.drafter.get("vocabulary") is not None:
        raise SpecBenchError("drafter.vocabulary is no part of what is exported; leave it out, and set it in the server")
    if out.exists():
        raise SpecBenchError(f"out={out} is there already; choose another folder or remove it")
    spec: ModelSpec = instantiate(config.model)
    drafter: Any = instantiate(config.drafter)
    if not hasattr(drafter, "publish"):
        raise SpecBenchError(f"drafter={config.drafter.name} has no weights to export")
    target, _ = spec.load(beside=[drafter])
    drafter.bind(target)
    tensors, settings = drafter.publish(config.format, target)
    with atomic_path(out) as folder:
        folder.mkdir()
        save_file(
            {n: t.to("cpu", torch.bfloat16).contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}, indent=1, default=str) + "\n")
    print(f"{config.drafter.name} for {config.format}: {len(tensors)} tensors in {out}")


if __name__ == "__main__":
    run_door(main, "export")
