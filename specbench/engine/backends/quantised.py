"""Linear layers in 8 bits, for generating training text fast on processors with byte products. Knows no model.

Weights are scaled per row, inputs per token, both symmetrically; the product is exact in 32 bits. Other processors multiply
in float32, exact up to `EXACT` inputs: the same text, at the target's own speed. Inputs of language models have a few
channels far larger than the rest, so each channel's range is first split between input and weight (SmoothQuant,
arXiv:2211.10438, alpha = 0.5), calibrated on a little text. The generated text is nearly the model's own; the states that
drafters are trained on never come from here.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = 127
EXACT = 2**24 // LARGEST**2  # a sum of so many products of 8-bit numbers is exact in float32
FLOAT = ("down_proj",)  # stays floating-point: its inputs have outliers that 8 bits cannot represent


def multiplies_bytes() -> bool:
    """Can the processor multiply bytes? If not, `torch._int_mm` takes 20 times as long as float32."""
    return bool(torch.cpu.get_capabilities().get("avx512_vnni", False))


class Int8Linear(nn.Module):
    """Replaces a `nn.Linear`, without gradients.

    Args:
        largest: [in] the largest magnitude of each input channel in the calibration text.
        bytewise: store the rounded weights as bytes; else the same integers as float32. None: whichever is fast here.
    """

    weight: Tensor  # [in, out] int8 or float32, integers
    scale: Tensor  # [out]
    input_scale: Tensor  # [in]

    def __init__(self, linear: nn.Linear, largest: Tensor, bytewise: bool | None = None):
        super().__init__()
        self.bytewise = multiplies_bytes() if bytewise is None else bytewise
        weight = linear.weight.detach().float()  # [out, in]
        smooth = (largest.clamp(min=1e-5) / weight.abs().amax(0).clamp(min=1e-5)).sqrt()  # [in]
        weight = weight * smooth
        scale = weight.abs().amax(1).clamp(min=1e-12) / LARGEST  # [out]
        rounded = (weight / scale[:, None]).round()
        self.register_buffer("weight", (rounded.to(torch.int8) if self.bytewise else rounded).t())
        self.register_buffer("scale", scale)
        self.register_buffer("input_scale", 1 / smooth)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        flat = x.flatten(0, -2).float() * self.input_scale
        scale = flat.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(LARGEST)  # [N, 1]
        rounded = flat.div_(scale).round_()
        product = torch._int_mm(rounded.to(torch.int8), self.weight).float() if self.bytewise else rounded @ self.weight
        y = product.mul_(scale).mul_(self.scale)  # [N, out]
        y = y if self.bias is None else y.add_(self.bias)
        return y.to(x.dtype).unflatten(0, x.shape[:-1])


@torch.no_grad()
def quantised(model: Any, text: Tensor) -> Any:
    """A copy of a Transformers model whose linear layers, head included, are `Int8Linear`. text: [1, T] calibration ids."""
    model = copy.deepcopy(model)
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and name not in FLOAT
    ]
    largest: dict[nn.Module, Tensor] = {}
    hooks = [
        child.register_forward_pre_hook(lambda m, x: largest.update({m: x[0].abs().flatten(0, -2).amax(0).float()}))
        for _, _, child in linears
    ]
    model(text)
    for hook in hooks:
        hook.remove()
    for parent, name, child in linears:
        setattr(parent, name, Int8Linear(child, largest[child]))
    return model
