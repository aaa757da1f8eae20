"""Drafting without verification, when the link to the target is broken: a drafter continues the verified tokens alone.

A drafter with a network is reset, since an unverified tree left rows in its caches, observes all verified states, and
drafts one chain as long as it can. A drafter without a network accepts its own first choices, cycle by cycle.
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
    """At most `count` ids after the root, greedily. states: of all verified tokens before the root."""
    if drafter.grower is None:
        return _accept_first_choices(drafter, states, root, count)
    drafter = drafter.grower
    growth = drafter.growth
    drafter.set_tree_policy(Chain(min(count, drafter.deepest or count), candidates="top"))
    try:
        drafter.reset(len(states.tokens) + drafter.nodes)
        drafter.observe(states, root)
        return drafter.propose(root, Sampler(), None).tokens.tolist()[1:]
    finally:
        drafter.set_tree_policy(growth)


def _accept_first_choices(drafter: Any, states: TargetStates, root: int, count: int) -> list[int]:
    emitted: list[int] = []
    while len(emitted) < count and (path := first_choice(drafter.propose(root, Sampler(), None))):
        start = int(states.positions[-1]) + 1 + len(emitted)
        tokens = torch.tensor([root, *path[:-1]], device=states.tokens.device)
        positions = torch.arange(start, start + len(path), device=tokens.device)
        empty = states.last.new_empty(len(path), 0)
        drafter.observe(TargetStates(tokens, positions, empty, empty), path[-1])
        emitted, root = emitted + path, path[-1]
    return emitted[:count]


def first_choice(tree: DraftTree) -> list[int]:
    """The ids of the path that follows each node's best acceptable child."""
    tokens, parents, ranks = tree.tokens.tolist(), tree.parents.tolist(), tree.ranks.tolist()
    acceptable = [True] * len(tokens) if tree.acceptable is None else tree.acceptable.tolist()
    path: list[int] = []
    node = 0
    while children := [n for n in range(node + 1, len(tokens)) if parents[n] == node and acceptable[n]]:
        node = min(children, key=ranks.__getitem__)
        path.append(tokens[node])
    return path
