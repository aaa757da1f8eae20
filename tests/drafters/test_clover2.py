"""Clover-2: its recurrence, its loss, where it starts, files of the official layout."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, configuration, make, tiny
from drafting import batch_of, trained
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file
from test_chain_drafts import counts_alike

from specbench.common.errors import SpecBenchError
from specbench.engine import checkpoints
from specbench.engine.target import Target

GOLDEN = ROOT / "tests" / "golden" / "official" / "clover2"


@torch.no_grad()
def stirred(target, *overrides):
    made = make("clover2", target, *overrides)
    for part in (made.entry, made.gate, made.first, made.later):
        for parameter in part.parameters():
            parameter.normal_(0, 0.2)
    return made


@torch.inference_mode()
@pytest.mark.parametrize("options", [(), ("+drafter.layers=2", "+drafter.head_rows=false")])
def test_training_computes_what_decoding_computes_at_every_level(options):
    target = tiny()
    made, batch = stirred(target, *options), batch_of(target, rows=1, length=16)
    tokens, predicted = batch.tokens[0], list(made.predict(batch, made.heads))
    assert len(predicted) == 5
    for state in (2, 5, 8):
        target.reset(60, made.taps)
        made.reset(60)
        states = target.prefill(tokens[: state + 1])
        made.observe(states.select(torch.arange(2)), int(tokens[2]))  # in two cycles
        if state > 2:
            made.observe(states.select(torch.arange(2, state + 1)), int(tokens[state + 1]))
        found, last = made.root_logits(), state if state > 2 else 1
        for level in range(made.heads):
            expected = target.logits(predicted[level][0, last])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            token, own = tokens[last + 2 + level][None], torch.ones(1, level + 1, dtype=torch.bool)
            found = made.expand(token, torch.tensor([level - 1]), level + 1, own)[0] if level < 4 else found


def test_the_loss_is_the_sum_over_heads():
    target = tiny()
    made, batch = stirred(target), batch_of(target, rows=2, length=10)
    batch.scored[:, :4] = False
    expected = 0.0
    for head, predicted in enumerate(made.predict(batch, 5)):
        counts = batch.scored[:, head + 1 :]
        truth, guess = batch.states[:, head + 1 :][counts], predicted[counts]
        p, log_q = F.linear(truth, target.head.weight).softmax(-1), F.linear(guess, target.head.weight).log_softmax(-1)
        expected += 0.7**head * (10 * F.smooth_l1_loss(guess, truth) - (p * log_q).sum(-1).mean())
    torch.testing.assert_close(made.loss(batch)["loss"], expected, atol=1e-5, rtol=1e-5)


def test_a_gate_is_the_papers():
    made = stirred(tiny())
    h, e = torch.randn(5, 32), torch.randn(5, 32)
    gate, rms = made.gate, (h.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    normed = h / rms * gate.input_layernorm.weight
    q, k, v = normed @ gate.q.weight.T + gate.q.bias, e @ gate.k.weight.T + gate.k.bias, e @ gate.v.weight.T + gate.v.bias
    added = []
    for head in range(4):
        a, b = q[:, 8 * head : 8 * head + 8], k[:, 8 * head : 8 * head + 8]
        cos = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
        added.append(cos[:, None] * v[:, 8 * head : 8 * head + 8])
    torch.testing.assert_close(gate(h, e), h + torch.cat(added, -1), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_it_starts_as_the_targets_last_layer(architecture):
    target = tiny(architecture)
    factors = torch.tensor([-1.0, 2.0, 0.5, 3.0]).repeat(8)
    target.decoder.norm.weight.copy_(factors - 1 if architecture == "gemma3" else factors)
    made = make("clover2", target, "+drafter.layers=2")
    for norm in (made.prefix_norm, made.output_norm):  # one factor, of their size: states had those
        torch.testing.assert_close(norm.weight, torch.full((32,), (14.25 / 4) ** 0.5), atol=1e-4, rtol=1e-4)
    last = target.decoder.layers[-1].self_attn
    same = [torch.equal(layer.self_attn.q_proj.weight, last.q_proj.weight) for layer in made.prefix_layers]
    assert same == [architecture != "gemma3"] * 2  # its layers have more norms
    narrow = make("clover2", target, "drafter.intermediate_size=16")
    assert narrow.prefix_layers[0].mlp.up_proj.out_features == 16
    for linear in (made.first, made.later, made.gate.q):
        away = linear.weight - torch.eye(32, linear.in_features)
        assert away.min() >= -1e-6 and 0.005 < away.max() <= 0.0101 and not linear.bias.any()


def test_walking_the_table_counts_what_replay_counts():
    target = tiny()
    found = counts_alike(target, trained("clover2", target)[0])
    assert 0 < found.passed[0] < found.reached[0]


def test_states_that_heads_cannot_cut_are_refused():
    target = tiny()
    target.config.num_attention_heads = 5
    with pytest.raises(SpecBenchError, match="states of 32, 5 heads, which do not divide them"):
        make("clover2", target)


# The official layout -------------------------------------------------------------------------------------------------


def official(folder):
    target = Target.load(GOLDEN / "target", torch.float32, torch.device("cpu"))
    made = instantiate(configuration("clover2").drafter)
    made.checkpoint = checkpoints.read(str(folder))
    made.bind(target)
    return made.eval(), target


def spoiled(folder, change):
    tensors = load_file(GOLDEN / "drafter" / "model.safetensors")
    change(tensors)
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"clover": {"num_heads": 5}}))
    return folder


def test_a_file_decides_layers_rope_and_embeddings(tmp_path):
    made, target = official(GOLDEN / "drafter")
    assert (made.layers, made.head_rows) == (1, False)
    head = target.head.weight.detach().clone()
    rows, _ = official(
        spoiled(tmp_path / "c", lambda t: t.update({"clover_embed_tokens.weight": head, "lm_head.weight": head.clone()}))
    )
    assert rows.head_rows and torch.equal(rows.embedded(torch.tensor([7]))[0], head[7])
    target.config.rope_parameters["rope_theta"] = 500000.0
    made.bind(target)
    assert float(made.prefix_rotary.inv_freq[1]) == pytest.approx(10000 ** (-2 / 12))
    assert float(make("clover2", target).prefix_rotary.inv_freq[1]) == pytest.approx(500000 ** (-2 / 12))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.pop("clover_head_mlp2.weight") is t.pop("clover_head_mlp2.bias"),
            "no tensor is named like a Clover-2",
        ),
        (lambda t: t.pop("clover_head_norm.weight"), r"lacks output_norm\.weight"),
        (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(96, 48)}), r"lacks prefix_layers\.1\."),
        (lambda t: t.update({"clover_more.weight": torch.ones(2)}), r"also holds clover_more\.weight"),
        (lambda t: t.update({"clover_embed_tokens.weight": torch.ones(192, 48)}), "its embedding is not the target's"),
        (lambda t: t.update({"lm_head.weight": torch.ones(192, 48)}), "its LM head is not the target's"),
        (lambda t: t.update({"clover_head_mlp.weight": torch.ones(32, 32)}), "made for another target"),
    ],
)
def test_a_wrong_file_is_refused_by_name(change, words, tmp_path):
    with pytest.raises(SpecBenchError, match=words) as error:
        official(spoiled(tmp_path / "c", change))
    assert "\n" not in str(error.value)
