"""HASS's alignment: its masks element by element, what a query must not see, and training = decoding at every step."""

import pytest
import torch
from conftest import make, tiny
from test_drafters import batch_of

from drafters.hass import step_mask


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
def outputs(made, states, tokens):
    return list(made.aligned(states, tokens))


def test_a_query_sees_no_state_or_token_that_drafting_lacks():
    """At step j row r knows states up to r - (j - 1) and tokens up to its own; anything later changes nothing at all."""
    target = tiny()
    made, batch = make("hass", target), batch_of(target, rows=1, length=10)
    states, tokens = batch.states[:, :-1], batch.tokens[:, 1:]
    before = outputs(made, states, tokens)
    for changed in range(1, states.shape[1]):
        other_states, other_tokens = states.clone(), tokens.clone()
        other_states[:, changed] += 1.0
        other_tokens[:, changed] = (other_tokens[:, changed] + 5) % 60
        by_state, by_token = outputs(made, other_states, tokens), outputs(made, states, other_tokens)
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
    steps = outputs(made, batch.states[:, :-1], batch.tokens[:, 1:])
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
    *_, last = made.aligned(states, batch.tokens[:, 1:])
    (gradient,) = torch.autograd.grad(last[0, 5].sum(), states)
    reached = gradient[0].abs().sum(-1) > 0
    assert reached.tolist() == [c <= 5 - (made.steps - 1) for c in range(len(reached))]


def test_switches_are_independent():
    """One step without Top-K is EAGLE's own loss; Top-K adds a positive term, more steps add theirs."""
    target = tiny()
    batch = batch_of(target)

    def loss(*overrides):
        made = make("hass", target, *overrides)
        made.noise = 0.0
        return float(made.loss(batch)["loss"].detach())

    eagle = make("eagle2", target)
    eagle.noise = 0.0
    plain = loss("+drafter.steps=1", "+drafter.topk_weight=0")
    assert plain == pytest.approx(float(eagle.loss(batch)["loss"].detach()), rel=1e-5)
    assert loss("+drafter.steps=1") > plain
    three = loss("+drafter.topk_weight=0")
    assert three > 2 * plain
    assert plain < loss("+drafter.topk_weight=0", "+drafter.beta=0.5") < three
    assert loss("+drafter.topk_weight=0", "+drafter.beta=0") == pytest.approx(plain, rel=1e-5)
