"""CORAL's LM-head router on any drafter whose logits come from the target's head (arXiv:2502.16880, section 3.3).

The vocabulary is cut into N groups of neighbouring ids. A router maps the drafter's state h to a distribution over groups;
only the likeliest groups of each node of a level are multiplied,

    q(x) = p_r(g(x) | h) softmax within g(x),    p_r = softmax(W_r h + b_r)

so that a level reads a part of the head's rows. All nodes of a level use the union of their groups. Ids of other groups get
-inf before any top-k, and what is left is renormalised.

Training, a second stage with the drafter (EAGLE's family, Clover-2) frozen: L = - sum over g of P_g log p_r(g), P_g the
target's mass in group g.

Deviations and choices: the router is one linear layer (not given in the paper); it is trained on teacher-forced states.
The groups of a level are read back to the host, since slices of the head are free while a gather would copy rows: a cycle
waits for the device once per level instead of once.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.base import Pick, TrainedDrafter, likeliest_at
from drafters.distillation import mean
from specbench.common.errors import SpecBenchError
from specbench.common.types import Ids, Name, Text
from specbench.engine.drafter import Delegating, Outline
from specbench.engine.interface import Batch
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target

MEASURED = 256  # states of a batch on which agreement is measured, which takes another product with the head


class Routed(TrainedDrafter, Delegating):
    """Another drafter, reading only a part of the LM head.

    Args:
        weights: the router's own. base: the drafter, which computes logits by `target_logits`, with its weights.
        groups: N. active: groups per node. vocabulary: None; a router chooses among all ids.
    """

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        base: Any,
        weights: Text | None = None,
        groups: Ids = 16,
        active: Ids = 2,
        vocabulary: Ids | None = None,
    ):
        self.parallel = base.parallel
        super().__init__(name, growth, weights)
        if vocabulary is not None or base.vocabulary is not None:
            raise SpecBenchError(
                f"drafter.vocabulary={vocabulary or base.vocabulary}: the router of {name} chooses among the head's rows "
                f"already; leave it out, or take drafter={base.name} without the router"
            )
        self.base, self.groups, self.active = base, groups, active
        self.deepest, self.complete = base.deepest, True
        base.set_tree_policy(growth)  # its caches hold the rows

    def outline(self, target: Target) -> Outline:
        base: Outline = self.base.outline(target)
        return base._replace(own=base.own + self.groups * (target.hidden_size + 1))

    def build(self, target: Target) -> None:
        self.base.bind(target)
        if getattr(self.base.target_logits, "func", None) != target.logits:  # see `share_ends`
            raise SpecBenchError(f"drafter={self.base.name} has a head of its own; a router chooses among the target's")
        self.base.requires_grad_(False)
        self.embedding, self.head = target.embedding, target.draft_head
        self.size = -(-target.vocab_size // self.groups)  # ids a group; the last may be smaller
        self.groups = -(-target.vocab_size // self.size)  # none is empty
        self.router = nn.Linear(target.hidden_size, self.groups)
        self.whole_head = target.logits
        self.base.target_logits = self.routed

    complete = False  # once the base is there

    timed_functions = Delegating.timed_functions

    def set_tree_policy(self, growth: TreePolicy) -> None:
        super().set_tree_policy(growth)
        if self.complete:
            self.base.set_tree_policy(growth)

    def optimize_for_inference(self) -> None:
        super().optimize_for_inference()
        groups = self.head.weight.split(self.size)
        equal = self.packing.products([(rows, None) for rows in groups if len(rows) == self.size])
        self.slices = [*equal, *self.packing.products([(rows, None) for rows in groups[len(equal) :]])]

    def bind(self, target: Target) -> None:
        super().bind(target)
        self.slices = [partial(F.linear, weight=rows) for rows in self.head.weight.split(self.size)]
        self.name_base()
        head = self.head.weight.numel()
        skipped = head - head * min(self.active / self.groups, 1)
        self.active_parameters = self.base.active_parameters + self.router.weight.numel() - int(skipped)

    def routed(self, states: Tensor) -> Tensor:
        """Log-probabilities of the ids in the level's groups, -inf elsewhere. [F, D] or [D] -> [F, V] or [V]"""
        flat = states.reshape(-1, states.shape[-1])
        share = self.router(flat).float().log_softmax(-1)  # [F, N]
        chosen = share.topk(min(self.active, self.groups), dim=-1).indices.flatten()
        active = torch.zeros_like(share[0], dtype=torch.bool).index_fill(0, chosen, True).tolist()  # the level's one read
        logits = share.new_full((flat.shape[0], self.head.weight.shape[0]), -torch.inf)
        for group in (g for g, is_active in enumerate(active) if is_active):
            rows = slice(group * self.size, (group + 1) * self.size)
            within = self.slices[group](flat).float().log_softmax(-1)
            logits[:, rows] = share[:, group : group + 1] + within
        return logits.reshape(*states.shape[:-1], -1)

    def routed_separately(self, states: Tensor) -> Tensor:
        """The same for nodes that are a level each, as in a chain: with their own groups only. [M, D] -> [M, V]"""
        share = self.router(states).float().log_softmax(-1)  # [M, N]
        chosen = share.topk(min(self.active, self.groups), dim=-1).indices
        offered = torch.full_like(share, -torch.inf).scatter(-1, chosen, share.gather(-1, chosen))
        parts = F.linear(states, self.head.weight).float().split(self.size, dim=-1)
        return torch.cat([part.log_softmax(-1) + offered[:, g : g + 1] for g, part in enumerate(parts)], -1)

    # Decoding: the base drafter's, with routed logits --------------------------------------------------------------------

    def root_logits(self) -> Tensor:
        return self.base.root_logits()

    def expand(self, tokens: Tensor, parent_rows: Tensor, depth: int, visible: Tensor) -> Tensor:
        return self.base.expand(tokens, parent_rows, depth, visible)

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The router's cross-entropy; `mass` of p in the active groups; `agreement` of q's and p's argmax, of some."""
        if type(self.base).draft_states is TrainedDrafter.draft_states:
            raise SpecBenchError(f"drafter={self.base.name}: a router is trained on EAGLE's family or Clover-2; take one")
        drafted = batch.scored & (batch.positions > 0)  # the first state is never drafted
        with torch.no_grad():
            states = next(self.base.draft_states(batch, 1))[drafted]  # [M, D]
            p = self.whole_head(batch.states[drafted]).float().softmax(-1)
            mass = torch.stack([part.sum(-1) for part in p.split(self.size, dim=-1)], -1)  # [M, N]
        share = self.router(states).float().log_softmax(-1)  # [M, N]
        cross_entropy = -mean((mass * share).sum(-1))
        with torch.no_grad():
            chosen = share.topk(min(self.active, self.groups), dim=-1).indices
            agreement = mean((self.routed_separately(states[:MEASURED]).argmax(-1) == p[:MEASURED].argmax(-1)).float())
        return {"loss": cross_entropy, "mass": mean(mass.gather(-1, chosen).sum(-1)), "agreement": agreement}

    def drafts(self, batch: Batch, steps: int) -> Iterator[Pick]:
        for states in self.base.draft_states(batch, steps):
            yield likeliest_at(states, self.routed_separately)
