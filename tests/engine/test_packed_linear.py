"""Lean forward and packed products compute what the model's own forward computes, or step aside."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ARCHITECTURES, SIZES, make, tiny
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specbench.engine import cache
from specbench.engine.backends import forwards, openvino_llama, packed_linear
from specbench.engine.backends.packed_linear import Packed
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.interface import Taps
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.tree import build
from specbench.engine.verify import Lossless

OTHERS = {  # kinds that have a lean forward, in shapes that the default target has not
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "no-groups": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 4})),
    "wide-heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16)),
    "stretched": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
}


@pytest.fixture(autouse=True)
def always_packed(monkeypatch):
    """What is timed on tiny layers says nothing: packed products are to be tested, not chosen."""
    monkeypatch.setattr(packed_linear, "_time", lambda weights, packs: (True,) * len(packed_linear.ROWS))


def loud(model) -> Target:
    """Large random weights, biases and norms: a forward that forgets one of them shows."""
    torch.manual_seed(3)
    model.config._attn_implementation = "sdpa"
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.4) if p.ndim == 2 else p.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = None
    return Target(model)


def answer(target, drafter, tokens=24):
    events = decode(target, drafter, [3, 1, 4, 1, 5, 9, 2, 6], Limits(tokens), Lossless(), Sampler())
    return [t for e in events for t in ([e.token] if isinstance(e, Prefill) else e.tokens)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16, 33, 64, 65, 130])
@pytest.mark.parametrize("biased", [True, False])
def test_a_packed_product_is_the_product(rows, biased):
    layer = nn.Linear(48, 40, bias=biased).requires_grad_(False)
    x = torch.randn(1, rows, 48)
    expected = layer(x)
    packed_linear.Packing().optimize([layer])
    with torch.inference_mode():
        assert isinstance(layer.forward, packed_linear.Packed)
        assert torch.allclose(layer(x), expected, atol=1e-5) and layer(x).shape == expected.shape


@pytest.mark.parametrize("biased", [True, False])
def test_a_copy_in_a_shorter_type_rounds_inputs_and_results_to_it(biased):
    layer = nn.Linear(48, 40, bias=biased).requires_grad_(False)
    x = torch.randn(1, 5, 48)
    packed_linear.Packing(dtype=torch.bfloat16).optimize([layer])
    rounded = F.linear(x.bfloat16().float(), layer.weight.bfloat16().float())
    exact = F.linear(x, layer.weight)
    expected = rounded.bfloat16().float() if packed_linear.packable(layer.weight, torch.bfloat16) else exact
    with torch.inference_mode():
        found = layer(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found - (layer.bias if biased else 0), expected, rtol=2**-7, atol=1e-5)


def test_packed_weights_multiply_only_where_they_pay(monkeypatch):
    monkeypatch.setattr(packed_linear, "_time", lambda weights, packs: tuple(rows >= 4 for rows in packed_linear.ROWS))
    layer, seen = nn.Linear(48, 40), []
    packed_linear.Packing().optimize([layer])
    monkeypatch.setattr(
        packed_linear, "multiply", lambda x, packed, bias: seen.append(x.shape[0]) or F.linear(x, layer.weight)
    )
    with torch.inference_mode():
        for rows in (1, 2, 3, 4, 9, 200):
            layer(torch.randn(rows, 48))
    assert seen == [3, 4, 9, 200]  # 3 rows count as 4


def test_what_is_trained_or_cast_multiplies_as_before():
    layer = nn.Linear(8, 8)
    packed_linear.Packing().optimize([layer])
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is not None


def test_products_can_be_set_aside():
    layer = nn.Linear(8, 8)
    packed_linear.Packing().optimize([layer])
    with packed_linear.unpacked([nn.Sequential(layer)]):
        assert "forward" not in vars(layer)
    assert isinstance(layer.forward, packed_linear.Packed)


@pytest.fixture(params=["openvino", "fused"])
def kernels(request, monkeypatch):
    """With OpenVINO, and as on a platform for which it has no wheel."""
    monkeypatch.setattr(forwards, "has_openvino", lambda: request.param == "openvino")
    return request.param


@pytest.mark.parametrize("kind", OTHERS)
def test_the_lean_forward_is_the_models(kind, kernels):
    plain, lean = loud(OTHERS[kind]()), loud(OTHERS[kind]())
    before = lean.fingerprint()
    lean.optimize_for_inference()
    assert (plain.kernels, lean.kernels) == ("plain", kernels)
    assert lean.fingerprint() == before, "the parameters are not what they were"
    taps = Taps(hidden=(0, -1), kv=(1,))
    with torch.inference_mode():
        found = []
        for target in (plain, lean):
            target.reset(40, taps)
            first = target.prefill(torch.arange(9))
            found.append((first, target.forward(branching())))
    for one, other in zip(*found, strict=True):
        for a, b in [(one.last, other.last), (one.logits, other.logits)]:
            assert torch.allclose(a, b, atol=2e-4, rtol=1e-4)
        for layer, hidden in one.hidden.items():
            assert torch.allclose(hidden, other.hidden[layer], atol=2e-5 * float(hidden.abs().max()))
        for layer, (keys, values) in one.kv.items():
            assert torch.allclose(keys, other.kv[layer][0], atol=2e-4) and torch.allclose(
                values, other.kv[layer][1], atol=2e-4
            )


def test_answers_are_the_models_while_the_cache_grows(kernels, monkeypatch):
    monkeypatch.setattr(cache, "STEP", 8)
    expected = answer(tiny(), make("none", tiny()), 40)
    lean = tiny()
    lean.optimize_for_inference()
    assert lean.kernels == kernels
    for drafter in ("none", "eagle2", "none"):  # the last one in a cache that is small again
        assert answer(lean, make(drafter, lean), 40) == expected


def test_a_batch_is_each_of_its_sequences(kernels):
    lean = loud(OTHERS["qwen2"]())
    lean.optimize_for_inference()
    tokens = torch.arange(14).view(2, 7)
    positions = torch.arange(7).expand(2, 7)
    with torch.inference_mode():
        together = lean.run(tokens, positions, None, None)
        alone = [lean.run(row[None], positions[:1], None, None) for row in tokens]
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)


def test_layers_that_are_read_later_are_computed_then(kernels):
    plain, lean = loud(OTHERS["untied"]()), loud(OTHERS["untied"]())
    lean.optimize_for_inference()
    for hidden in ((), (1,), (0, 1), ()):
        with torch.inference_mode():
            found = []
            for target in (plain, lean):
                target.reset(40, Taps(hidden=hidden))
                found.append(target.prefill(torch.arange(9)))
        assert set(found[1].hidden) == set(hidden)
        for layer in hidden:
            assert torch.allclose(found[0].hidden[layer], found[1].hidden[layer], atol=1e-3)


@pytest.mark.parametrize("kind", ["untied", "qwen2"])
def test_narrow_passes_read_weights_in_bfloat16_where_that_is_exact(kind):
    plain, lean, finer = (loud(OTHERS[kind]()) for _ in range(3))
    with torch.no_grad():
        for p in [*plain.model.parameters(), *lean.model.parameters()]:
            p.copy_(p.bfloat16())
    for target in (lean, finer):
        target.optimize_for_inference()
    assert lean.fused.halves and not finer.fused.halves
    for tokens in (1, 4, 5):
        with torch.inference_mode():
            expected = plain.score(torch.arange(tokens)[None], torch.arange(tokens)[None], None, None)[1]
            found = lean.score(torch.arange(tokens)[None], torch.arange(tokens)[None], None, None)[1]
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    for halved, stored in ((True, "bf16"), (False, "f32")):
        operators = lean.fused.request(halved).get_compiled_model().get_runtime_model().get_ops()
        products = [op.get_rt_info() for op in operators if op.get_rt_info()["layerType"].value == "FullyConnected"]
        weights = [info["runtimePrecision"].value for info in products]
        assert weights.count(stored) >= 4 * lean.layers + 1, weights


def test_drafters_that_read_layers_and_others_take_turns_on_one_graph(monkeypatch):
    built = []
    monkeypatch.setattr(
        openvino_llama._Graph, "build", lambda graph, build=openvino_llama._Graph.build: built.append(1) or build(graph)
    )
    target = loud(OTHERS["untied"]())
    target.optimize_for_inference()
    for hidden in ((1,), (), (1,), (), (1,)):
        with torch.inference_mode():
            target.reset(40, Taps(hidden=hidden))
            target.prefill(torch.arange(9))
    assert len(built) == 2, "once without layers that are read, once with one"


def test_openvino_is_loaded_without_its_telemetry():
    program = "import sys, specbench.engine.backends.openvino_llama; print(*[m for m in sys.modules if 'telemetry' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = set(done.stdout.split())
    assert "openvino_telemetry" in names, "it must stand in the way of the real one"
    assert not {name for name in names if name.startswith("openvino_telemetry.")}


def test_without_room_for_copies_no_graph_is_compiled():
    target = loud(OTHERS["untied"]())
    target.packing.room = lambda: 1000
    target.optimize_for_inference()
    assert target.kernels == "fused"


def branching():
    """Two children, three grandchildren of one, one below."""
    parents = torch.tensor([-1, 0, 0, 1, 1, 3])
    return build(
        torch.tensor([5, 7, 8, 9, 1, 2]), parents, torch.tensor([0, 1, 1, 2, 2, 3]), torch.tensor([0, 0, 1, 0, 1, 0]), 3, 2
    )


@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_a_kind_that_is_not_known_keeps_its_own_forward_with_fast_products(architecture):
    target = tiny(architecture)
    expected = answer(target, make("none", target))
    target.optimize_for_inference()
    assert target.fused is None
    assert isinstance(target.decoder.layers[0].mlp.up_proj.forward, packed_linear.Packed)
    assert answer(target, make("none", target)) == expected


def test_a_model_that_does_otherwise_than_its_kind_keeps_its_own_forward():
    model = ARCHITECTURES["llama"]()
    model.model.layers[1].mlp.act_fn = nn.GELU()
    target = loud(model)
    target.optimize_for_inference()
    assert target.fused is None


@pytest.mark.parametrize("drafter", ["eagle2", "vanilla", "moa", "medusa", "beagle", "coral_router"])
def test_drafters_draft_the_same_on_fast_products(drafter):
    slow = tiny()
    expected = answer(slow, make(drafter, slow))
    fast = tiny()
    fast.optimize_for_inference()
    made = make(drafter, fast)
    made.optimize_for_inference()
    assert answer(fast, made) == expected


@pytest.mark.parametrize("drafter", ["eagle2", "medusa", "coral_router"])
def test_drafters_may_multiply_in_bfloat16_while_the_target_does_not(drafter):
    plain = tiny()
    expected = answer(plain, make("none", plain))
    target = tiny()
    target.draft_dtype = torch.bfloat16
    target.optimize_for_inference()
    made = make(drafter, target)
    made.optimize_for_inference()
    assert made.head is not target.head and made.head.weight is target.head.weight
    copies = {part.forward.packed.dtype for part in made.modules() if isinstance(vars(part).get("forward"), Packed)}
    assert copies == {torch.bfloat16 if packed_linear.packable(target.head.weight, torch.bfloat16) else torch.float32}
    assert answer(target, made) == expected


def test_a_draft_model_keeps_the_forward_that_reproduces_its_own():
    plain = tiny()
    expected = answer(plain, make("none", plain))
    target = tiny()
    target.draft_dtype = torch.bfloat16
    target.optimize_for_inference()
    made = make("vanilla", target)
    made.optimize_for_inference()
    assert made.draft_dtype is None and made.packing is target.packing and made.lm.fused is not None
    assert answer(target, made) == expected
