"""Token sequences with the target's states: read off given text, or off the target's own answers as it writes them.

Knows the target, not what the states are for. A sequence of T tokens carries T states; state i belongs to token i and
its logits predict token i + 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.engine.sampling import Sampler
from specbench.engine.target import Target


@dataclass(frozen=True)
class Sequence:
    """One conversation as the target saw it."""

    tokens: Tensor  # [T] int64
    states: Tensor  # [T, D] post-norm
    answer: Tensor  # [T] bool: True on what the assistant said


@torch.no_grad()
def read(target: Target, texts: list[list[int]], answers: list[list[bool]]) -> list[Sequence]:
    """States of given text, one right-padded pass. texts: B token lists; answers: the assistant's share of each."""
    longest = max(map(len, texts))
    tokens = torch.tensor([t + [0] * (longest - len(t)) for t in texts], device=target.device)
    positions = torch.arange(longest, device=target.device).expand_as(tokens)
    states = target.run(tokens, positions, None, None)  # causal: padding on the right is seen by no real token
    return [
        Sequence(tokens[b, : len(t)].cpu(), states[b, : len(t)].cpu(), torch.tensor(answers[b]))
        for b, t in enumerate(texts)
    ]


@torch.no_grad()
def write(
    target: Target, prompts: list[list[int]], max_new: int, sampler: Sampler, generator: torch.Generator | None
) -> list[Sequence]:
    """The target's own answers to B prompts, with the states that it computes while writing them.

    Prompts are padded on the left so that all rows grow at the same slot; finished rows leave the batch once they
    are half of it. Of the last token of an answer no state is ever computed, so the sequence ends before it.
    """
    width = max(map(len, prompts))
    pads = torch.tensor([width - len(p) for p in prompts], device=target.device)
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=target.device)
    slots = torch.arange(width + max_new, device=target.device)
    visible = slots[None, :] >= pads[:, None]  # [B, S]
    causal = slots[None, :width] <= slots[:width, None]
    mask = (causal & visible[:, None, :width]) | torch.eye(width, dtype=torch.bool, device=target.device)

    cache = target.new_cache(width + max_new)
    states = target.run(tokens, (slots[:width] - pads[:, None]).clamp(min=0), mask[:, None], cache)
    cache.keep()
    seen_tokens: list[list[Tensor]] = [[tokens[b, pads[b] :]] for b in range(len(prompts))]
    seen_states: list[list[Tensor]] = [[states[b, pads[b] :]] for b in range(len(prompts))]

    stops = torch.tensor(target.stop_ids, device=target.device)
    alive = torch.arange(len(prompts), device=target.device)  # rows of the batch that remain, by prompt
    done = torch.zeros(len(prompts), dtype=torch.bool, device=target.device)
    latest = sampler.choose(target.logits(states[:, -1]), generator)
    for step in range(max_new):
        done = done | torch.isin(latest, stops)
        if done.all():
            break
        if done.sum() * 2 > len(done):
            rows = (~done).nonzero()[:, 0]
            cache.select_sequences(rows)
            alive, done, latest = alive[rows], done[rows], latest[rows]
        slot = width + step
        positions = slot - pads[alive][:, None]
        states = target.run(latest[:, None], positions, visible[alive][:, None, None, : slot + 1], cache)
        cache.keep()
        for row, prompt in enumerate(alive.tolist()):
            if not done[row]:
                seen_tokens[prompt].append(latest[row : row + 1])
                seen_states[prompt].append(states[row])
        latest = sampler.choose(target.logits(states[:, -1]), generator)
    return [
        Sequence(torch.cat(t).cpu(), torch.cat(s).cpu(), torch.arange(sum(map(len, t))) >= len(p))
        for t, s, p in zip(seen_tokens, seen_states, prompts, strict=True)
    ]
