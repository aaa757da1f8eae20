"""Turns trees into requests, and requests into trees on the server's device; refuses those that are not valid."""

from typing import Any

import torch

from specbench.common.errors import SpecBenchError
from specbench.engine import tree as trees
from specbench.engine.interface import DraftTree
from specbench.remote import protocol


def require(name: str, unit: str, size: int, limit: int) -> None:
    """Raises `SpecBenchError` if a request asks for more than the server's limit."""
    if size > limit:
        raise SpecBenchError(f"a {name} of {size} {unit}, but this server takes {limit}")


def require_ids(tokens: list[int], vocab_size: int) -> None:
    """Raises `SpecBenchError` for ids that the target does not have."""
    if max(tokens) >= vocab_size:
        raise SpecBenchError(f"token {max(tokens)}, but the target has {vocab_size}")


def tree(request: protocol.Pass, max_nodes: int, vocab_size: int, device: torch.device) -> DraftTree:
    """The tree of a request. Raises `SpecBenchError` if it is not valid."""
    tokens, parents = request["tokens"], [-1, *request["parents"]]
    count = len(tokens)
    require("tree", "nodes", count, max_nodes)
    require_ids(tokens, vocab_size)
    if len(parents) != count or any(parent >= node for node, parent in enumerate(parents)):
        raise SpecBenchError("a tree in which a node does not stand behind its parent")
    depths = trees.depths_of(parents)
    drawn = request.get("drawn")
    ranks, width = [0] * count, 0
    if drawn is not None:
        ranks, width = drawn["ranks"], drawn["width"]
        if len(ranks) != count or width > count or any(rank >= width for rank in ranks[1:]):
            raise SpecBenchError("a tree whose ranks do not fit it")
    ids, above, levels, rank = torch.tensor([tokens, parents, depths, ranks], device=device).unbind()
    result = trees.build(ids, above, levels, rank, max(depths), width)
    if others := request.get("others"):
        result.acceptable = torch.ones(count, dtype=torch.bool, device=device)
        result.acceptable[_nodes(others, count, device)] = False
        result.acceptable[0] = True
    if drawn is not None:
        nodes = _nodes(drawn["nodes"], count, device)
        rows = protocol.unpack(drawn["q"], device, (len(nodes), vocab_size)).float()
        if not bool((rows >= 0).all()):  # NaN is not either
            raise SpecBenchError("a tree whose q is no probability")
        result.q = torch.zeros(count, vocab_size, device=device).index_copy_(0, nodes, rows)
        result.replacement = drawn["replacement"]
    return result


def _nodes(numbers: list[int], count: int, device: torch.device) -> torch.Tensor:
    if len(set(numbers)) != len(numbers) or any(node >= count for node in numbers):
        raise SpecBenchError(f"nodes that a tree of {count} does not have")
    return torch.tensor(numbers, dtype=torch.long, device=device)


def message(tree: DraftTree) -> dict[str, Any]:
    """The request `protocol.Pass` for a tree; `tree` reads it."""
    request: dict[str, Any] = {"kind": "pass", "tokens": tree.tokens.tolist(), "parents": tree.parents.tolist()[1:]}
    if tree.acceptable is not None:
        request["others"] = (~tree.acceptable).nonzero()[:, 0].tolist()
    if tree.q is not None:
        parents = tree.parents[1:].unique()
        drawn = {"ranks": tree.ranks.tolist(), "width": tree.width, "replacement": tree.replacement}
        request["drawn"] = {"nodes": parents.tolist(), "q": protocol.pack(tree.q[parents]), **drawn}
    return request
