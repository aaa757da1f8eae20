"""HASS's alignment: its masks element by element, what a query must not see, and training = decoding at every step."""

from dataclasses import replace

import pytest
import torch
from conftest import make, tiny
from drafting import batch_of

from drafters import coral
from drafters.eagle import following
from drafters.layers import step_mask


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_masks_are_the_definition(step):
    length = 6
    mask = step_mask(step, length)
    assert mask.shape == (length, step * length)
    for row in range(length):
        for source in range(1, step + 1):
            for column in range(length):
                key = row - (step - source)
                seen = column <= key if source == 1 else column == key
                assert mask[row, (source - 1) * length + column] == seen


@torch.no_grad()
def outputs(made, batch):
    return list(made.aligned(batch.states[:, :-1], batch, made.steps))


def test_a_query_sees_no_state_or_token_that_drafting_lacks():
    """At step j row r knows states up to r - (j - 1) and tokens up to its own; anything later changes nothing at all."""
    target = tiny()
    made, batch = make("hass", target), batch_of(target, rows=1, length=10)
    before = outputs(made, batch)
    for changed in range(1, batch.tokens.shape[1] - 1):  # of the pairs
        other_states, other_tokens = batch.states.clone(), batch.tokens.clone()
        other_states[:, changed] += 1.0
        other_tokens[:, changed + 1] = (other_tokens[:, changed + 1] + 5) % 60
        by_state, by_token = (
            outputs(made, replace(batch, states=other_states)),
            outputs(made, replace(batch, tokens=other_tokens)),
        )
        for step in range(1, made.steps + 1):
            first = changed + step - 1  # the first row that may know the changed state
            same = [torch.equal(a, b) for a, b in zip(before[step - 1][0], by_state[step - 1][0], strict=True)]
            assert same == [row < first for row in range(len(same))]
            same = [torch.equal(a, b) for a, b in zip(before[step - 1][0], by_token[step - 1][0], strict=True)]
            assert same == [row < changed for row in range(len(same))]


def test_every_training_step_is_a_draft_pass():
    """Step j's output is what decoding computes in its j-th draft pass on the same states and tokens."""
    target = tiny()
    made, batch = make("hass", target), batch_of(target, rows=1, length=14)
    steps = outputs(made, batch)
    tokens = batch.tokens[0]
    with torch.inference_mode():
        target.reset(40, made.taps)
        states = target.prefill(tokens)
        for root in range(3, 10):
            made.reset(40)
            made.observe(states.select(torch.arange(root)), int(tokens[root]))
            logits = made.root_logits()
            for depth in range(1, made.steps + 1):
                expected = target.logits(steps[depth - 1][0, root + depth - 2])
                torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
                visible = torch.ones(1, depth, dtype=torch.bool)
                logits = made.expand(tokens[root + depth][None], torch.tensor([depth - 2]), depth, visible)[0]


def test_gradients_do_not_flow_through_the_steps_inputs():
    target = tiny()
    made, batch = make("hass", target), batch_of(target, rows=1, length=8)
    states = batch.states[:, :-1].clone().requires_grad_()
    *_, last = made.aligned(states, batch, made.steps)
    (gradient,) = torch.autograd.grad(last[0, 5].sum(), states)
    reached = gradient[0].abs().sum(-1) > 0
    assert reached.tolist() == [c <= 5 - (made.steps - 1) for c in range(len(reached))]


def test_switches_are_independent():
    """One step without Top-K is EAGLE's own loss; Top-K adds a positive term, more steps add theirs."""
    target = tiny()
    batch = batch_of(target)

    def loss(**options):
        made = make("hass", target)
        made.configure(noise=0.0, **options)
        return float(made.loss(batch)["loss"].detach())

    eagle = make("eagle2", target, "+drafter.noise=0")
    plain = loss(steps=1, topk_weight=0)
    assert plain == pytest.approx(float(eagle.loss(batch)["loss"].detach()), rel=1e-5)
    assert loss(steps=1) > plain
    three = loss(topk_weight=0, beta=1)
    assert three > 2 * plain
    assert plain < loss(topk_weight=0) < three  # beta = 0.5
    assert loss(topk_weight=0, beta=0) == pytest.approx(plain, rel=1e-5)
    assert loss() - loss(topk_weight=0) == pytest.approx((loss(topk_weight=1) - loss(topk_weight=0)) / 2, rel=1e-4)


def test_defaults_are_the_best_of_the_paper_and_of_coral():
    hass, coral = make("hass", tiny()), make("coral", tiny())
    assert (hass.steps, hass.beta, hass.topk, hass.topk_weight) == (3, 0.5, 5, 0.5)
    assert (coral.steps, coral.beta, coral.topk_weight, coral.regression) == (3, 1.0, 0.0, 0.5)


@pytest.mark.parametrize("drafter", ["hass", "coral"])
def test_a_first_phase_costs_what_eagle_costs(drafter, monkeypatch):
    """With one step: one pass, plainly causal, nothing kept for later ones, no contrast."""
    target = tiny()
    batch, made, passes = batch_of(target, rows=2), make(drafter, target, "+drafter.noise=0"), []
    made.configure(steps=1, topk_weight=0)
    if drafter == "coral":
        made.configure(regression=1.0, csra_weight=0.0)
        monkeypatch.setattr(coral, "csra", None)
    network = made.network
    monkeypatch.setattr(made, "network", lambda *parts: (passes.append(parts[3:]), network(*parts))[1])
    found = made.loss(batch)
    assert passes == [(None, None)]  # neither mask nor cache
    eagle = make("eagle2", target, "+drafter.noise=0").loss(batch)
    assert {n: float(x.detach()) for n, x in found.items()} == pytest.approx(
        {n: float(x.detach()) for n, x in eagle.items()}
    )


def test_a_single_step_is_contrasted_with_the_targets_states_alone():
    target = tiny()
    batch, made = batch_of(target, rows=2), make("coral", target, "+drafter.noise=0", "+drafter.steps=1")
    found = made.loss(batch)
    truth = following(batch)
    (predicted,) = made.aligned(batch.states[:, :-1], batch, 1)
    scored = truth.scored
    expected = coral.csra(
        predicted[scored], [truth.states[scored]], made.temperature
    )  # fewer than `samples`: all positions
    assert float(found["csra"]) == pytest.approx(float(expected.detach()), rel=1e-4) and float(expected.detach()) > 0


def test_a_later_phase_brings_the_contrast_back():
    target = tiny()
    batch, made = batch_of(target, rows=2), make("coral", target, "+drafter.noise=0")
    balanced = made.loss(batch)
    assert float(balanced["csra"]) > 0
    made.configure(csra_weight=0)
    without = made.loss(batch)
    assert "csra" not in without and float(without["loss"].detach()) < float(balanced["loss"].detach())
