"""MoA: a mixture of attentions over the target's keys and values (arXiv:2410.03804).

    LSA  layer self-attention: per verified token, its keys and values of all L layers are a sequence of L vectors [k; v];
         one bidirectional decoder layer over it (RoPE over the layer index), the mean, a linear map to the hidden size: g_j
    SA   one causal decoder layer over the embeddings of all tokens, drafted ones included: s_i
    CA   cross-attention: queries from s_i, keys and values from g_j of verified tokens, residual, MLP: h_hat_i, about f_i

No shift: position i reads tokens up to i and predicts f_i, hence t_{i+1}. LSA runs once a cycle, over new tokens only.

Target Layer Inference (`tli` > 0): h_hat_i stands for what enters the target's last `tli` layers; these, frozen, run on it
with the target's own keys and values of verified tokens, and the drafted tokens' behind them, then the final norm.

Training (section 4): L = SmoothL1(f, h_hat) + 0.1 KL(p || p_hat); with TLI the regression is half before the last layers,
half after. A query sees the states of tokens before its window only, windows being T ~ U(5, 15) tokens long (T-step-bounded
mask), because while drafting the newest keys are as old as the drafted depth.

Deviations and choices: a window's own states are hidden from its first query too (the official code shows a boundary its
own keys and still scores it); T and the offset are drawn once a sequence; prompt tokens are treated like all others; the
official code's curriculum on SA's reach is not built; true keys and values reach the last layers in training and decoding
(the released code copies but never passes them); KL as cross-entropy, which has the same gradient; layer and MLP widths
scale with the target instead of the paper's figures for one model.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from drafters.blocks import Teacher, TrainedDrafter, attend, behind, llama_config, rotate, split_heads, window_mask
from specbench.engine.cache import KVCache
from specbench.engine.grow import Growth
from specbench.engine.interface import Batch, Taps, TargetStates
from specbench.engine.target import Target
from specbench.engine.weights import Checkpoint
from specbench.errors import SpecBenchError

Append = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]  # layer, new keys, new values -> all keys, all values


PARTS = {"lsa": "layer_self_attention", "sa": "self_attention", "ca": "cross_attention"}  # ours, in released configurations
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


class MoA(TrainedDrafter):
    """Layer self-attention, self-attention, cross-attention, and optionally the target's last layers.

    Args:
        name: as tables show it. growth: of its trees. weights: folder of trained weights.
        tli: target layers run on top. lsa: False takes the plain mean over layers.
        mlp_ratio: width of each MLP over its layer's width.
        regression, classification: weights of the two loss terms.
        periods: least and most T. window: a fixed T instead.
    """

    compiled = ("layer_attention", "_self_attention", "cross")

    def __init__(
        self,
        name: str,
        growth: Growth,
        weights: str | None = None,
        tli: int = 0,
        lsa: bool = True,
        mlp_ratio: float = 1.5,
        regression: float = 1.0,
        classification: float = 0.1,
        periods: tuple[int, int] = (5, 15),
        window: int | None = None,
    ):
        super().__init__(name, growth, weights)
        self.tli, self.use_lsa, self.mlp_ratio = tli, lsa, mlp_ratio
        self.regression, self.classification = regression, classification
        self.periods, self.window = tuple(periods), window
        self.shapes: dict[str, dict[str, Any]] = {}  # of `lsa`, `sa` and `ca`, where a published checkpoint differs

    def build(self, target: Target) -> None:
        if not 0 <= self.tli < target.layers:
            raise SpecBenchError(f"drafter.tli={self.tli}: one of the target's {target.layers} layers must stay below")
        self.target, self.layers = target, target.layers
        self.embedding, self.head = target.embedding, target.head
        self.taps = Taps(kv=tuple(range(target.layers)), hidden=(target.layers - self.tli - 1,) if self.tli else ())
        width = target.hidden_size
        mlp = {"intermediate_size": int(self.mlp_ratio * width)}
        sa, ca = (llama_config(target, layers=1, **(mlp | self.shapes.get(part, {}))) for part in ("sa", "ca"))
        heads, self.head_dim = ca.num_key_value_heads, ca.head_dim
        own = llama_config(target, layers=1)
        stacked = 2 * own.num_key_value_heads * own.head_dim  # keys and values of one layer
        if self.use_lsa:
            count = stacked // own.head_dim
            sizes = {"num_attention_heads": count, "num_key_value_heads": count, "attention_bias": False}
            sizes |= {"intermediate_size": int(self.mlp_ratio * stacked)} | self.shapes.get("lsa", {})
            across = llama_config(target, layers=1, hidden_size=stacked, **sizes)
            self.lsa, self.lsa_rotary = LlamaDecoderLayer(across, layer_idx=0), LlamaRotaryEmbedding(across)
        self.mix = nn.Linear(stacked, width, bias=True)
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

    # Published weights ---------------------------------------------------------------------------------------------------

    def fit(self, checkpoint: Checkpoint) -> None:
        """Widths are read off the tensors, heads and rope bases off the configuration's part for each attention."""
        self.use_lsa = "Ekv2E.weight" in checkpoint.tensors
        if not self.use_lsa:
            raise checkpoint.refuse(
                "it was trained without layer self-attention (no Ekv2E), on states this network has not"
            )
        for part, theirs in PARTS.items():
            said = checkpoint.config.get(theirs, {})
            sizes = {
                k: said[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps") if k in said
            }
            if "head_dim" not in sizes and {"hidden_size", "num_attention_heads"} <= said.keys():
                sizes["head_dim"] = said["hidden_size"] // said["num_attention_heads"]
            if "rope_theta" in said:
                sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": said["rope_theta"]}
            gate = checkpoint.tensors.get(f"{theirs}.mlp.gate_proj.weight")
            if gate is not None:
                sizes["intermediate_size"] = gate.shape[0]
            self.shapes[part] = sizes

    def official(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """The released layout: `layer_self_attention.*`, `Ekv2E.*`, `self_attention.*`, `cross_attention.*`."""
        named: dict[str, Tensor] = {}
        used = set()
        for theirs, tensor in checkpoint.tensors.items():
            mine = next((theirs.replace(a, b, 1) for a, b in OFFICIAL.items() if theirs.startswith(a)), None)
            if mine is not None:
                named[mine] = tensor
                used.add(theirs)
        return named, used

    def layer_attention(self, kv: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """g of every verified token. kv: layer -> 2 x [B, H, T, Dh] -> [B, T, D]"""
        x = torch.stack([torch.cat(kv[i], -1).transpose(1, 2).flatten(2) for i in range(self.layers)], 2)
        batch, length = x.shape[:2]
        if self.use_lsa:
            x = x.flatten(0, 1)  # [B * T, L, 2 H Dh]
            layer = torch.arange(self.layers, device=x.device)[None]
            everything = torch.ones(1, 1, self.layers, self.layers, dtype=torch.bool, device=x.device)
            x = self.lsa(x, attention_mask=everything, position_embeddings=self.lsa_rotary(x, layer))
            x = x.unflatten(0, (batch, length))
        return self.mix(x.mean(2))

    def keys_values(self, mixed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """g as cross-attention sees it. [B, S, D], [B, S] -> 2 x [B, H, S, Dh]"""
        normed = self.norm(mixed)
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

    def observe(self, states: TargetStates, bonus: int) -> None:
        """LSA over what was verified; SA up to the bonus, the next root, which drafts level 1."""
        mixed = self.layer_attention({i: (k[None], v[None]) for i, (k, v) in states.kv.items()})
        self.states_cache.append(0, *self.keys_values(mixed, states.positions[None]))
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
        return self.target.logits(hidden[0])

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens up to i, states of tokens before i's window, predict f_i."""
        before, final = self.predict(batch)
        regression = 0.5 * self.regression if self.tli else self.regression
        metrics = Teacher(batch, self.head).loss(final, regression, self.classification)
        if not self.tli:
            return metrics
        pre = F.smooth_l1_loss(before[batch.scored].float(), batch.hidden[self.layers - self.tli - 1][batch.scored].float())
        return metrics | {"loss": metrics["loss"] + regression * pre, "before_tail": pre.detach()}

    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """h_hat before and after the target's last layers (the same without any), [B, T, D] each."""
        tokens, device = batch.tokens, batch.tokens.device
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        mask = self._windows(tokens.shape[0], tokens.shape[1], device)  # [B, T, T]
        keys, values = self.keys_values(self.layer_attention(dict(batch.kv)), positions)
        x = self.embedding(tokens).to(keys)
        s = self.sa(x, attention_mask=None, position_embeddings=self.rotary(x, positions))
        hidden = self.cross(s, positions, keys, values, mask)
        if not self.tli:
            return hidden, hidden

        def append(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            true_k, true_v = batch.kv[layer]
            return torch.cat([true_k, k], 2), torch.cat([true_v, v], 2)

        own = torch.ones_like(mask[0]).tril() & ~mask  # drafted: the window up to the query itself
        both = torch.cat([mask, own], -1)[:, None]
        return hidden, self.target.tail(hidden, positions, both, self.tli, append)

    def _windows(self, batch: int, length: int, device: torch.device) -> Tensor:
        """One period and offset a sequence; [B, T, T] bool."""
        low, high = (self.window, self.window) if self.window else self.periods
        periods = torch.randint(low, high + 1, (batch,)).tolist()
        return torch.stack([window_mask(length, t, int(torch.randint(t, ())), device) for t in periods])
