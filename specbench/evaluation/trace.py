"""A trace: everything that happened in the cycles of one generation, for the report's viewer. Never timed, never a row.

The loop is not touched: proxies stand before target and drafter and remember the last tree and its logits.
"""

import json
from pathlib import Path
from typing import Any

import torch

from specbench.common.storage import atomic_path
from specbench.data.chat import Chat
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.drafter import Drafter
from specbench.engine.interface import DraftTree, Step
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Rule
from specbench.records.rows import BINS

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


class Watched(_Drafter):
    """A drafter that is asked how sure it was, beside whether it was right: of every child of an accepted node."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.tried, self.right, self.sure = [0] * BINS, [0] * BINS, [0.0] * BINS

    def count(self, step: Step) -> None:
        """A cycle of the last tree, accepted down to a node that the answer then contradicts."""
        if self.tree.confidence is None:
            return
        paths = [1.0, *self.tree.confidence().tolist()]  # of each node from the root on
        tokens, parents = self.tree.tokens.tolist(), self.tree.parents.tolist()
        reached: int | None = 0
        for said in step.tokens:
            if reached is None:
                break
            here, reached = reached, None
            for node in (n for n in range(1, len(tokens)) if parents[n] == here):
                sure = min(1.0, paths[node] / paths[here]) if paths[here] > 0 else 0.0
                bin_ = min(BINS - 1, int(sure * BINS))
                self.tried[bin_] += 1
                self.sure[bin_] += sure
                if tokens[node] == said:
                    self.right[bin_] += 1
                    reached = node

    def bins(self) -> list[tuple[int, int, float]]:
        """Nodes, those that the answer followed, and the sum of their probabilities; empty if the drafter gives none."""
        if not any(self.tried):
            return []
        return [(n, right, round(sure, 4)) for n, right, sure in zip(self.tried, self.right, self.sure, strict=True)]


class _Target(_Proxy):
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
    """Decode one prompt, at most so many tokens and `TOKENS`, and keep every cycle's tree.

    Returns:
        prompt: text. first: the prefill's token. cycles, each with the root's text; nodes as [text, parent, the target's
        probability, the drafter's probability of the path or None]; path: accepted nodes; bonus: text; ms by phase.
    """
    seen, asked = _Target(target), _Drafter(drafter)
    drawn = rule.simulated or not sampler.greedy
    generator = torch.Generator(target.device).manual_seed(seed) if drawn else None
    found: dict[str, Any] = {"drafter": drafter.name, "prompt": chat.tokenizer.decode(prompt), "cycles": []}
    limits = Limits(min(tokens, TOKENS), target.stop_ids)
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
