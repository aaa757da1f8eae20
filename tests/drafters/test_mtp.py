"""MTP: a module of two norms and a whole layer, its loss over several steps on the text's own tokens."""

import pytest
import torch
import torch.nn.functional as F
from conftest import make, tiny
from drafting import batch_of
from safetensors.torch import save_file

from drafters.distillation import DistillationLoss, HardLabels
from drafters.eagle import following
from specbench.common.errors import SpecBenchError
from specbench.engine import checkpoints, vocabulary


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@torch.no_grad()
def stirred(target, *overrides):
    made = make("mtp", target, *overrides)
    for norm in (made.state_norm, made.token_norm, made.last_norm, made.layer.input_layernorm):
        norm.weight.uniform_(0.5, 1.5)
    return made


@torch.inference_mode()
def test_the_module_is_the_papers():
    """Both streams normed, projected, one whole Llama layer, a final norm."""
    target = tiny()
    made, batch = stirred(target), batch_of(target, rows=2, length=10)
    e = rms(target.embedding(batch.tokens[:, 1:]), made.token_norm.weight)
    x = torch.cat([e, rms(batch.states[:, :-1], made.state_norm.weight)], -1) @ made.fc.weight.T
    positions = torch.arange(9)[None]
    rotary = made.rotary(x, positions)
    attended, _ = made.layer.self_attn(
        rms(x, made.layer.input_layernorm.weight), attention_mask=None, position_embeddings=rotary
    )
    x = x + attended
    x = x + made.layer.mlp(rms(x, made.layer.post_attention_layernorm.weight))
    torch.testing.assert_close(
        made.predict(batch.states[:, :-1], batch), rms(x, made.last_norm.weight), atol=1e-5, rtol=1e-4
    )


@torch.inference_mode()
def test_training_computes_what_decoding_computes_at_every_step():
    target = tiny()
    made, batch = stirred(target), batch_of(target, rows=1, length=14)
    tokens, steps = batch.tokens[0], list(made.aligned(batch.states[:, :-1], batch, 4))
    for last in (3, 6):
        target.reset(60, made.taps)
        made.reset(60)
        made.observe(target.prefill(tokens[: last + 1]), int(tokens[last + 1]))
        found = made.root_logits()
        for step, predicted in enumerate(steps):
            torch.testing.assert_close(found, target.logits(predicted[0, last + step]), atol=1e-4, rtol=1e-4)
            token, own = tokens[last + 2 + step][None], torch.ones(1, step + 1, dtype=torch.bool)
            found = made.expand(token, torch.tensor([step - 1]), step + 1, own)[0]


@pytest.mark.parametrize("vocabulary", [None, torch.arange(5, 40)])
def test_the_loss_is_the_weighted_mean_of_the_steps_cross_entropies(vocabulary):
    target = tiny()
    made, batch = stirred(target), batch_of(target, rows=2, length=12)
    batch.scored[:, :3] = False
    batch.vocabulary, rows = vocabulary, target.head.weight
    counts, labels = batch.scored[:, 1:-1], batch.tokens[:, 2:]
    if vocabulary is not None:
        rows, counts = rows[vocabulary], counts & (labels >= 5) & (labels < 40)
        labels = labels - 5
    losses = [
        F.cross_entropy(F.linear(predicted[:, :-1][counts], rows), labels[counts])
        for predicted in made.aligned(batch.states[:, :-1], batch, 3)
    ]
    expected = (losses[0] + 0.6 * losses[1] + 0.36 * losses[2]) / 1.96
    metrics = made.loss(batch)
    torch.testing.assert_close(metrics["loss"], expected, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(metrics["loss"], made.fc.weight)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected, made.fc.weight)[0], atol=1e-6, rtol=1e-4)


def test_a_label_is_of_the_states_own_sequence():
    target = tiny()
    batch = batch_of(target, rows=1, length=12)
    batch.starts = torch.tensor([[0] * 5 + [5] * 7])
    truth = following(batch)
    found = HardLabels(truth, target.head)
    assert found.count == 8 and found.places[1][:8].tolist() == [0, 1, 2, 5, 6, 7, 8, 9]
    assert found.labels[:8].tolist() == batch.tokens[0, 2:5].tolist() + batch.tokens[0, 7:].tolist()


def test_ids_that_are_drawn_by_chance_count_for_those_that_are_not():
    """The loss against the text is a sampled softmax; that against the target's probabilities is not."""
    target = tiny()
    batch = batch_of(target)
    drawn = torch.randperm(target.vocab_size)
    batch.vocabulary, batch.vocabulary_bias = drawn, torch.rand(len(drawn))
    truth = following(batch)
    guess = torch.randn(*truth.states.shape)
    found = HardLabels(truth, target.head).loss(guess, 0.0, 1.0)["loss"]
    counted = truth.scored.clone()
    counted[:, -1] = False
    logits = target.head(guess[:, :-1])[..., drawn] + batch.vocabulary_bias
    labels = vocabulary.places(drawn, target.vocab_size)[truth.tokens[:, 1:]]
    expected = F.cross_entropy(logits[counted[:, :-1]], labels[counted[:, :-1]])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    plain, soft = (DistillationLoss(truth, target.head, unbiased=on).loss(guess, 0.0, 1.0)["loss"] for on in (False, True))
    batch.vocabulary_bias = None
    without = DistillationLoss(following(batch), target.head, unbiased=True).loss(guess, 0.0, 1.0)["loss"]
    assert plain == without != soft


def test_one_step_is_enough_to_train():
    target = tiny()
    made = make("mtp", target, "+drafter.steps=1")
    assert torch.equal(made.last_norm.weight, torch.ones(32)) and made.fc.bias is None
    batch = batch_of(target)
    metrics = made.loss(batch)
    truth = HardLabels(following(batch), made.head)
    single = truth.loss(made.predict(batch.states[:, :-1], batch), 0.0, 1.0)["loss"]
    torch.testing.assert_close(metrics["loss"], single)


def test_files_and_servers_of_other_methods_are_refused(tmp_path):
    target = tiny()
    made = make("mtp", target)
    for server in ("vllm", "sglang"):
        with pytest.raises(SpecBenchError, match=f"{server} has no model of Mtp's kind"):
            made.export_tensors(server, target)
    save_file({"fc.weight": torch.ones(32, 64)}, tmp_path / "model.safetensors")
    made.checkpoint = checkpoints.read(str(tmp_path))
    with pytest.raises(SpecBenchError, match="no published layout is known for Mtp"):
        made.bind(target)
