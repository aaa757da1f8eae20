"""Products of few rows with frozen weights on a CPU: oneDNN, with the weights laid out for it once.

`F.linear` in float32 is MKL's, which reads weights as they lie and is slow for the 2 to 64 rows of a tree. What is
faster, and for how many rows, depends on processor, threads and shape: it is timed for every shape (`Packing`).
A product is exact to float32 rounding either way. Where autograd, autocast or another device is at work, and on
processors that oneDNN does not serve, everything stays as it was; so it does where there is no room for the copies.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
ROWS = (1, 2, 4, 8, 16, 32, 64)  # numbers of rows that are timed; more than the last count as the last
TURNS = 3  # of which the fastest counts

Timed = dict[tuple[object, ...], tuple[bool, ...]]  # by shape, type and threads: for which of `ROWS` packed is faster


def unlimited() -> float:
    return float("inf")


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


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b from packed weights."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def pack(weight: Tensor) -> Tensor:
    """A copy of the weights in oneDNN's own layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS[2])
    return packed


def packable(weight: Tensor) -> bool:
    """Can oneDNN multiply with these weights here?"""
    cpu, plain = weight.device.type == "cpu", weight.dtype in (torch.float32, torch.bfloat16)
    if not (cpu and plain and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Packing:
    """Decides which products of a model, and of the drafters bound to it, use packed weights.

    Args:
        timed: what is known of shapes already; what it lacks is timed and added.
        room: how many bytes copies of weights may take now.
    """

    def __init__(self, timed: Timed | None = None, room: Callable[[], float] = unlimited):
        self.timed: Timed = {} if timed is None else timed
        self.room = room

    @torch.no_grad()
    def products(self, layers: Sequence[tuple[Tensor, Tensor | None]]) -> list[Product]:
        """The products of layers of one shape, packed where that pays. layers: (weight [E, D], bias [E] or None)."""
        plain: list[Product] = [_plain(weight, bias) for weight, bias in layers]
        if not all(packable(weight) for weight, _ in layers) or sum(w.nbytes for w, _ in layers) > self.room():
            return plain
        packs = [pack(weight) for weight, _ in layers]
        pays = self._pays([weight for weight, _ in layers], packs)
        if not any(pays):
            return plain
        return [Packed(weight, bias, packed, pays) for (weight, bias), packed in zip(layers, packs, strict=True)]

    def _pays(self, weights: Sequence[Tensor], packs: Sequence[Tensor]) -> tuple[bool, ...]:
        """See `Timed`."""
        if not weights:
            return ()
        key = (tuple(weights[0].shape), weights[0].dtype, torch.get_num_threads())
        if key not in self.timed:
            self.timed[key] = _timed(weights, packs)
        return self.timed[key]

    def optimize(self, modules: Iterable[nn.Module]) -> None:
        """Let the frozen linear layers of these modules multiply by `products`. Their parameters stay as they are."""
        linears = {id(m): m for module in modules for m in module.modules() if type(m) is nn.Linear}
        by_shape: dict[torch.Size, list[nn.Linear]] = {}
        for linear in linears.values():
            if "forward" not in vars(linear):  # not done yet
                by_shape.setdefault(linear.weight.shape, []).append(linear)
        for alike in by_shape.values():
            for linear, product in zip(alike, self.products([(m.weight, m.bias) for m in alike]), strict=True):
                if isinstance(product, Packed):
                    linear.forward = product  # type: ignore[assignment,method-assign]


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: F.linear(x, weight, bias)


def _timed(weights: Sequence[Tensor], packs: Sequence[Tensor]) -> tuple[bool, ...]:
    """For each of `ROWS`: are packed weights faster? One layer after the other, as a forward reads them from memory."""
    pays = []
    for rows in ROWS:
        x = torch.randn(rows, weights[0].shape[1]).to(weights[0])
        plain, packed = float("inf"), float("inf")
        for _ in range(TURNS):
            begin = time.perf_counter()
            for weight in weights:
                F.linear(x, weight)
            middle = time.perf_counter()
            for pack in packs:
                multiply(x, pack, None)
            plain, packed = min(plain, middle - begin), min(packed, time.perf_counter() - middle)
        pays.append(packed < plain)
    return tuple(pays)


@contextmanager
def unpacked(modules: Iterable[nn.Module]) -> Iterator[None]:
    """These modules' linear layers multiply as PyTorch does meanwhile."""
    changed = [m for module in modules for m in module.modules() if isinstance(vars(m).get("forward"), Packed)]
    kept = [(m, vars(m).pop("forward")) for m in {id(m): m for m in changed}.values()]
    try:
        yield
    finally:
        for module, product in kept:
            module.forward = product
