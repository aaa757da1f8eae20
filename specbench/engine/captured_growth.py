"""Growing a draft tree in fixed shapes, so that on CUDA all levels and the choice among their nodes are one graph.

A drafter that takes part names the tensors that `observe` leaves for a tree (`TrainedDrafter.observed`), whose shapes never
change. What else its levels depend on is the number of rows that its cache keeps, which lies on the device, and the
capacity of the cache that they attend to, as in `captured`.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specbench.engine.backends.cuda_graphs import Graphs
from specbench.engine.cache import DraftRows, KVCache
from specbench.engine.captured import capacities
from specbench.engine.interface import DraftTree
from specbench.engine.sampling import Sampler

SPARE = 16  # cache rows for the root and its like


class CapturedGrowth:
    """The trees of one drafter, grown in fixed shapes.

    Args:
        target: whose passes are captured, too. cache: the drafter's; it gets one storage for all prompts.
        rows: nodes of a tree that are expanded.
    """

    def __init__(self, target: Any, cache: KVCache, rows: int):
        cache.step = max(cache.step, target.max_context + rows + SPARE)
        cache.capacity = max(cache.capacity, cache.step)  # or storage would grow, and be captured anew, with longer answers
        self.target = target
        self.graphs = Graphs(target.device)
        self.at, self.root = (torch.zeros(1, dtype=torch.long, device=target.device) for _ in range(2))
        self._made_for: tuple[Any, ...] = ()  # cache, and which of its allocations

    def serves(self, drafter: Any, sampler: Any) -> bool:
        """Is this tree grown here? Not while passes run eagerly, and not of shapes that a draft decides."""
        return bool(self.target.captures and drafter.observed and drafter.growth.has_fixed_shapes(sampler))

    def grow(self, drafter: Any, root: int) -> DraftTree:
        """As the drafter's policy grows it; valid until the next one."""
        policy, cache = drafter.growth, drafter.cache
        if policy.rows:
            cache.reserve(policy.rows)
        if self._made_for != (made_for := (cache, cache.allocations)):
            self.graphs.clear()
            self._made_for = made_for
        self.at.fill_(cache.length)
        self.root.fill_(root)
        states = [getattr(drafter, name) for name in drafter.observed]
        size = next(capacities(cache, cache.length + policy.rows))
        if (policy, size) not in self.graphs.captured:
            for capacity in capacities(cache, policy.rows):  # all others, too: later cycles, which are timed, do not wait
                self._graph(drafter, capacity, states).prepare(*states)
        tokens, parents, depths, ranks, ancestors, *confidence = self._graph(drafter, size, states)(*states)
        return DraftTree(
            tokens,
            parents,
            depths,
            ancestors,
            ranks,
            policy.depth,
            policy.width,
            confidence=(lambda: confidence[0]) if confidence else None,
            passes=policy.depth,
        )

    def _graph(self, drafter: Any, capacity: int, states: list[Tensor]) -> Any:
        key = drafter.growth, capacity
        return self.graphs.get(key, partial(_grown, drafter, self.at, self.root, capacity), lambda: states)


def _grown(drafter: Any, at: Tensor, root: Tensor, capacity: int, *states: Tensor) -> list[Tensor]:
    """The tree of a drafter that has observed these states behind `at` [1] rows. root: [1]"""
    behind = copy.copy(drafter)  # modules are the same
    vars(behind).update(zip(drafter.observed, states, strict=True))
    behind.cache = DraftRows(drafter.cache, capacity, at)
    tree = drafter.growth.grow(behind, root, Sampler(), None)
    parts = [tree.tokens, tree.parents, tree.depths, tree.ranks, tree.ancestors]
    return [*parts, *([] if tree.confidence is None else [tree.confidence()])]
