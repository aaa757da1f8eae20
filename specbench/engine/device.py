"""Where a target runs, and in which precision, if a configuration leaves that to the machine."""

import os

import torch

from specbench.common.errors import SpecBenchError


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises `SpecBenchError` for a GPU that this machine lacks."""
    if device == "auto":
        own = int(os.environ.get("LOCAL_RANK", 0))  # each process of a launch has a GPU of its own
        return torch.device("cuda", own) if torch.cuda.is_available() else torch.device("cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise SpecBenchError(
            f"model.device={device}, but torch sees {torch.cuda.device_count()} GPUs here; use model.device=cpu or auto"
        )
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and on a CPU with AMX, else float32.

    avx512_bf16 alone does not pay in decoding: one token is no faster, 8 to 64 are slower, and answers part at ties.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type != "cpu":
        return torch.bfloat16
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if capabilities.get("amx_bf16") else torch.float32
