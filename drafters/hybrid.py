"""Retrieval where the text repeats itself, a trained drafter elsewhere (as in SAM-Decoding, arXiv:2411.10666).

    draft from the text    if its last `least` tokens occurred in it before, and an occurrence gives a draft
    draft with the model   else

The trained drafter observes every cycle, since it may draft the next one. Which of the two drafts depends on the text
alone, so sampling stays lossless: by Algorithm D for copies, by the trained drafter's own rule for its drafts.

Deviations and choices: the threshold is on tokens matched, whatever followed them.
"""

from typing import Any

import torch
from torch import nn

from drafters.retrieval import Matching
from specbench.common.errors import SpecBenchError
from specbench.common.types import Count, Ids, Name
from specbench.engine.drafter import Delegating, Drafter, State
from specbench.engine.interface import DraftTree, Sampler, TargetStates
from specbench.engine.target import Target


class Hybrid(Delegating, nn.Module):
    """Two drafters, of which one drafts in each cycle.

    Args:
        retrieval: copies from text. base: the trained one, from the configuration that `trained` names.
        least: tokens that must match for a draft from the text. vocabulary: the trained one's.
    """

    def __init__(
        self,
        name: Name,
        retrieval: Matching,
        trained: Name,
        base: Any,
        least: Count = 3,
        vocabulary: Ids | None = None,
    ):
        nn.Module.__init__(self)
        Drafter.__init__(self, name)
        self.retrieval, self.base, self.least = retrieval, base, least
        self.vocabulary = vocabulary
        if retrieval.longest is not None and least > retrieval.longest:
            raise SpecBenchError(
                f"drafter.least={least}: {retrieval.name} matches {retrieval.longest} tokens at most; lower it"
            )

    @property
    def nodes(self) -> int:  # type: ignore[override]
        return max(self.retrieval.nodes, int(self.base.nodes))

    @property
    def passes(self) -> int:  # type: ignore[override]
        return int(self.base.passes)

    @property
    def state(self) -> State:  # type: ignore[override]
        return self.retrieval.state

    @property
    def grower(self) -> Drafter:
        return self.base

    @property
    def weights_owner(self) -> Drafter:
        return self.base

    def persist(self, on: bool) -> None:
        self.retrieval.persist(on)

    def bind(self, target: Target) -> None:
        self.retrieval.bind(target)
        super().bind(target)

    def reset(self, capacity: int) -> None:
        self.retrieval.reset(capacity)
        super().reset(capacity)

    def observe(self, states: TargetStates, bonus: int) -> None:
        self.retrieval.observe(states, bonus)
        super().observe(states, bonus)

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        if self.retrieval.matched >= self.least:
            copied = self.retrieval.propose(root, sampler, generator)
            if len(copied) > 1:
                return copied
        return self.base.propose(root, sampler, generator)
