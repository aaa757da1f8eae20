"""Which forward a model decodes with: the fastest that knows its layers and reproduces its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

from specbench.common.environment import installed
from specbench.common.errors import SpecBenchError
from specbench.engine.backends import weight_only
from specbench.engine.backends.fused_llama import FusedLlama, like_llama, reproduces

OPENVINO_COPIES = 1.5  # memory that it takes, by the bytes of the weights; measured with 40 and 106 M parameters
ROUNDING_COPIES = 0.65  # what rounding takes meanwhile, by the bytes of the weights as floats; measured with 40 M


def fastest(model: Any) -> FusedLlama | None:
    """A forward for a `CausalLM`, or None: its own. OpenVINO's graph where it can run, else PyTorch's with few kernels.

    Raises `SpecBenchError` for a quantised model that OpenVINO's graph cannot run here: any other forward runs it no faster
    than its original.
    """
    if model.window is None and like_llama(model.decoder):
        for kind in _kinds(model):
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


def openvino_bytes(layers: int, head: int, quantised: str | None = None) -> int:
    """Bytes that OpenVINO's graph takes beside the model. layers, head: numbers that their weights hold."""
    bits = weight_only.FLOAT_BITS
    stored, rounding = (bits, 0.0) if quantised is None else (weight_only.bits(quantised), ROUNDING_COPIES * bits)
    return int((OPENVINO_COPIES * (layers * stored + head * bits) + layers * rounding) / 8)


def _kinds(model: Any) -> list[Callable[..., FusedLlama]]:
    """The forwards to try, fastest first; of a quantised model OpenVINO's alone."""
    others: list[Callable[..., FusedLlama]] = [FusedLlama] if model.quantised is None else []
    layers, head = (sum(p.numel() for p in part.parameters()) for part in (model.decoder.layers, model.head))
    if not has_openvino() or openvino_bytes(layers, head, model.quantised) > model.packing.room():
        return others
    from specbench.engine.backends import openvino_llama

    graph = partial(openvino_llama.OpenVinoLlama, quantised=model.quantised)
    return [graph, *others] if openvino_llama.supports(model.decoder) else others
