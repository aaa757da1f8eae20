"""Drafters that others published, as they lie on disk or on the hub. Knows files and tensors, no drafter.

Only tensors are read: safetensors, or pickles with `weights_only=True`. What the names mean is each drafter's business
(`TrainedDrafter.official`); here every expected tensor must be consumed and every unexpected one is named.
"""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specbench.assets import sha256_of
from specbench.errors import SpecBenchError

FILES = ("*.safetensors", "medusa_lm_head.pt", "pytorch_model*.bin", "*.pt", "*.bin")  # in this order of preference


@dataclass(frozen=True)
class Checkpoint:
    """Tensors as the authors named them.

    Attributes:
        place: as given. config: the `config.json` beside them, empty if there is none. digest: SHA-256 by file.
    """

    place: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    digest: Mapping[str, str]

    def refuse(self, why: str) -> SpecBenchError:
        """An error that names this checkpoint."""
        return SpecBenchError(f"checkpoint={self.place}: {why}")


def read(place: str) -> Checkpoint:
    """From a folder or a hub id.

    Raises:
        SpecBenchError: nothing there, no tensors in it, a file that is cut off, or a pickle that holds code.
    """
    folder = Path(place).expanduser() if Path(place).expanduser().exists() else _from_hub(place)
    files = next((found for pattern in FILES if (found := sorted(folder.glob(pattern)))), [])
    if not files:
        raise SpecBenchError(f"checkpoint={place} holds no weights ({', '.join(FILES)})")
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= _tensors(path)
    config = folder / "config.json"
    try:
        said = json.loads(config.read_text()) if config.is_file() else {}
    except json.JSONDecodeError as error:
        raise SpecBenchError(f"{config} is damaged ({error.msg}); fetch it again") from error
    return Checkpoint(place, tensors, said, {p.name: sha256_of(p) for p in files})


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SpecBenchError(
            f"{path} holds code beside its tensors and is not read; ask its authors for safetensors"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpecBenchError(f"{path} is damaged or cut off ({first}); fetch it again") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise SpecBenchError(f"{path} is no state dict of tensors; a drafter's checkpoint was expected")
    return found


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["config.json", *FILES]
    try:
        try:
            return Path(snapshot_download(hub_id, allow_patterns=wanted, local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise SpecBenchError(
            f"checkpoint={hub_id} is no folder here and cannot be fetched from the hub ({type(error).__name__}); connect "
            "to the network, log in if it is gated, or pass a folder"
        ) from error


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
