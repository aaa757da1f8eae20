"""Products of few rows with frozen weights on a CPU: oneDNN, with the weights laid out for it once.

`F.linear` in float32 is MKL's, which reads weights in their own layout and is slow for the 2 to 64 rows of a tree. Which
is faster for how many rows depends on processor, threads and shape, so both are timed for every shape (`Packing`). Both are
exact to float32 rounding, unless the copy is in a shorter type: then a product's inputs and result are rounded to that.
This is for drafters alone, since a target verifies whatever they draft. Under autograd or autocast, on other devices, on
processors without oneDNN, and where memory does not suffice for the copies, products stay PyTorch's.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
ROWS = (1, 2, 4, 8, 16, 32, 64)  # numbers of rows that are timed; larger numbers count as the last
REPETITIONS = 3  # of which the fastest counts

Timed = dict[tuple[object, ...], tuple[bool, ...]]  # by shape, type and threads: for which of `ROWS` packed is faster


class Packed:
    """A linear layer's product, from packed weights where these are faster. [..., D] -> [..., E]"""

    def __init__(self, weight: Tensor, bias: Tensor | None, packed: Tensor, pays: Sequence[bool]):
        self.weight, self.bias, self.packed = weight, bias, packed
        self.pays = [pays[next((i for i, r in enumerate(ROWS) if r >= rows), -1)] for rows in range(ROWS[-1] + 1)]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if not self.pays[min(rows, ROWS[-1])] or torch.is_grad_enabled() or x.dtype != self.weight.dtype:
            return F.linear(x, self.weight, self.bias)
        return multiply(x, self.packed, self.bias)


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b from packed weights, in their type; the result has that of x."""
    if x.dtype == packed.dtype:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    product = torch.ops.mkldnn._linear_pointwise(x.to(packed.dtype), packed, None, "none", [], "").to(x.dtype)
    return product if bias is None else product.add_(bias)


def pack(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of the weights in oneDNN's own layout. dtype: None, the weights' own."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype or weight.dtype), ROWS[2])


def packable(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Can oneDNN multiply with a copy of these weights on this machine? dtype: of the copy; None: their own."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return (dtype or weight.dtype) == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Packing:
    """Decides which products of a model, and of the drafters bound to it, use packed weights.

    Args:
        timed: measured already; missing shapes are timed and added.
        room: bytes that copies of weights may take now.
        dtype: of the copies, where the processor multiplies in it; None: the weights' own.
    """

    def __init__(
        self,
        timed: Timed | None = None,
        room: Callable[[], float] = lambda: float("inf"),
        dtype: torch.dtype | None = None,
    ):
        self.timed: Timed = {} if timed is None else timed
        self.room, self.dtype = room, dtype

    @torch.no_grad()
    def products(self, layers: Sequence[tuple[Tensor, Tensor | None]]) -> list[Product]:
        """The products of layers of one shape, packed where that is faster. layers: (weight [E, D], bias [E] or None)."""
        plain = [_plain(weight, bias) for weight, bias in layers]
        weights = [weight for weight, _ in layers]
        if not weights or not all(map(packable, weights)):
            return plain
        dtype = self.dtype if self.dtype is not None and packable(weights[0], self.dtype) else weights[0].dtype
        if sum(w.numel() for w in weights) * dtype.itemsize > self.room():
            return plain
        packs = [pack(weight, dtype) for weight in weights]
        key = (tuple(weights[0].shape), weights[0].dtype, dtype, torch.get_num_threads())
        if key not in self.timed:
            self.timed[key] = _time(weights, packs)
        if not any(self.timed[key]):
            return plain
        return [Packed(*layer, packed, self.timed[key]) for layer, packed in zip(layers, packs, strict=True)]

    def optimize(self, modules: Iterable[nn.Module]) -> None:
        """Let the frozen linear layers of these modules multiply by `products`. Their parameters stay as they are."""
        linears = {id(m): m for module in modules for m in module.modules() if type(m) is nn.Linear}
        by_shape: dict[torch.Size, list[nn.Linear]] = {}
        for linear in linears.values():
            if "forward" not in vars(linear) and not hasattr(linear, "joined"):  # neither done yet nor a part of another
                by_shape.setdefault(linear.weight.shape, []).append(linear)
        for layers in by_shape.values():
            for linear, product in zip(layers, self.products([(m.weight, m.bias) for m in layers]), strict=True):
                if isinstance(product, Packed):
                    linear.forward = product  # type: ignore[assignment,method-assign]


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: F.linear(x, weight, bias)


def _time(weights: Sequence[Tensor], packs: Sequence[Tensor]) -> tuple[bool, ...]:
    """For each of `ROWS`: are packed weights faster? One layer after the other, as a forward reads them from memory."""

    def seconds(product: Callable[[Tensor, Tensor], Tensor], parts: Sequence[Tensor]) -> float:
        begin = time.perf_counter()
        for part in parts:
            product(x, part)
        return time.perf_counter() - begin

    faster = []
    for rows in ROWS:
        x = torch.randn(rows, weights[0].shape[1]).to(weights[0])
        tries = [(seconds(F.linear, weights), seconds(multiply, packs)) for _ in range(REPETITIONS)]
        faster.append(min(packed for _, packed in tries) < min(plain for plain, _ in tries))
    return tuple(faster)


@contextmanager
def unpacked(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these modules' linear layers multiply as PyTorch does."""
    changed = {m for module in modules for m in module.modules() if isinstance(vars(m).get("forward"), Packed)}
    products = [(m, vars(m).pop("forward")) for m in changed]
    try:
        yield
    finally:
        for module, product in products:
            module.forward = product
