"""The base class of drafters: every member that decoding uses, with the defaults of its optional parts. What
training uses beside them is in `drafters.base.TrainedDrafter`.

`bind(target)` is called once; then per prompt `reset()`, `observe(prefill states, root)` and, each cycle, `propose(root)`
followed by `observe(states of root + accepted path, bonus)`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.engine.adapters import Adapter
from specbench.engine.interface import DraftTree, Sampler, Taps, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.vocabulary import DraftVocabulary

# What a drafter's memory holds when a generation begins: nothing; its prompt; also everything before it in this run.
State = Literal["none", "prompt", "run"]
TimedFunction = tuple[Any, str, Literal["head", "network"]]  # object, name of its function, what its seconds count as


class Outline(NamedTuple):
    """How many numbers a drafter stores."""

    own: int  # parameters of its own, in the target's dtype
    row: int = 0  # cached per position
    building: int = 0  # in float32, while it is built


class Drafter:
    """A method that drafts. A subclass implements `propose`, and what else it needs.

    Attributes:
        name: as tables show it.
        taps: what it reads from the target; set by `bind` at the latest.
        nodes: upper bound of a proposed tree's, the root included.
        passes: upper bound of draft passes a cycle; `Step.passes` counts those that ran.
        active_parameters: that one pass multiplies, the shared LM head included, embeddings not.
        state: what its memory holds when a generation begins, see `State` and `persist`.
        greedy_only: it is defined for greedy decoding alone.
        observes_trees: it also learns from rejected nodes, by `observe_tree`.
        runs_layers: it runs layers of the target, which must then be in this process.
        compresses_states: it reads a token's states only through `compress_states`.
        growth: its tree policy; None if it has none.
        deepest: upper bound of its trees' levels; None: no bound.
        batches: it can draft for several sequences at once, see `for_sequences`.
        vocabulary: number of the target's most frequent ids that it drafts from; None: all ids. listed: those ids.
        draft_dtype: in which its weights are multiplied; None: as the target's.
        weights: folder of its weights, relative to the project; None if it has none.
        takes_checkpoint: weights in their authors' layout may be set as `checkpoint` before `bind`.
        counted: it is fitted by `count`, not by gradient steps.
        trains_target: the target is trained with it, see `prepare_training`.
        phased: options of its objective that may change between phases of a training.
        shape_options: options that only fit weights trained with them; runs take them from the provenance of the weights.
        provenance: where its weights come from. contents: SHA-256 of the files read for them, by name.
        generation: arguments with which Transformers' `generate` drafts alike; empty if it cannot.
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
    batches: bool = False
    vocabulary: int | None = None
    listed: DraftVocabulary | None = None
    weights: str | None = None
    takes_checkpoint: bool = False
    counted: bool = False
    draft_dtype: torch.dtype | None = None
    trains_target: bool = False
    phased: tuple[str, ...] = ()
    shape_options: tuple[str, ...] = ()

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
        """Read what was verified: states of N consecutive positions, and the token after them, which has none yet."""

    def for_sequences(self, count: int, lockstep: Any) -> list[Any]:
        """This drafter for each of `count` sequences that are decoded together, see `batch.decode_together`.

        Weights are shared, state is not, and heavy functions go through the `Lockstep`. Raises `SpecBenchError` if it
        cannot.
        """
        self.require_batches()
        return [self._row() for _ in range(count)]

    def require_batches(self) -> None:
        """Raises `SpecBenchError` if it can draft for one sequence at a time only."""
        if not self.batches or self.state == "run":
            raise SpecBenchError(f"drafter={self.name} drafts for one sequence at a time; leave out batch=")

    def _row(self) -> Any:
        """A copy that drafts for another sequence."""
        return copy.deepcopy(self)

    # Some methods ---------------------------------------------------------------------------------------------------------

    def observe_tree(self, tree: DraftTree, states: TargetStates) -> None:
        """Read the target's states and logits of every node, after verification and before any is kept."""

    def persist(self, on: bool) -> None:
        """Empty the memory. on: from now on it is kept from prompt to prompt, if `state` is `run`."""

    def compress_states(self, states: TargetStates) -> tuple[Tensor, ...]:
        """What drafting needs of N tokens' states, each [N, …]; `observe` takes states with or without it.

        A target on another machine can do this on its side and send less.
        """
        raise NotImplementedError(f"{type(self).__name__} compresses no states")

    def count(self, texts: Iterable[Tensor]) -> dict[str, Tensor]:
        """Fit to texts of token ids, [T] int64 each; returns the tables of integers that its weights file holds."""
        raise NotImplementedError(f"{type(self).__name__} counts nothing")

    def prepare_training(self, target: Any) -> Any:
        """Prepare for training. Returns the target that it will draft for: this one, unless `trains_target`.

        Then it is a copy with an adapter (`adapters.attach`), whose parameters are the drafter's until `release_adapter`.
        """
        return target

    def release_adapter(self) -> Adapter | None:
        """The adapter that was trained, which the drafter holds no longer; None: it trains none."""
        return None

    def set_tree_policy(self, growth: TreePolicy) -> None:
        """Grow other trees from now on. Raises `SpecBenchError` if this drafter has no tree policy."""
        raise SpecBenchError(f"drafter={self.name} grows no trees that could be fitted; choose another drafter=")

    @property
    def grower(self) -> Drafter | None:
        """The drafter with a tree policy: this one, one that it wraps, or none."""
        return None if self.growth is None else self

    @property
    def weights_owner(self) -> Drafter:
        """The drafter with the weights: this one, or one that it wraps."""
        return self

    @property
    def generation(self) -> Mapping[str, Any]:
        return {}

    def outline(self, target: Any) -> Outline:
        """What it will store beside this target, which is on the meta device (`memory.Shape`); changes nothing."""
        return Outline(0)

    def optimize_for_inference(self) -> None:
        """Make drafting fast, once weights and device are final; not for training."""

    def capture(self, target: Any) -> None:
        """From now on grow trees in fixed shapes, on CUDA as graphs, if it can; call it before `optimize_for_inference`."""

    def timed_functions(self) -> list[TimedFunction]:
        """Its LM head, the functions of its network and those that run layers of the target, for timing."""
        return []

    @classmethod
    def export_obstacle(cls, server: str, options: Mapping[str, Any]) -> str | None:
        """Why a server cannot run what these options make; None: it can."""
        return "it has no weights to export"


class Delegating(Drafter):
    """A drafter that wraps another one, `base`, and by default passes calls on to it.

    A subclass that is a `torch.nn.Module` initialises that part first, and sets `base` itself.
    """

    base: Any  # a Drafter; Any, since a wrapper may use more of it than that

    @property
    def taps(self) -> Taps:  # type: ignore[override]
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
        """Add the provenance of the bound base's weights."""
        self.provenance |= {"base": self.base.provenance}
        self.contents |= {f"base/{name}": digest for name, digest in self.base.contents.items()}

    def optimize_for_inference(self) -> None:
        self.base.optimize_for_inference()

    def capture(self, target: Any) -> None:
        self.base.capture(target)

    def timed_functions(self) -> list[TimedFunction]:
        return self.base.timed_functions()

    def reset(self, capacity: int) -> None:
        self.base.reset(capacity)

    def observe(self, states: TargetStates, bonus: int) -> None:
        self.base.observe(states, bonus)


class ServedEngine(Drafter):
    """Another engine that decodes by itself, for comparison: the loop is not run, and its drafts are not seen."""

    found: dict[str, Any]  # what it reports of its model

    def find_model(self) -> None:
        """Ask it for its model. Raises `SpecBenchError` if it or the model is not there."""

    def answer(self, prompt: list[int], text: str, limits: Any, sampler: Any, seed: int | None) -> Any:
        """Its answer to a prompt, given as ids and as text: an `endpoint.Answer`."""
        raise NotImplementedError(f"{type(self).__name__} does not answer")

    def propose(self, root: int, sampler: Any, generator: torch.Generator | None) -> DraftTree:
        raise SpecBenchError(f"drafter={self.name} is another engine, which drafts nothing here; use specbench.run")
