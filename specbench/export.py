"""Door four: a trained drafter, as a serving engine reads it.

python -m specbench.export drafter=eagle2 format=sglang
python -m specbench.export drafter=medusa format=vllm out=FOLDER
"""

import json
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from safetensors.torch import save_file

from specbench.assets import atomic_path
from specbench.errors import SpecBenchError, run_door, spoken
from specbench.models import ModelSpec

FORMATS = ("vllm", "sglang")


@hydra.main(version_base="1.3", config_path="../conf", config_name="export")
@spoken
def main(config: DictConfig) -> None:
    """Load the drafter beside its target, rename its tensors, write `config.json` and `model.safetensors`."""
    if config.format not in FORMATS:
        raise SpecBenchError(f"format={config.format}: use {' or '.join(FORMATS)}")
    out = Path(config.out)
    if out.exists():
        raise SpecBenchError(f"out={out} is there already; choose another folder or remove it")
    spec: ModelSpec = instantiate(config.model)
    target, _ = spec.load()
    drafter: Any = instantiate(config.drafter)
    if not hasattr(drafter, "publish"):
        raise SpecBenchError(f"drafter={config.drafter.name} has no weights to export")
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
    run_door(main)
