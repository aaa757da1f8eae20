"""Token Recycling: the target's likeliest followers of a token in earlier passes are likely again (arXiv:2408.08696).

    adjacency[t] = the k ids with the highest logits after t in the last pass that contained t     [V, k]

A target pass computes logits after every node of its tree, rejected ones included; each overwrites its token's row. The
next tree fills a fixed template with these rows, level by level: child r of a node with token t is adjacency[t, r].

Deviations and choices: initial rows hold ids 0 … k-1 instead of k zeros, since siblings must not repeat a token. If several
nodes of a pass have the same token the last one counts. The matrix is kept from prompt to prompt with `state=run`, as by
the authors; with `none`, the default here, no generation profits from an earlier one. The template is not the authors': if
each rank is right half as often as the one above it, and the first one half the time, a path of ranks r_1 … r_d is right in
2^-(r_1 + … + r_d + d) of the cases, and the 63 likeliest paths are those with at least 2^-6. Any list of rank paths can be
given instead (`tree._target_=specbench.engine.policies.Static`).
"""

from typing import Literal

import torch
from torch import Tensor

from drafters.retrieval import Retriever
from specbench.common.errors import SpecBenchError
from specbench.common.types import Name, Width
from specbench.engine.interface import DraftTree, Sampler, Taps, TargetStates
from specbench.engine.policies import Static
from specbench.engine.sampling import require_ids, top
from specbench.engine.target import Target


class TokenRecycling(Retriever):
    """Drafts a static tree from a matrix of followers, which stays on the device.

    Args:
        growth: the template. followers: k, at least the template's width. state: is the matrix kept between prompts?
    """

    growth: Static
    observes_trees = True

    def __init__(self, name: Name, growth: Static, followers: Width = 8, state: Literal["none", "run"] = "none"):
        if growth.fitted:
            raise SpecBenchError(
                f"drafter={name}: its acceptance is not measured, so no tree fits it; choose another tree="
            )
        super().__init__(name, growth.nodes, state)
        self.growth, self.followers = growth, max(followers, growth.width)
        self.taps = Taps(last=False, observe_top_k=self.followers)

    @property
    def grower(self) -> None:
        """None: its template cannot be fitted or replaced."""

    def bind(self, target: Target) -> None:
        self.vocab_size = target.vocab_size
        require_ids(self.followers, self.vocab_size)
        super().bind(target)

    def clear(self) -> None:
        first = torch.arange(self.followers, device=self.device)
        self.adjacency: Tensor = first.repeat(self.vocab_size, 1)  # [V, k]

    def observe(self, states: TargetStates, bonus: int) -> None:
        """`observe_tree` has read everything."""

    def observe_tree(self, tree: DraftTree, states: TargetStates) -> None:
        ids = top(states.logits, self.followers)[1]  # [N, k]
        node = torch.arange(len(tree), device=ids.device)
        last = ((tree.tokens[:, None] == tree.tokens) * node).amax(-1)  # [N] the last node with the same token
        self.adjacency[tree.tokens] = ids[last]

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        return self.growth.from_followers(root, lambda tokens: self.adjacency[tokens], self.device)
