"""Measurements in a fresh process: peak memory, which a process cannot reset for all its libraries."""

import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
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
    """What a function returns or raises in a process of its own; `SpecBenchError` if that is killed."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # forked from a process that has done nothing but its imports
    with ProcessPoolExecutor(1, context, end_with_parent) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            raise SpecBenchError("a process was killed while it measured; is there enough memory?") from error


def memory(spec: RunSpec, prompt: list[int], tokens: int, timed: Timed) -> dict[str, float]:
    """Bytes that this process holds once target and drafter are loaded, and its peak while it decodes one prompt.

    Args:
        timed: the calling process's choice of matrix products, which is not timed again.

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
    driver = {"driver": peak.read()["driver"]} if target.device.type == "cuda" else {}
    return {"loaded": before, "peak": peak.bytes(), "kv": _cached_bytes(target, bound.drafter), **driver}


def training(spec: RunSpec) -> dict[str, float]:
    """The cost of a training step of a run's drafter, from its initial weights; see `costs.training`."""
    drafter = replace(spec, checkpoint=None).make_drafter(weights=None)
    target = loaded(spec, drafter)
    drafter.vocabulary = None  # a loss reads the whole head
    drafter.bind(target)
    return costs.training(target, drafter)


def loaded(spec: RunSpec, drafter: Any, timed: Timed | None = None) -> Target:
    """The target, with room for a drafter beside it."""
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    return arms.load(spec, [drafter], arms.Reused(timed={} if timed is None else timed))[0]


def _cached_bytes(target: Target, drafter: Any) -> int:
    """Allocated bytes of the key/value caches of target and drafter."""
    modules = drafter.modules() if isinstance(drafter, nn.Module) else [drafter]
    own = [target.cache] if isinstance(target, Target) else []  # a remote target's is on the server
    caches = [*own, *(x for module in modules for x in vars(module).values() if isinstance(x, KVCache))]
    return sum(cache.nbytes for cache in {id(c): c for c in caches}.values())
