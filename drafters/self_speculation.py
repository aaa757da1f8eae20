"""Draft & Verify: the target drafts for itself with some of its sublayers left out (arXiv:2309.08168).

    draft     through the kept attention and MLP sublayers, the final norm and the LM head, token by token
    stop      after a draft whose probability is below gamma, or after `most` drafts
    verify    the chain in one whole pass

gamma follows the acceptance. After a cycle that accepted A of D drafts

    rate    <- 0.5 rate + 0.5 A / D                                    from 0
    aim      = gamma + 0.01 if rate < 0.9, else gamma - 0.01, or gamma where all `most` tokens were drafted
    gamma   <- 0.9 gamma + 0.1 aim

Weights are the target's own. Keys and values of drafts are approximate, since their inputs went through fewer sublayers:
they are dropped when the cycle ends, and the target's own are copied from taps where attention is kept, so that replayed
answers can be drafted, too.

Speed depends on the sublayers left out. `train.until=search` looks for the set with the highest predicted speed
(`tuning.layer_search`) and writes it into the folder `searched`. Without one, every other layer is left out, except the
first and the last: SWIFT's start (arXiv:2410.06916).

`EarlyExit` is the simple variant: the first layers, the final norm and the head, as in LayerSkip (arXiv:2404.16710), whose
targets, unlike others, were trained for it.

Deviations and choices: with temperature the drafts are drawn from the draft's processed distribution q and verified by
Algorithm S, as in the paper (the authors' `exact` code drafts the likeliest tokens and is lossless, their other code takes
softmax for the q of such tokens and is not). A draft of low confidence is still verified and ends the chain: dropping it
would change q. Confidence is the draft's probability at temperature 1, as in the authors' code. gamma and rate are reset
for every prompt. LayerSkip's target continues from the states of the exit layer; here it runs the whole pass again, which
accepts the same. The host reads one number a draft, the confidence.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specbench.common import hashing, storage
from specbench.common.errors import SpecBenchError
from specbench.common.types import Depth, Layers, Name, Share, Text
from specbench.engine import weights
from specbench.engine.batch import DRAFT, by_row, share_network
from specbench.engine.cache import KVCache
from specbench.engine.drafter import Drafter, Outline, TimedFunction
from specbench.engine.interface import DraftTree, Sampler, Sublayers, Taps, TargetStates
from specbench.engine.memory import cached_numbers
from specbench.engine.sampling import argmax, draw
from specbench.engine.target import Target
from specbench.engine.tree import build
from specbench.records.schema import SKIP


@dataclass
class Threshold:
    """The confidence below which drafting stops, adapted to acceptance."""

    value: float  # gamma
    wanted: float  # acceptance to aim at
    step: float  # by which gamma aims higher or lower
    rate_memory: float  # weight of the old rate in its moving average
    memory: float  # weight of the old gamma in its moving average
    rate: float = 0.0  # moving average of acceptance

    def learn(self, accepted: int, drafted: int, full: bool) -> None:
        """Adapt to a cycle. full: the chain had its full length, so that a lower threshold would not make it longer."""
        self.rate = self.rate_memory * self.rate + (1 - self.rate_memory) * accepted / drafted
        move = self.step if self.rate < self.wanted else 0.0 if full else -self.step
        self.value += (1 - self.memory) * move


class _Partial(Drafter, ABC):
    """The target without some of its sublayers.

    Args:
        most: drafts a cycle.
        threshold: gamma at a prompt's beginning. wanted, step, rate_memory, memory: see `Threshold`.

    Attributes:
        kept: the sublayers that it drafts with.
    """

    runs_layers, batches = True, True

    def __init__(
        self,
        name: Name,
        most: Depth,
        threshold: Share = 0.8,
        wanted: Share = 0.9,
        step: Share = 0.01,
        rate_memory: Share = 0.5,
        memory: Share = 0.9,
    ):
        super().__init__(name)
        self.most = most
        self.adapting = threshold, wanted, step, rate_memory, memory
        self.nodes, self.passes = most + 1, most

    def outline(self, target: Target) -> Outline:
        return Outline(0, cached_numbers(target))

    def bind(self, target: Target) -> None:
        """Raises `SpecBenchError` for a set that was searched for another target."""
        self.target, self.head, self.target_logits = target, target.head, target.logits
        self.parts = target.sublayers()
        if len({p.device for p in target.decoder.parameters()}) > 1:
            raise SpecBenchError(f"drafter={self.name} needs the whole target on one device; set model.device_map=null")
        skipped = self.choose(target)
        self.keep(skipped.others(target.layers))
        layers = {"attention": sorted(skipped.attention), "mlp": sorted(skipped.mlp)}
        self.provenance = {"skipped": layers} | self.provenance

    @abstractmethod
    def choose(self, target: Target) -> Sublayers:
        """The sublayers to leave out."""

    def keep(self, kept: Sublayers) -> None:
        """Draft with these sublayers from now on. Raises `SpecBenchError` if no attention is among them."""
        if not kept.attention:
            raise SpecBenchError(f"drafter={self.name}: no attention sublayer is kept; keep at least one")
        self.kept = kept
        self.taps = Taps(kv=tuple(sorted(kept.attention)), last=False)
        self.cache = self.target.new_cache(0, kept.attention)
        used = [self.parts[i][0] for i in kept.attention] + [self.parts[i][1] for i in kept.mlp]
        self.active_parameters = sum(p.numel() for part in used for p in part.parameters()) + self.head.weight.numel()

    def timed_functions(self) -> list[TimedFunction]:
        return [(self.head, "forward", "head"), (self.target, "subset", "network")]

    def network(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache) -> Tensor:
        """Run tokens [B, N] behind a cache -> states [B, N, D]."""
        return self.target.subset(tokens, positions, mask, cache, self.kept)

    def for_sequences(self, count: int, lockstep: Any) -> list[Any]:
        rows, logits = super().for_sequences(count, lockstep), by_row(self.target.logits)
        share_network(self, rows, lockstep)
        for row in rows:
            row.target_logits = partial(lockstep.call, logits, DRAFT)
        return rows

    def _row(self) -> Any:
        return copy.copy(self)  # the target is the same

    def reset(self, capacity: int) -> None:
        self.cache.begin(capacity)
        self.threshold = Threshold(*self.adapting)
        self.drafted = 0  # in the cycle that is to be observed

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Cache the verified keys and values, adapt the threshold."""
        for layer, (keys, values) in states.kv.items():
            self.cache.append(layer, keys[None], values[None])
        self.cache.keep()
        if self.drafted:
            self.threshold.learn(len(states.tokens) - 1, self.drafted, full=self.drafted == self.most)

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        """A chain, as long as the drafts are confident."""
        verified, device = self.cache.length, self.target.device
        tokens = [torch.full((1,), root, device=device)]
        confidence: list[Tensor] = []
        q: list[Tensor] = []
        while len(confidence) < self.most:
            logits = self._extend(tokens[-1])  # [V]
            if sampler.greedy:
                tokens.append(argmax(logits)[None])
            else:
                q.append(sampler.probabilities(logits))
                tokens.append(draw(q[-1], generator)[None])
            confidence.append(logits.float().softmax(-1)[tokens[-1]])
            if float(confidence[-1]) < self.threshold.value:
                break
        self.cache.truncate(verified)  # rows of drafts are approximate
        self.drafted = len(confidence)
        index = torch.arange(self.drafted + 1, device=device)
        tree = build(
            tokens=torch.cat(tokens),
            parents=index - 1,
            depths=index,
            ranks=torch.zeros_like(index),
            max_depth=self.drafted,
            width=1,
            confidence=lambda: torch.cat(confidence).cumprod(0),
            passes=self.drafted,
        )
        if q:
            tree.q = torch.stack([*q, torch.zeros_like(q[0])])  # the last draft has no children
        return tree

    def _extend(self, token: Tensor) -> Tensor:
        """Run one token behind the cache and keep its row. [1] -> logits [V]"""
        positions = torch.full((1, 1), self.cache.length, device=token.device)
        states = self.network(token[None], positions, None, self.cache)
        self.cache.keep()
        return self.target_logits(states[0, -1])


class SelfSpeculation(_Partial):
    """The target without the sublayers that a search chose.

    searched: folder of the search's result; None, or nothing there: every other layer is left out.
    """

    def __init__(self, name: Name, searched: Text | None = None, most: Depth = 12, **options: Any):
        super().__init__(name, most, **options)
        self.searched = searched

    def choose(self, target: Target) -> Sublayers:
        self.provenance = {}
        if self.searched is not None and (folder := storage.project_path(self.searched)).joinpath(SKIP).is_file():
            skipped, self.provenance = weights.load_skip(folder, target.fingerprint(), target.layers)
            self.contents = hashing.of_files([folder / SKIP])
            return skipped
        return alternate(target.layers)


class EarlyExit(_Partial):
    """The target's first `layers`, its final norm and its head. None: half of them."""

    def __init__(self, name: Name, layers: Layers | None = None, most: Depth = 6, **options: Any):
        super().__init__(name, most, **options)
        self.layers = layers

    def choose(self, target: Target) -> Sublayers:
        layers = self.layers or (target.layers + 1) // 2
        if layers > target.layers:
            raise SpecBenchError(f"drafter.layers={layers}, but the target has {target.layers}; name fewer")
        self.provenance = {}
        beyond = frozenset(range(layers, target.layers))
        return Sublayers(beyond, beyond)


def alternate(layers: int) -> Sublayers:
    """Every other layer, except the first and the last."""
    every = frozenset(range(1, layers - 1, 2))
    return Sublayers(every, every)
