"""Hydra: heads that read what was drafted, own output layers, the loss's terms, files of the official layout."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, configuration, make, tiny
from decoding import PROMPT, generate, plain
from drafting import batch_of, optimise, trained
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file

from specbench.common.errors import SpecBenchError
from specbench.engine import checkpoints
from specbench.engine.policies import Chain
from specbench.engine.target import Target
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import answer_states, replay

GOLDEN = ROOT / "tests" / "golden" / "official" / "hydra"


@torch.no_grad()
def stirred(target, *overrides):
    """Heads whose every matrix says something."""
    made = make("hydra", target, *overrides)
    for part in (made.blocks, made.shortcuts):
        for parameter in part.parameters():
            parameter.normal_(0, 0.2)
    return made


def observed(made, target, tokens):
    target.reset(60, made.taps)
    made.reset(60)
    made.observe(target.prefill(tokens[:-1]), int(tokens[-1]))


@torch.inference_mode()
def test_a_head_reads_every_token_drafted_before_its_own():
    """Another token at any level above changes the logits below; a sibling's does not."""
    target = tiny()
    made, text = stirred(target, "drafter.heads=4"), torch.tensor(PROMPT)
    ids, own = [3, 8, 21], lambda n: torch.ones(1, n, dtype=torch.bool)

    def below(root, chain):
        observed(made, target, torch.cat([text, torch.tensor([root])]))
        found = made.root_logits()
        for depth, token in enumerate(chain, start=1):
            found = made.expand(torch.tensor([token]), torch.tensor([depth - 2]), depth, own(depth))[0]
        return found

    expected = below(5, ids)
    assert not torch.allclose(below(6, ids), expected, atol=1e-3)
    for level in range(3):
        other = [t + (i == level) for i, t in enumerate(ids)]
        assert not torch.allclose(below(5, other), expected, atol=1e-3)
    observed(made, target, torch.tensor([*PROMPT, 5]))
    made.expand(torch.tensor([7, 3]), torch.tensor([-1, -1]), 1, torch.eye(2, dtype=torch.bool))
    made.expand(torch.tensor([9, 8]), torch.tensor([0, 1]), 2, torch.eye(4, dtype=torch.bool)[2:])
    beside = made.expand(torch.tensor([21]), torch.tensor([3]), 3, own(5))[0]
    torch.testing.assert_close(beside, expected, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("options", [(), ("+drafter.projected=true", "+drafter.layers=2"), ("+drafter.head_rank=4",)])
def test_training_reads_what_decoding_reads_at_every_level(options):
    """From every position of a text: logits of each head, as the loss makes them and as a chain of drafts does."""
    target = tiny()
    made, batch = stirred(target, *options), batch_of(target, rows=1, length=14)
    for correction in made.corrections:
        correction[1].weight.normal_(0, 0.2)
    tokens, read = batch.tokens[0], made.inputs(batch)
    for state in (3, 6, 9):
        observed(made, target, tokens[: state + 2])
        found = made.root_logits()
        for level in range(made.heads):
            at = torch.tensor([0]), torch.tensor([state])
            logits = made.output(made.network(read(level, *at), level), level)[0]
            torch.testing.assert_close(logits, found, atol=1e-4, rtol=1e-4)
            some = torch.tensor([3, 50, 7])
            few = made.output(made.network(read(level, *at), level), level, some)[0]
            torch.testing.assert_close(few, found[some], atol=1e-4, rtol=1e-4)
            if level + 1 < made.heads:
                token = tokens[state + 2 + level][None]
                found = made.expand(token, torch.tensor([level - 1]), level + 1, torch.ones(1, level + 1).bool())[0]


def test_reading_drafts_pays():
    """Where the next token follows from the last one, Hydra's second head knows more than Medusa's."""
    target = tiny()
    answers = [HeldOutAnswer(row.tolist(), 4) for row in batch_of(target).tokens[:4]]
    found = {}
    for name in ("medusa", "hydra"):
        made, _ = trained(name, target)
        made.growth = Chain(3)
        found[name] = replay(target, made, answers)
    assert found["hydra"].tau > found["medusa"].tau


def test_the_loss_is_the_sum_of_its_terms():
    """Teacher's and text's cross-entropy and the regression, written out for every head."""
    target = tiny()
    batch = batch_of(target, rows=3, length=12)
    made = stirred(target, "+drafter.classification=0.7", "+drafter.hard=0.3", "+drafter.regression=2.0")
    read, expected = made.inputs(batch), 0.0
    length = batch.tokens.shape[1]
    for level in range(made.heads):
        rows, columns = torch.ones(3, length - level - 2).nonzero(as_tuple=True)
        hidden = made.network(read(level, rows, columns), level)
        log_q = F.linear(hidden, target.head.weight).log_softmax(-1)
        truth = batch.states[rows, columns + level + 1]
        p = F.linear(truth, target.head.weight).softmax(-1)
        labels = batch.tokens[rows, columns + level + 2]
        expected += 0.7 * -(p * log_q).sum(-1).mean() + 0.3 * F.nll_loss(log_q, labels)
        expected += 2.0 * F.smooth_l1_loss(hidden, truth)
    torch.testing.assert_close(made.loss(batch)["loss"], expected, atol=1e-5, rtol=1e-5)


def test_noise_and_dropout_are_for_training_alone():
    target = tiny()
    made, batch = stirred(target, "+drafter.noise=5", "+drafter.dropout=0.2"), batch_of(target, rows=2)
    quiet = [float(made.loss(batch)["loss"].detach()) for _ in range(2)]
    assert quiet[0] == quiet[1]
    made.train()
    noise, dropout = made.noise, made.dropout
    for made.noise, made.dropout in ((noise, 0.0), (0.0, dropout)):
        loud = [float(made.loss(batch)["loss"].detach()) for _ in range(2)]
        assert loud[0] != loud[1] != quiet[0]


def test_own_output_layers_are_trained_and_drafted_with(tmp_path):
    target = tiny()
    made, batch = make("hydra", target, "+drafter.head_per_level=true"), batch_of(target)
    before = made.outputs[1].weight.detach().clone()
    assert torch.equal(before, target.head.weight)
    losses = optimise(made, batch, 30)
    assert losses[-1] < 0.8 * losses[0] and not torch.equal(made.outputs[1].weight, before)
    assert torch.equal(target.head.weight, before)
    assert generate(target, made)[0] == plain(target, PROMPT, 40)


def test_calibration_chooses_the_tree_and_is_what_a_level_accepts():
    target = tiny()
    made, _ = trained("hydra", target)
    tokens = PROMPT + plain(target, PROMPT, 30)
    accuracy = made.calibrate([answer_states(target, HeldOutAnswer(tokens, len(PROMPT)))])
    assert len(accuracy) == made.heads and all(sum(row) <= 1 + 1e-6 for row in accuracy)
    hits = [0, 0]
    with torch.inference_mode():
        for root in range(len(PROMPT), len(tokens) - 1):
            observed(made, target, torch.tensor(tokens[: root + 1]))
            hits[0] += int(made.root_logits().argmax()) == tokens[root + 1]
            hits[1] += 1
    assert accuracy[0][0] == pytest.approx(hits[0] / hits[1])
    assert made.nodes == made.growth.nodes


# The official layout -------------------------------------------------------------------------------------------------


def official(folder):
    target = Target.load(GOLDEN / "target", torch.float32, torch.device("cpu"))
    made = instantiate(configuration("hydra").drafter)
    made.checkpoint = checkpoints.read(str(folder))
    made.bind(target)
    return made.eval()


def spoiled(folder, change):
    tensors = load_file(GOLDEN / "drafter" / "hydra_lm_head.safetensors")
    config = json.loads((GOLDEN / "drafter" / "config.json").read_text())
    change(tensors, config)
    folder.mkdir()
    save_file(tensors, folder / "hydra_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(tensors, *parts):
    for name in [n for n in tensors if any(part in n for part in parts)]:
        del tensors[name]


def test_the_official_file_decides_the_shape():
    made = official(GOLDEN / "drafter")
    assert (made.heads, made.layers, made.projected, made.head_per_level, made.head_bias) == (4, 2, True, True, True)
    assert made.nodes == 64 and made.growth.depth == 4


def test_a_file_without_output_layers_shares_the_targets(tmp_path):
    made = official(spoiled(tmp_path / "c", lambda tensors, config: without(tensors, "hydra_lm_head")))
    assert not made.head_per_level and not len(made.outputs)


def test_a_pickle_with_the_embeddings_copy_is_read_too(tmp_path):
    tensors = load_file(GOLDEN / "drafter" / "hydra_lm_head.safetensors")
    tensors["input_embed_fn.weight"] = load_file(GOLDEN / "target" / "model.safetensors")["model.embed_tokens.weight"]
    shutil.copy(GOLDEN / "drafter" / "config.json", tmp_path)
    torch.save(tensors, tmp_path / "hydra_lm_head.pt")
    assert official(tmp_path).heads == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: without(t, "res_connection"), "no tensor is named like a sequential head's"),
        (lambda t, c: without(t, "prefix_embeding"), "it has no prefix layer; only hydra_head_arch=prefix-mlp"),
        (lambda t, c: c.update(hidden_state_offset=1), "its hidden_state_offset=1"),
        (lambda t, c: without(t, "hydra_mlp.2.3"), r"lacks blocks\.2\.1\.bias and 1 other|lacks blocks\.2\.1\.bias"),
        (lambda t, c: t.update({"hydra_mlp.9x": torch.ones(2)}), r"also holds hydra_mlp\.9x"),
        (lambda t, c: t.update({"input_embed_fn.weight": torch.ones(192, 48)}), "its embedding is not the target's"),
        (lambda t, c: t.update({"hydra_mlp.0.1.linear.weight": torch.ones(48, 48)}), "made for another target"),
    ],
)
def test_a_wrong_file_is_refused_by_name(change, words, tmp_path):
    with pytest.raises(SpecBenchError, match=words) as error:
        official(spoiled(tmp_path / "c", change))
    assert "\n" not in str(error.value)


def test_no_server_has_a_model_of_its_kind():
    target = tiny()
    for server in ("vllm", "sglang"):
        with pytest.raises(SpecBenchError, match=f"{server} has no model of Hydra's kind"):
            make("hydra", target).export_tensors(server, target)
