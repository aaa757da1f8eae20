"""Attention on a GPU, as far as that shows without one: cuDNN's kernels are off, and no layer has to copy its mask."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from conftest import make, tiny
from test_device import META, SAMPLERS, Waits, cycles_of, on_meta

from specbench.engine import attention, loading
from specbench.engine.backends.fused_llama import FusedLlama
from specbench.engine.decode import Limits, decode
from specbench.engine.interface import Step
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless

CPU = torch.device("cpu")


@pytest.fixture
def cudnn():
    """Restore what the process allows."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


class Stopped(Exception):
    """Loading came as far as reading weights."""


@pytest.mark.parametrize("weights", ["random", "trained"])
@pytest.mark.parametrize(("device", "allowed"), [("cuda", False), ("cpu", True)])
def test_a_target_on_cuda_is_loaded_without_cudnns_attention(weights, device, allowed, cudnn, home, monkeypatch):
    def stop(*_, **__):
        raise Stopped

    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(device == "cuda"))
    monkeypatch.setattr(loading.environment, "free_memory", lambda *_, **__: 1 << 40)
    monkeypatch.setattr(Target, "random", stop)
    monkeypatch.setattr(Target, "load", stop)
    spec = loading.ModelSpec("tiny", path=str(home / "model"), device=device, weights=weights)
    with pytest.raises(Stopped):
        spec.load()
    assert torch.backends.cuda.cudnn_sdp_enabled() == allowed


@contextmanager
def masks_of(monkeypatch):
    """The masks that PyTorch's attention is given."""
    seen, original = [], F.scaled_dot_product_attention

    def noted(query, key, value, attn_mask=None, *rest, **more):
        seen.append(attn_mask)
        return original(query, key, value, attn_mask, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", noted)
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
        yield seen


@pytest.mark.parametrize("sampler", SAMPLERS[:1])
@pytest.mark.parametrize("drafter", ["eagle2", "beagle", "moa", "vanilla", "medusa"])
def test_no_layer_has_to_copy_its_mask(drafter, sampler, monkeypatch):
    """A bias in the queries' precision whose rows begin at multiples of 8 numbers is read as it is."""
    target, made = on_meta(drafter)
    with masks_of(monkeypatch) as seen:
        cycles_of(target, made, sampler, Waits())
    biases = [mask for mask in seen if mask is not None]
    assert biases and all(bias.dtype == torch.float32 for bias in biases)
    assert {stride % attention.ALIGNMENT for bias in biases for stride in bias.stride()[:-1]} == {0}
    assert {bias.stride(-1) for bias in biases} == {1}


@pytest.mark.parametrize("keys", [1, 7, 8, 13])
@pytest.mark.parametrize("repeats", [1, 2])
def test_a_bias_hides_what_its_mask_hides(keys, repeats):
    mask = torch.rand(2, 1, 3, keys, generator=torch.Generator().manual_seed(keys)) < 0.5
    bias = attention.aligned_bias(mask, torch.bfloat16, repeats)
    assert bias.dtype == torch.bfloat16 and torch.equal(bias == 0, mask.repeat(1, 1, repeats, 1))
    assert torch.equal(bias == -torch.inf, ~mask.repeat(1, 1, repeats, 1)) and bias.is_contiguous()
    there = attention.aligned_bias(mask.to(META), torch.bfloat16, repeats)
    assert there.shape == bias.shape and there.stride(-2) % attention.ALIGNMENT == 0
    assert attention.aligned_bias(there, torch.float32) is there, "a bias stays"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_pass_with_biases_computes_what_one_with_masks_does(architecture, monkeypatch):
    """Transformers' own forward, as it runs off the CPU, on the CPU."""
    target = tiny(architecture)
    tokens, cache = torch.arange(12)[None], target.new_cache(12)
    positions = torch.arange(12)[None]
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    masks = target._masks(tokens, positions, mask, cache)
    expected = target.run(tokens, positions, mask, None)
    found = target._masks(tokens.to(META), positions.to(META), mask.to(META), None)
    assert (set(found) if isinstance(found, dict) else None) == (set(masks) if isinstance(masks, dict) else None)
    original = target._bool_masks

    def biases(*arguments):
        made = original(*arguments)
        return (
            {k: attention.aligned_bias(m, target.dtype) for k, m in made.items()}
            if isinstance(made, dict)
            else (attention.aligned_bias(made, target.dtype))
        )

    monkeypatch.setattr(target, "_masks", biases)
    assert torch.allclose(target.run(tokens, positions, mask, None), expected, atol=1e-5)


def test_the_fused_forwards_bias_is_read_as_it_is():
    target = tiny()
    fused = FusedLlama(target.decoder, target.head, target.packing)
    bias = fused._bias(torch.ones(1, 1, 5, 13, dtype=torch.bool, device=META), torch.bfloat16)
    assert bias.shape == (1, 1, 10, 13) and bias.stride(-2) == 16


def test_kernels_are_named_as_pytorch_chooses_them(monkeypatch):
    assert attention.kernels(2, 8, torch.float32, CPU) == {"prompt": "flash", "tree": "flash"}
    asked = []

    def choose(q, k, v, attn_mask, dropout_p, is_causal):
        asked.append((attn_mask is not None, is_causal))
        return 2 if attn_mask is not None else 1

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    assert attention.kernels(2, 8, torch.float32, CPU) == {"prompt": "flash", "tree": "efficient"}
    assert asked == [(False, True), (True, False)]


@pytest.mark.parametrize("drafter", ["none", "eagle2", "beagle", "moa", "medusa"])
def test_outputs_may_lie_as_cudas_kernels_lay_them(drafter, monkeypatch):
    """Position by position, whatever their shape says: a view of them is not possible where queries share keys."""
    original = F.scaled_dot_product_attention

    def by_position(*arguments, **options):
        return original(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    def ids():
        target = tiny()
        made = make(drafter, target)
        made.optimize_for_inference()
        found = decode(target, made, [3, 4, 5], Limits(24), Lossless(), Sampler())
        return [i for e in found for i in (e.tokens if isinstance(e, Step) else [e.token])]

    expected = ids()
    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", by_position)
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", by_position)
        assert ids() == expected
