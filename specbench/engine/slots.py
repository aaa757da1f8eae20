"""One storage for the caches of several sequences, so that one pass can run behind all of them.

Sequence b is a `KVCache` like any other, whose tensors are views of row b. Slot = position in each of them, so rows of
different length need no padding: the mask alone says how far each of them goes.

             slot   0 1 2 3 4 5 6 7
    sequence 0      k k k k k n n .      k: kept, n: of this pass (with 2 tokens here, 1 in sequence 1)
    sequence 1      k k n . . . . .
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specbench.engine.cache import STEP, CacheLayer, KVCache


class Slots:
    """Caches of B sequences.

    Args:
        like: an empty cache with the layers that each of them stores.

    Attributes:
        sequences: their caches, also of those that are over. storage: device -> keys, values [L, B, H, C, Dh].
    """

    def __init__(self, like: KVCache, count: int):
        self.storage: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.like = like
        self.sequences = [_Slot(self, b, like) for b in range(count)]
        self.free: list[_Slot] = []  # of `sequences`, for `take`

    def take(self) -> KVCache:
        """The cache of a further sequence."""
        if not self.free:
            self.sequences.append(_Slot(self, len(self.sequences), self.like))
            return self.sequences[-1]
        self.free.sort(key=lambda cache: -cache.row)  # the first rows are used first: neighbours share a pass uncopied
        return self.free.pop()

    def give_back(self, cache: KVCache) -> None:
        """A sequence is over. The storage shrinks when all are."""
        assert isinstance(cache, _Slot) and cache.slots is self and cache not in self.free
        cache.truncate(0)
        cache.capacity = 0
        self.free.append(cache)
        if len(self.free) == len(self.sequences):
            self.storage, self.sequences, self.free = {}, [], []

    def leave(self, cache: KVCache) -> None:
        """A sequence is over while others go on: its row goes before their next pass, or each would copy their rows."""
        assert isinstance(cache, _Slot) and cache.slots is self and cache in self.sequences
        self.sequences.remove(cache)
        cache.storage = {}
        if not self.sequences:
            self.storage = {}

    def close_gaps(self) -> None:
        """Drop the rows of sequences that have left, all at once: that copies those of the others."""
        kept = [sequence.row for sequence in self.sequences]
        if kept == list(range(len(kept))) and all(len(kept) >= x.shape[1] for x, _ in self.storage.values()):
            return
        for device, stored in list(self.storage.items()):
            self.storage[device] = stored[0][:, kept], stored[1][:, kept]
        for row, sequence in enumerate(self.sequences):
            sequence.row = row
            self._give_row(sequence)

    def _give_row(self, sequence: "_Slot") -> None:
        """Views of its row become a sequence's cache."""
        row = slice(sequence.row, sequence.row + 1)
        sequence.storage = {device: (keys[:, row], values[:, row]) for device, (keys, values) in self.storage.items()}

    def reserve(self, end: int, device: torch.device, like: tuple[Tensor, Tensor], layers: int) -> None:
        """Make room up to slot `end` in every sequence. like: keys and values [1, H, N, Dh] of a layer there."""
        self.close_gaps()
        stored = self.storage.get(device)
        count, kept = (0, 0) if stored is None else (stored[0].shape[1], stored[0].shape[-2])
        if end <= kept and count == len(self.sequences):
            return
        rows = max(kept, -(-end // STEP) * STEP)
        grown = [x.new_zeros(layers, len(self.sequences), x.shape[1], rows, x.shape[3]) for x in like]
        for new, old in zip(grown, stored or (), strict=False):
            new[:, :count, :, :kept] = old
        self.storage[device] = grown[0], grown[1]
        for sequence in self.sequences:
            self._give_row(sequence)


class _Slot(KVCache):
    """The cache of one sequence."""

    def __init__(self, slots: Slots, index: int, like: KVCache):
        super().__init__(like.layer_count, 0, like.devices, like.index)
        self.slots, self.row = slots, index

    def begin(self, capacity: int) -> None:
        """Start a new sequence; the storage is that of all."""
        self.capacity = max(capacity, self.capacity)
        self.truncate(0)

    def _grow(self, end: int, key: Tensor, value: Tensor, layers: int) -> None:
        self.slots.reserve(end, key.device, (key, value), layers)


class SlotsOfPass(Cache):
    """The cache that one pass behind R of the sequences sees: the first N rows behind each are the pass's.

    Args:
        counts: tokens of each sequence in this pass; the longest decides how many columns it has.
    """

    length, empty = 0, False  # of no use here: the mask alone says which slots a token sees

    def __init__(self, caches: Sequence[KVCache], counts: Sequence[int]):
        assert all(isinstance(cache, _Slot) for cache in caches)
        self.caches, self.counts = caches, counts
        self.slots: Slots = caches[0].slots  # type: ignore[attr-defined]
        self.slots.close_gaps()
        rows: list[int] = [cache.row for cache in caches]  # type: ignore[attr-defined]
        neighbours = rows == list(range(rows[0], rows[0] + len(rows)))
        self.rows: slice | list[int] = slice(rows[0], rows[0] + len(rows)) if neighbours else rows  # a slice copies nothing
        end = max(cache.length for cache in caches) + max(counts)
        for device, (keys, values) in list(self.slots.storage.items()):
            self.slots.reserve(end, device, (keys[0, :1], values[0, :1]), len(keys))
        self.capacity = next(iter(self.slots.storage.values()))[0].shape[-2]
        super().__init__(layers=[CacheLayer(self, i) for i in range(caches[0].layer_count)])

    @property
    def storage(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        """Device -> keys, values [L, R, H, C, Dh]; a copy if sequences of the storage take no part."""
        return {d: (k[:, self.rows], v[:, self.rows]) for d, (k, v) in self.slots.storage.items()}

    def visible(self, new: int) -> int:
        return self.capacity

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new rows [R, H, N, Dh] behind each sequence; returns all slots [R, H, C, Dh]."""
        for i, (cache, count) in enumerate(zip(self.caches, self.counts, strict=True)):
            cache.append(layer, key[i : i + 1, :, :count], value[i : i + 1, :, :count])
        keys, values = self.slots.storage[key.device]
        at = self.caches[0].index[layer]
        return keys[at][self.rows], values[at][self.rows]

    def append_all(self, keys: Tensor, values: Tensor) -> None:
        """Write the new rows of all layers [L, R, H, N, Dh]."""
        for i, (cache, count) in enumerate(zip(self.caches, self.counts, strict=True)):
            cache.append_all(keys[:, i : i + 1, :, :count], values[:, i : i + 1, :, :count])

    def mask(self, masks: Sequence[Tensor | None], new: int) -> Tensor:
        """What each of N tokens attends to, by slot: [R, 1, N, C]. Tokens that only fill up see the first slot.

        masks: of each sequence, [1, 1, n, length + n], or None: causal.
        """
        device = next((mask.device for mask in masks if mask is not None), next(iter(self.slots.storage)))
        joined = torch.zeros(len(self.caches), 1, new, self.capacity, dtype=torch.bool, device=device)
        joined[..., 0] = True
        for row, cache, count, mask in zip(joined, self.caches, self.counts, masks, strict=True):
            end = cache.length + count
            ones = joined.new_ones(count, end)
            row[:, :count, :end] = ones.tril(cache.length) if mask is None else mask[0]
        return joined

    def split_mask(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """As `KVCache.split_mask`: [R, 1, N, C] -> the same without the pass's own slots, and those, [R, 1, N, N]."""
        lengths = torch.tensor([cache.length for cache in self.caches])[:, None]  # [R, 1]
        new = mask.shape[2]
        own = (lengths + torch.arange(new))[:, None, None].expand(-1, 1, new, -1)
        kept = torch.arange(self.capacity) < lengths  # [R, C]
        return mask & kept[:, None, None], mask.gather(3, own)
