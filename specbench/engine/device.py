"""The device and precision of a target, where a configuration leaves them to the machine."""

import gc
import os

import torch

from specbench.common import gpu
from specbench.common.errors import SpecBenchError


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one.

    Raises `SpecBenchError` for a GPU that this machine lacks, and where torch cannot use the one that the driver sees.
    """
    if device == "auto":
        own = int(os.environ.get("LOCAL_RANK", 0))  # one GPU for each process of a launch
        if torch.cuda.is_available():
            return torch.device("cuda", own)
        _require_no_gpu()
        return torch.device("cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise SpecBenchError(
            f"model.device={device}, but torch sees {torch.cuda.device_count()} GPUs here; use model.device=cpu or auto"
        )
    return chosen


def on_cuda(device: str) -> bool:
    """Is what `pick_device` will choose a GPU? Raises nothing."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _require_no_gpu() -> None:
    """Raises `SpecBenchError` if there is a GPU, not hidden on purpose: a large target would run on the CPU, unnoticed."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or (seen := gpu.visible()) is None:
        return
    driver, names = seen
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch"
    else:
        reason = f"torch cannot use it: update the driver to one for CUDA {torch.version.cuda}, or install an older torch"
    raise SpecBenchError(f"driver {driver} sees {names[0]}, and {reason}; or set model.device=cpu")


def pick_dtype(dtype: str, device: torch.device, on_gpu: str = "bfloat16") -> torch.dtype:
    """`auto` is `on_gpu` on a GPU, bfloat16 on a CPU with AMX, else float32.

    avx512_bf16 alone is no faster in decoding: 1 token takes as long, 8 to 64 longer, and answers differ at ties.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type != "cpu":
        return getattr(torch, on_gpu)
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if capabilities.get("amx_bf16") else torch.float32


def free_unused() -> None:
    """Return the memory of what nobody holds any longer to the device: modules that hold each other, cached blocks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
