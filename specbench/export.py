"""A trained drafter, as a serving engine reads it.

python -m specbench.export drafter=eagle2 format=sglang
python -m specbench.export drafter=medusa format=vllm out=FOLDER
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import hydra
import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from specbench.common.errors import SpecBenchError
from specbench.common.storage import atomic_path, require_writable
from specbench.common.types import Text
from specbench.config import validation
from specbench.config.cli import CONF, handle_errors, run_cli
from specbench.engine.drafter import Drafter
from specbench.engine.loading import ModelSpec, model_folder
from specbench.engine.policies import TreePolicy

Format = Literal["vllm", "sglang"]


@dataclass(frozen=True)
class Options:
    """What `conf/export.yaml` and its groups may say."""

    format: Format
    out: Text
    model: ModelSpec
    tree: TreePolicy
    drafter: Drafter


@hydra.main(version_base="1.3", config_path=CONF, config_name="export")
@handle_errors
def main(config: DictConfig) -> None:
    """Load the drafter beside its target, rename its tensors, write both files, say how to serve them."""
    validation.check(config, Options)
    out = Path(config.out)
    require_writable(out.parent)
    if config.drafter.get("weights", "") is None:
        raise SpecBenchError("drafter.weights=null would export random weights; name the folder of trained ones")
    if config.drafter.get("vocabulary") is not None:
        raise SpecBenchError("drafter.vocabulary is no part of what is exported; leave it out, and set it in the server")
    _require_taken(config)
    if out.exists():
        raise SpecBenchError(f"out={out} is there already; choose another folder or remove it")
    spec: ModelSpec = instantiate(config.model)
    drafter: Any = instantiate(config.drafter)
    target, _ = spec.load(beside=[drafter])
    drafter.bind(target)
    tensors, settings = drafter.export_tensors(config.format, target)
    with atomic_path(out) as folder:
        folder.mkdir()
        save_file(
            {n: t.to("cpu", torch.bfloat16).contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}, indent=1, default=str) + "\n")
    print(f"{config.drafter.name} for {config.format}: {len(tensors)} tensors in {out}")
    served = spec.path or spec.hub or str(model_folder(spec.name, None, None, None, spec.wheel))
    print(f"serve it with: {serve_command(config.format, served, out, drafter)}")


def serve_command(server: str, target: str, out: Path, drafter: Any) -> str:
    """What starts a server with the exported drafter, with the depth and size of its tree, or a chain as long as its heads.

    target: the model's folder or hub id.
    """
    growth = drafter.growth
    if server == "vllm":
        method = "medusa" if drafter.parallel else "eagle"
        tokens = drafter.deepest or growth.depth
        said = {"method": method, "model": str(out.resolve()), "num_speculative_tokens": tokens}
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(said)])
    tree = {"num-steps": growth.depth, "eagle-topk": growth.width, "num-draft-tokens": growth.nodes}
    said = {"algorithm": "EAGLE", "draft-model-path": out.resolve()} | tree
    words = [word for name, value in said.items() for word in (f"--speculative-{name}", str(value))]
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", target, *words])


def _require_taken(config: DictConfig) -> None:
    """Raises `SpecBenchError` for a drafter that the format has no place for, and says which ones each format takes."""
    reason = _untaken(config.drafter, config.format)
    if reason:
        lists = "; ".join(f"{name} takes {', '.join(taken(name))}" for name in get_args(Format))
        raise SpecBenchError(f"drafter={config.drafter.name} format={config.format}: {reason} ({lists})")


def taken(server: str) -> list[str]:
    """The drafters of `conf/drafter` that a server has a place for, as they are configured there."""
    files: dict[str, Any] = {path.stem: OmegaConf.load(path) for path in Path(CONF, "drafter").glob("*.yaml")}
    return sorted(name for name, file in files.items() if _untaken(file.get("drafter", file), server) is None)


def _untaken(options: Any, server: str) -> str | None:
    """Why a server has no place for a drafter of these options; None: it has one."""
    kind: Any = get_class(options["_target_"])
    reason: str | None = kind.unserved(server, options)
    return reason


if __name__ == "__main__":
    run_cli(main, "export")
