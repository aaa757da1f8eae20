"""What a drafter is: what every one must do, and what it may do, with what holds for one that does not.

The life of a drafter: `bind(target)` once; then per prompt `reset()`, `observe(prefill states, root)` and, each cycle,
`propose(root)` followed by `observe(states of root + accepted path, bonus)`. Nothing outside asks a drafter whether it has
a member: every part that the harness ever uses is declared here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.engine.interface import DraftTree, Sampler, Taps, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.vocabulary import DraftVocabulary

# What a drafter's memory holds when a generation begins: nothing; its own prompt; also all that came before it in this run.
State = Literal["none", "prompt", "run"]
TimedFunction = tuple[Any, str, Literal["head", "network"]]  # whose function, its name, what its seconds count as


class Outline(NamedTuple):
    """How many numbers a drafter holds of its own.

    Attributes:
        own: parameters, in the target's dtype. row: that it caches of one position. building: in float32, for a moment.
    """

    own: int
    row: int = 0
    building: int = 0


class Drafter:
    """A method that drafts. A subclass fills in `propose`, and what else it needs; the rest may stay as it is here.

    Attributes:
        name: as tables show it.
        taps: what it reads from the target; after `bind` at the latest.
        nodes: of a proposed tree at most, the root included.
        passes: draft forwards a cycle at most; `Step.passes` says how many ran.
        active_parameters: that one such forward multiplies, the shared LM head included, embeddings not.
        state: what its memory holds when a generation begins, see `State` and `persist`.
        greedy_only: it is defined for greedy decoding alone.
        observes_trees: it learns from rejected nodes as well, by `observe_tree`. Only those that do pay for it.
        runs_layers: it runs layers of the target itself, which must then be here.
        compresses_states: it makes something shorter of a token's states first of all, by `compress_states`.
        growth: the policy by which its trees grow; None if it has none.
        deepest: levels that its trees can have at most; None for as many as one likes.
        vocabulary: it drafts from so many of the target's most frequent ids alone; None: from all. listed: those ids.
        weights: folder of its weights, relative to the project; None if it has none.
        takes_checkpoint: weights in their authors' layout may be set as `checkpoint` before `bind`.
        phased: options of its objective that may change from phase to phase of a training.
        provenance: where its weights come from. contents: SHA-256 of the files read for them, by name.
        generation: what Transformers' `generate` is told so that it drafts alike; empty if it cannot.
    """

    name: str
    taps: Taps = Taps()
    nodes: int = 1
    passes: int = 0
    active_parameters: int = 0
    state: State = "none"
    greedy_only: bool = False
    observes_trees: bool = False
    runs_layers: bool = False
    compresses_states: bool = False
    growth: TreePolicy | None = None
    deepest: int | None = None
    vocabulary: int | None = None
    listed: DraftVocabulary | None = None
    weights: str | None = None
    takes_checkpoint: bool = False
    phased: tuple[str, ...] = ()

    def __init__(self, name: str):
        self.name = name
        self.provenance: dict[str, Any] = {}
        self.contents: dict[str, str] = {}

    # Every method ---------------------------------------------------------------------------------------------------------

    def bind(self, target: Any) -> None:
        """Share the target's frozen embedding and head; refuse a target this drafter was not made for."""

    def reset(self, capacity: int) -> None:
        """Forget the last prompt. capacity: cache rows the coming prompt can need at most."""

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        """Draft tokens below the root. The sampler carries temperature, top-p and top-k of this run."""
        raise NotImplementedError(f"{type(self).__name__} proposes nothing")

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Learn what was verified: states of N consecutive positions, and the (not yet processed) token after them."""

    # Some methods ---------------------------------------------------------------------------------------------------------

    def observe_tree(self, tree: DraftTree, states: TargetStates) -> None:
        """See what the target said of every node, once a cycle: after verification, before states are selected and kept."""

    def persist(self, on: bool) -> None:
        """Forget everything. on: from now on what is seen goes over from prompt to prompt, if `state` is `run`."""

    def compress_states(self, states: TargetStates) -> tuple[Tensor, ...]:
        """What is left of N tokens' states, each [N, …]. `observe` takes states either way.

        Where target and drafter are two machines the target's side can do this as well, and less has to travel.
        """
        raise NotImplementedError(f"{type(self).__name__} makes nothing shorter of states")

    def set_tree_policy(self, growth: TreePolicy) -> None:
        """Grow other trees from now on. Raises `SpecBenchError` if this drafter's trees grow by no policy."""
        raise SpecBenchError(f"drafter={self.name} grows no trees that could be fitted; choose another drafter=")

    @property
    def grower(self) -> Drafter | None:
        """The drafter whose trees a policy shapes: this one, one that it asks, or none."""
        return None if self.growth is None else self

    @property
    def trained(self) -> Drafter:
        """The drafter with the weights: this one, or one that it asks."""
        return self

    @property
    def generation(self) -> Mapping[str, Any]:
        return {}

    def outline(self, target: Any) -> Outline:
        """What it will hold, beside this target, which has shapes alone (`memory.Shape`); changes nothing."""
        return Outline(0)

    def compile_network(self, backend: str = "inductor") -> None:
        """Compile what runs at every level."""

    def optimize_for_inference(self) -> None:
        """Make drafting fast, once weights and device are final; not for training."""

    def timed_functions(self) -> list[TimedFunction]:
        """What it multiplies: its LM head and the functions of its network, beside the target's own."""
        return []

    @classmethod
    def unserved(cls, server: str, options: Mapping[str, Any]) -> str | None:
        """Why a server has no place for what these options make; None: it has one."""
        return "it has no weights to export"


class Delegating(Drafter):
    """A drafter that asks another one, `base`, and does something beside it; what both are called on is passed on here.

    A subclass that is a `torch.nn.Module` initialises that part first, and sets `base` itself.
    """

    base: Any  # a Drafter; Any, since a wrapper may need more of it than that

    @property
    def taps(self) -> Taps:  # type: ignore[override]
        """What the base reads, which it may know only once it is bound."""
        return self.base.taps

    @property
    def runs_layers(self) -> bool:  # type: ignore[override]
        return self.base.runs_layers

    def outline(self, target: Any) -> Outline:
        return self.base.outline(target)

    def bind(self, target: Any) -> None:
        self.base.bind(target)
        self.active_parameters = self.base.active_parameters
        self.name_base()

    def name_base(self) -> None:
        """Say of the bound base's weights, too, where they come from."""
        self.provenance |= {"base": self.base.provenance}
        self.contents |= {f"base/{name}": digest for name, digest in self.base.contents.items()}

    def compile_network(self, backend: str = "inductor") -> None:
        self.base.compile_network(backend)

    def optimize_for_inference(self) -> None:
        self.base.optimize_for_inference()

    def timed_functions(self) -> list[TimedFunction]:
        return self.base.timed_functions()

    def reset(self, capacity: int) -> None:
        self.base.reset(capacity)

    def observe(self, states: TargetStates, bonus: int) -> None:
        self.base.observe(states, bonus)


class ServedEngine(Drafter):
    """An engine that answers by itself, for comparison: the loop is not run, and nobody here sees its drafts.

    Attributes:
        found: what it says of its model.
    """

    found: dict[str, Any]

    def look(self) -> None:
        """Is it there? Raises `SpecBenchError` if not."""

    def answer(self, prompt: list[int], text: str, limits: Any, sampler: Any, seed: int | None) -> Any:
        """What it says behind a prompt, as ids and as text: an `endpoint.Answer`."""
        raise NotImplementedError

    def propose(self, root: int, sampler: Any, generator: torch.Generator | None) -> DraftTree:
        raise SpecBenchError(f"drafter={self.name} is another engine, which drafts nothing here; use specbench.run")
