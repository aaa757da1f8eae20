"""Paths of a tree, and its invariants."""

import torch

from specbench.engine.interface import DraftTree
from specbench.engine.tree import depths_of


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


def check(tree: DraftTree) -> None:
    """Assert every invariant of a tree."""
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
