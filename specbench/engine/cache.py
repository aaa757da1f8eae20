"""A Transformers KV cache with preallocated rows. Knows nothing of trees or drafters.

Slot = position: row s of every layer holds the keys and values of position s. A pass appends its N rows after the
`length` rows kept so far; `keep` then decides which of them stay. One tensor holds all layers of a device, so keeping an
accepted path is one indexed copy of its few rows, whatever the number of layers.

             kept rows          appended by the pass (tree)
    before   0 1 2 ... n-1  |  n+0 n+1 n+2 n+3 n+4        keep([0, 1, 4])
    after    0 1 2 ... n-1     n+0 n+1 n+4 |
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specbench.common.errors import SpecBenchError

STEP = 256  # rows


class CacheLayer(CacheLayerMixin):
    """One layer of a cache, as unforked models ask for it.

    Args:
        cache: has `capacity`, `length` rows kept, `visible(n)` rows that a pass of n tokens attends to, mask permitting,
            and `append(layer, keys, values)`, which writes new rows and returns those.
    """

    is_sliding = False

    def __init__(self, cache: Any, index: int):
        super().__init__()
        self._cache, self._index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True  # the cache allocates when it appends

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self._cache.append(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.visible(query_length), 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return self._cache.capacity


class KVCache(Cache):
    """Keys and values of `layers` layers, `capacity` rows each, for B sequences of equal length.

    Storage is allocated at the first append, with that pass's batch size, heads, head dimension, dtype and device. It grows
    with the sequence: a pass that attends to all of it, masked, should not pay for rows that are never used.

    Args:
        devices: of each layer, for a model spread over several; None: all on one.
        only: layers that ever store something; None: all.

    Attributes:
        length: rows kept, the same in every layer. step: rows by which storage grows.
        storage: device -> keys, values [L on that device, B, H, C, Dh], C rows of which the kept ones are defined.
    """

    def __init__(
        self,
        layers: int,
        capacity: int,
        devices: Sequence[torch.device] | None = None,
        only: Collection[int] | None = None,
    ):
        self.capacity = capacity
        self.layer_count = layers
        self.length = 0
        self.pending = 0
        self.step = STEP
        self.devices = devices
        self.stored: dict[torch.device | None, int] = {}  # layers that store something, by device
        self.index: dict[int, int] = {}  # of those: which of their device's it is
        for layer in sorted(range(layers) if only is None else only):
            device = None if devices is None else devices[layer]
            self.index[layer] = self.stored.get(device, 0)
            self.stored[device] = self.index[layer] + 1
        self.storage: dict[torch.device, tuple[Tensor, Tensor]] = {}
        super().__init__(layers=[CacheLayer(self, i) for i in range(layers)])

    @property
    def empty(self) -> bool:
        """Does it keep no row?"""
        return not self.length

    def visible(self, new: int) -> int:
        return self.length + new

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """All rows of one layer, 2 x [B, H, C, Dh]; defined only up to `length`."""
        device = next(iter(self.storage)) if self.devices is None else self.devices[layer]
        keys, values = self.storage[device]
        return keys[self.index[layer]], values[self.index[layer]]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new rows [B, H, N, Dh] after the kept ones; returns views of kept + new rows."""
        end = self._reserve(key, value, self.stored[None if self.devices is None else key.device])
        keys, values = self.layer(layer)
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def append_all(self, keys: Tensor, values: Tensor) -> None:
        """Write the new rows of all layers [L, B, H, N, Dh], which lie on one device."""
        end = self._reserve(keys[0], values[0], len(keys))
        for stored, new in zip(self.storage[keys.device], (keys, values), strict=True):
            stored[..., self.length : end, :] = new

    def _reserve(self, key: Tensor, value: Tensor, layers: int) -> int:
        """Make room on a device for a pass's new rows, like one layer's [B, H, N, Dh]; returns where they end."""
        self.pending = key.shape[-2]
        end = self.length + self.pending
        if end > self.capacity:
            raise SpecBenchError(
                f"the cache holds {self.capacity} rows but position {end - 1} is needed; "
                "shorten the prompt, lower max_new_tokens or raise model.max_context"
            )
        stored = self.storage.get(key.device)
        if stored is None or end > stored[0].shape[-2]:
            self._grow(end, key, value, layers)
        return end

    def _grow(self, end: int, key: Tensor, value: Tensor, layers: int) -> None:
        """Storage for rows up to `end` on a device."""
        rows = min(self.capacity, -(-end // self.step) * self.step)
        # zeros: rows that a mask hides have weight 0, but 0 * NaN is NaN
        grown = [x.new_zeros(layers, *x.shape[:2], rows, x.shape[-1]) for x in (key, value)]
        for new, old in zip(grown, self.storage.get(key.device, ()), strict=False):
            new[..., : self.length, :] = old[..., : self.length, :]
        self.storage[key.device] = grown[0], grown[1]

    def split_mask(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """A mask over kept and new rows [..., length + N] as one over each, for a pass that reads them apart."""
        return mask[..., : self.length], mask[..., self.length :]

    def keep(self, nodes: Tensor | None = None) -> None:
        """Keep rows of the last pass, in the given order, and drop the others. nodes: [A] of its N; None: all."""
        count = self.pending if nodes is None else nodes.shape[0]
        if nodes is not None and self.pending > 1:  # a lone row is where it belongs
            target = slice(self.length, self.length + count)
            for device, (keys, values) in self.storage.items():
                source = (self.length + nodes).to(device)
                keys[..., target, :] = keys[..., source, :]
                values[..., target, :] = values[..., source, :]
        self.length += count
        self.pending = 0

    def begin(self, capacity: int) -> None:
        """Start a new sequence of at most `capacity` rows; storage of a short one is reused."""
        # Outside inference mode torch forbids writing to tensors that were made in it.
        frozen = any(keys.is_inference() for keys, _ in self.storage.values()) and not torch.is_inference_mode_enabled()
        if frozen or any(keys.shape[-2] > self.step for keys, _ in self.storage.values()):
            self.storage = {}
        self.capacity = max(capacity, self.capacity)
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Drop every row from `length` on; the storage stays."""
        self.length, self.pending = min(length, self.length), 0

    def rows(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, end - start, Dh] of one layer of the first sequence, as views."""
        keys, values = self.layer(layer)
        return keys[0, :, start:end], values[0, :, start:end]

    def static_rows(self) -> "StaticRows":
        """The storage as a compiled pass sees it. Raises `SpecBenchError` unless it lies on one device."""
        if len(self.storage) != 1:
            raise SpecBenchError("backend=compile needs the whole target on one device; use backend=eager")
        ((keys, values),) = self.storage.values()
        for part in (keys, values):  # masked rows have weight 0, but 0 * NaN is NaN
            part[..., self.length :, :] = 0
        return StaticRows(keys, values)

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(k.nbytes + v.nbytes for k, v in self.storage.values())


class StaticRows(Cache):
    """All rows of a cache at once, written in place at `slots` [N], which each pass sets: shapes never change.

    Its mask alone decides which rows a pass attends to.
    """

    length = 0  # as far as the model needs to know

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values
        self.slots: Tensor = keys.new_empty(0)
        self.capacity: int = keys.shape[-2]
        super().__init__(layers=[CacheLayer(self, i) for i in range(keys.shape[0])])

    def visible(self, new: int) -> int:
        return self.capacity

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's rows [1, H, N, Dh] at `slots`; returns all rows."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, self.slots, key)
        values.index_copy_(2, self.slots, value)
        return keys, values

    def of(self, cache: KVCache) -> bool:
        """Is this still that cache's storage?"""
        return any(keys is self.keys for keys, _ in cache.storage.values())
