"""Beagle: cross-attention from tokens to states (arXiv:2505.24544).

One block. The query of position n is its own token, keys and values are the states of positions before it (strictly, so
that no shift between tokens and states is needed):

    y_n = e(t_n) + Attn(Q: e(t_n); K, V: h_j, j < n),   h_hat_n = y_n + MLP(y_n),    p_hat(t_{n+1}) = softmax(Head(h_hat_n))

While drafting, h_hat of a node joins the keys of its descendants (`concat`), or nodes attend to true states only.

Training (section 4): L = 10 SmoothL1(f, h_hat) + CE(p, p_hat), over windows of k positions with a random offset, first in
the early stage, then in the late one (A.3: ten epochs each). Noise N(0, 0.2) is added to the states that are keys (A.3).

    early   every query of a window attends to the true states before the window, to none in it (block attention)
    late    step i = 1 … s computes the i-th position of all windows at once, which attends to the true states before its
            window and to those that earlier steps predicted in it; its loss counts s - i + 1 times
            (`ahead`, l = k in equation 6: step i computes the i-th and all later positions of its window)

          true states | window | its predicted states        query 2 of the window, early:   x x x . .
            x x x     |  . .   |                             the same, late, step 2:          x x x . .  +  p .

Deviations and choices: RMSNorm on the embedding before Q and before the MLP, none on states, which are normed already, none
on the output; RoPE with the query at n and keys at j; SwiGLU as in Llama (the paper leaves all of this open). Every query
head has keys and values of its own (equation 2; the paper does not say whether they are grouped): in the target's groups
the output would hold only those few dimensions of a state, with the token alone in the residual. 0.2 is the noise's
standard deviation; regression targets stay clean. Positions before the first whole window attend to everything before them.
Losses are means over scored positions instead of sums over windows. Predicted states are detached: loss and gradient of all
late steps come from one pass over them, so memory does not grow with s. The late window is s (paper: s = 4 and 3, k = 5),
and a late step's loss is the mean over its positions times (s - i + 1) / s, so that its size does not depend on s; with
`ahead` it is the mean over all positions that the step predicts (the paper does not say how they weigh). The
recipe for two cores (conf/recipe/small_beagle.yaml) has an early window of 3, where the paper takes 5 and finds 3 best, and
gives the late stage 70% of the steps, where the paper gives it half.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.base import Pick, TrainedDrafter, likeliest_at, llama_config, noisy
from drafters.distillation import DistillationLoss
from drafters.layers import CrossAttention
from drafters.windows import early_mask, late_mask, window_starts
from specbench.common.types import Depth, Ids, Name, Text, Tokens, Weight
from specbench.engine.batch import DRAFT, over_keys
from specbench.engine.cache import KVCache
from specbench.engine.interface import Batch, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target


class Beagle(CrossAttention, TrainedDrafter):
    """One cross-attention block.

    Args:
        concat: nodes attend to the predicted states of their ancestors; False: true states only.
        grouped: keys and values in the target's groups of heads; False: one pair for every query head (equation 2).
        stage: of the training, `early` or `late`.
        window: k of the early stage. steps: s of the late stage.
        decreasing: late steps weigh s - i + 1; False: all alike, with the same sum.
        ahead: late steps predict all positions of a window that remain, not the next one alone (Figure 12, l = k).
        noise: standard deviation of the normal noise on states while training.
        regression, classification: weights of the two loss terms.
    """

    batches = True
    observed: tuple[str, ...] = ("logits",)
    phased = ("stage", "window", "steps", "decreasing", "ahead", "noise", "regression", "classification")

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        concat: bool = True,
        grouped: bool = False,
        stage: Literal["early", "late"] = "early",
        window: Tokens = 5,
        steps: Depth = 4,
        decreasing: bool = True,
        ahead: bool = False,
        noise: Weight = 0.2,
        regression: Weight = 10.0,
        classification: Weight = 1.0,
        vocabulary: Ids | None = None,
    ):
        super().__init__(name, growth, weights, vocabulary)
        self.concat, self.grouped, self.window, self.steps = concat, grouped, window, steps
        self.decreasing, self.ahead, self.noise = decreasing, ahead, noise
        self.regression, self.classification = regression, classification
        self.stage = stage

    def build(self, target: Target) -> None:
        config = llama_config(target, layers=1)
        if not self.grouped:
            config.num_key_value_heads = config.num_attention_heads
        self.share_ends(target)
        self.query_norm = LlamaRMSNorm(target.hidden_size, config.rms_norm_eps)
        self.build_cross_attention(config, target.hidden_size)
        self.cache = KVCache(1, 0)
        if not self.concat:
            self.observed = ()  # its queries see as many rows as there are true states

    def network(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """h_hat of B x T queries. tokens, positions [B, T]; keys, values [B, H, S, Dh]; mask [B or 1, T, S] -> [B, T, D]"""
        e = self.embedding(tokens).to(keys)
        return self.cross_block(e, self.query_norm(e), self.cross_rotary(e, positions), keys, values, mask)

    def for_sequences(self, count: int, lockstep: Any) -> list[Any]:
        rows, network = super().for_sequences(count, lockstep), over_keys(self.network)
        for row in rows:
            row.cache, row.network = KVCache(1, 0), partial(lockstep.call, network, DRAFT)
        return rows

    # Decoding -----------------------------------------------------------------------------------------------------------

    def reset(self, capacity: int) -> None:
        self.cache.begin(capacity + self.growth.rows + 1)
        self.stable = 0  # cache rows of true states

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Append the true states; the bonus, the next root, attends to them all."""
        self.cache.truncate(self.stable)
        self._cache_states(states.last, states.positions)
        self.stable = self.cache.length
        root = states.tokens.new_full((1,), bonus)
        self.logits = self._draft(root, torch.full_like(root, self.stable), None)[0]

    def expand(self, tokens: Tensor, parent_rows: Tensor, depth: int, visible: Tensor) -> Tensor:
        ancestors = visible[:, : visible.shape[1] - tokens.shape[0]]  # strictly: a node does not attend to itself
        positions, mask = self.cache.draft_inputs(tokens, depth, ancestors, self.stable + 1)  # true states, and the root's
        return self._draft(tokens, positions, mask if self.concat else None)

    def _draft(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Query the cache with N tokens; with `concat`, append what they predict. mask [N, S] -> logits [N, V]"""
        keys, values = self.cache.rows(0, 0, self.cache.length)
        mask = None if mask is None else mask[None]
        predicted = self.network(tokens[None], positions[None], keys[None], values[None], mask)[0]
        if self.concat:
            self._cache_states(predicted, positions)
        return self.target_logits(predicted)

    def _cache_states(self, states: Tensor, positions: Tensor) -> None:
        self.cache.append(0, *self.keys_values(states[None], positions[None]))
        self.cache.keep()

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens up to i and states before i predict f_i, in windows; one offset a batch."""
        stage, window = (self.early, self.window) if self.stage == "early" else (self.late, self.steps)
        return stage(batch, window, int(torch.randint(window, ())))

    def early(self, batch: Batch, window: int, offset: int) -> dict[str, Tensor]:
        """Block attention over true states; see `DistillationLoss` for the objective.

        Behind the first of a window, a query does not see all tokens that its label depends on.
        """
        keys, values = self.keys_values(noisy(batch.states, self.noise, "normal", batch), batch.positions)
        mask = early_mask(batch, window, offset)
        predicted = self.network(batch.tokens, batch.positions, keys, values, mask)
        teacher = DistillationLoss(batch, self.head, unbiased=window > 1)
        return teacher.loss(predicted, self.regression, self.classification)

    def late(self, batch: Batch, steps: int, offset: int) -> dict[str, Tensor]:
        """The loss of every simulated step, earlier steps weighing more; step 1's metrics are logged."""
        index = batch.positions - window_starts(batch.positions, steps, offset)  # [B, T] step of each position, from 0
        teacher = DistillationLoss(batch, self.head, uses=steps if self.ahead else 1, unbiased=self.ahead)
        total = batch.states.new_zeros(())
        logged: dict[str, Tensor] = {}
        for predicted, weights in self.predictions(batch, index, steps, offset):
            metrics = teacher.loss(predicted, self.regression, self.classification, weights=weights, logged=index == 0)
            total, logged = total + metrics["loss"], logged or metrics
        return logged | {"loss": total}

    def predictions(self, batch: Batch, index: Tensor, steps: int, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        """h_hat [B, T, D] from what earlier steps predicted, and weights [B, T] of positions, in every pass.

        Predicted states are constants where they are keys. So they are made first; then one pass over all positions has the
        gradient of every step that predicts the next position alone.
        """
        positions, mask = batch.positions, late_mask(batch, steps, offset)
        true = self.keys_values(noisy(batch.states, self.noise, "normal", batch), positions)
        simulated = self.keys_values(self.simulate(batch, true, index, mask), positions)
        keys, values = (torch.cat(pair, 2) for pair in zip(true, simulated, strict=True))
        for visible, weights in self._passes(batch.scored, index, mask, steps):
            yield self.network(batch.tokens, positions, keys, values, visible), weights

    def _passes(self, scored: Tensor, index: Tensor, mask: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """What positions see [B, T, 2 T] in every pass that has a gradient, and their weights [B, T] in the loss.

        Args:
            scored, index: [B, T] is a position in the loss, and by which step is it predicted? mask: `late_mask`.
        """
        share = [(steps - step if self.decreasing else (steps + 1) / 2) / steps for step in range(steps)]
        if not self.ahead:
            counts = torch.stack([(scored & (index == step)).sum() for step in range(steps)]).clamp(min=1)
            yield mask, (torch.tensor(share, device=index.device) / counts)[index]
            return
        true, simulated = mask.chunk(2, -1)
        for step in range(steps):
            due = scored & (index >= step)
            earlier = (index < step)[:, None, :]  # [B, 1, T] predicted by earlier steps
            yield torch.cat([true, simulated & earlier], -1), due * (share[step] / due.sum().clamp(min=1))

    def simulate(self, batch: Batch, true: tuple[Tensor, Tensor], index: Tensor, mask: Tensor) -> Tensor:
        """What all windows predict, step by step, without gradient. [B, T, D], zeros for the last step, which is no key.

        Args:
            true: keys and values of the true states, 2 x [B, H, T, Dh]. index: [B, T] the step of each position, from 0.
            mask: `late_mask`.
        """
        # Not under `no_grad`: autocast would cache copies of the weights there, which would have no gradient later.
        tokens, positions, length = batch.tokens, batch.positions, batch.tokens.shape[1]
        keys, values = (torch.cat([x.detach(), torch.zeros_like(x)], 2) for x in true)  # [B, H, 2 T, Dh]
        states = torch.zeros_like(batch.states)
        for step in range(int(index.max())):
            due = index == step
            max_due = int(due.sum(1).max())  # packed rows may have fewer: padded with others, which are dropped
            queries = due.byte().argsort(dim=1, descending=True, stable=True)[:, :max_due]  # [B, Q]
            own, at = due.gather(1, queries), positions.gather(1, queries)
            visible = mask.take_along_dim(queries[:, :, None], 1)
            predicted = self.network(tokens.gather(1, queries), at, keys, values, visible).detach()  # [B, Q, D]
            rows, columns = own.nonzero()[:, 0], queries[own]
            states[rows, columns] = predicted[own].to(states)
            for cached, new in zip((keys, values), self.keys_values(predicted, at), strict=True):
                cached[rows, :, length + columns] = new.detach().transpose(1, 2)[own].to(cached)
        return states

    def drafts(self, batch: Batch, steps: int) -> Iterator[Pick]:
        """Step j at position i attends to the true states up to i - j and, at i - j + m, to what step m predicted there.

        Step 3, T = 5, rows are queries:   true states   step 1       step 2
                                           . . . . .    . . . . .    . . . . .
                                           . . . . .    . . . . .    x . . . .
                                           . . . . .    x . . . .    . x . . .
                                           x . . . .    . x . . .    . . x . .
                                           x x . . .    . . x . .    . . . x .
        """
        positions = batch.positions
        distance = positions[:, :, None] - positions[:, None, :]  # [B, T, T] from key to query
        keys, values = self.keys_values(batch.states, positions)
        for step in range(1, steps + 1):
            own = [distance == step - earlier for earlier in range(1, step)] if self.concat else []
            mask = batch.restrict_mask(torch.cat([distance >= step, *own], -1))
            predicted = self.network(batch.tokens, positions, keys, values, mask)
            yield likeliest_at(predicted, self.target_logits)
            if self.concat:
                more = self.keys_values(predicted, positions)
                keys, values = (torch.cat(pair, 2) for pair in zip((keys, values), more, strict=True))
