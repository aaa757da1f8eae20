"""Measurements in a fresh process: peak memory, which a process cannot reset for all its libraries.

Not on a GPU: its allocator's peak can be reset, and a second process would have to hold the target once more.
"""

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
from specbench.common.io import read_json
from specbench.common.processes import end_with_parent
from specbench.common.storage import project_path
from specbench.config import validation
from specbench.config.run_spec import RunSpec
from specbench.engine.backends.packed_linear import Timed
from specbench.engine.cache import KVCache
from specbench.engine.decode import Limits, decode
from specbench.engine.device import free_unused
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.evaluation import arms, costs
from specbench.evaluation.runner import BoundDrafter
from specbench.records.schema import PROVENANCE


def call(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns or raises in a process of its own; `SpecBenchError` if that is killed."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # forked from a process that has done nothing but its imports
    with ProcessPoolExecutor(1, context, end_with_parent) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            raise SpecBenchError("a process was killed while it measured; is there enough memory?") from error


def memory(spec: RunSpec, label: str, prompt: list[int], tokens: int, timed: Timed) -> dict[str, float]:
    """Bytes that this process holds once target and drafter are loaded, and its peak while it decodes one prompt.

    Args:
        label: of the arm, by which its fitted tree is found.
        timed: the calling process's choice of matrix products, which is not timed again.

    Returns:
        loaded, peak: of the process. kv: of caches.
    """
    made = arms.make(spec)
    target = loaded(spec, made[0], timed)
    bound = arms.build(spec, target, label, made).bound
    gc.collect()
    peak = timing.PeakMemory(target.device)
    peak.start()
    before = peak.bytes()
    return {"loaded": before, **_peak(peak, target, bound, prompt, tokens)}


def memory_on_gpu(target: Target, bound: BoundDrafter, prompt: list[int], tokens: int) -> dict[str, float]:
    """The same in this process, whose other drafters do not count.

    Returns:
        loaded: of the weights of target and drafter. peak: these, and by how much the allocator's use grew while one
        prompt was decoded. reserved, driver, device: see `timing.PeakMemory`; other drafters included.
    """
    for cache in _caches(target, bound.drafter):
        cache.storage = {}  # of earlier prompts: it is allocated again, and counted
    for part in (target, *_parts(bound.drafter)):  # outputs of graphs, too
        if getattr(part, "captured", None) is not None:
            part.captured.graphs.clear()
    free_unused()
    peak = timing.PeakMemory(target.device)
    peak.start()
    before = peak.bytes()
    found = _peak(peak, target, bound, prompt, tokens)
    weights = _weight_bytes(target, bound.drafter)
    return {"loaded": weights, **found, "peak": weights + found["peak"] - before}


def _peak(peak: timing.PeakMemory, target: Target, bound: BoundDrafter, prompt: list[int], tokens: int) -> dict[str, float]:
    """What is read of the peak after one prompt was decoded."""
    peak.start()
    for _ in decode(target, bound.drafter, prompt, Limits(tokens, target.stop_ids), bound.rule, Sampler()):
        pass
    on_gpu = {name: value for name, value in peak.read().items() if name in ("reserved", "driver", "device")}
    return {"peak": peak.bytes(), "kv": sum(cache.nbytes for cache in _caches(target, bound.drafter)), **on_gpu}


def training(spec: RunSpec, target: Target | None = None) -> dict[str, float]:
    """The cost of a training step of a run's drafter, from its initial weights; see `costs.training`.

    The objective is that of the last phase in which its weights were trained, if they are there, but for what the run sets.

    target: loaded already; None: it is loaded here.
    """
    spec = replace(spec, checkpoint=None)
    made, phase = _objective(spec, type(spec.make_drafter(weights=None)))
    drafter = spec.make_drafter(weights=None, **made)
    drafter.configure(**phase)
    target = target or loaded(spec, drafter)
    drafter.vocabulary = None  # a loss reads the whole head
    drafter.bind(target)
    return costs.training(target, drafter)


def _objective(spec: RunSpec, drafter: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that a drafter's weights were trained with and that its run does not set, and those of the last phase."""
    path = project_path(str(spec.drafter.get("weights"))) / PROVENANCE
    trained = read_json(path) if path.is_file() else {}
    phases = (trained.get("recipe") or {}).get("settings", {}).get("phases") or [{}]
    parts = trained.get("drafter") or {}, phases[-1].get("drafter") or {}
    free = validation.options(drafter).keys() - spec.drafter.keys()
    made, phase = ({name: value for name, value in part.items() if name in free} for part in parts)
    return made, phase


def loaded(spec: RunSpec, drafter: Any, timed: Timed | None = None) -> Target:
    """The target, with room for a drafter beside it."""
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    return arms.load(spec, [drafter], arms.Reused(timed={} if timed is None else timed))[0]


def _caches(target: Target, drafter: Any) -> list[KVCache]:
    """The key/value caches of target and drafter."""
    own = [target.cache] if isinstance(target, Target) else []  # a remote target's is on the server
    caches = [*own, *(x for part in _parts(drafter) for x in vars(part).values() if isinstance(x, KVCache))]
    return list({id(cache): cache for cache in caches}.values())


def _weight_bytes(target: Target, drafter: Any) -> int:
    """Bytes of the parameters and buffers of target and drafter, each tensor once."""
    parts = [part for part in (*target.model.modules(), *_parts(drafter)) if isinstance(part, nn.Module)]
    tensors = [x for part in parts for x in (*part.parameters(recurse=False), *part.buffers(recurse=False))]
    return sum({x.data_ptr(): x.nbytes for x in tensors}.values())


def _parts(drafter: Any) -> list[Any]:
    """The modules of the drafter with the weights, or itself if it is none."""
    return list(drafter.weights_owner.modules()) if isinstance(drafter.weights_owner, nn.Module) else [drafter]
