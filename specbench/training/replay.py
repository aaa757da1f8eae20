"""Acceptance on held-out text without decoding: replay known greedy answers and count how far each draft follows them.

Knows the drafter protocol, no concrete drafter. The answers are the target's own greedy ones, so a draft token is
accepted exactly when it is the answer's next token: the counts are those of greedy decoding.

    replay    cycle by cycle, for any drafter and any tree
    chains    chains only: the drafts from all positions at once, in seconds where `replay` takes minutes
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specbench.engine.decode import Limits, decode
from specbench.engine.drafter import Drafter
from specbench.engine.interface import Batch, NoShortcut, Step, Taps
from specbench.engine.policies import Chain, to_target_ids
from specbench.engine.replay import ReplayTarget
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless
from specbench.training.corpus_reader import HeldOutAnswer

ANSWER_TOKENS = 64  # of an answer that are replayed
BATCH = 8  # answers drafted for in one pass
CHAIN = 5  # steps of the held-out n-alpha: 0-alpha … 4-alpha, as in EAGLE, Table 1
TOP = (4, 10)  # likeliest first tokens among which the answer's is looked for, as in Beagle, Figures 6 and 7


@dataclass
class AcceptanceCounts:
    """Counts over cycles.

    Attributes:
        reached: [i] cycles that accepted depth i and drafted deeper. passed: [i] of these, cycles that accepted i + 1 too.
        answers: (tokens emitted, cycles) of each answer.
        ranks: for each cycle, that of the answer's token among the first step's likeliest; empty after `replay`.
    """

    cycles: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list, compare=False)

    @property
    def tau(self) -> float:
        return self.emitted / max(self.cycles, 1)

    @property
    def alphas(self) -> list[float]:
        """0-alpha, 1-alpha, …: with a chain, acceptance where the input holds n drafter-made steps (EAGLE, Table 1)."""
        return [p / r if r else float("nan") for p, r in zip(self.passed, self.reached, strict=True)]

    @property
    def among_likeliest(self) -> dict[int, float]:
        """By k of `TOP`: share of cycles whose first token is among the k likeliest."""
        return {k: sum(rank < k for rank in self.ranks) / len(self.ranks) for k in TOP if self.ranks}

    def begin(self) -> None:
        """The cycles to come belong to another answer."""
        self.answers.append((0, 0))

    def add(self, accepted: int, drafted: int) -> None:
        """A cycle of the current answer."""
        self.cycles += 1
        self.emitted += accepted + 1
        emitted, cycles = self.answers[-1]
        self.answers[-1] = emitted + accepted + 1, cycles + 1
        missing = max(0, drafted - len(self.reached))
        self.reached += [0] * missing
        self.passed += [0] * missing
        for depth in range(min(accepted + 1, drafted)):
            self.reached[depth] += 1
            self.passed[depth] += depth < accepted


def chain_acceptance(target: Target, drafter: Any, answers: list[HeldOutAnswer]) -> AcceptanceCounts:
    """Of a chain of `CHAIN` steps: from all positions at once where the drafter can, else cycle by cycle."""
    policy, drafter.growth = drafter.growth, Chain(CHAIN)
    try:
        return chains(target, drafter, answers, CHAIN)
    except NoShortcut:
        return replay(target, drafter, answers)
    finally:
        drafter.growth = policy


@torch.no_grad()
def chains(
    target: Target, drafter: Any, answers: list[HeldOutAnswer], steps: int, max_tokens: int = ANSWER_TOKENS
) -> AcceptanceCounts:
    """What `replay` counts with a chain of `steps`, from the drafter's `drafts` at all positions at once.

    Raises:
        NoShortcut: the drafter has no `drafts`.
    """
    ends = [min(a.begin + max_tokens, len(a.ids)) for a in answers]
    order = sorted(range(len(answers)), key=ends.__getitem__)  # neighbours in length need least padding
    by_answer: dict[int, tuple[list[int], list[int], int]] = {}
    for at in range(0, len(order), BATCH):
        indices = order[at : at + BATCH]
        part, until = [answers[i] for i in indices], [ends[i] for i in indices]
        accepted, ranks, drafted = _accepted(target, drafter, part, until, steps)
        by_answer |= {i: (accepted[row].tolist(), ranks[row].tolist(), drafted) for row, i in enumerate(indices)}
    counts = AcceptanceCounts()
    for i, answer in enumerate(answers):
        _add_cycles(counts, *by_answer[i], answer.begin, ends[i])
    return counts


def _accepted(
    target: Target, drafter: Any, part: list[HeldOutAnswer], ends: list[int], steps: int
) -> tuple[Tensor, Tensor, int]:
    """What a chain from each position as its root accepts.

    Returns:
        Accepted tokens [B, T]; the rank of the answer's token among the first step's likeliest [B, T], `TOP[-1]` if it is
        not among so many; steps drafted, of which a drafter may have fewer.
    """
    batch = _batch(target, drafter, part, ends)
    position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    begins = torch.tensor([a.begin for a in part], device=position.device)[:, None]
    known = position < torch.tensor(ends, device=position.device)[:, None] - 1  # [B, T] is the next token known?
    reached = known & (position >= begins)
    accepted, ranks = torch.zeros_like(batch.tokens), torch.full_like(batch.tokens, TOP[-1])
    drafted = 0
    for step, pick in enumerate(drafter.drafts(batch, steps)):
        drafted = step + 1
        passed = torch.zeros_like(reached)
        if reached.any():
            ids = to_target_ids(drafter, pick(reached, 1 if step else TOP[-1]))  # [M, k]
            right = ids == batch.tokens.roll(-1, 1)[reached][:, None]
            passed[reached] = right[:, 0]
            if step == 0:
                ranks[reached] = torch.where(right.any(1), right.int().argmax(1), TOP[-1])
        accepted += passed.roll(-step, 1)  # a chain's step stands `step` positions behind its root
        reached = passed.roll(1, 1) & known
        reached[:, 0] = False
    return accepted, ranks, drafted


def _add_cycles(counts: AcceptanceCounts, accepted: list[int], ranks: list[int], steps: int, begin: int, end: int) -> None:
    """Add the cycles of one answer. accepted, ranks: by root, for chains of so many steps."""
    counts.begin()
    root = begin
    while root + 1 < end:
        left = end - root - 1
        drafted, count = steps, accepted[root]
        if count == left:  # the answer ends inside the draft: its last token counts as the bonus
            drafted = count = count - 1
        counts.add(count, min(drafted, left))
        if drafted:
            counts.ranks.append(ranks[root])
        root += count + 1


def _batch(target: Target, drafter: Any, part: list[HeldOutAnswer], ends: list[int]) -> Batch:
    """Answers up to their ends as a padded batch with the states, and what else the drafter taps."""
    tokens = pad_sequence([torch.tensor(a.ids[:end]) for a, end in zip(part, ends, strict=True)], batch_first=True)
    tokens = tokens.to(target.device)
    valid = torch.arange(max(ends), device=tokens.device) < torch.tensor(ends, device=tokens.device)[:, None]
    known = [a.states[:end] for a, end in zip(part, ends, strict=True) if a.states is not None]
    if drafter.taps.reads_layers or len(known) < len(part):
        states, hidden, kv = target.tapped(tokens, drafter.taps)
        return Batch(tokens, states, valid, valid, hidden=hidden, kv=kv)
    return Batch(tokens, pad_sequence(known, batch_first=True).to(target.device, target.dtype), valid, valid)


def replay_target(target: Target, answer: HeldOutAnswer, taps: Taps, max_tokens: int) -> ReplayTarget:
    """The target as it emits the first tokens of an answer. taps: what drafters read of it."""
    return ReplayTarget(target, answer.ids[: answer.begin], answer.ids[answer.begin :][:max_tokens], taps)


def cycles(answer: ReplayTarget, drafter: Drafter) -> Iterator[Step]:
    """Decode a known answer greedily with a drafter."""
    target: Any = answer
    prompt, limits = answer.text[: answer.begin], Limits(len(answer.text) - answer.begin)
    for event in decode(target, drafter, prompt, limits, Lossless(), Sampler()):
        if isinstance(event, Step):
            yield event


@torch.no_grad()
def replay(
    target: Target, drafter: Drafter, answers: list[HeldOutAnswer], max_tokens: int = ANSWER_TOKENS
) -> AcceptanceCounts:
    """Replay the first `max_tokens` tokens of each answer: one target pass each, then only drafting."""
    counts = AcceptanceCounts()
    for answer in answers:
        counts.begin()
        for step in cycles(replay_target(target, answer, drafter.taps, max_tokens), drafter):
            counts.add(step.accepted, step.drafted)
    return counts


@torch.no_grad()
def answer_states(target: Target, answer: HeldOutAnswer) -> tuple[Tensor, Tensor, int]:
    """A held-out answer with the target's states: (tokens [T], states [T, D], index of the first answer token)."""
    tokens = torch.tensor(answer.ids, device=target.device)
    if answer.states is not None:
        return tokens, answer.states.to(target.device, target.dtype), answer.begin
    target.reset(len(answer.ids))
    return tokens, target.prefill(tokens).last, answer.begin
