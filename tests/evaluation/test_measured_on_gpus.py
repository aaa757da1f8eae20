"""How memory is measured on a GPU, on the CPU: torch's allocator is a fake that counts the caches."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import configuration, make, tiny
from hydra.utils import instantiate

from specbench.engine.verify import Lossless
from specbench.evaluation import isolated, measurements
from specbench.evaluation.runner import BoundDrafter

PROMPT = list(range(3, 20))


class Allocator:
    """Peaks as a GPU's allocator counts them: `others` bytes of other drafters, and what the caches hold."""

    others = 1000

    def __init__(self, caches):
        self.caches = caches

    def start(self):
        pass

    def bytes(self):
        return self.others + sum(cache.nbytes for cache in self.caches)

    def read(self):
        return {"allocator": self.bytes(), "reserved": 7, "device": 9}


@pytest.mark.parametrize("drafter", ["none", "eagle2", "vanilla", "hybrid", "coral_router"])
def test_other_drafters_and_earlier_prompts_are_no_part_of_a_peak(drafter, monkeypatch):
    target = tiny()
    made = make(drafter, target)
    caches = isolated._caches(target, made)
    monkeypatch.setattr(isolated.timing, "PeakMemory", lambda device: Allocator(caches))
    bound = BoundDrafter(drafter, made, Lossless())
    first = isolated.memory_on_gpu(target, bound, PROMPT, 8)
    again = isolated.memory_on_gpu(target, bound, PROMPT, 8)
    assert first == again, "caches of the prompt before were counted"
    modules = [target.model, *([made.weights_owner] if isinstance(made.weights_owner, torch.nn.Module) else [])]
    own = sum(p.nbytes for p in {p for module in modules for p in module.parameters()})
    assert own <= first["loaded"] < own + 20_000, "buffers are small"
    assert first["peak"] == first["loaded"] + first["kv"] and first["kv"] > 0
    assert (first["reserved"], first["device"]) == (7, 9) and "driver" not in first


@pytest.mark.parametrize(("quantity", "measure"), [("memory", "memory_on_gpu"), ("training", "training")])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_on_a_gpu_nothing_is_loaded_a_second_time(quantity, measure, device, monkeypatch):
    called = []
    monkeypatch.setattr(isolated, "call", lambda work, *_: called.append("a process of its own") or {})
    monkeypatch.setattr(isolated, "memory_on_gpu", lambda target, *_: called.append(target) or {})
    packing = SimpleNamespace(timed={})
    target = SimpleNamespace(device=torch.device(device), packing=packing)
    if device == "cuda":
        monkeypatch.setattr(isolated, measure, lambda *given: called.append(target if target in given else None) or {})
    arm = SimpleNamespace(spec=None, bound=None, label="a")
    measurements.QUANTITIES[quantity].measure(measurements.Workload(target, [[1]], 4, None), arm)
    assert called == ([target] if device == "cuda" else ["a process of its own"])


def test_a_training_step_is_measured_beside_a_loaded_target(monkeypatch):
    target = tiny()
    drafter = instantiate(configuration("eagle2", "drafter.weights=null").drafter)
    spec = SimpleNamespace(make_drafter=lambda weights: drafter, drafter={})
    monkeypatch.setattr(isolated, "replace", lambda spec, **_: spec)
    monkeypatch.setattr(isolated, "loaded", lambda *_: pytest.fail("the target was loaded once more"))
    found = isolated.training(spec, target)
    assert found["tokens_per_s"] > 0 and found["parameters"] > 0


def test_a_training_step_is_measured_with_the_objective_that_made_the_weights(tmp_path, monkeypatch):
    """But for what the run says itself, and for options that there are no more."""
    trained = {"name": "hass", "noise": 0.5, "topk": 3, "gone": 1}
    recipe = {"settings": {"phases": [{"drafter": {"steps": 1}}, {"drafter": {"steps": 2, "beta": 0.25}}]}}
    (tmp_path / "provenance.json").write_text(json.dumps({"drafter": trained, "recipe": recipe}))
    options = configuration("hass", f"drafter.weights={tmp_path}", "+drafter.topk=7").drafter
    spec = SimpleNamespace(drafter=dict(options), make_drafter=lambda **changes: instantiate(options, **changes))
    seen = []
    monkeypatch.setattr(isolated, "replace", lambda spec, **_: spec)
    monkeypatch.setattr(isolated.costs, "training", lambda target, drafter: seen.append(drafter) or {})
    isolated.training(spec, tiny())
    (drafter,) = seen
    assert (drafter.steps, drafter.beta, drafter.topk, drafter.noise) == (2, 0.25, 7, 0.5)
