"""EAGLE-1 and EAGLE-2: drafting at the feature level (arXiv:2401.15077 and arXiv:2406.16858).

The draft model reads pairs (f_i, e(t_{i+1})): the target's post-norm state of a position with the embedding of the
token *after* it, and regresses the next state,

    f_hat_{i+1} = Layer(W_fc [e(t_{i+1}); f_i]),    p_hat(t_{i+2}) = softmax(LMHead(f_hat_{i+1}))

with a bias-carrying fully connected layer, one decoder layer *without* its input norm and without an output norm, and
the target's frozen embedding and LM head. While drafting, f_hat takes the place of the states not yet known.

Training (EAGLE, section 4.2): L = SmoothL1(f, f_hat) + 0.1 CE(p, p_hat), uniform noise on the input states.

Later draft passes read f_hat where a state is not known yet. `aligned` computes them for all positions of a text at once,
for HASS's training and for drafting chains from every position. The input states of pass j are

    pass 1   f^(1)_i = f_i                        the target's
    pass j   f^(j)_i = f_hat^(j-1)_i, detached    the drafter's own prediction of f_i, made by pass j - 1

and a query at position r attends to the target's states up to r - (j - 1), then to one state of each pass in between, and
to its own,

    keys of row r of pass 3      f^(1)_1 … f^(1)_{r-2}   f^(2)_{r-1}   f^(3)_r

always with RoPE at the key's own position. A sequence's first position has no prediction: it keeps the target's state.

EAGLE-1 decodes with a static tree, EAGLE-2 with a dynamic one: the same weights, another `growth`.

`inputs` selects what a pair holds, for the comparison of EAGLE's Figure 10: `shifted` (above), `unshifted` (f_i; t_i),
`feature` (f_i alone) or `token` (t_{i+1} alone). In the middle two the draft does not depend on the token sampled from f_i:
all children of a node expand alike. The paper gives fc to an input of two streams only: `fc: False` feeds the one stream of
`feature` or `token` to the layer as it is. A draft model that reads tokens alone has no use for predicted states: its arm
here is trained without regression.

`layers` and `intermediate_size` make the draft model deeper and wider (MoA, Table 5). Layers behind the first have their
input norms, as in the official code.

Deviations and choices: the position of a pair is that of its state (official code); the concatenation puts the
embedding first (official code); noise is U(-noise, noise) as in the paper, whatever the sequence length, unless
`noise_law` says otherwise; fc starts at random in both halves, so that embeddings, much smaller than states, contribute
little at first, unless `balanced_start` compensates (not in the paper).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafters.base import Noise, TrainedDrafter, llama_config, noisy, to_serving_config
from drafters.distillation import DistillationLoss
from drafters.layers import attention_shape, prefix_causal_mask, step_mask
from specbench.common.errors import SpecBenchError
from specbench.common.types import Ids, Layers, Name, Text, Units, Weight
from specbench.engine.batch import share_network
from specbench.engine.cache import KVCache
from specbench.engine.interface import Batch, Taps, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target
from specbench.engine.weights import Checkpoint, trained

OWN_TOKENS = 24  # of the target's own text, enough to tell the halves of fc apart and to measure states
Inputs = Literal["shifted", "unshifted", "feature", "token"]


class Eagle(TrainedDrafter):
    """One decoder layer over (state, next token) pairs.

    Args:
        growth: static tree for EAGLE-1, dynamic for EAGLE-2.
        regression, classification: weights of the two loss terms.
        noise: half-width of the uniform noise on input states while training; noise_law: see `base.noisy`.
        inputs: `shifted`, or an ablation: `unshifted`, `feature`, `token`.
        fc: False: a single stream (`feature`, `token`) enters the layer as it is.
        layers: decoder layers. intermediate_size: width of their MLPs, None: the target's.
        bias: the fully connected layer carries one (official code); vLLM serves heads without it only.
        balanced_start: scale the initial fc so that embeddings and states contribute alike.
    """

    token_norm: nn.Module
    state_norm: nn.Module
    last_norm: nn.Module

    batches = True
    observed = ("rows", "row_tokens")
    detached = True  # no gradient flows from a draft pass into the one before
    phased: tuple[str, ...] = ("regression", "classification", "noise")
    shape_options: tuple[str, ...] = ("inputs", "fc", "layers", "intermediate_size", "bias")
    formats: tuple[str, ...] = ("vllm", "sglang")

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        regression: Weight = 1.0,
        classification: Weight = 0.1,
        noise: Weight = 0.1,
        noise_law: Noise = "uniform",
        inputs: Inputs = "shifted",
        fc: bool = True,
        layers: Layers = 1,
        intermediate_size: Units | None = None,
        bias: bool = True,
        balanced_start: bool = False,
        vocabulary: Ids | None = None,
    ):
        super().__init__(name, growth, weights, vocabulary)
        self.inputs, self.uses_fc, self.bias, self.balanced_start = inputs, fc, bias, balanced_start
        self.layers, self.intermediate_size = layers, intermediate_size
        self.regression, self.classification = regression, classification
        self.noise, self.noise_law = noise, noise_law
        self.shape: dict[str, Any] = {}  # of a published head's attention, if it is not the target's

    def build(self, target: Target) -> None:
        config = self._config(target)
        self.share_ends(target)
        parts, width = 2 if "shifted" in self.inputs else 1, target.hidden_size
        if parts == 2 and not self.uses_fc:
            raise SpecBenchError(f"drafter.fc=false: drafter.inputs={self.inputs} has two streams; choose feature or token")
        self.fc = nn.Linear(parts * width, width, bias=self.bias)
        if not self.uses_fc:
            self.fc = nn.Identity()  # type: ignore[assignment]
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        self.deeper = nn.ModuleList([LlamaDecoderLayer(config, layer_idx=i) for i in range(1, self.layers)])
        self.rotary = LlamaRotaryEmbedding(config)
        for norm in ("token_norm", "state_norm", "last_norm"):
            setattr(self, norm, nn.Identity())  # EAGLE has none
        self.cache = KVCache(self.layers, 0)
        untrained = self.weights is None and self.checkpoint is None and target.device.type != "meta"
        if self.balanced_start and parts == 2 and untrained:
            tokens, states = _own_text(target)
            rms = [x.float().pow(2).mean().sqrt() for x in (states, self.embedding(tokens))]
            with torch.no_grad():  # the embedding's half, by how much larger states are
                self.fc.weight[:, :width] *= float(rms[0] / rms[1])

    def _config(self, target: Target) -> Any:  # a LlamaConfig
        return llama_config(target, self.layers, **({"intermediate_size": self.intermediate_size} | self.shape))

    # Published weights ---------------------------------------------------------------------------------------------------

    def infer_shape(self, checkpoint: Checkpoint) -> None:
        """Heads, rope and epsilon by the head's own configuration, if it has one: they may differ from the target's.

        Whether fc has a bias and how many key heads there are: by the tensors, since configurations are known to be wrong.
        """
        self.bias = "fc.bias" in checkpoint.tensors
        if "num_attention_heads" in checkpoint.config:
            options = {"rope_theta": 10000.0, **checkpoint.config}  # as the authors' code reads it
            options.pop("num_key_value_heads", None)
            self.shape = attention_shape("layers.0", checkpoint, options)

    def map_checkpoint(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """EAGLE's and HASS's files: `fc.*`, `layers.0.*` without an input norm, a frozen copy of the target's embedding."""
        tensors = checkpoint.tensors
        if "layers.0.input_layernorm.weight" in tensors:
            raise checkpoint.refuse("its layer has an input norm, which EAGLE's has not; it belongs to another method")
        own = {n: n.replace("layers.0.", "layer.") for n in tensors if n.startswith(("fc.", "layers.0."))}
        used = set(own)
        self.require_embedding(checkpoint)
        mapped = {mine: tensors[theirs] for theirs, mine in own.items()}
        for name, parameter in self.layer.named_parameters(prefix="layer"):
            if name.endswith("o_proj.bias"):  # Qwen2's attention has biases, this one not
                mapped.setdefault(name, torch.zeros(parameter.shape))
        return mapped, used | ({"embed_tokens.weight"} & tensors.keys())

    def require_embedding(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint with another embedding than the target's."""
        if (theirs := checkpoint.tensors.get("embed_tokens.weight")) is not None:
            checkpoint.require_shared("embedding", theirs, self.embedding.weight)

    def check(self, checkpoint: Checkpoint, target: Target) -> None:
        """The order of fc's halves, which have the same shape: the one whose predictions agree with the target's text."""
        tokens, states = _own_text(target)
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        text = Batch(tokens, states, everywhere, everywhere)
        best = target.logits(states[:, 1:]).argmax(-1)
        agree = []
        with torch.no_grad():
            for _ in range(2):  # as it is, then the other way round
                predicted = self.target_logits(self.predict(states[:, :-1], text)).argmax(-1)
                agree.append(int((predicted == best).sum()))
                self.fc.weight.copy_(torch.cat(self.fc.weight.chunk(2, 1)[::-1], 1))
        if agree[1] > agree[0] + OWN_TOKENS // 4:
            raise checkpoint.refuse(
                f"its fc takes (state, embedding) where EAGLE's takes (embedding, state): {agree[1]} against {agree[0]} of "
                f"{best.numel()} tokens agree the other way round; swap the halves of fc.weight"
            )

    @classmethod
    def export_obstacle(cls, server: str, options: Mapping[str, Any]) -> str | None:
        if (inputs := options.get("inputs", "shifted")) != "shifted":
            return f"drafter.inputs={inputs}: {server} serves (state, next token) pairs only"
        if (layers := options.get("layers", 1)) != 1:
            return f"drafter.layers={layers}: an exported head has one layer; leave it out"
        if server == "vllm" and options.get("bias", True):
            return (
                "vLLM's EAGLE has no fc.bias and would drop it silently; train without one (+drafter.bias=false) or use "
                "format=sglang"
            )
        return super().export_obstacle(server, options)

    def export_tensors(self, server: str, target: Target) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The official layout without embedding and head, which servers take from the target."""
        if reason := self.export_obstacle(server, vars(self)):
            raise SpecBenchError(reason)
        tensors = {n.replace("layer.", "layers.0.", 1): t for n, t in trained(self).items()}
        if server == "sglang":
            tensors.setdefault("fc.bias", torch.zeros(target.hidden_size))
        if (scale := float(getattr(target.embedding, "embed_scale", 1.0))) != 1.0:  # servers look up unscaled embeddings
            embedded, states = tensors["fc.weight"].chunk(2, 1)
            tensors["fc.weight"] = torch.cat([scale * embedded, states], 1)
        config = to_serving_config(self._config(target))
        kind = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}[server]
        return tensors, config | {"architectures": [kind], "tie_word_embeddings": False}

    def known_states(self, last: Tensor, hidden: Mapping[int, Tensor]) -> Tensor:
        """What pairs hold of the target's states: the last ones. last, and each layer's, [..., D] -> [..., D]"""
        return last

    def network(
        self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """f_hat of B x T pairs. states [B, T, D], tokens [B, T], positions [B, T], mask [B, 1, T, S] -> [B, T, D]"""
        embedded, states = self.token_norm(self.embedding(tokens).to(states)), self.state_norm(states)
        parts = {"feature": [states], "token": [embedded]}.get(self.inputs, [embedded, states])
        x = self.fc(torch.cat(parts, -1))
        rotary = self.rotary(x, positions)
        for layer in (self.layer, *self.deeper):
            x = layer(x, attention_mask=mask, past_key_values=cache, position_embeddings=rotary)
        return self.last_norm(x)

    def for_sequences(self, count: int, lockstep: Any) -> list[Any]:
        rows = super().for_sequences(count, lockstep)
        share_network(self, rows, lockstep)
        return rows

    # Decoding -----------------------------------------------------------------------------------------------------------

    def reset(self, capacity: int) -> None:
        self.cache.begin(capacity + self.growth.rows)
        self.stable = 0  # cache rows of pairs with a true state

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Append the pairs (f_i, t_{i+1}) of true states; the last one, with the bonus, drafts level 1."""
        self.cache.truncate(self.stable)
        following = torch.cat([states.tokens[1:], states.tokens.new_full((1,), bonus)])
        self.row_tokens = following[-1:]  # [1 + R] of the root, then of every node expanded in this cycle
        read = states.tokens if self.inputs == "unshifted" else following
        mask = prefix_causal_mask(self.stable, len(following), following.device)
        known = self.known_states(states.last, states.hidden)
        predicted = self._extend(known, read, states.positions, mask)
        self.stable = self.cache.length
        self.rows = predicted[-1:]  # [1 + R, D] f_hat of the root, then of every node expanded in this cycle

    def root_logits(self) -> Tensor:
        return self.target_logits(self.rows[0])

    def expand(self, tokens: Tensor, parent_rows: Tensor, depth: int, visible: Tensor) -> Tensor:
        read = tokens
        if self.inputs == "unshifted":
            read, self.row_tokens = self.row_tokens[parent_rows + 1], torch.cat([self.row_tokens, tokens])
        predicted = self._extend(
            self.rows[parent_rows + 1], read, *self.cache.draft_inputs(tokens, depth, visible, self.stable)
        )
        self.rows = torch.cat([self.rows, predicted])
        return self.target_logits(predicted)

    def _extend(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Run N pairs behind the cache and keep their rows. states [N, D], mask [N, S] -> [N, D]"""
        mask = None if mask is None else mask[None, None]
        predicted = self.network(states[None], tokens[None], positions[None], mask, self.cache)[0]
        self.cache.keep()
        return predicted

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Pairs i = (f_i, t_{i+1}) predict f_{i+1}; see `DistillationLoss` for the objective."""
        predicted = self.predict(self.noisy(batch), batch)
        teacher = DistillationLoss(following(batch), self.head, unbiased=self.lacks_a_token)
        return teacher.loss(predicted, self.regression, self.classification)

    @property
    def lacks_a_token(self) -> bool:
        """Do predictions depend on a token that the inputs do not have? Then see `DistillationLoss.unbiased`."""
        return self.inputs in ("unshifted", "feature")

    def predict(self, states: Tensor, batch: Batch) -> Tensor:
        """f_hat of all pairs of a batch with these states. [B, T - 1, D] -> [B, T - 1, D]"""
        return next(self.aligned(states, batch, steps=1))

    def aligned(self, states: Tensor, batch: Batch, steps: int) -> Iterator[Tensor]:
        """f_hat of all pairs, per draft pass. states [B, T - 1, D] -> `steps` times [B, T - 1, D]"""
        pairs = following(batch)
        tokens, positions = pairs.tokens, pairs.positions
        if self.inputs == "unshifted":
            tokens = batch.tokens[:, :-1]
        first = (positions == 0)[..., None]
        cache = DynamicCache() if steps > 1 else None  # concatenates the keys of all passes
        predicted = states
        for step in range(1, steps + 1):
            if step > 1:
                before = predicted[:, :-1].detach() if self.detached else predicted[:, :-1]
                states = torch.where(first, states, behind_one(before))
            mask = None  # causal
            if step > 1 or batch.starts is not None:
                mask = pairs.restrict_mask(step_mask(step, tokens.shape[1], tokens.device))[:, None]
            predicted = self.network(states, tokens, positions, mask, cache)
            yield predicted

    def noisy(self, batch: Batch) -> Tensor:
        """The pairs' states, with noise. [B, T - 1, D]"""
        return noisy(batch.states[:, :-1], self.noise, self.noise_law, batch)

    def draft_states(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Per draft pass of a chain f_hat [B, T, D], that of f_i at i; zeros at 0."""
        known = self.known_states(batch.states, batch.hidden)
        return map(behind_one, self.aligned(known[:, :-1], batch, steps))


def _own_text(target: Target) -> tuple[Tensor, Tensor]:
    """A little greedy text of the target's own: tokens [1, T] and states [1, T, D]."""
    tokens = target.greedy(target.stop_ids[:1] or (0,), OWN_TOKENS)
    return tokens, target.tapped(tokens, Taps())[0]


def behind_one(x: Tensor) -> Tensor:
    """Every position moved one on, zeros first. [B, T, D] -> [B, T + 1, D]"""
    return F.pad(x, (0, 0, 1, 0))


def following(batch: Batch, ahead: int = 1) -> Batch:
    """What pair i predicts: the batch so many positions on. A pair belongs to the sequence of its state."""
    same = batch.same_sequence(ahead)
    return Batch(
        tokens=batch.tokens[:, ahead:],
        states=batch.states[:, ahead:],
        valid=same,
        scored=batch.scored[:, ahead:] & same,
        vocabulary=batch.vocabulary,
        vocabulary_bias=batch.vocabulary_bias,
        starts=None if batch.starts is None else batch.starts[:, :-ahead],
    )
