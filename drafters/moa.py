"""MoA: a mixture of attentions over the target's keys and values (arXiv:2410.03804).

    LSA  layer self-attention: per verified token, its keys and values of all L layers are a sequence of L vectors [k; v];
         one bidirectional decoder layer over it (RoPE over the layer index), the mean, a linear map to the hidden size: g_j
    SA   one causal decoder layer over the embeddings of all tokens, drafted ones included: s_i
    CA   cross-attention: queries from s_i, keys and values from g_j of verified tokens, residual, MLP: h_hat_i, about f_i

No shift: position i reads tokens up to i and predicts f_i, hence t_{i+1}. LSA runs once a cycle, over new tokens only.

Target Layer Inference (`tli` > 0): h_hat_i is the input of the target's last `tli` layers, which run, frozen, with the
target's own keys and values of verified tokens and those of the drafted tokens; the final norm follows.

Without LSA (`lsa: False`; section 4.3, Table 5) g_j is the target's last state o_j, the input of the LM head; with
`inputs: mean` it is the linear map of the mean over layers of [k; v], LSA's own input. So we read Table 5's row "-LSA"
without o_1..o_t, of which the paper does not say what it attends to.

Training (section 3): L = SmoothL1(f, h_hat) + 0.1 KL(p || p_hat); with TLI the regression is half before the last layers,
half after (official code). A query attends to the states of tokens before its window only (T-step-bounded mask), since
while drafting the newest keys are as old as the drafted depth: a window's q-th query is at depth q, its newest key q back.

    windows of 1, 2 and 3 tokens, T = 6     . . . . . .      Every window's length is drawn anew from `periods`. Under
                                            x . . . . .      U(1, d) a query lies at depth q with a probability in
                                            x . . . . .      proportion to d - q + 1, the weight of that depth in the
                                            x x x . . .      expected accepted length (Beagle, eq. 8); all depths to d
                                            x x x . . .      occur, none beyond. The paper's U(5, 15) leaves depth 1 a
                                            x x x . . .      tenth, and two fifths to depths a tree of 6 never has.

`draws` such masks share one pass through target, LSA and SA, which take nearly all the time.

`confine` is the authors' curriculum, not in the paper: SA is confined to the tokens that CA does not see, with a
probability that falls from 1 to 0 over this share of the training (half of it, and on, in their released configuration).

Deviations and choices: keys and values of LSA and SA are as wide as the target's heads make them, twice Table 6 (2048 and
1024 instead of 1024 and 512 on Llama-3-8B). A window's own states are hidden from its first query, too (the official code
lets it attend to its own keys and still scores it); the paper's T is U(5, 15); prompt tokens are treated like all others;
true keys and values reach the last layers in training and decoding (the released code never passes them); KL as
cross-entropy (same gradient); widths in proportion to the target's, keys and values in its groups of heads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from drafters.base import Pick, TrainedDrafter, likeliest_at, llama_config
from drafters.distillation import DistillationLoss, mean
from drafters.layers import CrossAttention, unread_tokens
from drafters.lsa import LayerSelfAttention
from drafters.moa_checkpoint import map_tensors, shapes_of
from drafters.windows import random_windows
from specbench.common.errors import SpecBenchError
from specbench.common.types import Depth, Few, Ids, Name, Ratio, Share, Text, Times, Tokens, Weight
from specbench.engine.batch import DRAFT, by_row, in_one_pass, over_keys, slots_of
from specbench.engine.cache import KVCache
from specbench.engine.drafter import TimedFunction
from specbench.engine.interface import Batch, LayerRows, Taps, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.pretrained import fingerprint
from specbench.engine.target import Target
from specbench.engine.weights import Checkpoint, trained

CPU_CHUNK = 128  # tokens that go through LSA together: L times as many rows should stay in the processor's cache
CHUNK = 8192  # the same elsewhere, where few and large kernels count
MLP_RATIOS: dict[str, float] = {"lsa": 3.0, "sa": 0.125, "ca": 1.75}  # Table 6: 6144 / 2048, 512 / 4096, 7168 / 4096


class MoA(CrossAttention, TrainedDrafter):
    """Layer self-attention, self-attention, cross-attention, and optionally the target's last layers.

    Args:
        tli: target layers run on top. lsa: False: CA reads the target's last states (`inputs: last`), or the mean over
            layers of keys and values (`mean`).
        mlp_ratios: width of each part's MLP over its layer's width; missing ones are the paper's.
        regression, classification: weights of the two loss terms.
        periods: shortest and longest window; None: 1 and the depth of the trees. window: a fixed length instead.
        draws: masks a training pass.
        confine: share of the training over which the confinement of SA to its window ends; 0: none.
    """

    compresses_states = True
    networks = ("across_layers", "self_attention", "cross")
    phased = ("periods", "window", "draws", "confine", "regression", "classification")
    shape_options = ("tli", "lsa", "inputs", "mlp_ratios")

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        tli: Few = 0,
        lsa: bool = True,
        inputs: Literal["last", "mean"] = "last",
        mlp_ratios: Mapping[Literal["lsa", "sa", "ca"], Ratio] | None = None,
        regression: Weight = 1.0,
        classification: Weight = 0.1,
        periods: tuple[Depth, Depth] | None = None,
        window: Tokens | None = None,
        draws: Times = 1,
        confine: Share = 0.5,
        vocabulary: Ids | None = None,
    ):
        super().__init__(name, growth, weights, vocabulary)
        self.tli, self.use_lsa, self.runs_layers, self.batches = tli, lsa, tli > 0, tli == 0
        self.over_layers = lsa or inputs == "mean"
        self.mlp_ratios = MLP_RATIOS | dict(mlp_ratios or {})
        self.regression, self.classification = regression, classification
        self.periods, self.window = periods or (1, growth.depth), window
        self.draws, self.confine = draws, confine
        self.shapes: dict[str, dict[str, Any]] = {}  # of `lsa`, `sa` and `ca`, where a published checkpoint differs

    def timed_functions(self) -> list[TimedFunction]:
        tail: list[TimedFunction] = [(self.target, "tail", "network")] if self.runs_layers else []
        return [*super().timed_functions(), *tail]

    def build(self, target: Target) -> None:
        """LSA with its map to the hidden size, one layer of self-attention, one of cross-attention; see the module."""
        if not 0 <= self.tli < target.layers:
            raise SpecBenchError(f"drafter.tli={self.tli}: one of the target's {target.layers} layers must stay below")
        self.target, self.layers = target, target.layers
        self.share_ends(target)
        below = target.layers - self.tli
        read = range(0 if self.over_layers else below, target.layers)
        self.taps = Taps(kv=tuple(read), hidden=(below - 1,) if self.tli else (), last=not self.over_layers)
        width = target.hidden_size

        def shaped(part: str, width: int, **sizes: Any) -> Any:
            sizes |= {"hidden_size": width, "intermediate_size": int(self.mlp_ratios[part] * width)}
            return llama_config(target, layers=1, **(sizes | self.shapes.get(part, {})))

        sa, ca = shaped("sa", width), shaped("ca", width)
        if self.over_layers:
            own = llama_config(target, layers=1)
            count = 2 * own.num_key_value_heads  # keys and values of one layer
            across = {"num_attention_heads": count, "num_key_value_heads": count, "attention_bias": False}
            if self.use_lsa:
                self.lsa = LayerSelfAttention(shaped("lsa", count * own.head_dim, **across))
            self.mix = nn.Linear(count * own.head_dim, width, bias=True)
        self.sa, self.rotary = LlamaDecoderLayer(sa, layer_idx=0), LlamaRotaryEmbedding(sa)
        self.norm = LlamaRMSNorm(width, ca.rms_norm_eps)  # of queries, keys and values alike
        self.build_cross_attention(ca, width)
        if all(getattr(sa, name) == getattr(ca, name) for name in ("rope_parameters", "head_dim")):
            self.cross_rotary = self.rotary  # its angles serve both
        self.tokens_cache, self.states_cache = KVCache(1, 0), KVCache(1, 0)
        self.tail_cache = KVCache(self.tli, 0)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if self.over_layers and not self.tli:  # whose layers read the target's own keys and values
            self.taps = replace(self.taps, condensed=fingerprint(trained(self).items()))

    # Published weights ---------------------------------------------------------------------------------------------------

    def infer_shape(self, checkpoint: Checkpoint) -> None:
        """Widths from the tensors, heads and rope bases from the configuration, whichever tool wrote it."""
        self.use_lsa = "Ekv2E.weight" in checkpoint.tensors
        if not self.use_lsa:
            raise checkpoint.refuse(
                "it was trained without layer self-attention (no Ekv2E); the layout of such a file is not known here"
            )
        self.shapes = shapes_of(checkpoint)

    def map_checkpoint(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        return map_tensors(checkpoint, trained(self))

    def seen(self, last: Tensor, kv: Mapping[int, tuple[Tensor, Tensor]]) -> Tensor:
        """g of every verified token. last [B, T, D]; kv: layer -> 2 x [B, H, T, Dh] -> [B, T, D]"""
        if not self.over_layers:
            return last
        batch, heads, length, dim = kv[0][0].shape
        x = kv[0][0].new_empty(batch, length, self.layers, heads, 2, dim)
        for i in range(self.layers):
            for part, rows in enumerate(kv[i]):
                x[:, :, i, :, part] = rows.transpose(1, 2)
        return self._condensed(x.flatten(0, 1)).unflatten(0, (batch, length))

    def _condensed(self, x: Tensor) -> Tensor:
        """`across_layers` of keys and values [N, L, H, 2, Dh], some tokens at a time. -> [N, D]"""
        size = CPU_CHUNK if x.device.type == "cpu" else CHUNK
        return torch.cat([self.across_layers(part) for part in x.flatten(2).split(size)])

    def across_layers(self, x: Tensor) -> Tensor:
        """g of N tokens from their keys and values in all layers. [N, L, 2 H Dh] -> [N, D]"""
        return self.mix(self.lsa(x) if self.use_lsa else x.mean(1))

    def keys_values(self, seen: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return super().keys_values(self.norm(seen), positions)

    def cross(self, s: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """h_hat of queries. s [B, T, D]; cos, sin [B, T, Dh]; keys, values [B, H, S, Dh]; mask [B, T, S] -> [B, T, D]"""
        return self.cross_block(s, self.norm(s), (cos, sin), keys, values, mask)

    def self_attention(self, tokens: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache) -> Tensor:
        """SA of N tokens a sequence behind a cache. tokens [B, N]; cos, sin [B, N, Dh]; mask [B, 1, N, S] -> [B, N, D]"""
        x = self.embedding(tokens).to(self.q.weight)
        return self.sa(x, attention_mask=mask, past_key_values=cache, position_embeddings=(cos, sin))

    def for_sequences(self, count: int, lockstep: Any) -> list[Any]:
        rows, call = super().for_sequences(count, lockstep), lockstep.call
        layers, own, cross = by_row(self.across_layers), in_one_pass(self.self_attention), over_keys(self.cross)
        for row, cache in zip(rows, slots_of(self.tokens_cache, count, lockstep), strict=True):
            row.tokens_cache, row.states_cache = cache, KVCache(1, 0)
            row.across_layers, row.self_attention = partial(call, layers, DRAFT), partial(call, own, DRAFT)
            row.cross = partial(call, cross, DRAFT)
        return rows

    # Decoding -----------------------------------------------------------------------------------------------------------

    def reset(self, capacity: int) -> None:
        for cache in (self.tokens_cache, self.states_cache, self.tail_cache):
            cache.begin(capacity + self.growth.rows + 1)
        self.stable = 0  # rows of SA for verified tokens and the root

    def compress_states(self, states: TargetStates) -> tuple[Tensor, ...]:
        """CA's keys and values of N tokens, 2 x [N, H, Dh]: all that drafting reads of the target's layers."""
        seen = states.last
        if self.over_layers:
            rows = torch.stack(LayerRows.of(states.kv).stacked, 3)  # [L, H, N, 2, Dh]
            seen = self._condensed(rows.permute(2, 0, 1, 3, 4))
        keys, values = self.keys_values(seen[None], states.positions[None])
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def observe(self, states: TargetStates, bonus: int) -> None:
        """LSA over what was verified; SA up to the bonus, the next root, which drafts level 1."""
        keys, values = states.condensed or self.compress_states(states)
        self.states_cache.append(0, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        self.states_cache.keep()
        self.tokens_cache.truncate(self.stable)
        tokens, positions, mask = unread_tokens(states, bonus, self.stable)
        angles = self.rotary(self.q.weight, positions[None])
        s = self._extend(tokens, angles, mask)
        self.stable = self.tokens_cache.length
        self.tail_cache.truncate(0)
        none = torch.ones(1, 0, dtype=torch.bool, device=tokens.device)
        last = angles[0][:, -1:], angles[1][:, -1:]
        self.logits = self._draft(s[-1:], positions[-1:], last, none)[0]

    def expand(self, tokens: Tensor, parent_rows: Tensor, depth: int, visible: Tensor) -> Tensor:
        positions, mask = self.tokens_cache.draft_inputs(tokens, depth, visible, self.stable)
        angles = self.rotary(self.q.weight, positions[None])
        return self._draft(self._extend(tokens, angles, mask), positions, angles, visible)

    def _extend(self, tokens: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """SA of N tokens behind its cache, whose rows are kept. mask [N, S] -> [N, D]"""
        among = None if mask is None else mask[None, None]
        s = self.self_attention(tokens[None], *angles, among, self.tokens_cache)
        self.tokens_cache.keep()
        return s[0]

    def _draft(self, s: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """CA, then the target's last layers. s [N, D], angles of `rotary`, visible [N, R] -> logits [N, V]"""
        verified = self.states_cache.length
        keys, values = self.states_cache.rows(0, 0, verified)
        if self.cross_rotary is not self.rotary:
            angles = self.cross_rotary(s, positions[None])
        hidden = self.cross(s[None], *angles, keys[None], values[None], None)
        if self.tli:

            def append(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                true = self.target.cache.rows(layer, 0, verified)
                own = self.tail_cache.append(layer - self.layers + self.tli, k, v)
                return torch.cat([true[0][None], own[0]], 2), torch.cat([true[1][None], own[1]], 2)

            mask = torch.cat([visible.new_ones(visible.shape[0], verified + 1), visible], 1)  # all see the root, too
            hidden = self.target.tail(hidden, positions[None], mask[None, None], self.tli, append)
            self.tail_cache.keep()
        return self.target_logits(hidden[0])

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens up to i, states of tokens before i's window, predict f_i; the mean over `draws` of the windows."""
        teacher, logged = DistillationLoss(batch, self.head, uses=self.draws), []
        regression = 0.5 * self.regression if self.tli else self.regression
        for before, final in self.predict(batch, [self._windows(batch) for _ in range(self.draws)]):
            metrics = teacher.loss(final, regression, self.classification)
            if self.tli:
                entering = batch.hidden[self.layers - self.tli - 1][batch.scored]
                pre = mean(F.smooth_l1_loss(before[batch.scored].float(), entering.float(), reduction="none"))
                metrics |= {"loss": metrics["loss"] + regression * pre, "before_tail": pre.detach()}
            logged.append(metrics)
        return {name: torch.stack([metrics[name] for metrics in logged]).mean() for name in logged[0]}

    def predict(self, batch: Batch, windows: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each choice of windows h_hat before and after the target's last layers, [B, T, D] (the same without TLI).

        windows: [B, T] the position at which each query's window begins.
        """
        positions = batch.positions
        keys, values = self.keys_values(self.seen(batch.states, batch.kv), positions)
        causal = batch.restrict_mask(positions[:, None, :] <= positions[:, :, None])  # [B, T, T]
        confined = self._confined(batch)
        s = None if confined is not None else self._causal(batch, None if batch.starts is None else causal)
        cos, sin = self.cross_rotary(self.q.weight, positions)
        for starts in windows:
            before = batch.restrict_mask(positions[:, None, :] < starts[:, :, None])  # [B, T, T]
            if confined is not None:
                s = self._causal(batch, causal & ~(before & confined[:, :, None]))
            assert s is not None
            hidden = self.cross(s, cos, sin, keys, values, before)
            final = hidden
            if self.tli:
                final = self._tail(hidden, batch, torch.cat([before, causal & ~before], -1), dict(batch.kv))
            yield hidden, final

    def drafts(self, batch: Batch, steps: int) -> Iterator[Pick]:
        """LSA and SA once; in step j CA reads states up to i - j, and the last layers also the chain's own rows."""
        positions = batch.positions
        distance = positions[:, :, None] - positions[:, None, :]  # [B, T, T] from key to query
        keys, values = self.keys_values(self.seen(batch.states, batch.kv), positions)
        s = self._causal(batch, None if batch.starts is None else batch.restrict_mask(distance >= 0))
        rows, (cos, sin) = dict(batch.kv), self.cross_rotary(self.q.weight, positions)
        for step in range(1, steps + 1):
            hidden = self.cross(s, cos, sin, keys, values, batch.restrict_mask(distance >= step))
            if self.tli:  # at i - j + m lies the row that step m computed, as in `Eagle.aligned`
                own = [distance == step - earlier for earlier in range(1, step + 1)]
                hidden = self._tail(hidden, batch, batch.restrict_mask(torch.cat([distance >= step, *own], -1)), rows)
            yield likeliest_at(hidden, self.target_logits)

    def _causal(self, batch: Batch, mask: Tensor | None) -> Tensor:
        """SA of whole rows. mask [B, T, T], None: causal -> [B, T, D]"""
        x = self.embedding(batch.tokens).to(self.q.weight)
        mask = None if mask is None else mask[:, None]
        return self.sa(x, attention_mask=mask, position_embeddings=self.rotary(x, batch.positions))

    def _tail(self, hidden: Tensor, batch: Batch, mask: Tensor, rows: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """The target's last layers behind their `rows`, to which the new ones are added. mask [B, T, S + T] -> [B, T, D]"""

        def append(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = rows[layer]
            rows[layer] = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            return rows[layer]

        return self.target.tail(hidden, batch.positions, mask[:, None], self.tli, append)

    def _windows(self, batch: Batch) -> Tensor:
        return random_windows(batch, *((self.window, self.window) if self.window else self.periods))

    def _confined(self, batch: Batch) -> Tensor | None:
        """[B, T] bool: the tokens of sequences in which SA is confined to the window; None if in none."""
        share = 1 - batch.progress / self.confine if self.confine else 0.0
        if share <= 0:
            return None
        drawn = torch.rand(batch.tokens.shape, device=batch.tokens.device)
        starts = torch.zeros_like(batch.tokens) if batch.starts is None else batch.starts
        return drawn.gather(1, starts) < share  # one number for a sequence
