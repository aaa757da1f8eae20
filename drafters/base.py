"""What trained drafters share: binding to a target, weights, growing a tree from `expand`, noise, attention."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from drafters.layers import ATTENTION
from specbench.common.errors import SpecBenchError
from specbench.common.storage import PROJECT
from specbench.common.types import Count, Name, Text
from specbench.engine import vocabulary as vocabularies
from specbench.engine import weights as stored
from specbench.engine.cache import KVCache
from specbench.engine.causal_lm import CausalLM
from specbench.engine.drafter import Drafter, Outline, TimedFunction
from specbench.engine.interface import Batch, DraftTree, NoShortcut, Sampler
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target

Noise = Literal["uniform", "authors", "normal"]  # see `noisy`


class TrainedDrafter(nn.Module, Drafter):
    """An autoregressive drafter with weights of its own, trained for one target.

    A method fills in `build`, `reset`, `observe`, `root_logits`, `expand` and `loss`; `map_checkpoint` if its authors
    publish weights, and `fit` if these may have another shape than the default.

    Attributes, beside those of every drafter:
        weights: None leaves them at their initial values (training, tests).
        checkpoint: weights in their authors' layout instead, set before `bind`.
        parallel: one forward drafts all levels (heads); otherwise each level takes one.
        formats: servers (`vllm`, `sglang`) that have a model of its kind, see `export_tensors`.
        compiled: names of the functions of its network, which `compile_network` compiles.
        lm: the whole language model that it is; None if it is none.
        sliced_head: the listed ids' rows of the head, which it reads instead of the whole; None without a list.
    """

    compiled: tuple[str, ...] = ("network",)
    takes_checkpoint = True
    parallel = False
    formats: tuple[str, ...] = ()

    growth: TreePolicy
    lm: CausalLM | None = None
    sliced_head: vocabularies.Head | None = None

    embedding: nn.Embedding  # shared with the target by `build`, like the head
    head: nn.Linear
    target_logits: Callable[[Tensor], Tensor]  # of states, while drafting: over all ids, or the listed ones

    def __init__(self, name: Name, growth: TreePolicy, weights: Text | None = None, vocabulary: Count | None = None):
        nn.Module.__init__(self)
        Drafter.__init__(self, name)
        self.weights, self.vocabulary = weights, vocabulary
        self.set_tree_policy(growth)
        self.checkpoint: stored.Checkpoint | None = None

    def set_tree_policy(self, growth: TreePolicy) -> None:
        """Grow other trees from now on."""
        self.growth = growth
        self.nodes, self.passes = growth.nodes, self._forwards(growth.depth)

    def _forwards(self, levels: int) -> int:
        """Forwards of the network that draft so many levels."""
        return min(levels, 1) if self.parallel else levels

    def bind(self, target: Target) -> None:
        """Build the network for this target, share its frozen parts, load the weights.

        Raises:
            SpecBenchError: weights that are missing, damaged, or made for another target or network.
        """
        if self.checkpoint is None:
            self.build(target)
        else:
            with self.checkpoint.understood():
                self.fit(self.checkpoint)
                self.build(target)
        self.to(target.device, target.dtype)
        self.packing = target.packing
        looked_up = sum(p.numel() for p in self.embedding.parameters())
        self.active_parameters = sum(p.numel() for p in self.parameters()) - looked_up
        if self.head is self.embedding or self.head.weight is self.embedding.weight:
            self.active_parameters += self.head.weight.numel()  # tied: counted once, looked up and multiplied
        if self.checkpoint is not None:
            with self.checkpoint.understood():
                named, used = self.map_checkpoint(self.checkpoint, target)
            stored.fill(stored.trained(self), named, self.checkpoint.tensors.keys() - used, self.checkpoint.refuse)
            self.check(self.checkpoint, target)
            self.provenance = {"checkpoint": self.checkpoint.place, "sha256": dict(self.checkpoint.digest)}
            self.contents |= self.checkpoint.contents()
        elif self.weights is not None:
            folder = PROJECT / self.weights
            self.provenance = stored.load(self, folder, target.fingerprint())
            self.contents |= stored.contents_of(folder)
        if self.vocabulary is not None:
            self._narrow(target, self.vocabulary)

    def _narrow(self, target: Target, count: int) -> None:
        """Draft from listed ids alone: with a copy of their rows of the head, and of every output layer of its own."""
        width = max(self.growth.width, self.growth.top_k)
        if count < width:
            raise SpecBenchError(f"drafter.vocabulary={count}: the tree takes {width} candidates a node; list as many ids")
        self.listed = vocabularies.listed(target, count)
        self.contents[vocabularies.FILE] = self.listed.digest
        for part in list(self.modules()):
            for name, layer in part.named_children():
                if isinstance(layer, nn.Linear) and layer.out_features == target.vocab_size and layer is not self.head:
                    before = sum(p.numel() for p in layer.parameters())
                    setattr(part, name, vocabularies.slice_head(layer, self.listed.ids))
                    self.active_parameters -= before - sum(p.numel() for p in getattr(part, name).parameters())
        self.sliced_head = self.target_logits = vocabularies.Head(self.lm or target, self.listed.ids)
        self.active_parameters -= self.sliced_head.saved

    def outline(self, target: Target) -> Outline:
        """Its network, built on the meta device, and the most that caches of so many layers take. See `Drafter.outline`."""
        own = copy.deepcopy(self)
        if own.checkpoint is not None:
            own.fit(own.checkpoint)
        with torch.device("meta"):
            own.build(target)
        shared = {id(p) for p in target.model.parameters()}
        numbers = sum(p.numel() for p in own.parameters() if id(p) not in shared)
        listed = (own.vocabulary or 0) * own.head.in_features
        layers = sum(len(cache.index) for cache in vars(own).values() if isinstance(cache, KVCache))
        heads: int = target.config.num_attention_heads
        width = heads * (getattr(target.config, "head_dim", None) or target.hidden_size // heads)
        return Outline(numbers + listed, 2 * layers * width, numbers)

    def build(self, target: Target) -> None:
        """Create the network. What is shared with the target stays frozen and is not saved."""
        raise TypeError(f"{type(self).__name__} builds no network")

    def fit(self, checkpoint: stored.Checkpoint) -> None:
        """Take over what a published checkpoint says of the network's shape, before `build`."""

    def map_checkpoint(self, checkpoint: stored.Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """A published checkpoint's tensors under this drafter's names, and the names there that were understood.

        Raises:
            SpecBenchError: a layout that this network cannot take, with the reason.
        """
        raise checkpoint.refuse(f"no published layout is known for {type(self).__name__}")

    def check(self, checkpoint: stored.Checkpoint, target: Target) -> None:
        """Refuse what names and shapes cannot tell apart but one look at the target's own text can."""

    @classmethod
    def unserved(cls, server: str, options: Mapping[str, Any]) -> str | None:
        """Why a server has no place for this network, as its options make it; None: it has one."""
        return None if server in cls.formats else f"{server} has no model of {cls.__name__}'s kind"

    def export_tensors(self, server: str, target: Target) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and `config.json` of this drafter as a server reads them, one of `formats`.

        Raises:
            SpecBenchError: the server has no place for this network, with the reason.
        """
        raise SpecBenchError(f"drafter={self.name} cannot be exported: {self.unserved(server, vars(self))}")

    def compile_network(self, backend: str = "inductor") -> None:
        """Compile what runs at every level; lengths stay dynamic, since every level has its own."""
        for name in self.compiled:
            setattr(self, name, torch.compile(getattr(self, name), backend=backend, dynamic=True))

    def optimize_for_inference(self) -> None:
        """Make drafting fast, once weights and device are final; not for training."""
        if self.lm is not None:
            self.lm.packing = self.packing
            self.lm.optimize_for_inference()
        else:
            self.packing.optimize([self])
        if self.sliced_head is not None:
            self.packing.optimize([self.sliced_head.rows])

    def timed_functions(self) -> list[TimedFunction]:
        found: list[TimedFunction] = [(self.head, "forward", "head"), (self, "target_logits", "head")]
        if self.lm is not None:  # whose lean forward runs past its module's own
            return [*found, (self.lm, "run", "network")]
        for name in self.compiled:
            part = getattr(self, name)
            found.append((part, "forward", "network") if isinstance(part, nn.Module) else (self, name, "network"))
        return found

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The training objective of the method's paper: `loss`, and what else is worth logging."""
        raise TypeError(f"{type(self).__name__} has no training objective")

    def configure(self, **options: Any) -> None:
        """Change options of the objective, as a phase of a training asks for.

        Raises:
            SpecBenchError: an option that is not one of `phased`.
        """
        for name, value in options.items():
            if name not in self.phased:
                known = f"it has {', '.join(self.phased)}" if self.phased else "it has none"
                raise SpecBenchError(f"drafter={self.name}: `{name}` is no option that a phase may change; {known}")
            setattr(self, name, value)

    def draft_states(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Per draft pass of a chain, the states [B, T, D] that the head reads, as in `drafts`.

        Raises:
            NoShortcut: there are none before the chain is drafted.
        """
        raise NoShortcut(self.name)

    def drafts(self, batch: Batch, steps: int) -> Iterator[Callable[[Tensor], Tensor]]:
        """Greedy chains from every position at once, where drafted tokens are known to be the text's own.

        At place i step j = 1 … steps knows tokens up to i and the target's states up to i - j, so it is the j-th draft
        of a chain whose root is token i - j + 1, and it is about token i + 1. Places i < j mean nothing.

        Yields:
            Per step a function: places [B, T] bool -> the ids [M] drafted there.

        Raises:
            NoShortcut: this drafter can only be replayed cycle by cycle.
        """
        raise NoShortcut(self.name)

    def calibrate(self, sequences: list[tuple[Tensor, Tensor, int]]) -> Any:
        """What a method measures on held-out answers when training is over; kept with the weights, None for nothing.

        sequences: (tokens [T], states [T, D], index of the first answer token).
        """
        return None

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        tree = self.growth.grow(self, root, sampler, generator)  # type: ignore[arg-type]
        tree.passes = self._forwards(tree.passes)
        return tree


def llama_config(target: Target, layers: int, **changes: Any) -> Any:  # a LlamaConfig; its stubs make numbers optional
    """A Llama configuration of the target's own shape, whatever architecture the target has.

    Attention biases follow the target (Qwen2 has them on q, k, v though its config does not say so).
    """
    c = target.config
    rope = getattr(c, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 keeps one set per layer type
    first = target.decoder.layers[0].self_attn
    settings = {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": getattr(c, "rms_norm_eps", 1e-6),
        "rope_parameters": dict(rope) or None,
        "attention_bias": getattr(first.q_proj, "bias", None) is not None,
        "pad_token_id": None,
    }
    config = LlamaConfig(**(settings | changes))
    config._attn_implementation = ATTENTION
    return config


def served(config: Any) -> dict[str, Any]:
    """A Llama configuration as servers read it: those that know older Transformers ask for `rope_theta` by itself."""
    said: dict[str, Any] = config.to_dict()
    rope = dict(config.rope_parameters)
    said["rope_theta"] = rope.pop("rope_theta")
    said["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    return said


def likeliest(states: Tensor, logits: Callable[[Tensor], Tensor], rows: int = 256) -> Tensor:
    """The best id of every state, a few rows of logits at a time. [M, D] -> [M]"""
    return torch.cat([logits(part).argmax(-1) for part in states.split(rows)])


def argmax_at(states: Tensor, logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A step of `drafts` from the states [B, T, D] that the head is to read there."""
    return lambda places: likeliest(states[places], logits)


def noisy(states: Tensor, noise: float, law: str, batch: Batch) -> Tensor:
    """Input states with noise: a copy, what is to be predicted stays clean.

    Args:
        states: [B, S, D], the first S of the batch's places.
        law: `uniform`, U(-noise, noise) as EAGLE's paper says; `authors`, that times 512 / length of the sequence as
            EAGLE's code does; `normal`, N(0, noise) in standard deviations, as Beagle's paper says.
    """
    if not noise:
        return states
    if law == "normal":
        return states + torch.randn_like(states) * noise
    drawn = (torch.rand_like(states) * 2 - 1) * noise
    if law == "uniform":
        return states + drawn
    begins = torch.zeros_like(batch.tokens) if batch.starts is None else batch.starts
    lengths = torch.zeros_like(begins).scatter_add(1, begins, batch.valid.long()).gather(1, begins)  # [B, T]
    return states + drawn * (512 / lengths[:, : states.shape[1], None].clamp(min=1)).to(states)
