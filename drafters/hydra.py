"""Hydra: Medusa's heads made sequential (arXiv:2402.05109).

A Medusa head sees one state of the target alone. Hydra's head i = 0 … K - 1 also reads the embeddings of the tokens that
were drafted before its own, so that it runs once a node, not once a cycle:

    x_i = [g_t; e(t_{t+1}); …; e(t_{t+i+1})],    h_i = R_i(x_i) + SiLU(W_i x_i),    p_hat(t_{t+i+2}) = softmax(Head(h_i))

with t_{t+1} the root, further residual blocks h + SiLU(W h) if `layers` > 1, and g_t the output at position t of one
decoder layer and a norm over the target's post-norm states (Hydra++'s prefix attention). The tree is Medusa's.

Training (section 5 and the official README): L = sum_i CE(p(t_{t+i+2}), p_hat), the target's probabilities as labels, true
tokens as inputs. `hard` adds the cross-entropy with the text, `regression` SmoothL1(f_{t+i+1}, h_i); `noise` is NEFTune's,
U(-a, a) / sqrt(T D) on the embeddings of a sequence of T tokens.

Deviations and choices: every head has the target's frozen LM head unless `head_per_level` or an official checkpoint gives
it one of its own, which has a bias there. W starts at zero (official code), its bias too (there it is random); R starts as
the identity on g, so that training starts from states like the target's (there it is random), and is that identity for
good unless `projected` (ours: the matrices R are as large as the W; official files have them). The norm of g starts with
one factor, as large as the target's are, which f has had already (there: with ones). For the default target, whose drafters
are shipped in 10 MB each, there are three heads and an MLP of 640 units in the decoder layer (conf/drafter/hydra.yaml),
instead of four and the target's 1536: 5.0 M numbers instead of 8.2 M, of which the W of four heads take 4.6 M. A draft ends
a level earlier. The official code repeats one and the same block where `layers` > 2; here each has its own weights.
`dropout` comes before every block, there before the LM head as well. A position counts as in Medusa.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.base import llama_config
from drafters.layers import PrefixLayers
from drafters.medusa import Medusa, residual_blocks
from specbench.common.types import Depth, Name, Share, Text, Units, Weight
from specbench.engine.batch import DRAFT, by_row, share_network
from specbench.engine.interface import Batch, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target
from specbench.engine.weights import Checkpoint

EMBEDDING = "input_embed_fn.weight"  # the target's, in files of the official code
BLOCK = re.compile(r"hydra_mlp\.(?P<head>\d+)\.(?P<index>\d+)\.(?P<kind>linear|res_connection)\.(?P<part>weight|bias)")
OUTPUT = re.compile(r"hydra_lm_head\.(?P<head>\d+)\.1\.(?P<part>weight|bias)")


class Hydra(PrefixLayers, Medusa):
    """K sequential heads behind one decoder layer.

    Args:
        growth, heads, layers, decay: as of `Medusa`.
        projected: R is a trained matrix; False: R(x) = g.
        intermediate_size: width of the decoder layer's MLP, None: the target's.
        classification, hard, regression: weights of the loss's terms.
        noise: a of the noise while training. dropout: share of a block's inputs that are dropped while training.
        medusa: options of `Medusa`.
    """

    phased = ("decay", "classification", "hard", "regression", "noise", "dropout")
    shape_options = (*Medusa.shape_options, "projected", "intermediate_size")
    parallel = False
    observed = ("level", "logits")
    networks = ("prefix", "network")
    formats: tuple[str, ...] = ()

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        heads: Depth = 4,
        decay: Weight = 1.0,
        projected: bool = False,
        intermediate_size: Units | None = None,
        classification: Weight = 1.0,
        hard: Weight = 0.0,
        regression: Weight = 0.0,
        noise: Weight = 0.0,
        dropout: Share = 0.0,
        **medusa: Any,
    ):
        super().__init__(name, growth, weights, heads, decay=decay, **medusa)
        self.projected, self.intermediate_size = projected, intermediate_size
        self.classification, self.hard, self.regression = classification, hard, regression
        self.noise, self.dropout = noise, dropout

    def bind(self, target: Target) -> None:
        super().bind(target)
        parts = [part for part in (self.blocks, self.shortcuts, self.outputs, self.corrections) if len(part)]
        sizes = [sum(p.numel() for part in head for p in part.parameters()) for head in zip(*parts, strict=True)]
        self.active_parameters -= sum(sizes) - max(sizes)  # a pass runs one head

    def build(self, target: Target) -> None:
        super().build(target)
        width = target.hidden_size
        self.build_prefix(llama_config(target, 1, intermediate_size=self.intermediate_size), 1, target.decoder.norm)
        blocks: Any
        for level, blocks in enumerate(self.blocks):
            blocks[0] = nn.Linear((level + 2) * width, width)
            for parameter in blocks[0].parameters():
                nn.init.zeros_(parameter)
        widths = [(level + 2) * width for level in range(self.heads if self.projected else 0)]
        self.shortcuts = nn.ModuleList(nn.Linear(inputs, width) for inputs in widths)
        for shortcut in self.shortcuts:
            nn.init.eye_(shortcut.weight)  # type: ignore[arg-type]
            nn.init.zeros_(shortcut.bias)  # type: ignore[arg-type]

    # Published weights ---------------------------------------------------------------------------------------------------

    def infer_shape(self, checkpoint: Checkpoint) -> None:
        """Heads, blocks and output layers: by the tensors."""
        blocks = [match for name in checkpoint.tensors if (match := BLOCK.fullmatch(name))]
        if not blocks or not any("res_connection" in match.string for match in blocks):
            raise checkpoint.refuse("no tensor is named like a sequential head's (hydra_mlp.0.1.res_connection.weight)")
        if not any(name.startswith("prefix_embeding_layer.") for name in checkpoint.tensors):
            raise checkpoint.refuse("it has no prefix layer; only hydra_head_arch=prefix-mlp can be read")
        if offset := checkpoint.config.get("hidden_state_offset"):
            raise checkpoint.refuse(f"its hidden_state_offset={offset}; only heads over the last state can be read")
        self.heads = self.deepest = 1 + max(int(match["head"]) for match in blocks)
        self.layers = (1 + max(int(match["index"]) for match in blocks)) // 2
        self.head_per_level = any(OUTPUT.fullmatch(name) for name in checkpoint.tensors)
        self.head_bias = "hydra_lm_head.0.1.bias" in checkpoint.tensors
        self.projected, self.head_rank, self.intermediate_size = True, 0, None
        if (gate := checkpoint.tensors.get("prefix_embeding_layer.layers.0.mlp.gate_proj.weight")) is not None:
            self.intermediate_size = len(gate)

    def map_checkpoint(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """The official names. Blocks lie behind dropouts: block i of a head is number 2 i + 1 there."""
        named = {}
        for name in checkpoint.tensors:
            if match := BLOCK.fullmatch(name):
                block = (int(match["index"]) - 1) // 2
                own = f"blocks.{match['head']}.{block}" if match["kind"] == "linear" else f"shortcuts.{match['head']}"
                named[name] = f"{own}.{match['part']}"
            elif match := OUTPUT.fullmatch(name):
                named[name] = f"outputs.{match['head']}.{match['part']}"
            elif name.startswith("prefix_embeding_layer."):
                named[name] = name.replace("prefix_embeding_layer.", "prefix_", 1)
        if EMBEDDING in checkpoint.tensors:
            checkpoint.require_shared("embedding", checkpoint.tensors[EMBEDDING], self.embedding.weight)
        return {own: checkpoint.tensors[theirs] for theirs, own in named.items()}, {*named, EMBEDDING}

    def network(self, states: Tensor, level: int) -> Tensor:
        """h of head `level` (from 0) for inputs x. [..., (level + 2) D] -> [..., D]"""
        blocks: Any = self.blocks[level]
        dropout = self.dropout * self.training
        x = F.dropout(states, dropout, training=dropout > 0)
        short = self.shortcuts[level](x) if self.projected else x[..., : self.head.in_features]
        return residual_blocks(short + F.silu(blocks[0](x)), blocks[1:], dropout)

    def for_sequences(self, count: int, lockstep: Any) -> list[Any]:
        rows = super().for_sequences(count, lockstep)
        share_network(self, rows, lockstep, "prefix")
        heads = [by_row(partial(self.network, level=level)) for level in range(self.heads)]
        for row in rows:
            row.network = lambda states, level: lockstep.call(heads[level], DRAFT, states)
        return rows

    # Decoding -----------------------------------------------------------------------------------------------------------

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Run the decoder layer over the verified states; the last one's output, with the bonus, drafts level 1."""
        prefix = self.last_prefix(states.last, states.positions)
        root = self.embedding(states.tokens.new_full((1,), bonus)).to(prefix)
        self.level = torch.cat([prefix[None], root], -1)  # [F, …] x of the nodes expanded last
        self.first = -1  # their first row
        self.logits = self.output(self.network(self.level, 0), 0)[0]

    def root_logits(self) -> Tensor:
        return self.logits

    def expand(self, tokens: Tensor, parent_rows: Tensor, depth: int, visible: Tensor) -> Tensor:
        above, first = self.level[parent_rows - self.first], self.first + len(self.level)
        self.level, self.first = torch.cat([above, self.embedding(tokens).to(above)], -1), first
        return self.output(self.network(self.level, depth), depth)

    # Training -----------------------------------------------------------------------------------------------------------

    def inputs(self, batch: Batch) -> Callable[[int, Tensor, Tensor], Tensor]:
        """x of chosen states, from the text's own tokens; the last one stands for tokens beyond the end."""
        prefix = self.prefix(batch.states, batch.positions, batch.causal_mask(), None)
        embedded, last = self._noisy(self.embedding(batch.tokens).to(prefix), batch), batch.tokens.shape[1] - 1

        def read(level: int, rows: Tensor, columns: Tensor) -> Tensor:
            tokens = [embedded[rows, (columns + 1 + i).clamp(max=last)] for i in range(level + 1)]
            return torch.cat([prefix[rows, columns], *tokens], -1)

        return read

    def _noisy(self, embedded: Tensor, batch: Batch) -> Tensor:
        """NEFTune's noise on embeddings while training. [B, T, D]"""
        if not self.noise or not self.training:
            return embedded
        numbers = batch.sequence_lengths[..., None] * embedded.shape[-1]
        return embedded + (torch.rand_like(embedded) * 2 - 1) * (self.noise / numbers**0.5).to(embedded)

    def head_loss(
        self, cross_entropy: Tensor, logits: Tensor, hidden: Tensor, states: Tensor, count: int, vocabulary: Tensor | None
    ) -> Tensor:
        rows = self.head.weight if vocabulary is None else self.head.weight[vocabulary]
        p = F.linear(states, rows).float().softmax(-1)
        soft = -(p * logits.log_softmax(-1)).sum(-1)
        smooth_l1 = F.smooth_l1_loss(hidden.float(), states.float(), reduction="none").mean(-1)
        each = (self.classification * soft + self.regression * smooth_l1)[:count]
        return self.hard * cross_entropy + each.sum() / max(1, count)
