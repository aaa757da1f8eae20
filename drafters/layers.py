"""Attention as drafters compute it: masked, grouped heads, and no work for keys that nobody sees.

Knows tensors, no drafter. In training most masks are nearly empty: of the states that a later draft pass made a query sees
one a pass, of those in windows a few. PyTorch's kernel on a CPU multiplies what the mask then hides.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

ATTENTION = "specbench_visible"  # what `visible_attention` is called in a Transformers configuration
BLOCK = 128  # queries a block: fewer of them see fewer keys, more of them make wider, faster products


def behind(prefix: int, n: int, device: torch.device) -> Tensor | None:
    """[N, prefix + N] bool: N tokens see a prefix and, causally, each other; None where attention does just that alone."""
    if n == 1 or not prefix:
        return None
    return torch.ones(n, prefix + n, dtype=torch.bool, device=device).tril(prefix)


def visible_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Scaled dot-product attention; on a CPU each block of queries reads only keys that one of them sees.

    Args:
        q: [B, Hq, T, Dh]. k, v: [B, H, S, Dh]. mask: [B or 1, 1, T, S] bool, every query sees a key; None: causal for
            T > 1 (and then T = S), else everything.

    Returns:
        [B, Hq, T, Dh].
    """
    length = q.shape[2]
    if mask is not None and q.device.type != "cpu":  # CUDA's fast kernels take a mask or shared key heads, not both
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if mask is None or q.device.type != "cpu" or length < 2 * BLOCK:
        causal = mask is None and length > 1
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)
    parts = []
    for queries, rows in zip(q.split(BLOCK, 2), mask.split(BLOCK, 2), strict=True):
        seen = rows.flatten(0, 2).any(0).nonzero()[:, 0]
        keys, values, rows = k.index_select(2, seen), v.index_select(2, seen), rows.index_select(3, seen)
        parts.append(F.scaled_dot_product_attention(queries, keys, values, rows, scale=scale, enable_gqa=True))
    return torch.cat(parts, 2)


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


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Cross-attention; a query without a visible key gets nothing, not a mean over what it must not see.

    Args:
        q: [B, Hq, T, Dh]. keys, values: [B, H, S, Dh]. mask: [B or 1, T, S] bool, None for all.

    Returns:
        [B, T, Hq * Dh].
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True).transpose(1, 2).flatten(2)
    blind = ~mask.any(-1, keepdim=True)  # [B or 1, T, 1]
    seeing = mask.clone()
    seeing[..., :1] |= blind  # they read the first key, and what they find is dropped
    found = visible_attention(q, keys, values, seeing[:, None])
    return found.transpose(1, 2).flatten(2).masked_fill(blind, 0.0)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, H * Dh] -> [B, H, T, Dh]"""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def rotate(x: Tensor, rotary: nn.Module, positions: Tensor) -> Tensor:
    """Rotary position embedding of queries or keys. x [B, H, T, Dh], positions [B, T]"""
    cos, sin = rotary(x, positions)
    return apply_rotary_pos_emb(x, x, cos, sin)[0]
