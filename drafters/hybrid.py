"""Retrieval where the text repeats itself, a trained drafter elsewhere (as in SAM-Decoding, arXiv:2411.10666).

    draft from the text    if its last `least` tokens stood there before, and something can follow
    draft with the model   else

The trained drafter observes every cycle, whoever drafted it: it may be asked in the next one. Which of the two drafts
depends on the text alone, so sampling stays lossless, by Algorithm D in the one case and as the trained drafter has it in
the other.

Deviations and choices: the threshold is on tokens matched, whatever followed them.
"""

from typing import Any, Protocol

import torch
from torch import nn

from specbench.common.types import Count, Name
from specbench.engine.interface import DraftTree, Outline, Sampler, State, Taps, TargetStates
from specbench.engine.target import Target


class Matching(Protocol):
    """A drafter that copies from the text, and says of how many last tokens it knows what followed them."""

    nodes: int
    matched: int
    state: State

    def bind(self, target: Any) -> None: ...
    def reset(self, capacity: int) -> None: ...
    def remember(self, on: bool) -> None: ...
    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree: ...
    def observe(self, states: TargetStates, bonus: int) -> None: ...


class Hybrid(nn.Module):
    """Two drafters, of which one drafts in each cycle.

    Args:
        name: as tables show it.
        retrieval: copies. base: the trained one, of the configuration that `trained` names.
        least: tokens that must match for a draft from the text.
        vocabulary: of the trained one, see `TrainedDrafter`.
    """

    def __init__(
        self,
        name: Name,
        retrieval: Matching,
        trained: Name,
        base: Any,
        least: Count = 3,
        vocabulary: Count | None = None,
    ):
        super().__init__()
        self.name, self.retrieval, self.trained, self.base, self.least = name, retrieval, trained, base, least
        self.vocabulary = vocabulary

    @property
    def taps(self) -> Taps:
        """What the trained drafter reads, known once it is bound at the latest; the retrieval drafter reads ids alone."""
        taps: Taps = self.base.taps
        return taps

    @property
    def nodes(self) -> int:
        return max(self.retrieval.nodes, int(self.base.nodes))

    @property
    def passes(self) -> int:
        return int(self.base.passes)

    @property
    def grower(self) -> Any:
        """The drafter whose trees `tree=` shapes, and fits."""
        return self.base

    @property
    def state(self) -> State:
        """What the retrieval drafter's memory holds; the trained one has none."""
        return self.retrieval.state

    def remember(self, on: bool) -> None:
        self.retrieval.remember(on)

    def outline(self, target: Target) -> Outline:
        found: Outline = self.base.outline(target)
        return found

    def bind(self, target: Target) -> None:
        self.retrieval.bind(target)
        self.base.bind(target)
        self.active_parameters = self.base.active_parameters
        self.provenance = {"base": self.base.provenance}
        self.contents = {f"base/{name}": digest for name, digest in self.base.contents.items()}

    def compile_network(self, backend: str = "inductor") -> None:
        self.base.compile_network(backend)

    def optimize_for_inference(self) -> None:
        self.base.optimize_for_inference()

    def reset(self, capacity: int) -> None:
        self.retrieval.reset(capacity)
        self.base.reset(capacity)

    def observe(self, states: TargetStates, bonus: int) -> None:
        self.retrieval.observe(states, bonus)
        self.base.observe(states, bonus)

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        if self.retrieval.matched >= self.least:
            copied = self.retrieval.propose(root, sampler, generator)
            if len(copied) > 1:
                return copied
        tree: DraftTree = self.base.propose(root, sampler, generator)
        return tree
