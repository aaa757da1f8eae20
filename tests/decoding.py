"""Greedy decoding with and without the loop: what most tests compare."""

import torch

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
