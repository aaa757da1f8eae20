"""What trained drafters share: binding to a target, weights, growing a tree from `expand`, the distillation loss."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from specbench.engine import weights as stored
from specbench.engine.grow import Growth
from specbench.engine.interface import Batch, DraftTree, Sampler, Taps
from specbench.engine.target import Target
from specbench.errors import SpecBenchError


class TrainedDrafter(nn.Module):
    """An autoregressive drafter with weights of its own, trained for one target.

    A method fills in `build`, `reset`, `observe`, `root_logits`, `expand` and `loss`; `official` if its authors publish
    weights, and `fit` if these may have another shape than the default.

    Attributes:
        taps: what it reads from the target.
        growth: how its trees are grown.
        weights: folder of its weights, relative to the project; None leaves them at their initial values (training, tests).
        checkpoint: weights in their authors' layout instead, set before `bind`.
        provenance: where the loaded weights come from.
        compiled: names of the functions that `compile_network` compiles.
    """

    compiled: tuple[str, ...] = ("network",)

    taps = Taps()

    embedding: nn.Embedding  # shared with the target by `build`, like the head
    head: nn.Linear

    def __init__(self, name: str, growth: Growth, weights: str | None = None):
        super().__init__()
        self.name, self.growth, self.weights = name, growth, weights
        self.nodes, self.passes = growth.nodes, growth.depth
        self.checkpoint: stored.Checkpoint | None = None
        self.provenance: dict[str, Any] = {}

    def bind(self, target: Target) -> None:
        """Build the network for this target, share its frozen parts, load the weights.

        Raises:
            SpecBenchError: weights that are missing, damaged, or made for another target or network.
        """
        if self.checkpoint is not None:
            self.fit(self.checkpoint)
        self.build(target)
        self.to(target.device, target.dtype)
        looked_up = sum(p.numel() for p in self.embedding.parameters())
        self.active_parameters = sum(p.numel() for p in self.parameters()) - looked_up
        if self.head is self.embedding or self.head.weight is self.embedding.weight:
            self.active_parameters += self.head.weight.numel()  # tied: counted once, looked up and multiplied
        if self.checkpoint is not None:
            named, used = self.official(self.checkpoint, target)
            stored.adopt(stored.trained(self), named, self.checkpoint, used)
            self.check(self.checkpoint, target)
            self.provenance = {"checkpoint": self.checkpoint.place, "sha256": dict(self.checkpoint.digest)}
        elif self.weights is not None:
            self.provenance = stored.load(self, stored.PROJECT / self.weights, target.fingerprint())

    def build(self, target: Target) -> None:
        """Create the network. What is shared with the target stays frozen and is not saved."""
        raise TypeError(f"{type(self).__name__} builds no network")

    def fit(self, checkpoint: stored.Checkpoint) -> None:
        """Take over what a published checkpoint says of the network's shape, before `build`."""

    def official(self, checkpoint: stored.Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """A published checkpoint's tensors under this drafter's names, and the names there that were understood.

        Raises:
            SpecBenchError: a layout that this network cannot take, with the reason.
        """
        raise checkpoint.refuse(f"no published layout is known for {type(self).__name__}")

    def check(self, checkpoint: stored.Checkpoint, target: Target) -> None:
        """Refuse what names and shapes cannot tell apart but one look at the target's own text can."""

    def publish(self, server: str, target: Target) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and `config.json` of this drafter as a server (`vllm`, `sglang`) reads them.

        Raises:
            SpecBenchError: the server has no place for this network, with the reason.
        """
        raise SpecBenchError(
            f"drafter={self.name} cannot be exported: {server} has no model of {type(self).__name__}'s kind"
        )

    def compile_network(self, backend: str = "inductor") -> None:
        """Compile what runs at every level; lengths stay dynamic, since every level has its own."""
        for name in self.compiled:
            setattr(self, name, torch.compile(getattr(self, name), backend=backend, dynamic=True))

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The training objective of the method's paper: `loss`, and what else is worth logging."""
        raise TypeError(f"{type(self).__name__} has no training objective")

    def calibrate(self, sequences: list[tuple[Tensor, Tensor, int]]) -> Any:
        """What a method measures on held-out answers when training is over; kept with the weights, None for nothing.

        sequences: (tokens [T], states [T, D], index of the first answer token).
        """
        return None

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        return self.growth.grow(self, root, sampler, generator)  # type: ignore[arg-type]


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
    config._attn_implementation = "sdpa"
    return config


def served(config: Any) -> dict[str, Any]:
    """A Llama configuration as servers read it: those that know older Transformers ask for `rope_theta` by itself."""
    said: dict[str, Any] = config.to_dict()
    rope = dict(config.rope_parameters)
    said["rope_theta"] = rope.pop("rope_theta")
    said["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    return said


class Teacher:
    """The target where a batch is scored, and EAGLE's objective against it, also Beagle's, HASS's and MoA's.

    loss = regression * SmoothL1(f, f_hat) + classification * CE(softmax(head(f)), softmax(head(f_hat)))
           + topk_weight * TopK, HASS's cross-entropy over the target's `topk` likeliest ids alone, not renormalised

    With `batch.vocabulary` both softmaxes run over those ids alone (not in any paper: it saves most of a small machine's
    training time, and the last steps should run without it).
    """

    def __init__(self, batch: Batch, head: nn.Linear):
        self.scored, self.states = batch.scored, batch.states[batch.scored]  # [M, D]
        self.rows = head.weight if batch.vocabulary is None else head.weight[batch.vocabulary]
        with torch.no_grad():
            logits = F.linear(self.states, self.rows).float()
            self.best, self.p = logits.argmax(-1), logits.softmax(-1)

    def loss(
        self, predicted: Tensor, regression: float, classification: float, topk: int = 0, topk_weight: float = 0.0
    ) -> dict[str, Tensor]:
        """predicted: [B, T, D] f_hat of the batch's states -> loss, its two parts, and how often the argmax agrees."""
        guess = predicted[self.scored]  # [M, D]
        log_q = F.linear(guess, self.rows).float().log_softmax(-1)
        cross_entropy = -(self.p * log_q).sum(-1).mean()
        smooth_l1 = F.smooth_l1_loss(guess.float(), self.states.float())
        loss = regression * smooth_l1 + classification * cross_entropy
        if topk_weight:
            mass, ids = self.p.topk(topk, dim=-1)
            loss = loss - topk_weight * (mass * log_q.gather(-1, ids)).sum(-1).mean()
        return {
            "loss": loss,
            "regression": smooth_l1.detach(),
            "classification": cross_entropy.detach(),
            "agreement": (log_q.argmax(-1) == self.best).float().mean(),
        }


def behind(prefix: int, n: int, device: torch.device) -> Tensor | None:
    """[N, prefix + N] bool: N tokens see a prefix and, causally, each other; None where attention does just that alone."""
    if n == 1 or not prefix:
        return None
    return torch.ones(n, prefix + n, dtype=torch.bool, device=device).tril(prefix)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Cross-attention; a query without a visible key gets nothing, not a mean over what it must not see.

    Args:
        q: [B, Hq, T, Dh]. keys, values: [B, H, S, Dh]. mask: [B or 1, T, S] bool, None for all.

    Returns:
        [B, T, Hq * Dh].
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True).transpose(1, 2).flatten(2)
    blind = ~mask.any(-1, keepdim=True)  # [B or 1, T, 1]
    found = F.scaled_dot_product_attention(q, keys, values, attn_mask=(mask | blind)[:, None], enable_gqa=True)
    return found.transpose(1, 2).flatten(2).masked_fill(blind, 0.0)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, H * Dh] -> [B, H, T, Dh]"""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def rotate(x: Tensor, rotary: nn.Module, positions: Tensor) -> Tensor:
    """Rotary position embedding of queries or keys. x [B, H, T, Dh], positions [B, T]"""
    cos, sin = rotary(x, positions)
    return apply_rotary_pos_emb(x, x, cos, sin)[0]


def window_mask(length: int, window: int, offset: int, device: torch.device | None = None) -> Tensor:
    """[T, T] bool: position i sees states before its window; before the first window, states before itself.

    length 6, window 2, offset 1      . . . . . .
                                      x . . . . .
                                      x . . . . .
                                      x x x . . .
                                      x x x . . .
                                      x x x x x .
    """
    row = torch.arange(length, device=device)
    start = torch.where(row < offset, row, row - (row - offset) % window)
    return torch.arange(length, device=device)[None, :] < start[:, None]
