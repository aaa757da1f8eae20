"""Greedy decoding with and without the loop, which most tests compare; sampled tokens against their distribution."""

from collections import Counter

import torch
from scipy.stats import chi2

from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.interface import Step
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless

PROMPT = [3, 14, 15, 9, 26]


GREEDY = Sampler()


def generate(target, drafter, prompt=PROMPT, cap=40, stop=(), sampler=GREEDY, seed=0, rule=None):
    """Emitted ids and steps."""
    generator = torch.Generator().manual_seed(seed)
    events = list(decode(target, drafter, prompt, Limits(cap, stop), rule or Lossless(), sampler, generator))
    assert isinstance(events[0], Prefill)
    steps = [e for e in events[1:] if isinstance(e, Step)]
    return [events[0].token] + [t for s in steps for t in s.tokens], steps


@torch.inference_mode()
def plain(target, prompt, count):
    """Greedy ids by full forwards of the unwrapped model, no cache at all."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(target.model(torch.tensor([ids], device=target.device)).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.inference_mode()
def pairs_of(target, prompt, sampler):
    """Probability of every pair of tokens that may follow a prompt, by full forwards."""

    def after(ids):
        p = sampler.probabilities(target.model(torch.tensor([ids])).logits[0, -1])
        return {int(t): float(p[t]) for t in p.nonzero()[:, 0]}

    return {(a, b): p * q for a, p in after(prompt).items() for b, q in after([*prompt, a]).items()}


def p_value_of_pairs(target, drafter, prompt, sampler, runs):
    """By chi-square, of the first two tokens of `runs` answers; and in how many of them a draft was verified."""
    expected, found, drafted = pairs_of(target, prompt, sampler), Counter(), 0
    for seed in range(runs):
        tokens, steps = generate(target, drafter, prompt, cap=2, sampler=sampler, seed=seed)
        found[tuple(tokens)] += 1
        drafted += any(s.nodes for s in steps)
    assert found.keys() <= expected.keys()
    statistic = sum((found[pair] - runs * p) ** 2 / (runs * p) for pair, p in expected.items())
    return chi2.sf(statistic, len(expected) - 1), drafted
