"""In which precision wide products are computed, found out by trying: processors differ more than their names say.

With bfloat16 instructions such a product takes a third of its time in float32 on one processor, and longer on another.
Weights, sums and the residual stream stay in float32 either way (autocast).
"""

import functools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

TOKENS = 2048  # of a pass that is wide
NARROW = 128  # hidden size below which converting costs more than it saves
PAYS = 1.3  # times as fast


def mixed(precision: str, device: torch.device, width: int) -> str:
    """What `auto` means here: `bf16` on a GPU and where it pays, else `no`. width: the target's hidden size."""
    if precision != "auto":
        return precision
    return "bf16" if device.type != "cpu" or bfloat16_pays(width) else "no"


def wide(precision: str, device: torch.device, width: int) -> AbstractContextManager[Any]:
    """Around a pass over many tokens of a model that is in float32; `target` leaves its products as they are."""
    if precision == "auto" and device.type == "cpu" and bfloat16_pays(width):
        return torch.autocast("cpu", torch.bfloat16)
    return nullcontext()


@functools.cache
def bfloat16_pays(width: int) -> bool:
    """Is a product of this width, over many tokens, clearly faster in bfloat16 on this machine's processor?"""
    if width < NARROW:
        return False
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        tokens, weight = torch.ones(TOKENS, width, dtype=dtype), torch.ones(2 * width, width, dtype=dtype)
        took = []
        for _ in range(4):  # the first one warms up
            begin = time.perf_counter()
            torch.nn.functional.linear(tokens, weight)
            took.append(time.perf_counter() - begin)
        seconds[dtype] = min(took[1:])
    return seconds[torch.float32] > PAYS * seconds[torch.bfloat16]
