"""The objective of most drafters here: EAGLE's, against the target's states and probabilities, with HASS's Top-K or more.

    loss = regression * SmoothL1(f, f_hat) + classification * CE(p, p_hat) + weight * TopK

    p = softmax(head(f)), p_hat = softmax(head(f_hat)), CE = - sum over x of p(x) log p_hat(x),
    TopK = the same sum over the K likeliest x of p alone, not renormalised; or another loss of `drafters.losses`

With `batch.vocabulary` both softmaxes run over those ids alone (in no paper: it saves most of a small machine's training
time), see `specbench.training.loss_vocabulary`.

The gradient follows directly from the logits, (p_hat - p) head, and so does that of a head which is trained. Both are
computed a few rows at a time, without any array of positions x vocabulary (as in Liger-Kernel's fused cross-entropy), but
for p where it is used several times (`uses`), which is kept: 4 bytes a position and id.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.losses import BY_AUTOGRAD, Ranking, weighted_ids, with_slope
from specbench.engine.interface import SIZE_STEP, Batch
from specbench.engine.sampling import top
from specbench.engine.vocabulary import places

CPU_LOGITS, DEVICE_LOGITS = 2**21, 2**27  # per chunk: as many as fit into a CPU's caches, as keep a device busy
MIN_ROWS = 256  # per chunk, which reads the whole head


def chosen_places(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Where a mask [B, T] is True: rows [M] and columns [M], and how many there are.

    Behind them both hold zeros up to a multiple of `SIZE_STEP`.
    """
    places = mask.nonzero()
    rows, columns = F.pad(places, (0, 0, 0, -len(places) % SIZE_STEP)).unbind(1)
    return rows, columns, len(places)


def chunk_of(positions: int, ids: int, device: torch.device) -> int:
    """Positions whose logits of so many ids are computed at once: a multiple of `SIZE_STEP`, all chunks about equal."""
    most = max(MIN_ROWS, (CPU_LOGITS if device.type == "cpu" else DEVICE_LOGITS) // ids)
    chunks = max(1, math.ceil(positions / most))
    return max(1, math.ceil(positions / chunks / SIZE_STEP)) * SIZE_STEP


def in_product_dtype(weight: Tensor) -> Tensor:
    """A frozen weight as autocast would convert it, once for all products with it."""
    kind = weight.device.type
    if weight.requires_grad or not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return weight
    return weight.to(torch.get_autocast_dtype(kind))


def probabilities(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[m, K] -> p [m, K] in float32 and its argmax [m, 1]"""
    logits = logits.float()
    return logits.softmax(-1), top(logits, 1)[1]


@dataclass(frozen=True)
class TopIds:
    """A term over the likeliest ids alone, besides that over all: HASS's Top-K, or another loss of `drafters.losses`.

    Attributes:
        weight: of the term; 0: there is none. k: number of ids. ranking, top_p: which loss, see there.
    """

    weight: float = 0.0
    k: int = 0
    ranking: Ranking = "top_k"
    top_p: float = 1.0

    @property
    def is_sum(self) -> bool:
        """Is it a sum of weights times log p_hat, whose slope is known?"""
        return bool(self.weight) and self.ranking not in BY_AUTOGRAD

    @property
    def by_autograd(self) -> bool:
        return bool(self.weight) and self.ranking in BY_AUTOGRAD


NO_TOP_IDS = TopIds()


def mean(values: Tensor) -> Tensor:
    """The mean; 0 of nothing, since a batch, or a process's share of it, may have no scored position."""
    return values.mean() if values.numel() else values.sum()


class DistillationLoss:
    """The target's states and probabilities at the scored positions of a batch, and at padding that has no weight.

    Args:
        batch: states to be predicted. head: the drafter's, mostly the target's own, frozen.
        uses: number of calls of `loss`; for several the target's probabilities are kept.
        unbiased: logits get `Batch.vocabulary_bias`, for labels that the states do not determine.
    """

    def __init__(self, batch: Batch, head: nn.Linear, uses: int = 1, unbiased: bool = False):
        rows, columns, self.count = chosen_places(batch.scored)
        self.places = rows, columns  # [M] each: the scored positions, `count` of them, then padding
        self.states = batch.states[self.places]  # [M, D]
        self.rows = in_product_dtype(head.weight if batch.vocabulary is None else head.weight[batch.vocabulary])  # [K, D]
        self.bias = batch.vocabulary_bias.to(self.rows) if unbiased and batch.vocabulary_bias is not None else None  # [K]
        self.chunk = chunk_of(len(self.states), len(self.rows), self.states.device)
        self.keep = uses > 1
        self.known: list[tuple[Tensor, Tensor]] = []

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """p [m, K] and its argmax [m, 1], chunk by chunk."""
        if self.known:
            yield from self.known
            return
        for states in self.states.split(self.chunk):
            found = probabilities(F.linear(states, self.rows, self.bias))
            if self.keep:
                self.known.append(found)
            yield found

    def loss(
        self,
        predicted: Tensor,
        regression: float,
        classification: float,
        top_ids: TopIds = NO_TOP_IDS,
        weights: Tensor | None = None,
        logged: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The loss, its two main terms, and the share of positions at which the argmax agrees.

        Args:
            predicted: [B, T, D] f_hat of the batch's states.
            top_ids: the term over the likeliest ids.
            weights: [B, T] of positions in the loss, then a sum; None: the loss is the mean over scored positions.
            logged: [B, T] bool: positions over which the other values are means; None: all scored ones.
        """
        guess = predicted[self.places]  # [M, D]
        smooth_l1 = F.smooth_l1_loss(guess.float(), self.states.float(), reduction="none").mean(-1)  # [M]
        counted = torch.arange(len(guess), device=guess.device) < self.count
        w = counted / max(1, self.count) if weights is None else weights[self.places] * counted
        terms, cross_entropy, agrees = _OverVocabulary.apply(guess, self.rows, w, self, classification, top_ids)
        loss = regression * (w * smooth_l1).sum() + terms
        shown = torch.stack([smooth_l1.detach(), cross_entropy, agrees.float()])[:, : self.count]
        if logged is not None:
            shown = shown[:, logged[self.places][: self.count]]
        means = shown.sum(-1) / max(1, shown.shape[1])
        return {"loss": loss, **dict(zip(("regression", "classification", "agreement"), means, strict=True))}


class HardLabels(DistillationLoss):
    """The same with the text's tokens as labels: p is 1 at the token after each state, CE = - log p_hat of it (`unbiased`).

    States without such a token in their sequence, or whose token is outside a confined vocabulary, do not count.
    """

    def __init__(self, batch: Batch, head: nn.Linear):
        labels, known = batch.tokens.roll(-1, 1), F.pad(batch.same_sequence(1), (0, 1))
        if batch.vocabulary is not None:
            labels = places(batch.vocabulary, len(head.weight))[labels]
            known = known & (labels >= 0)
        super().__init__(replace(batch, scored=batch.scored & known), head, unbiased=True)
        self.labels = labels[self.places].clamp(min=0)  # [M]

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for labels in self.labels.split(self.chunk):
            p = torch.zeros(len(labels), len(self.rows), device=labels.device)
            yield p.scatter_(1, labels[:, None], 1.0), labels[:, None]


@dataclass(frozen=True)
class _Terms:
    """The terms over the vocabulary at m positions.

    Attributes:
        value: [m] classification * CE + the term over the likeliest ids. cross_entropy: [m] CE alone.
        hit: [m, 1] does the argmax agree with the target's? slope: [m, K] of `value`, by logit; None if not asked for.
    """

    value: Tensor
    cross_entropy: Tensor
    hit: Tensor
    slope: Tensor | None


def _terms(p: Tensor, best: Tensor, logits: Tensor, classification: float, top_ids: TopIds, sloped: bool) -> _Terms:
    """p [m, K] and its argmax [m, 1] of the target, logits [m, K] of the drafter, which are overwritten if in float32."""
    if top_ids.by_autograd:
        ranked, more = with_slope(top_ids.ranking, p, logits, top_ids.k)
    q = logits.float()  # [m, K], in place from here on: logits minus the row's largest, then their exponentials
    peak = q.amax(-1, keepdim=True)
    hit = q.gather(-1, best) == peak
    q.sub_(peak)
    expected = torch.linalg.vecdot(p, q)  # under p
    if top_ids.is_sum:
        mass, ids = weighted_ids(top_ids.ranking, p, q, top_ids.k, top_ids.top_p)
        at_ids = q.gather(-1, ids)
    total = q.exp_().sum(-1, keepdim=True)
    log_total = total.log()
    cross_entropy = log_total[:, 0] - expected  # p sums to 1
    value, share = classification * cross_entropy, torch.full_like(total, classification)  # share: [m, 1] factor of p_hat
    if top_ids.is_sum:
        value = value - top_ids.weight * (mass * (at_ids - log_total)).sum(-1)
        share = share + top_ids.weight * mass.sum(-1, keepdim=True)
    elif top_ids.by_autograd:
        value = value + top_ids.weight * ranked
    if not sloped:
        return _Terms(value, cross_entropy, hit, None)
    slope = q.mul_(share / total).sub_(p, alpha=classification)
    if top_ids.is_sum:
        slope.scatter_add_(-1, ids, -top_ids.weight * mass)
    elif top_ids.by_autograd:
        slope.add_(more, alpha=top_ids.weight)
    return _Terms(value, cross_entropy, hit, slope)


class _OverVocabulary(torch.autograd.Function):
    """The terms over the vocabulary at M positions, chunk by chunk; the forward computes their gradient, too."""

    @staticmethod
    def forward(
        ctx: Any,
        guess: Tensor,
        rows: Tensor,
        weights: Tensor,
        teacher: DistillationLoss,
        classification: float,
        top_ids: TopIds,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """guess [M, D], rows of the head [K, D], weights of positions [M]
        -> the weighted sum of `_Terms.value`; [M] each: CE alone, does the argmax agree?"""
        sums, entropies, hits, gradients = [], [], [], []
        of_rows = torch.zeros_like(rows, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        parts = zip(teacher.chunks(), guess.split(teacher.chunk), weights.split(teacher.chunk), strict=True)
        for (p, best), states, weight in parts:
            logits = F.linear(states, rows, teacher.bias)
            found = _terms(p, best, logits, classification, top_ids, sloped=any(ctx.needs_input_grad[:2]))
            sums.append((weight * found.value).sum())
            entropies.append(found.cross_entropy)
            hits.append(found.hit)
            if found.slope is not None:
                slope = found.slope.to(logits.dtype)
                gradients.append(weight[:, None] * (slope @ rows).float())
                if of_rows is not None:
                    of_rows += (slope.T @ (weight[:, None] * states).to(slope.dtype)).float()
        ctx.save_for_backward(torch.cat(gradients) if gradients else None, of_rows)
        ctx.dtypes = guess.dtype, rows.dtype
        result = torch.stack(sums).sum(), torch.cat(entropies), torch.cat(hits)[:, 0]
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # float32, so that a loss scale is applied before anything can underflow
        own = [None if g is None else (scale * g).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return (*own, *[None] * 4)
