"""Any unforked Hugging Face causal LM as embedding, decoder and head, run with explicit positions, masks and our cache.

Knows Transformers' internals, as `backends.fused_llama` does: 4-D masks and explicit positions pass straight through sdpa,
and a cache of preallocated rows stands in for the model's own.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench.common.errors import SpecBenchError
from specbench.engine.backends.fused_llama import FusedLlama, fused_forward
from specbench.engine.cache import KVCache
from specbench.engine.interface import Sublayers
from specbench.engine.language_model import LanguageModel


class _Appender:
    """What a decoder layer asks of a cache, answered by a function."""

    def __init__(self, append: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]):
        self.append = append

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.append(layer, keys, values)


@contextmanager
def _skipping(layers: Iterable[Any], kept: Sublayers) -> Iterator[None]:
    """Sublayers that are not kept add zeros to the residual stream meanwhile."""

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
        self.lean: FusedLlama | None = None

    def optimize_for_inference(self) -> None:
        """Make passes over few tokens fast, for decoding: a lean forward where one is known, fast products where they pay.

        Once weights and device are final, and not for training. What is computed stays the same but for rounding.
        """
        self.lean = self.lean or fused_forward(self)
        self.packing.optimize([self.head] if self.lean else [self.decoder, self.head])

    def new_cache(self, capacity: int, only: Collection[int] | None = None) -> KVCache:
        """An empty cache for this model, wherever its layers lie. only: layers whose attention runs; None: all."""
        devices = [next(layer.parameters()).device for layer in self.decoder.layers]
        return KVCache(self.layers, capacity, devices if len(set(devices)) > 1 else None, only)

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """The decoder alone, without the LM head.

        Args:
            tokens, positions: [B, T].
            mask: bool [B, 1, T, S], True where a query may look; None for plainly causal from an empty cache, or for
                one token a sequence that sees everything.
            cache: rows are appended to it, not yet kept; None for a pass that stores nothing.

        Returns:
            [B, T, D] post-norm states.
        """
        if self.lean is not None and not torch.is_grad_enabled():
            return self.lean(tokens, positions, mask, None if cache is None else cache.append)
        out = self.decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._masks(tokens, positions, mask, cache),
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state

    def tail(
        self,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor,
        count: int,
        append: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """The last `count` layers and the final norm, on states that need not be the model's own.

        Args:
            hidden: [B, T, D] what enters those layers. positions: [B, T]. mask: bool [B, 1, T, S].
            append: called per layer with its index and the new keys and values [B, H, T, Dh]; returns all S of each.

        Returns:
            [B, T, D] post-norm.
        """
        if getattr(self.config, "sliding_window", None):
            raise SpecBenchError(f"{self.config.model_type}: target layers with a sliding window cannot be run alone")
        if self.lean is not None and not torch.is_grad_enabled():
            return self.decoder.norm(self.lean.layers(self.layers - count, hidden, positions, mask, append))
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
        if self.lean is not None and not torch.is_grad_enabled():
            return self.lean(tokens, positions, mask, None if cache is None else cache.append, kept)
        with _skipping(self.decoder.layers, kept):
            return self.run(tokens, positions, mask, cache)

    def sublayers(self) -> list[tuple[nn.Module, nn.Module]]:
        """Attention and MLP of every layer.

        Raises:
            SpecBenchError: layers that are not made of these two.
        """
        found: list[tuple[Any, Any]] = [
            (getattr(layer, "self_attn", None), getattr(layer, "mlp", None)) for layer in self.decoder.layers
        ]
        if any(part is None for both in found for part in both):
            raise SpecBenchError(
                f"model type {self.config.model_type} has layers without `self_attn` and `mlp`; none of them can be skipped"
            )
        return found

    def _masks(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor | dict[str, Tensor] | None:
        """The mask each layer type needs, of a pass whose rows come behind a cache's."""
        if self.window is None:
            return mask
        start = cache.length if cache is not None else 0
        batch, t = tokens.shape
        if mask is None:
            device = tokens.device
            keys = torch.arange(start + t, device=device)
            mask = (keys[None, :] <= start + torch.arange(t, device=device)[:, None]).expand(batch, 1, t, start + t)
        past = torch.arange(start, device=tokens.device).expand(batch, start)  # slot = position
        return self.by_kind(mask, positions, torch.cat([past, positions], 1))

    def by_kind(self, mask: Tensor, positions: Tensor, of_keys: Tensor) -> Tensor | dict[str, Tensor]:
        """Sliding-window layers also lose the keys that lie a window behind. mask [B, 1, T, S], positions [B, T], [B, S]"""
        if self.window is None:
            return mask
        near = mask & (positions[:, :, None] - of_keys[:, None, :] < self.window)[:, None]
        return near if len(self.kinds) == 1 else {"full_attention": mask, "sliding_attention": near}
