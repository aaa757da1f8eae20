"""MoA's layer self-attention: a Llama layer over the layer axis and the mean over it, at little more than half the cost.

Equal to `LlamaDecoderLayer` and `.mean(1)` (tests compare values and gradients). It is faster, above all in training, since

    inputs need no gradient           a norm's weight is multiplied into the projections after it, so that the norm itself
                                      is a constant, and no gradient flows through query, key and value
    only the mean over layers is used mean(down(z)) = down(mean(z)): the MLP's last projection runs once a token
    sequences have about 30 vectors   plain matrix products, without the masks and copies of general attention
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from specbench.engine.backends.fused_llama import rotate


class LayerSelfAttention(LlamaDecoderLayer):
    """One bidirectional decoder layer over L layers of a token, and its mean. Parameters and their names are Llama's."""

    def __init__(self, config: Any):  # a LlamaConfig; its stubs make numbers optional
        super().__init__(config, layer_idx=0)
        self.heads, self.groups, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.rotary = LlamaRotaryEmbedding(config)
        self.angles: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x: [N, L, E] a vector of each layer, without gradient. -> [N, E]"""
        attention, mlp = self.self_attn, self.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in _project(x, self.input_layernorm, projections))
        cos, sin = self._angles(x)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = x + attention.o_proj(self._attend(q, k, v).flatten(2))
        gate, up = _project(x, self.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj))
        return x.mean(1) + mlp.down_proj((mlp.act_fn(gate) * up).mean(1))

    def _angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of L layers, 2 x [1, L, Dh], made once."""
        length, key = x.shape[1], (x.shape[1], x.device, x.dtype)
        if key not in self.angles:
            with torch.inference_mode(False), torch.no_grad():  # so that they can be used outside of it, too
                cos, sin = self.rotary(
                    torch.empty(0, dtype=x.dtype, device=x.device), torch.arange(length, device=x.device)[None]
                )
                self.angles[key] = cos, sin
        return self.angles[key]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Bidirectional attention. q [N, L, Hq, Dh]; k, v [N, L, H, Dh] -> [N, L, Hq, Dh]"""
        batch, length = q.shape[:2]
        # The query heads of one key head are concatenated: [N * H, Hq / H * L, Dh].
        q = q.transpose(1, 2).reshape(batch * self.groups, -1, self.head_dim)
        k, v = (x.transpose(1, 2).reshape(batch * self.groups, length, self.head_dim) for x in (k, v))
        y = torch.softmax((q * self.head_dim**-0.5) @ k.transpose(1, 2), -1) @ v
        return y.view(batch, self.heads, length, self.head_dim).transpose(1, 2)


def _project(x: Tensor, norm: LlamaRMSNorm, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """norm(x) through several linear maps without biases. x [N, L, E]"""
    if not torch.is_grad_enabled():  # a few tokens of a cycle: scaling them is cheaper than scaling the weights
        normed = norm(x)
        return [linear(normed) for linear in linears]
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)).to(x.dtype)
    weight = torch.cat([linear.weight for linear in linears]) * norm.weight
    return F.linear(normed, weight).split([linear.out_features for linear in linears], -1)
