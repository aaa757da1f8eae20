"""Draft trees from parent pointers: depths, ancestor mask, ranks, root-to-leaf paths. Knows no model.

The mask of a tree: a row's node attends to the columns marked `x`, and to the whole cached prefix, not shown:

              node     0 1 2 3 4 5
        0            0 x                 0 is the root, its parent is -1
      / | \\          1 x x
     1  2  3         2 x . x
    / \\              3 x . . x
   4   5             4 x x . . x
                     5 x x . . . x
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

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
    """A tree whose topology stays on its device; tokens, parents, depths, ranks: [N], the root first, `parents[n] < n`."""
    mask = ancestor_mask(parents, max_depth)
    return DraftTree(tokens, parents, depths, mask, ranks, max_depth, width, confidence=confidence, passes=passes)


def root_only(root: int | Tensor, device: torch.device | str = "cpu", passes: int = 0) -> DraftTree:
    """Nothing but the root: the tree of the baseline, or of draft passes that gave nothing worth verifying."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    itself = torch.ones(1, 1, dtype=torch.bool, device=device)
    return DraftTree(zero + root, zero - 1, zero, itself, zero, max_depth=0, width=0, passes=passes)


class Trie:
    """Candidate sequences below a root, merged where they begin alike, since siblings must not repeat a token.

    Built on the host by drafters that copy text. max_nodes: the root included; sequences that need more are cut.
    """

    def __init__(self, root: int, max_nodes: int):
        self.max_nodes = max_nodes
        self.tokens, self.parents, self.depths, self.ranks = [root], [-1], [0], [0]
        self.acceptable = [True]
        self.below: list[dict[int, int]] = [{}]  # token -> acceptable child, by node
        self.child_counts = [0]  # by node

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Iterable[int]) -> list[int]:
        """Add a sequence below the root; returns its nodes. Earlier sequences have the better ranks."""
        nodes = [0]
        for token in tokens:
            child = self.child_or_new(nodes[-1], token)
            if child is None:
                break
            nodes.append(child)
        return nodes[1:]

    def walk(self, next_tokens: Sequence[int]) -> list[int]:
        """The path of acceptable nodes from the root on of which each has the next token of its parent. [N] by node"""
        nodes = [0]
        while (child := self.below[nodes[-1]].get(next_tokens[nodes[-1]])) is not None:
            nodes.append(child)
        return nodes[1:]

    def child_or_new(self, parent: int, token: int) -> int | None:
        """The acceptable child of a node with this token, a new one if there was none; None if the tree is full."""
        if token not in self.below[parent]:
            if len(self) == self.max_nodes:
                return None
            self.below[parent][token] = self.append(parent, token)
        return self.below[parent][token]

    def append(self, parent: int, token: int, acceptable: bool = True) -> int:
        """A new node, even if a sibling has the same token."""
        node = len(self)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.ranks.append(self.child_counts[parent])
        self.acceptable.append(acceptable)
        self.child_counts[parent] += 1
        self.child_counts.append(0)
        self.below.append({})
        return node

    def tree(self, device: torch.device) -> DraftTree:
        """The tree on the device, in one transfer."""
        rows = [self.tokens, self.parents, self.depths, self.ranks, self.acceptable]
        tokens, parents, depths, ranks, acceptable = torch.tensor(rows, device=device).unbind()
        grown = build(tokens, parents, depths, ranks, max(self.depths), max(self.child_counts))
        return grown if all(self.acceptable) else replace(grown, acceptable=acceptable.bool())


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """parents [N] -> bool [N, N], True at self and ancestors, in log2(`max_depth`) steps that double the distance."""
    n = parents.shape[0]
    mask = torch.eye(n, dtype=torch.bool, device=parents.device)
    up = parents.clamp(min=0)  # the root's parent is the root, which changes nothing
    steps = max_depth.bit_length()
    for step in range(1, steps + 1):
        mask = mask | mask[up]
        if step < steps:
            up = up[up]
    return mask


def depths_of(parents: list[int]) -> list[int]:
    """Depth of every node, root 0."""
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1 if node else 0
    return depths


def parents_of_rank_paths(rank_paths: list[list[int]]) -> tuple[list[int], list[int]]:
    """A static tree's (parents, ranks), the root first, of its rank paths ([[0], [1], [0, 0], ...]).

    Raises `ValueError` for a path whose prefix is not in the list, a duplicate, or an empty path.
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


@dataclass(frozen=True)
class Level:
    """The F nodes of one level that have children, and these M children."""

    nodes: Tensor  # [F] their indices in the tree
    parent_rows: Tensor  # [F] the row of each one's parent, -1 for the root; see `Expandable.expand`
    visible: Tensor  # [F, R + F] bool, see there
    children: Tensor  # [M] indices in the tree
    parent_index: Tensor  # [M] which of the F is each child's parent
    child_ranks: Tensor  # [M]
    candidates: int  # needed of each node's logits: more than any child's rank


@dataclass(frozen=True)
class StaticShape:
    """A static tree without its tokens, on a device. Tensors as in `DraftTree`; levels from the root's on."""

    parents: Tensor
    depths: Tensor
    ranks: Tensor
    ancestors: Tensor
    levels: list[Level]

    @classmethod
    def of(cls, parents: list[int], depths: list[int], ranks: list[int], device: torch.device) -> "StaticShape":
        def put(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device)

        ancestors = ancestor_mask(put(parents), max(depths))
        levels: list[Level] = []
        rows: dict[int, int] = {}  # of expanded nodes, in the order of expansion
        for depth in range(max(depths)):
            level = sorted({p for p, d in zip(parents, depths, strict=True) if d == depth + 1})
            rows |= {node: len(rows) + i for i, node in enumerate(level) if depth}
            below = [n for n, d in enumerate(depths) if d == depth + 1]
            levels.append(
                Level(
                    nodes=put(level),
                    parent_rows=put([rows.get(parents[n], -1) for n in level]),
                    visible=ancestors[put(level)][:, put([*rows])] if depth else ancestors[:1, :0],
                    children=put(below),
                    parent_index=put([level.index(parents[n]) for n in below]),
                    child_ranks=put([ranks[n] for n in below]),
                    candidates=max(ranks[n] for n in below) + 1,
                )
            )
        return cls(put(parents), put(depths), put(ranks), ancestors, levels)
