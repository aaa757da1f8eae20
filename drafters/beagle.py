"""Beagle: cross-attention from tokens to states (arXiv:2505.24544).

One block. The query of position n is its own token, keys and values are the states of positions before it (strictly, so
that no shift between tokens and states is needed):

    y_n = e(t_n) + Attn(Q: e(t_n); K, V: h_j, j < n),   h_hat_n = y_n + MLP(y_n),    p_hat(t_{n+1}) = softmax(Head(h_hat_n))

While drafting, h_hat of a node joins the keys of its descendants (`concat`), or no node sees any but true states.

Training (section 4): L = 10 SmoothL1(f, h_hat) + CE(p, p_hat), over windows of k positions with a random offset, first in
the early stage, then in the late one (A.3: ten epochs each). Noise N(0, 0.2) is added to the states that are keys (A.3).

    early   every query of a window sees the true states before the window, nothing of it (block attention)
    late    step i = 1 … s computes the i-th position of all windows at once, which sees the true states before its window
            and what the steps before predicted inside it; its loss counts s - i + 1 times

          true states | window | its predicted states        query 2 of the window, early:   x x x . .
            x x x     |  . .   |                             the same, late, step 2:          x x x . .  +  p .

Deviations and choices: RMSNorm on the embedding before Q and before the MLP, none on states, which are normed already,
none on the output; RoPE with the query at n and keys at j; SwiGLU as in Llama (the paper leaves all of this open). Every
query head has keys and values of its own (equation 2; the paper leaves out whether they are grouped): in the target's
groups the output would hold no more than those few dimensions of a state, with the token alone in the residual. 0.2 is
the noise's standard deviation; targets of the regression stay clean. Positions before the first whole window see everything
before themselves. Losses are means over scored positions instead of sums over windows. Predicted states are detached: they
are made first, and the loss and gradient of all late steps come from one pass over them, so that memory does not grow with
s. The late window is s (the paper gives 4 and 3 for s, 5 for k).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from drafters.base import TrainedDrafter, llama_config, noisy
from drafters.distillation import DistillationLoss
from drafters.layers import attend, rotate, split_heads
from specbench.common.types import Count, Name, Text, Weight
from specbench.engine.cache import KVCache
from specbench.engine.interface import Batch, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target


class Beagle(TrainedDrafter):
    """One cross-attention block.

    Args:
        name: as tables show it. growth: of its trees. weights: folder of trained weights.
        concat: nodes see the predicted states of their ancestors; False: true states only.
        grouped: keys and values in the target's groups of heads; False: one pair for every query head (equation 2).
        stage: of the training, `early` or `late`.
        window: k of the early stage. steps: s of the late stage.
        decreasing: late steps weigh s - i + 1; False: all alike, with the same sum.
        noise: standard deviation of the normal noise on states while training.
        regression, classification: weights of the two loss terms.
        vocabulary: see `TrainedDrafter`.
    """

    phased = ("stage", "window", "steps", "decreasing", "noise", "regression", "classification")

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        concat: bool = True,
        grouped: bool = False,
        stage: Literal["early", "late"] = "early",
        window: Count = 5,
        steps: Count = 4,
        decreasing: bool = True,
        noise: Weight = 0.2,
        regression: Weight = 10.0,
        classification: Weight = 1.0,
        vocabulary: Count | None = None,
    ):
        super().__init__(name, growth, weights, vocabulary)
        self.concat, self.grouped, self.window, self.steps = concat, grouped, window, steps
        self.decreasing, self.noise = decreasing, noise
        self.regression, self.classification = regression, classification
        self.stage = stage

    def build(self, target: Target) -> None:
        config = llama_config(target, layers=1)
        width, self.head_dim = target.hidden_size, config.head_dim
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads if self.grouped else self.heads
        self.embedding, self.head = target.embedding, target.head
        self.target_logits = target.logits
        self.query_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.q = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.mlp_norm, self.mlp = LlamaRMSNorm(width, config.rms_norm_eps), LlamaMLP(config)
        self.rotary = LlamaRotaryEmbedding(config)
        self.cache = KVCache(1, 0)

    def keys_values(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """States as seen by queries. [B, S, D], [B, S] -> 2 x [B, H, S, Dh]"""
        k, v = (split_heads(part(states), self.head_dim) for part in (self.k, self.v))
        return rotate(k, self.rotary, positions), v

    def network(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """h_hat of B x T queries. tokens, positions [B, T]; keys, values [B, H, S, Dh]; mask [B or 1, T, S] -> [B, T, D]"""
        e = self.embedding(tokens).to(keys)
        q = rotate(split_heads(self.q(self.query_norm(e)), self.head_dim), self.rotary, positions)
        y = e + self.o(attend(q, keys, values, mask))
        return y + self.mlp(self.mlp_norm(y))

    # Decoding -----------------------------------------------------------------------------------------------------------

    def reset(self, capacity: int) -> None:
        self.cache.begin(capacity + self.growth.rows + 1)
        self.stable = 0  # cache rows of true states

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Append the true states; the bonus, the next root, queries them all."""
        self.cache.truncate(self.stable)
        self._remember(states.last, states.positions)
        self.stable = self.cache.length
        root = states.tokens.new_full((1,), bonus)
        self.logits = self._draft(root, torch.full_like(root, self.stable), None)[0]

    def root_logits(self) -> Tensor:
        return self.logits

    def expand(self, tokens: Tensor, parents: Tensor, depth: int, visible: Tensor) -> Tensor:
        prefix = visible.new_ones(tokens.shape[0], self.stable + 1)  # true states and the root's
        ancestors = visible[:, : visible.shape[1] - tokens.shape[0]]  # strictly: a node does not see itself
        mask = torch.cat([prefix, ancestors], 1) if self.concat else None
        return self._draft(tokens, torch.full_like(tokens, self.stable + depth), mask)

    def _draft(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Query the cache with N tokens; with `concat`, append what they predict. mask [N, S] -> logits [N, V]"""
        keys, values = self.cache.rows(0, 0, self.cache.length)
        mask = None if mask is None else mask[None]
        predicted = self.network(tokens[None], positions[None], keys[None], values[None], mask)[0]
        if self.concat:
            self._remember(predicted, positions)
        return self.target_logits(predicted)

    def _remember(self, states: Tensor, positions: Tensor) -> None:
        self.cache.append(0, *self.keys_values(states[None], positions[None]))
        self.cache.keep()

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens up to i and states before i predict f_i, in windows; one offset a batch."""
        stage, window = (self.early, self.window) if self.stage == "early" else (self.late, self.steps)
        return stage(batch, window, int(torch.randint(window, ())))

    def early(self, batch: Batch, window: int, offset: int) -> dict[str, Tensor]:
        """Block attention over true states; see `DistillationLoss` for the objective."""
        keys, values = self.keys_values(noisy(batch.states, self.noise, "normal", batch), batch.positions)
        mask = early_mask(batch, window, offset)
        predicted = self.network(batch.tokens, batch.positions, keys, values, mask)
        return DistillationLoss(batch, self.head).loss(predicted, self.regression, self.classification)

    def late(self, batch: Batch, steps: int, offset: int) -> dict[str, Tensor]:
        """The loss of every simulated step, earlier steps counting more; step 1's metrics are logged."""
        predicted, index = self.predict_windows(batch, steps, offset)
        # a step's loss is a mean over its positions
        counts = torch.stack([(batch.scored & (index == step)).sum() for step in range(steps)]).clamp(min=1)
        worth = steps - index if self.decreasing else (steps + 1) / 2
        weights = worth / (steps * counts[index])  # [B, T]
        teacher = DistillationLoss(batch, self.head)
        return teacher.loss(predicted, self.regression, self.classification, weights=weights, logged=index == 0)

    def predict_windows(self, batch: Batch, steps: int, offset: int) -> tuple[Tensor, Tensor]:
        """h_hat [B, T, D] of every position, each from what the steps before predicted, and its step, from 0, [B, T].

        What is predicted counts as a constant where it is a key. So it is made first, and one pass over all positions then
        has every step's gradient.
        """
        positions, mask = batch.positions, late_mask(batch, steps, offset)
        index = positions - window_starts(positions, steps, offset)
        true = self.keys_values(noisy(batch.states, self.noise, "normal", batch), positions)
        simulated = self.keys_values(self.simulate(batch, true, index, mask), positions)
        keys, values = (torch.cat(pair, 2) for pair in zip(true, simulated, strict=True))
        return self.network(batch.tokens, positions, keys, values, mask), index

    def simulate(self, batch: Batch, true: tuple[Tensor, Tensor], index: Tensor, mask: Tensor) -> Tensor:
        """What all windows predict, position by position, but for the last step, whose predictions are nobody's keys.

        Args:
            true: keys and values of the true states, 2 x [B, H, T, Dh]. index: [B, T] the step of each position, from 0.
            mask: `late_mask`.

        Returns:
            [B, T, D], zeros for the last step; without gradient. (Not under `no_grad`: autocast would keep its copies of
            the weights from there, and they would have no gradient later.)
        """
        tokens, positions, length = batch.tokens, batch.positions, batch.tokens.shape[1]
        keys, values = (torch.cat([x.detach(), torch.zeros_like(x)], 2) for x in true)  # [B, H, 2 T, Dh]
        found = torch.zeros_like(batch.states)
        for step in range(int(index.max())):
            due = index == step
            most = int(due.sum(1).max())  # packed rows may have fewer: filled up with others, which are dropped
            queries = due.byte().argsort(dim=1, descending=True, stable=True)[:, :most]  # [B, Q]
            own, at = due.gather(1, queries), positions.gather(1, queries)
            seen = mask.take_along_dim(queries[:, :, None], 1)
            predicted = self.network(tokens.gather(1, queries), at, keys, values, seen).detach()  # [B, Q, D]
            rows, places = own.nonzero()[:, 0], queries[own]
            found[rows, places] = predicted[own].to(found)
            for kept, new in zip((keys, values), self.keys_values(predicted, at), strict=True):
                kept[rows, :, length + places] = new.detach().transpose(1, 2)[own].to(kept)
        return found

    def drafts(self, batch: Batch, steps: int) -> Iterator[Callable[[Tensor], Tensor]]:
        """Step j at place i sees the true states up to i - j and, at i - j + m, what step m predicted there.

        Step 3, T = 5, rows are queries:   true states   step 1       step 2
                                           . . . . .    . . . . .    . . . . .
                                           . . . . .    . . . . .    x . . . .
                                           . . . . .    x . . . .    . x . . .
                                           x . . . .    . x . . .    . . x . .
                                           x x . . .    . . x . .    . . . x .
        """
        positions = batch.positions
        behind = positions[:, :, None] - positions[:, None, :]  # [B, T, T] how far a key lies behind a query
        keys, values = self.keys_values(batch.states, positions)
        for step in range(1, steps + 1):
            own = [behind == step - earlier for earlier in range(1, step)] if self.concat else []
            mask = batch.restrict_mask(torch.cat([behind >= step, *own], -1))
            predicted = self.network(batch.tokens, positions, keys, values, mask)
            yield partial(self._best, predicted)
            if self.concat:
                more = self.keys_values(predicted, positions)
                keys, values = (torch.cat(pair, 2) for pair in zip((keys, values), more, strict=True))

    def _best(self, predicted: Tensor, places: Tensor) -> Tensor:
        return self.target_logits(predicted[places]).argmax(-1)


def window_starts(positions: Tensor, window: int, offset: int) -> Tensor:
    """The first position of each one's window; before the first whole window, of a window of its own. [B, T] -> [B, T]"""
    return torch.where(positions < offset, positions, positions - (positions - offset) % window)


def early_mask(batch: Batch, window: int, offset: int) -> Tensor:
    """[B, T, T] bool: a query sees the states before its window, of its own sequence.

    length 6, window 2, offset 1      . . . . . .
                                      x . . . . .
                                      x . . . . .
                                      x x x . . .
                                      x x x . . .
                                      x x x x x .
    """
    starts = window_starts(batch.positions, window, offset)
    return batch.restrict_mask(batch.positions[:, None, :] < starts[:, :, None])


def late_mask(batch: Batch, window: int, offset: int) -> Tensor:
    """[B, T, 2 T] bool: true states as in `early_mask`, then predicted ones of the same window, strictly before."""
    true = early_mask(batch, window, offset)
    before = batch.positions[:, None, :] < batch.positions[:, :, None]
    return torch.cat([true, batch.restrict_mask(before) & ~true], -1)
