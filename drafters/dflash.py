"""DFlash: a block of masks filled in one forward (arXiv:2602.06036).

With h^l_i the output of the target's layer l at position i, verified tokens are seen as context features

    c_i = norm(W_fc [h^{l_1}_i; …; h^{l_F}_i]),    l_1 … l_F evenly spaced from 1 to L - 3

and the block [t_n, MASK × K], K = `block` - 1, from the root t_n on goes through a few decoder layers. The queries of a
layer are the block's; its keys and values are those of [c_0 … c_{n-1} | block], by the layer's own projections: a feature
enters every layer alike, and the block attends to all of itself, in both directions. Slot k gives the distribution of
t_{n+k},

    p^(k)(t_{n+k}) = softmax(LMHead(norm(x_k))),    k = 1 … K

whatever stands in between: all levels are drafted by one forward and one product with the target's head over K rows, and
`engine.marginal_tree` (DDTree) finds the tree of largest value in them. The cache keeps keys and values of context alone.

Training: blocks of up to `anchors` positions of a row, drawn anew, side by side in one pass. The block at anchor a sees

    context strictly before a, and itself     x . . | x x x . . .    three positions, blocks of 3 at 1 and 2; columns are
                                              x x . | . . . x x x    c_0 … c_2, then both blocks, whose rows are alike

    L = sum_k w_k CE(p(. | t_0 … t_{a+k-1}), p^(k)) / sum_k w_k,    w_k = exp(-(k - 1) / gamma), gamma = 4 for blocks of 8

Deviations and choices: labels are the target's probabilities along the text, with less noise than its tokens, which the
paper takes (an option of speculators); of text that was sampled at a temperature below 1 they are flatter than these. MASK
is no id but a vector of the drafter's own, trained, which begins as the mean embedding: the embedding is the target's,
frozen, and not every vocabulary has an unused id. Layers are Llama's of the target's shape, without norms of queries and
keys (authors: Qwen3's), with full attention. Where the target's layers are fewer than features, each is read once. At
temperatures above 0 the tree's candidates are deterministic (one-hot q): siblings' tokens do not depend on the path, so
there is no q to draw a whole path from. The authors draft one sequence of tokens; `tree=chain` does. One layer by default,
for small targets (authors: five).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from drafters.base import Pick, likeliest, llama_config
from drafters.distillation import DistillationLoss
from drafters.layers import split_heads
from drafters.levels import LevelDrafter
from specbench.common.types import Ids, Layers, Name, Nodes, Positive, Text, Times, Units
from specbench.engine.backends.fused_llama import rotate
from specbench.engine.batch import share_network
from specbench.engine.cache import KVCache
from specbench.engine.interface import Batch, Taps, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target

ANCHORS = 64  # blocks of `drafts` that run together


class DFlash(LevelDrafter):
    """A few layers over context features and one block.

    Args:
        block: tokens of the block, the root included. layers: decoder layers. features: target layers read.
        intermediate_size: width of the layers' MLPs, None: the target's.
        gamma: of the loss's weights. anchors: blocks a row in training.
    """

    batches = True
    phased = ("gamma", "anchors")
    shape_options = ("block", "layers", "features", "intermediate_size")

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        block: Nodes = 8,
        layers: Layers = 1,
        features: Layers = 5,
        intermediate_size: Units | None = None,
        gamma: Positive = 4.0,
        anchors: Times = 512,
        vocabulary: Ids | None = None,
    ):
        self.deepest = block - 1
        super().__init__(name, growth, weights, vocabulary)
        self.require_depth(f"drafter.block={block} drafts {self.deepest} levels")
        self.layers, self.features, self.intermediate_size = layers, features, intermediate_size
        self.gamma, self.anchors = gamma, anchors

    def build(self, target: Target) -> None:
        config, width = llama_config(target, self.layers, intermediate_size=self.intermediate_size), target.hidden_size
        self.share_ends(target)
        self.taps = Taps(hidden=feature_layers(target.layers, self.features), last=False)
        self.head_dim = config.head_dim
        self.fc = nn.Linear(len(self.taps.hidden) * width, width, bias=False)
        self.context_norm, self.norm = (LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.stack = nn.ModuleList([LlamaDecoderLayer(config, layer_idx=i) for i in range(self.layers)])
        self.rotary = LlamaRotaryEmbedding(config)
        self.mask = nn.Parameter(self.embedding.weight.detach().float().mean(0))
        self.cache = KVCache(self.layers, 0)

    def context(self, hidden: list[Tensor], positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of verified tokens, by layer. hidden: F x [B, T, D]; positions [B, T] -> 2 x [B, H, T, Dh]"""
        features = self.context_norm(self.fc(torch.cat(hidden, -1).to(self.mask)))

        def of(layer: Any) -> tuple[Tensor, Tensor]:
            k, v = (split_heads(part(features), self.head_dim) for part in (layer.self_attn.k_proj, layer.self_attn.v_proj))
            cos, sin = self.rotary(k, positions)
            return rotate(k, cos, sin, heads=1), v

        return [of(layer) for layer in self.stack]

    def blocks(self, roots: Tensor) -> Tensor:
        """The layers' input for blocks end to end. roots: [B, n] ids -> [B, n * block, D]"""
        masks = self.mask.expand(*roots.shape, self.deepest, -1)
        return torch.cat([self.embedding(roots).to(self.mask)[:, :, None], masks], 2).flatten(1, 2)

    def network(self, x: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """What the head reads of every slot. x [B, N, D], positions [B, N], mask [B, 1, N, S], context in the cache"""
        rotary = self.rotary(x, positions)
        for layer in self.stack:
            x = layer(x, attention_mask=mask, past_key_values=cache, position_embeddings=rotary)
        return self.norm(x)

    def for_sequences(self, count: int, lockstep: Any) -> list[Any]:
        rows = super().for_sequences(count, lockstep)
        share_network(self, rows, lockstep)
        return rows

    # Decoding -----------------------------------------------------------------------------------------------------------

    def reset(self, capacity: int) -> None:
        self.cache.begin(capacity + 1 + self.deepest)

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Cache the context of what was verified; then run the block whose root is the bonus."""
        hidden = [states.hidden[layer][None] for layer in self.taps.hidden]
        for index, (k, v) in enumerate(self.context(hidden, states.positions[None])):
            self.cache.append(index, k, v)
        self.cache.keep()
        x = self.blocks(states.tokens.new_full((1, 1), bonus))
        size, length = x.shape[1], self.cache.length
        positions = torch.arange(length, length + size, device=x.device)
        everything = torch.ones(1, 1, size, length + size, dtype=torch.bool, device=x.device)
        out = self.network(x, positions[None], everything, self.cache)
        self.cache.truncate(length)  # the block's own rows
        self.levels = self.target_logits(out[0, 1:])

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Slot k of a block at an anchor predicts what the target does k - 1 tokens behind it; `agreement` is slot 1's."""
        anchors, chosen = self._draw(batch)
        predicted = self.slots(batch, anchors).flatten(1, 2)  # [B, n * K, D]
        places = anchors[:, :, None] + torch.arange(self.deepest, device=anchors.device)  # [B, n, K] states that are taught
        inside = places < batch.tokens.shape[1] - 1
        places = places.clamp(max=batch.tokens.shape[1] - 2)
        scored = take(batch.scored, places) & take(batch.same_sequence(1), places) & inside & chosen[:, :, None]
        scored = scored.int().cummin(-1).values.bool()  # all tokens drafted up to there count
        weights = torch.exp(-torch.arange(self.deepest, device=anchors.device) / self.gamma) * scored  # [B, n, K]
        first = torch.zeros_like(scored)
        first[:, :, 0] = True
        flat = places.flatten(1)
        states = batch.states.gather(1, flat[:, :, None].expand(-1, -1, batch.states.shape[-1]))
        counted = scored.flatten(1)
        taught = Batch(flat, states, counted, counted, batch.vocabulary, batch.vocabulary_bias)
        weights = (weights / weights.sum().clamp(min=1e-9)).flatten(1)
        teacher = DistillationLoss(taught, self.head, unbiased=True)  # a block does not know the text behind its anchor
        return teacher.loss(predicted, 0.0, 1.0, weights=weights, logged=first.flatten(1))

    def _draw(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Anchors in random places, in order: columns [B, n], and which of them count [B, n]."""
        usable = batch.scored[:, :-1] & batch.same_sequence(1)  # [B, T - 1]
        drawn = torch.rand(usable.shape, device=usable.device) + usable
        columns = drawn.topk(min(self.anchors, usable.shape[1]), -1).indices.sort(-1).values
        return columns, usable.gather(1, columns)

    def slots(self, batch: Batch, anchors: Tensor) -> Tensor:
        """What the head reads of every slot behind the roots. anchors: columns [B, n] -> [B, n, K, D]"""
        hidden = [batch.hidden[layer] for layer in self.taps.hidden]
        cache = DynamicCache()
        for index, (k, v) in enumerate(self.context(hidden, batch.positions)):
            cache.update(k, v, index)
        size = 1 + self.deepest
        positions = batch.positions.gather(1, anchors)[:, :, None] + torch.arange(size, device=anchors.device)
        mask = block_mask(anchors, batch.tokens.shape[1], size, batch.starts)
        x = self.blocks(batch.tokens.gather(1, anchors))
        out = self.network(x, positions.flatten(1), mask[:, None], cache)
        return out.unflatten(1, (-1, size))[:, :, 1:]

    def drafts(self, batch: Batch, steps: int) -> Iterator[Pick]:
        """Step j is slot j of the block j - 1 positions back; there are no more steps than slots."""
        every = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        out = torch.cat([self.slots(batch, part) for part in every.split(ANCHORS, 1)], 1)  # [B, T, K, D]
        for step in range(1, min(steps, self.deepest) + 1):
            yield partial(self._drafted, out, step)

    def _drafted(self, out: Tensor, step: int, chosen: Tensor, k: int) -> Tensor:
        """Slot `step`'s tokens after each chosen position. out [B, T, K, D], chosen [B, T] -> [M, k]"""
        row, column = chosen.nonzero(as_tuple=True)
        return likeliest(out[row, (column - step + 1).clamp(min=0), step - 1], self.target_logits, k)


def feature_layers(layers: int, count: int) -> tuple[int, ...]:
    """`count` of a target's layers, evenly spaced from its second to its third last, each once."""
    first, last = min(1, layers - 1), max(layers - 3, 0)
    return tuple(sorted({round(first + (last - first) * i / max(1, count - 1)) for i in range(count)}))


def take(x: Tensor, places: Tensor) -> Tensor:
    """Values of a row at some columns. x [B, T], places [B, n, K] -> [B, n, K]"""
    return x.gather(1, places.flatten(1)).view(places.shape)


def block_mask(anchors: Tensor, length: int, size: int, starts: Tensor | None) -> Tensor:
    """What blocks attend to: context of their sequence before the anchor, and themselves.

    Args:
        anchors: columns [B, n] at which blocks of `size` begin. starts: [B, T] of each column's sequence; None: 0.

    Returns:
        [B, n * size, length + n * size] bool, context first.
    """
    column = torch.arange(length, device=anchors.device)
    before = column < anchors[:, :, None]  # [B, n, T]
    if starts is not None:
        before = before & (column >= starts.gather(1, anchors)[:, :, None])
    own = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device)
    own = own.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return torch.cat([before.repeat_interleave(size, 1), own.expand(len(anchors), -1, -1)], 2)
