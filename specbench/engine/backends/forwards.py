"""Which forward a model decodes with: the fastest that knows its layers and reproduces its own."""

from typing import Any

from specbench.common.environment import installed
from specbench.engine.backends.fused_llama import FusedLlama, like_llama, reproduces

OPENVINO_COPIES = 1.5  # memory that it takes, by the bytes of the weights; measured with 40 and 106 M parameters


def fastest(model: Any) -> FusedLlama | None:
    """A forward for a `CausalLM`, or None: its own. OpenVINO's graph where it can run, else PyTorch's with few kernels."""
    if model.window is not None or not like_llama(model.decoder):
        return None
    for kind in _kinds(model):
        made = kind(model.decoder, model.head, model.packing)
        if reproduces(made, model):
            return made
    return None


def has_openvino() -> bool:
    """Is it installed? Not every platform has a wheel."""
    return installed("openvino") is not None


def _kinds(model: Any) -> list[type[FusedLlama]]:
    copied = OPENVINO_COPIES * sum(p.nbytes for part in (model.decoder.layers, model.head) for p in part.parameters())
    if not has_openvino() or copied > model.packing.room():
        return [FusedLlama]
    from specbench.engine.backends import openvino_llama

    return [openvino_llama.OpenVinoLlama, FusedLlama] if openvino_llama.supports(model.decoder) else [FusedLlama]
