"""Linear layers in 8 bits, for writing text fast where the processor multiplies bytes. Knows no model.

Weights are scaled a row, inputs a token, both symmetrically; the product is exact in 32 bits. Inputs of language models
have a few channels far larger than the rest, so each channel's range is first shared between input and weight
(SmoothQuant, arXiv:2211.10438, alpha = 0.5), judged by a little text. Text written so is nearly the model's own; the
states that drafters learn from never come from here.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = 127
FLOAT = ("down_proj",)  # the input of an MLP's last product has outliers that 8 bits do not hold


class Int8Linear(nn.Module):
    """Stands in for a `nn.Linear`, without gradients.

    Args:
        largest: [in] the largest value of each input channel, as far as is known.
    """

    weight: Tensor  # [in, out] int8
    scale: Tensor  # [out]
    rough: Tensor  # [in]

    def __init__(self, linear: nn.Linear, largest: Tensor):
        super().__init__()
        weight = linear.weight.detach().float()  # [out, in]
        smooth = (largest.clamp(min=1e-5) / weight.abs().amax(0).clamp(min=1e-5)).sqrt()  # [in]
        weight = weight * smooth
        scale = weight.abs().amax(1).clamp(min=1e-12) / LARGEST  # [out]
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8).t())
        self.register_buffer("scale", scale)
        self.register_buffer("rough", 1 / smooth)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        flat = x.flatten(0, -2).float() * self.rough
        scale = flat.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(LARGEST)  # [N, 1]
        product = torch._int_mm(flat.div_(scale).round_().to(torch.int8), self.weight)  # [N, out] int32
        y = product.float().mul_(scale).mul_(self.scale)
        y = y if self.bias is None else y.add_(self.bias)
        return y.to(x.dtype).unflatten(0, x.shape[:-1])


@torch.no_grad()
def quantised(model: Any, text: Tensor) -> Any:
    """A copy of a Transformers model whose linear layers, head included, are `Int8Linear`.

    text: [1, T] ids, by which the ranges of inputs are judged.
    """
    model = copy.deepcopy(model)
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and name not in FLOAT
    ]
    largest: dict[nn.Module, Tensor] = {}
    hooks = [
        child.register_forward_pre_hook(lambda m, x: largest.update({m: x[0].abs().flatten(0, -2).amax(0).float()}))
        for _, _, child in places
    ]
    model(text)
    for hook in hooks:
        hook.remove()
    for parent, name, child in places:
        setattr(parent, name, Int8Linear(child, largest[child]))
    return model
