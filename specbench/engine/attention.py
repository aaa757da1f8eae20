"""Attention on a GPU: which of PyTorch's kernels run, and masks in the form that they read without copies."""

import functools

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

ALIGNMENT = 8  # numbers, at multiples of which the rows of a bias must begin for CUDA's kernels


def prepare(device: torch.device) -> None:
    """Set how attention runs in this process. On CUDA without cuDNN's kernels.

    cuDNN makes a plan, in tens of milliseconds, for every new pair of query and key lengths, and in decoding every pass has
    new ones. PyTorch prefers it on GPUs of Hopper's generation.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def aligned_bias(mask: Tensor, dtype: torch.dtype, repeats: int = 1) -> Tensor:
    """A mask as a bias on scores. bool [B, 1, N, S] -> [B, 1, repeats * N, S]; what is a bias already stays as it is.

    Off the CPU its rows begin at multiples of `ALIGNMENT`: PyTorch would copy another one so in every layer.
    """
    if mask.dtype != torch.bool:
        return mask
    batch, heads, new, keys = mask.shape
    width = keys if mask.device.type == "cpu" else -(-keys // ALIGNMENT) * ALIGNMENT
    bias = torch.empty(batch, heads, repeats * new, width, dtype=dtype, device=mask.device)[..., :keys]
    mask = mask[:, :, None].expand(-1, -1, repeats, -1, -1)
    torch.where(mask, *_biases(dtype, mask.device), out=bias.unflatten(2, (repeats, new)))
    return bias


@functools.cache
def _biases(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """What is added to the score of a key that is seen, and of one that is not."""
    with torch.inference_mode(False):  # so that they can be used outside of it, too
        return torch.zeros((), dtype=dtype, device=device), torch.full((), -torch.inf, dtype=dtype, device=device)


@torch.no_grad()
def kernels(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """Names of the kernels that PyTorch takes for attention in the pass over a prompt, and in one over a tree.

    heads: of keys; the queries of one key head are folded into it, as in `backends.fused_llama`.
    """
    x = torch.zeros(1, heads, 16, head_dim, dtype=dtype, device=device)
    bias = aligned_bias(torch.ones(1, 1, 16, 16, dtype=torch.bool, device=device), dtype)
    return {"prompt": _kernel(x, None), "tree": _kernel(x, bias)}


def _kernel(x: Tensor, bias: Tensor | None) -> str:
    choice = torch._fused_sdp_choice(x, x, x, attn_mask=bias, dropout_p=0.0, is_causal=bias is None)
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
