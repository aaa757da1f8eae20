"""What can only be measured in a process of its own: peak memory, which no process gives back.

`call` runs a function of this package in a fresh process, one at a time, and hands back what it returns.
"""

import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch import nn

from specbench.common import timing
from specbench.common.errors import SpecBenchError
from specbench.common.processes import end_with_parent
from specbench.config.run_spec import RunSpec
from specbench.engine.backends.packed_linear import Timed
from specbench.engine.cache import KVCache
from specbench.engine.decode import Limits, decode
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.evaluation import arms, costs


def call(work: Callable[..., Any], *arguments: Any) -> Any:
    """Raises whatever the function raises, and `SpecBenchError` if its process is killed."""
    with ProcessPoolExecutor(1, _context(), end_with_parent) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            raise SpecBenchError("a process was killed while it measured; is there enough memory?") from error


def _context() -> BaseContext:
    """Processes forked from one that has imported what they need and done nothing else: as fresh, seconds sooner."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def memory(spec: RunSpec, prompt: list[int], tokens: int, timed: Timed) -> dict[str, float]:
    """Bytes that this process holds once target and drafter are loaded, and at most while it decodes one prompt.

    Args:
        prompt: ids; so many `tokens` are decoded after it.
        timed: of products, so that they are the ones of the process that asks, and not timed again.

    Returns:
        loaded, peak: of the allocator on a GPU, else of the process. driver: as the GPU's driver sees it. kv: of caches.
    """
    made = arms.make(spec)
    target = loaded(spec, made[0], timed)
    bound = arms.build(spec, target, made=made).bound
    gc.collect()
    peak = timing.PeakMemory(target.device)
    peak.start()
    before = peak.bytes()
    peak.start()
    for _ in decode(target, bound.drafter, prompt, Limits(tokens, target.stop_ids), bound.rule, Sampler()):
        pass
    found: dict[str, float] = {"loaded": before, "peak": peak.bytes(), "kv": cached_bytes(target, bound.drafter)}
    return found | ({"driver": peak.read()["driver"]} if target.device.type == "cuda" else {})


def training(spec: RunSpec) -> dict[str, float]:
    """What a training step of a run's drafter takes, from its initial weights; see `costs.training`."""
    drafter = replace(spec, checkpoint=None).make_drafter(weights=None)
    target = loaded(spec, drafter)
    drafter.vocabulary = None  # a loss reads the whole head
    drafter.bind(target)
    return costs.training(target, drafter)


def loaded(spec: RunSpec, drafter: Any, timed: Timed | None = None) -> Target:
    """The target, with room for a drafter beside it."""
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    return arms.load(spec, [drafter], arms.Reused(timed={} if timed is None else timed))[0]


def cached_bytes(target: Target, drafter: Any) -> int:
    """Keys and values that target and drafter hold, as much as was taken for them."""
    modules = drafter.modules() if isinstance(drafter, nn.Module) else [drafter]
    caches = [target.cache, *(x for module in modules for x in vars(module).values() if isinstance(x, KVCache))]
    return sum(cache.nbytes for cache in {id(c): c for c in caches}.values())
