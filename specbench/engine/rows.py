"""Many sequences at once, each at its own length: a pass feeds one token to every row. Knows no drafter and no corpus.

Slot = position in each row, as in `cache.KVCache`, so that nothing is ever padded or realigned, and rows may start new
sequences at any time. To spare short rows attention over the slots of long ones, rows stand in *groups*, longest first, and
attention runs group by group over as many slots as the group needs.

    group 0   row 0  ########################
              row 1  ######################        a row that ends is filled from the group below it,
    group 1   row 2  ############                  the last group's gap takes the new sequence
              row 3  #########
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specbench.engine.cache import CacheLayer
from specbench.engine.causal_lm import CausalLM

ATTENTION = "specbench_rows"
Group = tuple[int, int, int]  # first row, behind the last row, slots


class RowCache(Cache):
    """Keys and values of B rows of different lengths. Attributes: slots [B], where the next pass writes."""

    length = 0  # of no use here: the mask alone says which slots a token sees

    def __init__(self, layers: int, rows: int, capacity: int, dtype: torch.dtype):
        self.rows, self.capacity, self.dtype = rows, capacity, dtype
        self.storage: dict[int, tuple[Tensor, ...]] = {}  # layer -> keys and values [B, H, S, Dh], on that layer's device
        self.slots = torch.zeros(rows, dtype=torch.long)
        super().__init__(layers=[CacheLayer(self, i) for i in range(layers)])

    def visible(self, new: int) -> int:
        return self.capacity

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new rows [B, H, 1, Dh]; returns all slots [B, H, S, Dh], the unused masked."""
        if layer not in self.storage:  # zeros: masked slots have weight 0, but 0 * NaN is NaN
            shapes = ((*x.shape[:2], self.capacity, x.shape[-1]) for x in (key, value))
            self.storage[layer] = tuple(key.new_zeros(s, dtype=self.dtype) for s in shapes)
        keys, values = self.storage[layer]
        row, slot = torch.arange(self.rows, device=key.device), self.slots.to(key.device)
        keys[row, :, slot] = key[:, :, 0].to(self.dtype)
        values[row, :, slot] = value[:, :, 0].to(self.dtype)
        return keys, values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first slots over another row's."""
        for layer in self.storage.values():
            for part in layer:
                part[target, :, :length] = part[source, :, :length]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, groups: list[Group] | None = None, **options: Any
) -> tuple[Tensor, Any]:
    """Transformers' sdpa, a group of rows at a time. query [B, Hq, 1, Dh], key, value [B, H, S, Dh], mask [B, 1, 1, S]"""
    if groups is None:  # not a pass of `Rows`
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    # The query heads of one key head become queries of one head, so that its keys are read once.
    batch, heads = query.shape[0], key.shape[1]
    folded = query.to(key.dtype).view(batch, heads, -1, query.shape[-1])  # [B, H, Hq / H, Dh]
    scale = options.get("scaling")
    parts = [
        F.scaled_dot_product_attention(folded[a:b], key[a:b, :, :s], value[a:b, :, :s], mask[a:b, ..., :s], scale=scale)
        for a, b, s in groups
    ]
    return torch.cat(parts).to(query.dtype).view(batch, 1, -1, query.shape[-1]), None


AttentionInterface.register(ATTENTION, _attend)


class Rows:
    """B rows of a causal LM, each a sequence of its own.

    Args:
        model: run as it is. rows: B. capacity: slots a row. group: rows that attend together. dtype: of the cache.

    Attributes:
        lengths: tokens each row has taken.
    """

    def __init__(self, model: CausalLM, rows: int, capacity: int, group: int, dtype: torch.dtype | None = None):
        self.model, self.capacity, self.group = model, capacity, group
        self.cache = RowCache(model.layers, rows, capacity, dtype or model.head.weight.dtype)
        self.lengths = [0] * rows
        self.device = model.head.weight.device

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the model's attention runs group by group."""
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = before

    @torch.inference_mode()
    def step(self, tokens: list[int | None]) -> Tensor:
        """Feed every row its next token; only inside `running`. tokens: B ids, None for an idle row -> [B, D] states"""
        lengths = torch.tensor(self.lengths, device=self.device)
        self.cache.slots = lengths
        slots = max(self.lengths) + 1
        key_positions = torch.arange(slots, device=self.device).expand(len(tokens), slots)
        mask = (key_positions <= lengths[:, None])[:, None, None]  # [B, 1, 1, S]
        out = self.model.decoder(
            input_ids=torch.tensor([t or 0 for t in tokens], device=self.device)[:, None],
            position_ids=lengths[:, None],
            attention_mask=self.model.by_kind(mask, lengths[:, None], key_positions),
            past_key_values=self.cache,
            use_cache=True,
            groups=self._groups(),
        )
        self.lengths = [n + (t is not None) for n, t in zip(self.lengths, tokens, strict=True)]
        return out.last_hidden_state[:, 0].to(self.device)

    @torch.inference_mode()
    def end(self, row: int) -> tuple[int, list[tuple[int, int]]]:
        """A row's sequence is over: fill its place from the groups below, so that groups stay sorted by length.

        Returns:
            The row that is free now, with length 0, and the moves (from, to) that rows made, in order.
        """
        moves = []
        for first in range(self.group * (row // self.group + 1), len(self.lengths), self.group):
            below = range(first, min(first + self.group, len(self.lengths)))
            longest = max(below, key=self.lengths.__getitem__)
            if self.lengths[longest] == 0:
                break
            self.cache.move(longest, row, self.lengths[longest])
            self.lengths[row] = self.lengths[longest]
            moves.append((longest, row))
            row = longest
        self.lengths[row] = 0
        return row, moves

    def _groups(self) -> list[Group]:
        starts = range(0, len(self.lengths), self.group)
        return [(a, a + self.group, max(self.lengths[a : a + self.group]) + 1) for a in starts]
