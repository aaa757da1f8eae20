"""Which parameters are trained, how fast, and by which optimiser: all by their names. Knows no drafter."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import nn

from specbench.common.errors import SpecBenchError
from specbench.training.recipe import TrainSettings

Named = list[tuple[str, nn.Parameter]]


def matches(name: str, pattern: str) -> bool:
    """Is a parameter meant: by its name, a prefix that ends at a dot, or a shell pattern?"""
    return name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def trained_in(named: Named, patterns: Iterable[str] | None) -> set[str]:
    """Names of the parameters that some pattern means, all for None."""
    return {name for name, _ in named if patterns is None or any(matches(name, p) for p in patterns)}


def check(named: Named, settings: TrainSettings) -> None:
    """Raises `SpecBenchError` for a pattern of a group or a phase that means no parameter, and where nothing is trained."""
    named_patterns: list[tuple[str, Iterable[str]]] = [("train.settings.groups", settings.groups)]
    for number, phase in enumerate(settings.phases):
        place = f"train.settings.phases[{number}].train"
        if phase.train is not None and not phase.train:
            raise SpecBenchError(f"{place}: nothing is trained; leave it out to train everything")
        named_patterns.append((place, phase.train or ()))
    for place, patterns in named_patterns:
        for pattern in patterns:
            if not trained_in(named, [pattern]):
                tops = ", ".join(dict.fromkeys(name.split(".")[0] for name, _ in named))
                raise SpecBenchError(f"{place}: `{pattern}` is none of this drafter's parameters; they begin with {tops}")


def optimizers(named: Named, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices and AdamW for the rest. Every factor of `groups` has parameter groups of its own."""
    if settings.optimizer == "adamw":
        adamw = _groups(named, settings, settings.lr)
        return [torch.optim.AdamW(adamw, settings.lr, settings.betas, weight_decay=settings.weight_decay, fused=True)]
    matrices, vectors = [n for n in named if n[1].ndim == 2], [n for n in named if n[1].ndim != 2]
    muon = _groups(matrices, settings, settings.lr)
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(torch.optim.Muon(muon, settings.lr, weight_decay=settings.weight_decay, momentum=0.95))
    if vectors:
        adamw = _groups(vectors, settings, settings.vector_lr)
        found.append(torch.optim.AdamW(adamw, settings.vector_lr, settings.betas, weight_decay=0.0, fused=True))
    return found


def _groups(named: Named, settings: TrainSettings, lr: float) -> list[dict[str, object]]:
    by_factor: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named:
        factor = next((f for pattern, f in settings.groups.items() if matches(name, pattern)), 1.0)
        by_factor.setdefault(factor, []).append(parameter)
    return [{"params": parameters, "lr": lr * factor} for factor, parameters in by_factor.items()]
