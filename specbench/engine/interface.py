"""What a drafter is given, what it proposes, and what a cycle yields. Knows nothing else in the project.

Dimension letters, used in every shape comment:

    B  sequences in a batch            N  tokens fed in one pass (a tree: root + draft nodes)
    T  tokens of a sequence            F  frontier: nodes expanded together while a tree grows
    D  hidden size of the target       R  rows a drafter has expanded so far in this cycle
    V  vocabulary size                 A  accepted draft nodes of a cycle (path length)
    L  layers                          H  key/value heads          S  cache rows, Dh head dimension

Words: the *root* (node 0) is the last emitted token, not yet in any cache; the *path* runs from the first accepted
draft node to the last; the *bonus* is the token the target adds after the path. A cycle emits ``len(path) + 1`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Taps:
    """What a drafter reads from the target. A target on another machine sends nothing else.

    Attributes:
        hidden: decoder layers whose output (before the next layer) it reads, 0-based; negative counts from the end.
        kv: decoder layers whose cached keys and values it reads, likewise; keys are as cached, after RoPE.
        last: the post-norm last hidden state.
        observe_top_k: so many best ids of every node, rejected ones included, for `Drafter.observe_tree`; None: all logits.
        condensed: fingerprint of the weights that compress these states, for a drafter that does so. A server with the
            same weights sends the compressed states.
        free_running: nothing is ever drafted, so a target on another machine may decode without requests.
    """

    hidden: tuple[int, ...] = ()
    kv: tuple[int, ...] = ()
    last: bool = True
    observe_top_k: int | None = 0
    condensed: str | None = None
    free_running: bool = False

    @property
    def reads_layers(self) -> bool:
        """Does it read layers, besides the last state?"""
        return bool(self.hidden or self.kv)

    def observing(self) -> Taps:
        """The same for a drafter that observes trees: all logits, unless it reads a given number of them."""
        return self if self.observe_top_k else replace(self, observe_top_k=None)

    def resolve(self, layers: int) -> Taps:
        """The same taps with non-negative indices; raises `IndexError` for a layer that the target lacks."""
        for layer in (*self.hidden, *self.kv):
            if not -layers <= layer < layers:
                raise IndexError(f"tap on layer {layer}, but the target has {layers}")
        return replace(self, hidden=tuple(i % layers for i in self.hidden), kv=tuple(i % layers for i in self.kv))


@dataclass(frozen=True)
class Sublayers:
    """The layers whose attention, and those whose MLP, a pass runs; it leaves the residual stream unchanged elsewhere."""

    attention: frozenset[int]
    mlp: frozenset[int]

    def others(self, layers: int) -> Sublayers:
        """All other sublayers of a decoder of so many layers."""
        every = frozenset(range(layers))
        return Sublayers(every - self.attention, every - self.mlp)


class LayerRows(Mapping[int, tuple[Tensor, Tensor]]):
    """Layer -> its keys and values [H, N, Dh], of layers that lie in one tensor each.

    Attributes:
        layers: in rising order. stacked: keys and values of all of them, 2 x [L, H, N, Dh].
    """

    def __init__(self, layers: Sequence[int], keys: Tensor, values: Tensor):
        self.layers, self.stacked = tuple(layers), (keys, values)

    @classmethod
    def of(cls, rows: Mapping[int, tuple[Tensor, Tensor]]) -> LayerRows:
        """The same of any mapping that is not empty."""
        if isinstance(rows, LayerRows):
            return rows
        layers = sorted(rows)
        return cls(layers, *(torch.stack([rows[i][part] for i in layers]) for part in (0, 1)))

    def select(self, nodes: Tensor) -> LayerRows:
        """Copies of some of the N rows. nodes: [A]"""
        return LayerRows(self.layers, *(part[:, :, nodes] for part in self.stacked))

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        try:
            index = self.layers.index(layer)
        except ValueError:
            raise KeyError(layer) from None
        return self.stacked[0][index], self.stacked[1][index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


@dataclass
class TargetStates:
    """What one target pass computed for each of its N tokens. `kv` are views of the cache, valid until `Target.keep`."""

    tokens: Tensor  # [N] ids that were fed
    positions: Tensor  # [N] 0-based
    last: Tensor  # [N, D] hidden state after the final norm, just before the LM head
    logits: Tensor  # [N, V], or [1, V] after a prefill, where only the last position matters; none in a selection
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> [N, D]
    kv: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> ([H, N, Dh], [H, N, Dh])
    condensed: tuple[Tensor, ...] = ()  # [N, …] each: what `Drafter.compress_states` made of them at the target's

    def select(self, nodes: Tensor) -> TargetStates:
        """Copies of the states of some nodes, in the given order, without logits: they are for verification. nodes: [A]"""
        return replace(
            self,
            tokens=self.tokens[nodes],
            positions=self.positions[nodes],
            last=self.last[nodes],
            logits=self.logits[:0],
            hidden={i: h[nodes] for i, h in self.hidden.items()},
            kv=LayerRows.of(self.kv).select(nodes) if self.kv else self.kv,
            condensed=tuple(part[nodes] for part in self.condensed),
        )


@dataclass
class DraftTree:
    """Draft tokens below a root. Node 0 is the root; a parent's index is always smaller than its child's.

    `q` is set only where children were *sampled*: row n is the distribution from which the children of node n were drawn,
    in index order. Without `q` the candidates are deterministic. Nodes that are not acceptable may repeat siblings' tokens.
    """

    tokens: Tensor  # [N] ids, the root's first
    parents: Tensor  # [N] node indices, parents[0] == -1
    depths: Tensor  # [N] root 0
    ancestors: Tensor  # [N, N] bool: row n is True at n and at every ancestor of n
    ranks: Tensor  # [N] rank of a node among its siblings as proposed (0 = first choice); root 0
    max_depth: int  # upper bound of depths
    width: int  # upper bound of a node's children: ranks are below it
    q: Tensor | None = None  # [N, V] float32
    replacement: bool = False  # were siblings sampled with replacement?
    acceptable: Tensor | None = None  # [N] bool, the root's True; None: all. False: neither it nor descendants are accepted
    confidence: Callable[[], Tensor] | None = None  # [N - 1] drafter's probability of the path to each node but the root
    passes: int = 0  # draft passes, see `Step`

    def __len__(self) -> int:
        """Nodes of the target pass, the root included."""
        return self.tokens.shape[0]


# Training pads lengths to multiples of it: on a CPU, PyTorch compiles a product in bfloat16 for every new shape.
SIZE_STEP = 32


class NoShortcut(Exception):
    """Raised by a drafter whose held-out acceptance must be replayed cycle by cycle."""


@dataclass
class Batch:
    """What a drafter is trained on: tokens and the frozen target's states, in B rows of T tokens.

    A row holds one sequence and padding, or several sequences end to end (*packed*): then nothing may attend from one to
    another, positions count from 0 in every sequence, and no state is scored on another sequence's token.
    """

    tokens: Tensor  # [B, T]
    states: Tensor  # [B, T, D] post-norm; state i predicts token i + 1
    valid: Tensor  # [B, T] bool: not padding
    scored: Tensor  # [B, T] bool: states whose prediction counts (valid, and if so configured before an answer's token)
    vocabulary: Tensor | None = None  # [K] ids to which the classification loss is confined; None for all V
    vocabulary_bias: Tensor | None = None  # [K] minus the log of each id's chance of having been drawn; None: all zeros
    progress: float = 1.0  # share of the training that is done
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> [B, T, D], as tapped
    kv: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> ([B, H, T, Dh], [B, H, T, Dh])
    starts: Tensor | None = None  # [B, T] where in its row each token's sequence begins; None: at 0, all of them

    @property
    def positions(self) -> Tensor:
        """[B, T] of each token in its own sequence."""
        row = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        return row if self.starts is None else row - self.starts

    @property
    def sequence_lengths(self) -> Tensor:
        """Of each position: tokens of its sequence, 1 at least. [B, T]"""
        begins = torch.zeros_like(self.tokens) if self.starts is None else self.starts
        return torch.zeros_like(begins).scatter_add(1, begins, self.valid.long()).gather(1, begins).clamp(min=1)

    def restrict_mask(self, mask: Tensor) -> Tensor:
        """A mask over positions of a row, confined to each one's own sequence. [T, S] or [B, T, S] -> [B or 1, T, S]

        S is T, or a multiple of it where keys of several passes lie end to end.
        """
        mask = mask if mask.ndim == 3 else mask[None]
        if self.starts is None:
            return mask
        same = self.starts[:, :, None] == self.starts[:, None, :]  # [B, T, T]
        return mask & same.repeat(1, 1, mask.shape[-1] // same.shape[-1])

    def causal_mask(self) -> Tensor | None:
        """What a token sees, itself included: [B, 1, T, T] bool; None: all up to it, as layers do without a mask."""
        if self.starts is None:
            return None
        length = self.tokens.shape[1]
        return self.restrict_mask(torch.ones(length, length, dtype=torch.bool, device=self.tokens.device).tril())[:, None]

    def same_sequence(self, ahead: int) -> Tensor:
        """[B, T - ahead] bool: is the token `ahead` positions on of the same sequence, and not padding?"""
        length = self.tokens.shape[1]
        same = self.valid[:, ahead:] & self.valid[:, : length - ahead]
        return same if self.starts is None else same & (self.starts[:, ahead:] == self.starts[:, : length - ahead])


@dataclass(frozen=True)
class Verification:
    """What verification made of a tree: the accepted nodes in order, and the token that follows them."""

    path: list[int]  # [A] node indices, without the root
    tokens: list[int]  # [A] their ids
    ranks: list[int]  # [A] each one's rank among its siblings
    bonus: int  # id of the token that follows the path
    drafted: int  # depth of the tree, of nodes that may be accepted
    kept: Tensor | None = field(default=None, compare=False, repr=False)  # `rows`, where they are on the device already

    def rows(self, device: torch.device) -> Tensor:
        """The nodes whose cache rows stay: root and path, [1 + A]. A copy from the host waits for the device."""
        return torch.tensor([0, *self.path], device=device) if self.kept is None else self.kept


@dataclass(frozen=True)
class Step:
    """One cycle of the loop, as counted and timed.

    A cycle emits `accepted + 1` tokens. Where a stop token or the cap cuts it, `accepted` is what was emitted minus one,
    and `drafted` no deeper, since nodes below were not verified.

    `passes` counts the forwards of the drafter's network that this cycle's draft was made from, whatever their width: one
    per level, one in all where heads draft every level together, none for what was copied from text. The forward of
    `observe` that gives the logits below the root counts in the cycle that drafts from it, so that a chain of gamma tokens
    takes gamma passes; forwards that only fill a cache, and those that no draft reads, do not count.
    """

    tokens: list[int]  # emitted ids: accepted draft tokens and the bonus
    nodes: int  # draft nodes verified
    drafted: int  # depth offered to the verifier
    accepted: int  # depth accepted
    ranks: list[int]  # [accepted] child ranks along the path
    passes: int  # draft passes that really ran, see above
    draft_s: float  # drafter: propose, observe_tree, observe, and selecting the states that it observes
    target_s: float  # target pass and keeping its rows
    verify_s: float  # acceptance
    rest_s: float  # everything else in the cycle


class Sampler(Protocol):
    """How the target is sampled (`specbench.engine.sampling`); a drafter that samples processes q the same way."""

    @property
    def greedy(self) -> bool:
        """Temperature 0."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """The processed distribution. [..., V] logits -> [..., V] float32"""


class VerificationTarget(Protocol):
    """A target as the loop uses it: local (`Target`), a known answer (`ReplayTarget`), a server's (`RemoteTarget`).

    Attributes:
        max_context: positions that a prompt and its answer may take.
        replayed: its logits are those of a known answer, and mean nothing for other tokens.
    """

    max_context: int
    replayed: bool

    @property
    def device(self) -> torch.device:
        """The device of all tensors that it takes and returns."""

    def reset(self, capacity: int, taps: Taps | None = None) -> None:
        """Start a new sequence. capacity: upper bound of its cache rows. taps: what the drafter reads."""

    def verifier(self, config: Any) -> Any:
        """A `Verifier` of the coming generation's trees. config: a `VerifyConfig`."""

    def prefill(self, tokens: Tensor) -> TargetStates:
        """Run a prompt [N]; logits of its last position alone."""

    def forward(self, tree: DraftTree) -> TargetStates:
        """One pass over the root and the draft nodes, whose cache rows are not kept yet."""

    def keep(self, nodes: Tensor) -> None:
        """Keep the cache rows of the root and the accepted path, [1 + A] nodes of the last pass; drop the others."""
