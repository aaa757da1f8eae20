"""Several sequences end to end in a row are trained on as if each had a row of its own."""

from dataclasses import replace

import pytest
import torch
from conftest import make, tiny
from decoding import plain
from drafting import FAMILY, batch_of

from drafters.base import noisy
from specbench.engine.interface import Batch, Taps

LENGTHS = ((9, 14, 5), (20, 8))  # of the sequences of each packed row, the second of which ends in padding


def laid_out(target):
    """The same sequences, with the same states and scored positions: (padded, packed)."""
    sequences = []
    for number, length in enumerate(n for row in LENGTHS for n in row):
        start = [(7 * number + k) % 60 for k in range(3)]
        tokens = torch.tensor([start + plain(target, start, length - 3)])
        states, hidden, _ = target.tapped(tokens, Taps(hidden=tuple(range(target.layers))))
        scored = torch.arange(length) >= (number + 2) % 3  # the first ones of some do not count
        known = torch.stack([states, *hidden.values()])  # [1 + L, 1, T, D]
        sequences.append((tokens[0], known[:, 0], scored))

    def rows(groups):
        width = max(sum(len(s[0]) for s in group) for group in groups)
        tokens, starts = (
            torch.zeros(len(groups), width, dtype=torch.long),
            torch.zeros(len(groups), width, dtype=torch.long),
        )
        states, valid = (
            torch.randn(1 + target.layers, len(groups), width, target.hidden_size),
            torch.zeros(len(groups), width, dtype=torch.bool),
        )
        scored = valid.clone()
        for row, group in enumerate(groups):
            at = 0
            for ids, known, counts in group:
                place = slice(at, at + len(ids))
                tokens[row, place], states[:, row, place], scored[row, place] = ids, known, counts
                valid[row, place], starts[row, place] = True, at
                at += len(ids)
            starts[row, at:] = at
        return Batch(tokens, states[0], valid, scored, starts=starts, hidden=dict(enumerate(states[1:])))

    packed = rows([sequences[:3], sequences[3:]])
    return replace(rows([[s] for s in sequences]), starts=None), packed


def quiet(drafter, target):
    made = make(drafter, target)
    if hasattr(made, "noise"):
        made.noise = 0.0
    return made


@pytest.mark.parametrize("confined", [False, True])
@pytest.mark.parametrize("drafter", FAMILY)
def test_a_packed_loss_is_the_padded_loss(drafter, confined):
    target = tiny()
    made = quiet(drafter, target)
    padded, packed = laid_out(target)
    if confined:
        padded.vocabulary = packed.vocabulary = torch.arange(3, 50)
    one, other = made.loss(padded), made.loss(packed)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("drafter", [*FAMILY, "moa", "moa drafter.tli=1"])
def test_a_batch_without_a_scored_position_trains_nothing(drafter):
    target, (name, *options) = tiny(), drafter.split()
    made, batch = make(name, target, *options), batch_of(target)
    batch.scored[:] = False
    metrics = made.loss(batch)
    metrics["loss"].backward()
    assert {name: float(value.detach()) for name, value in metrics.items()} == dict.fromkeys(metrics, 0.0)
    assert not any(p.grad.any() for p in made.parameters() if p.grad is not None)


@pytest.mark.parametrize("drafter", ["hass", "medusa", "eagle3"])
def test_so_are_its_gradients(drafter):
    target = tiny()
    gradients = []
    for batch in laid_out(target):
        made = quiet(drafter, target)
        made.loss(batch)["loss"].backward()
        gradients.append({n: p.grad for n, p in made.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 5
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("drafter", FAMILY)
@torch.no_grad()
def test_what_is_drafted_in_a_packed_row_is_what_is_drafted_alone(drafter):
    target = tiny()
    made = quiet(drafter, target)
    padded, packed = laid_out(target)
    for step, functions in enumerate(zip(made.drafts(padded, 4), made.drafts(packed, 4), strict=True), start=1):
        alone, together = (
            draft(batch.valid & (batch.positions >= step), 3)
            for draft, batch in zip(functions, (padded, packed), strict=True)
        )
        assert torch.equal(alone, together)
        assert len(alone) == sum(n - step for row in LENGTHS for n in row)


def test_noise_follows_its_law_in_every_sequence():
    _, packed = laid_out(tiny())
    states = torch.zeros(2, packed.tokens.shape[1], 4000)

    def spread(law, statistic):
        return statistic(noisy(states, 0.1, law, packed)[packed.valid])

    def largest(x):
        return x.abs().amax(-1)

    torch.manual_seed(0)
    torch.testing.assert_close(spread("uniform", largest), torch.full((56,), 0.1), atol=0, rtol=0.01)
    lengths = torch.tensor([n for row in LENGTHS for n in row for _ in range(n)])
    torch.testing.assert_close(spread("authors", largest), 0.1 * 512 / lengths, atol=0, rtol=0.01)
    torch.testing.assert_close(spread("normal", lambda x: x.std(-1)), torch.full((56,), 0.1), atol=0, rtol=0.1)
    padded, _ = laid_out(tiny())
    alone = noisy(torch.zeros(5, 20, 4000), 0.1, "authors", padded)[padded.valid]
    torch.testing.assert_close(largest(alone), 0.1 * 512 / lengths, atol=0, rtol=0.01)
    assert noisy(states, 0.0, "normal", packed) is states
