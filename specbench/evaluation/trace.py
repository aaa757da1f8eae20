"""Traces: every draft tree of one untimed generation, for the report's viewer; and calibration of drafters' confidence.

Proxies of target and drafter record the last tree and its logits, so that the decoding loop needs no change.
"""

import json
from pathlib import Path
from typing import Any

import torch

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.common.storage import atomic_path
from specbench.data.chat import Chat
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.drafter import Drafter
from specbench.engine.interface import DraftTree, Step
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Rule
from specbench.records.rows import BINS
from specbench.records.schema import Trace

TOKENS = 48  # of a traced generation


class _Proxy:
    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _DrafterProxy(_Proxy):
    tree: DraftTree

    def propose(self, *arguments: Any) -> DraftTree:
        self.tree = self.inner.propose(*arguments)
        return self.tree


class CalibratedDrafter(_DrafterProxy):
    """Compares a drafter's confidence in every child of an accepted node with whether that child was accepted."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.bin_nodes, self.bin_accepted, self.bin_confidence = [0] * BINS, [0] * BINS, [0.0] * BINS

    def count(self, step: Step) -> None:
        """Add the cycle in which the last tree was verified."""
        if self.tree.confidence is None:
            return
        paths = [1.0, *self.tree.confidence().tolist()]  # of each node from the root on
        tokens, parents = self.tree.tokens.tolist(), self.tree.parents.tolist()
        reached: int | None = 0
        for token in step.tokens:
            if reached is None:
                break
            parent, reached = reached, None
            for node in (n for n in range(1, len(tokens)) if parents[n] == parent):
                confidence = min(1.0, paths[node] / paths[parent]) if paths[parent] > 0 else 0.0
                bin_ = min(BINS - 1, int(confidence * BINS))
                self.bin_nodes[bin_] += 1
                self.bin_confidence[bin_] += confidence
                if tokens[node] == token:
                    self.bin_accepted[bin_] += 1
                    reached = node

    def bins(self) -> list[tuple[int, int, float]]:
        """Nodes, accepted nodes and summed confidence of each bin; empty if the drafter has no confidence."""
        if not any(self.bin_nodes):
            return []
        return list(zip(self.bin_nodes, self.bin_accepted, (round(c, 4) for c in self.bin_confidence), strict=True))


class _TargetProxy(_Proxy):
    logits: torch.Tensor

    def forward(self, tree: DraftTree) -> Any:
        states = self.inner.forward(tree)
        self.logits = states.logits.float()
        return states


def trace(
    target: Target,
    chat: Chat,
    drafter: Drafter,
    prompt: list[int],
    rule: Rule,
    sampler: Sampler,
    seed: int = 0,
    tokens: int = TOKENS,
) -> dict[str, Any]:
    """Decode one prompt, at most `tokens` and `TOKENS` tokens, and keep every cycle's tree.

    Returns:
        prompt: text. first: text of the prefill's token. cycles: each with root: text; nodes: [text, parent, target's
        probability, drafter's probability of the path or None]; path: accepted nodes; bonus: text; ms: by phase.
    """
    target_proxy, drafter_proxy = _TargetProxy(target), _DrafterProxy(drafter)
    drawn = rule.simulated or not sampler.greedy
    generator = torch.Generator(target.device).manual_seed(seed) if drawn else None
    result: dict[str, Any] = {"drafter": drafter.name, "prompt": chat.tokenizer.decode(prompt), "cycles": []}
    limits = Limits(min(tokens, TOKENS), target.stop_ids)
    events = decode(target_proxy, drafter_proxy, prompt, limits, rule, sampler, generator)  # type: ignore[arg-type]
    for event in events:
        if isinstance(event, Prefill):
            result["first"] = chat.tokenizer.decode([event.token])
        else:
            result["cycles"].append(_cycle(event, drafter_proxy.tree, target_proxy.logits, chat))
    return result


def _cycle(step: Step, tree: DraftTree, logits: torch.Tensor, chat: Chat) -> dict[str, Any]:
    tokens, parents, ranks = tree.tokens.tolist(), tree.parents.tolist(), tree.ranks.tolist()
    log_p = logits.log_softmax(-1)
    p = [float(log_p[parent, token].exp()) for token, parent in zip(tokens[1:], parents[1:], strict=True)]
    q = tree.confidence().tolist() if tree.confidence is not None else [None] * len(p)
    path, node = [], 0
    for rank in step.ranks:
        node = next(n for n in range(1, len(tokens)) if parents[n] == node and ranks[n] == rank)
        path.append(node)
    nodes = [
        [chat.tokenizer.decode([token]), parent, round(p_token, 4), None if q_path is None else round(q_path, 4)]
        for token, parent, p_token, q_path in zip(tokens[1:], parents[1:], p, q, strict=True)
    ]
    times = {name: round(1000 * getattr(step, f"{name}_s"), 3) for name in ("draft", "target", "verify", "rest")}
    bonus = chat.tokenizer.decode(step.tokens[-1:])
    return {"root": chat.tokenizer.decode(tokens[:1]), "nodes": nodes, "path": path, "bonus": bonus, "ms": times}


def write(path: Path, traces: list[dict[str, Any]]) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(traces, ensure_ascii=False) + "\n", encoding="utf-8")


def arm_of(path: Path) -> str | None:
    """Digest of the arm of which a file's traces are; None without such a file, or if it does not say so."""
    try:
        traces = read_json(path, list[Trace])
    except SpecBenchError:
        return None
    return traces[0].get("arm") if traces else None
