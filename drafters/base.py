"""What trained drafters share: binding to a target, weights, growing trees, rows behind a cache, noise."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from drafters.layers import ATTENTION
from specbench.common.errors import SpecBenchError
from specbench.common.storage import project_path
from specbench.common.types import Ids, Name, Text
from specbench.engine import vocabulary as vocabularies
from specbench.engine import weights as stored
from specbench.engine.backends.fused_modules import fuse_modules
from specbench.engine.batch import DRAFT, by_row
from specbench.engine.cache import KVCache
from specbench.engine.captured_growth import CapturedGrowth
from specbench.engine.causal_lm import CausalLM
from specbench.engine.drafter import Drafter, Outline, TimedFunction
from specbench.engine.interface import Batch, DraftTree, NoShortcut, Sampler
from specbench.engine.model_files import heads_of
from specbench.engine.policies import TreePolicy
from specbench.engine.sampling import require_ids, top
from specbench.engine.target import Target

Noise = Literal["uniform", "authors", "normal"]  # see `noisy`
Pick = Callable[[Tensor, int], Tensor]  # a step of `drafts`: positions [B, T] bool, k -> ids [M, k]


class TrainedDrafter(nn.Module, Drafter):
    """An autoregressive drafter with weights of its own, trained for one target.

    A subclass implements `build`, `reset`, `observe`, `expand` and `loss`. Its `observe` sets `logits`, or it implements
    `root_logits`. It sets `networks` if what it runs is not called `network`. It implements `map_checkpoint` if its authors
    publish weights, and `infer_shape` if these may have another shape than the default. docs/drafters.md has a whole one.

    Args:
        growth: its tree policy. weights: folder of its weights; None: initial values (training, tests).
        vocabulary: draft from so many of the target's most frequent ids; None: from all.

    Attributes, besides those of every drafter:
        checkpoint: weights in their authors' layout, set before `bind`.
        parallel: one forward drafts all levels (heads); otherwise each level takes one.
        formats: servers (`vllm`, `sglang`) that have a model of its kind, see `export_tensors`.
        served_as: what they call its method.
        networks: names of the functions of its network.
        lm: the language model that it is; None if it is none.
        observed: names of the tensors that `observe` leaves for growing a tree, of shapes that never change; empty: it
            cannot be grown in fixed shapes, see `captured_growth`.
        captured: its trees in fixed shapes, see `capture`; None: they are grown as they come.
        sliced_head: the head's rows of the draft vocabulary, which it reads instead of the whole head; None without one.
    """

    networks: tuple[str, ...] = ("network",)
    takes_checkpoint = True
    parallel = False
    formats: tuple[str, ...] = ()
    served_as = "eagle"

    growth: TreePolicy
    observed: tuple[str, ...] = ()
    captured: CapturedGrowth | None = None
    cache: KVCache
    lm: CausalLM | None = None
    sliced_head: vocabularies.Head | None = None

    embedding: nn.Embedding  # the target's, as the head, see `share_ends`
    head: nn.Linear
    target_logits: Callable[[Tensor], Tensor]  # of states, while drafting: over all ids, or the listed ones
    logits: Tensor  # below the root, set by `observe`; see `root_logits`

    def __init__(self, name: Name, growth: TreePolicy, weights: Text | None = None, vocabulary: Ids | None = None):
        nn.Module.__init__(self)
        Drafter.__init__(self, name)
        self.weights, self.vocabulary = weights, vocabulary
        self.set_tree_policy(growth)
        self.checkpoint: stored.Checkpoint | None = None

    def set_tree_policy(self, growth: TreePolicy) -> None:
        self.growth = growth
        self.nodes, self.passes = growth.nodes, self._forwards(growth.depth)

    def _forwards(self, levels: int) -> int:
        """Forwards of the network that draft so many levels."""
        return min(levels, 1) if self.parallel else levels

    def bind(self, target: Target) -> None:
        """Build the network for this target, share its frozen parts, load the weights.

        Raises `SpecBenchError` for weights that are missing, damaged, or made for another target or network.
        """
        require_ids(self.growth.candidates_needed, target.vocab_size)
        if self.checkpoint is None:
            self.build(target)
        else:
            with self.checkpoint.understood():
                self.infer_shape(self.checkpoint)
                self.build(target)
        self._move_own(target)
        self.packing = target.packing
        if self.lm is None:  # a language model has a fast forward, which must reproduce its own
            self.packing, self.draft_dtype = target.draft_packing, target.draft_dtype
        self.active_parameters = sum(p.numel() for p in self.parameters())
        if self.head.weight is not self.embedding.weight:  # else its numbers are multiplied, too
            self.active_parameters -= self.embedding.weight.numel()
        if self.checkpoint is not None:
            with self.checkpoint.understood():
                named, used = self.map_checkpoint(self.checkpoint, target)
            stored.fill(stored.trained(self), named, self.checkpoint.tensors.keys() - used, self.checkpoint.refuse)
            self.check(self.checkpoint, target)
            self.provenance = {"checkpoint": self.checkpoint.source, "sha256": dict(self.checkpoint.digest)}
            self.contents |= self.checkpoint.contents()
            self.checkpoint.release()
        elif self.weights is not None:
            folder = project_path(self.weights)
            self.provenance = stored.load(self, folder, target.fingerprint())
            self.contents |= stored.contents_of(folder)
        if self.vocabulary is not None:
            self._narrow(target, self.vocabulary)

    def _move_own(self, target: Target) -> None:
        """Move its own modules, not the target's, to its device and dtype; buffers (rotary frequencies) keep theirs."""
        shared = {*target.model.modules(), target.draft_head}

        def convert(x: Tensor) -> Tensor:
            return x.to(target.device, target.dtype if isinstance(x, nn.Parameter) else None)

        def move(part: nn.Module) -> None:
            for child in part.children():
                if child not in shared:
                    move(child)
            part._apply(convert, recurse=False)  # as `Module.to`, without the children

        move(self)

    def draft_from(self, target: Target, count: int, option: str = "drafter.vocabulary") -> vocabularies.DraftVocabulary:
        """Draft from the target's `count` most frequent ids alone. Raises `SpecBenchError`, which names the option."""
        if count < (width := self.growth.candidates_needed):
            raise SpecBenchError(f"{option}={count}: the tree takes {width} candidates a node; list as many ids")
        self.listed = vocabularies.listed(target, count, option)
        self.contents[vocabularies.FILE] = self.listed.digest
        return self.listed

    def _narrow(self, target: Target, count: int) -> None:
        """Slice the head, and every output layer of the drafter's own, to the ids of a draft vocabulary."""
        listed = self.draft_from(target, count)
        for part in list(self.modules()):
            for name, layer in part.named_children():
                if isinstance(layer, nn.Linear) and layer.out_features == target.vocab_size and layer is not self.head:
                    sliced = vocabularies.slice_head(layer, listed.ids)
                    setattr(part, name, sliced)
                    self.active_parameters += sum(p.numel() for p in sliced.parameters())
                    self.active_parameters -= sum(p.numel() for p in layer.parameters())
        self.sliced_head = self.target_logits = vocabularies.Head(self.lm or target, listed.ids)
        self.active_parameters -= self.sliced_head.saved

    def outline(self, target: Target) -> Outline:
        """Numbers of its network, built on the meta device, and of the caches of its layers, at most."""
        own = copy.deepcopy(self)
        if own.checkpoint is not None:
            own.infer_shape(own.checkpoint)
            own.checkpoint.release()
        with torch.device("meta"):
            own.build(target)
        shared = {id(p) for p in target.model.parameters()}
        numbers = sum(p.numel() for p in own.parameters() if id(p) not in shared)
        listed = (own.vocabulary or 0) * own.head.in_features
        layers = sum(len(cache.index) for cache in vars(own).values() if isinstance(cache, KVCache))
        heads, _, head_dim = heads_of(target.config)
        return Outline(numbers + listed, 2 * layers * heads * head_dim, numbers)

    def build(self, target: Target) -> None:
        """Create the network. What is shared with the target stays frozen and is not saved."""
        raise TypeError(f"{type(self).__name__} builds no network")

    def share_ends(self, target: Target) -> None:
        """Use the target's embedding and head."""
        self.embedding, self.head = target.embedding, target.draft_head
        self.target_logits = partial(target.logits, head=self.head)

    def infer_shape(self, checkpoint: stored.Checkpoint) -> None:
        """Set the options of the network's shape as a published checkpoint has it, before `build`."""

    def map_checkpoint(self, checkpoint: stored.Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """A published checkpoint's tensors under this drafter's names, and the names there that were used.

        Raises `SpecBenchError` for a layout that this network cannot take, with the reason.
        """
        raise checkpoint.refuse(f"no published layout is known for {type(self).__name__}")

    def check(self, checkpoint: stored.Checkpoint, target: Target) -> None:
        """Refuse by its predictions on the target's own text what names and shapes cannot tell apart."""

    @classmethod
    def export_obstacle(cls, server: str, options: Mapping[str, Any]) -> str | None:
        return None if server in cls.formats else f"{server} has no model of {cls.__name__}'s kind"

    def export_tensors(self, server: str, target: Target) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and `config.json` of this drafter as a server reads them; raises `SpecBenchError` if it cannot."""
        raise SpecBenchError(f"drafter={self.name} cannot be exported: {self.export_obstacle(server, vars(self))}")

    def optimize_for_inference(self) -> None:
        if self.lm is not None:
            self.lm.packing = self.packing
            self.lm.optimize_for_inference(fixed_shapes=self.captured is not None)
        else:
            fuse_modules(self.modules(), self.packing)
            self.packing.optimize([self])
        if self.sliced_head is not None:
            self.packing.optimize([self.sliced_head.rows])

    def capture(self, target: Target) -> None:
        if self.observed:
            self.captured = CapturedGrowth(target, self.cache, self.growth.rows)

    def for_sequences(self, count: int, lockstep: Any) -> list[Any]:
        rows = super().for_sequences(count, lockstep)
        logits = by_row(self.target_logits)
        for row in rows:
            row.target_logits = partial(lockstep.call, logits, DRAFT)
        return rows

    def _row(self) -> Any:
        row = copy.copy(self)  # modules are the same
        row.growth = copy.deepcopy(self.growth)
        return row

    def timed_functions(self) -> list[TimedFunction]:
        timed: list[TimedFunction] = [(self.head, "forward", "head"), (self, "target_logits", "head")]
        if self.lm is not None:  # its fused forward does not call its module's own
            return [*timed, (self.lm, "run", "network")]
        for name in self.networks:
            part = getattr(self, name)
            timed.append((part, "forward", "network") if isinstance(part, nn.Module) else (self, name, "network"))
        return timed

    def root_logits(self) -> Tensor:
        return self.logits

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The training objective of the method's paper as `loss`, and other values to log."""
        raise TypeError(f"{type(self).__name__} has no training objective")

    def configure(self, **options: Any) -> None:
        """Change options of the objective for a phase of a training. Raises `SpecBenchError` if not among `phased`."""
        for name, value in options.items():
            if name not in self.phased:
                known = f"it has {', '.join(self.phased)}" if self.phased else "it has none"
                raise SpecBenchError(f"drafter={self.name}: `{name}` is no option that a phase may change; {known}")
            setattr(self, name, value)

    def draft_states(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Per draft pass of a chain the states [B, T, D] that the head reads, as in `drafts`; raises `NoShortcut`."""
        raise NoShortcut(self.name)

    def drafts(self, batch: Batch, steps: int) -> Iterator[Pick]:
        """Greedy chains from every position at once, as long as drafted tokens are the text's own.

        At position i step j = 1 … steps reads tokens up to i and the target's states up to i - j: it drafts token i + 1 as
        the j-th of a chain whose root is token i - j + 1. Positions i < j are undefined.

        Yields a function per step: positions [B, T] bool, k -> the k likeliest ids [M, k] there, best first. Raises
        `NoShortcut` if this drafter can only be replayed cycle by cycle.
        """
        for states in self.draft_states(batch, steps):
            yield likeliest_at(states, self.target_logits)

    def calibrate(self, sequences: Iterable[tuple[Tensor, Tensor, int]]) -> Any:
        """Measurements on held-out answers after training, saved with the weights; None: none.

        sequences: (tokens [T], states [T, D], index of the first answer token).
        """
        return None

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        if self.captured is not None and self.captured.serves(self, sampler):
            tree = self.captured.grow(self, root)
        else:
            tree = self.growth.grow(self, root, sampler, generator)  # type: ignore[arg-type]
        tree.passes = self._forwards(tree.passes)
        return tree


def llama_config(target: Target, layers: int, **changes: Any) -> Any:  # a LlamaConfig; its stubs make numbers optional
    """A Llama configuration of the target's shape. changes: of its settings; None leaves one as it is."""
    c = target.config
    rope = getattr(c, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 keeps one set per layer type
    first = target.decoder.layers[0].self_attn
    heads, key_heads, head_dim = heads_of(c)
    settings = {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": getattr(c, "rms_norm_eps", 1e-6),
        "rope_parameters": dict(rope) or None,
        "attention_bias": getattr(first.q_proj, "bias", None) is not None,  # Qwen2's config has no such key
        "pad_token_id": None,
    }
    config = LlamaConfig(**(settings | {name: value for name, value in changes.items() if value is not None}))
    config._attn_implementation = ATTENTION
    return config


def to_serving_config(config: Any) -> dict[str, Any]:
    """A Llama configuration as servers read it: with `rope_theta` and `rope_scaling`, as in older Transformers."""
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return config.to_dict() | {"rope_theta": theta, "rope_scaling": scaling}


def likeliest(states: Tensor, logits: Callable[[Tensor], Tensor], k: int, rows: int = 256) -> Tensor:
    """The k likeliest ids of every state, or all if there are fewer; `rows` of logits at a time. [M, D] -> [M, k]"""
    found = (logits(part) for part in states.split(rows))
    return torch.cat([top(of_part, min(k, of_part.shape[-1]))[1] for of_part in found])


def likeliest_at(states: Tensor, logits: Callable[[Tensor], Tensor]) -> Pick:
    """A step of `drafts` from what `logits` reads at every position: states [B, T, D], or tokens [B, T]."""
    return lambda chosen, k: likeliest(states[chosen], logits, k)


def noisy(states: Tensor, noise: float, law: str, batch: Batch) -> Tensor:
    """A copy of input states with noise.

    Args:
        states: [B, S, D], at the batch's first S positions.
        law: `uniform`, U(-noise, noise) as in EAGLE's paper; `authors`, that times 512 / length of the sequence as in
            EAGLE's code; `normal`, with standard deviation `noise`, as in Beagle's paper.
    """
    if not noise:
        return states
    if law == "normal":
        return states + torch.randn_like(states) * noise
    drawn = (torch.rand_like(states) * 2 - 1) * noise
    if law == "uniform":
        return states + drawn
    return states + drawn * (512 / batch.sequence_lengths[:, : states.shape[1], None]).to(states)
