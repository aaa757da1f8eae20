"""MoA: a mixture of attentions over the target's keys and values (arXiv:2410.03804).

    LSA  layer self-attention: per verified token, its keys and values of all L layers are a sequence of L vectors [k; v];
         one bidirectional decoder layer over it (RoPE over the layer index), the mean, a linear map to the hidden size: g_j
    SA   one causal decoder layer over the embeddings of all tokens, drafted ones included: s_i
    CA   cross-attention: queries from s_i, keys and values from g_j of verified tokens, residual, MLP: h_hat_i, about f_i

No shift: position i reads tokens up to i and predicts f_i, hence t_{i+1}. LSA runs once a cycle, over new tokens only.

Target Layer Inference (`tli` > 0): h_hat_i stands for what enters the target's last `tli` layers; these, frozen, run on it
with the target's own keys and values of verified tokens, and the drafted tokens' behind them, then the final norm.

Without LSA (`lsa: False`; section 4.3, Table 5) g_j is the target's last state o_j, as it stands before the LM head.

Training (section 3): L = SmoothL1(f, h_hat) + 0.1 KL(p || p_hat); with TLI the regression is half before the last layers,
half after. A query sees the states of tokens before its window only (T-step-bounded mask), because while drafting the
newest keys are as old as the drafted depth: the q-th query of a window stands for depth q, its newest key is q tokens back.

    windows of 1, 2 and 3 tokens, T = 6     . . . . . .      Every window's length is drawn anew from `periods`. Under
                                            x . . . . .      U(1, d) a query lies at depth q with a probability in
                                            x . . . . .      proportion to d - q + 1, the weight of that depth in the
                                            x x x . . .      expected accepted length (Beagle, eq. 8); all depths to d
                                            x x x . . .      occur, none beyond. The paper's U(5, 15) leaves depth 1 a
                                            x x x . . .      tenth, and two fifths to depths a tree of 6 never has.

`draws` such masks share one pass through target, LSA and SA, where nearly all the time goes.

`confine` is the authors' curriculum, not in the paper: SA is confined to the tokens that CA does not see, with a
probability that falls from 1 to 0 over this share of the training (half of it, and on, in their released configuration).

Deviations and choices: a window's own states are hidden from its first query too (the official code shows a boundary its
own keys and still scores it); the paper's T is U(5, 15), see above; prompt tokens are treated like all others; true keys
and values reach the last layers in training and decoding (the released code copies but never passes them); KL as
cross-entropy, which has the same gradient; widths are the paper's in proportion to the target's, keys and values in its
groups of heads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from drafters.base import TrainedDrafter, llama_config
from drafters.distillation import DistillationLoss
from drafters.layers import attend, behind, rotate, split_heads
from drafters.lsa import LayerSelfAttention
from specbench.common.errors import SpecBenchError
from specbench.common.types import Count, Name, Natural, Positive, Share, Text, Weight
from specbench.engine.cache import KVCache
from specbench.engine.interface import Batch, Taps, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.pretrained import fingerprint
from specbench.engine.target import Target
from specbench.engine.weights import Checkpoint, trained

CHUNK = 128  # tokens that go through LSA together: L times as many rows should stay in the processor's cache
MLP_RATIOS: dict[str, float] = {"lsa": 3.0, "sa": 0.125, "ca": 1.75}  # Table 6: 6144 / 2048, 512 / 4096, 7168 / 4096

PARTS = {"lsa": "layer_self_attention", "sa": "self_attention", "ca": "cross_attention"}  # ours, in released files
OFFICIAL = {  # released tensor names, ours; both carry on alike
    "layer_self_attention.": "lsa.",
    "Ekv2E.": "mix.",
    "self_attention.": "sa.",
    "cross_attention.input_layernorm.": "norm.",
    "cross_attention.self_attn.q_proj.": "q.",
    "cross_attention.self_attn.k_proj.": "k.",
    "cross_attention.self_attn.v_proj.": "v.",
    "cross_attention.self_attn.o_proj.": "o.",
    "cross_attention.post_attention_layernorm.": "mlp_norm.",
    "cross_attention.mlp.": "mlp.",
}


def _said(theirs: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a released configuration says of one attention. Three layouts are known:

    Training saves the target's configuration. Its key/value heads and widths are not the drafter's, but by the authors'
    rules all attentions have its number of query heads, its rope base and norm epsilon; only `self_attention` has its
    rope scaling, and `layer_self_attention`, which is as wide as a layer's keys and values, a head dimension of its own.

    `convert_checkpoint.py` keeps that and adds `self_attention_num_key_value_heads` and the like.

    A configuration with a part for each attention says all of each. Outside of them, `num_attention_heads` then counts
    key/value heads.
    """
    if any(isinstance(config.get(part), Mapping) for part in PARTS.values()):
        return dict(config.get(theirs) or {})
    said = {k: config[k] for k in ("num_attention_heads", "rms_norm_eps", "rope_theta") if k in config}
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        said["rope_theta"] = rope["rope_theta"]
    if theirs == "self_attention":
        said |= {k: config[k] for k in ("rope_parameters", "rope_scaling") if k in config}
    if theirs != "layer_self_attention" and config.get("head_dim"):
        said["head_dim"] = config["head_dim"]
    if f"{theirs}_num_key_value_heads" in config:
        said["num_key_value_heads"] = config[f"{theirs}_num_key_value_heads"]
    return said


def _rope(said: Mapping[str, Any]) -> dict[str, Any] | None:
    """As `rope_parameters`, which older configurations spread over two entries; None where no base is said."""
    rope = dict(said.get("rope_scaling") or {}) | dict(said.get("rope_parameters") or {})
    rope.setdefault("rope_theta", said.get("rope_theta"))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope if rope["rope_theta"] else None


def _shape(theirs: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """One attention's part of a Llama configuration; empty where its tensors are not there at all.

    A projection's rows are those of all heads together. How many heads share them, and at which base they turn, only the
    configuration can tell. If it does not, the file is refused: a wrong guess that divides the rows would load and draft
    badly.
    """
    q, k = (checkpoint.tensors.get(f"{theirs}.self_attn.{x}_proj.weight") for x in "qk")
    gate = checkpoint.tensors.get(f"{theirs}.mlp.gate_proj.weight")
    if q is None or k is None or gate is None:
        return {}
    said = _said(theirs, checkpoint.config)
    heads, head_dim, rope = said.get("num_attention_heads", 0), said.get("head_dim", 0), _rope(said)
    lacks = ["num_attention_heads"] * (not heads and not head_dim) + ["rope_theta"] * (rope is None)
    if lacks:
        raise checkpoint.refuse(
            f"its configuration does not say the {' and '.join(lacks)} of {theirs}, and tensors cannot tell"
        )
    heads = heads or len(q) // head_dim
    head_dim = head_dim or len(q) // heads
    kv_heads = said.get("num_key_value_heads") or len(k) // max(head_dim, 1)
    if (heads * head_dim, kv_heads * head_dim) != (len(q), len(k)) or heads % kv_heads or head_dim % 2:
        raise checkpoint.refuse(
            f"its configuration gives {theirs} {heads} heads of {head_dim} and {kv_heads} for keys and values, its tensors "
            f"have {len(q)} and {len(k)} rows for them"
        )
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    eps = {"rms_norm_eps": said["rms_norm_eps"]} if "rms_norm_eps" in said else {}  # else the target's, as the authors do
    return shape | eps | {"rope_parameters": rope, "intermediate_size": len(gate)}


class MoA(TrainedDrafter):
    """Layer self-attention, self-attention, cross-attention, and optionally the target's last layers.

    Args:
        name: as tables show it. growth: of its trees. weights: folder of trained weights.
        tli: target layers run on top. lsa: False: CA looks at the target's last states.
        mlp_ratios: width of each part's MLP over its layer's width; what is missing is the paper's.
        regression, classification: weights of the two loss terms.
        periods: least and most length of a window; None: 1 and the depth of the trees. window: a fixed length instead.
        draws: masks a training pass.
        confine: share of the training over which SA is set free from its window; 0: free from the start.
        vocabulary: see `TrainedDrafter`.
    """

    compresses_states = True
    compiled = ("across_layers", "_self_attention", "cross")
    phased = ("periods", "window", "draws", "confine", "regression", "classification")

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        tli: Natural = 0,
        lsa: bool = True,
        mlp_ratios: Mapping[Literal["lsa", "sa", "ca"], Positive] | None = None,
        regression: Weight = 1.0,
        classification: Weight = 0.1,
        periods: tuple[Count, Count] | None = None,
        window: Count | None = None,
        draws: Count = 1,
        confine: Share = 0.5,
        vocabulary: Count | None = None,
    ):
        super().__init__(name, growth, weights, vocabulary)
        self.tli, self.use_lsa, self.runs_layers = tli, lsa, tli > 0
        self.mlp_ratios = MLP_RATIOS | dict(mlp_ratios or {})
        self.regression, self.classification = regression, classification
        self.periods, self.window = periods or (1, growth.depth), window
        self.draws, self.confine = draws, confine
        self.shapes: dict[str, dict[str, Any]] = {}  # of `lsa`, `sa` and `ca`, where a published checkpoint differs

    def build(self, target: Target) -> None:
        if not 0 <= self.tli < target.layers:
            raise SpecBenchError(f"drafter.tli={self.tli}: one of the target's {target.layers} layers must stay below")
        self.target, self.layers = target, target.layers
        self.embedding, self.head = target.embedding, target.head
        self.target_logits = target.logits
        below = target.layers - self.tli
        read = range(0 if self.use_lsa else below, target.layers)
        self.taps = Taps(kv=tuple(read), hidden=(below - 1,) if self.tli else (), last=not self.use_lsa)
        width = target.hidden_size

        def shaped(part: str, width: int, **sizes: Any) -> Any:
            sizes |= {"hidden_size": width, "intermediate_size": int(self.mlp_ratios[part] * width)}
            return llama_config(target, layers=1, **(sizes | self.shapes.get(part, {})))

        sa, ca = shaped("sa", width), shaped("ca", width)
        heads, self.head_dim = ca.num_key_value_heads, ca.head_dim
        if self.use_lsa:
            own = llama_config(target, layers=1)
            count = 2 * own.num_key_value_heads  # keys and values of one layer
            across = {"num_attention_heads": count, "num_key_value_heads": count, "attention_bias": False}
            self.lsa = LayerSelfAttention(shaped("lsa", count * own.head_dim, **across))
            self.mix = nn.Linear(count * own.head_dim, width, bias=True)
        self.sa, self.rotary = LlamaDecoderLayer(sa, layer_idx=0), LlamaRotaryEmbedding(sa)
        self.cross_rotary = LlamaRotaryEmbedding(ca)
        self.norm = LlamaRMSNorm(width, ca.rms_norm_eps)  # of queries, keys and values alike
        self.q = nn.Linear(width, ca.num_attention_heads * self.head_dim, bias=False)
        self.k = nn.Linear(width, heads * self.head_dim, bias=False)
        self.v = nn.Linear(width, heads * self.head_dim, bias=False)
        self.o = nn.Linear(ca.num_attention_heads * self.head_dim, width, bias=False)
        self.mlp_norm, self.mlp = LlamaRMSNorm(width, ca.rms_norm_eps), LlamaMLP(ca)
        self.tokens_cache, self.states_cache = KVCache(1, 0), KVCache(1, 0)
        self.tail_cache = KVCache(self.tli, 0)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if self.use_lsa and not self.tli:  # whose layers read the target's own keys and values
            self.taps = replace(self.taps, condensed=fingerprint(trained(self).items()))

    # Published weights ---------------------------------------------------------------------------------------------------

    def fit(self, checkpoint: Checkpoint) -> None:
        """Widths are read off the tensors, heads and rope bases off the configuration, whichever tool wrote it."""
        self.use_lsa = "Ekv2E.weight" in checkpoint.tensors
        if not self.use_lsa:
            raise checkpoint.refuse(
                "it was trained without layer self-attention (no Ekv2E); the layout of such a file is not known here"
            )
        self.shapes = {part: _shape(theirs, checkpoint) for part, theirs in PARTS.items()}

    def map_checkpoint(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """The released layout: `layer_self_attention.*`, `Ekv2E.*`, `self_attention.*`, `cross_attention.*`."""
        own = trained(self)
        named: dict[str, Tensor] = {}
        used = set()
        for theirs, tensor in checkpoint.tensors.items():
            mine = next((theirs.replace(a, b, 1) for a, b in OFFICIAL.items() if theirs.startswith(a)), None)
            if mine in own:  # a bias that this network has not is left over, and so refused
                named[mine] = tensor
                used.add(theirs)
        return named, used

    def seen(self, last: Tensor, kv: Mapping[int, tuple[Tensor, Tensor]]) -> Tensor:
        """g of every verified token. last [B, T, D]; kv: layer -> 2 x [B, H, T, Dh] -> [B, T, D]"""
        if not self.use_lsa:
            return last
        batch, heads, length, dim = kv[0][0].shape
        x = kv[0][0].new_empty(batch, length, self.layers, heads, 2, dim)
        for i in range(self.layers):
            for part, rows in enumerate(kv[i]):
                x[:, :, i, :, part] = rows.transpose(1, 2)
        x = x.flatten(3).flatten(0, 1)  # [B * T, L, 2 H Dh]
        return torch.cat([self.across_layers(part) for part in x.split(CHUNK)]).unflatten(0, (batch, length))

    def across_layers(self, x: Tensor) -> Tensor:
        """g of N tokens from their keys and values in all layers. [N, L, 2 H Dh] -> [N, D]"""
        return self.mix(self.lsa(x))

    def keys_values(self, seen: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """g as cross-attention sees it. [B, S, D], [B, S] -> 2 x [B, H, S, Dh]"""
        normed = self.norm(seen)
        k, v = (split_heads(part(normed), self.head_dim) for part in (self.k, self.v))
        return rotate(k, self.cross_rotary, positions), v

    def cross(self, s: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """h_hat of B x T queries. s [B, T, D]; keys, values [B, H, S, Dh]; mask [B, T, S] -> [B, T, D]"""
        q = rotate(split_heads(self.q(self.norm(s)), self.head_dim), self.cross_rotary, positions)
        y = s + self.o(attend(q, keys, values, mask))
        return y + self.mlp(self.mlp_norm(y))

    # Decoding -----------------------------------------------------------------------------------------------------------

    def reset(self, capacity: int) -> None:
        for cache in (self.tokens_cache, self.states_cache, self.tail_cache):
            cache.begin(capacity + self.growth.rows + 1)
        self.stable = 0  # rows of SA for verified tokens and the root

    def compress_states(self, states: TargetStates) -> tuple[Tensor, ...]:
        """CA's keys and values of N tokens, 2 x [N, H, Dh]: all that drafting reads of the layers that LSA mixes."""
        seen = self.seen(states.last[None], {i: (k[None], v[None]) for i, (k, v) in states.kv.items()})
        keys, values = self.keys_values(seen, states.positions[None])
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def observe(self, states: TargetStates, bonus: int) -> None:
        """LSA over what was verified; SA up to the bonus, the next root, which drafts level 1."""
        keys, values = states.condensed or self.compress_states(states)
        self.states_cache.append(0, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        self.states_cache.keep()
        self.tokens_cache.truncate(self.stable)
        first = int(self.stable > 0)  # the old root was run when it was the bonus
        tokens = torch.cat([states.tokens[first:], states.tokens.new_full((1,), bonus)])
        mask = behind(self.stable, len(tokens), tokens.device)
        positions = torch.arange(self.stable, self.stable + len(tokens), device=tokens.device)
        s = self._self_attention(tokens, positions, mask)
        self.stable = self.tokens_cache.length
        self.tail_cache.truncate(0)
        own = torch.ones(1, 1, dtype=torch.bool, device=tokens.device)
        self.logits = self._draft(s[-1:], positions[-1:], own)[0]

    def root_logits(self) -> Tensor:
        return self.logits

    def expand(self, tokens: Tensor, parents: Tensor, depth: int, visible: Tensor) -> Tensor:
        positions = torch.full_like(tokens, self.stable + depth - 1)  # the root stands at stable - 1
        prefix = visible.new_ones(tokens.shape[0], self.stable)
        s = self._self_attention(tokens, positions, torch.cat([prefix, visible], 1))
        return self._draft(s, positions, torch.cat([visible.new_ones(tokens.shape[0], 1), visible], 1))

    def _self_attention(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """SA of N tokens behind its cache, whose rows are kept. mask [N, S] -> [N, D]"""
        x = self.embedding(tokens)[None].to(self.q.weight)
        mask = None if mask is None else mask[None, None]
        rotary = self.rotary(x, positions[None])
        s = self.sa(x, attention_mask=mask, past_key_values=self.tokens_cache, position_embeddings=rotary)[0]
        self.tokens_cache.keep()
        return s

    def _draft(self, s: Tensor, positions: Tensor, drafted: Tensor) -> Tensor:
        """CA over verified tokens, then the target's last layers. s [N, D], drafted [N, 1 + rows] -> logits [N, V]"""
        known = self.states_cache.length
        keys, values = self.states_cache.rows(0, 0, known)
        hidden = self.cross(s[None], positions[None], keys[None], values[None], None)
        if self.tli:

            def append(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                true = self.target.cache.rows(layer, 0, known)
                mine = self.tail_cache.append(layer - self.layers + self.tli, k, v)
                return tuple(torch.cat([t[None], m], 2) for t, m in zip(true, mine, strict=True))  # type: ignore[return-value]

            mask = torch.cat([drafted.new_ones(drafted.shape[0], known), drafted], 1)
            hidden = self.target.tail(hidden, positions[None], mask[None, None], self.tli, append)
            self.tail_cache.keep()
        return self.target_logits(hidden[0])

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens up to i, states of tokens before i's window, predict f_i; the mean over `draws` of the windows."""
        teacher, found = DistillationLoss(batch, self.head), []
        regression = 0.5 * self.regression if self.tli else self.regression
        for before, final in self.predict(batch, [self._windows(batch) for _ in range(self.draws)]):
            metrics = teacher.loss(final, regression, self.classification)
            if self.tli:
                entering = batch.hidden[self.layers - self.tli - 1][batch.scored]
                pre = F.smooth_l1_loss(before[batch.scored].float(), entering.float())
                metrics |= {"loss": metrics["loss"] + regression * pre, "before_tail": pre.detach()}
            found.append(metrics)
        return {name: torch.stack([metrics[name] for metrics in found]).mean() for name in found[0]}

    def predict(self, batch: Batch, windows: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each choice of windows h_hat before and after the target's last layers, [B, T, D] (without any: the same).

        windows: [B, T] the position at which each query's window begins.
        """
        positions = batch.positions
        keys, values = self.keys_values(self.seen(batch.states, batch.kv), positions)
        causal = batch.restrict_mask(positions[:, None, :] <= positions[:, :, None])  # [B, T, T]
        confined = self._confined(batch)
        s = self._causal(batch, None if batch.starts is None else causal) if confined is None else keys
        for starts in windows:
            before = batch.restrict_mask(positions[:, None, :] < starts[:, :, None])  # [B, T, T]
            if confined is not None:
                s = self._causal(batch, causal & ~(before & confined[:, :, None]))
            hidden = self.cross(s, positions, keys, values, before)
            final = hidden
            if self.tli:
                final = self._tail(hidden, batch, torch.cat([before, causal & ~before], -1), dict(batch.kv))
            yield hidden, final

    def drafts(self, batch: Batch, steps: int) -> Iterator[Callable[[Tensor], Tensor]]:
        """LSA and SA once; in step j CA sees states up to i - j, and the last layers also what the chain ran before."""
        positions = batch.positions
        behind = positions[:, :, None] - positions[:, None, :]  # [B, T, T] how far a key lies behind a query
        keys, values = self.keys_values(self.seen(batch.states, batch.kv), positions)
        s = self._causal(batch, None if batch.starts is None else batch.restrict_mask(behind >= 0))
        rows = dict(batch.kv)
        for step in range(1, steps + 1):
            hidden = self.cross(s, positions, keys, values, batch.restrict_mask(behind >= step))
            if self.tli:  # place i - j + m holds what step m ran there, as in `Hass`
                own = [behind == step - earlier for earlier in range(1, step + 1)]
                hidden = self._tail(hidden, batch, batch.restrict_mask(torch.cat([behind >= step, *own], -1)), rows)
            yield partial(self._best, hidden)

    def _best(self, hidden: Tensor, places: Tensor) -> Tensor:
        return self.target_logits(hidden[places]).argmax(-1)

    def _causal(self, batch: Batch, mask: Tensor | None) -> Tensor:
        """SA of whole rows. mask [B, T, T], None for plainly causal -> [B, T, D]"""
        x = self.embedding(batch.tokens).to(self.q.weight)
        mask = None if mask is None else mask[:, None]
        return self.sa(x, attention_mask=mask, position_embeddings=self.rotary(x, batch.positions))

    def _tail(self, hidden: Tensor, batch: Batch, mask: Tensor, rows: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """The target's last layers behind `rows` of theirs, to which these are added. mask [B, T, S + T] -> [B, T, D]"""

        def append(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = rows[layer]
            rows[layer] = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            return rows[layer]

        return self.target.tail(hidden, batch.positions, mask[:, None], self.tli, append)

    def _windows(self, batch: Batch) -> Tensor:
        """[B, T] at which position of its sequence each query's window begins: end to end, of lengths drawn one by one.

        The first window of a row has begun somewhere before it. Where a sequence begins inside a window, its queries
        see everything before themselves up to the next one.
        """
        low, high = (self.window, self.window) if self.window else self.periods
        rows, length = batch.tokens.shape
        device = batch.tokens.device
        lengths = torch.randint(low, high + 1, (rows, length), device=device)
        passed = (torch.rand(rows, 1, device=device) * lengths[:, :1]).long()
        begins = lengths.cumsum(1) - passed  # [B, T] the places at which windows begin, but the row's first
        place = torch.arange(length, device=device).expand(rows, length).contiguous()
        past = torch.searchsorted(begins, place, right=True)  # [B, T] windows begun up to here
        last = torch.cat([begins.new_full((rows, 1), -1), begins], 1).gather(1, past)
        start = last - (0 if batch.starts is None else batch.starts)
        return torch.where(start < 0, batch.positions, start)

    def _confined(self, batch: Batch) -> Tensor | None:
        """[B, T] bool: the tokens of sequences in which SA stays in the window; None where it does in none."""
        share = 1 - batch.progress / self.confine if self.confine else 0.0
        if share <= 0:
            return None
        lots = torch.rand(batch.tokens.shape, device=batch.tokens.device)
        starts = torch.zeros_like(batch.tokens) if batch.starts is None else batch.starts
        return lots.gather(1, starts) < share
