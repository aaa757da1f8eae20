"""HASS: EAGLE-2's network and decoding, trained on its own mistakes (arXiv:2408.15766).

EAGLE trains on the target's states but drafts from its own. HASS trains in n steps: step j takes the outputs of step
j - 1, moved one position on, as its input states, so that the layer meets in training what it meets in drafting.

    step 1   f^(1)_i = f_i                                   the target's states
    step j   f^(j)_i = f_hat^(j-1)_{i}, detached             its own prediction of f_i, made by step j - 1

A query of step j at position r looks at keys as it would in the j-th draft pass: at the target's states up to
r - (j - 1), then at one state of each step in between, and at its own,

    keys seen by row r of step 3      f^(1)_1 … f^(1)_{r-2}   f^(2)_{r-1}   f^(3)_r

always with RoPE at the key's own position. Tokens and regression targets are those of step 1 in every step. The loss is

    L = sum_j beta^(j-1) [ SmoothL1 + 0.1 CE + w TopK_j ],   TopK = - sum over the target's K best x of p(x) log p_hat(x)

with full-softmax probabilities, not renormalised over the K. n, K, w and beta are independent: `steps=3 topk_weight=0` is
alignment only, `steps=1 topk_weight=1` Top-K only.

Deviations and choices: hidden keys get -inf (the official training code multiplies logits by 0 or 1, which leaves hidden
keys in the normaliser); one backward pass over all steps instead of one a step (the same gradient, since inputs are
detached); beta = 1 as in the official code; the first half of the training is EAGLE's own, at a third of the cost
(`align_from=0` aligns from the start as the official script does, which adds Top-K in a second phase); with a confined
vocabulary the K best are the best of that vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from drafters.blocks import Teacher
from drafters.eagle import Eagle, following
from specbench.engine.grow import Growth
from specbench.engine.interface import Batch


class Hass(Eagle):
    """EAGLE's head, aligned over several steps.

    Args:
        steps: n of the alignment, 1 for none. beta: weight of step j is beta^(j-1).
        topk: K of the Top-K distillation. topk_weight: w, 0 for none.
        align_from: share of the training that is EAGLE's own, before all this begins.
        others: as for `Eagle`.
    """

    def __init__(
        self,
        name: str,
        growth: Growth,
        weights: str | None = None,
        steps: int = 3,
        beta: float = 1.0,
        topk: int = 10,
        topk_weight: float = 1.0,
        align_from: float = 0.5,
        **eagle: Any,
    ):
        super().__init__(name, growth, weights, **eagle)
        self.steps, self.beta, self.topk, self.topk_weight = steps, beta, topk, topk_weight
        self.align_from = align_from

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The sum over steps; what is logged beside it is step 1's, comparable with EAGLE's."""
        if batch.progress < self.align_from:
            return super().loss(batch)
        teacher, weight = Teacher(following(batch), self.head), 1.0
        total = batch.states.new_zeros(())
        logged: dict[str, Tensor] = {}
        for predicted in self.aligned(self.noisy(batch.states[:, :-1]), batch.tokens[:, 1:]):
            terms = self.regression, self.classification, self.topk, self.topk_weight
            metrics = teacher.loss(predicted, *terms)
            total, weight = total + weight * metrics["loss"], weight * self.beta
            logged = logged or metrics
        return logged | {"loss": total}

    def aligned(self, states: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        """f_hat of each step in turn. states [B, T, D] and tokens [B, T] of T pairs -> n times [B, T, D]"""
        first, cache = states[:, :1], DynamicCache()  # the cache lays the keys of all steps end to end
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        for step in range(1, self.steps + 1):
            mask = step_mask(step, tokens.shape[1], tokens.device)
            predicted = self.network(states, tokens, positions, mask[None, None], cache)
            yield predicted
            states = torch.cat([first, predicted[:, :-1].detach()], 1)


def step_mask(step: int, length: int, device: torch.device | None = None) -> Tensor:
    """Which keys a query of step j sees: [T, j * T] bool, the keys of step 1 first.

    Step 3, T = 4, rows are queries:   f^(1)    f^(2)    f^(3)
                                       . . . .  . . . .  x . . .
                                       . . . .  x . . .  . x . .
                                       x . . .  . x . .  . . x .
                                       x x . .  . . x .  . . . x
    """
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    own = [column == row - (step - source) for source in range(2, step + 1)]
    return torch.cat([column <= row - (step - 1), *own], 1)
