"""Trees that fit the machine: chosen by what a tree costs there, and by how many tokens a drafter's trees gain.

    Fitted         one dynamic tree for all cycles: the depth, top_k and nodes with the most tokens a second
    FittedStatic   one static shape for all cycles, likewise (Sequoia, arXiv:2402.12374, section 3.2)
    CostAwareTree  a tree for each cycle: a node is verified, a level drafted, while that is worth its time

Speed is E[tokens a cycle] / E[seconds a cycle]. A ratio is greatest where tokens - speed * seconds is, at the best speed
(Dinkelbach's rule for fractional programmes): with that speed as the price of a second, each cycle is decided by itself.
Costs are timed by `cost_model`, acceptance is measured on held-out answers, not on the prompts of a benchmark.
"""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import torch
from annotated_types import Interval, MinLen
from pydantic import AfterValidator
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.common.types import Count, Depth, Share, Width
from specbench.engine.interface import DraftTree
from specbench.engine.policies import (
    Candidates,
    Dynamic,
    Expandable,
    Nodes,
    Pool,
    Root,
    Static,
    TreePolicy,
    best_children,
    to_target_ids,
)
from specbench.engine.sampling import Sampler
from specbench.records.schema import Seconds

NODES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64)  # sizes to choose among, the root included
TOP_K = (1, 2, 3, 4, 6, 8, 10)

ROUNDING = 1e-3  # of sums of shares in files


def _check_passes(verify: Mapping[int, float]) -> Mapping[int, float]:
    if 1 not in verify:
        raise ValueError("no pass over one node, which plain decoding takes, is among them")
    return verify


Passes = Annotated[Mapping[Count, Annotated[float, Interval(ge=1e-9, le=1e9)]], AfterValidator(_check_passes)]
Table = Annotated[Mapping[Count, Seconds], MinLen(1)]


@dataclass(frozen=True)
class Costs:
    """Seconds on one machine, of one target and one drafter; interpolated between the sizes that were measured.

    Attributes:
        verify: of a cycle without drafting, by nodes, root included: the target's pass, acceptance, caches.
        first: of observing the verified tokens and drafting one level, by candidates.
        level: of each further level, by nodes expanded.
    """

    verify: Passes
    first: Table
    level: Table

    def cycle(self, depth: int, top_k: int, nodes: int) -> float:
        """Of a cycle with a dynamic tree."""
        return between(self.verify, nodes) + between(self.first, top_k) + (depth - 1) * between(self.level, top_k)


@dataclass(frozen=True)
class TreeAcceptance:
    """How far held-out answers follow a drafter's trees, on any machine.

    Attributes:
        tau: tokens a cycle of dynamic trees, by top_k, then [depth - 1][size], sizes as in `NODES`.
        ranks: [depth - 1][rank], how often that candidate was right below a right node.
        sure, accepted: a drafter's probability of a path at some points, ascending, and how often such a path was right.
        error: expected calibration error of such probabilities, as they are and corrected, on answers that the correction
            was not made from.
        positions: in the answers, from each of which a tree was drafted.
    """

    tau: Mapping[Count, list[list[Annotated[float, Interval(ge=1)]]]]
    ranks: list[list[Share]]
    sure: list[Share]
    accepted: list[Share]
    error: tuple[Share, Share]
    positions: Count

    @cached_property
    def _points(self) -> Tensor:  # [2, P]
        return torch.tensor([list(self.sure), list(self.accepted)])

    def worth(self, confidence: Tensor) -> Tensor:
        """The probability that a path is accepted, from the drafter's own. Any shape."""
        xs, ys = self._points.to(confidence.device)
        right = torch.searchsorted(xs, confidence.contiguous()).clamp(1, len(xs) - 1)
        share = ((confidence - xs[right - 1]) / (xs[right] - xs[right - 1]).clamp(min=1e-9)).clamp(0, 1)
        return ys[right - 1] + share * (ys[right] - ys[right - 1])


def check_acceptance(measured: TreeAcceptance) -> TreeAcceptance:
    """Raises `ValueError` for tables that contradict each other or themselves."""
    levels = len(measured.ranks)
    for by_depth in measured.tau.values():
        if len(by_depth) != levels or any(len(by_nodes) != len(NODES) for by_nodes in by_depth):
            raise ValueError(f"tau holds {len(NODES)} sizes of trees by depth, of as many depths as ranks")
        if any(tau > depth + 1 + ROUNDING for depth, by_nodes in enumerate(by_depth, 1) for tau in by_nodes):
            raise ValueError("tau exceeds the depth of its tree and the bonus")
    if not levels or 1 not in measured.tau:
        raise ValueError("tau and ranks know no tree of one level, or none of top_k=1")
    if any(not shares or sum(shares) > 1 + ROUNDING for shares in measured.ranks):
        raise ValueError("ranks are shares of one whole at each depth")
    curve = measured.sure, measured.accepted
    if not 2 <= len(measured.sure) == len(measured.accepted) or any(points != sorted(points) for points in curve):
        raise ValueError("sure and accepted are points of one curve, ascending")
    return measured


@dataclass(frozen=True)
class Choice:
    """A tree, its tokens and seconds a cycle. paths: of a static one; depth and top_k are then its levels and its width."""

    depth: int
    top_k: int
    nodes: int
    tokens: float
    seconds: float
    paths: tuple[tuple[int, ...], ...] = ()

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def record(self, plain: float) -> dict[str, float]:
        """For the header of a block. plain: seconds of a cycle of plain decoding."""
        shape = {"depth": self.depth, "top_k": self.top_k, "nodes": self.nodes}
        return shape | {"tau": round(self.tokens, 3), "speedup": round(self.speed * plain, 3)}


@dataclass(frozen=True)
class TreeLimits:
    """The largest tree to consider."""

    depth: int
    top_k: int
    nodes: int


def between(table: Mapping[int, float], x: int) -> float:
    """A table's value at x, on the line through its neighbours; outside on the line through the last two."""
    points = sorted(table)
    if x in table or len(points) == 1:
        return table[x if x in table else points[0]]
    right = min(max(bisect_left(points, x), 1), len(points) - 1)
    a, b = points[right - 1], points[right]
    return max(0.0, table[a] + (x - a) / (b - a) * (table[b] - table[a]))


def dynamic_choices(acceptance: TreeAcceptance, costs: Costs, limits: TreeLimits) -> Iterator[Choice]:
    """Every dynamic tree whose acceptance is known."""
    for top_k, by_depth in acceptance.tau.items():
        for depth, by_nodes in enumerate(by_depth, 1):
            for nodes, tau in zip(NODES, by_nodes, strict=True):
                drafted = 1 + top_k + (depth - 1) * top_k**2
                if depth <= limits.depth and top_k <= limits.top_k and nodes <= min(limits.nodes, drafted):
                    yield Choice(depth, top_k, nodes, tau, costs.cycle(depth, top_k, nodes))


def static_choices(acceptance: TreeAcceptance, costs: Costs, limits: TreeLimits) -> Iterator[Choice]:
    """For every depth and size the static tree with the most expected tokens.

    A path is worth the product of its candidates' shares, never more than its parent, so the worthiest paths in order are
    the best tree of every size; Sequoia's dynamic programme finds the same.
    """
    for depth in range(1, min(limits.depth, len(acceptance.ranks)) + 1):
        tokens, expanded, paths = 1.0, [0] * depth, []
        width = 0
        for worth, path in itertools.islice(worthiest(acceptance.ranks[:depth]), limits.nodes - 1):
            tokens += worth
            paths.append(path)
            width = max(width, path[-1] + 1)
            if path[-1] == 0:
                expanded[len(path) - 1] += 1  # its parent has its first child
            seconds = between(costs.verify, 1 + len(paths)) + between(costs.first, width)
            seconds += sum(between(costs.level, count) for count in expanded[1:] if count)
            yield Choice(max(map(len, paths)), width, 1 + len(paths), tokens, seconds, tuple(paths))


def worthiest(ranks: Sequence[Sequence[float]]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Rank paths by falling worth, parents and better siblings first. ranks: [depth - 1][rank], falling by rank."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-ranks[0][0], (0,))]
    while heap:
        worth, path = heapq.heappop(heap)
        yield -worth, path
        shares = ranks[len(path) - 1]
        if path[-1] + 1 < len(shares) and shares[path[-1]] > 0:
            heapq.heappush(heap, (worth * shares[path[-1] + 1] / shares[path[-1]], (*path[:-1], path[-1] + 1)))
        if len(path) < len(ranks):
            heapq.heappush(heap, (worth * ranks[len(path)][0], (*path, 0)))


class _FittedPolicy(TreePolicy):
    """What fitted policies share: they are fitted before they grow, and record what was chosen."""

    limits: TreeLimits
    fitted = True

    def limit_depth(self, levels: int) -> None:
        """The drafter has no more levels than these."""
        self.depth = min(self.depth, levels)
        self.limits = replace(self.limits, depth=min(self.limits.depth, levels))

    def choose(self, choices: Iterator[Choice], plain: float) -> Choice:
        """The fastest; it and the runner-up are recorded. plain: seconds of a cycle of plain decoding."""
        first, *rest = heapq.nlargest(2, choices, key=lambda c: c.speed)
        self.chosen = {name: c.record(plain) for name, c in zip(("choice", "runner_up"), (first, *rest), strict=False)}
        return first

    def require_fit(self) -> None:
        if not self.chosen:
            raise SpecBenchError("a fitted tree was not fitted: only commands that know the costs can decode with it")

    def grow(self, drafter: Expandable, root: Root, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        self.require_fit()
        return super().grow(drafter, root, sampler, generator)


class FittedStatic(_FittedPolicy, Static):
    """The static tree that is fastest here; sampled candidates as in `Static`."""

    def __init__(self, depth: Depth = 8, nodes: Nodes = 64, candidates: Candidates = "top"):
        super().__init__([[0]], candidates)
        self.limits, self.chosen = TreeLimits(depth, TOP_K[-1], nodes), {}

    def fit(self, acceptance: TreeAcceptance, costs: Costs) -> None:
        best = self.choose(static_choices(acceptance, costs, self.limits), costs.verify[1])
        Static.__init__(self, best.paths, self.candidates)


class Fitted(_FittedPolicy, Dynamic):
    """EAGLE-2's dynamic tree at the size that is fastest here.

    Args:
        depth, top_k, nodes: limits.
    """

    def __init__(self, depth: Depth = 8, top_k: Width = 10, nodes: Nodes = 64):
        super().__init__(depth, top_k, nodes)
        self.limits, self.chosen = TreeLimits(depth, top_k, nodes), {}

    def best(self, acceptance: TreeAcceptance, costs: Costs) -> Choice:
        """The fastest dynamic tree within the limits."""
        return self.choose(dynamic_choices(acceptance, costs, self.limits), costs.verify[1])

    def fit(self, acceptance: TreeAcceptance, costs: Costs) -> None:
        best = self.best(acceptance, costs)
        Dynamic.__init__(self, best.depth, best.top_k, best.nodes)


class CostAwareTree(Fitted):
    """A tree whose levels and nodes are chosen in each cycle, at the price of a second.

    A level is drafted while its nodes' expected children are worth more than the time it takes; of all drafted nodes as
    many are verified as maximise expected tokens - price * seconds, possibly none. The price is the speed of the best
    fitted tree on held-out answers. Reads each level's values back to the host: on a GPU a wait a level.
    """

    def fit(self, acceptance: TreeAcceptance, costs: Costs) -> None:
        best = self.best(acceptance, costs)
        self.acceptance = acceptance
        self.price = max(best.speed, 1 / costs.verify[1])  # plain decoding is always possible
        self.verify = [self.price * between(costs.verify, nodes) for nodes in range(self.nodes + 1)]  # in tokens
        self.level = [self.price * between(costs.level, width) if width else 0.0 for width in range(self.top_k + 1)]

    def has_fixed_shapes(self, sampler: Sampler) -> bool:
        return False

    def grow(self, drafter: Expandable, root: Root, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        """Level by level: expand as many of the best nodes as pay for it, then verify as many of all as pay for that."""
        self.require_fit()
        k = self.top_k
        logits = drafter.root_logits()[None]
        device = logits.device
        ranks = torch.arange(k, device=device)

        def children(logits: Tensor, parents: Tensor, values: Tensor, depth: int) -> Pool:
            """The k best of each parent. logits [F, V]; parents, and the values of their paths [F]"""
            indices, log_p = best_children(logits, k)  # [F, K]
            tokens, depths = to_target_ids(drafter, indices).flatten(), torch.full((indices.numel(),), depth, device=device)
            values = (values[:, None] + log_p).flatten()
            return Pool(tokens, values, parents.repeat_interleave(k), ranks.repeat(len(parents)), depths)

        pool = children(logits, torch.full((1,), -1, device=device), torch.zeros(1, device=device), 1)
        begin = 0  # of the newest level in the pool
        parent_rows = torch.full_like(ranks, -1)  # [M] of the newest level
        seen = torch.zeros(k, 0, dtype=torch.bool, device=device)  # [M, R] rows that each one's parent sees
        worth = self.acceptance.worth(pool.values.exp())  # [N]
        passes = 1
        for depth in range(1, self.depth):
            best = self.frontier(worth, begin, depth)
            if not len(best):
                break
            width, rows = len(best), seen.shape[1]
            visible = torch.cat([seen[best], torch.eye(width, dtype=torch.bool, device=device)], 1)
            logits = drafter.expand(pool.tokens[begin + best], parent_rows[best], depth, visible)
            passes += 1
            level = children(logits, begin + best, pool.values[begin + best], depth + 1)
            begin = len(pool.tokens)
            parent_rows = torch.arange(rows, rows + width, device=device).repeat_interleave(k)
            seen = visible.repeat_interleave(k, 0)
            pool = Pool(*(torch.cat(parts) for parts in zip(pool, level, strict=True)))
            worth = torch.cat([worth, self.acceptance.worth(level.values.exp())])
        return self.rerank(root, pool, self.kept(worth), passes)

    def kept(self, worth: Tensor) -> int:
        """How many nodes of a pool are worth verifying. worth: [N]"""
        return self._verified(worth.tolist())[1]

    def frontier(self, worth: Tensor, begin: int, depth: int) -> Tensor:
        """Which nodes of the newest level to expand, as indices into it: as many of the best as their children pay for.

        A child's expected worth is its parent's times the share of its rank on held-out answers. Children are verified
        among all other nodes: a pass costs by steps, so the price of one more node depends on how many there are.

        worth: [N] of the pool, the newest level from `begin` on.
        """
        shares = self.acceptance.ranks[min(depth, len(self.acceptance.ranks) - 1)][: self.top_k]
        newest = worth[begin:].topk(min(self.top_k, len(worth) - begin))
        pool = worth.tolist()
        gains = [self._verified(pool)[0]]
        for width, parent in enumerate(newest.values.tolist(), 1):
            pool += [parent * share for share in shares]
            gains.append(self._verified(pool)[0] - self.level[width])
        return newest.indices[: gains.index(max(gains))]

    def _verified(self, worth: Sequence[float]) -> tuple[float, int]:
        """Gain of verifying the best of these nodes, in tokens less their price, and their number."""
        gains = itertools.accumulate(sorted(worth, reverse=True)[: self.nodes - 1], initial=0.0)
        return max(((gain - self.verify[1 + m], m) for m, gain in enumerate(gains)), key=lambda pair: pair[0])
