"""In which precision products over many tokens are computed: bfloat16 where a trial shows that it is faster here.

Weights and sums stay in float32 either way (autocast). Where a drafter's residual stream begins with a product, as EAGLE's
does, it is bfloat16, too.
"""

import functools
import time
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch

TOKENS = 2048  # of the trial
NARROW = 128  # hidden size below which converting costs more than it saves
PAYS = 1.3  # times as fast: clearly faster
Reading = Literal["bfloat16", "target"]  # in which a target computes states: products in bfloat16, or its own precision


def mixed(precision: str, device: torch.device, width: int) -> str:
    """A precision of Accelerate: for `auto`, `bf16` on a GPU and where that is faster, else `no`. width: hidden size."""
    if precision != "auto":
        return precision
    return "bf16" if device.type != "cpu" or bfloat16_pays(width) else "no"


def settled_reading(reading: str, earlier: str | None, device: torch.device, width: int) -> Reading:
    """What `auto` stands for: what `earlier` jobs settled for a corpus, else what is faster here. width: hidden size."""
    for asked in (reading, earlier):
        if asked in ("bfloat16", "target"):
            return cast(Reading, asked)
    return "bfloat16" if device.type == "cpu" and bfloat16_pays(width) else "target"


def wide(reading: Reading, device: torch.device) -> AbstractContextManager[Any]:
    """Context of a target's pass over many tokens, of which only states are kept."""
    return torch.autocast(device.type, torch.bfloat16, enabled=reading == "bfloat16")


@functools.cache
def bfloat16_pays(width: int) -> bool:
    """Is a product of this width clearly faster in bfloat16 on this processor?"""
    if width < NARROW:
        return False
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        tokens, weight = torch.ones(TOKENS, width, dtype=dtype), torch.ones(2 * width, width, dtype=dtype)
        times = []
        for _ in range(4):  # the first one warms up
            begin = time.perf_counter()
            torch.nn.functional.linear(tokens, weight)
            times.append(time.perf_counter() - begin)
        seconds[dtype] = min(times[1:])
    return seconds[torch.float32] > PAYS * seconds[torch.bfloat16]
