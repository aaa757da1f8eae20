"""The forward of Llama-like decoders, written for few tokens: one product for q, k and v, one for gate and up, one-kernel
norms, the mask made once. Transformers' own forward spends a fifth of a small model's pass between its kernels.

The weights are the model's own: those multiplied together are concatenated, and the model's parameters become views of the
result. The forward is checked against the model's when it is made; unknown models, and those it does not reproduce, keep
their own.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, rotate_half
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from specbench.engine.attention import aligned_bias
from specbench.engine.backends.packed_linear import Packing, Product
from specbench.engine.cache import KVCache
from specbench.engine.interface import Sublayers

STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # kinds of rotary embedding whose frequencies never change
LIKE_LLAMA = (LlamaDecoderLayer, Qwen2DecoderLayer, MistralDecoderLayer)
Append = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class FusedLlama:
    """A decoder's layers and final norm, and the LM head. `forwards.fastest` makes one where it can.

    Attributes:
        name: of its kind. joined: weights and biases that are multiplied together, by product and layer.
        read: layers whose output `outputs` holds after a pass, layer -> [B, T, D].
    """

    name = "fused"

    def __init__(self, decoder: Any, head: nn.Linear, packing: Packing):
        self.decoder, self.head, self.packing, layers = decoder, head, packing, decoder.layers
        first = layers[0].self_attn
        self.head_dim: int = first.head_dim
        self.keys: int = first.k_proj.out_features // self.head_dim
        self.queries: int = first.q_proj.out_features // self.head_dim
        self.scale: float = first.scaling
        self.activation: nn.Module = layers[0].mlp.act_fn
        self.angles = Angles(decoder.rotary_emb)
        self.norms = [(n.input_layernorm, n.post_attention_layernorm) for n in layers]
        attention, mlp = [n.self_attn for n in layers], [n.mlp for n in layers]
        self.joined = {
            "qkv": [fuse(a.q_proj, a.k_proj, a.v_proj) for a in attention],
            "out": [fuse(a.o_proj) for a in attention],
            "gate_up": [fuse(m.gate_proj, m.up_proj) for m in mlp],
            "down": [fuse(m.down_proj) for m in mlp],
        }
        self.read: tuple[int, ...] = ()
        self.outputs: dict[int, Tensor] = {}

    @cached_property
    def products(self) -> dict[str, list[Product]]:
        """By product, each layer's; made when they are first needed, since they may copy weights."""
        return {name: self.packing.products(layers) for name, layers in self.joined.items()}

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, kept: Sublayers | None = None
    ) -> Tensor:
        """As `CausalLM.run`, or `subset`: embedding, all layers, final norm."""
        append = None if cache is None else cache.append
        return norm(self.layers(0, self.decoder.embed_tokens(tokens), positions, mask, append, kept), self.decoder.norm)

    def score(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As `CausalLM.score`."""
        states = self(tokens, positions, mask, cache)
        return states, self.head(states[:, -1:] if last_only else states)

    def layers(
        self,
        first: int,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        append: Append | None,
        kept: Sublayers | None = None,
    ) -> Tensor:
        """The layers from `first` on, or what is kept of them. hidden [B, T, D], mask bool [B or 1, 1, T, S] -> [B, T, D]

        append: takes a layer's index and new keys and values, returns all of that layer; None: there are no others.
        """
        rotary, products = self.rotary(hidden, positions), self.products
        bias = None if mask is None else self._bias(mask, hidden.dtype)
        for layer in range(first, len(self.norms)):
            before, between = self.norms[layer]
            if kept is None or layer in kept.attention:
                x = self._attend(layer, norm(hidden, before), rotary, bias, append)
                hidden = hidden + products["out"][layer](x)
            if kept is None or layer in kept.mlp:
                gate, up = products["gate_up"][layer](norm(hidden, between)).chunk(2, -1)
                hidden = hidden + products["down"][layer](self.activation(gate) * up)
            if layer in self.read:
                self.outputs[layer] = hidden
        return hidden

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `Angles`, of one more axis. positions [B, T] -> 2 x [B, T, 1, Dh]"""
        cos, sin = self.angles(hidden, positions)
        return cos[:, :, None], sin[:, :, None]

    def _bias(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The mask as a bias on scores, repeated for the G queries that share a key. -> [B or 1, 1, G * T, S]"""
        return aligned_bias(mask, dtype, self.queries // self.keys)

    def _attend(
        self, layer: int, x: Tensor, rotary: tuple[Tensor, Tensor], bias: Tensor | None, append: Append | None
    ) -> Tensor:
        """Self-attention up to its output product. [B, T, D] -> [B, T, Hq * Dh]"""
        heads = self.products["qkv"][layer](x).unflatten(-1, (-1, self.head_dim))
        query_key, value = heads.split([self.queries + self.keys, self.keys], 2)
        own = None if append is None else partial(append, layer)
        return self_attention(rotate_by_signed(query_key, *rotary), value, bias, own, self.scale)


class Angles:
    """Cosines and sines of a rotary embedding, in a few kernels unless its frequencies depend on the length of the text.

    signed: sines as `rotate_by_signed` takes them, those of the first half of a head negative.
    """

    def __init__(self, rotary: Any, signed: bool = True):
        self.rotary, self.signed = rotary, signed
        self.static = getattr(rotary, "rope_type", "") in STATIC_ROPE
        self.scale: float = getattr(rotary, "attention_scaling", 1.0)
        self._frequencies: Tensor | None = None

    def __call__(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of type and device of `hidden`. positions [B, T] -> 2 x [B, T, Dh]"""
        if not self.static:
            cos, sin = self.rotary(hidden, positions)
            first, second = sin.chunk(2, -1)
            return cos, torch.cat([-first, second], -1) if self.signed else sin
        if self._frequencies is None or self._frequencies.device != hidden.device:
            inverse = self.rotary.inv_freq.float().to(hidden.device)
            self._frequencies = torch.cat([-inverse if self.signed else inverse, inverse])
        angles = positions[..., None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(hidden.dtype), sin.to(hidden.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int = 2) -> Tensor:
    """Rotary position embedding of queries or keys. cos, sin [B, T, Dh]; x has an axis more, `heads`: [B, T, H, Dh]"""
    return torch.addcmul(x * cos.unsqueeze(heads), rotate_half(x), sin.unsqueeze(heads))


def rotate_by_signed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in a kernel less, from signed sines. x [B, T, H, Dh], cos and sin [B, T, 1, Dh]"""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def self_attention(
    query_key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    append: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
    scale: float,
) -> Tensor:
    """Self-attention of Hq heads of queries. -> [B, T, Hq * Dh]

    Args:
        query_key: [B, T, Hq + H, Dh] rotated. value: [B, T, H, Dh].
        bias: on scores, [B or 1, 1, G * T, S] for the G queries that share a key, one after another; None: causal.
        append: takes new keys and values [B, H, T, Dh], returns all S of each; None: there are no others.
    """
    batch, length, keys, head_dim = value.shape
    queries = query_key.shape[2] - keys
    query, key = (part.transpose(1, 2) for part in query_key.split([queries, keys], 2))
    value = value.transpose(1, 2)
    if append is not None:
        key, value = append(key, value)
    if bias is None and length > 1:
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=queries != keys)
        return y.transpose(1, 2).flatten(2)
    # Queries that share a key become one head, so that keys need not be repeated for them.
    query = query.reshape(batch, keys, -1, head_dim)
    y = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scale
    )  # CUDA's kernels lay it out otherwise
    return y.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(2)


def norm(x: Tensor, module: Any) -> Tensor:
    """Llama's RMSNorm in one kernel."""
    return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


@torch.no_grad()
def fuse(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weights and biases concatenated; the layers' own parameters become views of them, so that nothing is stored twice."""

    def concatenate(name: str) -> Any:
        parts = [getattr(linear, name) for linear in linears]
        if any(part is None for part in parts):
            return None
        if len(parts) == 1:
            return parts[0]
        joined = torch.cat([part.detach() for part in parts])
        for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            part.data = rows
        return joined

    return concatenate("weight"), concatenate("bias")


@torch.no_grad()
def reproduces(fused: FusedLlama, model: Any) -> bool:
    """Does it compute what the `CausalLM` computes without it, to rounding?"""
    before, model.fused = model.fused, None
    try:
        expected = _probe(model)
        model.fused = fused
        computed = _probe(model)
    finally:
        model.fused = before
    rounding = torch.finfo(model.dtype).eps ** 0.5  # sums in another order, in all layers
    return all(
        float((x - y).abs().max()) <= rounding * float(y.abs().max()) for x, y in zip(computed, expected, strict=True)
    )


def like_llama(decoder: Any) -> bool:
    """Are all layers of a known kind, on one device, and have q, k and v all a bias or none?"""
    if not {type(layer) for layer in decoder.layers} <= set(LIKE_LLAMA):
        return False
    biased = {tuple(getattr(n.self_attn, p).bias is None for p in ("q_proj", "k_proj", "v_proj")) for n in decoder.layers}
    return all(len(set(one)) == 1 for one in biased) and len({p.device for p in decoder.parameters()}) == 1


def _probe(model: Any) -> tuple[Tensor, Tensor]:
    """States of a prompt and of a small tree behind it, logits of the tree. [1, 12, D], [1, 4, V]"""
    device = model.embedding.weight.device
    tokens = (torch.arange(12, device=device) * 7 % model.embedding.num_embeddings)[None]
    cache = model.new_cache(12)
    positions = torch.arange(8, device=device)[None]
    prompt = model.run(tokens[:, :8], positions, None, cache)
    cache.keep()
    below = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool, device=device)
    mask = torch.cat([torch.ones(4, 8, dtype=torch.bool, device=device), below], 1)[None, None]
    tree, logits = model.score(tokens[:, 8:], torch.tensor([[8, 9, 9, 10]], device=device), mask, cache)
    return torch.cat([prompt, tree], 1), logits
