"""Where drafters start: what is small is heard, states have the target's size, layers may be the target's own."""

import pytest
import torch
from conftest import make, tiny

from specbench.common.errors import SpecBenchError
from specbench.engine import weights
from specbench.engine.interface import Batch, Taps


def unequal(architecture="llama", norm=1.83, embedding=0.05):
    """A target whose embeddings are small and whose final norm is not 1, as real ones are."""
    target = tiny(architecture)
    with torch.no_grad():
        target.decoder.norm.weight.fill_(norm - 1 if architecture == "gemma3" else norm)
        target.embedding.weight.mul_(embedding)
    return target


def rms(x):
    return float(x.float().pow(2).mean().sqrt())


@torch.no_grad()
def halves(made, target):
    """How large each half of a pair is where fc has multiplied it: (embedding's, state's)."""
    tokens = target.greedy((3, 4), 20)
    states, _, _ = target.tapped(tokens, Taps())
    embedded, known = made.fc.weight.chunk(2, 1)
    return rms(made.embedding(tokens) @ embedded.T), rms(states @ known.T)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_balanced_start_hears_embeddings_as_loudly_as_states(architecture):
    target = unequal(architecture)
    quiet, loud = halves(make("eagle2", target), target)
    assert quiet < 0.25 * loud
    quiet, loud = halves(make("eagle2", target, "+drafter.balanced_start=true"), target)
    assert 0.5 < quiet / loud < 2
    alone = [make("eagle2_feature", target, "drafter.fc=true", f"+drafter.balanced_start={on}") for on in ("true", "false")]
    assert torch.equal(*(made.fc.weight for made in alone))  # has no embeddings


def test_a_balanced_start_leaves_loaded_weights_alone(tmp_path, monkeypatch):
    target = unequal()
    weights.save(make("eagle2", target), tmp_path, {"target_fingerprint": target.fingerprint()})
    monkeypatch.setattr(target, "greedy", None)  # not even measured
    made = make("eagle2", target)
    made.balanced_start, made.weights = True, str(tmp_path)
    made.bind(target)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@torch.no_grad()
def test_a_fresh_vanilla_predicts_states_of_the_targets_size(architecture):
    target = unequal(architecture)
    made = make("vanilla", target)
    tokens = target.greedy((3, 4), 20)
    states, _, _ = target.tapped(tokens, Taps())
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    predicted = made._states(Batch(tokens, states, everywhere, everywhere))
    assert rms(predicted) == pytest.approx(rms(states), rel=0.05)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@torch.no_grad()
def test_vanilla_may_start_as_the_target_itself(architecture):
    """With all of the target's layers it is the target; with two, its first and its last."""
    target = unequal(architecture)
    options = "+drafter.start_from=target", "+drafter.intermediate_size=null"
    made = make("vanilla", target, "+drafter.layers=3", *options)
    tokens = target.greedy((3, 4), 20)
    states, _, _ = target.tapped(tokens, Taps())
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    predicted = made._states(Batch(tokens, states, everywhere, everywhere))
    torch.testing.assert_close(predicted, states, atol=1e-4, rtol=1e-4)
    made = make("vanilla", target, "+drafter.layers=2", *options)
    for layer, source in zip(made.network.layers, (target.decoder.layers[0], target.decoder.layers[2]), strict=True):
        assert torch.equal(layer.self_attn.q_proj.weight, source.self_attn.q_proj.weight)
        assert layer.self_attn.q_proj.weight.data_ptr() != source.self_attn.q_proj.weight.data_ptr()
        assert layer.self_attn.q_proj.weight.requires_grad


def test_a_layer_of_another_kind_is_refused():
    with pytest.raises(SpecBenchError, match="does not fit"):
        make("vanilla", tiny("gemma3"), "+drafter.start_from=target", "+drafter.intermediate_size=null")


@torch.no_grad()
def test_a_narrower_vanilla_keeps_the_loudest_neurons():
    """Neurons that say nothing go first, and nothing changes without them; it is never wider than the target."""
    target = unequal("llama")
    for layer in target.decoder.layers:
        layer.mlp.down_proj.weight[:, 5:13] = 0
    tokens = target.greedy((3, 4), 20)
    states, _, _ = target.tapped(tokens, Taps())
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    batch = Batch(tokens, states, everywhere, everywhere)
    for width in (40, 400):
        made = make(
            "vanilla", target, "+drafter.start_from=target", "+drafter.layers=3", f"+drafter.intermediate_size={width}"
        )
        assert made.network.layers[0].mlp.up_proj.out_features == min(width, 48)
        torch.testing.assert_close(made._states(batch), states, atol=1e-4, rtol=1e-4)
