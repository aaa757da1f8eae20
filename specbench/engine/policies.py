"""Tree policies: which nodes a drafter that drafts token by token expands, and which candidates form its tree.

A policy asks an `Expandable` for the logits below the root and below every node that it expands, and picks candidates.
The tree's `passes` counts the levels it asked for. Expanded nodes get *rows* 0, 1, 2 … in the order of expansion; `visible`
says which rows a new one attends to: its ancestors and itself. Nothing here reads a value back to the host.

    Chain(gamma)      one candidate a level (Leviathan et al.)
    Static(paths)     a fixed set of rank paths (EAGLE-1)
    AccuracyTree(…)   the static tree that measured accuracies favour (Medusa)
    Dynamic(…)        expand the best top_k of a level, rerank all that were seen, verify the best (EAGLE-2)
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.common.types import MAX_DEPTH, MAX_NODES, Depth, Nodes, Rank, Width
from specbench.engine import tree
from specbench.engine.interface import DraftTree
from specbench.engine.sampling import Sampler, draw, draw_without_replacement, top

Paths = Sequence[Annotated[Sequence[Rank], Field(min_length=1, max_length=MAX_DEPTH)]]
Root = int | Tensor  # the root's id, on the host or as [1]
Candidates = Literal["top", "sample", "sample_with_replacement"]


class Expandable(Protocol):
    """The part of an autoregressive drafter that tree policies use."""

    listed: Any  # its draft vocabulary, if its logits are [F, v] instead of [F, V]

    def root_logits(self) -> Tensor:
        """Logits of the tokens that may follow the root, [V]."""

    def expand(self, tokens: Tensor, parent_rows: Tensor, depth: int, visible: Tensor) -> Tensor:
        """Logits [F, V] of what may follow F nodes of one level.

        Args:
            tokens: [F] their ids.
            parent_rows: [F] the row of each one's parent (not its index in the tree), -1 for the root.
            depth: their level, 1 just below the root.
            visible: [F, R + F] bool over this cycle's rows, these F being the last.
        """


class TreePolicy:
    """How a tree is grown. A subclass implements `grow` and sets the upper bounds of its trees."""

    depth: int  # levels below the root
    nodes: int  # the root included
    rows: int  # expanded nodes
    width: int  # siblings
    top_k: int = 0  # candidates of a node that it considers, if more than `width`
    fitted: bool = False  # it must be fitted to acceptance and costs before it grows a tree, see `fit`
    chosen: dict[str, dict[str, float]]  # the tree that fitting chose, and the runner-up

    def has_fixed_shapes(self, sampler: Sampler) -> bool:
        """Has every tree the same number of nodes on every level, and does growing it draw no random numbers?"""
        return False

    def grow(self, drafter: Expandable, root: Root, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        """A tree below the root; its `passes` are the levels of logits that it asked for."""
        raise NotImplementedError(f"{type(self).__name__} grows nothing")

    @property
    def candidates_needed(self) -> int:
        """Ids that the vocabulary of its drafter must have."""
        return max(self.width, self.top_k)

    def limit_depth(self, levels: int) -> None:
        """Grow no more levels than the drafter has."""

    def fit(self, acceptance: Any, costs: Any) -> None:
        """Choose a tree by the measured acceptance of a drafter's nodes and the costs of cycles on this machine."""
        raise NotImplementedError(f"{type(self).__name__} is not fitted")


class Static(TreePolicy):
    """The same shape every cycle, given as rank paths: [[0], [1], [0, 0]] is two children and one grandchild.

    Where the target is sampled, `candidates` decides which ids get the ranks; greedy decoding always takes the best ones.
        top: the drafter's best ids, verified as deterministic candidates (Algorithm D);
        sample: drawn without replacement, rank = draw order, with the drafter's distribution kept for Algorithm S;
        sample_with_replacement: likewise, where siblings may repeat.
    """

    def __init__(
        self, paths: Annotated[Paths, Field(min_length=1, max_length=MAX_NODES - 1)], candidates: Candidates = "top"
    ):
        try:
            self.parents, self.ranks = tree.parents_of_rank_paths([list(p) for p in paths])
        except ValueError as error:
            raise SpecBenchError(f"tree.paths: {error}") from error
        if candidates == "sample":
            _require_earlier_draws(paths)
        self.candidates = candidates
        self.depths = tree.depths_of(self.parents)
        self.depth, self.nodes, self.width = max(self.depths), len(self.parents), max(self.ranks) + 1
        self.rows = len(set(self.parents[1:]) - {0})
        self._shapes: dict[torch.device, tree.StaticShape] = {}

    def has_fixed_shapes(self, sampler: Sampler) -> bool:
        return self.candidates == "top" or sampler.greedy

    def grow(self, drafter: Expandable, root: Root, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        """Fill the fixed shape level by level: a node's children are the candidates of its logits, by their rank."""
        logits = drafter.root_logits()[None]
        shape = self._shape(logits.device)
        sampled = self.candidates != "top" and not sampler.greedy
        tokens = torch.zeros(self.nodes, dtype=torch.long, device=logits.device)
        tokens[:1] = root
        q = torch.zeros(self.nodes, logits.shape[-1], device=logits.device) if sampled else None
        for depth, level in enumerate(shape.levels):
            if depth:
                logits = drafter.expand(tokens[level.nodes], level.parent_rows, depth, level.visible)
            choice, distribution = self._choose(logits, level.candidates, sampled, sampler, generator)  # [F, count]
            tokens[level.children] = to_target_ids(drafter, choice[level.parent_index, level.child_ranks])
            if q is not None and distribution is not None:
                q[level.nodes] = distribution
        if q is not None and drafter.listed is not None:
            q = drafter.listed.spread(q)
        made = self._tree(tokens, shape, passes=len(shape.levels))
        return replace(made, q=q, replacement=self.candidates == "sample_with_replacement")

    def from_followers(self, root: int, followers: Callable[[Tensor], Tensor], device: torch.device) -> DraftTree:
        """The tree in which child r of a node is the r-th of the followers of its token.

        followers: tokens [F] -> [F, k] ids, k at least the tree's width.
        """
        shape = self._shape(device)
        tokens = torch.full((self.nodes,), root, dtype=torch.long, device=device)
        for level in shape.levels:
            tokens[level.children] = followers(tokens[level.nodes])[level.parent_index, level.child_ranks]
        return self._tree(tokens, shape)

    def _tree(self, tokens: Tensor, shape: tree.StaticShape, passes: int = 0) -> DraftTree:
        fixed = shape.parents, shape.depths, shape.ancestors, shape.ranks
        return DraftTree(tokens, *fixed, self.depth, self.width, passes=passes)

    def _shape(self, device: torch.device) -> tree.StaticShape:
        """What all trees have in common, put on a device once: each copy from the host waits for the device."""
        if device not in self._shapes:
            with torch.inference_mode(False):  # so that it can be used outside of it, too
                self._shapes[device] = tree.StaticShape.of(self.parents, self.depths, self.ranks, device)
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


def _require_earlier_draws(paths: Iterable[Sequence[int]]) -> None:
    """Refuse a candidate of rank r without that of rank r - 1: Algorithm S tests the draws of a node in their order."""
    taken = {tuple(path) for path in paths}
    for *parent, rank in paths:
        if rank and (*parent, rank - 1) not in taken:
            raise SpecBenchError(
                f"tree.paths: {[*parent, rank]} without {[*parent, rank - 1]}, which is drawn and verified before it; add "
                "that, or set tree.candidates=top"
            )


class Chain(Static):
    """gamma tokens in a row. Sampled by default where the target is: that is Leviathan's algorithm."""

    def __init__(self, gamma: Depth, candidates: Candidates = "sample"):
        super().__init__([[0] * length for length in range(1, gamma + 1)], candidates)


class AccuracyTree(Static):
    """Medusa's sparse tree: the `nodes - 1` paths with the highest estimated probability of acceptance.

    That of a path is the product over its levels of the measured accuracy of that level's candidate of that rank.

    Args:
        nodes: of the target pass, root included. levels, top_k: of the guess that serves until `calibrate` is called.
        unmeasured: paths to take instead of that guess: those that were measured elsewhere.
    """

    def __init__(self, nodes: Nodes, levels: Depth = 5, top_k: Width = 10, unmeasured: Paths = ()):
        self.max_nodes, self.top_k, self.unmeasured = nodes, top_k, unmeasured
        self.guess(levels)

    def guess(self, levels: int) -> None:
        """The tree before any accuracy is measured: `unmeasured`, or from an accuracy of 2^-(rank + 1) at every level.

        Of more `unmeasured` paths than there are nodes, those that this accuracy makes the likeliest.
        """
        if self.unmeasured:
            paths = [path for path in self.unmeasured if len(path) <= levels]
            if len(paths) >= self.max_nodes:
                paths = sorted(paths, key=lambda path: sum(path) + len(path))[: self.max_nodes - 1]
            super().__init__(paths)
        else:
            self.calibrate([[0.5 ** (rank + 1) for rank in range(self.top_k)]] * levels)

    def calibrate(self, accuracy: Sequence[Sequence[float]]) -> None:
        """accuracy[level][rank]: how often that level's candidate of that rank is the right token."""
        paths: list[list[int]] = []
        heap = [(-a, [rank]) for rank, a in enumerate(accuracy[0])]
        heapq.heapify(heap)
        while heap and len(paths) < self.max_nodes - 1:
            probability, path = heapq.heappop(heap)  # negative: the heap gives its smallest item
            paths.append(path)
            if len(path) < len(accuracy):
                for rank, a in enumerate(accuracy[len(path)]):
                    heapq.heappush(heap, (probability * a, [*path, rank]))
        super().__init__(paths)


class Pool(NamedTuple):
    """Everything that was drafted in a cycle, level by level, without the root. All [N]."""

    tokens: Tensor
    values: Tensor  # log-probability of the path
    parents: Tensor  # indices in the pool, -1 for the root
    ranks: Tensor
    depths: Tensor


class Dynamic(TreePolicy):
    """EAGLE-2's context-dependent tree.

    A node's value is the product of the drafter's (temperature 1) probabilities on its path. Each level expands the `top_k`
    nodes of highest value of the level above, each into its `top_k` likeliest children; all children enter a pool, of which
    the `nodes - 1` of highest value are verified. A child's value is never above its parent's, and it comes later in the
    pool, so a stable sort keeps the choice ancestor-closed, also where rounding makes values equal.

    Args:
        depth: levels below the root. top_k: frontier size and branching. nodes: of the target pass, root included.
    """

    def __init__(self, depth: Depth, top_k: Width, nodes: Nodes):
        self.depth, self.top_k, self.width, self.nodes = depth, top_k, top_k, nodes
        self.rows = top_k * (depth - 1)
        self._made: dict[tuple[Any, ...], _Constants] = {}

    def has_fixed_shapes(self, sampler: Sampler) -> bool:
        return True

    def grow(self, drafter: Expandable, root: Root, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        return self.rerank(root, self.draft(drafter), self.nodes - 1, passes=self.depth)

    def draft(self, drafter: Expandable) -> Pool:
        """The candidates of all levels."""
        k, logits = self.top_k, drafter.root_logits()[None]
        parts = self._constants(logits.device)
        indices, values = best_children(logits, k)  # [F, K] of the F nodes expanded last; F = 1 for the root
        tokens, values = to_target_ids(drafter, indices).flatten(), values.flatten()  # [F * K]
        levels = [(tokens, values)]
        best, frontiers = parts.first, []  # the frontier's [K] indices in its level; those of all levels
        rows, visible = parts.below_root, parts.itself  # row of each frontier node's parent; rows that each attends to
        for depth in range(1, self.depth):
            frontiers.append(best)
            indices, more = best_children(drafter.expand(tokens[best], rows, depth, visible), k)
            tokens, values = to_target_ids(drafter, indices).flatten(), (values[best][:, None] + more).flatten()
            levels.append((tokens, values))
            if depth + 1 < self.depth:
                best = values.topk(k).indices
                above = best // k
                rows, visible = above + (depth - 1) * k, torch.cat([visible[above], parts.itself], 1)
        parents = parts.below_root
        if frontiers:
            parents = torch.cat([parents, (torch.stack(frontiers) + parts.begins).flatten().repeat_interleave(k)])
        tokens, values = (torch.cat(of) for of in zip(*levels, strict=True))
        return Pool(tokens, values, parents, parts.ranks, parts.depths)

    def _constants(self, device: torch.device) -> "_Constants":
        """What all trees have in common, made on a device once."""
        key = device, self.top_k, self.depth
        if key not in self._made:
            with torch.inference_mode(False):  # so that it can be used outside of it, too
                self._made[key] = _Constants.of(self.top_k, self.depth, device)
        return self._made[key]

    def rerank(self, root: Root, pool: Pool, count: int, passes: int) -> DraftTree:
        """The tree of the pool's `count` nodes of highest value, in pool order. passes: draft passes that made the pool."""
        device, size = pool.tokens.device, pool.tokens.shape[0]
        count = min(count, size)
        if not count:
            return tree.root_only(root, device, passes)
        chosen = pool.values.sort(descending=True, stable=True).indices[:count].sort().values
        node = torch.zeros(size + 1, dtype=torch.long, device=device)  # pool index -> node; the last is for -1, the root
        node[chosen] = torch.arange(1, count + 1, device=device)
        columns = torch.stack([pool.tokens, pool.parents, pool.ranks, pool.depths])[:, chosen]
        tokens, parents, ranks, depths = F.pad(columns, (1, 0)).unbind()  # the root comes first
        tokens[:1] = root
        parents = node[parents[1:]]
        return tree.build(
            tokens=tokens,
            parents=F.pad(parents, (1, 0), value=-1),
            depths=depths,
            ranks=ranks,
            max_depth=self.depth,
            width=self.top_k,
            confidence=lambda: pool.values[chosen].exp(),  # computed for traces only
            passes=passes,
        )


@dataclass(frozen=True)
class _Constants:
    """Parts of every dynamic tree with K candidates a node, K nodes expanded a level."""

    first: Tensor  # [K] 0, 1, …: the frontier below the root
    below_root: Tensor  # [K] -1
    itself: Tensor  # [K, K] bool identity
    begins: Tensor  # [depth - 1, 1] where each level but the last begins in the pool
    ranks: Tensor  # [pool]
    depths: Tensor  # [pool]

    @classmethod
    def of(cls, k: int, depth: int, device: torch.device) -> "_Constants":
        first = torch.arange(k, device=device)
        sizes = [k] + [k * k] * (depth - 1)
        depths = [torch.full((size,), level, device=device) for level, size in enumerate(sizes, start=1)]
        itself = torch.eye(k, dtype=torch.bool, device=device)
        begins = torch.tensor([[sum(sizes[:level])] for level in range(depth - 1)], device=device)
        return cls(first, torch.full_like(first, -1), itself, begins, first.repeat(sum(sizes) // k), torch.cat(depths))


def to_target_ids(drafter: Any, indices: Tensor) -> Tensor:
    """Indices of a drafter's logits as ids of the target: the same, unless it has a draft vocabulary."""
    return indices if drafter.listed is None else drafter.listed.ids[indices]


def best_children(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest ids of each row and their log-probabilities in float32. [F, V] -> [F, k], [F, k]"""
    values, ids = top(logits.log_softmax(-1, dtype=torch.float32), k)
    return ids, values
