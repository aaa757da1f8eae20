"""EAGLE-3: states of several layers, no regression, training on the drafter's own outputs (arXiv:2503.01840).

The draft model reads pairs (g_i, e(t_{i+1})), where g_i comes from three layers of the target instead of its last state,

    g_i = W_fc [l_i; m_i; h_i]                                       l, m, h: a low, a middle and a high layer
    a_{i+1} = Layer([norm(e(t_{i+1})); norm(g_i)]; residual g_i)     queries, keys and values read both halves
    p_hat(t_{i+2}) = softmax(W norm(a_{i+1}))                        W: a head of its own, over a draft vocabulary

While drafting, a takes the place of g as it is: no fc, no norm. The layers are those that the official code taps, the
*inputs* of layers 2, L//2 and L - 3 (from 0), which are the outputs of layers 1, L//2 - 1 and L - 4.

Training-time test: n passes over a text (7 in the official code), pass s = 0 … n - 1 reading the outputs of the one before,
with gradients through all of them. Which states and keys a pass sees is HASS's alignment, see `Eagle.aligned`: the official
code counts rows from a chain's root and shifts tokens, here rows stay where their tokens are. The loss is

    L = sum_s beta^s mean over i of  - sum over the draft vocabulary of p'(x) log p_hat_s(x),    beta = 0.8

p' being the target's probabilities restricted to the draft vocabulary and renormalised. Positions whose likeliest id of the
target is not in it add nothing. Decoding is EAGLE-2's.

EAGLE-3.1 as published by its implementations (SpecForge, speculators; no paper): `fc_norm`, a norm on each of the three
states before fc; `norm_output`, the output goes through the head's norm before it is fed back.

The draft vocabulary is the first `draft_vocabulary` ids of the target's list of frequent ids, `specbench.engine.vocabulary`
(official code: the most frequent ids of the training answers). The list's SHA-256 is kept with trained weights, and weights
are refused beside another list. Where the target is sampled, q is zero for all other ids.

Published heads: the official layout (`midlayer.*`, `d2t` with offsets: id in the target = index + d2t[index]), which
SpecForge writes, too; and that of speculators (`layers.0.*`, its `transformer_layer_config`, `norm_before_residual`).

Deviations and choices: for the default target, whose drafters are shipped in 10 MB each, the head is the target's own,
frozen (`own_head=false`), as in EAGLE-1 and 2, and the MLP has 1472 units instead of 1536 (conf/drafter/eagle3.yaml). A
head of its own with 8192 ids would be 9.4 MB; with 4096 ids, 90% of the tokens of the target's answers instead of 95%,
it would leave the MLP 112 units. The loss is the mean over scored positions (official code: over all of the batch,
padding and prompts included, which is a constant factor for a given batch); the head starts as the target's rows, not at
random; in targets of fewer than six layers the tapped layers are cut to those there are; no noise,
as in the official code; a loss that `train.settings` confines runs over those of its ids that are in the draft vocabulary,
and there positions whose likeliest id is outside of it count as well.
`norm_output` of a published configuration is read as servers read it (SpecForge's own training feeds back the output
without a norm all the same).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from drafters.base import llama_config, to_serving_config
from drafters.distillation import DistillationLoss, chunk_of, probabilities
from drafters.eagle import Eagle, following
from drafters.layers import attention_shape
from specbench.common.errors import SpecBenchError
from specbench.common.types import Depth, Few, Ids, Name, Text, Units, Weight
from specbench.engine import vocabulary as vocabularies
from specbench.engine.cache import KVCache
from specbench.engine.interface import Batch, Taps
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target
from specbench.engine.weights import Checkpoint, trained

Tapped = Annotated[list[Few], Field(min_length=1, max_length=16)]
OPTION = "drafter.draft_vocabulary"


class Eagle3(Eagle):
    """One decoder layer over (states of several layers, next token) pairs, and a head of its own.

    Args:
        draft_vocabulary: ids of its head, the target's most frequent ones; None, or no fewer than the target has: all.
        own_head: train the head; else it is the target's, which is neither trained nor stored.
        tapped: layers whose outputs it reads, from 0; None: the official ones, see `tapped_layers`.
        fc_norm: a norm on each of their states. norm_output: the output is fed back through the head's norm.
        steps: passes of the training-time test. beta: weight of pass s is beta^s.
        intermediate_size: width of its MLP, None: the target's.
        vocabulary: while drafting, confine a head over all ids to so many.
    """

    detached = False
    phased: tuple[str, ...] = ("steps", "beta")
    shape_options = ("draft_vocabulary", "own_head", "tapped", "fc_norm", "norm_output", "intermediate_size")
    served_as = "eagle3"

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        draft_vocabulary: Ids | None = None,
        own_head: bool = True,
        tapped: Tapped | None = None,
        fc_norm: bool = False,
        norm_output: bool = False,
        steps: Depth = 7,
        beta: Weight = 0.8,
        intermediate_size: Units | None = None,
        vocabulary: Ids | None = None,
    ):
        super().__init__(
            name, growth, weights, noise=0.0, bias=False, intermediate_size=intermediate_size, vocabulary=vocabulary
        )
        self.draft_vocabulary, self.own_head, self.tapped = draft_vocabulary, own_head, tapped
        self.uses_fc_norm, self.norm_output, self.steps, self.beta = fc_norm, norm_output, steps, beta
        self.norm_before_residual = False  # of published heads: the residual stream begins behind the norm of the state
        self.shape: dict[str, Any] = {}  # of its layer, where a published head differs from the target

    def build(self, target: Target) -> None:
        """A map of the tapped states, one layer over (embedding, that), a norm, and a head over the draft ids."""
        config, width = self._config(target), target.hidden_size
        self.read = tuple(self.tapped or tapped_layers(target.layers))
        if beyond := [i for i in self.read if i >= target.layers]:
            raise SpecBenchError(f"drafter.tapped: there is no layer {beyond[0]}; the target has {target.layers}, from 0")
        self.taps = Taps(hidden=tuple(dict.fromkeys(self.read)), last=False)
        count = min(self.draft_vocabulary or target.vocab_size, target.vocab_size)
        self.embedding = target.embedding
        self.shares_head = not self.own_head and count == target.vocab_size and self.checkpoint is None
        self.lm_head = target.draft_head if self.shares_head else nn.Linear(width, count, bias=False)
        self.head = self.lm_head.requires_grad_(self.own_head)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        norms = len(self.read) * self.uses_fc_norm
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(norms))
        self.fc = nn.Linear(len(self.read) * width, width, bias=False)
        self.layer = layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        for part in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, part, nn.Linear(2 * width, getattr(layer.self_attn, part).out_features, bias=False))
        self.rotary, self.cache = LlamaRotaryEmbedding(config), KVCache(1, 0)
        self.target, self.target_logits = target, self.draft_logits
        if target.device.type == "meta" or self.checkpoint is not None:
            return
        listed = None if count == target.vocab_size else self.draft_from(target, count, OPTION)
        with torch.no_grad():
            if not self.shares_head and (self.weights is None or not self.own_head):
                self.lm_head.weight.copy_(target.head.weight if listed is None else target.head.weight[listed.ids])

    def _config(self, target: Target) -> Any:  # a LlamaConfig
        own = {"attention_bias": False, "intermediate_size": self.intermediate_size}
        return llama_config(target, layers=1, **(own | self.shape))

    def _narrow(self, target: Target, count: int) -> None:
        if self.listed is not None:
            raise SpecBenchError(
                f"drafter.vocabulary={count}: its head has {self.lm_head.out_features} ids only; leave it out"
            )
        ids = self.draft_from(target, count).ids
        self.active_parameters -= (self.lm_head.out_features - count) * self.lm_head.in_features
        self.lm_head = self.head = vocabularies.slice_head(self.lm_head, ids)

    # Published weights ---------------------------------------------------------------------------------------------------

    def infer_shape(self, checkpoint: Checkpoint) -> None:
        """Layer, head and norms by the tensors; heads, taps and switches by the configuration."""
        tensors, settings = checkpoint.tensors, checkpoint.config
        if "layers.1.mlp.gate_proj.weight" in tensors or "input_norm.weight" in tensors:
            raise checkpoint.refuse("it has several layers or one norm of all states together (input_norm), unlike EAGLE-3")
        if (head := tensors.get("lm_head.weight")) is None:
            raise checkpoint.refuse("it has no lm_head.weight: EAGLE-3 has a head of its own; it belongs to another method")
        self.draft_vocabulary, self.own_head = len(head), True
        self.uses_fc_norm = "fc_norm.0.weight" in tensors
        self.norm_output = bool(settings.get("norm_output", False))
        self.norm_before_residual = bool(settings.get("norm_before_residual", False))
        self.tapped = published_taps(settings)
        of_layer = {"rope_theta": 10000.0, **(settings.get("transformer_layer_config") or settings)}
        self.shape = attention_shape(_prefix(checkpoint), checkpoint, of_layer) | {"attention_bias": False}

    def map_checkpoint(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """All by their names but the layer; the embedding must be the target's."""
        tensors, prefix = checkpoint.tensors, f"{_prefix(checkpoint)}."
        self.listed = head_ids(checkpoint, len(tensors["lm_head.weight"]), target)
        used = {n for n in ("d2t", "t2d", "embed_tokens.weight") if n in tensors}
        self.require_embedding(checkpoint)
        own = trained(self).keys()
        named = {name: theirs for theirs in tensors if (name := theirs.replace(prefix, "layer.", 1)) in own}
        return {mine: tensors[theirs] for mine, theirs in named.items()}, used | set(named.values())

    def check(self, checkpoint: Checkpoint, target: Target) -> None:
        """The halves of its layer's input have norms of their own names, so their order is known."""

    @classmethod
    def export_obstacle(cls, server: str, options: Mapping[str, Any]) -> str | None:
        for option in ("fc_norm", "norm_output", "tapped"):
            if options.get(option):
                return f"drafter.{option}: what is exported is plain EAGLE-3, which all versions of {server} load"
        return None if server in cls.formats else super().export_obstacle(server, options)

    def export_tensors(self, server: str, target: Target) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The official layout without the embedding, which servers take from the target."""
        if reason := self.export_obstacle(server, vars(self) | {"fc_norm": self.uses_fc_norm}):
            raise SpecBenchError(reason)
        tensors = {n.replace("layer.", "midlayer.", 1): t for n, t in trained(self).items()}
        tensors["lm_head.weight"] = self.lm_head.weight.detach()
        if self.listed is not None:
            ids = self.listed.ids
            tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
            tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)
        own = {"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False}
        return tensors, to_serving_config(self._config(target)) | own | {"draft_vocab_size": self.lm_head.out_features}

    # Network --------------------------------------------------------------------------------------------------------------

    def known_states(self, last: Tensor, hidden: Mapping[int, Tensor]) -> Tensor:
        """g of the target's states. hidden: layer -> [..., D] -> [..., D]"""
        states = [hidden[i] for i in self.read]
        if self.uses_fc_norm:
            states = [norm(x) for norm, x in zip(self.fc_norm, states, strict=True)]
        return self.fc(torch.cat(states, -1))

    def network(
        self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """a of B x T pairs, to be fed back. states [B, T, D], tokens [B, T], mask [B, 1, T, S] -> [B, T, D]"""
        layer: Any = self.layer
        known = layer.hidden_norm(states)
        x = torch.cat([layer.input_layernorm(self.embedding(tokens).to(states)), known], -1)
        attended, _ = layer.self_attn(
            x, position_embeddings=self.rotary(x, positions), attention_mask=mask, past_key_values=cache
        )
        y = (known if self.norm_before_residual else states) + attended
        y = y + layer.mlp(layer.post_attention_layernorm(y))
        return self.norm(y) if self.norm_output else y

    def draft_logits(self, states: Tensor) -> Tensor:
        """Over the draft vocabulary, of what the network returns. [..., D] -> [..., v]"""
        return self.lm_head(self._normed(states))

    def _normed(self, states: Tensor) -> Tensor:
        return states if self.norm_output else self.norm(states)

    # Training -------------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The sum over passes; other values are the first one's, means over the positions that add to the loss.

        covered: the share of such positions.
        """
        truth = following(batch)
        teacher = _DraftVocabulary(truth, self)
        states = self.known_states(batch.states, batch.hidden)[:, :-1]
        count, weight, losses, shown = max(1, int(truth.scored.sum())), 1.0, [], dict[str, Tensor]()
        for step, predicted in enumerate(self.aligned(states, batch, self.steps)):
            reached = teacher.covered & (truth.positions >= step)  # earlier rows of a sequence have no pass before this one
            metrics = teacher.loss(
                self._normed(predicted), 0.0, 1.0, weights=weight / count * reached, logged=teacher.covered
            )
            shown = shown or {name: metrics[name] for name in ("classification", "agreement")}
            losses.append(metrics["loss"])
            weight *= self.beta
        return {"loss": torch.stack(losses).sum(), **shown, "covered": teacher.covered.float().sum() / count}


class _DraftVocabulary(DistillationLoss):
    """The target's probabilities over the draft vocabulary, or over those of its ids that a confined loss names.

    Attributes:
        covered: [B, T] scored positions whose likeliest id of the target is in the draft vocabulary; all that are scored in
            a confined loss, which leaves the other ids' logits out.
    """

    def __init__(self, truth: Batch, drafter: Eagle3):
        row_of = _rows(drafter.listed, drafter.lm_head)
        ids = None if truth.vocabulary is None else truth.vocabulary[row_of[truth.vocabulary] >= 0]
        super().__init__(replace(truth, vocabulary=None if ids is None else row_of[ids]), drafter.lm_head)
        self.covered = truth.scored
        if ids is None:
            self._cover(drafter.target, drafter.listed, row_of)
            return
        logits_of = vocabularies.Head(drafter.target, ids)
        with torch.no_grad():
            self.known = [probabilities(logits_of(states)) for states in self.states.split(self.chunk)]

    @torch.no_grad()
    def _cover(self, target: Target, listed: vocabularies.DraftVocabulary | None, row_of: Tensor) -> None:
        """Take the draft vocabulary's of all logits, and note whose likeliest id is in it."""
        covered = []
        self.chunk = chunk_of(len(self.states), len(row_of), self.states.device)
        for states in self.states.split(self.chunk):
            logits = target.logits(states)
            covered.append(row_of[logits.argmax(-1)] >= 0)
            self.known.append(probabilities(logits if listed is None else logits[:, listed.ids]))
        self.covered = self.covered.masked_scatter(self.covered, torch.cat(covered)[: self.count])


def _rows(listed: vocabularies.DraftVocabulary | None, head: nn.Linear) -> Tensor:
    """[V] an id's row of the head, -1 for one outside of the draft vocabulary."""
    if listed is None:
        return torch.arange(head.out_features, device=head.weight.device)
    return vocabularies.places(listed.ids, listed.size)


def tapped_layers(layers: int) -> list[int]:
    """The layers, from 0, whose outputs the official code taps in a target of so many, in rising order."""
    return sorted(min(max(i, 0), layers - 1) for i in (1, layers // 2 - 1, layers - 4))


def published_taps(settings: Mapping[str, Any]) -> list[int] | None:
    """The layers whose outputs a published head reads; None: the official ones.

    SGLang's `eagle_config` names layers by their outputs; speculators and vLLM name the layers whose *inputs* are read.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    if outputs := (settings.get("eagle_config") or {}).get(key):
        return list(outputs)
    return [i - 1 for i in settings[key]] if settings.get(key) else None


def head_ids(checkpoint: Checkpoint, rows: int, target: Target) -> vocabularies.DraftVocabulary | None:
    """The ids of a published head's rows, from its offsets; None: all. Refuses maps that are not this head's."""
    offsets, mask = (checkpoint.tensors.get(n) for n in ("d2t", "t2d"))
    size = target.vocab_size
    if offsets is None:
        if rows != size:
            raise checkpoint.refuse(f"its head has {rows} ids, the target {size}, and no d2t says which ones they are")
        return None
    if offsets.shape != (rows,):
        raise checkpoint.refuse(f"d2t has the shape {list(offsets.shape)} and its head {rows} ids: they are of two heads")
    ids = offsets.long() + torch.arange(rows)
    if len(ids.unique()) < rows or int(ids.min()) < 0 or int(ids.max()) >= size:
        raise checkpoint.refuse(f"d2t does not map {rows} ids to as many of the target's {size}")
    if mask is not None and (len(mask) != size or not torch.equal(mask.nonzero()[:, 0], ids.sort().values)):
        raise checkpoint.refuse("t2d and d2t name different ids: they are of two heads")
    return None if torch.equal(ids, torch.arange(size)) else _vocabulary(ids, target)


def _vocabulary(ids: Tensor, target: Target) -> vocabularies.DraftVocabulary:
    return vocabularies.DraftVocabulary(ids.to(target.device), target.vocab_size, vocabularies.digest_of(ids))


def _prefix(checkpoint: Checkpoint) -> str:
    return "layers.0" if any(n.startswith("layers.0.") for n in checkpoint.tensors) else "midlayer"
