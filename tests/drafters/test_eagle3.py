"""EAGLE-3: its passes against a literal reading of the training-time test, its draft vocabulary, and published layouts."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make, tiny
from decoding import PROMPT, generate, plain
from drafting import ORDER, batch_of, listing, optimise
from safetensors.torch import load_file, save_file
from test_checkpoints import D, adopted, ids, served
from test_official import GOLDEN, drafter_of, target_of

from drafters.eagle3 import tapped_layers
from specbench.common.errors import SpecBenchError
from specbench.engine import vocabulary, weights
from specbench.engine.sampling import Sampler
from specbench.training.export import serve_command

COUNT = 20
NARROW = f"drafter.draft_vocabulary={COUNT}"
EAGLE31 = "drafter.fc_norm=true", "drafter.norm_output=true"


@pytest.fixture
def target(tmp_path):
    return listing(tiny(), tmp_path)


def outputs(made, batch):
    return list(made.aligned(made.known_states(batch.states, batch.hidden)[:, :-1], batch, made.steps))


# The passes --------------------------------------------------------------------------------------------------------------


def literal(made, batch):
    """The official way to count: index i is a chain's first pair, tokens move left pass by pass, keys lie side by side.

    Per pass s the output at every i [T - 1, D]: it reads token i + 1 + s and what pass s - 1 had at i. Its query, at
    position i + s, sees pass 0's keys up to i and of every later pass the one at i.
    """
    tokens, layer = batch.tokens[0], made.layer
    attention, length = layer.self_attn, len(batch.tokens[0]) - 1
    states = torch.cat([batch.hidden[i][0, :-1] for i in made.read], -1) @ made.fc.weight.T
    places = torch.arange(length)
    keys, values, found = [], [], []
    for s in range(made.steps):
        read = torch.cat([tokens[1 + s :], torch.zeros(s, dtype=torch.long)])
        x = torch.cat([layer.input_layernorm(made.embedding(read)), layer.hidden_norm(states)], -1)
        cos, sin = (part[0] for part in made.rotary(x, (places + s)[None]))
        q, k, v = (
            getattr(attention, f"{n}_proj")(x).view(length, -1, 8).repeat_interleave(1 if n == "q" else 2, 1) for n in "qkv"
        )
        q, k = (
            a * cos[:, None] + torch.cat([-a[..., 4:], a[..., :4]], -1) * sin[:, None] for a in (q, k)
        )  # RoPE of halves of 4
        keys.append(k)
        values.append(v)
        rows = []
        for i in range(length):
            seen = [(keys[0][j], values[0][j]) for j in range(i + 1)] + [
                (keys[n][i], values[n][i]) for n in range(1, s + 1)
            ]
            k_i, v_i = (torch.stack(part) for part in zip(*seen, strict=True))  # [seen, heads, 8]
            share = ((q[i] * k_i).sum(-1) / math.sqrt(8)).softmax(0)
            rows.append((share[..., None] * v_i).sum(0).flatten())
        y = states + torch.stack(rows) @ attention.o_proj.weight.T
        states = y + layer.mlp(layer.post_attention_layernorm(y))
        found.append(states)
    return found


@torch.no_grad()
def test_passes_are_the_training_time_test_read_literally():
    target = tiny()
    made, batch = make("eagle3", target, "+drafter.steps=5"), batch_of(target, rows=1, length=14)
    ours, theirs = outputs(made, batch), literal(made, batch)
    for s in range(made.steps):
        torch.testing.assert_close(ours[s][0, s:], theirs[s][: len(theirs[s]) - s], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [(), (NARROW,), EAGLE31], ids=["eagle3", "narrow", "eagle3.1"])
def test_every_pass_is_a_draft_pass(options, target):
    """Pass s is what decoding computes at depth s + 1 on the same states and tokens."""
    made, batch = make("eagle3", target, *options, "+drafter.steps=4"), batch_of(target, rows=1, length=14)
    tokens = batch.tokens[0]
    with torch.inference_mode():
        steps = outputs(made, batch)
        target.reset(40, made.taps)
        states = target.prefill(tokens)
        for root in range(3, 10):
            made.reset(40)
            made.observe(states.select(torch.arange(root)), int(tokens[root]))
            logits = made.root_logits()
            for depth in range(1, made.steps + 1):
                expected = made.draft_logits(steps[depth - 1][0, root + depth - 2])
                torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
                visible = torch.ones(1, depth, dtype=torch.bool)
                logits = made.expand(tokens[root + depth][None], torch.tensor([depth - 2]), depth, visible)[0]


def test_gradients_flow_through_all_passes():
    """Unlike HASS's, whose later passes see a pair's own state only through the keys of the first."""
    target = tiny()
    made, batch = make("eagle3", target, "+drafter.steps=3"), batch_of(target, rows=1, length=9)
    states = made.known_states(batch.states, batch.hidden)[:, :-1].detach().requires_grad_()
    gradients = {}
    for detached in (False, True):
        made.detached = detached
        *_, last = made.aligned(states, batch, 3)
        (gradient,) = torch.autograd.grad(last[0, 6].sum(), states)
        assert (gradient[0].abs().sum(-1) > 0).tolist() == [i <= 4 for i in range(8)]
        gradients[detached] = gradient[0, 4]  # of the state that the chain began with
    difference = (gradients[False] - gradients[True]).norm()
    assert difference > 0.1 * gradients[True].norm()


def test_eagle31s_norms_are_before_fc_and_before_what_is_fed_back():
    target = tiny()
    old, new = make("eagle3", target), make("eagle3", target, *EAGLE31)
    assert len(new.fc_norm) == 3 and not len(old.fc_norm)
    new.load_state_dict(old.state_dict(), strict=False)
    with torch.no_grad():
        for number, norm in enumerate(new.fc_norm):
            norm.weight.fill_(number + 1.0)
    batch = batch_of(target, rows=1, length=6)
    states = [batch.hidden[i] for i in new.read]
    normed = [(n + 1) * x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() for n, x in enumerate(states)]
    known = new.known_states(batch.states, batch.hidden)
    torch.testing.assert_close(known, torch.cat(normed, -1) @ new.fc.weight.T)
    pairs = known[:, :-1], batch.tokens[:, 1:], batch.positions[:, :-1], None, None
    torch.testing.assert_close(new.network(*pairs), old.norm(old.network(*pairs)))
    torch.testing.assert_close(new.draft_logits(new.network(*pairs)), old.draft_logits(old.network(*pairs)))


def test_the_tapped_layers_are_the_official_ones():
    assert tapped_layers(30) == [1, 14, 26]  # outputs; inputs of 2, 15 and 27
    assert tapped_layers(8) == [1, 3, 4] == list(drafter_of("eagle3", target_of("eagle3")).read)
    assert [tapped_layers(n) for n in (1, 2, 3, 4, 6)] == [[0, 0, 0], [0, 0, 1], [0, 0, 1], [0, 1, 1], [1, 2, 2]]
    target = tiny()
    assert make("eagle3", target).taps.hidden == (0, 1) and not make("eagle3", target).taps.last
    made = make("eagle3", target, "drafter.tapped=[0, 2]")
    assert made.taps.hidden == (0, 2) and made.fc.in_features == 2 * target.hidden_size
    with pytest.raises(SpecBenchError, match=r"drafter\.tapped: there is no layer 3; the target has 3"):
        make("eagle3", target, "drafter.tapped=[0, 3]")


# The loss ----------------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_targets_share_of_the_listed_ids(target):
    """Position by position, and nothing where the target's likeliest id is not listed."""
    made, batch = make("eagle3", target, NARROW, "+drafter.steps=3"), batch_of(target, rows=3, length=12)
    batch.scored[:, :4] = False
    found = made.loss(batch)
    with torch.no_grad():
        passes, listed = outputs(made, batch), ORDER[:COUNT].tolist()
        total, first, hits, covered, count = 0.0, 0.0, 0, 0, int(batch.scored[:, 1:].sum())
        for row in range(3):
            for i in range(3, 11):  # pair i predicts the token behind state i + 1
                logits = target.logits(batch.states[row, i + 1])
                if int(logits.argmax()) not in listed:
                    continue
                covered += 1
                p = logits[ORDER[:COUNT]].softmax(-1)
                for s, states in enumerate(passes):
                    own = made.draft_logits(states[row, i])
                    entropy = float(-(p * own.log_softmax(-1)).sum())
                    total += 0.8**s * entropy / count
                    first += entropy / count if s == 0 else 0
                    hits += s == 0 and listed[int(own.argmax())] == int(logits.argmax())
    assert 0 < covered < count, "ids of both kinds must occur"
    shown = {n: float(x.detach()) for n, x in found.items()}
    expected = {
        "loss": total,
        "classification": first * count / covered,
        "agreement": hits / covered,
        "covered": covered / count,
    }
    assert shown == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("options", [(NARROW,), ()])
def test_a_confined_loss_runs_over_the_listed_ids_that_it_names(target, options):
    """Both softmaxes over the same ids, every scored position counting, as with the other drafters."""
    made, batch = make("eagle3", target, *options, "+drafter.steps=2"), batch_of(target, rows=2, length=9)
    batch.vocabulary = torch.arange(0, target.vocab_size, 3)
    found = made.loss(batch)
    listed = ORDER[:COUNT].tolist() if options else list(range(target.vocab_size))
    ids = [x for x in batch.vocabulary.tolist() if x in listed]
    with torch.no_grad():
        total, scored = 0.0, batch.scored[:, 1:]
        for s, states in enumerate(outputs(made, batch)):
            for row, i in scored.nonzero().tolist():
                if i >= s:
                    p = target.logits(batch.states[row, i + 1])[ids].softmax(-1)
                    log_q = made.draft_logits(states[row, i])[[listed.index(x) for x in ids]].log_softmax(-1)
                    total -= 0.8**s * float((p * log_q).sum()) / int(scored.sum())
    assert float(found["loss"].detach()) == pytest.approx(total, rel=1e-4) and float(found["covered"]) == 1.0
    found["loss"].backward()
    assert (made.lm_head.weight.grad is not None) == made.own_head


def test_early_rows_of_a_sequence_have_no_later_passes():
    target = tiny()
    batch = batch_of(target, rows=1, length=8)
    batch.scored[:] = torch.arange(8) == 2  # pair 1: two passes reach it
    losses = [float(make("eagle3", target, f"+drafter.steps={n}").loss(batch)["loss"].detach()) for n in (1, 2, 3)]
    assert losses[0] < losses[1] == losses[2]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_head_starts_as_the_targets_rows(architecture, tmp_path):
    target, states = tiny(architecture), torch.randn(4, 32)
    with torch.no_grad():
        listing(target, tmp_path)
        made = make("eagle3", target, NARROW)
        expected = target.logits(F.rms_norm(states, (32,), eps=made.norm.variance_epsilon))[:, ORDER[:COUNT]]
        torch.testing.assert_close(made.draft_logits(states), expected, atol=1e-4, rtol=1e-4)


def test_a_narrow_head_learns(target):
    made, batch = make("eagle3", target, NARROW), batch_of(target)
    losses, found = optimise(made, batch, 60), made.loss(batch)
    assert losses[-1] < 0.7 * losses[0]
    assert float(found["agreement"]) > 0.6 * float(found["covered"]) > 0.1


@pytest.mark.parametrize("options", [(NARROW,), ()], ids=["narrow", "all"])
def test_a_head_of_the_targets_stays_its_and_is_not_stored(options, target, tmp_path):
    made, batch = make("eagle3", target, *options, "drafter.own_head=false"), batch_of(target)
    losses = optimise(made, batch, 60)
    assert losses[-1] < 0.7 * losses[0]
    rows = target.head.weight[ORDER[:COUNT]] if options else target.head.weight
    assert torch.equal(made.lm_head.weight, rows) and (made.lm_head is target.head) == (not options)
    weights.save(made, tmp_path / "own", {"target": "tiny", "target_fingerprint": target.fingerprint()})
    assert "lm_head.weight" not in load_file(tmp_path / "own" / "model.safetensors")
    again = make("eagle3", target, *options, "drafter.own_head=false", seed=5)
    again.weights = str(tmp_path / "own")
    again.bind(target)
    assert torch.equal(again.lm_head.weight, made.lm_head.weight)
    assert torch.equal(again.fc.weight, made.fc.weight.bfloat16().float())
    tensors, _ = served(made, "vllm", target, tmp_path / "out")
    assert torch.equal(tensors["lm_head.weight"], made.lm_head.weight)


# Its draft vocabulary ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [(), ("tree=chain", "tree.gamma=3")])
def test_greedy_output_is_the_targets_and_nothing_unlisted_is_drafted(tree, target):
    made, trees = make("eagle3", target, NARROW, *tree), []
    propose = made.propose
    made.propose = lambda *a: (trees.append(propose(*a)), trees[-1])[1]
    truth = plain(target, PROMPT, 40)
    assert generate(target, made)[0] == truth
    listed = set(ORDER[:COUNT].tolist())
    assert not set(truth) <= listed and all(set(t.tokens[1:].tolist()) <= listed for t in trees)
    assert made.contents[vocabulary.FILE] == vocabulary.digest_of(ORDER)
    full = make("eagle3", target, *tree)
    assert full.active_parameters - made.active_parameters == (61 - COUNT) * target.hidden_size


def test_where_the_target_is_sampled_q_is_zero_outside(target):
    made = make("eagle3", target, NARROW, "tree=chain", "tree.gamma=3")
    with torch.inference_mode():
        target.reset(100, made.taps)
        made.reset(100)
        made.observe(target.prefill(torch.tensor(PROMPT)), 7)
        own = made.root_logits().softmax(-1)
        tree = made.propose(7, Sampler(1.0), torch.Generator().manual_seed(0))
    unlisted = torch.ones(61, dtype=torch.bool)
    unlisted[ORDER[:COUNT]] = False
    assert tree.q.shape == (4, 61) and not tree.q[:, unlisted].any()
    torch.testing.assert_close(tree.q[:3].sum(-1), torch.ones(3))
    torch.testing.assert_close(tree.q[0, ORDER[:COUNT]], own)


def test_weights_are_refused_beside_a_list_that_their_head_has_not(target, tmp_path):
    made, folder = make("eagle3", target, NARROW), tmp_path / "w"
    weights.save(made, folder, {"target": "tiny", "target_fingerprint": target.fingerprint()})
    again = make("eagle3", target, NARROW, seed=5)
    again.weights = str(folder)
    again.bind(target)
    assert torch.equal(again.lm_head.weight, made.lm_head.weight.bfloat16().float())
    listing(target, tmp_path / "other", ORDER.flip(0))
    with pytest.raises(SpecBenchError, match=r"ids of a list with the SHA-256 .* restore the list") as error:
        again.bind(target)
    assert "\n" not in str(error.value)
    full = make("eagle3", target)
    full.weights = str(folder)
    with pytest.raises(SpecBenchError, match="this drafter over all ids of the target"):
        full.bind(target)


def test_a_list_too_short_or_missing_is_refused_by_the_options_name(target):
    with pytest.raises(SpecBenchError, match=r"drafter\.draft_vocabulary=9: the tree takes 10 candidates"):
        make("eagle3", target, "drafter.draft_vocabulary=9")
    with pytest.raises(SpecBenchError, match=r"drafter\.draft_vocabulary: this target came from no configuration"):
        make("eagle3", tiny(), NARROW)
    with pytest.raises(SpecBenchError, match=r"drafter\.vocabulary=15: its head has 20 ids only"):
        make("eagle3", target, NARROW, "drafter.vocabulary=15")


# Published heads, and exported ones ---------------------------------------------------------------------------------------

OFFICIAL = GOLDEN / "eagle3" / "drafter"


def published(folder: Path, change: Any = None, **settings: Any) -> Path:
    """The official head of the golden files, changed."""
    folder.mkdir()
    shutil.copy(OFFICIAL / "config.json", folder)
    tensors = load_file(OFFICIAL / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def as_speculators(tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if n.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def test_speculators_layout_is_the_same_head(tmp_path):
    """Its layer's configuration is nested, and the tapped layers are named by their inputs."""
    target, layer = target_of("eagle3"), json.loads((OFFICIAL / "config.json").read_text())
    folder = published(tmp_path / "s", as_speculators, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    config = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k not in layer}
    more = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, "norm_before_residual": False}
    (folder / "config.json").write_text(json.dumps(config | more))
    again = drafter_of("eagle3", target, folder=folder)
    assert again.read == (1, 3, 4)
    assert ids(target, again) == ids(target, drafter_of("eagle3", target))


def test_switches_of_published_configurations_are_read(tmp_path):
    def with_norms(tensors):
        tensors.update({f"fc_norm.{i}.weight": torch.full((48,), 0.5) for i in range(2)})
        tensors["fc.weight"] = tensors["fc.weight"][:, :96].contiguous()

    target = target_of("eagle3")
    switches = {"norm_output": True, "fc_norm": True, "norm_before_residual": True}
    capture = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 6]}}
    made = drafter_of("eagle3", target, folder=published(tmp_path / "x", with_norms, **switches, **capture))
    assert made.norm_output and made.norm_before_residual and made.uses_fc_norm and made.read == (1, 6)
    assert torch.equal(made.fc_norm[1].weight, torch.full((48,), 0.5))
    plain_head = drafter_of("eagle3", target)
    pairs = torch.randn(1, 5, 48), torch.randint(192, (1, 5)), torch.arange(5)[None], None, None
    with torch.no_grad():
        normed, not_normed = plain_head.layer.hidden_norm(pairs[0]), pairs[0]
        made.norm_output = False
        moved = made.network(*pairs) - normed, plain_head.network(*pairs) - not_normed
    assert not torch.allclose(*moved, atol=1e-3), "the MLP reads another residual stream"


def _shorter(t):
    t["d2t"] = t["d2t"][:-1].clone()


def _twice(t):
    t["d2t"][5] = t["d2t"][4] - 1


def _outside(t):
    t["d2t"][-1] = 192


def _other_mask(t):
    t["t2d"] = t["t2d"].roll(1)


def _renamed(t):
    t["layers.1.mlp.gate_proj.weight"] = torch.zeros(80, 48)


def _embedding(t):
    t["embed_tokens.weight"] = torch.randn(192, 48)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_shorter, r"d2t has the shape \[127\] and its head 128 ids"),
        (_twice, "does not map 128 ids to as many"),
        (_outside, "does not map 128 ids to as many"),
        (_other_mask, "t2d and d2t name different ids"),
        (lambda t: t.pop("d2t"), "its head has 128 ids, the target 192, and no d2t"),
        (lambda t: t.pop("lm_head.weight"), r"no lm_head\.weight"),
        (lambda t: t.update({"input_norm.weight": torch.ones(144)}), "input_norm"),
        (_renamed, "several layers"),
        (_embedding, "another target"),
        (lambda t: t.pop("norm.weight"), r"lacks norm\.weight"),
        (lambda t: t.update({"fc.bias": torch.zeros(48)}), r"also holds fc\.bias"),
        (lambda t: t.update({"fc.weight": torch.zeros(48, 96)}), r"fc\.weight is \[48, 96\], not \[48, 144\]"),
    ],
)
def test_a_head_with_a_map_that_is_not_its_own_is_refused(change, words, tmp_path):
    with pytest.raises(SpecBenchError, match=words) as error:
        drafter_of("eagle3", target_of("eagle3"), folder=published(tmp_path / "c", change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("options", [(NARROW,), ()], ids=["narrow", "all"])
def test_an_exported_head_has_the_official_layout_and_comes_back_the_same(server, options, target, tmp_path):
    made = make("eagle3", target, *options)
    tensors, config = served(made, server, target, tmp_path / "out")
    layer = {"hidden_norm", "input_layernorm", "post_attention_layernorm"}
    layer |= {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    own = {f"midlayer.{n}.weight" for n in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert set(tensors) == own | ({"d2t", "t2d"} if options else set())
    if options:
        assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
        assert (tensors["d2t"] + torch.arange(COUNT)).tolist() == ORDER[:COUNT].tolist()
        assert tensors["t2d"].nonzero()[:, 0].tolist() == sorted(ORDER[:COUNT].tolist())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["hidden_size"] == D
    assert config["draft_vocab_size"] == (COUNT if options else 61) and config["tie_word_embeddings"] is False
    assert ids(target, adopted("eagle3", tmp_path / "out", target)) == ids(target, made)
    method = {"vllm": '"method": "eagle3"', "sglang": "--speculative-algorithm EAGLE3"}
    assert method[server] in serve_command(server, "m", tmp_path / "out", made)


@pytest.mark.parametrize("option", [*EAGLE31, "drafter.tapped=[0, 1, 2]"])
def test_what_servers_may_not_read_is_not_exported(option, target):
    with pytest.raises(SpecBenchError, match=r"drafter\.\w+: what is exported is plain EAGLE-3"):
        make("eagle3", target, option).export_tensors("vllm", target)
