"""Acceptance on held-out text without decoding: replay a known greedy answer and see how far each draft follows it.

Knows the drafter protocol, no concrete drafter. The answer was the target's own greedy one, so a draft token is
accepted exactly when it is the answer's next token: what is counted here is what greedy decoding would count.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specbench.engine.interface import Drafter
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.tree import paths_of


@dataclass
class Acceptance:
    """Counts over cycles. reached[i]: cycles that accepted depth i and drafted deeper; passed[i]: … and accepted that."""

    cycles: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        return self.emitted / max(self.cycles, 1)

    @property
    def alphas(self) -> list[float]:
        """0-alpha, 1-alpha, …: with a chain, acceptance where the input holds n drafter-made steps (EAGLE, Table 1)."""
        return [p / r if r else float("nan") for p, r in zip(self.passed, self.reached, strict=True)]

    def add(self, accepted: int, drafted: int) -> None:
        self.cycles += 1
        self.emitted += accepted + 1
        while len(self.reached) < drafted:
            self.reached.append(0)
            self.passed.append(0)
        for depth in range(min(accepted + 1, drafted)):
            self.reached[depth] += 1
            self.passed[depth] += depth < accepted


@torch.no_grad()
def replay(target: Target, drafter: Drafter, answers: list[tuple[list[int], int]], most: int = 64) -> Acceptance:
    """Replay the first `most` tokens of each answer. One target pass each, then drafting only.

    answers: (ids, index of the first answer token) of greedy answers.
    """
    result, sampler = Acceptance(), Sampler()
    for ids, begin in answers:
        tokens = ids[: begin + most]
        target.reset(len(tokens), drafter.taps)
        drafter.reset(len(tokens) + drafter.nodes)
        everything = target.prefill(torch.tensor(tokens, device=target.device))
        known, root_at = 0, begin  # states handed over so far; where the root stands
        while root_at + 1 < len(tokens):
            drafter.observe(everything.select(torch.arange(known, root_at, device=target.device)), tokens[root_at])
            known = root_at
            tree = drafter.propose(tokens[root_at], sampler, None)
            parents, drafts = tree.parents.tolist(), tree.tokens.tolist()
            ahead = tokens[root_at + 1 :]
            matches = (_matched([drafts[n] for n in path[1:]], ahead) for path in paths_of(parents))
            accepted = max(matches)
            drafted = int(tree.depths.max())
            if accepted == len(ahead):  # the answer ends inside the draft: what lay beyond was never put to the test
                drafted = accepted
                accepted -= 1
            result.add(accepted, min(drafted, len(ahead)))
            root_at += accepted + 1
    return result


@torch.no_grad()
def known_states(target: Target, ids: list[int], begin: int) -> tuple[Tensor, Tensor, int]:
    """A held-out answer with the target's states: (tokens [T], states [T, D], index of the first answer token)."""
    tokens = torch.tensor(ids, device=target.device)
    target.reset(len(ids))
    return tokens, target.prefill(tokens).last, begin


def _matched(draft: list[int], truth: list[int]) -> int:
    count = 0
    for guess, token in zip(draft, truth, strict=False):
        if guess != token:
            break
        count += 1
    return count
