"""A quantised target: rounded weights in the model, the same ones in OpenVINO's graph, and refusals in one line."""

import pytest
import torch
from conftest import composed, tiny
from hydra.utils import instantiate

from specbench.common.errors import SpecBenchError
from specbench.engine.backends import forwards, openvino_llama, weight_only
from specbench.engine.pretrained import config_of
from specbench.engine.tree import build
from specbench.tuning import cost_model

KINDS = ("int8", "int4")
WIDE = {"intermediate_size": 64}  # a multiple of a group, and larger weights than a pass's rounding
PROMPT = torch.arange(9)


def quantised(kind, lean=True, **sizes):
    target = tiny(**WIDE, **sizes)
    target.quantise(kind)
    if lean:
        target.optimize_for_inference()
    return target


def spec(home, *overrides):
    return instantiate(composed("run", f"model.path={home / 'model'}", "model.device=cpu", *overrides).model)


def odd():
    """Weights with a row of zeros, a row of one value, an outlier, and groups that do not reach zero."""
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    weight[0], weight[1], weight[2, 5], weight[3], weight[4] = 0, 0.3, 40, weight[3].abs() + 5, -weight[4].abs() - 5
    return weight


# Rounding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_rounded_weight_is_the_nearest_and_rounds_to_itself(kind):
    weight = odd()
    once = weight_only.rounded(weight, kind)
    steps = once.scales.expand(once.integers.shape).flatten(1)
    assert ((once.weight - weight).abs() <= 0.52 * steps).all() and once.weight.isfinite().all()
    again = weight_only.rounded(once.weight, kind)
    assert torch.equal(again.weight, once.weight) and torch.equal(again.integers, once.integers)
    assert (once.weight[0] == 0).all(), "zeros stay zeros"


def test_integers_fit_their_bits():
    int8, int4 = (weight_only.rounded(odd(), kind) for kind in KINDS)
    assert int8.scales.shape == (24, 1, 1) and int8.integers.abs().max() == 127
    assert int4.scales.shape == int4.offsets.shape == (24, 2, 1)
    assert (int4.integers.min(), int4.integers.max()) == (0, 15)


def test_weights_in_four_bits_with_a_least_value_a_group_are_found_again():
    """As GGUF's Q4_1 has them, of which the default model's files are made."""
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(16, (8, 2, 32), generator=generator)
    integers[..., 0], integers[..., 1] = 0, 15
    steps = torch.rand(8, 2, 1, generator=generator) + 0.1
    found = weight_only.rounded(((integers - 7.3) * steps).flatten(1), "int4").weight.unflatten(1, (2, -1))
    assert ((found - (integers - 7.3) * steps).abs() < 0.02 * steps).all()


# The target -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_layers_products_are_rounded(kind):
    original, target = tiny(**WIDE), quantised(kind, lean=False)
    changed = {
        name for (name, p), q in zip(original.model.named_parameters(), target.model.parameters(), strict=True)
        if not torch.equal(p, q)
    }  # fmt: skip
    assert changed == {n for n, p in original.model.named_parameters() if "layers" in n and p.ndim == 2}


def runs(target):
    """Logits of one token behind a prompt: alone, in a tree of 8, and in a batch beside two sorts of neighbours."""
    tokens = torch.arange(20, 28)
    tree = build(tokens, torch.tensor([-1] + [0] * 7), torch.tensor([0] + [1] * 7), torch.tensor([0, *range(7)]), 7, 7)
    lone = build(tokens[:1], torch.tensor([-1]), torch.tensor([0]), torch.tensor([0]), 0, 0)
    text, found = torch.cat([PROMPT, tokens[:1]]), []
    with torch.inference_mode():
        for drafted in (lone, tree):
            target.reset(40)
            target.prefill(PROMPT)
            found.append(target.forward(drafted).logits[0].clone())
        for neighbour in (torch.zeros_like(text), text.flip(0)):
            batch, positions = torch.stack([text, neighbour]), torch.arange(10).expand(2, 10)
            found.append(target.score(batch, positions, None, None)[1][0, -1].clone())
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours_and_is_the_models_own(kind):
    plain, lean = runs(quantised(kind, lean=False)), runs(target := quantised(kind))
    assert target.kernels == "openvino"
    scale = float(plain.abs().max())
    assert (lean - lean[0]).abs().max() < 1e-5 * scale, "alone, in a tree and in a batch"
    assert (lean - plain).abs().max() < 1e-5 * scale, "in OpenVINO and in PyTorch"
    original = runs(tiny(**WIDE))
    assert (plain - original).abs().max() > 1e-3 * scale, "it is another target"


@pytest.mark.parametrize(("kind", "stored"), [("int8", "i8"), ("int4", "u4"), (None, "f32")])
def test_the_graph_multiplies_with_stored_integers(kind, stored):
    target = tiny(**WIDE) if kind is None else quantised(kind)
    target.optimize_for_inference()
    runs(target)
    compiled = target.fused._request().get_compiled_model().get_runtime_model()
    products = [op for op in compiled.get_ops() if op.get_rt_info()["layerType"].value == "FullyConnected"]
    kinds = [op.get_rt_info()["runtimePrecision"].value for op in products]
    assert len(kinds) == 4 * target.layers + 1 and kinds.count(stored) >= 4 * target.layers


def test_a_graph_of_other_weights_is_refused(monkeypatch):
    nibbles = openvino_llama._nibbles
    monkeypatch.setattr(openvino_llama, "_nibbles", lambda integers: nibbles(integers.flip(2)))
    with pytest.raises(SpecBenchError, match="model.quantised=int4"):
        quantised("int4")


def test_costs_of_a_quantised_target_are_its_own():
    original, target = tiny(**WIDE), quantised("int8")
    original.optimize_for_inference()
    assert original.kernels == target.kernels
    assert cost_model.made_for(original, {}).get("quantised") is None
    assert cost_model.made_for(target, {})["quantised"] == "int8"


# Loading --------------------------------------------------------------------------------------------------------------


def test_it_is_loaded_in_float32_and_has_its_originals_fingerprint(home, monkeypatch):
    monkeypatch.setattr("specbench.engine.device.torch.cpu.get_capabilities", lambda: {"amx_bf16": True, "avx2": True})
    (original, _), (target, _) = spec(home, "model.dtype=float32").load(), spec(home, "model.quantised=int8").load()
    assert (target.dtype, target.quantised) == (torch.float32, "int8")
    assert target.fingerprint() == original.fingerprint()
    weights = [t.decoder.layers[0].mlp.up_proj.weight for t in (original, target)]
    assert not torch.equal(*weights)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.device_map=auto"], "not with model.device_map=auto"),
        (["model.dtype=bfloat16"], "leave model.dtype=bfloat16 out"),
        (["model.forward=plain"], "no faster than its original with model.forward=plain"),
    ],
)
def test_what_cannot_be_quantised_is_refused_before_it_is_loaded(overrides, message, home, monkeypatch):
    monkeypatch.setattr("specbench.engine.loading.model_folder", lambda *a: pytest.fail("fetched"))
    with pytest.raises(SpecBenchError, match=message):
        spec(home, "model.quantised=int8", *overrides).load()


def test_machines_where_it_would_be_slower_refuse_it(home, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": False})
    with pytest.raises(SpecBenchError, match="without AVX2"):
        spec(home, "model.quantised=int8").load()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    monkeypatch.setattr(forwards, "has_openvino", lambda: False)
    with pytest.raises(SpecBenchError, match="OpenVINO, which is not installed"):
        spec(home, "model.quantised=int8").load()


@pytest.mark.parametrize("architecture", ["gemma3", "mistral"])
def test_layers_that_the_graph_does_not_know_are_refused(architecture):
    with pytest.raises(SpecBenchError, match="only layers as Llama's"):
        tiny(architecture).quantise("int8")


def test_layers_with_a_part_of_a_group_are_refused():
    with pytest.raises(SpecBenchError, match="48 inputs, no multiple of 32; use int8"):
        tiny().quantise("int4")


def test_without_room_for_the_graph_it_is_refused():
    target = quantised("int8", lean=False)
    target.packing.room = lambda: 1000
    with pytest.raises(SpecBenchError, match="has no memory"):
        target.optimize_for_inference()


def test_the_graph_of_a_quantised_target_takes_less_memory():
    from specbench.engine.memory import estimate

    sizes = {"model_type": "llama", **tiny(**WIDE).config.to_dict()}
    sizes = {k: sizes[k] for k in ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    config = config_of(sizes | {"num_attention_heads": 4}, "shape")
    full, int8, int4 = (
        estimate(config, torch.float32, torch.device("cpu"), 64, quantised=kind) for kind in (None, *KINDS)
    )
    assert full.copies > int8.copies > int4.copies and full.weights == int8.weights == int4.weights
