"""A Transformers KV cache with preallocated rows. Knows no drafter.

Slot = position: row s of every layer holds the keys and values of position s. A pass appends its N rows after the
`length` rows kept so far; `keep` then decides which of them stay. One tensor holds all layers of a device, so keeping an
accepted path is one indexed copy of its few rows, whatever the number of layers.

             kept rows          appended by the pass (tree)
    before   0 1 2 ... n-1  |  n+0 n+1 n+2 n+3 n+4        keep([0, 1, 4])
    after    0 1 2 ... n-1     n+0 n+1 n+4 |
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specbench.common.errors import SpecBenchError
from specbench.engine.interface import LayerRows

STEP = 256  # rows
BUCKET = 512  # rows of the smallest pass of fixed shapes


class CacheLayer(CacheLayerMixin):
    """One layer of a cache, as Transformers' own models ask for it.

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
        allocations: how often storage was allocated, on any device.
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
        self.allocations = 0
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
                "shorten the prompt, lower decode.max_new_tokens or raise model.max_context"
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
        self.allocations += 1

    def reserve(self, new: int) -> None:
        """Make room for a pass of so many rows, where something is stored already. Raises as `append`."""
        for keys, values in list(self.storage.values()):
            self._reserve(keys[0, ..., :new, :], values[0, ..., :new, :], len(keys))

    def key_positions(self, positions: Tensor) -> Tensor:
        """Positions of kept and new rows, given those of the new ones. [B, N] -> [B, length + N]"""
        kept = torch.arange(self.length, device=positions.device)  # slot = position
        return torch.cat([kept.expand(len(positions), -1), positions], 1)

    def split_mask(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """A mask over kept and new rows [..., length + N] as one over each, for a pass that reads them apart."""
        return mask[..., : self.length], mask[..., self.length :]

    def draft_inputs(self, tokens: Tensor, depth: int, visible: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """Positions [F] and mask [F, before + R] of F tokens at one depth of a draft, for a pass behind this cache.

        visible: [F, R] bool. before: rows before the draft's, the root's the last; all of the F see them.
        """
        positions = torch.full_like(tokens, before + depth - 1)
        return positions, torch.cat([visible.new_ones(len(tokens), before), visible], 1)

    def keep(self, nodes: Tensor | None = None) -> None:
        """Keep rows of the last pass, in the given order, and drop the others. nodes: [A] of its N; None: all."""
        if nodes is not None and self.pending > 1:  # a lone row is where it belongs
            target = slice(self.length, self.length + len(nodes))
            for device, (keys, values) in self.storage.items():
                source = (self.length + nodes).to(device)
                for rows in (keys, values):  # indexing would start several threads on a CPU, `index_select` does not
                    rows[..., target, :] = rows.index_select(-2, source)
        self.advance(self.pending if nodes is None else len(nodes))

    def move(self, nodes: Tensor, at: Tensor) -> None:
        """Put rows behind the `at` [1] kept ones in the order of `nodes` [K], in fixed shapes and on one device."""
        places = at + torch.arange(len(nodes), device=at.device)
        for keys, values in self.storage.values():
            keys.index_copy_(-2, places, keys.index_select(-2, at + nodes))
            values.index_copy_(-2, places, values.index_select(-2, at + nodes))

    def advance(self, count: int) -> None:
        """Keep the first `count` rows of the last pass, which lie where they belong."""
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

    def rows_of(self, layers: Sequence[int], start: int, end: int) -> Mapping[int, tuple[Tensor, Tensor]]:
        """`rows` of several layers, in rising order; of those that lie side by side as views of one tensor."""
        index = [self.index[layer] for layer in layers]
        if self.devices is not None or not layers or index != list(range(index[0], index[-1] + 1)):
            return {layer: self.rows(layer, start, end) for layer in layers}
        keys, values = (x[index[0] : index[-1] + 1, 0, :, start:end] for x in self.storage[next(iter(self.storage))])
        return LayerRows(layers, keys, values)

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(k.nbytes + v.nbytes for k, v in self.storage.values())


class FixedRows(Cache):
    """The first `capacity` rows of a cache, as a pass of fixed shapes sees them, whatever the cache keeps.

    The pass writes its N rows at `at + arange(N)` and is given all rows; its mask alone decides which it attends to.

    Args:
        cache: on one device, with room for the pass. at: [1] rows that are kept, on that device. new: rows of the pass.
    """

    length, empty = 0, False  # of no use here: the mask alone says which rows a token sees

    def __init__(self, cache: KVCache, capacity: int, at: Tensor, new: int):
        self.cache, self.capacity, self.at, self.new = cache, capacity, at, new
        self.slots = at + torch.arange(new, device=at.device)
        super().__init__(layers=[CacheLayer(self, i) for i in range(cache.layer_count)])

    def visible(self, new: int) -> int:
        return self.capacity

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new rows [B, H, N, Dh]; returns views of all rows [B, H, C, Dh]."""
        keys, values = self.cache.layer(layer)
        keys.index_copy_(2, self.slots, key)
        values.index_copy_(2, self.slots, value)
        return keys[:, :, : self.capacity], values[:, :, : self.capacity]

    def mask(self, ancestors: Tensor, real: Tensor) -> Tensor:
        """What each node attends to: what is kept, and its ancestors; padding to itself alone. -> [1, 1, N, C] bool

        ancestors: [N, N] bool. real: [N] bool, False for padding.
        """
        column, node, own = self._columns()
        below = ancestors.index_select(1, node) & own
        return ((column < self.at) & real[:, None] | below)[None, None]

    def key_positions(self, positions: Tensor) -> Tensor:
        """Positions of all rows, given those of the new ones. [1, N] -> [1, C]"""
        column, node, own = self._columns()
        return torch.where(own, positions.index_select(1, node), column)

    def _columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row: its index, the new row that it is, and whether it is one. 3 x [C]"""
        column = torch.arange(self.capacity, device=self.at.device)
        node = column - self.at
        return column, node.clamp(0, self.new - 1), (node >= 0) & (node < self.new)


class DraftRows(FixedRows):
    """The same for the levels of a draft, each of which writes its rows behind those of the levels above.

    `at` is the number of rows before the first level's. It stands in for a `KVCache` in `append`, `keep`, `rows` and
    `draft_inputs`.
    """

    def __init__(self, cache: KVCache, capacity: int, at: Tensor):
        super().__init__(cache, capacity, at, 0)
        self.written = 0  # rows of the levels above

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.new = key.shape[-2]
        self.slots = self.at + torch.arange(self.written, self.written + self.new, device=self.at.device)
        return super().append(layer, key, value)

    def keep(self) -> None:
        self.written += self.new

    def rows(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """All rows, 2 x [H, C, Dh], whatever is asked for: the mask decides."""
        keys, values = self.cache.layer(layer)
        return keys[0, :, : self.capacity], values[0, :, : self.capacity]

    def draft_inputs(self, tokens: Tensor, depth: int, visible: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """As `KVCache.draft_inputs`, but with a mask [F, C], and `at` rows before the draft's, whatever `before` says."""
        self.new = visible.shape[1]
        real = visible.new_ones(len(tokens))
        mask = self.mask(visible, real)[0, 0] if self.new else (self._columns()[0] < self.at).expand(len(tokens), -1)
        return (self.at + (depth - 1)).expand(len(tokens)), mask


def bucket(rows: int) -> int:
    """The capacity of a pass that needs so many rows: 512, 1024, 2048, ..."""
    return BUCKET << max(0, (-(-rows // BUCKET) - 1).bit_length())
