"""MoA: what a query must not see, training = decoding at every depth, the target's own rows under its last layers."""

import itertools

import pytest
import torch
from conftest import make, tiny
from drafting import batch_of, optimise
from layouts import LENGTHS, packed, padded, walked
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from drafters.lsa import LayerSelfAttention
from drafters.moa import MoA
from specbench.common.errors import SpecBenchError
from specbench.engine.interface import Batch, Taps
from specbench.engine.policies import Chain
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import replay

WITHOUT = "+drafter.lsa=false"
MEAN = "+drafter.inputs=mean"
VARIANTS = (
    [],
    ["drafter.tli=1"],
    ["drafter.tli=2"],
    [WITHOUT],
    [WITHOUT, "drafter.tli=1"],
    [WITHOUT, MEAN, "drafter.tli=1"],
)


def starts(batch, window=4, offset=2):
    """[B, T] the first position of each query's window of a fixed length."""
    at = batch.positions
    return torch.where(at < offset, at, at - (at - offset) % window)


def final(made, batch):
    """h_hat of every position in windows of 4 from 2 on, [B, T, D]."""
    return next(made.predict(batch, [starts(batch)]))[1]


@pytest.mark.parametrize("overrides", VARIANTS)
def test_every_position_of_a_window_is_a_draft_pass(overrides):
    target = tiny()
    made, batch = make("moa", target, *overrides), batch_of(target, rows=1, length=14)
    tokens = batch.tokens[0]
    with torch.inference_mode():
        hidden = final(made, batch)
        target.reset(40, made.taps)
        states = target.prefill(tokens)
        for root in (2, 6, 10):
            made.reset(40)
            made.observe(states.select(torch.arange(root)), int(tokens[root]))
            logits = made.root_logits()
            for depth in range(1, 4):
                expected = target.logits(hidden[0, root + depth - 1])
                torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
                visible = torch.ones(1, depth, dtype=torch.bool)
                logits = made.expand(tokens[root + depth][None], torch.tensor([depth - 2]), depth, visible)[0]


@pytest.mark.parametrize("overrides", VARIANTS)
def test_a_query_sees_keys_before_its_window_and_tokens_up_to_its_own(overrides):
    target = tiny()
    made, batch = make("moa", target, *overrides), batch_of(target, rows=1, length=13)
    start = starts(batch)[0].tolist()

    @torch.no_grad()
    def outputs():
        return final(made, batch)[0]

    before, tokens, states, kv = outputs(), batch.tokens, batch.states, batch.kv
    for changed in range(13):
        batch.states = states.clone()
        batch.states[:, changed] += 1.0
        batch.kv = {i: (k.clone(), v.clone()) for i, (k, v) in kv.items()}
        for k, v in batch.kv.values():
            k[:, :, changed] += 1.0
            v[:, :, changed] += 1.0
        by_state = outputs()
        batch.states, batch.kv, batch.tokens = states, kv, tokens.clone()
        batch.tokens[:, changed] = (tokens[:, changed] + 5) % 60
        by_token = outputs()
        batch.tokens = tokens
        for i in range(13):
            assert torch.equal(before[i], by_state[i]) == (changed >= start[i])
            assert torch.equal(before[i], by_token[i]) == (changed > i)


def test_layer_attention_runs_over_new_tokens_only():
    target = tiny()
    made, batch = make("moa", target), batch_of(target, rows=1, length=12)
    lengths = []
    made.lsa.register_forward_hook(lambda _module, inputs, _output: lengths.append(inputs[0].shape[0]))
    with torch.inference_mode():
        target.reset(40, made.taps)
        states = target.prefill(batch.tokens[0])
        made.reset(40)
        for begin, end in ((0, 6), (6, 8), (8, 11)):
            made.observe(states.select(torch.arange(begin, end)), 3)
            made.expand(torch.tensor([9, 4]), torch.tensor([-1, -1]), 1, torch.eye(2, dtype=torch.bool))
    assert lengths == [6, 2, 3]


def test_the_last_layers_read_the_targets_own_rows():
    """With rows of zeros in the target's cache, a draft of `tli=1` is another one; of `tli=0`, the same."""
    target = tiny()
    batch = batch_of(target, rows=1, length=9)
    for tli in (0, 1):
        made = make("moa", target, f"drafter.tli={tli}")
        drafts = []
        for blank in (False, True):
            with torch.inference_mode():
                target.reset(40, made.taps)
                states = target.prefill(batch.tokens[0]).select(torch.arange(8))
                states.kv = {i: (k.clone(), v.clone()) for i, (k, v) in states.kv.items()}
                if blank:
                    for layer in range(target.layers):
                        for rows in target.cache.rows(layer, 0, 8):
                            rows.zero_()
                made.reset(40)
                made.observe(states, 5)
                drafts.append(made.root_logits())
        assert torch.equal(*drafts) == (tli == 0)


def test_more_last_layers_than_the_target_has_are_refused():
    with pytest.raises(SpecBenchError, match="tli=3"):
        make("moa", tiny(), "drafter.tli=3")


# Packed rows, drafts from every position ---------------------------------------------------------------------------------


@pytest.mark.parametrize("progress", [0.0, 1.0])  # SA confined to the windows, and free
@pytest.mark.parametrize("overrides", VARIANTS)
def test_packed_sequences_lose_what_padded_ones_lose(overrides, progress, monkeypatch):
    target = tiny()
    made, batch = make("moa", target, *overrides), padded(target)
    monkeypatch.setattr(made, "_windows", starts)
    losses, gradients = [], []
    for layout in (batch, packed(batch)):
        layout.progress = progress
        made.zero_grad()
        losses.append(made.loss(layout)["loss"])
        losses[-1].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in made.parameters() if p.requires_grad]))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("overrides", VARIANTS)
def test_drafts_from_every_position_are_those_of_replayed_chains(overrides):
    target, steps = tiny(), 4
    made = make("moa", target, *overrides)
    optimise(made, batch_of(target), 100)
    batch, begin = padded(target), 4
    made.growth = Chain(steps)
    answers = [HeldOutAnswer(row[:n].tolist(), begin) for row, n in zip(batch.tokens, LENGTHS, strict=True)]
    expected = replay(target, made, answers)
    assert expected.tau > 1.2
    assert walked(made, batch, [(row, 0, n, begin) for row, n in enumerate(LENGTHS)], steps) == expected
    places = [(0, 0), (0, LENGTHS[0]), (1, 0), (1, LENGTHS[2])]
    answers = [(r, at, n, begin) for (r, at), n in zip(places, LENGTHS, strict=True)]
    assert walked(made, packed(batch), answers, steps) == expected


# Windows -----------------------------------------------------------------------------------------------------------------


def blank(rows, length, starts=None):
    """A batch of which only the layout counts."""
    tokens = torch.zeros(rows, length, dtype=torch.long)
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, torch.zeros(rows, length, 1), everywhere, everywhere, starts=starts)


def lags(made, batch):
    """How old the newest key of every query is, [B, T], in drawn windows; 1 is what the first draft of a cycle has."""
    return batch.positions - made._windows(batch) + 1


def test_every_depth_of_the_tree_is_trained_by_its_weight_and_none_beyond():
    """Depth q of d gets (d - q + 1) / (1 + … + d); the paper's law gives depth 1 a tenth and wastes two fifths."""
    made, batch = make("moa", tiny()), blank(64, 512)
    torch.manual_seed(0)
    found = lags(made, batch)[:, 16:].flatten().bincount(minlength=8) / (64 * 496)
    assert made.growth.depth == 6
    torch.testing.assert_close(found[1:7], torch.arange(6, 0, -1) / 21, atol=0.01, rtol=0)
    assert found[0] == found[7:].sum() == 0
    made.periods = (5, 15)
    found = lags(made, batch)[:, 16:].flatten().bincount(minlength=16) / (64 * 496)
    assert found[1] == pytest.approx(0.1, abs=0.01)
    assert found[7:].sum() == pytest.approx(0.41, abs=0.02)


def test_windows_lie_end_to_end_and_differ_inside_a_sequence():
    made, batch = make("moa", tiny()), blank(8, 60)
    torch.manual_seed(0)
    for row in lags(made, batch).tolist():
        lengths = []
        for before, lag in itertools.pairwise(row):
            assert lag in (1, before + 1)
            if lag == 1:
                lengths.append(before)
        assert len(set(lengths)) > 3


def test_a_window_ends_with_its_sequence():
    made, at = make("moa", tiny(), "+drafter.window=5"), 7
    batch = blank(50, 20, torch.tensor([0] * at + [at] * (20 - at)).expand(50, -1))
    torch.manual_seed(0)
    found = lags(made, batch)
    assert (found[:, at] == 1).all() and (found <= batch.positions + 1).all()
    assert found.max() == 5
    assert len({tuple(row) for row in found.tolist()}) == 5, "the offset varies"


def test_several_windows_share_one_pass_of_layer_and_self_attention():
    target = tiny()
    made, batch = make("moa", target, "+drafter.draws=3"), batch_of(target)
    passes, drawn, plain = [], [], made._windows
    for part in (made.lsa, made.sa, made.mlp):
        part.register_forward_hook(lambda module, _inputs, _output: passes.append(module))
    made._windows = lambda batch: drawn.append(plain(batch)) or drawn[-1]
    loss = made.loss(batch)["loss"]
    assert [passes.count(part) for part in (made.lsa, made.sa, made.mlp)] == [2, 1, 3]  # LSA in chunks of the 192 tokens
    assert len({tuple(windows.flatten().tolist()) for windows in drawn}) == 3
    made.draws, each = 1, []
    for windows in drawn:
        made._windows = lambda batch, windows=windows: windows
        each.append(made.loss(batch)["loss"])
    torch.testing.assert_close(loss, torch.stack(each).mean())


# Curriculum --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("progress", "share"), [(0.0, 1.0), (0.25, 0.5), (0.5, 0.0), (1.0, 0.0)])
def test_self_attention_is_set_free_over_the_first_half(progress, share):
    """By whole sequences, of which a confined one reads the tokens of its window alone."""
    target = tiny()
    made, batch = make("moa", target), batch_of(target, rows=16, length=12)
    batch.progress = progress
    torch.manual_seed(3)
    masks = []
    made.sa.register_forward_hook(lambda _m, _i, kwargs, _o: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    windows = starts(batch)
    next(made.predict(batch, [windows]))
    causal, position = torch.ones(12, 12, dtype=torch.bool).tril(), torch.arange(12)
    if share == 0.0:
        assert masks == [None]
        return
    confined = causal & (position[None, None, :] >= windows[:, :, None])
    are = [torch.equal(mask, own) for mask, own in zip(masks[0][:, 0], confined, strict=True)]
    free = [torch.equal(mask, causal) for mask in masks[0][:, 0]]
    assert all(a != b for a, b in zip(are, free, strict=True))
    assert sum(are) == 16 if share == 1.0 else 3 < sum(are) < 13
    made.confine = 0.0
    masks.clear()
    next(made.predict(batch, [windows]))
    assert masks == [None], "an option"


# Layer self-attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [4, 2])
def test_layer_self_attention_is_llamas_layer_and_the_mean(groups):
    """Values and gradients, with gradients and without."""
    shape = make("moa", tiny()).lsa.self_attn.config
    torch.manual_seed(5)
    shape.num_key_value_heads = groups
    fast, plain = LayerSelfAttention(shape), LlamaDecoderLayer(shape, 0)
    with torch.no_grad():
        for p in fast.parameters():
            p.normal_(0.5 if p.ndim == 1 else 0.0, 0.3)
    plain.load_state_dict(fast.state_dict())
    x = torch.randn(7, 5, shape.hidden_size)
    everything = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    expected = plain(x, attention_mask=everything, position_embeddings=fast.rotary(x, torch.arange(5)[None])).mean(1)
    found = fast(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), expected, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_without_layer_attention_the_last_states_are_read():
    """Table 5: no tap but the last layers' own rows; what CA reads is o, not the keys and values."""
    target = tiny()
    for tli, taps in ((0, Taps()), (1, Taps(kv=(2,), hidden=(1,)))):
        made = make("moa", target, WITHOUT, f"drafter.tli={tli}")
        assert made.taps == taps
        assert not any(name.startswith(("lsa", "mix")) for name, _ in made.named_parameters())
        batch = batch_of(target, rows=1, length=9)
        assert made.seen(batch.states, {}) is batch.states
    batch.kv = batch.hidden = {}
    made = make("moa", target, WITHOUT)
    made.loss(batch)["loss"].backward()


def test_without_layer_attention_the_mean_over_layers_can_be_read_instead():
    target, batch = tiny(), batch_of(tiny(), rows=1, length=9)
    made = make("moa", target, WITHOUT, MEAN)
    assert made.taps.kv == (0, 1, 2) and not made.taps.last and made.taps.condensed
    assert {n.split(".")[0] for n, _ in made.named_parameters()} >= {"mix"} and not hasattr(made, "lsa")
    rows = torch.stack([torch.stack(batch.kv[i], 0) for i in range(3)])  # [L, 2, 1, H, T, Dh]
    mean = rows.mean(0)[:, 0].permute(2, 1, 0, 3).flatten(1)  # [T, 2 H Dh], [k; v] head by head
    torch.testing.assert_close(made.seen(batch.states, batch.kv)[0], made.mix(mean), atol=1e-5, rtol=1e-4)
    made.loss(batch)["loss"].backward()


def test_widths_are_the_papers_in_proportion_and_each_parts_own():
    target = tiny()
    made = MoA("moa", Chain(2))
    made.bind(target)
    widths = [part.gate_proj.out_features for part in (made.lsa.mlp, made.sa.mlp, made.mlp)]
    assert widths == [3 * 32, 32 // 8, 32 * 7 // 4]
    made = MoA("moa", Chain(2), mlp_ratios={"sa": 2})
    made.bind(target)
    assert made.sa.mlp.gate_proj.out_features == 64 and made.mlp.gate_proj.out_features == 56
