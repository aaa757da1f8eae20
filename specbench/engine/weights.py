"""A drafter's weights: `model.safetensors` beside `provenance.json`, or tensors that others published. Knows no drafter.

Beside them the sublayers of the target that a search left out, where a drafter has no tensors of its own.

The provenance says what the weights were trained for (the target's fingerprint), on what, for how long, by which
commit and machine; loading refuses weights that belong to another target or another network.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import TypedDict

from specbench.common import hashing
from specbench.common.errors import SpecBenchError, refusing
from specbench.common.io import read_json
from specbench.engine.interface import Sublayers
from specbench.engine.tensors import read_tensors, some
from specbench.records.schema import PROVENANCE, SKIP, WEIGHTS


class Provenance(TypedDict, total=False):
    """What is read of a provenance; beside it stands more for people."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # type: ignore[misc]
    target: str
    target_fingerprint: str
    calibration: list[list[float]] | None
    history: list[dict[str, Any]]


def trained(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that are the drafter's own: everything but what it shares, frozen, with the target."""
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}


def save(module: nn.Module, folder: Path, provenance: dict[str, Any]) -> None:
    """Write a drafter's own tensors in bfloat16, and where they come from. `folder` must be a temporary one."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.to("cpu", torch.bfloat16).contiguous() for n, p in trained(module).items()}
    save_file(tensors, folder / WEIGHTS)
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")


def contents_of(folder: Path) -> dict[str, str]:
    """SHA-256 of what `load` reads, by name."""
    return hashing.of_files([folder / WEIGHTS, folder / PROVENANCE])


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
    mend = "fetch or train them again"
    provenance: dict[str, Any] = read_json(folder / PROVENANCE, Provenance)
    tensors = read_tensors(folder / WEIGHTS, mend)
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
            f"drafter weights in {folder} do not fit this network: {some(wrong)} missing, unexpected or of another shape; "
            "check the drafter's options"
        )
    if odd := _not_floats(tensors):
        raise SpecBenchError(f"{folder / WEIGHTS}: {some(odd)}, where weights are floating-point numbers; {mend}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
    return provenance


class Skip(TypedDict):
    """What is read of `SKIP`: sublayers of a target that are to be left out; beside it stands where they come from."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # type: ignore[misc]
    target: str
    target_fingerprint: str
    attention: list[int]
    mlp: list[int]


def load_skip(folder: Path, fingerprint: str, layers: int) -> tuple[Sublayers, dict[str, Any]]:
    """The sublayers that a search left out, and all that the file says.

    Raises:
        SpecBenchError: a damaged file, or one of another target.
    """
    path = folder / SKIP
    said: dict[str, Any] = read_json(path, Skip)
    mend = "search again (train.until=search) or set drafter.searched=null"
    if said["target_fingerprint"] != fingerprint:
        raise SpecBenchError(
            f"{path} was searched for target {said['target']} ({said['target_fingerprint']}), not for this one "
            f"({fingerprint}); {mend}"
        )
    if odd := [i for i in (*said["attention"], *said["mlp"]) if not 0 <= i < layers]:
        raise SpecBenchError(f"{path} names layer {odd[0]}, but the target has {layers}; {mend}")
    return Sublayers(frozenset(said["attention"]), frozenset(said["mlp"])), said


def skip_contents(folder: Path) -> dict[str, str]:
    """SHA-256 of what `load_skip` reads, by name."""
    return hashing.of_files([folder / SKIP])


def _not_floats(tensors: Mapping[str, Tensor]) -> list[str]:
    return [f"{n} is of {str(t.dtype).removeprefix('torch.')}" for n, t in tensors.items() if not t.is_floating_point()]


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

    def __deepcopy__(self, memo: Any) -> "Checkpoint":
        """Nothing here changes, and tensors are large."""
        return self

    def contents(self) -> dict[str, str]:
        """SHA-256 of what was read, by name: the tensors and the configuration."""
        config = Path(self.folder) / "config.json"
        return dict(self.digest) | hashing.of_files([config] if config.is_file() else [])

    def understood(self) -> AbstractContextManager[None]:
        """Around code that reads names, shapes and configuration as their authors should have written them."""
        return refusing(f"checkpoint={self.place}: its tensors and config.json do not make this drafter")

    def refuse(self, why: str) -> SpecBenchError:
        """An error that names this checkpoint."""
        return SpecBenchError(f"checkpoint={self.place}: {why}")


def adopt(own: Mapping[str, Tensor], named: Mapping[str, Tensor], checkpoint: Checkpoint, used: set[str]) -> None:
    """Fill a drafter's own tensors.

    Args:
        own: the drafter's, by its names. named: the checkpoint's, by the drafter's names. used: names in the checkpoint
            that were understood.

    Raises:
        SpecBenchError: tensors missing, left over, of another shape, or of whole numbers, by name.
    """
    missing, left = sorted(own.keys() - named.keys()), sorted(checkpoint.tensors.keys() - used)
    if missing or left:
        parts = [f"lacks {', '.join(missing[:4])}"] * bool(missing) + [f"also holds {', '.join(left[:4])}"] * bool(left)
        raise checkpoint.refuse(f"not this drafter's layout: it {' and '.join(parts)}")
    wrong = [f"{n} is {list(named[n].shape)}, not {list(t.shape)}" for n, t in own.items() if named[n].shape != t.shape]
    if wrong:
        raise checkpoint.refuse(f"made for another target: {'; '.join(wrong[:3])}")
    if odd := _not_floats(named):
        raise checkpoint.refuse(f"{some(odd)}, where weights are floating-point numbers")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(named[name])
