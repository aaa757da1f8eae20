"""The autoregressive baseline as a drafter: an empty tree, so that both sides of every speed-up share one loop."""

from typing import Any

import torch

from specbench.common.types import Name
from specbench.engine.drafter import Drafter
from specbench.engine.interface import DraftTree, Sampler, Taps
from specbench.engine.tree import root_only


class NoDrafter(Drafter):
    """Proposes nothing; every cycle is one target pass over the root and emits the bonus.

    streamed: a target on a server sends token after token without a request for each; others ignore it.
    """

    batches = True

    def __init__(self, name: Name = "none", streamed: bool = False):
        super().__init__(name)
        self.taps = Taps(last=False, free_running=streamed)

    def bind(self, target: Any) -> None:
        self.device = target.device

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        return root_only(root, self.device)
