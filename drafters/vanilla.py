"""Vanilla speculative decoding: a small language model drafts a chain (Leviathan et al., arXiv:2211.17192).

The draft model knows nothing of the target but its tokenizer. It is either any causal LM of the Hugging Face kind
(`path`), or a small one trained here in the style of MoA's "Independent" drafter (arXiv:2410.03804, section 5.2): a few
Llama layers between the target's frozen embedding and LM head, whose state at position i regresses f_i,

    L = regression * SmoothL1(f_i, f_hat_i) + classification * CE(softmax(LMHead(f_i)), softmax(LMHead(f_hat_i)))

Greedy decoding drafts argmax chains; sampling draws x_i from q_i and accepts it with probability min(1, p_i / q_i)
(Algorithm S in its chain case), q being the processed distribution that is really sampled.

Deviations and choices: the classification term leads, since no state is fed back into drafting (MoA's paper has no
regression for this drafter at all, its code adds one; a tenth steadies the first steps). The draft model runs the
accepted tokens again instead of keeping their rows, which costs it nothing where they are few (one pass either way) and
keeps one rule for chains and trees.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from drafters.blocks import Teacher, TrainedDrafter, behind, llama_config
from specbench.engine.cache import KVCache
from specbench.engine.grow import Growth
from specbench.engine.interface import Batch, TargetStates
from specbench.engine.target import CausalLM, Target
from specbench.engine.weights import Checkpoint
from specbench.errors import SpecBenchError


class Vanilla(TrainedDrafter):
    """A draft language model with its own cache.

    Args:
        name: as tables show it.
        growth: a chain as in the paper; any tree works.
        weights: folder of weights trained here. path: a causal LM to draft with instead.
        layers, intermediate_size: shape of the model trained here.
        regression, classification: weights of its two loss terms.
    """

    def __init__(
        self,
        name: str,
        growth: Growth,
        weights: str | None = None,
        path: str | None = None,
        layers: int = 2,
        intermediate_size: int = 832,
        regression: float = 0.1,
        classification: float = 1.0,
    ):
        super().__init__(name, growth, None if path else weights)
        self.path, self.layers, self.intermediate_size = path, layers, intermediate_size
        self.regression, self.classification = regression, classification

    def build(self, target: Target) -> None:
        self.vocab_size = target.vocab_size
        if self.path is not None:
            self.lm = CausalLM(self._pretrained(self.path, target))
        else:
            changes: dict[str, Any] = {"intermediate_size": self.intermediate_size, "tie_word_embeddings": False}
            model = LlamaForCausalLM(llama_config(target, self.layers, **changes))
            model.set_input_embeddings(target.embedding)
            model.set_output_embeddings(target.head)
            self.lm = CausalLM(model)
        self.network, self.embedding, self.head = self.lm.decoder, self.lm.embedding, self.lm.head
        self.cache = KVCache(self.lm.layers, 0)

    def fit(self, checkpoint: Checkpoint) -> None:
        """A whole language model: as `path` says. Its special tokens do not matter, the target's are used."""
        self.path = checkpoint.folder

    def official(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        return {}, set(checkpoint.tensors)  # Transformers has loaded them

    def _pretrained(self, path: str, target: Target) -> nn.Module:
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype, attn_implementation="sdpa")
            ours = AutoTokenizer.from_pretrained(path).get_vocab()
        except (OSError, ValueError) as error:
            raise SpecBenchError(f"no draft model can be read from drafter.path={path}: {error}") from error
        theirs = AutoTokenizer.from_pretrained(target.path).get_vocab() if target.path else ours
        differing = [t for t, i in ours.items() if theirs.get(t, i) != i]
        if differing or len(ours.keys() & theirs.keys()) < 0.99 * max(len(ours), len(theirs)):
            raise SpecBenchError(
                f"the draft model {path} has another tokenizer than the target (vocabularies of {len(ours)} and "
                f"{len(theirs)}, {len(differing)} shared tokens under other ids); choose one of the target's family"
            )
        return model.requires_grad_(False)

    def compile_network(self, backend: str = "inductor") -> None:
        self.lm.run = torch.compile(self.lm.run, backend=backend, dynamic=True)  # type: ignore[method-assign]

    # Decoding -----------------------------------------------------------------------------------------------------------

    def reset(self, capacity: int) -> None:
        self.cache.begin(capacity + self.growth.rows)
        self.stable = 0  # cache rows of tokens that are verified

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Run what was verified and not seen yet, the bonus (the next root) last: its logits draft level 1."""
        self.cache.truncate(self.stable)
        first = int(self.stable > 0)  # the old root was already run when it was the bonus
        tokens = torch.cat([states.tokens[first:], states.tokens.new_full((1,), bonus)])
        mask = behind(self.stable, len(tokens), tokens.device)
        positions = torch.arange(self.stable, self.stable + len(tokens), device=tokens.device)
        self.logits = self._extend(tokens, positions, mask, last_only=True)[-1]
        self.stable = self.cache.length

    def root_logits(self) -> Tensor:
        return self.logits

    def expand(self, tokens: Tensor, parents: Tensor, depth: int, visible: Tensor) -> Tensor:
        prefix = visible.new_ones(tokens.shape[0], self.stable)
        positions = torch.full_like(tokens, self.stable + depth - 1)  # the root stands at stable - 1
        return self._extend(tokens, positions, torch.cat([prefix, visible], 1))

    def _extend(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, last_only: bool = False) -> Tensor:
        """Run N tokens behind the cache and keep their rows; logits [N, V] over the target's vocabulary."""
        mask = None if mask is None else mask[None, None]
        states = self.lm.run(tokens[None], positions[None], mask, self.cache)[0]
        self.cache.keep()
        logits = self.lm.logits(states[-1:] if last_only else states)
        extra = self.vocab_size - logits.shape[-1]  # models of a family pad their vocabularies differently
        return nn.functional.pad(logits, (0, extra), value=-torch.inf) if extra > 0 else logits[:, : self.vocab_size]

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens up to i predict f_i; see `Teacher` for the objective."""
        if self.path is not None:
            raise SpecBenchError("drafter.path names a finished draft model; leave it out to train one")
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        predicted = self.lm.run(batch.tokens, positions, None, None)
        return Teacher(batch, self.head).loss(predicted, self.regression, self.classification)
