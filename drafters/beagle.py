"""Beagle: cross-attention from tokens to states (arXiv:2505.24544).

One block. The query of position n is its own token, keys and values are the states of positions before it (strictly, so
that no shift between tokens and states is needed):

    y_n = e(t_n) + Attn(Q: e(t_n); K, V: h_j, j < n),   h_hat_n = y_n + MLP(y_n),    p_hat(t_{n+1}) = softmax(Head(h_hat_n))

While drafting, h_hat of a node joins the keys of its descendants (`concat`), or no node sees any but true states.

Training (section 4): L = 10 SmoothL1(f, h_hat) + CE(p, p_hat), over windows of k positions with a random offset, the first
half of it early, the second late.

    early   every query of a window sees the true states before the window, nothing of it (block attention)
    late    step i = 1 … s computes the i-th position of all windows at once, which sees the true states before its window
            and what the steps before predicted inside it; its loss counts s - i + 1 times

          true states | window | its predicted states        query 2 of the window, early:   x x x . .
            x x x     |  . .   |                             the same, late, step 2:          x x x . .  +  p .

Deviations and choices: RMSNorm on the embedding before Q and before the MLP, none on states, which are normed already,
none on the output; RoPE with the query at n and keys at j; SwiGLU as in Llama (the paper leaves all of this open).
Positions before the first whole window see everything before themselves. Losses are means over scored positions instead
of sums over windows. Predicted states are detached, and each late step is recomputed in the backward pass, so that
memory does not grow with s. The late window is s (the paper gives 4 and 3 for s, 5 for k).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from drafters.blocks import Teacher, TrainedDrafter, attend, llama_config, rotate, split_heads, window_mask
from specbench.engine.cache import KVCache
from specbench.engine.grow import Growth
from specbench.engine.interface import Batch, TargetStates
from specbench.engine.target import Target


class Beagle(TrainedDrafter):
    """One cross-attention block.

    Args:
        name: as tables show it. growth: of its trees. weights: folder of trained weights.
        concat: nodes see the predicted states of their ancestors; False: true states only.
        late_from: share of the training after which the late stage begins; above 1 never.
        window: k of the early stage. steps: s of the late stage.
        decreasing: late steps weigh s - i + 1; False: all alike, with the same sum.
        regression, classification: weights of the two loss terms.
    """

    def __init__(
        self,
        name: str,
        growth: Growth,
        weights: str | None = None,
        concat: bool = True,
        late_from: float = 0.5,
        window: int = 5,
        steps: int = 4,
        decreasing: bool = True,
        regression: float = 10.0,
        classification: float = 1.0,
    ):
        super().__init__(name, growth, weights)
        self.concat, self.late_from, self.window, self.steps = concat, late_from, window, steps
        self.decreasing, self.regression, self.classification = decreasing, regression, classification

    def build(self, target: Target) -> None:
        config = llama_config(target, layers=1)
        width, self.head_dim = target.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
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
        stage, window = (self.early, self.window) if batch.progress < self.late_from else (self.late, self.steps)
        return stage(batch, window, int(torch.randint(window, ())))

    def early(self, batch: Batch, window: int, offset: int) -> dict[str, Tensor]:
        """Block attention over true states; see `Teacher` for the objective."""
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        keys, values = self.keys_values(batch.states, positions)
        mask = window_mask(batch.tokens.shape[1], window, offset, batch.tokens.device)
        predicted = self.network(batch.tokens, positions, keys, values, mask[None])
        return Teacher(batch, self.head).loss(predicted, self.regression, self.classification)

    def late(self, batch: Batch, steps: int, offset: int) -> dict[str, Tensor]:
        """The loss of every simulated step, earlier steps counting more; step 1's metrics are logged."""
        total = batch.states.new_zeros(())
        logged: dict[str, Tensor] = {}
        for step, (queries, predicted) in enumerate(self.simulate(batch.tokens, batch.states, steps, offset)):
            part = Batch(
                tokens=batch.tokens[:, queries],
                states=batch.states[:, queries],
                valid=batch.valid[:, queries],
                scored=batch.scored[:, queries],
                vocabulary=batch.vocabulary,
            )
            if part.scored.any():
                metrics = Teacher(part, self.head).loss(predicted, self.regression, self.classification)
                weight = (steps - step) / steps if self.decreasing else (steps + 1) / (2 * steps)
                total = total + weight * metrics["loss"]
                logged = logged or metrics
        return logged | {"loss": total}

    def simulate(self, tokens: Tensor, states: Tensor, steps: int, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Predict all windows position by position, each from what the steps before predicted.

        Args:
            tokens: [B, T]. states: [B, T, D] true ones.

        Yields:
            Per step: the positions [Q] it predicts, one of every window, and h_hat [B, Q, D] there.
        """
        device, length = tokens.device, tokens.shape[1]
        positions = torch.arange(length, device=device).expand_as(tokens)
        true = self.keys_values(states, positions)
        simulated = torch.zeros_like(states)  # the one predicted half, written in place
        masks = late_mask(length, steps, offset, device)

        def predict(queries: Tensor) -> Tensor:
            predicted = self.keys_values(simulated, positions)
            keys, values = (torch.cat(pair, 2) for pair in zip(true, predicted, strict=True))
            return self.network(tokens[:, queries], positions[:, queries], keys, values, masks[queries][None])

        for step in range(min(steps, length - offset)):
            queries = torch.arange(offset + step, length, steps, device=device)
            if step == 0:
                queries = torch.cat([torch.arange(offset, device=device), queries])  # those before the first window
            # Recomputed in the backward pass, from what is then a fuller `simulated`: the mask hides the rest of it.
            predicted = checkpoint(predict, queries, use_reentrant=False)
            simulated[:, queries] = predicted.detach()
            yield queries, predicted


def late_mask(length: int, window: int, offset: int, device: torch.device | None = None) -> Tensor:
    """[T, 2 T] bool: true states as in `window_mask`, then predicted ones of the same window, strictly before."""
    row = torch.arange(length, device=device)
    true = window_mask(length, window, offset, device)
    before = row[None, :] < row[:, None]
    return torch.cat([true, before & ~true], 1)
