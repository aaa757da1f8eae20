"""Any Hugging Face causal LM, used unmodified, run with explicit positions, 4-D masks and a cache of preallocated rows."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench.common.errors import SpecBenchError
from specbench.engine.attention import aligned_bias, kernels
from specbench.engine.backends import forwards
from specbench.engine.backends.fused_llama import Append, FusedLlama
from specbench.engine.cache import KVCache
from specbench.engine.interface import Sublayers
from specbench.engine.language_model import LanguageModel


class _Appender:
    """A function as the cache that a decoder layer updates."""

    def __init__(self, append: Append):
        self.append = append

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.append(layer, keys, values)


@contextmanager
def _skipping(layers: Iterable[Any], kept: Sublayers) -> Iterator[None]:
    """Inside, sublayers that are not kept add zeros to the residual stream."""

    def no_attention(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None

    skipped: list[tuple[nn.Module, Any]] = []
    for index, layer in enumerate(layers):
        skipped += [(layer.self_attn, no_attention)] * (index not in kept.attention)
        skipped += [(layer.mlp, torch.zeros_like)] * (index not in kept.mlp)
    for module, nothing in skipped:
        module.forward = nothing
    try:
        yield
    finally:
        for module, _ in skipped:
            del module.forward


class CausalLM(LanguageModel):
    """A language model that runs here."""

    def __init__(self, model: Any, path: Path | str | None = None):
        super().__init__(model, path)
        window = getattr(self.config, "sliding_window", None)
        self.kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
        self.window: int | None = window if window and self.kinds != {"full_attention"} else None
        self.fused: FusedLlama | None = None

    @property
    def kernels(self) -> str:
        return super().kernels if self.fused is None else self.fused.name

    @property
    def attention(self) -> dict[str, str]:
        if self.device.type != "cuda":
            return {}
        first: Any = self.decoder.layers[0].self_attn
        heads = first.k_proj.out_features // first.head_dim if hasattr(first, "k_proj") else 1
        return kernels(heads, first.head_dim, self.dtype, self.device)

    def optimize_for_inference(self, fixed_shapes: bool = False) -> None:
        """Make passes over few tokens fast, for decoding, by fused forward and packed products where these are faster.

        Call it once weights and device are final; not for training. Results stay the same but for rounding.

        fixed_shapes: by a forward that can be captured, also where its own passes are not.
        """
        self.fused = forwards.fastest(self, fixed_shapes or self.captures)
        self.packing.optimize([self.head] if self.fused else [self.decoder, self.head])

    def new_cache(self, capacity: int, only: Collection[int] | None = None) -> KVCache:
        """An empty cache on the devices of this model's layers. only: layers whose attention runs; None: all."""
        devices = [next(layer.parameters()).device for layer in self.decoder.layers]
        return KVCache(self.layers, capacity, devices if len(set(devices)) > 1 else None, only)

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """The decoder without the LM head: post-norm states [B, T, D].

        Args:
            tokens, positions: [B, T].
            mask: bool [B, 1, T, S], True where a query may attend; None: causal from an empty cache, or one token a
                sequence that attends to everything.
            cache: rows are appended to it, not yet kept; None: nothing is stored.
        """
        if self.fused is not None and not torch.is_grad_enabled():
            return self.fused(tokens, positions, mask, cache)
        out = self.decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._masks(tokens, positions, mask, cache),
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state

    def score(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As `run`, and the logits after every token, or after each sequence's last. -> [B, T, D], [B, T or 1, V]"""
        if self.fused is not None and not torch.is_grad_enabled():
            return self.fused.score(tokens, positions, mask, cache, last_only)
        states = self.run(tokens, positions, mask, cache)
        last = states.to(self.device)  # the head's, where a model is spread over several
        return last, self.logits(last[:, -1:] if last_only else last)

    def tail(self, hidden: Tensor, positions: Tensor, mask: Tensor, count: int, append: Append) -> Tensor:
        """The last `count` layers and the final norm, on any states that enter them. -> [B, T, D]

        Args:
            hidden: [B, T, D] what enters those layers. positions: [B, T]. mask: bool [B, 1, T, S].
            append: called per layer with its index and the new keys and values [B, H, T, Dh]; returns all S of each.
        """
        if getattr(self.config, "sliding_window", None):
            raise SpecBenchError(f"{self.config.model_type}: target layers with a sliding window cannot be run alone")
        if self.fused is not None and not torch.is_grad_enabled():
            return self.decoder.norm(self.fused.layers(self.layers - count, hidden, positions, mask, append))
        rotary = self.decoder.rotary_emb(hidden, positions)
        for layer in self.decoder.layers[-count:]:
            hidden = layer(
                hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=_Appender(append), use_cache=True
            )
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.decoder.norm(hidden)

    def subset(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, kept: Sublayers
    ) -> Tensor:
        """As `run`, through the kept sublayers alone. cache: one that stores at least the kept attention's rows."""
        if self.fused is not None and not torch.is_grad_enabled():
            return self.fused(tokens, positions, mask, cache, kept)
        with _skipping(self.decoder.layers, kept):
            return self.run(tokens, positions, mask, cache)

    def sublayers(self) -> list[tuple[nn.Module, nn.Module]]:
        """Attention and MLP of every layer. Raises `SpecBenchError` if a layer is not made of these two."""
        if not all(hasattr(layer, name) for layer in self.decoder.layers for name in ("self_attn", "mlp")):
            raise SpecBenchError(
                f"model type {self.config.model_type} has layers without `self_attn` and `mlp`; none of them can be skipped"
            )
        return [(layer.self_attn, layer.mlp) for layer in self.decoder.layers]

    def _masks(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor | dict[str, Tensor] | None:
        """The mask that each layer type needs, for a pass whose rows come behind the cache's; off the CPU as a bias."""
        masks = self._bool_masks(tokens, positions, mask, cache)
        if masks is None or tokens.device.type == "cpu":
            return masks
        if isinstance(masks, Tensor):
            return aligned_bias(masks, self.dtype)
        return {kind: aligned_bias(one, self.dtype) for kind, one in masks.items()}

    def _bool_masks(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor | dict[str, Tensor] | None:
        if self.window is None:
            return mask
        if mask is None:
            start, (batch, t) = cache.length if cache is not None else 0, tokens.shape
            causal = torch.ones(t, start + t, dtype=torch.bool, device=tokens.device).tril(start)
            mask = causal.expand(batch, 1, t, start + t)
        return self.by_kind(mask, positions, positions if cache is None else cache.key_positions(positions))

    def by_kind(self, mask: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Masks by layer type: sliding-window layers also hide keys a window back. [B, 1, T, S], [B, T], [B, S]"""
        if self.window is None:
            return mask
        near = mask & (positions[:, :, None] - key_positions[:, None, :] < self.window)[:, None]
        return near if len(self.kinds) == 1 else {"full_attention": mask, "sliding_attention": near}
