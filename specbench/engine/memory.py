"""Memory of a target and its drafters, from shapes alone: nothing is fetched, read or allocated for it.

Model and drafters are built on the meta device, where tensors have shapes and no storage. The rest follows from the shape:
the cache, the widest pass (a prompt of `max_context` tokens), and what loading the target and building a drafter take for a
moment. Checked against a process's peak in `tests/engine/test_memory.py`. Knows no drafter, and no machine's free memory.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from specbench.common.errors import SpecBenchError, refusing
from specbench.engine.backends import forwards, fused_llama
from specbench.engine.backends.packed_linear import packable
from specbench.engine.model_files import heads_of
from specbench.engine.pretrained import random_model
from specbench.engine.target import SPARE, Target

HEADROOM, MIN_HEADROOM = 0.1, 500_000_000  # share of the rest, bytes: Python, torch, prompts, rows
FLOAT = 4  # bytes of a float32
T = TypeVar("T")
SHOWN = 5  # parts in a message


class NoRoom(SpecBenchError):
    """A target that does not fit, alone or with its drafters: with other drafters it may."""


class Shape(Target):
    """A target on the meta device, whose tensors have no values."""

    def __init__(self, config: Any, dtype: torch.dtype):
        self.written = config.dtype  # in the checkpoint
        super().__init__(random_model(copy.deepcopy(config), dtype, torch.device("meta")))

    def _check(self) -> None:
        """There is nothing to run."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on the target's device.

    Attributes:
        weights: each parameter once. loading: besides them while they are read, and while a drafter is built.
        cache: keys and values of `max_context` rows and a tree. passes: states within a prompt's pass, logits of a tree's.
        drafters: by name, parameters of their own and caches.
        copies: packed weights, made only as far as memory suffices, so not `needed`.
    """

    weights: int
    loading: int = 0
    cache: int = 0
    passes: int = 0
    drafters: Mapping[str, int] = field(default_factory=dict)
    copies: int = 0

    @property
    def later(self) -> int:
        """What is allocated once the weights are there, the headroom included."""
        return self.needed - self.weights

    @property
    def needed(self) -> int:
        """All that must fit at once."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """By name. Loading is over when decoding begins, so the larger of both counts."""
        decoding = {"cache": self.cache, "activations": self.passes, **self.drafters}
        if self.loading > sum(decoding.values()):
            decoding = {"loading": self.loading}
        parts = {"weights": self.weights, **decoding}
        return parts | {"headroom": max(int(HEADROOM * sum(parts.values())), MIN_HEADROOM)}

    def __str__(self) -> str:
        """The largest parts."""
        largest = sorted(self.parts.items(), key=lambda part: -part[1])
        shown = {name: size for name, size in largest[:SHOWN] if size >= 5e7}
        rest = self.needed - sum(shown.values())
        named = [f"{name} {size / 1e9:.1f}" for name, size in shown.items()]
        return ", ".join(named + [f"other {rest / 1e9:.1f}"] * (rest >= 5e7))


def estimate(
    config: Any,  # Transformers' own
    dtype: torch.dtype,
    device: torch.device,
    max_context: int,
    beside: Sequence[Any] = (),
    fused: bool = True,
    processes: int = 1,
    read: bool = True,
    sequences: int = 1,
    quantised: str | None = None,
    bfloat16_drafts: bool = False,
) -> Estimate | None:
    """Memory of a target of this configuration and of unbound drafters `beside` it; None if it cannot be built.

    fused: products may be packed. processes: among which its weights are spread. read: weights come from files, not random.
    sequences: decoded together. quantised: see `backends.weight_only`; the rounded weights are held as floats, too.
    bfloat16_drafts: drafters multiply in bfloat16, with a copy of the head.
    """
    if (shape := _unless_refused(lambda: Shape(config, dtype))) is None:
        return None
    rows = min(shape.max_context, max_context) + SPARE
    outlined = [(d.name, _unless_refused(partial(d.outline, shape))) for d in beside]
    outlines = [(name, outline) for name, outline in outlined if outline is not None]
    drafters: dict[str, int] = {}
    for name, outline in outlines:
        drafters[name] = drafters.get(name, 0) + (outline.own + outline.row * rows * sequences) * dtype.itemsize
    weights = [p.numel() for p in shape.model.parameters()]
    here = device.type == "cpu"  # where files are read and drafters built
    copies = _copied(shape, dtype, quantised) if fused and here and packable(torch.empty(0, dtype=dtype)) else 0
    if copies and bfloat16_drafts and dtype == torch.float32:
        copies += shape.head.weight.numel() * torch.bfloat16.itemsize
    converted = max(weights) * FLOAT if read and dtype.itemsize < FLOAT else 0  # one tensor at a time, see `tensors.finite`
    return Estimate(
        weights=sum(weights) * dtype.itemsize // processes,
        loading=max([converted, *(outline.building * FLOAT for _, outline in outlines)]) * here,
        cache=cached_numbers(shape) * rows * sequences * dtype.itemsize,
        passes=_passes(shape, rows, dtype, sequences),
        drafters=drafters,
        copies=copies,
    )


def together(alone: Sequence[Estimate]) -> Estimate:
    """Of one target and all drafters of some estimates, each of which is of this target and its own drafters."""
    drafters: dict[str, int] = {}
    for one in alone:
        for name, size in one.drafters.items():
            drafters[name] = drafters.get(name, 0) + size
    return replace(alone[0], loading=max(one.loading for one in alone), drafters=drafters)


def groups(alone: Sequence[Estimate], free: int) -> list[list[int]]:
    """Indices of estimates of one target, in groups that fit into `free` bytes together; each in the first with room.

    What does not fit alone is in no group.
    """
    found: list[list[int]] = []
    for index, one in enumerate(alone):
        if one.needed > free:
            continue
        fits = (group for group in found if together([*(alone[i] for i in group), one]).needed <= free)
        group = next(fits, None)
        if group is None:
            found.append(group := [])
        group.append(index)
    return found


def cached_numbers(target: Target) -> int:
    """Numbers that a target's cache stores per position."""
    _, heads, head_dim = heads_of(target.config)
    return 2 * target.layers * heads * head_dim


def _unless_refused(make: Callable[[], T]) -> T | None:
    """What is made; None of what cannot be: loading or binding it raises the reason."""
    try:
        with refusing("it cannot be made"):
            return make()
    except SpecBenchError:
        return None


def _passes(shape: Shape, rows: int, dtype: torch.dtype, sequences: int) -> int:
    """Bytes of all rows' states within one layer, and of each sequence's tree logits, several times as float32; roughly."""
    c: Any = shape.config
    width = (getattr(c, "intermediate_size", None) or 4 * shape.hidden_size) * getattr(c, "num_experts_per_tok", 1)
    states = rows * (4 * width + 6 * shape.hidden_size) * dtype.itemsize
    masks = 0 if shape.window is None else rows * rows * (1 + dtype.itemsize)  # a sliding window's is written out
    return int(states + masks + sequences * SPARE * shape.vocab_size * (dtype.itemsize + 3 * FLOAT))


def _copied(shape: Shape, dtype: torch.dtype, quantised: str | None) -> int:
    """Bytes of the copies that `optimize_for_inference` may make, of the head also where it is tied to the embedding."""
    decoder = {id(m): m for m in shape.decoder.modules() if type(m) is nn.Linear}
    head = shape.head.weight.numel()
    numbers = sum(m.weight.numel() for m in decoder.values())
    if dtype == torch.float32 and forwards.has_openvino() and fused_llama.like_llama(shape.decoder):
        halves = shape.written in (torch.bfloat16, "bfloat16")
        return forwards.openvino_bytes(numbers, head, quantised, halves) + head * FLOAT
    return (numbers + head) * dtype.itemsize
