"""Audit of greedy answers: the baseline's, different at a numerical tie, or wrong. Knows no drafter and no rows."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from specbench.engine.interface import Taps
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.tree import Trie, root_only
from specbench.engine.verify import Lossless, VerifyConfig

TAIL = 8  # ids behind a prefix that are run in narrow passes, as decoding runs them
# The gap of two logits changes by at most twice what the most changed logit does.
ROUNDINGS = 2
# Bounds of the tolerance in units in the last place of the largest logit. Over 1,017 positions of smollm2-135m's answers
# in float32, decoded one and three ids at a time, gaps differed by at most 29; half precision rounds where it stores but
# sums in float32, so fewer units do. Passes that differ by more than that are wrong, not rounded.
MIN_ULPS, MAX_ULPS = 2, {torch.float32: 32, torch.bfloat16: 8, torch.float16: 8}


@torch.inference_mode()
def audit(target: Target, prompt: list[int], expected: list[int], answer: list[int]) -> dict[str, Any]:
    """Compare a greedy answer with the baseline's, id by id.

    At the first difference the target computes the logits again, in one plain pass over prompt and common prefix, and in
    narrow passes as decoding makes them. Passes of other shapes round differently: the largest difference of any logit
    between them is the rounding of this target at this position. If both ids lie within `ROUNDINGS` times that of the best
    one, with a tolerance of at most `MAX_ULPS`, this is a numerical tie; anything else is a bug.

    Returns:
        verdict: "identical", "numerical tie" or "bug"; if not identical also the position, the gap of the two ids in the
        plain pass, and the tolerance, both in logits.
    """
    if expected == answer:
        return {"verdict": "identical"}
    at = next((i for i, (a, b) in enumerate(zip(expected, answer, strict=False)) if a != b), None)
    if at is None:
        return {"verdict": "bug", "at": min(len(expected), len(answer)), "why": "one answer ends early"}
    text, rivals = [*prompt, *expected[:at]], [expected[at], answer[at]]
    logits = _plain(target, text)
    rounding = max((float((logits - narrow).abs().max()) for narrow in _narrow(target, text, rivals)), default=0.0)
    ulp = torch.finfo(target.dtype).eps * float(logits.abs().max())
    tolerance = min(max(ROUNDINGS * rounding, MIN_ULPS * ulp), MAX_ULPS.get(target.dtype, 8) * ulp)
    below_best = float((logits.max() - logits[rivals]).max())  # of the lesser of the two: both must be rivals
    gap = float((logits[rivals[0]] - logits[rivals[1]]).abs())
    verdict = "numerical tie" if below_best <= tolerance else "bug"
    return {"verdict": verdict, "at": at, "gap": round(gap, 6), "tolerance": round(tolerance, 6)}


def _plain(target: Target, text: list[int]) -> Tensor:
    """Logits [V] behind a text, from one pass over all of it, in float32."""
    target.reset(len(text) + 1)  # a server requires room behind a prompt
    return target.prefill(torch.tensor(text, device=target.device)).logits[-1].float()


def _narrow(target: Target, text: list[int], rivals: list[int]) -> Iterator[Tensor]:
    """The same logits, with the text's last ids one a pass, then with all of them in one pass; none for a text of one id.

    The second pass is a tree: the chain of these ids with the rivals as siblings below it.
    """
    tail = min(TAIL, len(text) - 1)
    if tail:
        prefix, ids = text[:-tail], text[-tail:]
        trie = Trie(ids[0], tail + len(rivals))
        for rival in rivals:
            trie.add([*ids[1:], rival])
        _prefill(target, prefix, room=len(trie))
        for token in ids:
            logits = target.forward(root_only(token, target.device)).logits[0]
            target.keep(torch.zeros(1, dtype=torch.long, device=target.device))
        yield logits.float()
        _prefill(target, prefix, room=len(trie))
        yield target.forward(trie.tree(target.device)).logits[tail - 1].float()


def _prefill(target: Target, prefix: list[int], room: int) -> None:
    """Prefill so that trees may follow; taps and verifier are what a server needs to run trees and send all logits."""
    target.reset(len(prefix) + room, Taps(last=False, observe_top_k=None))
    target.verifier(VerifyConfig(Lossless(), Sampler()))
    target.prefill(torch.tensor(prefix, device=target.device))
