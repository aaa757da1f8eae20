"""Which parameters are trained, how fast, and by which optimiser, all by their names."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from specbench.common.errors import SpecBenchError
from specbench.engine.tensors import dtype_name
from specbench.training.recipe import TrainSettings

Named = list[tuple[str, nn.Parameter]]


def trainable(module: nn.Module) -> Named:
    """The parameters that require a gradient, by name."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def matches(name: str, pattern: str) -> bool:
    """Does a pattern match a parameter: its name, a prefix of it that ends at a dot, or a shell pattern?"""
    return name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def trained_in(named: Named, patterns: Iterable[str] | None) -> set[str]:
    """Names of the parameters that some pattern matches; of all for None."""
    return {name for name, _ in named if patterns is None or any(matches(name, p) for p in patterns)}


def check(drafter: Any, settings: TrainSettings) -> None:
    """Refuse a recipe that this drafter cannot follow, before anything is trained or written.

    Raises:
        SpecBenchError: nothing to train, or weights in half precision; a phase's option, or a phase's or group's parameter,
            that the drafter lacks.
    """
    named = trainable(drafter)
    if not named:
        raise SpecBenchError("this drafter has nothing to train")
    _check_named(named, settings)
    for phase in settings.phases:
        if unknown := {k: v for k, v in phase.drafter.items() if k not in drafter.phased}:
            drafter.configure(**unknown)  # raises, and names the options that there are


def _check_named(named: Named, settings: TrainSettings) -> None:
    """Raises `SpecBenchError` for weights in half precision, and for a pattern or a phase that trains nothing."""
    if settings.precision == "no" and (dtype := named[0][1].dtype) != torch.float32:
        raise SpecBenchError(
            f"train.settings.precision=no would train weights in {dtype_name(dtype)}, which is too coarse "
            "for updates; set model.dtype=float32, or train.settings.precision=bf16, whose weights are in float32"
        )
    patterns_of: dict[str, Iterable[str]] = {"train.settings.groups": settings.groups}
    for number, phase in enumerate(settings.phases):
        option = f"train.settings.phases[{number}].train"
        if phase.train is not None and not phase.train:
            raise SpecBenchError(f"{option}: nothing is trained; leave it out to train everything")
        patterns_of[option] = phase.train or ()
    for option, patterns in patterns_of.items():
        for pattern in patterns:
            if not trained_in(named, [pattern]):
                tops = ", ".join(dict.fromkeys(name.split(".")[0] for name, _ in named))
                raise SpecBenchError(f"{option}: `{pattern}` is none of this drafter's parameters; they begin with {tops}")


def optimizer(named: Named, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW, with one group for each pair of a factor on the learning rate and a weight decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        factor = next((f for pattern, f in settings.groups.items() if matches(name, pattern)), 1.0)
        decay = settings.weight_decay if settings.decay_vectors or parameter.ndim > 1 else 0.0
        groups.setdefault((factor, decay), []).append(parameter)
    options = [{"params": p, "lr": settings.lr * factor, "weight_decay": decay} for (factor, decay), p in groups.items()]
    return torch.optim.AdamW(options, settings.lr, settings.betas, fused=True)
