"""A target's passes over trees in fixed shapes, so that on CUDA each is one graph that is replayed.

A tree is padded to one of a few widths, and the pass attends to one of a few capacities of the cache: 512, 1024, 2048, ...
rows, of which its mask hides those that are not kept. All of them are the first rows of one storage that holds the whole
context, so a growing answer moves to the next capacity without copying a row, and no graph becomes invalid.

                 kept rows          the tree's          padding       capacity
    rows         0 1 2 ... at-1  |  at ... at+n-1  |  ... at+width-1  ...     |
    written      -                  by the pass       by the pass     -
    seen by      every node         descendants       itself          nobody
"""

import copy
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specbench.engine.backends.cuda_graphs import Captured, Graphs
from specbench.engine.cache import FixedRows, KVCache, bucket
from specbench.engine.interface import DraftTree

WIDTHS = (1, 2, 4, 8, 16, 32, 48, 64)  # nodes of a pass; wider ones are rounded up to multiples of the last step
MARGIN = 16  # nodes of padding at most


def width_of(nodes: int) -> int:
    """Nodes of the pass that a tree is padded to."""
    wider = (width for width in WIDTHS if width >= nodes)
    return next(wider, -(-nodes // MARGIN) * MARGIN)


class CapturedPasses:
    """The captured passes of one target, behind one cache at a time. Attributes: at: [1] rows that the cache keeps."""

    def __init__(self, device: torch.device):
        self.graphs = Graphs(device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self._made_for: tuple[Any, int] = (None, 0)  # a cache, and which of its allocations the graphs read and write
        self._kept = 0  # rows of the last pass that may be kept; 0: it was none of these

    def forward(self, target: Any, tree: DraftTree) -> tuple[Tensor, ...]:
        """As `Target.read` of a tree behind a cache that is not empty; outputs are valid until the next pass."""
        count, key = len(tree), self.prepare(target, len(tree))
        target.cache.pending, self._kept = count, min(count, tree.max_depth + 1)
        outputs = self.graphs.captured[key](tree.tokens, tree.depths, tree.ancestors)
        return tuple(x[:, :count] for x in outputs)

    def prepare(self, target: Any, nodes: int) -> Hashable:
        """Capture what trees of so many nodes and fewer need, unless that is done; returns the key of the widest pass."""
        cache, width = target.cache, width_of(nodes)
        cache.reserve(width)
        if self._made_for != (cache, cache.allocations):
            self.graphs.clear()
            self._made_for = cache, cache.allocations
        self.at.fill_(cache.length)
        key = _key(target, width, next(capacities(cache, cache.length + width)))
        if key not in self.graphs.captured:
            self._capture(target, width)
        return key

    def _capture(self, target: Any, width: int) -> None:
        """Capture passes of this width, of all narrower ones and of all capacities, and what keeps rows of them.

        So later cycles, which are timed, do not wait for that. What is written meanwhile the next pass overwrites.
        """
        cache, target = target.cache, copy.copy(target)  # whose taps do not change
        for nodes in sorted({width, *(w for w in WIDTHS if w < width)}):
            padding = partial(_padding, nodes, self.at.device)
            for capacity in capacities(cache, nodes):
                function = partial(_pass, target, self.at, capacity)
                self.graphs.get(_key(target, nodes, capacity), function, padding).prepare(*padding())
            # Recording moves rows several times: these stay where they are.
            self._mover(cache, nodes).prepare(torch.arange(nodes, device=self.at.device))

    def _mover(self, cache: KVCache, size: int) -> Captured:
        return self.graphs.get(("keep", size), partial(_move, cache, self.at), lambda: [self.at.new_zeros(size)])

    def keep(self, cache: KVCache, nodes: Tensor) -> None:
        """As `KVCache.keep`, after `forward`: a fixed number of rows moves, which holds any path of the tree."""
        size, self._kept = self._kept, 0
        if not size or cache.pending == 1:  # the pass was none of these, or nothing moves
            cache.keep(nodes)
        else:
            size = max(size, len(nodes))
            self._mover(cache, next((width for width in WIDTHS if width >= size), width_of(cache.pending)))(nodes)
            cache.advance(len(nodes))


def _key(target: Any, width: int, capacity: int) -> Hashable:
    return "forward", width, capacity, target.taps.hidden


def capacities(cache: KVCache, rows: int) -> Iterator[int]:
    """Of passes that need at least so many rows, smallest first; the last one takes the whole storage."""
    stored = cache.layer(next(iter(cache.index)))[0].shape[-2]
    while (capacity := bucket(rows)) < stored:
        yield capacity
        rows = capacity + 1
    yield stored


def _padding(width: int, device: torch.device) -> Sequence[Tensor]:
    """A tree of padding alone: tokens [N], depths [N] of -1, ancestors [N, N]."""
    zeros = torch.zeros(width, dtype=torch.long, device=device)
    return zeros, zeros - 1, torch.eye(width, dtype=torch.bool, device=device)


def _pass(target: Any, at: Tensor, capacity: int, tokens: Tensor, depths: Tensor, ancestors: Tensor) -> Sequence[Tensor]:
    """`Target.read` in fixed shapes. tokens, depths [N], ancestors [N, N]; of padding the depth is -1"""
    rows = FixedRows(target.cache, capacity, at, len(tokens))
    mask, positions = rows.mask(ancestors, depths >= 0), at + depths.clamp(min=0)
    return target.read(tokens[None], positions[None], mask, rows)


def _move(cache: KVCache, at: Tensor, nodes: Tensor) -> Sequence[Tensor]:
    cache.move(nodes, at)
    return ()
