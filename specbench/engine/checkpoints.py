"""Drafters that others published, on disk or on the hub. Knows files and tensors, no drafter.

Only tensors are read: safetensors, or pickles with `weights_only=True`; `TrainedDrafter.map_checkpoint` maps their names.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from specbench.common import hashing
from specbench.common.errors import SpecBenchError
from specbench.common.storage import user_path
from specbench.data.download import BESIDE_TENSORS
from specbench.engine.model_files import CONFIG, read_settings
from specbench.engine.tensors import read_tensors, some
from specbench.engine.weights import Checkpoint

FILES = ("*.safetensors", "medusa_lm_head.pt", "pytorch_model*.bin", "*.pt", "*.bin")  # in this order of preference


def read(source: str) -> Checkpoint:
    """From a folder or a hub id. Raises `SpecBenchError` for no tensors there, a damaged file, or a pickle with code."""
    folder = user_path(source) if user_path(source).exists() else _from_hub(source)
    files = next((found for pattern in FILES if (found := sorted(folder.glob(pattern)))), [])
    if not files:
        raise SpecBenchError(f"checkpoint={source} holds no weights ({', '.join(FILES)})")
    _read_all(files)  # what is damaged is refused now; a study's other drafters need the memory until this one is bound
    config = folder / CONFIG
    settings = read_settings(config) if config.is_file() else {}
    return Checkpoint(source, str(folder), partial(_read_all, files), settings, hashing.of_files(files))


def _read_all(files: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of all files. Raises `SpecBenchError` for damage, or a name in two of them."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        read = read_tensors(path)
        if twice := sorted(tensors.keys() & read.keys()):
            raise SpecBenchError(f"{path} holds {some(twice)} a second time; remove the file that does not belong there")
        tensors |= read
    return tensors


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*BESIDE_TENSORS, *FILES]
    try:
        with suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(hub_id, allow_patterns=patterns, local_files_only=True))
            if any(found for pattern in FILES for found in folder.glob(pattern)):  # other tools may fetch single files
                return folder
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise SpecBenchError(
            f"checkpoint={hub_id} is no folder here and cannot be fetched from the hub ({type(error).__name__}); connect "
            "to the network, log in if it is gated, or pass a folder"
        ) from error
