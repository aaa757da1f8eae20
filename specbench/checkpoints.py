"""Drafters that others published, as they lie on disk or on the hub. Knows files and tensors, no drafter.

Only tensors are read: safetensors, or pickles with `weights_only=True`. What the names mean is each drafter's business
(`TrainedDrafter.official`).
"""

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specbench.assets import sha256_of
from specbench.engine.weights import Checkpoint
from specbench.errors import SpecBenchError

FILES = ("*.safetensors", "medusa_lm_head.pt", "pytorch_model*.bin", "*.pt", "*.bin")  # in this order of preference


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
    return Checkpoint(place, str(folder), tensors, said, {p.name: sha256_of(p) for p in files})


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
