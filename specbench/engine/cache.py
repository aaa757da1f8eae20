"""A Transformers KV cache with preallocated rows. Knows nothing of trees or drafters.

Slot = position: row s of every layer holds the keys and values of position s. A pass appends its N rows after the
`length` rows kept so far; `keep` then decides which of them stay. One tensor holds all layers, so keeping an accepted
path is one indexed copy of its few rows, whatever the number of layers.

             kept rows          appended by the pass (tree)
    before   0 1 2 ... n-1  |  n+0 n+1 n+2 n+3 n+4        keep([0, 1, 4])
    after    0 1 2 ... n-1     n+0 n+1 n+4 |
"""

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specbench.errors import SpecBenchError


class _Layer(CacheLayerMixin):
    """One layer's window onto the shared storage; the interface that unforked models talk to."""

    is_sliding = False

    def __init__(self, cache: "KVCache", index: int):
        super().__init__()
        self._cache, self._index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._cache.allocate(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self._cache.append(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return self._cache.capacity


class KVCache(Cache):
    """Keys and values of `layers` layers, `capacity` rows each, for B sequences of equal length.

    Storage is taken at the first append, with that pass's batch size, heads, head dimension, dtype and device.

    Attributes:
        length: rows kept, the same in every layer.
        keys, values: [L, B, H, S, Dh] once allocated.
    """

    def __init__(self, layers: int, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.pending = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        super().__init__(layers=[_Layer(self, i) for i in range(layers)])

    def allocate(self, key: Tensor, value: Tensor) -> None:
        """Take storage shaped after one layer's [B, H, N, Dh] keys and values."""
        batch, heads, _, dim = key.shape
        layers = len(self.layers)
        self.keys = key.new_empty(layers, batch, heads, self.capacity, dim)
        self.values = value.new_empty(layers, batch, heads, self.capacity, value.shape[-1])

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new rows [B, H, N, Dh] after the kept ones; returns views of kept + new rows."""
        if self.keys is None or self.values is None:
            self.allocate(key, value)
        assert self.keys is not None and self.values is not None
        self.pending = key.shape[-2]
        end = self.length + self.pending
        if end > self.capacity:
            raise SpecBenchError(
                f"the cache holds {self.capacity} rows but position {end - 1} was asked for; "
                "shorten the prompt, lower max_new_tokens or raise model.max_context"
            )
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def keep(self, nodes: Tensor | None = None) -> None:
        """Keep rows of the last pass, in the given order, and drop the others. nodes: [A] of its N; None: all."""
        count = self.pending if nodes is None else nodes.shape[0]
        if nodes is not None and self.keys is not None and self.values is not None:
            source, target = self.length + nodes, slice(self.length, self.length + count)
            self.keys[..., target, :] = self.keys[..., source, :]
            self.values[..., target, :] = self.values[..., source, :]
        self.length += count
        self.pending = 0

    def begin(self, capacity: int) -> None:
        """Start a new sequence of at most `capacity` rows; storage that is large enough is used again."""
        if capacity > self.capacity:
            self.capacity, self.keys, self.values = capacity, None, None
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on; the storage stays."""
        self.length, self.pending = min(length, self.length), 0

    def rows(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, end - start, Dh] of one layer of the first sequence, as views."""
        assert self.keys is not None and self.values is not None
        return self.keys[layer, 0, :, start:end], self.values[layer, 0, :, start:end]

    def select_sequences(self, rows: Tensor) -> None:
        """Go on with some of the B sequences only. rows: [B'] indices."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    @property
    def nbytes(self) -> int:
        """Bytes of storage taken."""
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes
