"""Unigram and bigram models as drafters: the cheapest rivals of Leviathan et al. (arXiv:2211.17192, Table 3).

With c(x) and c(t, x) counted in the training text of N tokens and V ids,

    unigram    q(x)     = (c(x) + 1) / (N + V)
    bigram     q(x | t) = [c(t, x) + (1 + m(t)) q(x)] / (1 + m(t) + sum over kept x of c(t, x))

c(t, x) is kept for the most frequent `followers` of a token t; m(t) counts the others, which are drafted as the unigram has
it, and so is what follows a token that the text lacks. q is positive and sums to 1, so that Algorithm S is exact at any
temperature, as with a neural draft model. A lookup counts as no draft pass.

    model.safetensors    counts [V] | kept [V] followers of each id | followers [n], times [n], id by id; all int32

Deviations and choices: the source says neither on what its models were counted nor how they were smoothed; here on the
corpus that the trained drafters see, with one added count. `followers` keeps the file small (16: 1.8 MB on five million
tokens and 49,152 ids, 72% of all pairs).
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from drafters.base import Pick, likeliest_at
from specbench.common.errors import SpecBenchError
from specbench.common.storage import project_path
from specbench.common.types import Name, Text, Width
from specbench.engine import weights as stored
from specbench.engine.drafter import Drafter
from specbench.engine.interface import Batch, DraftTree, Sampler, Taps, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.sampling import require_ids
from specbench.engine.target import Target
from specbench.records.schema import WEIGHTS


class NGram(Drafter):
    """Drafts token by token from counts of the training text.

    Args:
        growth: a chain as in the paper; any tree works. weights: folder of its counts; None: nothing counted (tests).
        order: 1 unigram, 2 bigram. followers: kept of each token, when it is counted.
    """

    taps = Taps(last=False)
    counted = True
    batches = True

    growth: TreePolicy

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        order: Literal[1, 2] = 2,
        followers: Width = 16,
    ):
        super().__init__(name)
        self.weights, self.order, self.followers = weights, order, followers
        self.set_tree_policy(growth)

    def set_tree_policy(self, growth: TreePolicy) -> None:
        self.growth, self.nodes = growth, growth.nodes

    def bind(self, target: Target) -> None:
        require_ids(self.growth.candidates_needed, target.vocab_size)
        self.device, self.size = target.device, target.vocab_size
        if self.weights is None:
            self._fill(self.count([]))
            return
        folder = project_path(self.weights)
        self.provenance, tables = stored.read(folder, target.fingerprint())
        self._check(tables, folder / WEIGHTS)
        self._fill(tables)
        self.contents |= stored.contents_of(folder)

    def _row(self) -> Any:
        return copy.copy(self)  # tables are the same

    # Counts -------------------------------------------------------------------------------------------------------------

    def count(self, texts: Iterable[Tensor]) -> dict[str, Tensor]:
        """Counts of single ids; of pairs, for each id its most frequent followers, `self.followers` at most."""
        nothing = torch.zeros(0, dtype=torch.long)
        known = [nothing, *texts]
        tables = {"counts": torch.cat(known).bincount(minlength=self.size)}
        if self.order == 2:
            pairs, times = torch.cat([t[:-1] * self.size + t[1:] for t in known]).unique(return_counts=True)
            pairs, times = (x[times.argsort(descending=True, stable=True)] for x in (pairs, times))
            by_token = (pairs // self.size).argsort(stable=True)  # within a token most frequent first
            pairs, times = pairs[by_token], times[by_token]
            total = (pairs // self.size).bincount(minlength=self.size)  # [V] different followers
            begins = total.cumsum(0) - total
            few = torch.arange(len(pairs)) - begins[pairs // self.size] < self.followers
            tables |= {"kept": total.clamp(max=self.followers), "followers": pairs[few] % self.size, "times": times[few]}
        tables = {name: table.to(torch.int32) for name, table in tables.items()}
        self._fill(tables)
        return tables

    def _check(self, tables: Mapping[str, Tensor], path: Path) -> None:
        """Raises `SpecBenchError` for tables of another drafter or target."""
        names = {"counts"} if self.order == 1 else {"counts", "kept", "followers", "times"}
        right = tables.keys() == names and not any(t.is_floating_point() or t.ndim != 1 for t in tables.values())
        right = right and len(tables["counts"]) == self.size
        if right and self.order == 2:
            kept, followers, times = (tables[name].long() for name in ("kept", "followers", "times"))
            right = len(kept) == self.size and int(kept.sum()) == len(followers) == len(times)
            right = right and bool(((followers >= 0) & (followers < self.size)).all())
        if not right or any(int(t.min()) < 0 for t in tables.values() if len(t)):
            raise SpecBenchError(
                f"{path} holds no counts of {self.size} ids with drafter.order={self.order}; count them again "
                f"(python -m specbench.train drafter={self.name} and the same model) or check the drafter's options"
            )

    def _fill(self, tables: Mapping[str, Tensor]) -> None:
        """Put tables on the device, with as many places for every token's followers."""
        counts = tables["counts"].to(self.device, torch.float32)
        self.unigram = (counts + 1) / (counts.sum() + self.size)  # [V] float32, sums to 1
        if self.order == 1:
            return
        kept = tables["kept"].to(self.device).long()
        width = int(tables["kept"].max()) if len(tables["followers"]) else 1
        here = torch.arange(width, device=self.device) < kept[:, None]  # [V, width]
        self.ids = torch.zeros(self.size, width, dtype=torch.long, device=self.device)
        self.times = torch.zeros(self.size, width, device=self.device)
        if len(tables["followers"]):
            self.ids[here] = tables["followers"].to(self.device).long()
            self.times[here] = tables["times"].to(self.device).float()
        self.others = 1 + (counts - self.times.sum(1)).clamp(min=0)  # [V] 1 + m

    def after(self, tokens: Tensor) -> Tensor:
        """log q of what follows some tokens. [F] -> [F, V]"""
        if self.order == 1:
            return self.unigram.log().expand(len(tokens), -1)
        weight = self.others[tokens][:, None] * self.unigram  # [F, V]
        weight = weight.scatter_add(1, self.ids[tokens], self.times[tokens])
        return (weight / weight.sum(1, keepdim=True)).log()

    # Decoding -----------------------------------------------------------------------------------------------------------

    def observe(self, states: TargetStates, bonus: int) -> None:
        self.root = states.tokens.new_full((1,), bonus)

    def root_logits(self) -> Tensor:
        return self.after(self.root)[0]

    def expand(self, tokens: Tensor, parent_rows: Tensor, depth: int, visible: Tensor) -> Tensor:
        return self.after(tokens)

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        tree = self.growth.grow(self, root, sampler, generator)  # type: ignore[arg-type]
        tree.passes = 0
        return tree

    def drafts(self, batch: Batch, steps: int) -> Iterator[Pick]:
        """As of trained drafters: the same in every step, by the last token alone. Ties as in trees."""

        yield from [likeliest_at(batch.tokens, self.after)] * steps

    @classmethod
    def export_obstacle(cls, server: str, options: Mapping[str, Any]) -> str | None:
        return f"{server} has no model of {cls.__name__}'s kind"
