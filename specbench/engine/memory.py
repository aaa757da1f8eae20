"""What a target and the drafters beside it take, from shapes alone: nothing is fetched, read or allocated for it.

Model and drafters are built on the meta device, where tensors have shapes and no storage. What decoding takes beside their
parameters follows from the shape: the cache, the widest pass (a prompt of `max_context` tokens goes through in one), and
what exists for a moment while a target is loaded and a drafter built. Checked against a process's peak in
`tests/test_memory.py`. Knows no drafter, and no machine: what is free there is the caller's business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specbench.common.errors import SpecBenchError, refusing
from specbench.engine.backends.packed_linear import packable
from specbench.engine.drafter import Outline
from specbench.engine.pretrained import random_model
from specbench.engine.target import SPARE, Target

HEADROOM, LEAST = 0.1, 500_000_000  # of all of it, and at least so many bytes: Python, torch, prompts, rows
FLOAT = 4  # bytes of a float32
SHOWN = 5  # parts that a message names


class NoRoom(SpecBenchError):
    """A target that does not fit, alone or with its drafters: with others it may."""


class Shape(Target):
    """A target on the meta device: everything but numbers."""

    def __init__(self, config: Any, dtype: torch.dtype):
        super().__init__(random_model(config, dtype, torch.device("meta")))

    def _check(self) -> None:
        """There is nothing to run."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on the target's device.

    Attributes:
        weights: each parameter once. loading: beside them while they are read, and while a drafter is built.
        cache: keys and values of `max_context` rows and a tree. passes: states within a prompt's pass, logits of a tree's.
        drafters: by name, parameters of their own and caches.
        copies: of weights laid out for fast products. They are made as far as there is room, so none is needed.
    """

    weights: int
    loading: int = 0
    cache: int = 0
    passes: int = 0
    drafters: Mapping[str, int] = field(default_factory=dict)
    copies: int = 0

    @property
    def later(self) -> int:
        """What is taken once the weights are there, the headroom included."""
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
        found = {"weights": self.weights, **decoding}
        return found | {"headroom": max(int(HEADROOM * sum(found.values())), LEAST)}

    def __str__(self) -> str:
        """The largest parts."""
        largest = sorted(self.parts.items(), key=lambda part: -part[1])
        shown = {name: size for name, size in largest[:SHOWN] if size >= 5e7}
        rest = self.needed - sum(shown.values())
        said = [f"{name} {size / 1e9:.1f}" for name, size in shown.items()]
        return ", ".join(said + [f"other {rest / 1e9:.1f}"] * (rest >= 5e7))


def estimate(
    config: Any,  # Transformers' own
    dtype: torch.dtype,
    device: torch.device,
    max_context: int,
    beside: Sequence[Any] = (),
    lean: bool = True,
    processes: int = 1,
    read: bool = True,
) -> Estimate | None:
    """What a target of this configuration takes, with the drafters `beside` it, not yet bound, and with their caches.

    lean: its products may be made fast. processes: among which its weights are spread. read: from files, not at random.

    Returns:
        None if no target can be made of the configuration, which says why when it is loaded.
    """
    try:
        with refusing("no target can be made of this configuration"):
            shape = Shape(config, dtype)
    except SpecBenchError:
        return None
    rows = min(shape.max_context, max_context) + SPARE
    outlines = [(d.name, outline) for d in beside if (outline := _outline(d, shape)) is not None]
    drafters: dict[str, int] = {}
    for name, outline in outlines:
        drafters[name] = drafters.get(name, 0) + (outline.own + outline.row * rows) * dtype.itemsize
    weights = [p.numel() for p in shape.model.parameters()]
    here = device.type == "cpu"  # where files are read and drafters built
    converted = max(weights) * FLOAT if read and dtype.itemsize < FLOAT else 0  # one tensor at a time, see `tensors.finite`
    return Estimate(
        weights=sum(weights) * dtype.itemsize // processes,
        loading=max([converted, *(outline.building * FLOAT for _, outline in outlines)]) * here,
        cache=cached_numbers(shape) * rows * dtype.itemsize,
        passes=_passes(shape, rows, dtype),
        drafters=drafters,
        copies=_packed(shape) * dtype.itemsize if lean and here and packable(torch.empty(0, dtype=dtype)) else 0,
    )


def cached_numbers(target: Target) -> int:
    """Keys and values that a target's cache holds of one position."""
    c: Any = target.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * target.layers * (getattr(c, "num_key_value_heads", None) or c.num_attention_heads) * int(head_dim)


def _outline(drafter: Any, shape: Shape) -> Outline | None:
    """None of a drafter that cannot be made for this target: binding it says why."""
    try:
        with refusing("this drafter cannot be made for this target"):
            return drafter.outline(shape)
    except SpecBenchError:
        return None


def _passes(shape: Shape, rows: int, dtype: torch.dtype) -> int:
    """States within one layer, of all rows, and a tree's logits, several times as float32. An order of magnitude."""
    c: Any = shape.config
    width = (getattr(c, "intermediate_size", None) or 4 * shape.hidden_size) * getattr(c, "num_experts_per_tok", 1)
    states = rows * (4 * width + 6 * shape.hidden_size) * dtype.itemsize
    masks = 0 if shape.window is None else rows * rows * (1 + dtype.itemsize)  # a sliding window's is written out
    return int(states + masks + SPARE * shape.vocab_size * (dtype.itemsize + 3 * FLOAT))


def _packed(shape: Shape) -> int:
    """Weights of which `optimize_for_inference` may make copies, the head's also where it is tied to the embedding."""
    linears = {id(m): m for part in (shape.decoder, shape.head) for m in part.modules() if type(m) is nn.Linear}
    return sum(m.weight.numel() for m in linears.values())
