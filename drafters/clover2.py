"""Clover-2: recurrent heads behind attention layers (arXiv:2408.00264; Clover: arXiv:2405.00263).

Two gates of one form let a state h hear the embedding e of a token, head of attention by head of attention:

    Gate(h, e) = h + cos(W_q norm(h), W_k e) W_v e

    g_1 … g_t = norm(Layers(Gate_1(h_i, e(t_{i+1})), i = 1 … t))     once a cycle; h_i: the target's *pre-norm* last states
    r_0 = g_t,                            f_hat_{t+1}   = norm'(W_0 r_0)                  head 0; g_t has heard the root
    r_i = Gate_2(r_{i-1}, e(t_{t+i+1})),  f_hat_{t+i+1} = norm'(W_1 [r_i; e(t_{t+i+1})])  heads 1, 2, …, sharing weights
    p_hat(t_{t+i+2}) = softmax(LMHead(f_hat_{t+i+1}))

Here `entry` is Gate_1, `gate` Gate_2, `first` W_0, `later` W_1, `prefix_norm` and `output_norm` are norm and norm'.
f_hat are post-norm states; head and embeddings (rows of the head) are the target's and frozen. Only r is kept of a node, so
heads are cheap, and a tree may be deeper than the `heads` that were trained. The tree is EAGLE-1's.

Training (section 3 and official code): L = sum_i 0.7^i [10 SmoothL1(f, f_hat) + CE(p, p_hat)] over five heads, true tokens
as inputs. The layers start as the target's last one, W_q, W_k and W_0 as I + U(0, 0.01), W_1 as that with zeros for I
under e, W_v as U(0, 0.01).

Deviations and choices: both norms start with one factor, as large as those of the target's final norm are: in the official
code norm' starts as that norm, behind which it would apply twice (at first a fifth of head 0's predictions would be the
target's, instead of half). One layer as in the paper's description (the official training script has two: `layers`); layers
start at random where the target's are not of Llama's kind (Gemma). For the default target, whose drafters are shipped in 10
MB each, the layer's MLP has 640 units instead of the target's 1536 (conf/drafter/clover2.yaml): 5.0 M numbers instead of
6.5 M, of which the gates take 2.0 M. RoPE is the target's; the official code takes 10000 whatever the target's base, and so
it is done with official weights. Embeddings may be the target's input embeddings
instead (`head_rows`; the official README names both), which a file decides by the copy that it holds. The official loss
divides by one position more than count. As there, head i at state t counts where state t + i + 1 does; `label_mask`, which
leaves out tokens that the target finds unlikely and is off there, is left out.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.base import TrainedDrafter, llama_config
from drafters.distillation import DistillationLoss
from drafters.eagle import following
from drafters.layers import PrefixLayers, start_flat_norm, start_layer
from specbench.common.errors import SpecBenchError
from specbench.common.types import Depth, Ids, Layers, Name, Text, Units, Weight
from specbench.engine.batch import DRAFT, by_row, share_network
from specbench.engine.interface import Batch, Taps, TargetStates
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target
from specbench.engine.weights import Checkpoint

PARTS = {  # official names of parts
    "layers": "prefix_layers",
    "clover_norm": "prefix_norm",
    "clover_head_norm": "output_norm",
    "clover_head_mlp": "first",
    "clover_head_mlp2": "later",
    "clover_head_mlp_rnn": "entry",
    "clover_head_mlp_rnn2": "gate",
}
EMBEDDING, HEAD = SHARED = ("clover_embed_tokens.weight", "lm_head.weight")  # copies of the target's
SPREAD = 0.01  # of initial values


class Gate(nn.Module):
    """Gate(h, e), see above. heads: of attention, into which both are cut."""

    def __init__(self, width: int, heads: int, eps: float):
        super().__init__()
        self.heads, self.eps = heads, eps
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        for layer, diagonal in ((self.q, width), (self.k, width), (self.v, 0)):
            start_near_identity(layer, diagonal)

    def forward(self, h: Tensor, e: Tensor) -> Tensor:
        """[..., D], [..., D] -> [..., D]"""
        normed = self.input_layernorm(h)
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (self.q(normed), self.k(e), self.v(e)))
        return h + (F.cosine_similarity(q, k, -1, self.eps)[..., None] * v).flatten(-2)


class Clover2(PrefixLayers, TrainedDrafter):
    """Attention layers and a recurrent head.

    Args:
        growth: EAGLE-1's static tree in the paper; any works.
        heads: levels of a draft that are trained. layers: decoder layers.
        head_rows: tokens are embedded as rows of the LM head; False: by the target's input embeddings.
        intermediate_size: width of their MLPs, None or wider: the target's; narrower ones start with its largest neurons.
        decay: weight of head i is decay^i. regression, classification: weights of the two loss terms.
    """

    batches = True
    observed = ("rows", "logits")
    phased: tuple[str, ...] = ("heads", "decay", "regression", "classification")
    shape_options = ("layers", "intermediate_size")
    networks = ("prefix", "network")

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        heads: Depth = 5,
        layers: Layers = 1,
        head_rows: bool = True,
        intermediate_size: Units | None = None,
        decay: Weight = 0.7,
        regression: Weight = 10.0,
        classification: Weight = 1.0,
        vocabulary: Ids | None = None,
    ):
        super().__init__(name, growth, weights, vocabulary)
        self.heads, self.layers, self.intermediate_size = heads, layers, intermediate_size
        self.head_rows, self.decay = head_rows, decay
        self.regression, self.classification = regression, classification

    def bind(self, target: Target) -> None:
        super().bind(target)
        begin, later = (self.entry, self.prefix_layers, self.first), (self.gate, self.later)
        sizes = [sum(p.numel() for part in parts for p in part.parameters()) for parts in (begin, later)]
        self.active_parameters -= min(sizes)  # a pass runs the one or the other

    def build(self, target: Target) -> None:
        width, heads = target.hidden_size, target.config.num_attention_heads
        if width % heads:
            sizes = f"states of {width}, {heads} heads, which do not divide them"
            raise SpecBenchError(f"drafter={self.name}: the target has {sizes}; use another drafter")
        self.share_ends(target)
        self.tap = target.layers - 1
        self.taps = Taps(hidden=(self.tap,), last=False)
        changes: dict[str, Any] = {}
        if self.intermediate_size is not None:
            changes["intermediate_size"] = min(self.intermediate_size, target.config.intermediate_size)
        if self.checkpoint is not None:
            changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        config = llama_config(target, self.layers, **changes)
        norm = target.decoder.norm
        self.build_prefix(config, self.layers, norm)
        for layer in self.prefix_layers if self.weights is None and self.checkpoint is None else ():
            start_layer(layer, target.decoder.layers[self.tap])
        self.entry, self.gate = (Gate(width, heads, config.rms_norm_eps) for _ in range(2))
        self.first, self.later = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.output_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        start_flat_norm(self.output_norm, norm)
        for linear in (self.first, self.later):
            start_near_identity(linear, width)

    # Published weights ---------------------------------------------------------------------------------------------------

    def infer_shape(self, checkpoint: Checkpoint) -> None:
        """Layers by the tensors; `num_hidden_layers` there is the target's."""
        numbers = [int(n.split(".")[1]) for n in checkpoint.tensors if n.startswith("layers.")]
        if not numbers or not any(n.startswith("clover_head_mlp2.") for n in checkpoint.tensors):
            raise checkpoint.refuse("no tensor is named like a Clover-2 head (clover_head_mlp2.weight, layers.0.*)")
        self.layers, self.intermediate_size = 1 + max(numbers), None

    def map_checkpoint(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """The official names, with frozen copies of the target's head."""
        named = {}
        for name in checkpoint.tensors:
            part, _, rest = name.partition(".")
            if part in PARTS:
                named[f"{PARTS[part]}.{rest}"] = name
        tensors, head = checkpoint.tensors, self.head.weight
        if HEAD in tensors:
            checkpoint.require_shared("LM head", tensors[HEAD], head)
        if EMBEDDING in tensors:
            self.head_rows = checkpoint.shares(tensors[EMBEDDING], head)
            if not self.head_rows:
                checkpoint.require_shared("embedding", tensors[EMBEDDING], self.embedding.weight)
        return {own: tensors[theirs] for own, theirs in named.items()}, {*named.values(), *SHARED}

    def embedded(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]"""
        return F.embedding(tokens, self.head.weight) if self.head_rows else self.embedding(tokens)

    def network(self, r: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """A head: r and f_hat, [..., D] each, from the r above and the token drafted there; None: head 0."""
        if tokens is None:
            return r, self.output_norm(self.first(r))
        e = self.embedded(tokens).to(r)
        r = self.gate(r, e)
        return r, self.output_norm(self.later(torch.cat([r, e], -1)))

    def for_sequences(self, count: int, lockstep: Any) -> list[Any]:
        rows = super().for_sequences(count, lockstep)
        share_network(self, rows, lockstep, "prefix")
        first, later = by_row(partial(self.network, tokens=None)), by_row(self.network)

        def network(r: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
            return lockstep.call(first, DRAFT, r) if tokens is None else lockstep.call(later, DRAFT, r, tokens)

        for row in rows:
            row.network = network
        return rows

    # Decoding -----------------------------------------------------------------------------------------------------------

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Run the layers over the verified states, each with the token after it; the last one drafts level 1."""
        h, tokens = states.hidden[self.tap], torch.cat([states.tokens[1:], states.tokens.new_full((1,), bonus)])
        prefix = self.last_prefix(self.entry(h, self.embedded(tokens).to(h)), states.positions)
        self.rows, predicted = self.network(prefix[None], None)  # [1 + R, D] r of the root, then of every expanded node
        self.logits = self.target_logits(predicted[0])

    def expand(self, tokens: Tensor, parent_rows: Tensor, depth: int, visible: Tensor) -> Tensor:
        r, predicted = self.network(self.rows[parent_rows + 1], tokens)
        self.rows = torch.cat([self.rows, r])
        return self.target_logits(predicted)

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The sum over heads; other values logged are head 0's."""
        total, logged = batch.states.new_zeros(()), dict[str, Tensor]()
        teacher = DistillationLoss(following(batch), self.head, uses=self.heads)
        for head, predicted in enumerate(self.predict(batch, self.heads)):
            reached = F.pad(following(batch, head + 1).scored, (head, 0))  # [B, T - 1] states that this head predicts
            weights, predicted = reached / reached.sum().clamp(min=1), F.pad(predicted, (0, 0, head, 0))
            metrics = teacher.loss(predicted, self.regression, self.classification, weights=weights)
            total, logged = total + self.decay**head * metrics["loss"], logged or metrics
        return logged | {"loss": total}

    def predict(self, batch: Batch, heads: int) -> Iterator[Tensor]:
        """f_hat by head i = 0, 1, …, of the state i + 1 positions on. [B, T - i - 1, D] each"""
        pairs, h = following(batch), batch.hidden[self.tap][:, :-1]
        x = self.entry(h, self.embedded(pairs.tokens).to(h))
        r = self.prefix(x, pairs.positions, pairs.causal_mask(), None)
        for head in range(min(heads, r.shape[1])):
            r, predicted = self.network(r[:, :-1] if head else r, pairs.tokens[:, head:] if head else None)
            yield predicted

    def draft_states(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Per draft pass of a chain f_hat [B, T, D], that of f_i at i; zeros where there is none."""
        for step, predicted in enumerate(self.predict(batch, steps), start=1):
            yield F.pad(predicted, (0, 0, step, 0))


@torch.no_grad()
def start_near_identity(linear: nn.Linear, diagonal: int) -> None:
    """U(0, 0.01), one more on the first entries of the diagonal, and no bias."""
    nn.init.uniform_(linear.weight, 0, SPREAD)
    linear.weight[:, :diagonal] += torch.eye(linear.out_features, diagonal, device=linear.weight.device)
    nn.init.zeros_(linear.bias)
