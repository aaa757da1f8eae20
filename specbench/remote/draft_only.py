"""Drafting without verification, when the link to the target is broken: a drafter continues the verified text alone.

A drafter with a network drafts one chain, as long as it can, from all verified states of this text. They are observed anew,
since the tree that was under way when the link broke left rows in its caches. One without takes its first choices as
accepted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specbench.engine.interface import DraftTree, TargetStates
from specbench.engine.policies import Chain
from specbench.engine.sampling import Sampler


def concatenated(parts: Sequence[TargetStates]) -> TargetStates:
    """States of consecutive positions as one."""
    first = parts[0]
    return replace(
        TargetStates(first.tokens, first.positions, first.last, first.logits[:0]),
        tokens=torch.cat([p.tokens for p in parts]),
        positions=torch.cat([p.positions for p in parts]),
        last=torch.cat([p.last for p in parts]),
        hidden={i: torch.cat([p.hidden[i] for p in parts]) for i in first.hidden},
        kv={i: (torch.cat([p.kv[i][0] for p in parts], 1), torch.cat([p.kv[i][1] for p in parts], 1)) for i in first.kv},
        condensed=tuple(torch.cat([p.condensed[i] for p in parts]) for i in range(len(first.condensed))),
    )


@torch.inference_mode()
def draft_alone(drafter: Any, states: TargetStates, root: int, count: int) -> list[int]:
    """At most `count` ids behind the root, greedily; none if the drafter proposes nothing.

    states: of all verified tokens before the root.
    """
    if drafter.grower is not None:
        return _chain(drafter.grower, states, root, count)
    return _accept_first_choices(drafter, states, root, count)


def _chain(drafter: Any, states: TargetStates, root: int, count: int) -> list[int]:
    growth = drafter.growth
    drafter.set_tree_policy(Chain(min(count, drafter.deepest or count), candidates="top"))
    try:
        drafter.reset(len(states.tokens) + drafter.nodes)
        drafter.observe(states, root)
        tokens: list[int] = drafter.propose(root, Sampler(), None).tokens.tolist()
        return tokens[1:]
    finally:
        drafter.set_tree_policy(growth)


def _accept_first_choices(drafter: Any, states: TargetStates, root: int, count: int) -> list[int]:
    emitted: list[int] = []
    while len(emitted) < count and (path := first_choice(drafter.propose(root, Sampler(), None))):
        start = int(states.positions[-1]) + 1 + len(emitted)
        seen = torch.tensor([root, *path[:-1]], device=states.tokens.device)
        where = torch.arange(start, start + len(path), device=seen.device)
        nothing = states.last.new_empty(len(path), 0)
        drafter.observe(TargetStates(seen, where, nothing, nothing), path[-1])
        emitted, root = emitted + path, path[-1]
    return emitted[:count]


def first_choice(tree: DraftTree) -> list[int]:
    """The ids down the best acceptable child of every node."""
    tokens, parents, ranks = tree.tokens.tolist(), tree.parents.tolist(), tree.ranks.tolist()
    acceptable = [True] * len(tokens) if tree.acceptable is None else tree.acceptable.tolist()
    found: list[int] = []
    node = 0
    while below := [n for n in range(node + 1, len(tokens)) if parents[n] == node and acceptable[n]]:
        node = min(below, key=ranks.__getitem__)
        found.append(tokens[node])
    return found
