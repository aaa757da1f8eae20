"""Is a greedy answer the baseline's? Where it is not, the rounding of the target's own passes says whether that is a tie.

Knows targets and ids, no drafter and no rows.
"""

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
# Least and most tolerance in units in the last place of the largest logit. Over 1,017 positions of smollm2-135m's answers
# in float32, decoded one and three ids at a time, gaps differed by at most 29; half precision rounds where it stores but
# sums in float32, so fewer units do. Passes that part further than that do not round: they are at fault themselves.
LEAST, MOST = 2, {torch.float32: 32, torch.bfloat16: 8, torch.float16: 8}


@torch.inference_mode()
def audit(target: Target, prompt: list[int], expected: list[int], found: list[int]) -> dict[str, Any]:
    """Compare a greedy answer with the baseline's, id by id.

    At the first difference the target is asked once more for the logits there, in one plain pass over prompt and common
    prefix, and in narrow passes as decoding makes them. Passes of other shapes round differently: the most that any logit
    differs between them is the rounding of this target at this place. Two ids that both lie within `ROUNDINGS` times that
    of the best one are a numerical tie, as far as `MOST` allows; anything else is a bug.

    Returns:
        verdict: "identical", "numerical tie" or "bug"; if not identical also the position, the gap of the two ids in the
        plain pass, and the tolerance, both in logits.
    """
    if expected == found:
        return {"verdict": "identical"}
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if at is None:
        return {"verdict": "bug", "at": min(len(expected), len(found)), "why": "one answer ends early"}
    text, rivals = [*prompt, *expected[:at]], [expected[at], found[at]]
    logits = _plain(target, text)
    tolerance = _tolerance(logits, list(_narrow(target, text, rivals)), target.dtype)
    behind = float((logits.max() - logits[rivals]).max())  # of the lesser of the two: both must be rivals
    gap = float((logits[rivals[0]] - logits[rivals[1]]).abs())
    verdict = "numerical tie" if behind <= tolerance else "bug"
    return {"verdict": verdict, "at": at, "gap": round(gap, 6), "tolerance": round(tolerance, 6)}


def _tolerance(logits: Tensor, others: list[Tensor], dtype: torch.dtype) -> float:
    """How far apart two logits of one place may lie and still be a tie. logits, others: [V] of passes of other shapes."""
    rounding = max((float((logits - other).abs().max()) for other in others), default=0.0)
    ulp = torch.finfo(dtype).eps * float(logits.abs().max())
    return min(max(ROUNDINGS * rounding, LEAST * ulp), MOST.get(dtype, 8) * ulp)


def _plain(target: Target, text: list[int]) -> Tensor:
    """Logits [V] behind a text, of one pass over all of it, in float32."""
    target.reset(len(text) + 1)  # a server wants room behind a prompt
    return target.prefill(torch.tensor(text, device=target.device)).logits[-1].float()


def _narrow(target: Target, text: list[int], rivals: list[int]) -> Iterator[Tensor]:
    """The same behind a prefix of the text, whose last ids follow one a pass; then with all of these in one small tree.

    The tree is the chain of these ids with the rivals as siblings below it. A text of one id has no such prefix.
    """
    tail = min(TAIL, len(text) - 1)
    if tail:
        ids, small = text[-tail:], Trie(text[-tail], tail + len(rivals))
        for rival in rivals:
            small.add([*ids[1:], rival])
        _begin(target, text[:-tail], room=len(small))
        for token in ids:
            logits = target.forward(root_only(token, target.device)).logits[0]
            target.keep(torch.zeros(1, dtype=torch.long, device=target.device))
        yield logits.float()
        _begin(target, text[:-tail], room=len(small))
        yield target.forward(small.tree(target.device)).logits[tail - 1].float()


def _begin(target: Target, prefix: list[int], room: int) -> None:
    """Prefill a prefix so that trees may follow: a server runs them for a judge alone, and sends logits to who reviews."""
    target.reset(len(prefix) + room, Taps(last=False, observe_top_k=None))
    target.verifier(VerifyConfig(Lossless(), Sampler()))
    target.prefill(torch.tensor(prefix, device=target.device))
