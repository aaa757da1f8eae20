"""Medusa-2: Medusa's heads and the target trained together (arXiv:2401.10774, sections 2.2.2 and 2.3.2).

The heads are Medusa's. Beside them an adapter of rank r changes the products of the target's layers,

    W' = W + (alpha / r) B A,    B = 0 at first,

so that its states f' say more about the tokens to come. In two stages:

    heads' warm-up      L = L_1, on the original's states f; the adapter is not there yet
    joint training      L = KL(p || p') + lambda_0 L_1, on the adapted states f'

with L_1 = sum_k lambda^k CE(t_{t+k+1}, p^(k)) as in Medusa-1, p = softmax(head(f)), p' = softmax(head(f')). KL(p || p') is
self-distillation: the text is the target's own, and its original, the adapter left out, is the teacher; it stands for the
cross-entropy with the text that the paper has where the target's own training data are known. The adapter learns more
slowly than the heads (`train.settings.groups`).

This CHANGES THE TARGET. Drafts are verified by the adapted one (`model.adapter=` the folder of the weights), which has a
baseline, an audit and cells of its own; beside these rows is measured how far it moved away: perplexity of the original's
answers, KL to the original and agreement of the likeliest ids.

Deviations and choices: the paper adapts the LM head, too; here it stays the original's, which drafters share. The
teacher's states are the corpus's own, stored or computed online, instead of a second pass with the adapter switched off.
With a confined vocabulary the KL runs over those ids alone. The stages are phases of one training, or the second one
starts from the weights of a trained Medusa, as by default for two cores. Acceptance in its log, and the accuracies that
choose the tree, are those of the adapted states on the original's held-out answers; what the adapted target itself
answers is measured by decoding.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from drafters.distillation import DistillationLoss
from drafters.medusa import Medusa
from specbench.common.types import Name, Positive, Share, Text, Units, Weight
from specbench.engine import adapters
from specbench.engine.interface import Batch
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target

PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a Llama's layer


class Medusa2(Medusa):
    """Medusa's heads for a target with an adapter, both trained together.

    Args:
        growth: as of `Medusa`.
        rank, alpha: r and alpha of the adapter. adapted: names of the layers' products that it changes.
        adapter_dropout: share of a product's inputs that the adapter does not see while training.
        weight: lambda_0.
        joint: train both; False: the heads' warm-up, on the original's states.
        medusa: options of `Medusa`.
    """

    phased = ("decay", "weight", "joint")
    trains_target = True
    formats: tuple[str, ...] = ()

    student: Target | None = None  # the target with the adapter, while it is trained

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        rank: Units = 32,
        alpha: Positive = 16.0,
        adapted: Sequence[Text] = PRODUCTS,
        adapter_dropout: Share = 0.05,
        weight: Weight = 0.2,
        joint: bool = True,
        **medusa: Any,
    ):
        super().__init__(name, growth, weights, **medusa)
        self.rank, self.alpha, self.adapted, self.adapter_dropout = rank, alpha, tuple(adapted), adapter_dropout
        self.weight, self.joint = weight, joint

    def prepare_training(self, target: Target) -> Target:
        """The adapter's parameters become this drafter's, as `adapter.*`."""
        student: Target = adapters.attach(target, self.rank, self.alpha, list(self.adapted), self.adapter_dropout)
        object.__setattr__(self, "student", student)
        self.adapter = student.decoder
        return student

    def release_adapter(self) -> adapters.Adapter | None:
        if self.student is None:
            return None
        made = adapters.of(self.student.model, self.alpha / self.rank)
        del self.adapter
        object.__setattr__(self, "student", None)
        return made

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """`language`: cross-entropy of p' with p; `kept`: share of states at which the likeliest ids are the same."""
        if self.student is None or not self.joint:
            return super().loss(batch)
        states = self.student.run(batch.tokens, batch.positions, batch.causal_mask(), None)
        heads = super().loss(replace(batch, states=states.to(batch.states.dtype)))
        distilled = DistillationLoss(batch, self.head).loss(states, 0.0, 1.0)
        total = distilled["loss"] + self.weight * heads["loss"]
        return heads | {"language": distilled["classification"], "kept": distilled["agreement"], "loss": total}
