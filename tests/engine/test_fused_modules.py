"""Modules of drafters in fewer kernels compute what Transformers' own compute, and train as these do."""

import pytest
import torch
from conftest import TRAINED, make, tiny
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specbench.engine.backends import fused_modules
from specbench.engine.backends.fused_modules import fuse_modules
from specbench.engine.backends.packed_linear import Packing

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 1}
ROPES = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
]


def layer(keys, bias=False, rope=ROPES[0]):
    config = LlamaConfig(**SIZES, num_key_value_heads=keys, attention_bias=bias, rope_parameters=dict(rope))
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    made = torch.nn.ModuleDict({"layer": LlamaDecoderLayer(config, 0), "rotary": LlamaRotaryEmbedding(config)})
    for name, parameter in made.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return made.eval()


def outputs(made, mask):
    """Of seven tokens, and of four behind them."""
    x, cache = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(1)), DynamicCache()
    positions, found = torch.arange(40, 51).expand(2, -1), []
    for part in (slice(0, 7), slice(7, 11)):
        rotary = made["rotary"](x[:, part], positions[:, part])
        seen = None if mask is None and part.start == 0 else torch.ones(4 if part.start else 7, part.stop).tril(part.start)
        masked = None if seen is None else seen.bool()[None, None]
        found.append(made["layer"](x[:, part], attention_mask=masked, past_key_values=cache, position_embeddings=rotary))
    return torch.cat(found, 1)


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
@pytest.mark.parametrize(("keys", "bias", "mask"), [(4, False, "given"), (2, True, None), (1, False, "given")])
def test_a_layer_computes_what_it_did(keys, bias, mask, rope):
    plain, fused = layer(keys, bias, rope), layer(keys, bias, rope)
    fuse_modules(fused.modules(), Packing())
    with torch.inference_mode():
        torch.testing.assert_close(outputs(fused, mask), outputs(plain, mask), atol=1e-5, rtol=1e-5)
    changed = {n for n, m in fused.named_modules() if "forward" in vars(m)}
    parts = {"layer.self_attn", "layer.mlp", "layer.input_layernorm", "layer.post_attention_layernorm"}
    assert changed == parts | ({"rotary"} if rope["rope_type"] != "dynamic" else set())


def test_gradients_take_the_modules_own_way(monkeypatch):
    plain, fused = layer(2), layer(2)
    fuse_modules(fused.modules(), Packing())
    monkeypatch.setattr(fused_modules, "self_attention", None)
    for made in (plain, fused):
        outputs(made, "given").square().mean().backward()
    for (name, own), other in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other.grad, own.grad, msg=name)


def test_joined_weights_are_the_layers_own():
    """A step of training changes what is multiplied together."""
    made = layer(2)
    fuse_modules(made.modules(), Packing(room=lambda: 0))
    with torch.inference_mode():
        before = outputs(made, "given")
    with torch.no_grad():
        made["layer"].self_attn.k_proj.weight.mul_(2)
        made["layer"].mlp.up_proj.weight.mul_(2)
    plain = layer(2)
    plain.load_state_dict(made.state_dict())
    with torch.inference_mode():
        after = outputs(made, "given")
        torch.testing.assert_close(after, outputs(plain, "given"), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, after)


def test_biases_on_some_projections_are_left_to_the_module():
    made = layer(2)
    made["layer"].self_attn.k_proj.bias = torch.nn.Parameter(torch.ones(16))
    fuse_modules(made.modules(), Packing())
    assert "forward" not in vars(made["layer"].self_attn)


@pytest.mark.parametrize("drafter", TRAINED)
def test_no_drafters_target_is_changed(drafter):
    """What a drafter shares with its target keeps its forward, and its tensors their places."""
    target = tiny()
    before = {n: (p.data_ptr(), p.clone()) for n, p in target.model.named_parameters()}
    make(drafter, target).optimize_for_inference()
    fused = {n for n, m in target.model.named_modules() if "forward" in vars(m) and not isinstance(m, torch.nn.Linear)}
    assert not fused
    for name, parameter in target.model.named_parameters():
        place, values = before[name]
        assert parameter.data_ptr() == place and torch.equal(parameter, values), name
