"""EAGLE's objective as it is computed, against its definition written out."""

import itertools
import typing

import pytest
import torch
import torch.nn.functional as F
from conftest import make, tiny
from drafting import batch_of
from torch.utils._python_dispatch import TorchDispatchMode

from drafters import distillation
from drafters.distillation import DistillationLoss, TopIds
from drafters.losses import Ranking
from specbench.engine.interface import Batch

B, T, D, V = 3, 11, 16, 97


def setting(vocabulary=None, seed=0):
    torch.manual_seed(seed)
    head = torch.nn.Linear(D, V, bias=False).requires_grad_(False)
    states, predicted = 3 * torch.randn(2, B, T, D)
    scored = torch.rand(B, T) > 0.3
    batch = Batch(torch.zeros(B, T).long(), states, scored, scored, vocabulary=vocabulary)
    return batch, head, predicted.requires_grad_()


def defined(batch, head, predicted, regression, classification, topk, topk_weight):
    rows = head.weight if batch.vocabulary is None else head.weight[batch.vocabulary]
    f, f_hat = batch.states[batch.scored], predicted[batch.scored]
    p, log_q = (f @ rows.T).softmax(-1), (f_hat @ rows.T).log_softmax(-1)
    mass, ids = p.topk(topk)
    cross_entropy = -(p * log_q).sum(-1).mean()
    return {
        "loss": regression * F.smooth_l1_loss(f_hat, f)
        + classification * cross_entropy
        - topk_weight * (mass * log_q.gather(-1, ids)).sum(-1).mean(),
        "regression": F.smooth_l1_loss(f_hat, f),
        "classification": cross_entropy,
        "agreement": (p.argmax(-1) == log_q.argmax(-1)).float().mean(),
    }


@pytest.mark.parametrize("rows", [4, 256])
@pytest.mark.parametrize("topk_weight", [0.0, 0.7])
@pytest.mark.parametrize("vocabulary", [None, torch.arange(5, 70)])
def test_it_is_the_definition_with_its_gradient(vocabulary, topk_weight, rows, monkeypatch):
    monkeypatch.setattr(distillation, "MIN_ROWS", rows)
    monkeypatch.setattr(distillation, "SIZE_STEP", min(rows, distillation.SIZE_STEP))
    monkeypatch.setattr(distillation, "CPU_LOGITS", 1)  # so that MIN_ROWS decides
    batch, head, predicted = setting(vocabulary)
    found = DistillationLoss(batch, head).loss(predicted, 0.4, 0.3, TopIds(topk_weight, 5))
    expected = defined(batch, head, predicted, 0.4, 0.3, 5, topk_weight)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=0, rtol=2e-6)
    scale = 1024.0  # as a loss scale has it
    (ours,) = torch.autograd.grad(scale * found["loss"], predicted)
    (theirs,) = torch.autograd.grad(scale * expected["loss"], predicted)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("vocabulary", [None, torch.arange(5, 70)])
@pytest.mark.parametrize("topk_weight", [0.0, 0.7])
def test_a_head_that_is_trained_gets_its_gradient(vocabulary, topk_weight, monkeypatch):
    """With p held fixed, over weighted positions, beside that of the states."""
    monkeypatch.setattr(distillation, "MIN_ROWS", 4)
    monkeypatch.setattr(distillation, "CPU_LOGITS", 1)
    batch, head, predicted = setting(vocabulary)
    head.requires_grad_(True)
    weights = torch.rand(B, T)
    rows = head.weight if vocabulary is None else head.weight[vocabulary]
    p = (batch.states[batch.scored] @ rows.T).softmax(-1).detach()
    log_q = (predicted[batch.scored] @ rows.T).log_softmax(-1)
    mass, ids = p.topk(5)
    each = -0.3 * (p * log_q).sum(-1) - topk_weight * (mass * log_q.gather(-1, ids)).sum(-1)
    expected = (weights[batch.scored] * each).sum()
    found = DistillationLoss(batch, head).loss(predicted, 0.0, 0.3, TopIds(topk_weight, 5), weights=weights)["loss"]
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad(x, (predicted, head.weight)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def written_out(ranking, p, z, k, top_p):
    """Each loss of one position, id by id. p, z: [V]"""
    log_q, likely = z.log_softmax(-1), p.argsort(descending=True).tolist()
    own, omega, s = z.argsort(descending=True).tolist()[:k], likely[:k], torch.sigmoid
    if ranking == "top_p":
        count = next(n for n in range(1, len(p) + 1) if sum(p[x] for x in likely[:n]) >= top_p)
        return -sum(p[x] * log_q[x] for x in likely[:count])
    if ranking in ("top_k", "both"):
        return -sum(p[x] * log_q[x] for x in omega + own * (ranking == "both"))
    if ranking == "normed":
        return -sum(p[x] / p[omega].sum() * (log_q[x] - log_q[omega].logsumexp(-1)) for x in omega)
    if ranking == "recall":
        above = {x: sum(s(z[y] - z[x]) for y in range(len(z)) if y != x) for x in omega}
        return 1 - sum(s(k - above[x]) for x in omega) / k
    total = 0
    for ids in (omega, own):
        pairs = list(itertools.combinations(ids, 2))
        d, d_hat = (torch.stack([x[a] - x[b] for a, b in pairs]).log_softmax(-1) for x in (p.log(), z))
        total = total + (d.exp() * (d - d_hat)).sum()
    return total


@pytest.mark.parametrize("rows", [4, 256])
@pytest.mark.parametrize("ranking", typing.get_args(Ranking))
def test_every_ranking_loss_is_its_definition_with_its_gradient(ranking, rows, monkeypatch):
    monkeypatch.setattr(distillation, "MIN_ROWS", rows)
    monkeypatch.setattr(distillation, "CPU_LOGITS", 1)
    batch, head, predicted = setting()
    with torch.no_grad():
        predicted.mul_(0.2).add_(batch.states)  # near what it is to be, as in training
    teacher = DistillationLoss(batch, head)
    with_it = teacher.loss(predicted, 0.4, 0.3, TopIds(0.7, 3, ranking, 0.8))
    extra = with_it["loss"] - teacher.loss(predicted, 0.4, 0.3)["loss"]
    p, z = (batch.states[batch.scored] @ head.weight.T).softmax(-1), predicted[batch.scored] @ head.weight.T
    expected = 0.7 * torch.stack([written_out(ranking, *pair, 3, 0.8) for pair in zip(p, z, strict=True)]).mean()
    torch.testing.assert_close(extra, expected, atol=2e-5, rtol=1e-4)
    (ours,), (theirs,) = (torch.autograd.grad(value, predicted) for value in (extra, expected))
    assert float(theirs.abs().max()) > 1e-3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_one_teacher_serves_several_predictions(monkeypatch):
    """Kept or made anew, the target's probabilities are the same; kept, its head is read once."""
    batch, head, predicted = setting()
    linear, products = F.linear, []
    monkeypatch.setattr(F, "linear", lambda *parts: (products.append(0), linear(*parts))[1])
    results = []
    for uses, expected in ((1, 4), (2, 3)):
        shared, products[:] = DistillationLoss(batch, head, uses), []
        results.append([float(shared.loss(guess, 1.0, 1.0)["loss"].detach()) for guess in (predicted, 2 * predicted)])
        assert len(products) == expected
    assert results[0] == results[1]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


class Products(TorchDispatchMode):
    """The shapes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes.add(tuple(tuple(x.shape) for x in args))
        return function(*args, **(kwargs or {}))


def test_batches_with_nearly_as_many_scored_positions_multiply_the_same_shapes():
    """A CPU's kernels are compiled for each new shape."""
    seen = []
    for count in (17, 23, 32):
        batch, head, predicted = setting()
        batch.scored = (torch.arange(B * T) < count).view(B, T)
        with Products() as products:
            DistillationLoss(batch, head).loss(predicted, 1.0, 0.1)["loss"].backward()
        seen.append(products.shapes)
    assert seen[0] and seen[0] == seen[1] == seen[2]


def test_no_array_is_as_large_as_positions_times_vocabulary(monkeypatch):
    monkeypatch.setattr(distillation, "MIN_ROWS", 4)
    monkeypatch.setattr(distillation, "SIZE_STEP", 4)
    monkeypatch.setattr(distillation, "CPU_LOGITS", 1)
    batch, head, predicted = setting()
    with Largest() as seen:
        DistillationLoss(batch, head).loss(predicted, 1.0, 0.1, TopIds(0.5, 5))["loss"].backward()
    assert seen.elements <= V * D < int(batch.scored.sum()) * V


def test_in_half_precision_the_gradient_is_the_one_autograd_finds():
    batch, head, predicted = setting()
    head, half = head.bfloat16(), predicted.detach().bfloat16().requires_grad_()
    batch.states = batch.states.bfloat16()
    found = DistillationLoss(batch, head).loss(half, 1.0, 1.0)["loss"]
    found.backward()
    f, f_hat = batch.states[batch.scored], half[batch.scored]
    p, log_q = F.linear(f, head.weight).float().softmax(-1), F.linear(f_hat, head.weight).float().log_softmax(-1)
    loss = F.smooth_l1_loss(f_hat.float(), f.float()) - (p * log_q).sum(-1).mean()
    (expected,) = torch.autograd.grad(loss, half)
    torch.testing.assert_close(found, loss, atol=0, rtol=1e-5)
    torch.testing.assert_close(half.grad, expected, atol=1e-4, rtol=0.05)


@pytest.mark.parametrize(
    ("drafter", "options", "lacks_a_token"),
    [
        ("beagle", ["++drafter.window=1"], False),
        ("beagle", ["++drafter.window=5"], True),
        ("beagle", ["++drafter.stage=late"], False),
        ("beagle", ["++drafter.stage=late", "++drafter.ahead=true"], True),
        ("eagle2", [], False),
        ("eagle2", ["++drafter.inputs=token"], False),
        ("eagle2", ["++drafter.inputs=feature"], True),
        ("hass", ["++drafter.inputs=unshifted"], True),
    ],
)
def test_predictions_from_inputs_that_lack_a_token_are_corrected_for_the_chance_of_ids(drafter, options, lacks_a_token):
    target = tiny()
    made, batch = make(drafter, target, *options, "++drafter.noise=0"), batch_of(target)
    losses = []
    for bias in (0.0, 1.0):
        torch.manual_seed(0)
        batch.vocabulary, batch.vocabulary_bias = torch.arange(40), bias * torch.arange(40) / 10
        losses.append(float(made.loss(batch)["loss"].detach()))
    assert (abs(losses[0] - losses[1]) > 1e-4) == lacks_a_token
