"""A drafter's weights: `model.safetensors` beside `provenance.json`, or tensors that others published. Knows no drafter.

The provenance says what the weights were trained for (the target's fingerprint), on what, for how long, by which
commit and machine; loading refuses weights that belong to another target or another network.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specbench.errors import SpecBenchError

WEIGHTS, PROVENANCE = "model.safetensors", "provenance.json"
PROJECT = Path(__file__).resolve().parents[2]  # relative weight folders start here


def trained(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that are the drafter's own: everything but what it shares, frozen, with the target."""
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}


def save(module: nn.Module, folder: Path, provenance: dict[str, Any]) -> None:
    """Write a drafter's own tensors in bfloat16, and where they come from. `folder` must be a temporary one."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.to("cpu", torch.bfloat16).contiguous() for n, p in trained(module).items()}
    save_file(tensors, folder / WEIGHTS)
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")


def load(module: nn.Module, folder: Path, fingerprint: str) -> dict[str, Any]:
    """Fill a drafter's own tensors; returns the provenance.

    Raises:
        SpecBenchError: missing or damaged files, another target's weights, or tensors that do not fit the network.
    """
    for name in (WEIGHTS, PROVENANCE):
        if not (folder / name).is_file():
            raise SpecBenchError(
                f"no drafter weights at {folder / name}; train them (python -m specbench.train drafter=…) "
                "or point drafter.weights at a folder that has them"
            )
    try:
        provenance = json.loads((folder / PROVENANCE).read_text())
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise SpecBenchError(f"drafter weights in {folder} are damaged ({error}); fetch or train them again") from error
    made_for = provenance.get("target_fingerprint")
    if made_for != fingerprint:
        raise SpecBenchError(
            f"drafter weights in {folder} were trained for target {provenance.get('target')} ({made_for}), not for this "
            f"one ({fingerprint}); train a drafter for it or choose drafter.weights"
        )
    own = trained(module)
    wrong = [n for n in sorted(own.keys() | tensors.keys()) if n not in own or n not in tensors]
    wrong += [n for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape]
    if wrong:
        raise SpecBenchError(
            f"drafter weights in {folder} do not fit this network: {', '.join(wrong[:4])}"
            f"{' …' if len(wrong) > 4 else ''} missing, unexpected or of another shape; check the drafter's options"
        )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
    return provenance


@dataclass(frozen=True)
class Checkpoint:
    """Tensors as the authors named them.

    Attributes:
        place: as given. folder: where its files lie.
        config: the `config.json` beside them, empty if there is none. digest: SHA-256 by file.
    """

    place: str
    folder: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    digest: Mapping[str, str]

    def refuse(self, why: str) -> SpecBenchError:
        """An error that names this checkpoint."""
        return SpecBenchError(f"checkpoint={self.place}: {why}")


def adopt(own: Mapping[str, Tensor], named: Mapping[str, Tensor], checkpoint: Checkpoint, used: set[str]) -> None:
    """Fill a drafter's own tensors.

    Args:
        own: the drafter's, by its names. named: the checkpoint's, by the drafter's names. used: names in the checkpoint
            that were understood.

    Raises:
        SpecBenchError: tensors missing, left over, or of another shape, by name.
    """
    missing, left = sorted(own.keys() - named.keys()), sorted(checkpoint.tensors.keys() - used)
    if missing or left:
        parts = [f"lacks {', '.join(missing[:4])}"] * bool(missing) + [f"also holds {', '.join(left[:4])}"] * bool(left)
        raise checkpoint.refuse(f"not this drafter's layout: it {' and '.join(parts)}")
    wrong = [f"{n} is {list(named[n].shape)}, not {list(t.shape)}" for n, t in own.items() if named[n].shape != t.shape]
    if wrong:
        raise checkpoint.refuse(f"made for another target: {'; '.join(wrong[:3])}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(named[name])
