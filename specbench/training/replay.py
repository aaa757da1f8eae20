"""Acceptance on held-out text without decoding: replay known greedy answers and see how far each draft follows them.

Knows the drafter protocol, no concrete drafter. The answers were the target's own greedy ones, so a draft token is
accepted exactly when it is the answer's next token: what is counted here is what greedy decoding would count.

    replay    cycle by cycle, for any drafter and any tree
    chains    chains only: the drafts from all positions at once, which takes seconds where `replay` takes minutes
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specbench.engine.decode import Limits, decode
from specbench.engine.drafter import Drafter
from specbench.engine.interface import Batch, NoShortcut, Step
from specbench.engine.policies import Chain, to_target_ids
from specbench.engine.replay import ReplayTarget
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless
from specbench.training.features import Answer

ANSWER_TOKENS = 64  # of an answer that are replayed
BATCH = 8  # answers drafted for in one pass
CHAIN = 5  # steps of the held-out n-alpha: 0-alpha … 4-alpha, as in EAGLE, Table 1


@dataclass
class Acceptance:
    """Counts over cycles. reached[i]: cycles that accepted depth i and drafted deeper; passed[i]: … and accepted that.

    Attributes:
        answers: (tokens emitted, cycles) of each answer.
    """

    cycles: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tau(self) -> float:
        return self.emitted / max(self.cycles, 1)

    @property
    def alphas(self) -> list[float]:
        """0-alpha, 1-alpha, …: with a chain, acceptance where the input holds n drafter-made steps (EAGLE, Table 1)."""
        return [p / r if r else float("nan") for p, r in zip(self.passed, self.reached, strict=True)]

    def begin(self) -> None:
        """The cycles to come belong to another answer."""
        self.answers.append((0, 0))

    def add(self, accepted: int, drafted: int) -> None:
        """A cycle of the current answer."""
        self.cycles += 1
        self.emitted += accepted + 1
        emitted, cycles = self.answers[-1]
        self.answers[-1] = emitted + accepted + 1, cycles + 1
        while len(self.reached) < drafted:
            self.reached.append(0)
            self.passed.append(0)
        for depth in range(min(accepted + 1, drafted)):
            self.reached[depth] += 1
            self.passed[depth] += depth < accepted


def chain_acceptance(target: Target, drafter: Any, answers: list[Answer]) -> Acceptance:
    """Of a chain of `CHAIN` steps: from all positions at once where the drafter can, else cycle by cycle."""
    growth, drafter.growth = drafter.growth, Chain(CHAIN)
    try:
        return chains(target, drafter, answers, CHAIN)
    except NoShortcut:
        return replay(target, drafter, answers)
    finally:
        drafter.growth = growth


@torch.no_grad()
def chains(target: Target, drafter: Any, answers: list[Answer], steps: int, max_tokens: int = ANSWER_TOKENS) -> Acceptance:
    """What `replay` counts with a chain of `steps`, from the drafter's `drafts` at all positions at once.

    Raises:
        NoShortcut: the drafter has no such drafts.
    """
    lengths = [min(a.begin + max_tokens, len(a.ids)) for a in answers]
    order = sorted(range(len(answers)), key=lengths.__getitem__)  # neighbours in length pad one another least
    counted: dict[int, tuple[list[int], int]] = {}
    for at in range(0, len(order), BATCH):
        indices = order[at : at + BATCH]
        part, ends = [answers[i] for i in indices], [lengths[i] for i in indices]
        batch = _batch(target, drafter, part, ends)
        position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        begins = torch.tensor([a.begin for a in part], device=position.device)[:, None]
        asked = position < torch.tensor(ends, device=position.device)[:, None] - 1  # [B, T] the token after is known
        reached = asked & (position >= begins)  # a root stands here
        accepted = torch.zeros_like(batch.tokens)  # [B, T] by root
        drafted = 0  # a drafter may have fewer steps
        for step, pick in enumerate(drafter.drafts(batch, steps)):
            drafted = step + 1
            passed = torch.zeros_like(reached)
            if reached.any():
                passed[reached] = to_target_ids(drafter, pick(reached)) == batch.tokens.roll(-1, 1)[reached]
            accepted += passed.roll(-step, 1)  # a chain's step stands `step` positions behind its root
            reached = passed.roll(1, 1) & asked
            reached[:, 0] = False
        counted |= {i: (accepted[row].tolist(), drafted) for row, i in enumerate(indices)}
    result = Acceptance()
    for i, answer in enumerate(answers):
        by_root, drafted = counted[i]
        _walk(result, by_root, answer.begin, lengths[i], drafted)
    return result


def _walk(result: Acceptance, accepted: list[int], begin: int, end: int, steps: int) -> None:
    """Cycles of one answer, from how many tokens a chain from each root would have accepted."""
    result.begin()
    root = begin
    while root + 1 < end:
        ahead = end - root - 1
        drafted, found = steps, accepted[root]
        if found == ahead:  # the answer ends inside the draft: what lay beyond was never put to the test
            drafted = found = found - 1
        result.add(found, min(drafted, ahead))
        root += found + 1


def _batch(target: Target, drafter: Any, part: list[Answer], ends: list[int]) -> Batch:
    """Answers up to their ends as a padded batch with the states, and what else the drafter taps."""
    longest = max(ends)
    tokens = torch.zeros(len(part), longest, dtype=torch.long, device=target.device)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (answer, end) in enumerate(zip(part, ends, strict=True)):
        tokens[row, :end] = torch.tensor(answer.ids[:end])
        valid[row, :end] = True
    stored = not drafter.taps.reads_layers and all(a.states is not None for a in part)
    if not stored:
        states, hidden, kv = target.tapped(tokens, drafter.taps)
        return Batch(tokens, states, valid, valid, hidden=hidden, kv=kv)
    states = torch.zeros(*tokens.shape, target.hidden_size, device=target.device, dtype=target.dtype)
    for row, (answer, end) in enumerate(zip(part, ends, strict=True)):
        assert answer.states is not None
        states[row, :end] = answer.states[:end].to(states)
    return Batch(tokens, states, valid, valid)


@torch.no_grad()
def replay(target: Target, drafter: Drafter, answers: list[Answer], max_tokens: int = ANSWER_TOKENS) -> Acceptance:
    """Replay the first `max_tokens` tokens of each answer. One target pass each, then drafting only."""
    result = Acceptance()
    for answer in answers:
        result.begin()
        prompt, tokens = answer.ids[: answer.begin], answer.ids[answer.begin : answer.begin + max_tokens]
        known: Any = ReplayTarget(target, prompt, tokens, drafter.taps)
        for event in decode(known, drafter, prompt, Limits(len(tokens)), Lossless(), Sampler()):
            if isinstance(event, Step):
                result.add(event.accepted, event.drafted)
    return result


@torch.no_grad()
def known_states(target: Target, answer: Answer) -> tuple[Tensor, Tensor, int]:
    """A held-out answer with the target's states: (tokens [T], states [T, D], index of the first answer token)."""
    tokens = torch.tensor(answer.ids, device=target.device)
    if answer.states is not None:
        return tokens, answer.states.to(target.device, target.dtype), answer.begin
    target.reset(len(answer.ids))
    return tokens, target.prefill(tokens).last, answer.begin
