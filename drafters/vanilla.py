"""Vanilla speculative decoding: a small language model drafts a chain (Leviathan et al., arXiv:2211.17192).

The draft model shares nothing with the target but its tokenizer. It is any causal LM of the Hugging Face kind (`path`), or
a small one trained here in the style of MoA's "Independent" drafter (arXiv:2410.03804, section 5.2): a few Llama layers
between the target's frozen embedding and LM head, whose state at position i regresses f_i,

    L = regression * SmoothL1(f_i, f_hat_i) + classification * CE(softmax(LMHead(f_i)), softmax(LMHead(f_hat_i)))

Greedy decoding drafts argmax chains; sampling draws x_i from q_i and accepts it with probability min(1, p_i / q_i)
(Algorithm S in its chain case), q being the processed distribution that is really sampled.

The model trained here starts at random (`start_from=random`), or as the target with its inner layers cut out
(`start_from=target`: the first half of its `layers` are the target's first ones, the rest its last ones, their MLPs cut to
the neurons with the largest weights where they are to be narrower).

Deviations and choices: the classification term dominates, since no state is fed back into drafting (MoA's paper has no
regression for this drafter, its code adds one; a weight of 0.1 stabilises the first steps); the final norm starts as the
target's, whose head expects states of that size; starting from the target's layers is ours. The draft model runs accepted
tokens again instead of keeping their rows: one pass either way, and one rule for chains and trees.
"""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from drafters.base import Pick, TrainedDrafter, likeliest_at, llama_config
from drafters.distillation import DistillationLoss
from drafters.layers import start_layer, start_norm, unread_tokens
from specbench.common.errors import SpecBenchError
from specbench.common.storage import user_path
from specbench.common.types import Ids, Layers, Name, Text, Units, Weight
from specbench.engine.batch import DRAFT, in_one_pass, slots_of
from specbench.engine.cache import KVCache
from specbench.engine.causal_lm import CausalLM
from specbench.engine.drafter import Outline
from specbench.engine.interface import Batch, Taps, TargetStates
from specbench.engine.model_files import contents_of
from specbench.engine.policies import Chain, TreePolicy
from specbench.engine.pretrained import (
    draft_model_folder,
    random_model,
    read_config,
    read_model,
    read_tokenizer,
)
from specbench.engine.target import Target
from specbench.engine.weights import Checkpoint


class Vanilla(TrainedDrafter):
    """A draft language model with its own cache.

    Args:
        growth: a chain as in the paper; any tree works.
        weights: folder of weights trained here. path: a causal LM to draft with instead.
        layers, intermediate_size: shape of the model trained here; None: as wide as the target's.
        start_from: initial layers: `random`, or layers of the `target`, with its largest neurons if these are narrower.
        norm_from: initial final norm: the `target`'s, or `ones`.
        regression, classification: weights of its two loss terms.
    """

    lm: CausalLM
    batches = True
    shape_options = ("layers", "intermediate_size")
    observed = ("logits",)
    phased: tuple[str, ...] = ("regression", "classification")
    taps = Taps(last=False)

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        path: Text | None = None,
        layers: Layers = 2,
        intermediate_size: Units | None = 832,
        start_from: Literal["random", "target"] = "random",
        norm_from: Literal["target", "ones"] = "target",
        regression: Weight = 0.1,
        classification: Weight = 1.0,
        vocabulary: Ids | None = None,
    ):
        super().__init__(name, growth, None if path else weights, vocabulary)
        self.path, self.layers, self.intermediate_size = path, layers, intermediate_size
        self.start_from, self.norm_from = start_from, norm_from
        self.regression, self.classification = regression, classification

    def outline(self, target: Target) -> Outline:
        outline = super().outline(target)
        ends = 0 if self.path is not None else 2 * target.vocab_size * target.hidden_size  # replaced by the target's
        return outline._replace(building=outline.building + ends)

    def build(self, target: Target) -> None:
        self.vocab_size = target.vocab_size
        self.lm = CausalLM(self._own(target) if self.path is None else self._pretrained(self.path, target))
        self.network, self.embedding, self.head = self.lm.decoder, self.lm.embedding, self.lm.head
        self.target_logits = self._logits
        self.cache = KVCache(self.lm.layers, 0)

    def _own(self, target: Target) -> LlamaForCausalLM:
        """A small model between the target's embedding and head, at its initial weights."""
        width = self.intermediate_size or target.config.intermediate_size
        if self.start_from == "target":
            width = min(width, target.config.intermediate_size)
        model = LlamaForCausalLM(llama_config(target, self.layers, intermediate_size=width, tie_word_embeddings=False))
        embedding = target.embedding
        if embedding.weight.device != target.device:  # of a target that is spread over several
            embedding = nn.Embedding.from_pretrained(embedding.weight.to(target.device))
        model.set_input_embeddings(embedding)
        model.set_output_embeddings(target.head)
        if self.norm_from == "target":
            start_norm(model.model.norm, target.decoder.norm)
        if self.start_from == "target" and self.weights is None:
            self._take_layers(model.model.layers, target)
        return model

    def _take_layers(self, layers: nn.ModuleList, target: Target) -> None:
        """Fill layers with the target's first and last ones; raises `SpecBenchError` if these do not fit."""
        late = len(layers) // 2
        layer: Any
        sources = [*target.decoder.layers[: len(layers) - late], *target.decoder.layers[target.layers - late :]]
        for layer, source in zip(layers, sources, strict=True):
            if not start_layer(layer, source):
                raise SpecBenchError(
                    f"drafter.start_from=target: a layer of model type {target.config.model_type} does not fit into one of "
                    f"Llama's kind with drafter.intermediate_size={self.intermediate_size} (null is the target's)"
                )

    def infer_shape(self, checkpoint: Checkpoint) -> None:
        """The checkpoint is a whole language model, as with `path`."""
        self.path = checkpoint.folder

    def map_checkpoint(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        return {}, set(checkpoint.tensors)  # Transformers has loaded them

    def _pretrained(self, path: str, target: Target) -> nn.Module:
        if target.device.type == "meta":  # the shape alone, of a folder that must be here
            return random_model(read_config(user_path(path)), target.dtype, target.device)
        folder = draft_model_folder(path)
        model, ours = read_model(folder, target.dtype), read_tokenizer(folder).get_vocab()
        theirs = read_tokenizer(Path(target.path)).get_vocab() if target.path else ours
        self.contents = contents_of(folder)
        differing = [t for t, i in ours.items() if theirs.get(t, i) != i]
        if differing or len(ours.keys() & theirs.keys()) < 0.99 * max(len(ours), len(theirs)):
            raise SpecBenchError(
                f"the draft model {path} has another tokenizer than the target (vocabularies of {len(ours)} and "
                f"{len(theirs)}, {len(differing)} shared tokens under other ids); choose one of the target's family"
            )
        return model.requires_grad_(False)

    @property
    def generation(self) -> dict[str, Any]:
        """The assistant of Transformers' assisted generation, which drafts chains."""
        return {"assistant_model": self.lm.model} if isinstance(self.growth, Chain) else {}

    def capture(self, target: Target) -> None:
        if self.lm.window is None:  # whose masks need the positions of all levels
            super().capture(target)

    def for_sequences(self, count: int, lockstep: Any) -> list[Any]:
        if self.lm.window is not None:
            raise SpecBenchError(
                "batch: the draft model has sliding windows, behind which passes cannot be shared; set batch=1"
            )
        rows, run = super().for_sequences(count, lockstep), in_one_pass(self.lm.run)
        for row, cache in zip(rows, slots_of(self.cache, count, lockstep), strict=True):
            row.lm = copy.copy(self.lm)
            row.cache, row.lm.run = cache, partial(lockstep.call, run, DRAFT)
        return rows

    # Decoding -----------------------------------------------------------------------------------------------------------

    def reset(self, capacity: int) -> None:
        self.cache.begin(capacity + self.growth.rows)
        self.stable = 0  # cache rows of verified tokens

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Run the verified tokens that are not cached yet and the bonus, the next root, whose logits draft level 1."""
        self.cache.truncate(self.stable)
        self.logits = self._extend(*unread_tokens(states, bonus, self.stable), last_only=True)[-1]
        self.stable = self.cache.length

    def expand(self, tokens: Tensor, parent_rows: Tensor, depth: int, visible: Tensor) -> Tensor:
        return self._extend(tokens, *self.cache.draft_inputs(tokens, depth, visible, self.stable))

    def _extend(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, last_only: bool = False) -> Tensor:
        """Run N tokens behind the cache and keep their rows; logits [N, V]."""
        mask = None if mask is None else mask[None, None]
        states = self.lm.run(tokens[None], positions[None], mask, self.cache)[0]
        self.cache.keep()
        return self.target_logits(states[-1:] if last_only else states)

    def _logits(self, states: Tensor) -> Tensor:
        """The draft model's logits over the target's vocabulary. [N, D] -> [N, V]"""
        logits = self.lm.logits(states)
        extra = self.vocab_size - logits.shape[-1]  # models of a family pad their vocabularies differently
        return nn.functional.pad(logits, (0, extra), value=-torch.inf) if extra > 0 else logits[:, : self.vocab_size]

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens up to i predict f_i; see `DistillationLoss` for the objective."""
        if self.path is not None:
            raise SpecBenchError("drafter.path names a finished draft model; leave it out to train one")
        return DistillationLoss(batch, self.head).loss(self._states(batch), self.regression, self.classification)

    def _states(self, batch: Batch) -> Tensor:
        """The draft model's states of a batch's tokens. [B, T, D']"""
        return self.lm.run(batch.tokens, batch.positions, batch.causal_mask(), None)

    def drafts(self, batch: Batch, steps: int) -> Iterator[Pick]:
        """The same in every step: a draft model reads tokens alone."""
        yield from [likeliest_at(self._states(batch), self.target_logits)] * steps
