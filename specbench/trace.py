"""A trace: everything that happened in the cycles of one generation, for the report's viewer. Never timed, never a row.

The loop is not touched: two proxies stand before target and drafter and remember the last tree and its logits.
"""

import json
from pathlib import Path
from typing import Any

import torch

from specbench.assets import atomic_path
from specbench.datasets import Chat
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.interface import Drafter, DraftTree, Step
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Rule

TOKENS = 48  # of a traced generation


class _Proxy:
    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Drafter(_Proxy):
    tree: DraftTree

    def propose(self, *arguments: Any) -> DraftTree:
        self.tree = self.inner.propose(*arguments)
        return self.tree


class _Target(_Proxy):
    logits: torch.Tensor

    def forward(self, tree: DraftTree) -> Any:
        states = self.inner.forward(tree)
        self.logits = states.logits.float()
        return states


def trace(
    target: Target, chat: Chat, drafter: Drafter, prompt: list[int], rule: Rule, sampler: Sampler, seed: int = 0
) -> dict[str, Any]:
    """Decode one prompt and keep every cycle's tree.

    Returns:
        prompt: text. first: the prefill's token. cycles, each with the root's text; nodes as [text, parent, the target's
        probability, the drafter's probability of the path or None]; path: accepted nodes; bonus: text; ms by phase.
    """
    seen, asked = _Target(target), _Drafter(drafter)
    generator = None if sampler.greedy else torch.Generator(target.device).manual_seed(seed)
    found: dict[str, Any] = {"drafter": drafter.name, "prompt": chat.tokenizer.decode(prompt), "cycles": []}
    limits = Limits(TOKENS, target.stop_ids)
    for event in decode(seen, asked, prompt, limits, rule, sampler, generator):  # type: ignore[arg-type]
        if isinstance(event, Prefill):
            found["first"] = chat.tokenizer.decode([event.token])
        else:
            found["cycles"].append(_cycle(event, asked.tree, seen.logits, chat))
    return found


def _cycle(step: Step, tree: DraftTree, logits: torch.Tensor, chat: Chat) -> dict[str, Any]:
    tokens, parents, ranks = tree.tokens.tolist(), tree.parents.tolist(), tree.ranks.tolist()
    log_p = logits.log_softmax(-1)
    p = [float(log_p[parent, token].exp()) for token, parent in zip(tokens[1:], parents[1:], strict=True)]
    own = tree.confidence().tolist() if tree.confidence is not None else [None] * len(p)
    path, at = [], 0
    for rank in step.ranks:
        at = next(n for n in range(1, len(tokens)) if parents[n] == at and ranks[n] == rank)
        path.append(at)
    nodes = [
        [chat.tokenizer.decode([token]), parent, round(target, 4), None if mine is None else round(mine, 4)]
        for token, parent, target, mine in zip(tokens[1:], parents[1:], p, own, strict=True)
    ]
    times = {name: round(1000 * getattr(step, f"{name}_s"), 3) for name in ("draft", "target", "verify", "rest")}
    emitted = chat.tokenizer.decode(step.tokens[-1:])
    return {"root": chat.tokenizer.decode(tokens[:1]), "nodes": nodes, "path": path, "bonus": emitted, "ms": times}


def write(path: Path, traces: list[dict[str, Any]]) -> None:
    """Beside a cell's rows."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(traces, ensure_ascii=False) + "\n", encoding="utf-8")
