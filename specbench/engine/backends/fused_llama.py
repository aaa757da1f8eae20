"""The forward of Llama-like decoders, written for few tokens: one product for q, k and v, one for gate and up, one-kernel
norms, the mask made once. Transformers' own forward spends a fifth of a small model's pass between its kernels.

The weights are the model's own: those multiplied together are concatenated, and the model's parameters become views of the
result. The forward is checked against the model's when it is made; unknown models, and those it does not reproduce, keep
their own.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from specbench.engine.attention import aligned_bias
from specbench.engine.backends.packed_linear import Packing, Product
from specbench.engine.cache import KVCache
from specbench.engine.interface import Sublayers

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
        return self.decoder.norm(self.layers(0, self.decoder.embed_tokens(tokens), positions, mask, append, kept))

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
        """Cosines, and sines with the signs of a rotation by half a head. positions [B, T] -> 2 x [B, T, 1, Dh]"""
        cos, sin = self.decoder.rotary_emb(hidden, positions)
        half = sin.shape[-1] // 2
        return cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]

    def _bias(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The mask as a bias on scores, repeated for the G queries that share a key. -> [B or 1, 1, G * T, S]"""
        return aligned_bias(mask, dtype, self.queries // self.keys)

    def _attend(
        self, layer: int, x: Tensor, rotary: tuple[Tensor, Tensor], bias: Tensor | None, append: Append | None
    ) -> Tensor:
        """Self-attention up to its output product. [B, T, D] -> [B, T, Hq * Dh]"""
        batch, length, _ = x.shape
        heads = self.products["qkv"][layer](x).view(batch, length, -1, self.head_dim)
        query_key, value = heads.split([self.queries + self.keys, self.keys], 2)
        cos, sin = rotary
        rotated = torch.addcmul(query_key * cos, query_key.roll(self.head_dim // 2, -1), sin)
        query, key = (part.transpose(1, 2) for part in rotated.split([self.queries, self.keys], 2))
        value = value.transpose(1, 2)
        if append is not None:
            key, value = append(layer, key, value)
        if bias is None and length > 1:
            y = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scale, enable_gqa=self.queries != self.keys
            )
        else:  # queries that share a key become one head, so that keys need not be repeated for them
            query = query.reshape(batch, self.keys, -1, self.head_dim)
            y = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scale)
            y = y.view(batch, self.queries, length, self.head_dim)
        return y.transpose(1, 2).reshape(batch, length, -1)


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
