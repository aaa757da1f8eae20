"""Milliseconds of one pass of the target, by the nodes in it."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from specbench.common.errors import SpecBenchError
from specbench.common.timing import Clock
from specbench.engine.interface import DraftTree
from specbench.engine.target import Target
from specbench.engine.tree import build

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PASSES = 11  # target passes of each size, of which the median counts


def text(target: Target, length: int) -> list[int]:
    """Arbitrary ids, as a context of timed passes."""
    return [(7 * i + 3) % target.vocab_size for i in range(length)]


def passes(target: Target, contexts: Sequence[int]) -> dict[int, dict[str, float]]:
    """`target_pass` by tokens of context, without contexts that leave no room for the largest tree.

    Raises:
        SpecBenchError: none leaves room.
    """
    room = target.max_context - max(NODES)
    if min(contexts) > room:
        raise SpecBenchError(f"contexts: none of them leaves room for {max(NODES)} nodes in {target.max_context} positions")
    return {context: target_pass(target, text(target, context)) for context in contexts if context <= room}


@torch.inference_mode()
def target_pass(target: Target, prompt: list[int]) -> dict[str, float]:
    """Median milliseconds of a pass over a star of 1 … 64 nodes after a prompt, all sizes in turn: `ms_1` … `ms_64`."""
    target.reset(len(prompt) + max(NODES))
    target.prefill(torch.tensor(prompt, device=target.device))
    passes = {f"ms_{nodes}": partial(target.forward, _star(nodes, target)) for nodes in NODES}
    return {name: 1000 * seconds for name, seconds in median_seconds(target, passes, PASSES).items()}


def median_seconds(target: Target, passes: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median seconds of each pass of a target, all passes in turn. What they append to the cache is dropped."""
    clock, length = Clock(target.device), target.cache.length
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(turns + 1):
        for name, run in passes.items():
            begin = clock()
            run()
            if turn:  # the first one warms up
                seconds[name].append(clock() - begin)
            target.cache.truncate(length)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _star(nodes: int, target: Target) -> DraftTree:
    """A root and `nodes - 1` children."""
    index = torch.arange(nodes, device=target.device)
    below = (index > 0).long()
    return build(index % target.vocab_size, below - 1, below, (index - 1).clamp(min=0), max_depth=1, width=nodes)
