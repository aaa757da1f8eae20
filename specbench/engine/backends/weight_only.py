"""Weights of linear layers in 8 or 4 bits, inputs and sums in float32: a target that is another one than its original.

    int8    integers from -127 to 127 times a scale for each output row
    int4    (integers from 0 to 15 minus an offset) times a scale, for each `GROUP` neighbouring inputs of a row

The latter is gpt-fast's int4 (EAGLE, Table 4), and what GGUF calls Q4_1. Scales and offsets have so few significant bits
that the products are exact in float32, and rounding weights that are rounded already finds the same integers, scales and
offsets. So the model's own parameters hold the rounded values, every forward computes one and the same target, and nothing
need be stored beside them.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from specbench.common.errors import SpecBenchError

Kind = Literal["int8", "int4"]
GROUP = 32  # inputs of a row with one scale in int4
STEPS = 64  # an offset is a multiple of 1 / STEPS, so that (integer - offset) has at most 10 significant bits
FLOAT_BITS = 32
SCALE_BITS = {"int8": 16, "int4": 14}
ROUNDED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Rounded(NamedTuple):
    """A weight [E, D]: integers [E, D / G, G] as bytes; scales and offsets [E, D / G, 1], the latter None for int8."""

    integers: Tensor
    scales: Tensor
    offsets: Tensor | None

    @property
    def weight(self) -> Tensor:
        """[E, D] float32."""
        shifted = self.integers if self.offsets is None else self.integers - self.offsets
        return (shifted * self.scales).flatten(1)


def rounded(weight: Tensor, kind: str) -> Rounded:
    """The nearest of a kind."""
    if kind == "int8":
        scales = _shortened(weight.detach().abs().amax(1, keepdim=True) / 127, SCALE_BITS[kind])[:, None]
        return Rounded((weight.detach()[:, None] / scales).round_().to(torch.int8), scales, None)
    groups = weight.detach().unflatten(1, (-1, GROUP))
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    scales = _shortened((high - low) / 15, SCALE_BITS[kind])
    offsets = (-low / scales * STEPS).round_() / STEPS
    return Rounded((groups / scales + offsets).round_().clamp_(0, 15).to(torch.uint8), scales, offsets)


def _shortened(scales: Tensor, bits: int) -> Tensor:
    """float32, above 0, cut to so many significant bits."""
    return (scales.clamp(min=1e-30).contiguous().view(torch.int32) & -(1 << 24 - bits)).view(torch.float32)


def bits(kind: str) -> float:
    """Bits that a weight takes, its part of scales and offsets included."""
    return 8.0 if kind == "int8" else 4 + 2 * FLOAT_BITS / GROUP


def pays() -> bool:
    """Can OpenVINO multiply with packed integers on this processor, which makes a plain pass faster? It needs AVX2."""
    return bool(torch.cpu.get_capabilities().get("avx2", False))


@torch.no_grad()
def round_weights(decoder: Any, kind: str) -> None:
    """Replace the weights of a decoder's linear layers by their rounded values. Raises `SpecBenchError`."""
    linears = [m for name, m in decoder.layers.named_modules() if name.rpartition(".")[2] in ROUNDED]
    uneven = [m.in_features for m in linears if isinstance(m, nn.Linear) and m.in_features % GROUP]
    if kind == "int4" and uneven:
        raise SpecBenchError(f"model.quantised=int4: layers with {uneven[0]} inputs, no multiple of {GROUP}; use int8")
    for linear in linears:
        linear.weight.copy_(rounded(linear.weight, kind).weight)
