"""Every drafter found in conf/drafter/: wiring, training forward = decoding forward, falling loss, weights."""

import json
import shutil

import pytest
import torch
from conftest import DRAFTERS, DRAFTING, TRAINED, make, tiny
from decoding import PROMPT, generate, plain
from drafting import batch_of, save_tokenizer, trained
from tree_checks import paths_of

from drafters.vanilla import Vanilla
from specbench.common.errors import SpecBenchError
from specbench.engine import weights
from specbench.engine.drafter import Drafter
from specbench.engine.policies import Chain, Dynamic, best_children
from specbench.engine.sampling import Sampler, draw_without_replacement
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import replay


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_speaks_the_protocol(drafter):
    target = tiny()
    made = make(drafter, target)
    assert isinstance(made, Drafter)
    assert made.name == drafter
    assert (
        (made.active_parameters > 0)
        == (made.passes > 0)
        == (drafter in TRAINED or hasattr(made, "base") or hasattr(made, "kept"))
    )


@pytest.mark.parametrize("drafter", DRAFTING)
@pytest.mark.parametrize("ids", [1, 3])
def test_a_tree_wider_than_the_vocabulary_is_refused_before_anything_is_drafted(drafter, ids):
    target = tiny(vocab_size=ids, eos_token_id=None, bos_token_id=None)
    made, message = None, ""
    try:
        made = make(drafter, target)
    except SpecBenchError as error:
        message = str(error)
    for sampler in (Sampler(), Sampler(1.0, top_k=50)) if made else ():
        assert len(generate(target, made, [0] * 5, 9, sampler=sampler)[0]) == 9
    assert made or f"a vocabulary of {ids} ids; choose a narrower tree=" in message


def test_nothing_takes_more_ids_than_there_are():
    for take in (lambda: best_children(torch.zeros(2, 3), 4), lambda: draw_without_replacement(torch.ones(2, 3), 4, None)):
        with pytest.raises(SpecBenchError, match="takes 4 candidates"):
            take()


@pytest.mark.parametrize("drafter", TRAINED)
@pytest.mark.parametrize("growth", [Chain(4), Dynamic(4, 3, 14)])
def test_cached_tree_drafting_equals_the_uncached_forward_of_each_path(drafter, growth):
    """Grow a tree after two observations; then draft each of its paths alone, from scratch, as a forced chain."""
    target = tiny()
    made = make(drafter, target)
    tokens = torch.tensor(PROMPT + plain(target, PROMPT, 6))
    growth_logits = Recorder(made, growth)
    with torch.inference_mode():
        target.reset(100, made.taps)
        states = target.prefill(tokens)
        rows = torch.arange(len(tokens))
        made.reset(100)
        made.observe(states.select(rows[:4]), int(tokens[4]))
        growth_logits.grow(int(tokens[4]))  # a first cycle whose rows must leave no trace
        made.observe(states.select(rows[4:9]), int(tokens[9]))
        tree, seen = growth_logits.grow(int(tokens[9]))
        ids, parents = tree.tokens.tolist(), tree.parents.tolist()
        compared = 0
        for path in paths_of(parents):
            made.reset(100)
            made.observe(states.select(rows[:9]), int(tokens[9]))
            chain = [ids[n] for n in path[1:]]
            logits = made.root_logits()
            for depth in range(len(chain) + 1):
                prefix = tuple(chain[:depth])
                if prefix in seen:
                    # A router offers a wider level more ids.
                    both = torch.isfinite(seen[prefix]) & torch.isfinite(logits)
                    torch.testing.assert_close(seen[prefix][both], logits[both], atol=2e-4, rtol=1e-4)
                    assert both.sum() > 5
                    compared += 1
                if depth < min(len(chain), growth.depth - 1):  # heads have no more levels than the tree
                    visible = torch.ones(1, depth + 1, dtype=torch.bool)
                    logits = made.expand(torch.tensor([chain[depth]]), torch.tensor([depth - 1]), depth + 1, visible)[0]
    assert compared >= growth.depth


class Recorder:
    """Grows with a drafter and remembers the logits below every prefix that was expanded."""

    def __init__(self, drafter, growth):
        self.drafter, self.growth, self.listed = drafter, growth, drafter.listed

    def root_logits(self):
        self.prefixes, self.seen = [], {}
        self.seen[()] = self.drafter.root_logits()
        return self.seen[()]

    def expand(self, tokens, parent_rows, depth, visible):
        logits = self.drafter.expand(tokens, parent_rows, depth, visible)
        for token, parent, row in zip(tokens.tolist(), parent_rows.tolist(), logits, strict=True):
            self.prefixes.append((*(self.prefixes[parent] if parent >= 0 else ()), token))
            self.seen[self.prefixes[-1]] = row
        return logits

    def grow(self, root):
        tree = self.growth.grow(self, root, Sampler(), None)
        return tree, self.seen


@pytest.mark.parametrize("drafter", TRAINED)
def test_training_forward_equals_decoding_forward(drafter):
    """Teacher-forced agreement, counted by the loss, is the first-token acceptance, counted by drafting."""
    target = tiny()
    made, _ = trained(drafter, target)
    batch = batch_of(target, rows=4, seed=5)
    if hasattr(made, "noise"):
        made.noise = 0.0
    if hasattr(made, "window"):
        made.window = made.steps = 1  # of Beagle and MoA: see all that drafting sees
    begin = 6
    batch.scored[:, :begin] = False
    batch.scored[:, -1] = False
    with torch.inference_mode():
        offline = float(made.loss(batch)["agreement"])
        hits = []
        for row in batch.tokens:
            target.reset(60, made.taps)
            states = target.prefill(row)
            for i in range(begin, row.shape[0] - 1):  # root at i, drafting i + 1
                made.reset(60)
                made.observe(states.select(torch.arange(i)), int(row[i]))
                expected = target.logits(states.last[i]).argmax()
                hits.append(bool(made.root_logits().argmax() == expected))
    assert offline == pytest.approx(sum(hits) / len(hits), abs=1e-6)


@pytest.mark.parametrize("drafter", TRAINED)
def test_loss_falls_and_training_raises_acceptance(drafter):
    target = tiny()
    made, losses = trained(drafter, target)
    routed = hasattr(made, "base")  # a router only chooses ids: its loss ends at the entropy of the groups
    assert losses[-1] < (0.97 if routed else 0.7) * losses[0]
    batch = batch_of(target)
    answers = [HeldOutAnswer(row.tolist(), 4) for row in batch.tokens[:4]]
    assert replay(target, made, answers).tau > replay(target, make(drafter, target), answers).tau + 0.3


@pytest.mark.parametrize("drafter", ["vanilla", "eagle2"])
def test_shifting_tokens_by_one_visibly_hurts(drafter):
    target = tiny()
    answers = [HeldOutAnswer(row.tolist(), 4) for row in batch_of(target).tokens[:4]]
    right = replay(target, trained(drafter, target)[0], answers)
    for shift in (-1, 1):
        wrong = replay(target, trained(drafter, target, shift=shift)[0], answers)
        assert wrong.alphas[0] < right.alphas[0] - 0.15


@pytest.mark.parametrize("drafter", TRAINED)
def test_replay_counts_what_decoding_counts(drafter):
    target = tiny()
    made, _ = trained(drafter, target)
    begin = len(PROMPT)
    tokens, steps = generate(target, made, cap=33)
    found = replay(target, made, [HeldOutAnswer(PROMPT + tokens, begin)])
    assert found.cycles == len(steps)
    assert found.emitted == sum(s.accepted + 1 for s in steps)


@pytest.mark.parametrize("drafter", TRAINED)
def test_weights_round_trip_and_are_refused_elsewhere(drafter, tmp_path):
    target = tiny()
    made = make(drafter, target)
    provenance = {"target": "tiny", "target_fingerprint": target.fingerprint()}
    weights.save(made, tmp_path / "w", provenance)
    other = make(drafter, target, seed=9)
    weights.load(other, tmp_path / "w", target.fingerprint())
    for name, tensor in weights.trained(other).items():
        assert torch.equal(tensor, weights.trained(made)[name].bfloat16().float())
    assert not any("embed" in n or n.startswith("head") for n in weights.trained(made)), "frozen parts were saved"

    with pytest.raises(SpecBenchError, match="trained for target tiny"):
        weights.load(other, tmp_path / "w", tiny(seed=4).fingerprint())
    with pytest.raises(SpecBenchError, match="train them"):
        weights.load(other, tmp_path / "nowhere", target.fingerprint())
    shutil.copytree(tmp_path / "w", tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes((tmp_path / "w" / "model.safetensors").read_bytes()[:-50])
    with pytest.raises(SpecBenchError, match="damaged"):
        weights.load(other, tmp_path / "cut", target.fingerprint())


def test_weights_of_another_shape_are_refused(tmp_path):
    target = tiny()
    weights.save(make("eagle2", target), tmp_path, {"target_fingerprint": target.fingerprint()})
    with pytest.raises(SpecBenchError, match="do not fit"):
        weights.load(make("vanilla", target), tmp_path, target.fingerprint())


def test_vanilla_takes_any_model_of_the_targets_tokenizer(tmp_path):
    """A pretrained draft model by path; the target itself as one is accepted in full; another tokenizer is refused."""
    target = tiny()
    words = [f"w{i}" for i in range(61)]
    for name in ("target", "draft", "foreign"):
        (target if name == "target" else tiny()).model.save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name, words if name != "foreign" else words[::-1])
    target.path = tmp_path / "target"
    drafter = Vanilla("vanilla", Chain(4), path=str(tmp_path / "draft"))
    drafter.bind(target)
    tokens, steps = generate(target, drafter, cap=21)
    assert tokens == plain(target, PROMPT, 21)
    assert [s.accepted for s in steps] == [4] * 4
    with pytest.raises(SpecBenchError, match="another tokenizer"):
        Vanilla("vanilla", Chain(4), path=str(tmp_path / "foreign")).bind(target)
    with pytest.raises(SpecBenchError, match="no draft model"):
        Vanilla("vanilla", Chain(4), path=str(tmp_path / "missing")).bind(target)


def test_shipped_weights_say_where_they_come_from():
    from conftest import ROOT

    folders = sorted(p.parent for p in (ROOT / "drafters" / "weights").rglob("model.safetensors"))
    assert folders
    for folder in folders:
        provenance = json.loads((folder / "provenance.json").read_text())
        for key in (
            "target",
            "target_fingerprint",
            "data",
            "tokens_seen",
            "steps",
            "hours",
            "machine",
            "commit",
            "history",
        ):
            assert provenance[key], (folder, key)
        # small to clone; the papers' widths give MoA 5.8 M and DFlash 5.2 M parameters on this target
        most = 12_000_000 if folder.name in ("moa", "dflash") else 10_000_000
        assert (folder / "model.safetensors").stat().st_size <= most


@pytest.mark.parametrize("drafter", ["eagle2", "beagle", "clover2", "moa"])
def test_rotary_frequencies_keep_their_precision(drafter):
    """Rounded to bfloat16 they turn positions hundreds of tokens apart by other angles than the target's."""
    target = tiny()
    target.model.bfloat16()
    made = make(drafter, target)
    own = {id(x) for x in target.model.buffers()}
    found = [x.dtype for name, x in made.named_buffers() if name.endswith("inv_freq") and id(x) not in own]
    assert found and {*found} == {torch.float32}
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
