"""Draft trees from parent pointers: depths, ancestor mask, ranks, root-to-leaf paths. Knows no model.

The mask of a tree, row = who looks, column = who is seen (`x`); the cached prefix left of it is visible to all:

              node     0 1 2 3 4 5
        0            0 x                 0 is the root, its parent is -1
      / | \\          1 x x
     1  2  3         2 x . x
    / \\              3 x . . x
   4   5             4 x x . . x
                     5 x x . . . x
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench.engine.interface import DraftTree


def build(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ranks: Tensor,
    max_depth: int,
    width: int,
    confidence: Callable[[], Tensor] | None = None,
    passes: int = 0,
) -> DraftTree:
    """Assemble a tree whose topology stays on its device; tokens, parents, depths, ranks: [N], the root first.

    passes: draft passes that it took, see `interface.Step`. The caller vouches for `parents[n] < n` (see `check`), which
    lets the mask be closed in log2(`max_depth`) steps.
    """
    mask = ancestor_mask(parents, max_depth)
    return DraftTree(tokens, parents, depths, mask, ranks, max_depth, width, confidence=confidence, passes=passes)


def root_only(root: int, device: torch.device | str = "cpu", passes: int = 0) -> DraftTree:
    """Nothing but the root: the tree of the baseline, or of so many draft passes that gave nothing worth verifying."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    return build(zero + root, zero - 1, zero, zero, max_depth=0, width=0, passes=passes)


class Trie:
    """Candidate sequences below a root, merged where they begin alike: siblings that repeated a token would make sampling
    wrong and cost a node. Built on the host by drafters that copy text; a node's number is larger than its parent's.

    Args:
        nodes: at most, the root included; what comes when they are spent is left out.
    """

    def __init__(self, root: int, nodes: int):
        self.most = nodes
        self.tokens, self.parents, self.depths, self.ranks = [root], [-1], [0], [0]
        self.acceptable = [True]
        self.below: list[dict[int, int]] = [{}]  # token -> acceptable child, by node
        self.families = [0]  # children by node

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Iterable[int]) -> list[int]:
        """A sequence below the root; returns its nodes. Those that come first get the nodes, and the better ranks."""
        nodes = [0]
        for token in tokens:
            child = self.child(nodes[-1], token)
            if child is None:
                break
            nodes.append(child)
        return nodes[1:]

    def walk(self, said: Sequence[int]) -> list[int]:
        """The acceptable nodes that lie on what is said after each, from the root on."""
        nodes = [0]
        while (child := self.below[nodes[-1]].get(said[nodes[-1]])) is not None:
            nodes.append(child)
        return nodes[1:]

    def child(self, parent: int, token: int) -> int | None:
        """The acceptable child of a node that has this token, a new one if there was none; None if nodes are spent."""
        if token not in self.below[parent]:
            if len(self) == self.most:
                return None
            self.below[parent][token] = self.append(parent, token)
        return self.below[parent][token]

    def append(self, parent: int, token: int, acceptable: bool = True) -> int:
        """A new node, whatever its siblings are."""
        node = len(self)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.ranks.append(self.families[parent])
        self.acceptable.append(acceptable)
        self.families[parent] += 1
        self.families.append(0)
        self.below.append({})
        return node

    def tree(self, device: torch.device) -> DraftTree:
        """On the device, in one transfer."""
        rows = [self.tokens, self.parents, self.depths, self.ranks, self.acceptable]
        tokens, parents, depths, ranks, acceptable = torch.tensor(rows, device=device).unbind()
        grown = build(tokens, parents, depths, ranks, max(self.depths), max(self.families))
        return grown if all(self.acceptable) else replace(grown, acceptable=acceptable.bool())


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """parents [N] -> bool [N, N], True at self and ancestors. Each step sees twice as far up as the one before."""
    n = parents.shape[0]
    mask = torch.eye(n, dtype=torch.bool, device=parents.device)
    up = parents.clamp(min=0)  # the root points at itself: harmless, it already sees itself
    for _ in range(max_depth.bit_length()):
        mask = mask | mask[up]
        up = up[up]
    return mask


def depths_of(parents: list[int]) -> list[int]:
    """Depth of every node, root 0."""
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1 if node else 0
    return depths


def paths_of(parents: list[int]) -> list[list[int]]:
    """Every root-to-leaf path, the root included, leaves in index order."""
    inner = set(parents)
    paths = []
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path = [leaf]
        while path[-1] != 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths


def parents_of_rank_paths(rank_paths: list[list[int]]) -> tuple[list[int], list[int]]:
    """A static tree written as rank paths ([[0], [1], [0, 0], ...]) -> (parents, ranks) with the root in front.

    Raises:
        ValueError: a path whose prefix is not in the list, a duplicate, or an empty path.
    """
    ordered = sorted((tuple(p) for p in rank_paths), key=lambda p: (len(p), p))
    index: dict[tuple[int, ...], int] = {(): 0}
    parents, ranks = [-1], [0]
    for path in ordered:
        if not path or path in index or min(path) < 0:
            raise ValueError(f"rank path {list(path)} is empty, negative or given twice")
        if path[:-1] not in index:
            raise ValueError(f"rank path {list(path)} lacks its parent {list(path[:-1])}")
        index[path] = len(parents)
        parents.append(index[path[:-1]])
        ranks.append(path[-1])
    return parents, ranks


def check(tree: DraftTree) -> None:
    """Assert every invariant of a tree; for tests and debugging, it synchronises."""
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    assert parents[0] == -1 and all(0 <= p < n for n, p in enumerate(parents) if n), f"not ancestor-closed: {parents}"
    assert depths == depths_of(parents), f"depths {depths} do not follow from parents {parents}"
    assert max(depths) <= tree.max_depth, f"deepest node {max(depths)}, max_depth {tree.max_depth}"
    assert max(tree.ranks.tolist()) < max(tree.width, 1), f"ranks {tree.ranks.tolist()}, width {tree.width}"
    mask = torch.zeros_like(tree.ancestors)
    for path in paths_of(parents):
        for i, node in enumerate(path):
            mask[node, path[: i + 1]] = True
    assert torch.equal(mask, tree.ancestors), "the mask is not the tree's ancestor relation"
    if tree.q is None:
        acceptable = [True] * len(parents) if tree.acceptable is None else tree.acceptable.tolist()
        assert acceptable[0], "the root is not acceptable"
        siblings = [s for s, a in zip(zip(parents, tree.tokens.tolist(), strict=True), acceptable, strict=True) if a][1:]
        assert len(set(siblings)) == len(siblings), f"deterministic siblings repeat a token: {siblings}"
