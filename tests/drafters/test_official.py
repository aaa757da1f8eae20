"""The authors' own implementations, replayed: equal weights give equal trees, paths, tokens, logits, losses and gradients.

`golden/official` holds tiny targets and drafters, what the authors' code drafted with them, and what it lost on a batch;
its README says which code that is.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, configuration
from hydra.utils import instantiate
from safetensors.torch import load_file

import specbench.engine.verify as judging
from drafters.distillation import DistillationLoss
from specbench.engine import checkpoints
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.interface import Batch
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless, verify

GOLDEN = ROOT / "tests" / "golden" / "official"
RECORDS = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*/cycles.json"))}
PROMPTS = [(method, n) for method, record in RECORDS.items() for n in range(len(record["prompts"]))]
CLOSE = {"atol": 5e-5, "rtol": 1e-4}  # float32, summed in another order, on another processor


def target_of(method: str) -> Target:
    return Target.load(GOLDEN / method / "target", torch.float32, torch.device("cpu"))


def drafter_of(method: str, target: Target, *overrides: str, folder: Path | None = None) -> Any:
    """As configured, with the authors' weights and their size of tree. Of Medusa even the tree is as configured."""
    tree, sizes = RECORDS[method]["tree"], []
    if "rank_paths" not in tree:
        names = {"depth": "levels_below_root", "top_k": "children_per_expanded_node", "nodes": "nodes_including_root"}
        sizes = [f"tree.{ours}={tree[theirs]}" for ours, theirs in names.items()]
    made = instantiate(configuration(method, *sizes, *overrides).drafter)
    made.checkpoint = checkpoints.read(str(folder or GOLDEN / method / "drafter"))
    made.bind(target)
    return made.eval()


# Decoding ------------------------------------------------------------------------------------------------------------


def cycles(target: Target, drafter: Any, prompt: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Ids of one prompt and its cycles in the golden file's words, the last bonus also where the cap cuts it off."""
    found = []

    def forward(tree):
        states = Target.forward(target, tree)
        found.append({"tokens": tree.tokens, "parents": tree.parents, "positions": states.positions})
        return states

    def judge(*arguments):
        verified = verify(*arguments)
        found[-1] = {name: value.tolist() for name, value in found[-1].items()}
        found[-1] |= {"accepted": verified.path, "bonus": verified.bonus}
        return verified

    monkeypatch.setattr(target, "forward", forward)
    monkeypatch.setattr(judging, "verify", judge)
    limits = Limits(len(prompt["output"]), target.stop_ids)
    ids = []
    for event in decode(target, drafter, prompt["prompt"], limits, Lossless(), Sampler()):
        ids += [event.token] if isinstance(event, Prefill) else event.tokens
    return ids, found


def without_margin(cycle: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in cycle.items() if name != "margin"}


@pytest.mark.parametrize(("method", "prompt"), PROMPTS)
def test_every_cycle_is_the_authors(method, prompt, monkeypatch):
    """Node by node and in the authors' order: tokens, parents, positions; then the path, the bonus and all ids.

    The authors count one more cycle behind a stop id; here none is ever emitted, so there is as many of theirs as ours.
    """
    target, theirs = target_of(method), RECORDS[method]["prompts"][prompt]
    ids, ours = cycles(target, drafter_of(method, target), theirs, monkeypatch)
    assert len(ours) == len(theirs["cycles"])
    for mine, cycle in zip(ours, theirs["cycles"], strict=True):
        assert mine == without_margin(cycle)
    assert ids == theirs["output"]


def folder_of(layout: str, tmp_path: Path) -> Path:
    """MoA's drafter under one of the three configurations that the authors' tools write for it."""
    moa = GOLDEN / "moa"
    if layout == "training":
        return moa / "drafter"
    shutil.copy(moa / "drafter" / "model.safetensors", tmp_path)
    config = json.loads((moa / "drafter_converted" / "config.json").read_text())
    if layout == "parts":  # what `MOASpecConfig` makes of the converted one and saves
        shared = {k: config[k] for k in ("num_attention_heads", "rms_norm_eps", "rope_theta", "rope_scaling")}
        config = {
            part: {"hidden_size": config["kv_hidden_size" if part.startswith("layer") else "hidden_size"]}
            | {k: config[f"{part}_{k}"] for k in ("num_key_value_heads", "intermediate_size")}
            | shared
            for part in ("layer_self_attention", "self_attention", "cross_attention")
        } | {"model_type": "moa_spec", "num_attention_heads": config["self_attention_num_key_value_heads"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("layout", ["training", "converted", "parts"])
def test_moas_sizes_follow_from_each_configuration(layout, tmp_path, monkeypatch):
    target, sizes = target_of("moa"), RECORDS["moa"]["drafter"]
    made = drafter_of("moa", target, folder=folder_of(layout, tmp_path))
    for ours, theirs in {"lsa": "layer_self_attention", "sa": "self_attention", "ca": "cross_attention"}.items():
        for size in ("num_key_value_heads", "intermediate_size"):
            assert made.shapes[ours][size] == sizes[f"{theirs}_{size}"]
    theirs = RECORDS["moa"]["prompts"][0]
    ids, ours = cycles(target, made, theirs, monkeypatch)
    assert ours == [without_margin(cycle) for cycle in theirs["cycles"]]
    assert ids == theirs["output"]


@pytest.mark.parametrize("method", RECORDS)
def test_a_drafts_logits_are_the_authors(method, monkeypatch):
    """Of the root and of every node expanded, in order of expansion; of Medusa, of all heads."""
    target = target_of(method)
    made, expected = drafter_of(method, target), load_file(GOLDEN / method / "logits.safetensors")
    heard: list[dict[str, torch.Tensor]] = []
    root_logits, expand, propose = made.root_logits, made.expand, made.propose

    def noted(logits, level):
        heard[-1][f"level{level}" if level else "root"] = logits
        return logits

    def proposed(*arguments):
        heard.append({})
        if "cycle0.heads" in expected:
            own = torch.ones(1, 1, dtype=torch.bool)
            below = [expand(torch.tensor([0]), torch.tensor([-1]), level, own)[0] for level in range(1, made.heads)]
            heard[-1]["heads"] = torch.stack([root_logits(), *below])
            return propose(*arguments)
        monkeypatch.setattr(made, "root_logits", lambda: noted(root_logits(), 0))
        monkeypatch.setattr(made, "expand", lambda *a: noted(expand(*a), a[2]))
        return propose(*arguments)

    monkeypatch.setattr(made, "propose", proposed)
    record = RECORDS[method]
    cycles(target, made, record["prompts"][record["logits_prompt"]], monkeypatch)
    ours = {f"cycle{n}.{name}": logits for n, cycle in enumerate(heard) for name, logits in cycle.items()}
    for name, logits in expected.items():
        torch.testing.assert_close(ours[name], logits, **CLOSE)
    recorded = {name.split(".")[0] for name in expected}
    assert {name for name in ours if name.split(".")[0] in recorded} == expected.keys()


# Training ------------------------------------------------------------------------------------------------------------


def lost(method: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((GOLDEN / method / "loss.json").read_text()), load_file(GOLDEN / method / "loss.safetensors")


def batch_of(method: str, target: Target, drafter: Any) -> Batch:
    """The authors' batch. Which predictions count: see below."""
    _, given = lost(method)
    states, hidden, kv = target.tapped(given["tokens"], drafter.taps)
    torch.testing.assert_close(states, given["states"], **CLOSE)  # post-norm, that is
    if "response_mask" in given:  # MoA: state i is scored where token i is of the response
        scored = given["response_mask"].bool()
    else:  # EAGLE: pair i, about state i + 1, is scored where token i is; the data set leaves the last one out
        scored = F.pad(given["official.loss_mask"][:, :-1], (1, 0)).bool()
    valid = torch.ones_like(scored)
    return Batch(given["tokens"], given["states"], valid, scored, hidden=hidden, kv=kv)


def assert_gradients(drafter: Any, target: Target, norms: dict[str, float]) -> None:
    named, _ = drafter.map_checkpoint(drafter.checkpoint, target)
    own = dict(drafter.named_parameters())
    for theirs, norm in norms.items():
        mine = next(name for name, tensor in named.items() if tensor is drafter.checkpoint.tensors[theirs])
        assert float(own[mine].grad.norm()) == pytest.approx(norm, rel=1e-4)


def test_eagles_loss_and_gradients_are_the_authors():
    target, (reference, _) = target_of("eagle2"), lost("eagle2")
    weights = reference["weights"]
    terms = f"++drafter.regression={weights['vloss']}", f"++drafter.classification={weights['ploss']}"
    made = drafter_of("eagle2", target, "++drafter.noise=0", *terms)
    metrics = made.loss(batch_of("eagle2", target, made))
    for ours, theirs in {"loss": "loss", "regression": "vloss", "classification": "ploss"}.items():
        assert float(metrics[ours].detach()) == pytest.approx(reference[theirs], rel=1e-5)
    metrics["loss"].backward()
    assert_gradients(made, target, reference["grad_norms"])


def test_hass_losses_and_gradients_are_the_authors_with_hidden_keys_hidden():
    """Step by step. As released, hidden keys weigh in the normaliser, which is another loss."""
    target, (reference, _) = target_of("hass"), lost("hass")
    ours_as, released = reference["hidden_keys_at_minus_infinity"], reference["as_released"]
    names = {"regression": "vloss", "classification": "ploss", "topk_weight": "topk_loss"}
    options = [f"++drafter.{ours}={ours_as['weights'][theirs]}" for ours, theirs in names.items()]
    options += [f"++drafter.topk={ours_as['topk']}", "++drafter.beta=1", "++drafter.noise=0"]
    before = 0.0
    for steps, step in enumerate(ours_as["steps"], start=1):
        made = drafter_of("hass", target, *options, f"++drafter.steps={steps}")
        loss = made.loss(batch_of("hass", target, made))["loss"]
        total = float(loss.detach())
        assert total - before == pytest.approx(step["total"], rel=1e-5)
        before = total
    assert before == pytest.approx(ours_as["sum_of_totals"], rel=1e-5)
    assert before != pytest.approx(released["sum_of_totals"], rel=1e-2)
    loss.backward()
    assert_gradients(made, target, ours_as["grad_norms"])


def test_eagle3s_losses_and_gradients_are_the_authors_pass_by_pass():
    """Theirs are means over all B x T positions, masked or not; ours over the scored ones.

    Their last position is scored against padding, whose likeliest id, 0, is not in the draft vocabulary.
    """
    target, (reference, given) = target_of("eagle3"), lost("eagle3")
    tokens, scored = given["tokens"], F.pad(given["loss_mask"][:, :-1], (1, 0)).bool()
    factor, before = int(scored.sum()) / tokens.numel(), 0.0
    for steps, theirs in enumerate(reference["ploss"], start=1):
        made = drafter_of("eagle3", target, f"++drafter.steps={steps}", "++drafter.beta=0.8")
        states, hidden, _ = target.tapped(tokens, made.taps)
        torch.testing.assert_close(torch.cat([hidden[i] for i in made.read], -1), given["states"], **CLOSE)
        metrics = made.loss(Batch(tokens, states, torch.ones_like(scored), scored, hidden=hidden))
        total = float(metrics["loss"].detach()) * factor
        assert total - before == pytest.approx(reference["weights"][steps - 1] * theirs, rel=1e-5)
        before = total
    assert before == pytest.approx(reference["loss"], rel=1e-5)
    hits = reference["accuracy"][0] * float(given["loss_mask"].sum())
    assert float(metrics["agreement"]) * int(scored.sum()) == pytest.approx(hits, abs=1e-3)
    metrics["loss"].backward()
    norms = {n.removeprefix("grad_norm."): float(x) / factor for n, x in given.items() if n.startswith("grad_norm.")}
    assert len(norms) == 13
    assert_gradients(made, target, norms)


@pytest.mark.parametrize("case", ["one_window", "windows_of_7", "windows_of_7_tli1"])
def test_moas_states_loss_and_gradients_are_the_authors_under_their_mask(case):
    """The network's parts are run under the authors' mask: ours hides a window's own keys from its first query as well.

    Their last target layers run on predictions with true inputs at the boundaries, and rebuild all keys from that.
    """
    reference, given = lost("moa")
    reference, mask = reference[case], given[f"{case}.cross_attention_mask"]
    target, tli = target_of("moa"), "prev_feature_loss" in reference
    made = drafter_of("moa", target, f"++drafter.tli={int(tli)}")
    batch = batch_of("moa", target, made)
    tokens, positions = batch.tokens, batch.positions

    keys, values = made.keys_values(made.seen(batch.states, dict(batch.kv)), positions)
    embedded = made.embedding(tokens)
    s = made.sa(embedded, attention_mask=None, position_embeddings=made.rotary(embedded, positions))
    states = made.cross(s, *made.rotary(s, positions), keys, values, mask)
    torch.testing.assert_close(states, given[f"{case}.cross_attention_output"], **CLOSE)

    weights, final = reference["weights"], states
    loss = states.new_zeros(())
    if tli:
        (true,) = batch.hidden.values()
        boundary = mask.diagonal(dim1=1, dim2=2)[..., None]  # [B, T, 1]: there a query sees its own key
        mixed = torch.where(boundary, true, states)
        causal = torch.ones_like(mask).tril()[:, None]
        final = target.tail(mixed, positions, causal, 1, lambda layer, k, v: (k, v))
        before = F.smooth_l1_loss(mixed[batch.scored], true[batch.scored])
        assert float(before.detach()) == pytest.approx(reference["prev_feature_loss"], rel=1e-5)
        loss = weights["prev_feature_loss"] * before
    metrics = DistillationLoss(batch, made.head).loss(final, weights["feature_loss"], weights["forward_KL"])
    loss = loss + metrics["loss"]
    for found, theirs in {"regression": "feature_loss", "classification": "forward_KL"}.items():
        assert float(metrics[found]) == pytest.approx(reference[theirs], rel=1e-5)
    assert float(loss.detach()) == pytest.approx(reference["loss"], rel=1e-5)
    loss.backward()
    assert_gradients(made, target, reference["grad_norms"])
