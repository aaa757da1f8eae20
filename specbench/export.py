"""A trained drafter, as a serving engine reads it.

python -m specbench.export drafter=eagle2 format=sglang
python -m specbench.export drafter=medusa format=vllm out=FOLDER
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from specbench.common.errors import SpecBenchError
from specbench.common.storage import require_writable
from specbench.common.types import Text
from specbench.config import catalog, validation
from specbench.config.cli import command, run_cli
from specbench.config.export_formats import Format, require_exportable
from specbench.config.run_spec import weights_node
from specbench.config.trained_shape import take_shape
from specbench.engine.drafter import Drafter
from specbench.engine.loading import ModelSpec, model_folder
from specbench.engine.policies import TreePolicy
from specbench.training import export


@dataclass(frozen=True)
class Options:
    """The options in `conf/export.yaml` and its groups."""

    format: Format
    out: Text
    model: ModelSpec
    tree: TreePolicy
    drafter: Drafter


@command("export")
def main(config: Any) -> None:
    """Load the drafter beside its target, rename its tensors, write both files, print how to serve them."""
    validation.check(config, Options)
    catalog.require_own_name(config.drafter)
    out = Path(config.out)
    require_writable(out.parent)
    require_exportable(config)
    if out.exists():
        raise SpecBenchError(f"out={out} is there already; choose another folder or remove it")
    spec: ModelSpec = instantiate(config.model)
    options: Any = OmegaConf.to_container(config.drafter, resolve=True)
    if weights_node(options).get("weights"):
        take_shape(weights_node(options))
    drafter: Any = instantiate(options)
    target, _ = spec.load(beside=[drafter])
    drafter.bind(target)
    tensors, settings = drafter.export_tensors(config.format, target)
    export.write(out, tensors, settings)
    print(f"{config.drafter.name} for {config.format}: {len(tensors)} tensors in {out}")
    model = spec.path or spec.hub or str(model_folder(spec.name, None, None, None, spec.wheel))
    print(f"serve it with: {export.serve_command(config.format, model, out, drafter)}")


if __name__ == "__main__":
    run_cli(main, "export")
