"""Beagle's two training stages: masks element by element, what a query must not see, and late steps = draft passes."""

import pytest
import torch
from conftest import make, tiny
from test_drafters import batch_of

from drafters import beagle
from drafters.beagle import late_mask
from drafters.blocks import window_mask


def window_start(i, window, offset):
    return i if i < offset else i - (i - offset) % window


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_masks_are_the_definition(window):
    length = 11
    for offset in range(window):
        early, late = window_mask(length, window, offset), late_mask(length, window, offset)
        for i in range(length):
            start = window_start(i, window, offset)
            for j in range(length):
                assert early[i, j] == late[i, j] == (j < start)
                assert late[i, length + j] == (start <= j < i)


def test_window_one_is_next_token_prediction():
    assert torch.equal(window_mask(7, 1, 0), torch.ones(7, 7, dtype=torch.bool).tril(-1))


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_late_queries_see_no_state_that_drafting_lacks(offset):
    """Changing a true state changes only queries whose window starts behind it; changing a token, only itself and the
    rest of its window."""
    target, steps = tiny(), 4
    made, batch = make("beagle", target), batch_of(target, rows=1, length=13)

    @torch.no_grad()
    def outputs(tokens, states):
        found = torch.zeros_like(states)
        for queries, predicted in made.simulate(tokens, states, steps, offset):
            found[:, queries] = predicted
        return found[0]

    before = outputs(batch.tokens, batch.states)
    for changed in range(13):
        states, tokens = batch.states.clone(), batch.tokens.clone()
        states[:, changed] += 1.0
        tokens[:, changed] = (tokens[:, changed] + 5) % 60
        for i in range(13):
            start = window_start(i, steps, offset)
            assert torch.equal(before[i], outputs(batch.tokens, states)[i]) == (changed >= start)
            assert torch.equal(before[i], outputs(tokens, batch.states)[i]) == (not start <= changed <= i)


def test_every_late_step_is_a_draft_pass():
    target, steps = tiny(), 4
    made, batch = make("beagle", target), batch_of(target, rows=1, length=15)
    tokens = batch.tokens[0]
    with torch.inference_mode():
        found = torch.zeros_like(batch.states)
        for queries, predicted in made.simulate(batch.tokens, batch.states, steps, 3):
            found[:, queries] = predicted
        target.reset(40, made.taps)
        states = target.prefill(tokens)
        for root in (3, 7):
            made.reset(40)
            made.observe(states.select(torch.arange(root)), int(tokens[root]))
            logits = made.root_logits()
            for depth in range(1, steps + 1):
                torch.testing.assert_close(logits, target.logits(found[0, root + depth - 1]), atol=2e-4, rtol=1e-4)
                visible = torch.ones(1, depth, dtype=torch.bool)
                logits = made.expand(tokens[root + depth][None], torch.tensor([depth - 2]), depth, visible)[0]


def test_without_concat_no_node_sees_a_predicted_state():
    target = tiny()
    made, batch = make("beagle", target, "+drafter.concat=false"), batch_of(target, rows=1, length=10)
    with torch.inference_mode():
        target.reset(40, made.taps)
        states = target.prefill(batch.tokens[0])
        made.reset(40)
        made.observe(states.select(torch.arange(6)), 7)
        one = made.expand(torch.tensor([9]), torch.tensor([-1]), 1, torch.ones(1, 1, dtype=torch.bool))
        made.observe(states.select(torch.arange(6, 7)), 7)
        assert made.cache.length == 7, "predicted states were kept"
        made.reset(40)
        made.observe(states.select(torch.arange(6)), 13)
        other = made.expand(torch.tensor([9]), torch.tensor([-1]), 1, torch.ones(1, 1, dtype=torch.bool))
    torch.testing.assert_close(one, other)


def test_both_stages_train():
    target = tiny()
    batch = batch_of(target)
    for stage, progress in (("early", 0.0), ("late", 0.5)):
        made, batch.progress = make("beagle", target), progress
        optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], 3e-3)
        losses = []
        for _ in range(80):
            loss = made.loss(batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), stage


def test_recomputed_late_steps_have_the_gradient_of_kept_ones(monkeypatch):
    target = tiny()
    made, batch = make("beagle", target), batch_of(target)
    gradients = []
    for _ in range(2):
        made.zero_grad()
        made.late(batch, 4, 2)["loss"].backward()
        gradients.append([p.grad.clone() for p in made.parameters() if p.requires_grad])
        monkeypatch.setattr(beagle, "checkpoint", lambda predict, queries, use_reentrant: predict(queries))
        plain = type(made).keys_values
        monkeypatch.setattr(made, "keys_values", lambda states, at, plain=plain: plain(made, states.clone(), at))
    for ours, kept in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, kept)
