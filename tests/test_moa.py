"""MoA: what a query must not see, training = decoding at every depth, the target's own rows under its last layers."""

import pytest
import torch
from conftest import make, tiny
from test_drafters import batch_of

from drafters.blocks import window_mask
from specbench.errors import SpecBenchError

VARIANTS = ([], ["drafter.tli=1"], ["drafter.tli=2"], ["+drafter.lsa=false"])


def windowed(target, monkeypatch, overrides, window=4, offset=2):
    """A drafter whose training windows are fixed."""
    made = make("moa", target, *overrides)
    monkeypatch.setattr(
        made, "_windows", lambda b, length, device: window_mask(length, window, offset)[None].expand(b, -1, -1)
    )
    return made


@pytest.mark.parametrize("overrides", VARIANTS)
def test_every_position_of_a_window_is_a_draft_pass(overrides, monkeypatch):
    target = tiny()
    made, batch = windowed(target, monkeypatch, overrides), batch_of(target, rows=1, length=14)
    tokens = batch.tokens[0]
    with torch.inference_mode():
        _, final = made.predict(batch)
        target.reset(40, made.taps)
        states = target.prefill(tokens)
        for root in (2, 6, 10):
            made.reset(40)
            made.observe(states.select(torch.arange(root)), int(tokens[root]))
            logits = made.root_logits()
            for depth in range(1, 4):
                expected = target.logits(final[0, root + depth - 1])
                torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
                visible = torch.ones(1, depth, dtype=torch.bool)
                logits = made.expand(tokens[root + depth][None], torch.tensor([depth - 2]), depth, visible)[0]


@pytest.mark.parametrize("overrides", VARIANTS)
def test_a_query_sees_keys_before_its_window_and_tokens_up_to_its_own(overrides, monkeypatch):
    target = tiny()
    made, batch = windowed(target, monkeypatch, overrides), batch_of(target, rows=1, length=13)
    start = [i if i < 2 else i - (i - 2) % 4 for i in range(13)]

    @torch.no_grad()
    def outputs():
        return made.predict(batch)[1][0]

    before, tokens, kv = outputs(), batch.tokens, batch.kv
    for changed in range(13):
        batch.kv = {i: (k.clone(), v.clone()) for i, (k, v) in kv.items()}
        for k, v in batch.kv.values():
            k[:, :, changed] += 1.0
            v[:, :, changed] += 1.0
        by_state = outputs()
        batch.kv, batch.tokens = kv, tokens.clone()
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
