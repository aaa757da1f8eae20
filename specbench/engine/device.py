"""The device and precision of a target, where a configuration leaves them to the machine."""

import os

import torch

from specbench.common.errors import SpecBenchError


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises `SpecBenchError` for a GPU that this machine lacks."""
    if device == "auto":
        own = int(os.environ.get("LOCAL_RANK", 0))  # one GPU for each process of a launch
        return torch.device("cuda", own) if torch.cuda.is_available() else torch.device("cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise SpecBenchError(
            f"model.device={device}, but torch sees {torch.cuda.device_count()} GPUs here; use model.device=cpu or auto"
        )
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and on a CPU with AMX, else float32.

    avx512_bf16 alone is no faster in decoding: 1 token takes as long, 8 to 64 longer, and answers differ at ties.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type != "cpu":
        return torch.bfloat16
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if capabilities.get("amx_bf16") else torch.float32
