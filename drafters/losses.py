"""Losses over the ids that matter for acceptance, with which HASS's Top-K was compared (its loss ablation).

p: the target's probabilities, p_hat: the drafter's, z: its logits, Omega: the target's K likeliest ids.

    top_k    - sum over Omega of p log p_hat
    top_p    the same over the fewest likeliest ids whose p sums to at least P
    both     the same over Omega and over the drafter's own K likeliest: an id in both counts twice
    normed   - sum over Omega of p' log p_hat', both renormalised over Omega
    bild     KL(softmax of d || softmax of d_hat) over Omega, and again over the drafter's own K likeliest: d, d_hat are
             the differences of the target's and the drafter's logits of all pairs, the likelier id first
    recall   1 - mean over x in Omega of s(K - sum over y != x of s(z_y - z_x)), s the sigmoid: a smooth recall at K, since
             the inner sum is how many ids the drafter thinks likelier

The first three are sums of weights times log p_hat; the others' gradients are left to autograd, by the logits of one chunk.

Deviations and choices: the source only names the others. `top_p` looks at 256 ids at most; `both` is our reading of
"bi-directional"; `normed` is one loss for "with" and "without softmax": renormalised probabilities are a softmax of the K
logits; `bild` is BiLD (arXiv:2406.13555), `recall` the surrogate of arXiv:2108.11179, at temperatures of 1.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Ranking = Literal["top_k", "top_p", "both", "normed", "bild", "recall"]
LARGEST = 256  # ids of `top_p`


def weighted_ids(kind: Ranking, p: Tensor, log_q: Tensor, k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Weights and ids [M, n] of a loss that is - sum of weight x log p_hat. p, log_q: [M, V]"""
    mass, ids = p.topk(min(LARGEST, p.shape[-1]) if kind == "top_p" else k, dim=-1)
    if kind == "top_p":
        mass = mass * (mass.cumsum(-1) - mass < top_p)
    if kind == "both":
        own = log_q.topk(k, dim=-1).indices
        mass, ids = torch.cat([mass, p.gather(-1, own)], -1), torch.cat([ids, own], -1)
    return mass, ids


def normed(p: Tensor, z: Tensor, k: int) -> Tensor:
    """[M, V], [M, V] -> [M]"""
    mass, ids = p.topk(k, dim=-1)
    return -(mass / mass.sum(-1, keepdim=True) * z.gather(-1, ids).log_softmax(-1)).sum(-1)


def bild(p: Tensor, z: Tensor, k: int) -> Tensor:
    """[M, V], [M, V] -> [M]"""
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
    first, second = torch.triu_indices(k, k, 1, device=p.device)
    total = z.new_zeros(len(z))
    for leading in (log_p, z.detach()):
        ids = leading.topk(k, dim=-1).indices
        theirs, ours = log_p.gather(-1, ids), z.gather(-1, ids)
        theirs, ours = ((x[:, first] - x[:, second]).log_softmax(-1) for x in (theirs, ours))
        total = total + (theirs.exp() * (theirs - ours)).sum(-1)
    return total


def recall(p: Tensor, z: Tensor, k: int) -> Tensor:
    """[M, V], [M, V] -> [M]"""
    ids = p.topk(k, dim=-1).indices
    above = [(z - z.gather(-1, x[:, None])).sigmoid().sum(-1) - 0.5 for x in ids.unbind(-1)]  # without x itself
    return 1 - (k - torch.stack(above, -1)).sigmoid().mean(-1)


BY_AUTOGRAD: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"normed": normed, "bild": bild, "recall": recall}


def with_slope(kind: Ranking, p: Tensor, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A loss of `BY_AUTOGRAD` [M] and its gradient by the logits. p, logits [M, V] -> [M], [M, V]"""
    with torch.enable_grad():
        leaf = logits.detach().float().requires_grad_()
        value = BY_AUTOGRAD[kind](p, leaf, k)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope
