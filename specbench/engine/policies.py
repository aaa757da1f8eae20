"""Tree growth, written once for every drafter that drafts token by token. Does not know which drafter it grows for.

A growth asks an `Expandable` for the logits below the root and below every node it wants to go on from, and picks the
candidates. How many levels it asked for stands in the tree's `passes`. Expanded nodes get *rows* 0, 1, 2 … in the order
of expansion; `visible` says which rows a new one may see: its ancestors and itself. Nothing here reads a value back to
the host.

    Chain(gamma)      one candidate a level (Leviathan et al.)
    Static(paths)     a fixed set of rank paths (EAGLE-1)
    AccuracyTree(…)   the static tree that measured accuracies favour (Medusa)
    Dynamic(…)        expand the best top_k of a level, rerank all that were seen, verify the best (EAGLE-2)
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.common.types import Count, Natural
from specbench.engine import tree
from specbench.engine.interface import DraftTree
from specbench.engine.sampling import Sampler, draw, draw_without_replacement, top

Paths = Sequence[Annotated[Sequence[Natural], Field(min_length=1)]]
Candidates = Literal["top", "sample", "sample_with_replacement"]
Nodes = Annotated[int, Field(ge=2)]


class Expandable(Protocol):
    """The part of an autoregressive drafter that growth talks to.

    Attributes:
        listed: of which ids its logits are, [F, v] instead of [F, V]; None: of all.
    """

    listed: Any

    def root_logits(self) -> Tensor:
        """Logits of the tokens that may follow the root, [V]."""

    def expand(self, tokens: Tensor, parents: Tensor, depth: int, visible: Tensor) -> Tensor:
        """Go on from F nodes of one level.

        Args:
            tokens: [F] their ids.
            parents: [F] the row of each one's parent, -1 for the root.
            depth: their level, 1 just below the root.
            visible: [F, R + F] bool over this cycle's rows, these F being the last.

        Returns:
            [F, V] logits of what may follow each.
        """


class TreePolicy:
    """How a tree is grown. A subclass fills in `grow` and the four numbers.

    Attributes:
        depth: levels below the root. nodes: at most, the root included. rows: nodes expanded at most. width: siblings at
            most. top_k: candidates of a node that it may look at, if these are more.
        fitted: it must be fitted to acceptance and costs before it grows a tree, see `fit`.
        chosen: what was chosen in fitting, and what came second.
    """

    depth: int
    nodes: int
    rows: int
    width: int
    top_k: int = 0
    fitted: bool = False
    chosen: dict[str, dict[str, float]]

    def grow(self, drafter: Expandable, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        """A tree below the root; its `passes` are the levels that the drafter was asked for."""
        raise NotImplementedError(f"{type(self).__name__} grows nothing")

    def limit_depth(self, levels: int) -> None:
        """The drafter has no more levels than these."""

    def fit(self, acceptance: Any, costs: Any) -> None:
        """Choose a tree by what a drafter's nodes turn out to be worth, and by what cycles cost on this machine."""
        raise NotImplementedError(f"{type(self).__name__} is not fitted")


@dataclass(frozen=True)
class _Level:
    """F nodes of one level that have children, and these M children."""

    expanded: Tensor  # [F] nodes
    rows: Tensor  # [F] the row of each one's parent, -1 for the root
    visible: Tensor  # [F, R + F] bool, see `Expandable.expand`
    below: Tensor  # [M] nodes
    places: Tensor  # [M] which of the F is each one's parent
    ranks: Tensor  # [M]
    wanted: int  # candidates below a node, at most


@dataclass(frozen=True)
class _Shape:
    """A static tree without its tokens, on a device. Tensors as in `DraftTree`; levels from the root's down."""

    parents: Tensor
    depths: Tensor
    ranks: Tensor
    ancestors: Tensor
    levels: list[_Level]

    @classmethod
    def of(cls, parents: list[int], depths: list[int], ranks: list[int], device: torch.device) -> "_Shape":
        def put(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device)

        ancestors = tree.ancestor_mask(put(parents), max(depths))
        levels: list[_Level] = []
        rows: dict[int, int] = {}  # of expanded nodes, in the order of expansion
        for depth in range(max(depths)):
            level = sorted({p for p, d in zip(parents, depths, strict=True) if d == depth + 1})
            rows |= {node: len(rows) + i for i, node in enumerate(level) if depth}
            below = [n for n, d in enumerate(depths) if d == depth + 1]
            levels.append(
                _Level(
                    expanded=put(level),
                    rows=put([rows.get(parents[n], -1) for n in level]),
                    visible=ancestors[put(level)][:, put([*rows])] if depth else ancestors[:1, :0],
                    below=put(below),
                    places=put([level.index(parents[n]) for n in below]),
                    ranks=put([ranks[n] for n in below]),
                    wanted=max(ranks[n] for n in below) + 1,
                )
            )
        return cls(put(parents), put(depths), put(ranks), ancestors, levels)


class Static(TreePolicy):
    """The same shape every cycle, given as rank paths: [[0], [1], [0, 0]] is two children and one grandchild.

    Where the target is sampled, `candidates` decides what stands at the ranks:
        top: the drafter's best ids, verified as deterministic candidates (Algorithm D);
        sample: drawn without replacement, rank = draw order, with the drafter's distribution kept for Algorithm S;
        sample_with_replacement: likewise, where siblings may repeat.
    Greedy decoding always takes the best ids.
    """

    def __init__(self, paths: Annotated[Paths, Field(min_length=1)], candidates: Candidates = "top"):
        try:
            self.parents, self.ranks = tree.parents_of_rank_paths([list(p) for p in paths])
        except ValueError as error:
            raise SpecBenchError(f"tree.paths: {error}") from error
        self.candidates = candidates
        self.depths = tree.depths_of(self.parents)
        self.depth, self.nodes, self.width = max(self.depths), len(self.parents), max(self.ranks) + 1
        self.rows = len(set(self.parents[1:]) - {0})
        self._shapes: dict[torch.device, _Shape] = {}

    def grow(self, drafter: Expandable, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        logits = drafter.root_logits()[None]
        shape = self._shape(logits.device)
        sampled = self.candidates != "top" and not sampler.greedy
        tokens = torch.full((self.nodes,), root, dtype=torch.long, device=logits.device)
        q = torch.zeros(self.nodes, logits.shape[-1], device=logits.device) if sampled else None
        for depth, level in enumerate(shape.levels):
            if depth:
                logits = drafter.expand(tokens[level.expanded], level.rows, depth, level.visible)
            choice, distribution = self._choose(logits, level.wanted, sampled, sampler, generator)  # [F, wanted]
            tokens[level.below] = named(drafter, choice[level.places, level.ranks])
            if q is not None and distribution is not None:
                q[level.expanded] = distribution
        if q is not None and drafter.listed is not None:
            q = drafter.listed.spread(q)
        with_replacement = self.candidates == "sample_with_replacement"
        fixed = shape.parents, shape.depths, shape.ancestors, shape.ranks
        return DraftTree(tokens, *fixed, self.depth, self.width, q, with_replacement, passes=len(shape.levels))

    def spell(self, root: int, followers: Callable[[Tensor], Tensor], device: torch.device) -> DraftTree:
        """The tree in which child r of a node is the r-th of the followers of its token, whatever stands above it.

        followers: tokens [F] -> [F, k] ids, k at least the tree's width.
        """
        shape = self._shape(device)
        tokens = torch.full((self.nodes,), root, dtype=torch.long, device=device)
        for level in shape.levels:
            tokens[level.below] = followers(tokens[level.expanded])[level.places, level.ranks]
        return DraftTree(tokens, shape.parents, shape.depths, shape.ancestors, shape.ranks, self.depth, self.width)

    def _shape(self, device: torch.device) -> "_Shape":
        """What every tree has in common, put on a device once: copies from the host make it wait for the device."""
        if device not in self._shapes:
            with torch.inference_mode(False):  # of use outside of it too
                self._shapes[device] = _Shape.of(self.parents, self.depths, self.ranks, device)
        return self._shapes[device]

    def _choose(
        self, logits: Tensor, count: int, sampled: bool, sampler: Sampler, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """[F, V] -> ([F, count] ids by rank, the distribution they were drawn from or None)."""
        if not sampled:
            return top(logits, count)[1], None
        q = sampler.probabilities(logits)
        if self.candidates == "sample":
            return draw_without_replacement(q, count, generator), q
        return torch.stack([draw(q, generator) for _ in range(count)], -1), q


class Chain(Static):
    """gamma tokens in a row. Sampled by default where the target is: that is Leviathan's algorithm."""

    def __init__(self, gamma: Count, candidates: Candidates = "sample"):
        super().__init__([[0] * length for length in range(1, gamma + 1)], candidates)


class AccuracyTree(Static):
    """Medusa's sparse tree: the paths that are likeliest to be accepted, judged by measured accuracies.

    A path's worth is the product over its levels of the share of cases in which that level's candidate of that rank was
    right. The `nodes - 1` worthiest paths are taken one after the other, each behind its parent.

    Args:
        nodes: of the target pass, root included. levels, top_k: of the guess that serves until `calibrate` is called.
        unmeasured: paths to take instead of that guess: those that were measured elsewhere.
    """

    def __init__(self, nodes: Nodes, levels: Count = 5, top_k: Count = 10, unmeasured: Paths = ()):
        self.wanted, self.top_k, self.unmeasured = nodes, top_k, unmeasured
        self.guess(levels)

    def guess(self, levels: int) -> None:
        """What to go on before any accuracy is measured: `unmeasured`, or each rank worth half of the one above it."""
        if self.unmeasured:
            super().__init__([path for path in self.unmeasured if len(path) <= levels])
        else:
            self.calibrate([[0.5 ** (rank + 1) for rank in range(self.top_k)]] * levels)

    def calibrate(self, accuracy: Sequence[Sequence[float]]) -> None:
        """accuracy[level][rank]: how often that level's candidate of that rank is the right token."""
        paths: list[list[int]] = []
        heap = [(-a, [rank]) for rank, a in enumerate(accuracy[0])]
        heapq.heapify(heap)
        while heap and len(paths) < self.wanted - 1:
            worth, path = heapq.heappop(heap)
            paths.append(path)
            if len(path) < len(accuracy):
                for rank, a in enumerate(accuracy[len(path)]):
                    heapq.heappush(heap, (worth * a, [*path, rank]))
        super().__init__(paths)


class Pool(NamedTuple):
    """Everything that was drafted in a cycle, level by level; parents are places in the pool, -1 for the root. All [N]."""

    tokens: Tensor
    values: Tensor  # log-probability of the path
    parents: Tensor
    ranks: Tensor
    depths: Tensor


class Dynamic(TreePolicy):
    """EAGLE-2's context-dependent tree.

    A node's value is the product of the drafter's (temperature 1) probabilities down to it. Each level expands the
    `top_k` most valuable nodes of the level above, each into its `top_k` likeliest children; all children enter a pool
    of which the `nodes - 1` most valuable are verified. A child is never worth more than its parent and stands behind
    it in the pool, so a stable sort keeps the choice ancestor-closed, also where rounding makes them equal.

    Args:
        depth: levels below the root. top_k: frontier size and branching. nodes: of the target pass, root included.
    """

    def __init__(self, depth: Count, top_k: Count, nodes: Nodes):
        self.depth, self.top_k, self.width, self.nodes = depth, top_k, top_k, nodes
        self.rows = top_k * (depth - 1)

    def grow(self, drafter: Expandable, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        return self.rerank(root, self.draft(drafter), self.nodes - 1, passes=self.depth)

    def draft(self, drafter: Expandable) -> Pool:
        """All levels' candidates."""
        k = self.top_k
        places, value = best_children(drafter.root_logits()[None], k)  # [1, K]
        frontier_tokens, frontier_value = named(drafter, places[0]), value[0]
        device = places.device
        k_range = torch.arange(k, device=device)
        pool_tokens, pool_values = [frontier_tokens], [frontier_value]
        pool_parents, pool_ranks = [torch.full_like(k_range, -1)], [k_range]  # parents as pool indices
        frontier = k_range  # pool indices of the frontier
        rows = torch.full_like(k_range, -1)  # row of each frontier node's parent
        visible = torch.eye(k, dtype=torch.bool, device=device)
        for depth in range(1, self.depth):
            logits = drafter.expand(frontier_tokens, rows, depth, visible)
            places, value = best_children(logits, k)
            tokens = named(drafter, places)
            value = frontier_value[:, None] + value  # [K, K] log-probability of the path
            pool_tokens.append(tokens.flatten())
            pool_values.append(value.flatten())
            pool_parents.append(frontier.repeat_interleave(k))
            pool_ranks.append(k_range.repeat(k))
            if depth + 1 == self.depth:
                break
            best = value.flatten().topk(k).indices  # next frontier, by place among the K * K
            frontier_tokens, frontier_value = tokens.flatten()[best], value.flatten()[best]
            frontier = k + (depth - 1) * k * k + best
            rows = (depth - 1) * k + best // k
            visible = torch.cat([visible[best // k], torch.eye(k, dtype=torch.bool, device=device)], 1)
        place = torch.arange(k + (self.depth - 1) * k * k, device=device)
        depths = torch.where(place < k, 1, 2 + (place - k).div(k * k, rounding_mode="floor"))
        return Pool(torch.cat(pool_tokens), torch.cat(pool_values), torch.cat(pool_parents), torch.cat(pool_ranks), depths)

    def rerank(self, root: int, pool: Pool, count: int, passes: int) -> DraftTree:
        """The `count` most valuable nodes of the pool, in pool order (levels ascending), behind the root.

        passes: forwards that made the pool.
        """
        device = pool.tokens.device
        count = min(count, pool.tokens.shape[0])
        if not count:
            return tree.root_only(root, device, passes)
        chosen = pool.values.sort(descending=True, stable=True).indices[:count].sort().values
        node = torch.zeros(pool.tokens.shape[0] + 1, dtype=torch.long, device=device)  # pool index -> node
        node[chosen] = torch.arange(1, count + 1, device=device)  # the last slot serves parent -1: the root

        def behind_root(first: int, rest: Tensor) -> Tensor:
            return torch.cat([rest.new_full((1,), first), rest])

        return tree.build(
            tokens=behind_root(root, pool.tokens[chosen]),
            parents=behind_root(-1, node[pool.parents[chosen]]),
            depths=behind_root(0, pool.depths[chosen]),
            ranks=behind_root(0, pool.ranks[chosen]),
            max_depth=self.depth,
            width=self.top_k,
            confidence=lambda: pool.values[chosen].exp(),  # only a trace asks
            passes=passes,
        )


def named(drafter: Any, places: Tensor) -> Tensor:
    """The ids that stand at some places of a drafter's logits: the same numbers, unless it drafts from a list."""
    return places if drafter.listed is None else drafter.listed.ids[places]


def best_children(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest ids of each row and their log-probabilities in float32. [F, V] -> [F, k], [F, k]"""
    logits = logits.float()
    values, ids = top(logits, k)
    # Never above 0: a child worth more than its parent would tear the tree apart.
    return ids, (values - logits.logsumexp(-1, keepdim=True)).clamp(max=0)
