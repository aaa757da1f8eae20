"""Transformers' modules that drafters are built of, in fewer kernels: attention, MLP, norm, rotary embedding.

A draft pass is a layer or two over a few tokens: on a GPU most of its time is the launching of kernels, on a CPU a good
part is the time between them. Each module keeps its parameters and its place; only its `forward` changes, and only where no
gradient is asked for. What is multiplied together is concatenated, as in `fused_llama`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from specbench.engine.attention import aligned_bias
from specbench.engine.backends.fused_llama import STATIC_ROPE, Angles, fuse, norm, rotate, self_attention
from specbench.engine.backends.packed_linear import Packing, Product


def fuse_modules(modules: Iterable[nn.Module], packing: Packing) -> None:
    """Let these modules, not their children, compute in fewer kernels."""
    for module in modules:
        kind = FUSED.get(type(module))
        if kind is None or "forward" in vars(module):
            continue
        fused = kind(module, packing)
        if fused is not None:
            module.forward = _unless_trained(fused, module.forward)


def _unless_trained(fused: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """The fused forward; with gradients the module's own."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (own if torch.is_grad_enabled() else fused)(*args, **kwargs)

    return forward


def _attention(module: Any, packing: Packing) -> Callable[..., tuple[Tensor, None]] | None:
    """A forward with one product for queries, keys and values; None for a module in which only some of them have a bias."""
    parts = module.q_proj, module.k_proj, module.v_proj
    if len({part.bias is None for part in parts}) > 1:
        return None
    dim: int = module.head_dim
    queries, keys = (part.out_features // dim for part in parts[:2])
    qkv = _joined(packing, *parts)

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """As `LlamaAttention`, of masks [B or 1, 1, T, S] bool."""
        query_key, value = qkv(hidden_states).unflatten(-1, (-1, dim)).split([queries + keys, keys], 2)
        bias = None
        if attention_mask is not None:
            bias = aligned_bias(attention_mask, hidden_states.dtype, queries // keys)
        append = None if past_key_values is None else partial(past_key_values.update, layer_idx=module.layer_idx)
        return module.o_proj(
            self_attention(rotate(query_key, *position_embeddings), value, bias, append, module.scaling)
        ), None

    return forward


def _mlp(module: Any, packing: Packing) -> Callable[[Tensor], Tensor]:
    gate_up = _joined(packing, module.gate_proj, module.up_proj)

    def forward(x: Tensor) -> Tensor:
        gate, up = gate_up(x).chunk(2, -1)
        return module.down_proj(module.act_fn(gate) * up)

    return forward


def _norm(module: nn.Module, _: Packing) -> Callable[[Tensor], Tensor]:
    return lambda x: norm(x, module)


def _rotary(module: Any, _: Packing) -> Callable[..., tuple[Tensor, Tensor]] | None:
    return Angles(module, signed=False) if module.rope_type in STATIC_ROPE else None


def _joined(packing: Packing, *linears: nn.Linear) -> Product:
    """The product with all of them at once, on a CPU from packed weights where these are faster."""
    for linear in linears:
        linear.joined = True  # type: ignore[assignment]
    return packing.products([fuse(*linears)])[0]


FUSED: dict[type[nn.Module], Callable[[Any, Packing], Callable[..., Any] | None]] = {
    LlamaAttention: _attention,
    LlamaMLP: _mlp,
    LlamaRMSNorm: _norm,
    LlamaRotaryEmbedding: _rotary,
}
