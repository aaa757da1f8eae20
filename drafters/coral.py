"""CORAL: EAGLE-2 aligned over steps like HASS, with contrastive agreement between the steps (arXiv:2502.16880).

Cross-step representation alignment (CSRA): what step j predicts for a position should lie closer to what the other steps
and the target have there than to anything at other positions. With unit-length features, over M sampled positions,

    L_csra(j) = - mean over queries q and positives k+ of log [ exp(q.k+ / t) / sum over k != q of exp(q.k / t) ]

queries: step j's outputs; keys: those outputs, the outputs of earlier steps, and the target's states; positives: the
same position in earlier steps and in the target; t = 0.07. The objective of each step is

    L = 0.5 SmoothL1 + 0.1 CE + w_csra L_csra,    w_csra such that its term is as large as the regression term

With a single step (`steps=1`; Table 5) the target's states are the only positives. `csra_weight=0` leaves the contrast out,
at no cost. Decoding is EAGLE-2's. The LM-head router, the paper's second stage, is a drafter of its own: `drafters.router`.

Deviations and choices (the paper's mathematics survives only in words): positives are averaged outside the logarithm;
step j is compared with steps before it only, whose outputs are detached; padding and unscored positions are left out; M
positions are drawn a batch, since the matrix grows with their square; the balance is kept in every step instead of being
set once by hand for each target (of the paper's values only LLaMA2-Chat 13B's, 0.05, survives; here w_csra = term of
regression / L_csra, no gradient through it), unless `csra_weight` fixes it; all steps weigh alike (the paper does not
say).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.distillation import mean
from drafters.hass import Hass
from specbench.common.types import Name, Positive, Text, Tokens, Weight
from specbench.engine.interface import Batch
from specbench.engine.policies import TreePolicy


class Coral(Hass):
    """HASS's alignment without Top-K, plus CSRA.

    Args:
        temperature: of the contrast. samples: M. csra_weight: None to balance, 0 for alignment only.
        regression: weight of its term. hass: options of `Hass`.
    """

    phased: tuple[str, ...] = (*Hass.phased, "csra_weight")

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        temperature: Positive = 0.07,
        samples: Tokens = 512,
        csra_weight: Weight | None = None,
        regression: Weight = 0.5,
        beta: Weight = 1.0,
        topk_weight: Weight = 0.0,
        **hass: Any,
    ):
        super().__init__(name, growth, weights, beta=beta, topk_weight=topk_weight, regression=regression, **hass)
        self.temperature, self.samples, self.csra_weight = temperature, samples, csra_weight

    def step_terms(self, truth: Batch) -> Callable[[Tensor, dict[str, Tensor]], None]:
        """CSRA between a step's outputs and those of earlier steps and the target, at positions drawn for this batch."""
        scored = truth.scored.nonzero()  # [P, 2]
        row, column = scored[torch.randperm(len(scored), device=scored.device)[: self.samples]].unbind(1)  # [M] each
        views = [truth.states[row, column]]  # [M, D] each: the target's, then each earlier step's

        def add_contrast(predicted: Tensor, metrics: dict[str, Tensor]) -> None:
            if self.csra_weight == 0:
                return
            current = predicted[row, column]
            contrast = csra(current, views, self.temperature)
            views.append(current.detach())
            balanced = self.regression * metrics["regression"] / contrast.detach().clamp(min=1e-6)
            metrics["loss"] = metrics["loss"] + (balanced if self.csra_weight is None else self.csra_weight) * contrast
            metrics["csra"] = contrast.detach()

        return add_contrast


def csra(current: Tensor, views: list[Tensor], temperature: float) -> Tensor:
    """InfoNCE of M features against views of the same M positions. current [M, D], views: [M, D] each, no gradient."""
    m = current.shape[0]
    query = F.normalize(current.float(), dim=-1)
    keys = torch.cat([query, *(F.normalize(v.detach().float(), dim=-1) for v in views)])  # [(1 + views) * M, D]
    similarity = query @ keys.T / temperature  # [M, (1 + views) * M]
    itself = torch.eye(m, similarity.shape[1], dtype=torch.bool, device=similarity.device)
    log_share = similarity.masked_fill(itself, -torch.inf).log_softmax(-1)
    row = torch.arange(m, device=similarity.device)
    return -mean(torch.stack([log_share[row, row + m * v] for v in range(1, len(views) + 1)]))
