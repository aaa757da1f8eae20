"""A target spread over several GPUs, without one: two kinds of device stand in for two GPUs."""

import pytest
import torch
from conftest import DRAFTERS, make, tiny
from test_device import META, Waits

from specbench.common.errors import SpecBenchError
from specbench.engine import target as targets
from specbench.engine.target import Target

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def spread() -> Target:
    """Layers and head on one device, the embedding on another."""
    with Waits():
        model = tiny().model.to(META)
        model.get_input_embeddings().to_empty(device="cpu")
        original, Target._check = Target._check, lambda self: None
        try:
            return Target(model)
        finally:
            Target._check = original


@pytest.mark.parametrize("drafter", [d for d in DRAFTERS if d not in ("self_speculation", "early_exit")])
def test_binding_moves_no_part_of_the_target(drafter):
    target = spread()
    before = {name: (p.device, p.data_ptr()) for name, p in target.model.named_parameters()}
    assert {device for device, _ in before.values()} == {META, CPU}
    with Waits():
        made = make(drafter, target)
    assert {name: (p.device, p.data_ptr()) for name, p in target.model.named_parameters()} == before
    if isinstance(made.weights_owner, torch.nn.Module):
        of_target = set(target.model.parameters())
        own = [p for p in made.weights_owner.parameters() if p not in of_target]
        assert own and {p.device for p in own} == {META}, "its own are where the head is"


def test_own_modules_take_the_targets_precision():
    target = Target(tiny().model.to(torch.bfloat16))
    made = make("eagle2", target)
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("device_map", "device", "refused"),
    [
        ({"model.embed_tokens": 0, "lm_head": 1}, CUDA, None),
        ({"": "cpu"}, CPU, None),
        ({}, CUDA, None),
        ({"model.layers.0": 0, "model.layers.31": "cpu", "lm_head": "cpu"}, CUDA, "model.layers.31, lm_head"),
        ({"model.layers.0": 0, "model.layers.31": "disk"}, CUDA, "model.layers.31"),
    ],
)
def test_a_target_that_does_not_fit_the_gpus_is_refused(device_map, device, refused, monkeypatch):
    model = tiny().model
    model.hf_device_map = device_map
    monkeypatch.setattr(targets, "read_model", lambda *_: model)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: self)
    if refused is None:
        assert Target.load("there", torch.float32, device, device_map="auto").layers == 3
        return
    with pytest.raises(SpecBenchError, match=f"no room for {refused}, which") as error:
        Target.load("there", torch.float32, device, device_map="auto")
    assert "\n" not in str(error.value)
