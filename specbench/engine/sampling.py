"""From logits to the distribution that is really sampled, applied once and in float32. Knows no model, no tree.

Temperature, then top-k, then top-p, in the order of Transformers' generation. Temperature 0 is greedy: the processed
distribution is a point mass on the argmax.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.common.types import Natural, Temperature


@dataclass(frozen=True)
class Sampler:
    """How the target is sampled, and with it every drafter that must match it.

    Attributes:
        temperature: 0 for greedy. top_p: nucleus mass, 1 for all. top_k: ids kept, 0 for all.
    """

    temperature: Temperature = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Natural = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The processed distribution. [..., V] in any dtype -> [..., V] float32, rows summing to 1."""
        logits = logits.float()
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True, stable=True)
            mass = ordered.softmax(-1)
            beyond = mass.cumsum(-1) - mass >= self.top_p  # mass before this id already reaches top_p
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
        return logits.softmax(-1)

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """One id per row: the argmax, or a draw. [..., V] -> [...]"""
        if self.greedy:
            return argmax(logits)
        return draw(self.probabilities(logits), generator)


_CHUNK = 128  # ids; divides the vocabularies of this field


def argmax(logits: Tensor) -> Tensor:
    """The first best id of each row, [..., V] -> [...]. On a CPU in two stages, in a quarter of `torch.argmax`'s time."""
    if logits.device.type != "cpu" or logits.shape[-1] % _CHUNK:
        return logits.argmax(-1)
    chunks = logits.unflatten(-1, (-1, _CHUNK))
    chunk = chunks.amax(-1).argmax(-1)  # [...] the first chunk that holds the best value
    return chunk * _CHUNK + chunks.take_along_dim(chunk[..., None, None], -2)[..., 0, :].argmax(-1)


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the k best of each row, best first, [F, V] -> 2 x [F, k]. A CPU searches only k chunks."""
    require_ids(k, logits.shape[-1])
    count = logits.shape[-1] // _CHUNK
    if logits.device.type != "cpu" or logits.shape[-1] % _CHUNK or count < k:
        return tuple(logits.topk(k, dim=-1))  # type: ignore[return-value]
    chunks = logits.unflatten(-1, (count, _CHUNK))
    best = chunks.amax(-1).topk(k, dim=-1).indices  # [F, k]
    values, index = chunks.take_along_dim(best[..., None], -2).flatten(-2).topk(k, dim=-1)
    return values, best.gather(-1, index // _CHUNK) * _CHUNK + index % _CHUNK


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """One id per row of [..., V], without a host synchronisation; rows need not sum to 1.

    On a CPU first a chunk of ids, then one of them: noise for every id, see `race`, would take a millisecond a row.
    """
    if probabilities.device.type != "cpu":
        return race(probabilities, generator).argmax(-1)
    if probabilities.shape[-1] % _CHUNK:
        return inverse(probabilities, _uniform(probabilities, generator))
    chunks = probabilities.unflatten(-1, (-1, _CHUNK))
    chunk = inverse(chunks.sum(-1, dtype=torch.float64), _uniform(probabilities, generator))
    ids = chunks.take_along_dim(chunk[..., None, None], -2)[..., 0, :]  # [..., _CHUNK] the probabilities in that chunk
    return chunk * _CHUNK + inverse(ids, _uniform(probabilities, generator))


def _uniform(rows: Tensor, generator: torch.Generator | None) -> Tensor:
    """A number from [0, 1) for each row, [..., V] -> [...]"""
    return torch.rand_like(rows[..., 0], dtype=torch.float64, generator=generator)


def inverse(weights: Tensor, u: Tensor) -> Tensor:
    """The index at a share u of each row's weights: drawn in proportion to them if u is uniform. [..., n], [...] -> [...]

    u: from [0, 1), so that the product stays below the last sum and no index of weight 0 is found.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    index = torch.searchsorted(sums, u[..., None].to(sums) * sums[..., -1:], right=True)[..., 0]
    return index.clamp(max=weights.shape[-1] - 1)  # where the weights are NaN, or all of them 0


_LAST = 1e-30  # stands for probability 0: never drawn while anything else is left


def draw_without_replacement(probabilities: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """`count` distinct ids per row in draw order, [..., V] -> [..., count]; ids of probability 0 come last."""
    require_ids(count, probabilities.shape[-1])
    if probabilities.device.type != "cpu":
        return race(probabilities, generator).topk(count).indices
    left, ids = probabilities.clamp(min=_LAST), []
    for _ in range(count):
        ids.append(draw(left, generator))
        left.scatter_(-1, ids[-1][..., None], 0)
    return torch.stack(ids, -1)


def require_ids(count: int, vocabulary: int) -> None:
    """Raises `SpecBenchError` if a tree takes more candidates of a node than there are ids."""
    if count > vocabulary:
        raise SpecBenchError(
            f"the tree takes {count} candidates a node from a vocabulary of {vocabulary} ids; choose a narrower tree="
        )


def race(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """p / E with independent E ~ Exp(1): descending order is the order of draws without replacement (Gumbel top-k)."""
    noise = torch.empty_like(probabilities, dtype=torch.float32).exponential_(generator=generator)
    return probabilities / noise.clamp_min(torch.finfo(torch.float32).tiny)
