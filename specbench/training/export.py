"""A trained drafter in the format of a serving engine, and the command that starts that engine with it."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specbench.common.storage import atomic_path

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write(out: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Write weights in bfloat16, tables as they are, and their `config.json` into a new folder, both or neither."""
    with atomic_path(out) as folder:
        folder.mkdir()
        on_cpu = {
            name: tensor.to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous().clone()
            for name, tensor in tensors.items()
        }
        save_file(on_cpu, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps({**settings, "dtype": "bfloat16"}, indent=1, default=str) + "\n")


def serve_command(server: str, target: str, out: Path, drafter: Any) -> str:
    """The command that starts a server with the exported drafter: with its tree, or a chain as long as its heads.

    target: the model's folder or hub id.
    """
    policy = drafter.growth
    if server == "vllm":
        method = "medusa" if drafter.parallel else drafter.served_as
        tokens = drafter.deepest or policy.depth
        config = {"method": method, "model": str(out.resolve()), "num_speculative_tokens": tokens}
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config)])
    tree = {"num-steps": policy.depth, "eagle-topk": policy.width, "num-draft-tokens": policy.nodes}
    options = {"algorithm": drafter.served_as.upper(), "draft-model-path": out.resolve()} | tree
    words = [word for name, value in options.items() for word in (f"--speculative-{name}", str(value))]
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", target, *words])
