"""How far sampled answers drift from the target's distribution, where some arm of a cell has a lossy rule.

With p(x_t | x_<t) the target's processed distribution (temperature, top-k, top-p), from one plain pass over the answer:

    nll    sum of - log p(x_t) over the answer: its perplexity is the exponential of the mean
    kl     sum of KL(q_t || p_t), q_t being the distribution that really emitted token t

A lossless rule emits by p: KL is 0. A lossy one that accepts candidates by their p alone leaves nothing to chance: given
the text before, an accepted token was certain, so its KL is - log p(x_t); a cycle's bonus is drawn from p, so its KL is 0.
The sum is then, in expectation over answers, the KL of the whole answers' distribution. Where candidates are drawn at
random, as a sampled chain is, this is an upper bound. A last token at which the cap or a stop token cuts a cycle counts as
its bonus, as in `Step`. Batches of several sequences are not measured.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Rule
from specbench.records.rows import Drift, Row

LEAST = 1e-9  # probability of a token that another pass's rounding moved out of top-p


def measure(
    target: Target, sampler: Sampler, rules: Sequence[Rule], rule: Rule, prompt: list[int], row: Row
) -> Drift | None:
    """Of an answer to a prompt, by a rule. rules: of all arms of the cell; None unless one of them changes the answers."""
    changed = any(r.lossy and not r.simulated for r in rules)
    if not changed or sampler.greedy or not isinstance(target, Target) or not row.tokens:
        return None
    losses = _losses(target, sampler, prompt, row.tokens)
    certain = losses[_accepted(row.accepted)] if rule.lossy else losses[:0]
    return Drift(round(float(losses.sum()), 6), round(float(certain.sum()), 6))


@torch.inference_mode()
def _losses(target: Target, sampler: Sampler, prompt: list[int], answer: list[int]) -> Tensor:
    """- log p of each of an answer's ids. -> [N] float32"""
    p = sampler.probabilities(forced(target, prompt, answer))
    ids = torch.tensor(answer, device=p.device)[:, None]
    return -p.gather(1, ids)[:, 0].clamp(min=LEAST).log()


def forced(model: Target, prompt: list[int], answer: list[int]) -> Tensor:
    """Logits in front of every id of an answer, in one pass without a cache. -> [N, V] float32"""
    text = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
    states = model.run(text, torch.arange(text.shape[1], device=model.device)[None], None, None)
    return model.logits(states[0, -len(answer) :]).float()


def _accepted(counts: Sequence[int]) -> list[int]:
    """Indices in an answer of the accepted tokens: behind the prefill's, each cycle's bonus comes last."""
    found: list[int] = []
    at = 1
    for count in counts:
        found += range(at, at + count)
        at += count + 1
    return found
