"""Which forward a model decodes with: the fastest that knows its layers and reproduces its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from specbench.common.environment import installed
from specbench.common.errors import SpecBenchError
from specbench.engine.backends import weight_only
from specbench.engine.backends.fused_llama import FusedLlama, like_llama, reproduces

OPENVINO_COPIES = 1.5  # memory that it takes, by the bytes of the weights; measured with 40 and 106 M parameters
HALVED_COPIES = 2.1  # the same of a graph of weights in bfloat16, by their bytes; measured with 106 M
ROUNDING_COPIES = 0.65  # what rounding takes meanwhile, by the bytes of the weights as floats; measured with 40 M


def fastest(model: Any, fixed_shapes: bool = False) -> FusedLlama | None:
    """A forward for a `CausalLM`, or None: its own. OpenVINO's graph where it can run, else PyTorch's with few kernels.

    Raises `SpecBenchError` for a quantised model that OpenVINO's graph cannot run here: any other forward runs it no faster
    than its original.
    """
    if model.window is None and like_llama(model.decoder):
        for kind in _kinds(model, fixed_shapes):
            made = kind(model.decoder, model.head, model.packing)
            if reproduces(made, model):
                return made
    if model.quantised is not None:
        raise SpecBenchError(
            f"model.quantised={model.quantised}: OpenVINO's graph has no memory, or does not reproduce it; leave it out"
        )
    return None


def has_openvino() -> bool:
    """Is it installed? Not every platform has a wheel."""
    return installed("openvino") is not None


def openvino_bytes(layers: int, head: int, quantised: str | None = None, halves: bool = False) -> int:
    """Bytes that OpenVINO's graph takes beside the model. layers, head: numbers that their weights hold.

    halves: with a second graph, of weights in bfloat16.
    """
    bits = weight_only.FLOAT_BITS
    stored, rounding = (bits, 0.0) if quantised is None else (weight_only.bits(quantised), ROUNDING_COPIES * bits)
    size = OPENVINO_COPIES * (layers * stored + head * bits) + layers * rounding
    if halves:
        size += HALVED_COPIES * (layers * (bits // 2 if quantised is None else stored) + head * bits // 2)
    return int(size / 8)


def exact_in_half(model: Any) -> bool:
    """Does bfloat16 hold the weights that a pass of few tokens reads? Quantised layers stay integers."""
    parts = [model.head] if model.quantised is not None else [model.head, model.decoder.layers]
    weights = [p for part in parts for p in part.parameters() if p.ndim > 1]
    return all(p.dtype == torch.float32 and not bool((p.view(torch.int32) & 0xFFFF).any()) for p in weights)


def _kinds(model: Any, fixed_shapes: bool) -> list[Callable[..., FusedLlama]]:
    """The forwards to try, fastest first; of a quantised model OpenVINO's alone, which has no passes in fixed shapes."""
    others: list[Callable[..., FusedLlama]] = [FusedLlama] if model.quantised is None else []
    layers, head = (sum(p.numel() for p in part.parameters()) for part in (model.decoder.layers, model.head))
    if fixed_shapes or not has_openvino() or openvino_bytes(layers, head, model.quantised) > model.packing.room():
        return others
    from specbench.engine.backends import openvino_llama

    halves = openvino_bytes(layers, head, model.quantised, True) <= model.packing.room() and exact_in_half(model)
    graph = partial(openvino_llama.OpenVinoLlama, quantised=model.quantised, halves=halves)
    return [graph, *others] if openvino_llama.supports(model.decoder) else others
