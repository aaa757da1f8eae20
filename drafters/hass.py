"""HASS: EAGLE-2's network and decoding, trained on its own mistakes (arXiv:2408.15766).

EAGLE trains on the target's states but drafts from its own. HASS trains in n steps: step j is the j-th draft pass, whose
input states are the predictions of step j - 1, moved one position on (see `Eagle.aligned`). Tokens and regression targets
are those of step 1 in every step. The loss is

    L = sum_j beta^(j-1) [ SmoothL1 + 0.1 CE + w TopK_j ],   TopK = - sum over the target's K best x of p(x) log p_hat(x)

with full-softmax probabilities, not renormalised over the K. `ranking` puts another loss in the place of Top-K, as
in the source's loss ablation: see `drafters.losses`. n, K, w and beta are independent: `topk_weight=0` is alignment only,
`steps=1` Top-K only, both together EAGLE's own training, at its own cost; the phases of a training may change them.

Deviations and choices: hidden keys get -inf (the official training code multiplies logits by 0 or 1, which leaves hidden
keys in the normaliser); one backward pass over all steps instead of one a step (the same gradient, since inputs are
detached); beta = 0.5, K = 5 and w = 0.5 are what the paper's ablations found best (the official code weighs all steps
alike and has K = 10, w = 1 in its second phase); with a confined vocabulary the K best are the best of that vocabulary.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from drafters.distillation import DistillationLoss, TopIds
from drafters.eagle import Eagle, following
from drafters.losses import Ranking
from specbench.common.types import Depth, Ids, Name, Share, Text, Weight
from specbench.engine.interface import Batch
from specbench.engine.policies import TreePolicy


class Hass(Eagle):
    """EAGLE's head, aligned over several steps.

    Args:
        steps: n of the alignment, 1 for none. beta: weight of step j is beta^(j-1).
        topk: K of the Top-K distillation. topk_weight: w, 0 for none.
        ranking: the loss in its place; top_p: P of `top_p`, the only one that reads it.
        eagle: options of `Eagle`.
    """

    phased: tuple[str, ...] = (*Eagle.phased, "steps", "beta", "topk", "topk_weight", "ranking", "top_p")

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        steps: Depth = 3,
        beta: Weight = 0.5,
        topk: Ids = 5,
        topk_weight: Weight = 0.5,
        ranking: Ranking = "top_k",
        top_p: Share = 0.9,
        **eagle: Any,
    ):
        super().__init__(name, growth, weights, **eagle)
        self.steps, self.beta, self.topk, self.topk_weight = steps, beta, topk, topk_weight
        self.ranking, self.top_p = ranking, top_p

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The sum over steps; other values logged are step 1's, comparable with EAGLE's."""
        truth, weight = following(batch), 1.0
        top_ids = TopIds(self.topk_weight, self.topk, self.ranking, self.top_p)
        teacher, add_terms = self.teacher(truth), self.step_terms(truth)
        total = batch.states.new_zeros(())
        logged: dict[str, Tensor] = {}
        for predicted in self.aligned(self.noisy(batch), batch, self.steps):
            metrics = teacher.loss(predicted, self.regression, self.classification, top_ids)
            add_terms(predicted, metrics)
            total, weight = total + weight * metrics["loss"], weight * self.beta
            logged = logged or metrics
        return logged | {"loss": total}

    def teacher(self, truth: Batch) -> DistillationLoss:
        """What every step is held to."""
        return DistillationLoss(truth, self.head, uses=self.steps, unbiased=self.lacks_a_token)

    def step_terms(self, truth: Batch) -> Callable[[Tensor, dict[str, Tensor]], None]:
        """A function that adds further terms to a step's metrics, from its predicted states [B, T - 1, D]."""
        return lambda predicted, metrics: None
