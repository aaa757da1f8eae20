"""Medusa-2: what each stage trains, the loss against its formula, and a training from the command line to decoding."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from command_line import records_of, run, train, weight
from conftest import make, tiny
from drafting import batch_of, optimise

from specbench.common.errors import SpecBenchError
from specbench.engine import adapters
from specbench.engine.weights import trained
from specbench.records.rows import Row


def prepared(*overrides, target=None):
    target = target or tiny()
    made = make("medusa2", target, "++drafter.rank=4", "++drafter.adapter_dropout=0.0", *overrides)
    return made, made.prepare_training(target), target


def test_the_loss_is_the_papers():
    made, student, target = prepared("++drafter.weight=0.3", "++drafter.decay=0.8")
    batch = batch_of(target)
    for name, parameter in student.model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.02)
    found = made.loss(batch)
    states = student.run(batch.tokens, batch.positions, None, None)
    made.joint = False
    heads = made.loss(replace(batch, states=states))["loss"]
    p, q = ((target.head(s)).log_softmax(-1)[batch.scored] for s in (batch.states, states))
    entropy = -(p.exp() * p).sum(-1).mean()
    kl = F.kl_div(q, p, log_target=True, reduction="batchmean")
    assert float(kl.detach()) > 1e-3
    assert float((found["loss"] - entropy).detach()) == pytest.approx(float((kl + 0.3 * heads).detach()), rel=1e-4)
    assert float(found["language"] - entropy) == pytest.approx(float(kl.detach()), rel=1e-3)


def test_gradients_reach_the_adapter_and_leave_the_target_alone():
    made, student, target = prepared()
    batch, before = batch_of(target), {n: p.clone() for n, p in target.model.named_parameters()}
    optimise(made, batch, 3)
    changes = [p for n, p in student.model.named_parameters() if ".lora_B." in n]
    assert all((p != 0).any() for p in changes)
    assert all(torch.equal(p, before[n]) for n, p in target.model.named_parameters())
    assert all(p.grad is None for p in target.model.parameters())


def test_the_warm_up_trains_heads_on_the_originals_states():
    made, _, target = prepared()
    made.configure(joint=False)
    batch = batch_of(target)
    alone = make("medusa", target)
    alone.load_state_dict({n: p for n, p in made.state_dict().items() if not n.startswith("adapter.")})
    assert float(made.loss(batch)["loss"].detach()) == float(alone.loss(batch)["loss"].detach())


def test_joint_training_lowers_the_loss_below_that_of_the_heads_alone():
    target = tiny()
    batch = batch_of(target)
    alone = optimise(make("medusa", target), batch, 80)
    made, _, _ = prepared("++drafter.weight=0.2", target=target)
    losses = optimise(made, batch, 80)
    assert losses[-1] < 0.7 * losses[0]
    logged = made.loss(batch)
    heads = float((logged["loss"] - logged["language"]).detach()) / 0.2
    assert heads < alone[-1], "states that are trained for the heads say more about later tokens"
    assert float(logged["kept"]) > 0.7, "and still predict what the original does"


def test_the_adapter_leaves_the_drafter_once_it_is_trained():
    made, student, target = prepared()
    assert any(name.startswith("adapter.") for name in trained(made))
    optimise(made, batch_of(target), 2)
    with torch.no_grad():
        expected = student.run(torch.arange(9)[None], torch.arange(9)[None], None, None)
    adapter = made.release_adapter()
    assert not any(name.startswith("adapter.") for name in trained(made)) and made.release_adapter() is None
    target.merge_adapter(adapter)
    with torch.no_grad():
        found = target.run(torch.arange(9)[None], torch.arange(9)[None], None, None)
    assert (found - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


def test_without_peft_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(adapters, "installed", lambda package: None)
    with pytest.raises(SpecBenchError, match=r"pip install -e '\.\[medusa2\]'"):
        prepared()


def test_a_training_makes_a_target_and_its_drafter(home):
    """Warm-up and joint training from the command line; then both decode, and neither goes without the other."""
    out = home / "weights" / "medusa2"
    options = ["train.settings.steps=12", "train.corpus.tokens=2000", "train.follow=false", f"train.out={out}"]
    run(home, "train", "drafter=medusa2", "recipe=gpu_medusa2", *train(home, "medusa2", *options)[1:])
    provenance = json.loads((out / "provenance.json").read_text())
    adapter = adapters.read(out)
    assert provenance["target_fingerprint"] == adapter.fingerprint(provenance["original_fingerprint"])
    assert any(bool(pair.b.any()) for pair in adapter.pairs.values())
    own = [f"drafter.weights={out}", "decode.max_new_tokens=8", "data.limit=2", "replay=false"]
    refused = run(home, "run", "drafter=medusa2", *own, ok=False)
    assert f"add model.adapter={out}" in refused
    run(home, "run", "drafter=medusa2", f"model.adapter={out}", *own)
    header, records = records_of(home / "results", "medusa2")
    rows = [r for r in records if isinstance(r, Row) and r.drafter == "medusa2"]
    assert header["target"]["fingerprint"] == provenance["target_fingerprint"]
    assert rows and all(r.audit["verdict"] == "identical" for r in rows)
    refused = run(home, "run", "drafter=eagle2", weight(home, "eagle2"), f"model.adapter={out}", ok=False)
    assert "were trained for target tiny" in refused
