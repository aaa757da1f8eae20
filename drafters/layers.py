"""Attention as drafters compute it: masked, with grouped heads, and without work for keys that no query sees.

Knows tensors, no drafter. In training most masks are sparse: a query sees one state of each later draft pass, and few of
those in windows. PyTorch's kernel on a CPU computes all products and masks them afterwards.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from specbench.engine.attention import aligned_bias
from specbench.engine.backends.fused_llama import rotate
from specbench.engine.cache import KVCache
from specbench.engine.interface import SIZE_STEP, TargetStates
from specbench.engine.weights import Checkpoint

ATTENTION = "specbench_visible"  # what `visible_attention` is called in a Transformers configuration
BLOCK = 128  # queries a block: fewer attend to fewer keys, more make wider, faster products


def prefix_causal_mask(prefix: int, n: int, device: torch.device) -> Tensor | None:
    """[N, prefix + N] bool: N tokens behind a prefix, causally; None where attention needs no mask for that."""
    if n == 1 or not prefix:
        return None
    return torch.ones(n, prefix + n, dtype=torch.bool, device=device).tril(prefix)


def step_mask(step: int, length: int, device: torch.device | None = None) -> Tensor:
    """The keys that a query of pass j attends to: [T, j * T] bool, the keys of pass 1 first.

    Pass 3, T = 4, rows are queries:   f^(1)    f^(2)    f^(3)
                                       . . . .  . . . .  x . . .
                                       . . . .  x . . .  . x . .
                                       x . . .  . x . .  . . x .
                                       x x . .  . . x .  . . . x
    """
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    own = [column == row - (step - source) for source in range(2, step + 1)]
    return torch.cat([column <= row - (step - 1), *own], 1)


def unread_tokens(states: TargetStates, bonus: int, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens [N] behind `rows` cached ones, up to the bonus; their positions [N] and mask [N, rows + N] or None."""
    first = int(rows > 0)  # the old root was run when it was the bonus
    tokens = torch.cat([states.tokens[first:], states.tokens.new_full((1,), bonus)])
    positions = torch.arange(rows, rows + len(tokens), device=tokens.device)
    return tokens, positions, prefix_causal_mask(rows, len(tokens), tokens.device)


def visible_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Scaled dot-product attention; on a CPU each block of queries reads only keys that one of them sees. -> [B, Hq, T, Dh]

    Args:
        q: [B, Hq, T, Dh]. k, v: [B, H, S, Dh]. mask: [B or 1, 1, T, S] bool, every query sees a key; None: causal for
            T > 1 (and then T = S), else everything.
    """
    length = q.shape[2]
    if q.device.type == "cpu" and q.requires_grad and length % SIZE_STEP:
        q, k, v, mask = _padded(q, k, v, mask, -length % SIZE_STEP)
        return visible_attention(q, k, v, mask, scale)[:, :, :length]
    if mask is not None and q.device.type != "cpu":  # CUDA's fast kernels take a mask or shared key heads, not both
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        mask = aligned_bias(mask, q.dtype)
    if mask is None or q.device.type != "cpu" or length < 2 * BLOCK:
        causal = mask is None and length > 1
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)
    parts = []
    for queries, rows in zip(q.split(BLOCK, 2), mask.split(BLOCK, 2), strict=True):
        seen = rows.flatten(0, 2).any(0).nonzero()[:, 0]
        extra = -len(seen) % SIZE_STEP
        rows = F.pad(rows.index_select(3, seen), (0, extra))
        seen = F.pad(seen, (0, extra))
        keys, values = k.index_select(2, seen), v.index_select(2, seen)
        parts.append(F.scaled_dot_product_attention(queries, keys, values, rows, scale=scale, enable_gqa=True))
    return torch.cat(parts, 2)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Attention's inputs with so many more queries at the end, which see what the last one sees.

    On a CPU the backward pass takes up to twice as long where lengths are no multiples of `SIZE_STEP`.
    """
    q = F.pad(q, (0, 0, 0, extra))
    if mask is None:  # causal: no query sees what lies behind it
        return q, F.pad(k, (0, 0, 0, extra)), F.pad(v, (0, 0, 0, extra)), None
    return q, k, v, torch.cat([mask, mask[:, :, -1:].expand(-1, -1, extra, -1)], 2)


def _of_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`visible_attention` as Transformers' layers call it. -> [B, T, Hq, Dh]"""
    return visible_attention(query, key, value, mask, scaling).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _of_layer)


@torch.no_grad()
def start_norm(norm: nn.Module, source: nn.Module) -> None:
    """Give a norm the factors of the target's, which maps ones to them (Gemma's stores them minus one)."""
    own, factors = norm.get_parameter("weight"), source.get_parameter("weight")
    own.copy_(source(torch.ones_like(factors)))


@torch.no_grad()
def start_flat_norm(norm: nn.Module, source: nn.Module) -> None:
    """Give a norm one factor, as large as the target's are (root mean square).

    For states that the target's norm has scaled already: its factors, some of them negative, would apply twice.
    """
    factors = source(torch.ones_like(source.get_parameter("weight")))
    norm.get_parameter("weight").copy_(factors.square().mean().sqrt().expand_as(factors))


def start_layer(layer: nn.Module, source: nn.Module) -> bool:
    """Give a layer of Llama's kind the weights of one of the target's, cut to its width; False if they do not fit.

    Nor do those of a target whose layers are on another machine.
    """
    if any(p.is_meta for p in source.parameters()):
        return False
    own, up = layer.state_dict(), layer.get_submodule("mlp.up_proj")
    tensors = _narrower(source.state_dict(), up.out_features)  # type: ignore[arg-type]
    for name, tensor in own.items():
        if name.endswith(".bias"):  # Llama has one on the attention's output too, Qwen2 has not
            tensors.setdefault(name, torch.zeros_like(tensor))
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in tensors.items()}:
        return False
    layer.load_state_dict(tensors)
    return True


def _narrower(tensors: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """A layer's tensors with the `width` neurons of its MLP whose weights have the largest product of norms."""
    down, up, gate = (tensors.get(f"mlp.{name}_proj.weight") for name in ("down", "up", "gate"))
    if down is None or up is None or gate is None or width >= len(up):
        return tensors
    neurons = (down.norm(dim=0) * up.norm(dim=1) * gate.norm(dim=1)).topk(width).indices.sort().values
    dims = {f"mlp.{name}_proj.{part}": 0 for name in ("up", "gate") for part in ("weight", "bias")}
    dims["mlp.down_proj.weight"] = 1
    return {name: t.index_select(dims[name], neurons) if name in dims else t for name, t in tensors.items()}


def _rope(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """As `rope_parameters`, which older configurations spread over two entries; None without a base."""
    rope = dict(options.get("rope_scaling") or {}) | dict(options.get("rope_parameters") or {})
    rope.setdefault("rope_theta", options.get("rope_theta"))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope if rope["rope_theta"] else None


def attention_shape(part: str, checkpoint: Checkpoint, options: Mapping[str, Any]) -> dict[str, Any]:
    """A released attention's part of a Llama configuration; empty if its tensors are not there.

    A projection's rows are those of all heads together; the number of heads and the rope base are in the configuration
    alone. Without them the file is refused, since a wrong guess that divides the rows would load and draft badly.

    part: how the names of its tensors begin. options: of this attention, as the checkpoint's configuration has them.
    """
    q, k = (checkpoint.tensors.get(f"{part}.self_attn.{x}_proj.weight") for x in "qk")
    gate = checkpoint.tensors.get(f"{part}.mlp.gate_proj.weight")
    if q is None or k is None or gate is None:
        return {}
    heads, head_dim, rope = options.get("num_attention_heads", 0), options.get("head_dim", 0), _rope(options)
    lacks = ["num_attention_heads"] * (not heads and not head_dim) + ["rope_theta"] * (rope is None)
    if lacks:
        raise checkpoint.refuse(
            f"its configuration does not say the {' and '.join(lacks)} of {part}, and tensors cannot tell"
        )
    heads = heads or len(q) // head_dim
    head_dim = head_dim or len(q) // heads
    kv_heads = options.get("num_key_value_heads") or len(k) // max(head_dim, 1)
    if (heads * head_dim, kv_heads * head_dim) != (len(q), len(k)) or heads % kv_heads or head_dim % 2:
        raise checkpoint.refuse(
            f"its configuration gives {part} {heads} heads of {head_dim} and {kv_heads} for keys and values, its tensors "
            f"have {len(q)} and {len(k)} rows for them"
        )
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    eps = {"rms_norm_eps": options["rms_norm_eps"]} if "rms_norm_eps" in options else {}  # else the target's
    return shape | eps | {"rope_parameters": rope, "intermediate_size": len(gate)}


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Cross-attention; zeros for a query without a visible key. -> [B, T, Hq * Dh]

    Args:
        q: [B, Hq, T, Dh]. keys, values: [B, H, S, Dh]. mask: [B or 1, T, S] bool, None for all.
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True).transpose(1, 2).flatten(2)
    blind = ~mask.any(-1, keepdim=True)  # [B or 1, T, 1]
    seeing = mask.clone()
    seeing[..., :1] |= blind  # they read the first key, and the result is dropped
    y = visible_attention(q, keys, values, seeing[:, None])
    return y.transpose(1, 2).flatten(2).masked_fill(blind, 0.0)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, H * Dh] -> [B, H, T, Dh]"""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class CrossAttention(nn.Module):
    """A block of cross-attention and MLP, as a part of a drafter whose parameters it names."""

    def build_cross_attention(self, config: Any, width: int) -> None:  # a LlamaConfig
        """Create projections, MLP and rotary embedding for states of this width."""
        self.head_dim = config.head_dim
        self.q = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=False)
        self.k = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.v = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.o = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=False)
        self.mlp_norm, self.mlp = LlamaRMSNorm(width, config.rms_norm_eps), LlamaMLP(config)
        self.cross_rotary = LlamaRotaryEmbedding(config)

    def keys_values(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of states. [B, S, D], [B, S] -> 2 x [B, H, S, Dh]"""
        k, v = (split_heads(part(states), self.head_dim) for part in (self.k, self.v))
        cos, sin = self.cross_rotary(states, positions)
        return rotate(k, cos, sin, heads=1), v

    def cross_block(
        self,
        x: Tensor,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """y + MLP(y) of y = x + attention, with queries from `normed`. x, normed [B, T, D]; mask [B or 1, T, S]

        angles: what `cross_rotary` gives for the queries' positions.
        """
        q = rotate(split_heads(self.q(normed), self.head_dim), *angles, heads=1)
        y = x + self.o(attend(q, keys, values, mask))
        return y + self.mlp(self.mlp_norm(y))


class PrefixLayers(nn.Module):
    """Decoder layers and a norm over the states of all tokens so far; heads draft from the last one's output."""

    cache: KVCache
    prefix_layers: nn.ModuleList

    def build_prefix(self, config: Any, layers: int, norm: nn.Module) -> None:
        """norm: the target's final one, as large as whose factors this one's are at first."""
        self.prefix_layers = nn.ModuleList(LlamaDecoderLayer(config, layer_idx=i) for i in range(layers))
        self.prefix_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        start_flat_norm(self.prefix_norm, norm)
        self.prefix_rotary = LlamaRotaryEmbedding(config)
        self.cache = KVCache(layers, 0)

    def prefix(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """x [B, T, D], positions [B, T], mask [B, 1, T, S] -> [B, T, D]"""
        rotary = self.prefix_rotary(x, positions)
        for layer in self.prefix_layers:
            x = layer(x, attention_mask=mask, past_key_values=cache, position_embeddings=rotary)
        return self.prefix_norm(x)

    def reset(self, capacity: int) -> None:
        self.cache.begin(capacity)

    def last_prefix(self, x: Tensor, positions: Tensor) -> Tensor:
        """Run N verified states behind the cache, keep their rows; the last one's output. x [N, D] -> [D]"""
        mask = prefix_causal_mask(self.cache.length, len(x), x.device)
        mask = None if mask is None else mask[None, None]
        output = self.prefix(x[None], positions[None], mask, self.cache)[0, -1]
        self.cache.keep()
        return output
