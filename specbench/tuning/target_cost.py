"""Milliseconds of one pass of the target, by the nodes in it."""

import statistics
from collections.abc import Sequence

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
    clock = Clock(target.device)
    target.reset(len(prompt) + max(NODES))
    target.prefill(torch.tensor(prompt, device=target.device))
    trees = {nodes: _star(nodes, target) for nodes in NODES}
    times: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    for turn in range(PASSES + 1):
        for nodes, tree in trees.items():
            begin = clock()
            target.forward(tree)
            if turn:  # the first one warms up
                times[nodes].append(1000 * (clock() - begin))
            target.cache.truncate(len(prompt))
    return {f"ms_{nodes}": statistics.median(ms) for nodes, ms in times.items()}


def _star(nodes: int, target: Target) -> DraftTree:
    """A root and `nodes - 1` children."""
    index = torch.arange(nodes, device=target.device)
    below = (index > 0).long()
    return build(index % target.vocab_size, below - 1, below, (index - 1).clamp(min=0), max_depth=1, width=nodes)
